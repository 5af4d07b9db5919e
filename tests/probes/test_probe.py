"""The probe in a plain loop: right values, nothing touched, bad input named, time kept, runs resumed."""

import copy
import json
import math
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope.probes import EveryEpochs, LossGrid, Probe, Record, View, metric, read_records, register
from biascope.probes.figures import plot_records
from biascope.probes.metrics import REGISTER
from biascope.support.errors import CorruptError, InputError, UnsupportedError
from probes.probe_zoo import batch, jacobian_rows, mlp

X, Y = batch(12)
EVERYTHING = [name for name in REGISTER if name != "fourier"]


def train(net: nn.Module, probe: Probe | None, steps: int, lr: float = 0.5, start: int = 0) -> list[nn.Module]:
    """Full-batch gradient descent; gives the network after every step."""
    seen = []
    sgd = torch.optim.SGD(net.parameters(), lr=lr)
    for s in range(start, start + steps):
        loss = F.cross_entropy(net(X.to(next(net.parameters()).dtype)), Y)
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        seen.append(copy.deepcopy(net))
        if probe is not None:
            probe.step(loss, step=s + 1)
    return seen


# ------------------------------------------------------------------------------------------------------- the values


def test_records_equal_metrics_computed_afterwards() -> None:
    net = mlp(3, 6, 2)
    start = copy.deepcopy(net)
    probe = Probe(net, X, Y, EVERYTHING, schedule=3, max_overhead=None, groups={"a": range(4), "b": range(4, 12)})
    seen = train(net, probe, 7)
    records = probe.finish()
    assert [r.step for r in records] == [0, 3, 6, 7]
    first = View.of(start, X, Y, by_layer=True)
    for record in records[1:]:
        view = View.of(seen[record.step - 1], X, Y, init=first, by_layer=True)
        for name in ("ntk_alignment", "label_alignment", "layer_alignment", "effective_rank", "linearisation_error"):
            for key, value in metric(name)(view).items():
                assert record[key] == pytest.approx(value, rel=1e-9), key
    assert set(records[1].values) >= {"group_losses/a/loss", "complexity", "input_velocity/distance", "spectrum/1"}
    assert records[0]["ntk_alignment"] == pytest.approx(1.0)
    assert not any(r.failed for r in records)


def test_complexity_between_measurements_and_over_all_steps() -> None:
    net = mlp(3, 6, 2)
    points = [copy.deepcopy(net)]
    probe = Probe(net, X, Y, ["complexity", "path_complexity"], schedule=4, max_overhead=None)
    points += train(net, probe, 8)
    flat = [torch.cat([p.detach().reshape(-1) for p in m.parameters()]) for m in points]
    norms = {t: float(jacobian_rows(points[t], X).norm()) for t in (0, 4)}
    ends = sum(float((flat[t + 4] - flat[t]).norm()) * norms[t] for t in (0, 4))
    path = sum(float((flat[t + 1] - flat[t]).norm()) * norms[t - t % 4] for t in range(8))
    last = probe.records[-1]
    assert last["complexity"] == pytest.approx(ends, rel=1e-9)
    assert last["path_complexity"] == pytest.approx(path, rel=1e-9)
    assert last["path_complexity"] > last["complexity"]  # the triangle inequality


def test_velocity_goes_from_measurement_to_measurement() -> None:
    net = mlp(3, 6, 2)
    probe = Probe(net, X, Y, ["kernel_velocity", "input_velocity"], schedule=2, max_overhead=None)
    seen = train(net, probe, 4)
    before, after = View.of(seen[1], X, Y, step=2), View.of(seen[3], X, Y, step=4)
    after.previous = before
    for name in ("kernel_velocity", "input_velocity"):
        for key, value in metric(name)(after).items():
            assert probe.records[-1][key] == pytest.approx(value, rel=1e-6)
    assert probe.records[0].values == {}


def test_own_metrics_see_the_view() -> None:
    net = mlp(3, 4, 2)

    def largest_output(view: View) -> Tensor:
        return view.outputs.abs().max()

    probe = Probe(net, X, metrics=[largest_output], schedule=1, max_overhead=None)
    train(net, probe, 2)
    assert probe.records[-1]["largest_output"] == pytest.approx(float(net(X).abs().max()))


def test_lazy_and_linearised_networks() -> None:
    """At alpha = 100 the linearity measures stay near 1 and below that for alpha = 1 (spec 05, checks 26 and 35)."""
    net = mlp(3, 16, 16, 2, act=nn.ReLU)
    names = ["ntk_alignment", "sign_similarity", "representation_alignment", "group_losses"]
    ends = {}
    for kind, model, lr in [
        ("plain", copy.deepcopy(net), 0.5),
        ("alpha 1", bs.lazy(net, 1.0), 0.5),
        ("alpha 100", bs.lazy(net, 100.0), bs.tangent.lazy_lr(0.5, 100.0)),
        ("tangent", bs.linearize(net), 0.5),
    ]:
        probe = Probe(model, X, Y, names, schedule=40, max_overhead=None)
        train(model, probe, 40, lr)
        assert probe.records[0]["ntk_alignment"] == pytest.approx(1.0)
        assert probe.records[0]["sign_similarity"] == 1.0
        ends[kind] = probe.records[-1]
        assert ends[kind]["group_losses/all/loss"] == pytest.approx(float(F.cross_entropy(model(X), Y)), rel=1e-9)
    assert ends["alpha 1"].values == pytest.approx(ends["plain"].values)
    assert ends["alpha 100"]["ntk_alignment"] > 0.99 > ends["plain"]["ntk_alignment"]
    assert ends["alpha 100"]["sign_similarity"] > 0.97 > ends["plain"]["sign_similarity"]
    assert ends["tangent"]["sign_similarity"] == 1.0
    assert ends["tangent"]["ntk_alignment"] == pytest.approx(1.0)
    assert ends["tangent"]["group_losses/all/loss"] == pytest.approx(
        ends["alpha 100"]["group_losses/all/loss"], rel=0.1
    )


# ------------------------------------------------------------------------------------------------ nothing is touched


class Noisy(nn.Module):
    """BatchNorm and dropout, both active in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.drop, self.b = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(F.relu(self.norm(self.a(x)))))


def test_training_is_the_same_with_and_without_a_probe() -> None:
    def run(probed: bool) -> tuple[list[Tensor], Tensor, float]:
        torch.manual_seed(3)
        random.seed(3)
        net = Noisy().train()
        options = {"schedule": 1, "max_overhead": None}
        probe = Probe(net, X.float(), Y, EVERYTHING, **options) if probed else None
        train(net, probe, 4)
        return [*net.state_dict().values()], torch.rand(3), random.random()

    plain, probed = run(False), run(True)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], probed[0]))
    assert torch.equal(plain[1], probed[1])
    assert plain[2] == probed[2]


def test_modes_gradients_flags_and_hooks_stay() -> None:
    net = Noisy().train()
    net.drop.eval()
    net.a.bias.requires_grad_(False)
    F.cross_entropy(net(X.float()), Y).backward()
    grads = {k: None if p.grad is None else p.grad.clone() for k, p in net.named_parameters()}
    modes = {k: m.training for k, m in net.named_modules()}
    state = {k: v.clone() for k, v in net.state_dict().items()}
    attributes = {k: set(m.__dict__) for k, m in net.named_modules()}
    probe = Probe(net, X.float(), Y, EVERYTHING, max_overhead=None)
    probe.measure(0.3)
    assert {k: m.training for k, m in net.named_modules()} == modes
    assert {k: set(m.__dict__) for k, m in net.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert not net.a.bias.requires_grad
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    for k, p in net.named_parameters():
        assert (p.grad is None) == (grads[k] is None)
        assert p.grad is None or torch.equal(p.grad, grads[k])


def test_measures_in_eval_mode_and_says_so() -> None:
    net = Noisy().train()
    probe = Probe(net, X.float(), Y, ["group_losses"], max_overhead=None)
    assert probe.notes == (
        "BatchNorm1d 'norm': probes evaluate with its running statistics (eval mode)",
        "Dropout 'drop' (p=0.5): probes evaluate without dropout",
    )
    assert "without dropout" in repr(probe)
    quiet = copy.deepcopy(net).eval()
    expected = float(F.cross_entropy(quiet(X.float()), Y))
    assert probe.records[0]["group_losses/all/loss"] == pytest.approx(expected, rel=1e-6)


def test_works_inside_no_grad_inference_mode_and_autocast() -> None:
    net = mlp(3, 5, 2).float()
    probe = Probe(net, X.float(), Y, ["ntk_alignment", "input_velocity", "label_alignment"], max_overhead=None)
    with torch.no_grad():
        one = probe.measure()
    with torch.inference_mode():
        two = probe.measure()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        three = probe.measure()
    assert one.values == pytest.approx(two.values, abs=1e-6, nan_ok=True)
    assert one["label_alignment"] == three["label_alignment"] == probe.records[0]["label_alignment"]


def test_compiled_wrapper_is_looked_through() -> None:
    class Compiled(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self._orig_mod = net

    net = mlp(3, 4, 2)
    assert Probe(Compiled(net), X, Y, ["effective_rank"]).model is net


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Probe(nn.ReLU(), X, Y), InputError, "ReLU has no parameters"),
        (lambda: Probe(lambda x: x, X), InputError, "expected an nn.Module, got function"),
        (lambda: Probe(nn.LazyLinear(2), X, Y), ValueError, "uninitialized parameter"),
        (lambda: Probe(mlp(3, 2), X[:0]), InputError, "x_probe is empty"),
        (lambda: Probe(mlp(3, 2), X.to("meta")), InputError, r"x_probe is on meta, the model on cpu.*\.to\('cpu'\)"),
        (lambda: Probe(mlp(3, 2), X, Y.to("meta")), InputError, "y_probe is on meta"),
        (
            lambda: Probe(mlp(3, 2), X, Y, groups={"t": (X, Y.to("meta"))}),
            InputError,
            r"groups\['t'\] is on meta",
        ),
        (lambda: Probe(mlp(3, 2), X, Y[:3]), InputError, r"expected a tensor of 12 labels, got \[3\]"),
        (lambda: Probe(mlp(3, 2), X, metrics=["label_alignment"]), InputError, "label_alignment need labels"),
        (lambda: Probe(mlp(3, 2), X, metrics=["layer_alignment"]), InputError, "layer_alignment: .*needs labels"),
        (lambda: Probe(mlp(3, 2), X, Y, ["ntk_aligment"]), InputError, "did you mean ntk_alignment"),
        (lambda: Probe(mlp(3, 2), X, Y, max_overhead=2.0), InputError, "max_overhead=2.0"),
        (lambda: Probe(mlp(3, 2), X, Y, ["sign_similarity"]), InputError, "no activation"),
        (lambda: Probe(mlp(3, 2), X / 0, Y), InputError, "x_probe has a NaN or infinity"),
        (
            lambda: Probe(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False)), X.float(), Y),
            UnsupportedError,
            "BatchNorm1d '1' keeps no running statistics",
        ),
    ],
)
def test_bad_input_is_named(make: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()  # type: ignore[operator]


def test_random_networks_are_refused_and_cost_no_random_numbers() -> None:
    class Always(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.a(x), 0.5, training=True)

    net, before = Always(), torch.random.get_rng_state()
    with pytest.raises(UnsupportedError, match="different outputs for the same inputs in eval mode"):
        Probe(net, X.float(), Y, ["parameter_distance"])
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_metric_that_needs_train_mode_is_refused() -> None:
    with pytest.raises(InputError, match=r"needs\[0\]='train' is not known; there is group labels"):
        register(needs=["train"], name="batch_statistics")


def test_bad_losses_and_steps() -> None:
    probe = Probe(mlp(3, 2), X, Y, ["effective_rank"], schedule=LossGrid(), max_overhead=None)
    with pytest.raises(InputError, match="the loss is nan at step 1"):
        probe.step(torch.tensor(math.nan))
    with pytest.raises(InputError, match="LossGrid goes by the loss"):
        probe.step()
    with pytest.raises(InputError, match=r"loss=a tensor of shape \[3\]: one number is needed"):
        probe.step(torch.ones(3))
    probe.step(0.5, step=7)
    with pytest.raises(InputError, match="step=3 after step 7"):
        probe.step(0.4, step=3)
    probe.finish()
    with pytest.raises(InputError, match="finished"):
        probe.step(0.1)
    by_steps = Probe(mlp(3, 2), X, Y, ["effective_rank"], schedule=2, max_overhead=None)
    by_steps.step(math.inf)  # not read: nothing is due
    with pytest.raises(InputError, match="the loss is inf at step 2"):
        by_steps.step(math.inf)


def test_a_changed_network_is_named() -> None:
    net = mlp(3, 4, 2)
    probe = Probe(net, X, Y, ["effective_rank"], max_overhead=None)
    net.add_module("extra", nn.Linear(2, 2))
    with pytest.raises(InputError, match=r"the model and the network the probe was made with differ in 'extra\.bias'"):
        probe.measure()


def test_a_dead_network_does_not_end_its_training() -> None:
    net = mlp(3, 4, 2, act=nn.ReLU)
    probe = Probe(net, X, Y, ["label_alignment", "parameter_distance"], schedule=1, max_overhead=None)
    with torch.no_grad():
        net[0].bias.fill_(-1e9)
        net[2].weight.zero_()
    with pytest.warns(UserWarning, match="label_alignment has no value at step 1: a kernel is zero after centring"):
        record = probe.step(0.5)
    assert record is not None
    assert "zero after centring" in record.failed["label_alignment"]
    assert record["parameter_distance/absolute"] > 1e8
    assert math.isnan(record["label_alignment"])


# -------------------------------------------------------------------------------------------------------- schedules


def test_loss_schedule_with_smoothing() -> None:
    probe = Probe(
        mlp(3, 2), X, Y, ["effective_rank"], schedule=LossGrid(0.5, start=2.0, smoothing=0.5), max_overhead=None
    )
    for loss in (4.0, 0.5, 0.5, 0.5, 0.1):  # averages 4, 2.25, 1.375, 0.9375, 0.51875
        probe.step(loss)
    rows = [(r.step, r.threshold, r.loss, r.raw_loss) for r in probe.records]
    assert rows == [(0, None, None, None), (3, 2.0, 1.375, 0.5), (4, 1.0, 0.9375, 0.5)]


def test_epochs() -> None:
    probe = Probe(mlp(3, 2), X, Y, ["effective_rank"], schedule=EveryEpochs(1), max_overhead=None)
    for s in range(1, 7):
        probe.step(1.0, epoch=s / 3)
    assert [(r.step, r.epoch) for r in probe.records] == [(0, 0.0), (3, 1.0), (6, 2.0)]


def test_equal_progress_of_two_probed_runs() -> None:
    runs = []
    for lr in (0.2, 0.5):
        net = mlp(3, 8, 2)
        probe = Probe(net, X, Y, ["ntk_alignment"], schedule=LossGrid(0.93), max_overhead=None)
        train(net, probe, 40, lr)
        runs.append(probe.finish())
    both = bs.probes.equal_progress(*runs)
    assert len(both) >= 3
    for pair in both.pairs:
        assert pair.a.loss <= pair.threshold * (1 + 1e-8)
        assert pair.b.loss <= pair.threshold * (1 + 1e-8)
        assert pair.a.step >= pair.b.step  # the smaller rate is slower


# -------------------------------------------------------------------------------------------------------- the cap


class Clock:
    """Time that only passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("cap", "cost"), [(0.05, 2.0), (0.2, 1.0), (0.5, 0.1)])
def test_overhead_is_kept_by_thinning(cap: float, cost: float) -> None:
    clock = Clock()

    def slow(view: View) -> float:
        clock.now += cost
        return 1.0

    probe = Probe(mlp(3, 2), X, Y, [slow], schedule=1, max_overhead=cap, least=0, clock=clock)
    measured = 0
    for _ in range(2000):
        clock.now += 0.5  # a training step
        record = probe.step(1.0)
        assert record is not None
        if not record.skipped:
            measured += 1
            assert probe.overhead <= cap + 1e-12
    assert probe.overhead <= cap
    possible = cap / (1 - cap) * 1000 / cost  # all that fit into 1000 seconds of training
    assert measured >= 0.95 * min(possible, 2000) - 2
    assert len(probe.records) == 2001
    assert all(r.skipped == (not r.values) for r in probe.records)


@pytest.mark.parametrize("steps", [69, 237, 5000])
def test_the_defaults_draw_a_curve_whatever_a_measurement_costs(steps: int) -> None:
    """Steps of 10 ms, measurements of 2 s: the cap allows none. 237 steps are three epochs of 5000 examples."""
    clock = Clock()

    def slow(view: View) -> float:
        clock.now += 2.0
        return float(view.step)

    probe = Probe(mlp(3, 2), X, Y, [slow], clock=clock)
    for _ in range(steps):
        clock.now += 0.01
        probe.step(1.0)
    if steps < 5000:
        probe.finish()  # nothing to complain about
    else:
        with pytest.warns(UserWarning, match=r"[0-9]+ of [0-9]+ measurements were skipped to keep max_overhead=0\.05"):
            probe.finish()
    made = [r.step for r in probe.records if not r.skipped]
    assert (made[0], made[-1]) == (0, steps)
    assert len(made) >= 22
    gaps = [b / a for a, b in pairwise(made[1:])]
    assert max(gaps) <= 2.0
    assert max(gaps[18:], default=1.0) <= 1.25 * 1.16  # the schedule's own marks lie up to 15 % apart
    assert [row["step"] for row in probe.to_dicts()] == made


def test_the_last_state_is_measured_though_the_cap_forbids_it_and_it_was_skipped_when_due() -> None:
    clock = Clock()

    def slow(view: View) -> float:
        clock.now += 5.0
        return 1.0

    probe = Probe(mlp(3, 2), X, Y, [slow], schedule=1, max_overhead=0.01, least=0, clock=clock)
    for _ in range(6):
        clock.now += 0.1
        probe.step(1.0)
    with pytest.warns(UserWarning, match="5 of 7 measurements were skipped"):
        records = probe.finish()
    assert records[-1].step == 6
    assert not records[-1].skipped
    assert probe.finish() == records  # a second call adds and says nothing


def test_no_cap_measures_everything() -> None:
    probe = Probe(mlp(3, 2), X, Y, ["effective_rank"], schedule=1, max_overhead=None)
    for _ in range(5):
        probe.step(1.0)
    assert not any(r.skipped for r in probe.records)


# ------------------------------------------------------------------------------------------------------ the output


METRICS = ["ntk_alignment", "kernel_velocity", "complexity", "path_complexity", "input_velocity", "sign_similarity"]


def test_lines_are_written_as_it_goes(tmp_path: Path) -> None:
    net = mlp(3, 6, 2)
    probe = Probe(net, X, Y, METRICS, schedule=2, max_overhead=None, out=tmp_path / "run")
    train(net, probe, 5)
    lines = [json.loads(line) for line in (tmp_path / "run" / "records.jsonl").read_text().splitlines()]
    assert lines[0]["metrics"] == METRICS
    assert [line["step"] for line in lines[1:]] == [0, 2, 4]  # without finish or close
    assert read_records(tmp_path / "run") == list(probe.records)
    assert probe.to_dicts()[1]["ntk_alignment"] == lines[2]["values"]["ntk_alignment"]


def test_a_killed_run_resumes_and_gives_what_the_whole_run_gives(tmp_path: Path) -> None:
    net = mlp(3, 6, 2)
    whole = Probe(net, X, Y, METRICS, schedule=2, max_overhead=None)
    checkpoints = train(net, whole, 10)
    expected = whole.finish()

    net = mlp(3, 6, 2)
    options = {"metrics": METRICS, "schedule": 2, "max_overhead": None, "out": tmp_path}
    train(net, Probe(net, X, Y, **options), 7)  # measured at 2, 4, 6; then killed, half a line written
    with (tmp_path / "records.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    net.load_state_dict(checkpoints[4].state_dict())  # the last checkpoint was at step 5
    again = Probe(net, X, Y, **options)
    train(net, again, 5, start=5)
    found = again.finish()
    assert [r.step for r in found] == [r.step for r in expected] == [0, 2, 4, 6, 8, 10]
    for one, two in zip(found, expected):
        assert one.values == pytest.approx(two.values, rel=1e-6, abs=1e-9), one.step
    assert read_records(tmp_path) == list(found)


def test_survives_a_real_kill(tmp_path: Path) -> None:
    code = f"""
import os, signal, torch, biascope as bs
torch.manual_seed(0)
net, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
probe = bs.Probe(net, x, None, ["effective_rank"], schedule=1, max_overhead=None, out={str(tmp_path)!r})
for s in range(5):
    probe.step(1.0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode < 0
    assert [r.step for r in read_records(tmp_path)] == [0, 1, 2, 3, 4, 5]


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    Probe(mlp(3, 2), X, Y, ["effective_rank"], out=tmp_path).finish()
    with pytest.raises(InputError, match=r"holds a run with metrics \['effective_rank'\]"):
        Probe(mlp(3, 2), X, Y, ["spectrum"], out=tmp_path)
    with pytest.raises(InputError, match="start of the run in out"):
        Probe(mlp(3, 4, 2), X, Y, ["effective_rank"], out=tmp_path)
    (tmp_path / "state.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CorruptError, match="not the state of a probe"):
        Probe(mlp(3, 2), X, Y, ["effective_rank"], out=tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "records.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="records of something else"):
        Probe(mlp(3, 2), X, Y, ["effective_rank"], out=tmp_path / "other")
    (tmp_path / "records.jsonl").write_text('{"a": 1}\nnot json\n{"step": 1}\n')
    with pytest.raises(CorruptError, match="line 2 is not JSON"):
        read_records(tmp_path)


def test_nan_is_null_in_the_file(tmp_path: Path) -> None:
    net = mlp(3, 4, 2)
    Probe(net, X, Y, ["linearisation_error"], out=tmp_path).finish()
    assert json.loads((tmp_path / "records.jsonl").read_text().splitlines()[1])["values"] == {
        "linearisation_error": None
    }
    assert math.isnan(read_records(tmp_path)[0]["linearisation_error"])


def test_context_manager_finishes() -> None:
    net = mlp(3, 4, 2)
    with Probe(net, X, Y, ["effective_rank"], schedule=100, max_overhead=None) as probe:
        train(net, probe, 3)
    assert [r.step for r in probe.records] == [0, 3]
    assert probe.records[-1].loss is not None


class Writer:
    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars[name, step] = value

    def flush(self) -> None:
        pass


def test_tensorboard_writer_gets_the_values() -> None:
    writer, net = Writer(), mlp(3, 4, 2)
    probe = Probe(net, X, Y, ["effective_rank"], schedule=2, max_overhead=None, tensorboard=writer)
    train(net, probe, 2)
    assert writer.scalars["probe/effective_rank", 2] == probe.records[-1]["effective_rank"]
    assert writer.scalars["probe/loss", 2] == probe.records[-1].loss


def test_tensorboard_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UnsupportedError, match="pip install tensorboard"):
        Probe(mlp(3, 2), X, Y, ["effective_rank"], tensorboard=tmp_path)


def test_tensorboard_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    net = mlp(3, 4, 2)
    probe = Probe(net, X, Y, ["effective_rank"], schedule=1, max_overhead=None, tensorboard=tmp_path)
    train(net, probe, 2)
    records = probe.finish()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = [(e.step, e.value) for e in events.Scalars("probe/effective_rank")]
    assert found == [(r.step, pytest.approx(r["effective_rank"], rel=1e-6)) for r in records]


def test_plot() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    net = mlp(3, 4, 2)
    probe = Probe(net, X, Y, ["effective_rank", metric("spectrum", k=12)], schedule=1, max_overhead=None)
    train(net, probe, 3)
    figure = probe.plot()
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == ["effective rank", "spectrum"]
    assert len(figure.axes[1].lines) == 14
    assert [x for x in figure.axes[0].get_xticks() if -0.5 <= x <= 3.5] == [0, 1, 2, 3]
    assert probe.plot(against="loss").axes[0].xaxis.get_inverted()  # of two panels as of three
    with pytest.raises(InputError, match="nothing to plot"):
        plot_records([Record(1, skipped=True)])


def test_a_panel_has_one_unit_and_a_plot_what_is_asked_for() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    values = {f"group_losses/{g}/{unit}": 1.0 for g in ("a", "b") for unit in ("loss", "accuracy")}
    values |= {"spectrum/1": 100.0, "spectrum/mean": 1.0, "kernel_velocity/per_step": 0.1, "mine": 2.0}
    records = [Record(step, 0.5, values=values, elapsed=step) for step in (0, 5, 50)]
    figure = plot_records(records, against="elapsed")
    titles = ["group losses (loss)", "group losses (accuracy)", "spectrum", "kernel velocity (per step)", "mine"]
    shown = [ax for ax in figure.axes if ax.get_visible()]
    assert [ax.get_title() for ax in shown] == titles
    assert [text.get_text() for text in shown[0].get_legend().get_texts()] == ["a", "b"]
    assert [ax.get_yscale() for ax in shown] == ["linear", "linear", "log", "linear", "linear"]
    assert {ax.get_xlabel() for ax in shown} == {"elapsed (s)"}
    assert len(plot_records(records, metrics="mine").axes) == 1
    assert len(plot_records(records, metrics=["mine", "group_losses"]).axes) == 3
    assert plot_records(records, against="mine").axes[0].get_xlabel() == "mine"
    for wrong, words in (
        ({"metrics": "mime"}, "metrics='mime' is not known; did you mean mine"),
        ({"against": "time"}, "against='time' is not known"),
        ({"against": ["mine"]}, "against="),
    ):
        with pytest.raises(InputError, match=words):
            plot_records(records, **wrong)


@pytest.mark.parametrize("length", [12, 14, 24, 60])
def test_no_legend_is_wider_than_its_axes(length: int) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    values = {f"few/{i} {'examples of the minority with spurious labels and noise'[:length]}": 0.0 for i in range(3)}
    figure = plot_records([Record(step, values=values) for step in (0, 5, 50)])
    figure.canvas.draw()
    (ax,) = figure.axes
    width = ax.get_window_extent().width
    assert width > 0.75 * figure.bbox.width  # a column of a paper, used
    assert ax.get_legend().get_window_extent().width <= width
    plt.close(figure)


def test_every_line_of_a_plot_can_be_told() -> None:
    """Few lines by a legend outside the axes, many by a bar of their colours with names."""
    plt = pytest.importorskip("matplotlib.pyplot")
    values = {f"many/block.{i}.convolution": float(i) for i in range(12)} | {"few/a": 0.0, "few/b": 1.0, "one": 2.0}
    figure = plot_records([Record(step, values=values) for step in (0, 5, 50)])
    figure.canvas.draw()
    many, few, one = figure.axes[:3]
    (bar,) = figure.axes[3:]
    named = [label.get_text() for label in bar.get_yticklabels()]
    assert len(many.lines) == 12
    assert len(set(map(str, (line.get_color() for line in many.lines)))) == 12
    assert 3 <= len(named) <= 8
    assert named[0] == "…k.0.convolution"
    assert many.get_legend() is None
    assert one.get_legend() is None
    renderer = figure.canvas.get_renderer()
    box = few.get_legend().get_window_extent(renderer)
    assert box.y1 <= few.get_window_extent(renderer).y0  # no curve is covered
    assert figure.bbox.y0 <= box.y0
    assert [text.get_text() for text in few.get_legend().get_texts()] == ["a", "b"]
    plt.close(figure)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    net = mlp(3, 6, 2).float().cuda()
    probe = Probe(net, X.float().cuda(), Y.cuda(), EVERYTHING, schedule=2, max_overhead=None)
    with pytest.raises(InputError, match="x_probe is on cpu, the model on cuda:0"):
        Probe(net, X.float(), Y)
    before = torch.cuda.get_rng_state()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(4):
        loss = F.cross_entropy(net(X.float().cuda()), Y.cuda())
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        probe.step(loss)
    assert torch.equal(before, torch.cuda.get_rng_state())
    cpu = View.of(net.cpu().double(), X, Y)
    assert probe.records[-1]["effective_rank"] == pytest.approx(
        metric("effective_rank")(cpu)["effective_rank"], rel=1e-3
    )

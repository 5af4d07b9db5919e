"""The studies of task arithmetic at smoke size, on one set of networks, and their building blocks."""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from biascope.editing import TaskVector, disentanglement
from biascope.reports import write_study_page
from biascope.studies import HeatMap, Run, StudyResult, configure, execute
from biascope.studies.claims import claims
from biascope.studies.judging import judgements
from biascope.studies.rejudge import rejudge
from biascope.support.errors import CorruptError, InputError
from biascope_papers.editing.measures import Maps, accuracies, contrasts, energies, heat_maps, maps, spoken
from biascope_papers.editing.stand_in import METHODS, Networks, Setting, encoder, grey, networks, store, task_images

CONTROL = "share of the gain kept, pre-trained minus random, fine-tuned"
Results = dict[str, tuple[Run, StudyResult]]
NAMES = (
    "fig6.2", "fig6.7", "figD.1", "table6.1", "fig6.3", "table6.2", "fig6.4", "fig6.8", "fig6.5", "fig6.9", "table6.3",
    "fig6.10", "figD.3",
)  # fmt: skip
TINY = Setting(
    tasks=("digits", "digits/inverted"), control="digits/mirrored", side=8, few=8, shown=20, tune=100, held=60, test=60,
    embed=8, pretrain_steps=20, steps=8, pretrain_lr=1e-2, lr=5e-3, batch=32, seeds=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder of its own: nothing is taken from the user's, nothing is left there."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BIASCOPE_DATA", str(folder))
        yield folder


@pytest.fixture(scope="module")
def run(home: Path) -> Run:
    return Run.create(home / "run", {"study": "x", "seed": 0})


@pytest.fixture(scope="module")
def results(home: Path) -> Results:
    made = {}
    for name in NAMES:
        run = Run.create(home / "runs" / name, configure(f"editing/{name}", "smoke", seed=0))
        made[name] = (run, execute(run))
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_structure_and_resuming(results: Results, name: str) -> None:
    run, result = results[name]
    assert "Stand-in: not CLIP." in result.measured
    assert all(math.isfinite(number.value) for number in result.numbers.values())
    assert any(number.standard_error is not None for number in result.numbers.values())
    assert len({figure.name for figure in result.figures}) == len(result.figures) > 0
    assert execute(Run.resume(run.path)).to_json() == result.to_json()


@pytest.mark.slow
def test_a_run_can_be_judged_again_without_the_cache(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIASCOPE_DATA", "nowhere")
    for name in ("fig6.7", "table6.2", "fig6.10"):
        run, result = results[name]
        assert rejudge(run.path).to_json() == result.to_json()
    assert not Path("nowhere").exists()


@pytest.mark.slow
def test_studies_share_networks_and_agree(results: Results) -> None:
    one, two, three = (results[name][1].numbers for name in ("fig6.7", "figD.1", "table6.3"))
    tuned = "accuracy, fine-tuned"
    assert one[tuned] == two[f"{tuned}, width 4"] == three["single, fine-tuned, pre-trained"]
    assert one[tuned].value > 0.1 + one["accuracy, pre-trained"].value  # fine-tuning learns
    assert results["fig6.7"][0].metrics()[0]["from_cache"]
    assert not results["fig6.2"][0].metrics()[0]["from_cache"]
    page = write_study_page(results["fig6.7"][0].path, formats=("png",)).read_text()
    assert "4 measurements taken from other studies" in page  # of both starts; their time is not in that of this run
    gap = one["fine-tuned minus after the fact"].value
    assert gap == pytest.approx(one[tuned].value - one["accuracy, linearised after the fact"].value)


@pytest.mark.slow
def test_random_encoders_know_nothing_and_maps_are_zero_at_the_origin(results: Results) -> None:
    numbers = results["table6.3"][1].numbers
    assert numbers["accuracy before, random"].value < 0.2  # ten classes
    assert numbers["gain of fine-tuning, fine-tuned, random"].value > 0
    for name in ("fig6.4", "fig6.8", "fig6.5", "fig6.10"):
        shown = [figure for figure in results[name][1].figures if isinstance(figure, HeatMap)]
        assert shown
        for figure in shown:
            at = figure.x.index(0.0)
            assert figure.z[at][at] == 0.0  # no vector, no disturbance
            assert all(0 <= cell <= 2 for row in figure.z for cell in row)


@pytest.mark.slow
def test_a_stand_in_never_contradicts_and_pre_training_must_help_first(results: Results) -> None:
    for name, (run, result) in results.items():
        found = judgements(run, result.numbers)
        assert found, name
        assert all(each.level == "stand-in" and each.verdict != "contradicted" for each in found)
        control = result.numbers[CONTROL]
        if control.value < 0 and name != "table6.3":
            assert all(each.verdict == "undecided" for each in found)


def test_every_claim_of_a_run_here_is_behind_the_control() -> None:
    of = [claim for claim in claims() for name in claim.studies if name.removeprefix("editing/") in NAMES]
    assert {claim.studies[0].removeprefix("editing/") for claim in of} == set(NAMES)
    for claim in of:
        assert claim.why
        if claim.studies != ("editing/table6.3",):
            assert any(each.number == CONTROL and each.above == 0 for each in claim.gate), claim.id


def test_the_propositions_hold_to_rounding(home: Path) -> None:
    numbers = execute(Run.create(home / "propositions", configure("editing/propositions", "smoke"))).numbers
    assert numbers["interference of localised tasks, largest"].value == 0
    assert numbers["interference of Fourier tasks, smallest of all functions"].value > 1e-12
    assert numbers["dependent eigenfunctions: smallest interference of all functions"].value < 1e-20
    assert numbers["Fourier atoms independent on a domain"].value == numbers["Fourier atoms"].value


def test_parts_of_a_set_do_not_overlap_and_images_are_the_stored_ones() -> None:
    parts = task_images("digits", 8, 3, few=5, tune=300, held=100, test=100)
    assert parts.few[1].bincount().tolist() == [5] * 10
    pieces = [part[0].flatten(1) for part in (parts.few, parts.tune, parts.held, parts.test)]
    whole = torch.cat(pieces)
    assert len(torch.unique(whole, dim=0)) == len(whole) == 550
    x, y = grey("digits", "train", 8)
    assert float(x.min()) == -1
    assert float(x.max()) == 1
    same = (x.flatten(1)[:, None] == pieces[1][None, :20]).all(-1)  # [n, 20]
    assert torch.equal(y[same.long().argmax(0)], parts.tune[1][:20])
    held = task_images("digits", 8, 3, few=5, tune=0, held=1000, test=100)
    assert (len(held.tune[1]), len(held.held[1])) == (0, 1000)


def test_turns_and_classes() -> None:
    x, y = grey("digits", "test", 8)
    assert torch.equal(grey("digits/inverted", "test", 8)[0], -x)
    assert torch.equal(grey("digits/mirrored", "test", 8)[0][..., 0], x[..., 7])
    some, classes = grey("digits:3-5", "test", 8)
    assert torch.equal(some, x[(y == 3) | (y == 4)])
    assert torch.equal(classes, y[(y == 3) | (y == 4)] - 3)
    assert grey("digits", "test", 4)[0].shape[1:] == (1, 4, 4)
    with pytest.raises(InputError, match="the end left out"):
        grey("digits:3", "test", 8)
    with pytest.raises(InputError, match="no classes 40-50"):
        grey("digits:40-50", "test", 8)
    with pytest.raises(InputError, match="inverted"):
        grey("digits/invertd", "test", 8)


def test_tasks_in_words() -> None:
    names = ("mnist", "quickdraw:0-30", "digits/inverted")
    assert [spoken(name) for name in names] == ["mnist", "quickdraw 0-29", "inverted digits"]


def test_maps_need_two_tasks(run: Run) -> None:
    with pytest.raises(InputError, match="name two tasks"):
        maps(run, dataclasses.replace(TINY, tasks=("digits",)), 2)


def test_networks_are_those_of_their_seed_and_trained_once(run: Run) -> None:
    one = networks(run, TINY, 2, 0)
    stamp = {file: file.stat().st_mtime_ns for file in store(run, TINY, 2, 0).path.rglob("*.safetensors")}
    assert len(stamp) == 5  # the encoder, two tasks in two ways
    again, other = networks(run, TINY, 2, 0), networks(run, TINY, 2, 1)
    assert stamp == {file: file.stat().st_mtime_ns for file in stamp}
    for a, b, c in zip(one.encoder.parameters(), again.encoder.parameters(), other.encoder.parameters()):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
    assert store(run, TINY, 2, 0).path != store(run, dataclasses.replace(TINY, lr=1e-3), 2, 0).path
    assert store(run, TINY, 2, 0).path == store(run, dataclasses.replace(TINY, seeds=9), 2, 0).path
    assert (one.vectors[True]["digits"] - one.vectors[False]["digits"]).norm() != 0


def test_a_damaged_file_of_the_cache_is_named_and_made_again(run: Run) -> None:
    wanted = networks(run, TINY, 2, 2, methods=("non-linear",)).vectors[False]["digits"]
    file = next(store(run, TINY, 2, 2).path.rglob("*plain*digits.safetensors"))
    begun = file.read_bytes()[:100]
    file.unlink()  # tensors in use are maps of the old file
    file.write_bytes(begun)
    with pytest.raises(CorruptError, match="delete it"):
        networks(run, TINY, 2, 2, methods=("non-linear",))
    file.unlink()
    assert (networks(run, TINY, 2, 2, methods=("non-linear",)).vectors[False]["digits"] - wanted).norm() == 0


def test_random_start_keeps_the_heads_of_the_pre_trained(run: Run) -> None:
    trained, random = (networks(run, TINY, 2, 0, start, methods=()) for start in ("pre-trained", "random"))  # type: ignore[arg-type]
    assert all(torch.equal(trained.rows[name], random.rows[name]) for name in trained.rows)
    assert all(torch.allclose(rows.norm(dim=1), torch.ones(10)) for rows in trained.rows.values())
    pairs = zip(trained.encoder.parameters(), random.encoder.parameters())
    assert not any(torch.equal(a, b) for a, b in pairs)
    out = trained.encoder(trained.images["digits"].test[0])
    assert torch.allclose(trained.head("digits")(out), trained.head("digits")(7 * out), atol=1e-4)  # cosines


def test_accuracies_by_hand(run: Run) -> None:
    found = accuracies(run, TINY, 2)
    made = networks(run, TINY, 2, 1)
    x, y = made.images["digits"].test
    tuned = made.vectors[False]["digits"].apply_to(made.encoder)
    with torch.no_grad():
        by_hand = float((made.head("digits")(tuned(x)).argmax(1) == y).double().mean())
        before = float((made.head("digits")(made.encoder(x)).argmax(1) == y).double().mean())
        merged = (made.vectors[False]["digits"] + made.vectors[False]["digits/inverted"]).apply_to(
            made.encoder, float(found.of("non-linear").alpha[1])
        )
        both = float((made.head("digits")(merged(x)).argmax(1) == y).double().mean())
    assert float(found.of("non-linear").single[1, 0]) == pytest.approx(by_hand)
    assert float(found.before[1, 0]) == pytest.approx(before)
    assert float(found.of("non-linear").multi[1, 0]) == pytest.approx(both)


def test_maps_are_those_of_the_definition(run: Run) -> None:
    found = maps(run, TINY, 2, pairs=1, points=30, grid=7)
    assert found.pairs == (("digits", "digits/inverted"),)
    made = networks(run, TINY, 2, 1)
    one, two = (made.vectors[False][task] for task in found.pairs[0])
    expected = 0.0
    for task, alone in ((found.pairs[0][0], one * 2.0), (found.pairs[0][1], two * -1.0)):
        x = made.images[task].test[0][:30]
        with torch.no_grad():
            a = made.head(task)(alone.apply_to(made.encoder)(x)).argmax(1)
            b = made.head(task)((one * 2.0 - two).apply_to(made.encoder)(x)).argmax(1)
        expected += float((a != b).double().mean())
    assert found.alphas[5] == 2.0
    assert found.alphas[2] == -1.0
    assert float(found.xi["non-linear"][1, 0, 5, 2]) == pytest.approx(expected)
    rms = (one.rms() + two.rms()) / 2
    assert float(found.rms["non-linear"][1, 0]) == pytest.approx(rms)


def test_box_of_a_known_map_and_what_lies_beyond() -> None:
    alphas = (-1.0, 0.0, 1.0, 1.5)
    rows = [[1.0, 0.2, 1.0, 0.0], [0.2, 0.0, 0.3, 0.0], [2.0, 0.1, 1.0, 0.0], [0.0, 0.0, 0.0, 1.7]]
    xi = torch.tensor(rows, dtype=torch.float64)[None, None]
    found = Maps(alphas, (("a", "b"),), {"linear": xi}, {"linear": torch.zeros(1, 1)})
    assert float(found.box("linear")) == pytest.approx((0.0 + 0.3 + 0.1 + 1.0) / 4)
    assert float(found.beyond("linear")) == 1.7
    assert float(found.everywhere("linear")) == pytest.approx(float(xi.mean()))
    shown = heat_maps(found, ("linear",))[0]
    assert shown.z[0][2] == 2.0  # first task to the right: z[row of the second][column of the first]


def test_disjoint_vectors_are_disentangled_everywhere() -> None:
    """A network whose two tasks read different pixels: no error anywhere; swapped inputs leave some."""
    net = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.zeros_(net.weight)
    rows = {"a": torch.tensor([[1.0, 0, 0, 0], [0, 1.0, 0, 0]]), "b": torch.tensor([[0, 0, 1.0, 0], [0, 0, 0, 1.0]])}
    vectors = {task: TaskVector.from_tensors({"weight": row}) for task, row in rows.items()}
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 40, 2, generator=g)
    x = {"a": torch.cat([u, 0 * u], 1), "b": torch.cat([0 * v, v], 1)}
    alphas = (-1.0, 0.5, 1.0)
    for inputs, whole in ((x, True), ({"a": x["b"], "b": x["a"]}, False)):
        xi = disentanglement(net, vectors, inputs, alphas).xi[None, None]
        found = Maps(alphas, (("a", "b"),), {"linear": xi}, {})
        assert (float(found.everywhere("linear")) == 0.0) is whole


def test_energies_share_the_rank(run: Run) -> None:
    found = energies(run, TINY, 2, points=20, outputs=2)
    for values in found.values():
        assert values.shape == (2, 2, 40)
        assert float(values.min()) >= -1e-9
        assert float(values.max()) <= 1 + 1e-9
        ranks = values.sum(-1)
        assert torch.allclose(ranks, ranks.round(), atol=1e-4)
        assert float(ranks.max()) <= 20 + 1e-4
        assert bool((contrasts(values) > 0).all())
    with pytest.raises(InputError, match="61 images were asked for, digits has 60"):  # halves would not be halves
        energies(run, TINY, 2, points=61, outputs=1)


def test_tasks_keep_their_order(run: Run) -> None:
    """Arrays are stored by name, charts are numbered by task."""
    setting = dataclasses.replace(TINY, tasks=("digits/inverted", "digits"), seeds=1)
    assert tuple(energies(run, setting, 2, points=5, outputs=1)) == setting.tasks


def test_encoders() -> None:
    vit = encoder(dataclasses.replace(TINY, net="vit", patch=4, depth=1), 16, 0)
    assert vit(torch.zeros(2, 1, 8, 8)).shape == (2, 8)
    assert not vit.training
    with pytest.raises(InputError, match="multiple of 16"):
        encoder(dataclasses.replace(TINY, net="vit"), 20, 0)


def test_predictors_use_the_vectors_of_their_own_training(run: Run) -> None:
    made: Networks = networks(run, TINY, 2, 0)
    assert [made.predictor(m)[1] is made.vectors[m == "linear"] for m in METHODS] == [True] * 3
    x = made.images["digits"].test[0][:4]
    for method in METHODS:
        assert torch.allclose(made.predictor(method)[0](x), made.encoder(x), atol=1e-5)  # all start at theta_0

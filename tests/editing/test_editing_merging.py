"""Adding, averaging, forgetting: against brute force and closed forms (checks E4, E7, E8)."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.editing import TaskVector, analogy, average, combine, task_addition, task_negation
from biascope.editing.merging import SEARCH, _ratio, accuracy
from biascope.support.errors import InputError
from editing.editing_nets import Gated, mlp, points, random_vector


def test_combinations_are_the_arithmetic() -> None:
    net = mlp()
    a, b, c = (random_vector(net, s) for s in range(3))
    for found, expected in (
        (combine([a, b, c], [0.5, -2.0, 1.0]), 0.5 * a - 2.0 * b + c),
        (average([a, b, c]), (a + b + c) / 3),
        (analogy(a, b, c), c + (b - a)),
    ):
        torch.testing.assert_close(dict(found.tensors), dict(expected.tensors), rtol=0, atol=1e-15)
    models = [mlp(s) for s in range(1, 4)]
    soup = average([TaskVector(net, m) for m in models]).apply_to(net)
    for p, *qs in zip(soup.parameters(), *(m.parameters() for m in models)):
        torch.testing.assert_close(p, torch.stack(qs).mean(0), rtol=0, atol=1e-15)
    before = {k: t.clone() for k, t in a.tensors.items()}
    combine([a, b], [1.0, 1.0])
    assert all(torch.equal(a[k], t) for k, t in before.items())
    with pytest.raises(ValueError, match="shorter"):
        combine([a, b], [1.0])


@pytest.fixture(name="case")
def _case() -> tuple[nn.Module, dict[str, TaskVector], dict[str, tuple[Tensor, Tensor]]]:
    """Every task's labels are what its own fine-tuned network says, but for one in five."""
    net = mlp()
    taus = {k: random_vector(net, s, 0.8) for s, k in enumerate("abc")}
    data = {}
    for s, k in enumerate("abc"):
        x = points(60, s + 10)
        y = taus[k].apply_to(net)(x).argmax(1)
        y[::5] = (y[::5] + 1) % 3
        data[k] = (x, y)
    return net, taus, data


Case = tuple[nn.Module, dict[str, TaskVector], dict[str, tuple[Tensor, Tensor]]]


@pytest.mark.parametrize("choose", ["normalised", "absolute"])
@pytest.mark.parametrize("linear", [False, True])
def test_addition_is_the_best_of_a_brute_force_search(case: Case, choose: str, linear: bool) -> None:
    net, taus, data = case
    model = bs.linearize(net) if linear else net
    found = task_addition(model, taus, data, choose=choose, batch_size=7)
    total = taus["a"] + taus["b"] + taus["c"]
    table = torch.tensor(
        [
            [float((total.apply_to(model, a)(x).argmax(1) == y).double().mean()) for x, y in data.values()]
            for a in SEARCH
        ],
        dtype=torch.float64,
    )
    torch.testing.assert_close(found.held_out, table, rtol=0, atol=1e-12)
    single = [float((taus[k].apply_to(model)(x).argmax(1) == y).double().mean()) for k, (x, y) in data.items()]
    scores = (table / torch.tensor(single) if choose == "normalised" else table).mean(1)
    assert found.alpha == SEARCH[int(scores.argmax())]
    assert found.absolute()[0] == pytest.approx(float(table[SEARCH.index(found.alpha)].mean()))
    ratios = table[SEARCH.index(found.alpha)] / torch.tensor(single)
    assert found.normalised()[0] == pytest.approx(float(ratios.mean()))
    if not linear:
        assert single == pytest.approx([0.8] * 3)
    before = [float((model(x).argmax(1) == y).double().mean()) for x, y in data.values()]
    assert [float(found.pretrained[k].mean()) for k in "abc"] == pytest.approx(before)


def test_one_task_at_coefficient_one_is_itself(case: Case) -> None:
    """E7."""
    net, taus, data = case
    found = task_addition(net, {"a": taus["a"]}, {"a": data["a"]}, alphas=[1.0])
    assert found.alpha == 1.0
    assert found.normalised() == (1.0, 0.0)
    assert torch.equal(found.multi["a"], found.single["a"])


def test_gated_tasks_add_without_loss() -> None:
    """E4: normalised accuracy 1 at a = 1."""
    net = Gated()
    taus = dict(zip("ab", net.vectors()))
    data = {k: (x, taus[k].apply_to(net)(x).argmax(1)) for k, x in zip("ab", net.data())}
    found = task_addition(net, taus, data, alphas=[1.0])
    assert found.normalised()[0] == 1.0
    assert found.absolute()[0] == 1.0


def test_alpha_is_chosen_on_held_out_and_reported_on_test(case: Case) -> None:
    net, taus, data = case
    other = {k: (x + 0.3, (y + 1) % 3) for k, (x, y) in data.items()}
    one, two = task_addition(net, taus, data), task_addition(net, taus, data, other)
    assert two.alpha == one.alpha
    assert torch.equal(two.held_out, one.held_out)
    x, y = other["a"]
    total = taus["a"] + taus["b"] + taus["c"]
    assert torch.equal(two.multi["a"], (total.apply_to(net, two.alpha)(x).argmax(1) == y).double())
    assert torch.equal(two.single["a"], (taus["a"].apply_to(net)(x).argmax(1) == y).double())


def test_normalised_and_absolute_can_choose_differently() -> None:
    """Scores that are parabolas in a, so that both optima are known."""
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.zero_()
    eye = torch.eye(2, dtype=torch.float64)
    taus = {k: TaskVector.from_tensors({"weight": row[None]}) for k, row in zip("ab", eye)}
    # scores at a: task a: 10 (1 - (a - 0.2)^2), task b: 1 - (a - 1)^2: the big one rules the absolute mean
    data = {"a": (eye[:1], torch.tensor([0])), "b": (eye[1:], torch.tensor([1]))}

    def metric(out: Tensor, labels: Tensor) -> Tensor:
        a = out[:, 0]
        return torch.where(labels == 0, 10 * (1 - (a - 0.2) ** 2), 1 - (a - 1) ** 2)

    absolute = task_addition(net, taus, data, choose="absolute", metric=metric).alpha
    # 10 * 2 (a - 0.2) + 2 (a - 1) = 0
    assert absolute == pytest.approx(0.25)  # 6 / 22 = 0.27, on the grid of 0.05
    # normalised by 10 * 0.36 and 1: (10 / 3.6) * 2 (a - 0.2) + 2 (a - 1) = 0
    normalised = task_addition(net, taus, data, choose="normalised", metric=metric)
    assert normalised.alpha == pytest.approx(0.4)  # 1.5556 / 3.7778 = 0.41


def test_of_equal_coefficients_the_nearest_to_the_start() -> None:
    net = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0], [1.0]]))
    tau = {"a": TaskVector.from_tensors({"weight": torch.ones(2, 1)})}  # changes no prediction
    data = {"a": (torch.ones(3, 1), torch.ones(3, dtype=torch.long))}
    assert task_addition(net, tau, data).alpha == 0.0
    assert task_addition(net, tau, data, alphas=[-1.0, 0.5, 1.0]).alpha == 0.5


def test_standard_error_of_a_ratio_by_simulation() -> None:
    gen = torch.Generator().manual_seed(0)
    both = torch.rand(2000, 200, generator=gen, dtype=torch.float64)
    single = (both < 0.8).double()
    merged = ((both < 0.6) | (both > 0.95)).double()  # correlated with it
    found = [_ratio(m, s, "a") for m, s in zip(merged, single)]
    spread = torch.tensor([r for r, _ in found]).std()
    stated = sum(e for _, e in found) / len(found)
    assert stated == pytest.approx(float(spread), rel=0.06)
    with pytest.raises(InputError, match="task 'a' alone scores 0"):
        _ratio(merged[0], torch.zeros(200), "a")


def test_refusals(case: Case) -> None:
    net, taus, data = case
    with pytest.raises(InputError, match="choose='best' is not known"):
        task_addition(net, taus, data, choose="best")
    with pytest.raises(InputError, match="held_out: one entry per task"):
        task_addition(net, taus, {k: data[k] for k in "ab"})
    with pytest.raises(InputError, match=r"held_out\['a'\]: labels are needed, one for each of 60 examples, not \[0\]"):
        task_addition(net, taus, {k: x for k, (x, _) in data.items()})
    with pytest.raises(InputError, match=r"held_out\['a'\]: labels are needed, one for each of 60 examples, not \[3\]"):
        task_addition(net, taus, {k: (x, y[:3]) for k, (x, y) in data.items()})
    with pytest.raises(InputError, match="labels must be 60 integers between 0 and 2"):
        task_addition(net, taus, {k: (x, y + 1) for k, (x, y) in data.items()})
    with pytest.raises(InputError, match=r"the metric must return one score per example, shape \[60\]"):
        task_addition(net, taus, data, metric=lambda out, y: out)
    with pytest.raises(InputError, match="at least one task vector"):
        task_addition(net, {}, {})
    wrong = {k: (x, (taus[k].apply_to(net)(x).argmax(1) + 1) % 3) for k, (x, _) in data.items()}
    with pytest.raises(InputError, match="task 'a' alone scores 0: nothing to normalise by; use choose='absolute'"):
        task_addition(net, taus, wrong)
    assert task_addition(net, taus, wrong, choose="absolute").absolute()[0] >= 0
    with pytest.raises(InputError, match=r"-0.5 would add the task"):
        task_negation(net, taus["a"], data["a"], data["b"], alphas=[-0.5, 0.5])


# ------------------------------------------------------------------------------------------------------- negation


def test_negation_is_the_worst_target_that_keeps_the_control(case: Case) -> None:
    """E8."""
    net, taus, data = case
    (x, y), z = data["a"], points(80, 20)
    w = net(z).argmax(1)
    for model in (net, bs.linearize(net)):
        found = task_negation(model, taus["a"], (x, y), (z, w))
        edited = [taus["a"].apply_to(model, -a) for a in SEARCH]
        target = [float((m(x).argmax(1) == y).double().mean()) for m in edited]
        control = [float((m(z).argmax(1) == w).double().mean()) for m in edited]
        torch.testing.assert_close(
            found.held_out, torch.tensor([target, control], dtype=torch.float64).T, rtol=0, atol=1e-12
        )
        allowed = [t for t, c in zip(target, control) if c >= 0.95]
        assert found.alpha > 0
        assert len(allowed) < len(target)  # the control rules some out
        assert found.means()["target"][0] == pytest.approx(min(allowed))
        assert found.means()["control"][0] >= 0.95 * found.means()["control_before"][0]
        assert found.means()["control_before"][0] == 1.0


def test_negation_stays_at_home_where_nothing_qualifies(case: Case) -> None:
    net, taus, data = case
    x = points(200, 20)
    strict = task_negation(net, 10 * taus["a"], data["a"], (x, net(x).argmax(1)), alphas=[0.5, 1.0], keep=1.0)
    assert strict.alpha == 0.0
    assert torch.equal(strict.target, strict.target_before)
    free = task_negation(net, 10 * taus["a"], data["a"], (x, net(x).argmax(1)), alphas=[0.5, 1.0], keep=0.0)
    assert free.alpha > 0


def test_negation_reports_on_test_data(case: Case) -> None:
    net, taus, data = case
    z = points(80, 20)
    control = (z, net(z).argmax(1))
    held = task_negation(net, taus["a"], data["a"], control)
    found = task_negation(net, taus["a"], data["a"], control, test=(data["b"], data["c"]))
    assert found.alpha == held.alpha
    x, y = data["b"]
    edited = taus["a"].apply_to(net, -found.alpha)
    assert torch.equal(found.target, (edited(x).argmax(1) == y).double())
    assert torch.equal(found.control_before, (net(data["c"][0]).argmax(1) == data["c"][1]).double())
    error = float(found.target.std() / math.sqrt(60))
    assert found.means()["target"][1] == pytest.approx(error)


def test_heads_and_tables(case: Case) -> None:
    net, taus, data = case
    flip = lambda out: -out  # noqa: E731
    heads = dict.fromkeys("abc", flip)
    found = task_addition(net, taus, data, alphas=[1.0], heads=heads)
    x, y = data["b"]
    total = taus["a"] + taus["b"] + taus["c"]
    assert torch.equal(found.multi["b"], (total.apply_to(net)(x).argmin(1) == y).double())
    assert "Task addition at alpha = 1" in found._repr_html_()
    negated = task_negation(net, taus["a"], data["a"], data["b"], heads=(flip, None), alphas=[0.0])
    x, y = data["a"]
    assert torch.equal(negated.target, (net(x).argmin(1) == y).double())
    assert "<td>target</td>" in negated._repr_html_()


def test_accuracy_of_one_output_and_of_nothing() -> None:
    assert accuracy(torch.tensor([[0.3], [-0.3], [0.2]]), torch.tensor([1, 0, 0])).tolist() == [1.0, 1.0, 0.0]
    assert accuracy(torch.full((1, 3), torch.nan), torch.tensor([0])).tolist() == [0.0]


def test_nothing_is_changed(case: Case) -> None:
    net, taus, data = case
    before, rng = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    task_addition(net, taus, data)
    task_negation(net, taus["a"], data["a"], data["b"])
    assert all(torch.equal(before[k], t) for k, t in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), rng)


def test_masked_classes_are_no_failure(case: Case) -> None:
    """Heads that set classes to -infinity score as those that set them to -1e9, and forget as much."""
    net, taus, data = case
    open_ = torch.tensor([True, True, False])
    two = {k: (x, y.clamp_max(1)) for k, (x, y) in data.items()}
    scored = []
    for mask in (-math.inf, -1e9):

        def head(out: Tensor, mask: float = mask) -> Tensor:
            return torch.where(open_, out, mask)

        added = task_addition(net, taus, two, heads=dict.fromkeys("abc", head))
        negated = task_negation(net, taus["a"], two["a"], two["b"], heads=(head, head))
        scored.append((added, negated))
    (added, negated), (added_finite, negated_finite) = scored
    assert added.absolute() == added_finite.absolute()
    assert added.absolute()[0] > 0.3
    assert negated.alpha == negated_finite.alpha
    assert negated.means() == negated_finite.means()
    assert negated.means()["control_before"][0] > 0.3


def test_scores_that_are_nan_are_not_the_best(case: Case) -> None:
    net, taus, data = case

    def nan_at_start(outputs: Tensor, labels: Tensor) -> Tensor:
        here = torch.equal(outputs, net(data["a"][0]))
        return accuracy(outputs, labels) + (math.nan if here else 0.0)

    found = task_addition(net, {"a": taus["a"]}, {"a": data["a"]}, alphas=[0.0, 1.0], metric=nan_at_start)
    assert found.held_out[:, 0].isnan().tolist() == [True, False]
    assert found.alpha == 1.0

    def nothing(outputs: Tensor, labels: Tensor) -> Tensor:
        return torch.full((len(labels),), math.nan)

    with pytest.raises(InputError, match="NaN at every one of 21 coefficients"):
        task_addition(net, {"a": taus["a"]}, {"a": data["a"]}, choose="absolute", metric=nothing)
    with pytest.raises(InputError, match="alone scores nan"):
        task_addition(net, {"a": taus["a"]}, {"a": data["a"]}, metric=nothing)
    with pytest.raises(InputError, match="theta0 scores nan on it"):
        task_negation(net, taus["a"], data["a"], data["b"], metric=nothing)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(outputs, labels, reduction="none")

    with pytest.raises(InputError, match="of which no share can be kept"):
        task_negation(net, taus["a"], data["a"], data["b"], metric=loss)


@pytest.mark.parametrize("keep", [-1.0, 1.5, math.nan])
def test_a_share_to_keep_lies_between_zero_and_one(case: Case, keep: float) -> None:
    net, taus, data = case
    with pytest.raises(InputError, match=f"keep={keep:g}: the share"):
        task_negation(net, taus["a"], data["a"], data["b"], keep=keep)


@pytest.mark.parametrize("size", [0, -1])
def test_batches_hold_an_example(case: Case, size: int) -> None:
    net, taus, data = case
    with pytest.raises(InputError, match=f"batch_size must be at least 1, not {size}"):
        task_addition(net, taus, data, batch_size=size)
    with pytest.raises(InputError, match=f"batch_size must be at least 1, not {size}"):
        task_negation(net, taus["a"], data["a"], data["b"], batch_size=size)

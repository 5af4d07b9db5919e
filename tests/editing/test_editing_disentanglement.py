"""The disentanglement error against its definition, closed forms, and the checks E1 to E5 of the specification."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.editing import Disentanglement, TaskVector, disentanglement, leakage
from biascope.editing.interference import predicted_class
from biascope.support.errors import InputError, UnsupportedError
from editing.editing_nets import Gated, mlp, points, random_vector

ALPHAS = [-1.5, -0.5, 0.0, 0.5, 1.0]


def moved(net: nn.Module, a: list[float], taus: list[TaskVector]) -> nn.Module:
    """theta0 + sum a tau, by hand."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.copy_(p + sum(s * tau[name] for s, tau in zip(a, taus)))
    return net


def by_definition(net: nn.Module, taus: list[TaskVector], data: list[Tensor], distance: str) -> Tensor:
    """xi on the grid, one new module per point and no cache."""
    A = len(ALPHAS)
    xi = torch.zeros(A, A, dtype=torch.float64)
    for i, j in itertools.product(range(A), repeat=2):
        a = [ALPHAS[i], ALPHAS[j]]
        for t in range(2):
            alone = [a[s] if s == t else 0.0 for s in range(2)]
            p, q = moved(net, alone, taus)(data[t]), moved(net, a, taus)(data[t])
            if distance == "argmax":
                d = (p.argmax(1) != q.argmax(1)).double()
            elif distance == "l2":
                d = (p - q).square().sum(1).sqrt()
            else:
                d = nn.functional.kl_div(q.log_softmax(1), p.softmax(1), reduction="none").sum(1)
            xi[i, j] += d.mean().detach()
    return xi


@pytest.fixture(name="case")
def _case() -> tuple[nn.Module, list[TaskVector], list[Tensor]]:
    net = mlp()
    return net, [random_vector(net, s, 0.6) for s in (1, 2)], [points(30, 3), points(20, 4)]


@pytest.mark.parametrize("distance", ["argmax", "l2", "kl"])
@pytest.mark.parametrize("linear", [False, True])
def test_the_definition(case: tuple[nn.Module, list[TaskVector], list[Tensor]], distance: str, linear: bool) -> None:
    """E3 for the linearised network: its grid by linear combination is the brute-force one."""
    net, taus, data = case
    model = bs.linearize(net) if linear else net
    xi = bs.disentanglement_error(model, *taus, *data, alphas=ALPHAS, distance=distance)
    assert xi.shape == (5, 5)
    torch.testing.assert_close(xi, by_definition(model, taus, data, distance), rtol=1e-10, atol=1e-10)
    assert xi.max() > 0.1


def test_axes_range_and_symmetry(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    """E2."""
    net, (one, two), (x, z) = case
    xi = bs.disentanglement_error(net, one, two, x, z, alphas=ALPHAS)
    zero = ALPHAS.index(0.0)
    assert xi[zero, zero] == 0
    assert xi.min() >= 0
    assert 0 < xi.max() <= 2
    for i, a in enumerate(ALPHAS):  # on the axis only the other task's inputs count
        differ = (net(z).argmax(1) != one.apply_to(net, a)(z).argmax(1)).double().mean()
        assert xi[i, zero] == pytest.approx(float(differ), abs=1e-12)
    swapped = bs.disentanglement_error(net, two, one, z, x, alphas=ALPHAS)
    torch.testing.assert_close(swapped, xi.T, rtol=0, atol=1e-12)
    still = bs.disentanglement_error(net, one, 0 * two, x, z, alphas=ALPHAS)
    assert torch.equal(still, still[:, :1].expand(5, 5))
    assert still.max() > 0


def test_the_same_task_twice_disturbs_itself(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    """E4, last sentence."""
    net, (one, _), (x, _) = case
    xi = bs.disentanglement_error(net, one, one, x, x, alphas=ALPHAS, distance="l2")
    off = torch.tensor(ALPHAS) != 0
    assert xi[off][:, off].min() > 0.1


def test_disjoint_supports_and_blocks_have_no_error() -> None:
    """E4: whatever a gated network's halves do, they do it on their own inputs."""
    net = Gated()
    one, two = net.vectors()
    x, z = net.data()
    assert bool(((net(x) - one.apply_to(net)(x)).abs() > 0.1).any())  # they do something
    for model in (net, bs.linearize(net)):
        assert torch.equal(bs.disentanglement_error(model, one, two, x, z), torch.zeros(25, 25, dtype=torch.float64))
        assert bs.disentanglement_error(model, one, two, x, z, ALPHAS, distance="l2").max() < 1e-10
    assert bs.disentanglement_error(net, one, two, z, x, ALPHAS).max() > 0  # on the wrong inputs it is not so


def fitted(net: nn.Linear, x: Tensor, y: Tensor) -> TaskVector:
    """The shortest change of a linear model that fits y."""
    return TaskVector.from_tensors({"weight": (torch.linalg.pinv(x) @ (y - net(x).detach())).T})


def test_a_linear_model_has_no_error_for_orthogonal_inputs_only() -> None:
    net = nn.Linear(6, 3, bias=False).double()
    x, z = points(10, 1, 6), points(10, 2, 6)
    x[:, 3:], z[:, :3] = 0, 0
    taus = [fitted(net, data, points(10, 3, 3)) for data in (x, z)]
    assert bs.disentanglement_error(net, *taus, x, z, ALPHAS, distance="l2").max() < 1e-10
    assert bs.disentanglement_error(net, *taus, x, z, ALPHAS).max() == 0
    z = points(10, 2, 6)  # inputs that are not orthogonal: linear, and yet the error is the closed form, not 0
    taus = [fitted(net, data, points(10, 3, 3)) for data in (x, z)]
    xi = bs.disentanglement_error(net, *taus, x, z, ALPHAS, distance="l2")
    a = torch.tensor(ALPHAS, dtype=torch.float64).abs()
    leaks = [(x @ taus[1]["weight"].T).norm(dim=1).mean(), (z @ taus[0]["weight"].T).norm(dim=1).mean()]
    torch.testing.assert_close(xi, a[None, :] * leaks[0] + a[:, None] * leaks[1], rtol=1e-10, atol=1e-10)
    assert xi[0, 0] > 0.1


def test_the_tangent_model_is_affine_in_the_coefficients(
    case: tuple[nn.Module, list[TaskVector], list[Tensor]],
) -> None:
    """f(theta0 + sum a tau) = f0 + sum a (f_t - f0), through edited modules."""
    net, (one, two), (x, _) = case
    lin = bs.linearize(net)
    f0, f1, f2 = lin(x), one.apply_to(lin)(x), two.apply_to(lin)(x)
    both = (0.7 * one - 1.3 * two).apply_to(lin)(x)
    torch.testing.assert_close(both, f0 + 0.7 * (f1 - f0) - 1.3 * (f2 - f0), rtol=0, atol=1e-10)
    assert bool(((both - (0.7 * one - 1.3 * two).apply_to(net)(x)).abs() > 0.01).any())  # the plain network is not


def test_closed_form_of_the_tangent_model(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    """E5."""
    net, taus, data = case
    vectors, inputs = dict(zip("ab", taus)), dict(zip("ab", data))
    xi = disentanglement(bs.linearize(net), vectors, inputs, ALPHAS, distance="l2").xi
    torch.testing.assert_close(xi, leakage(net, vectors, inputs).xi(ALPHAS), rtol=1e-10, atol=1e-10)


def test_a_trained_linearised_network_starts_where_it_is(
    case: tuple[nn.Module, list[TaskVector], list[Tensor]],
) -> None:
    net, taus, data = case
    lin = random_vector(net, 9).apply_to(bs.linearize(net))
    xi = bs.disentanglement_error(lin, *taus, *data, alphas=ALPHAS)
    torch.testing.assert_close(xi, by_definition(lin, taus, data, "argmax"), rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------- many tasks, options


def test_three_tasks_on_a_grid_and_along_its_diagonal() -> None:
    net = mlp()
    taus = {k: random_vector(net, s, 0.6) for s, k in enumerate("abc")}
    data = {k: points(15 + s, s + 5) for s, k in enumerate("abc")}
    cube = disentanglement(net, taus, data, ALPHAS[2:], distance="l2")
    line = disentanglement(net, taus, data, ALPHAS[2:], distance="l2", along="line")
    assert cube.xi.shape == (3, 3, 3)
    assert line.xi.shape == (3,)
    torch.testing.assert_close(line.xi, torch.stack([cube.xi[i, i, i] for i in range(3)]), rtol=0, atol=1e-12)
    pair = disentanglement(net, {k: taus[k] for k in "ab"}, {k: data[k] for k in "ab"}, ALPHAS[2:], distance="l2")
    parts = cube.by_task()
    torch.testing.assert_close(parts["a"][:, :, 0] + parts["b"][:, :, 0], pair.xi, rtol=0, atol=1e-12)
    alone = disentanglement(net, {"a": taus["a"]}, {"a": data["a"]}, ALPHAS)
    assert torch.equal(alone.xi, torch.zeros(5, dtype=torch.float64))


def test_standard_errors_are_over_examples(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    net, taus, data = case
    found = disentanglement(net, dict(zip("ab", taus)), dict(zip("ab", data)), ALPHAS, distance="l2")
    point = [taus[0] * ALPHAS[4], taus[1] * ALPHAS[0]]
    merged = (point[0] + point[1]).apply_to(net)
    d = [(point[t].apply_to(net)(data[t]) - merged(data[t])).norm(dim=1).detach() for t in range(2)]
    expected = (d[0].var() / len(d[0]) + d[1].var() / len(d[1])).sqrt()
    assert float(found.standard_error[4, 0]) == pytest.approx(float(expected), rel=1e-9)
    mean, error = found.box(0, 1)
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), found.xi[2:, 2:].mean())
    per_example = [found.distances[k][2:, 2:].mean((0, 1)) for k in "ab"]
    assert error == pytest.approx(float(sum(p.var() / len(p) for p in per_example) ** 0.5), rel=1e-9)
    one = disentanglement(net, {"a": taus[0], "b": taus[1]}, {"a": data[0][:1], "b": data[1]}, ALPHAS)
    assert one.standard_error.isnan().all()
    with pytest.raises(InputError, match="no coefficient of the grid lies between 2 and 3"):
        found.box(2, 3)


def test_monte_carlo_error_is_what_it_says() -> None:
    """The spread of xi over independent sets of inputs is the standard error that each of them states."""
    net = mlp()
    taus = {"a": random_vector(net, 1, 0.6), "b": random_vector(net, 2, 0.6)}
    found = [
        disentanglement(net, taus, {"a": points(50, 2 * s), "b": points(50, 2 * s + 1)}, [1.0]) for s in range(200)
    ]
    spread = torch.stack([f.xi.squeeze() for f in found]).std()
    stated = torch.stack([f.standard_error.squeeze() for f in found]).mean()
    assert float(stated / spread) == pytest.approx(1.0, abs=0.2)  # 200 sets: the spread is known to 5 percent


def test_each_task_has_its_own_head(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    net, taus, data = case
    heads = {"a": nn.Linear(3, 5).double(), "b": nn.Sequential(nn.Tanh(), nn.Linear(3, 2)).double()}
    for model in (net, bs.linearize(net)):
        found = disentanglement(model, dict(zip("ab", taus)), dict(zip("ab", data)), ALPHAS, heads=heads)
        for t, k in enumerate("ab"):
            full = nn.Sequential(model, heads[k])
            alone = TaskVector.from_tensors({f"0.{n}": v for n, v in (taus[t] * 0.5).tensors.items()}).apply_to(full)
            both = TaskVector.from_tensors({f"0.{n}": v for n, v in (0.5 * taus[t] + taus[1 - t]).tensors.items()})
            differ = alone(data[t]).argmax(1) != both.apply_to(full)(data[t]).argmax(1)
            index = (3, 4) if t == 0 else (4, 3)
            assert float(found.by_task()[k][index]) == pytest.approx(float(differ.double().mean()), abs=1e-12)
    assert all(p.grad is None for h in heads.values() for p in h.parameters())


def test_a_linearised_encoder_inside_another_network(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    """Only the encoder is linear, its output is normalised: every point is evaluated."""
    net, taus, data = case

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = bs.linearize(net)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.normalize(self.encoder(x), dim=1)

    full = Classifier()
    inner = [TaskVector.from_tensors({f"encoder.{k}": t for k, t in tau.tensors.items()}) for tau in taus]
    xi = bs.disentanglement_error(full, *inner, *data, alphas=ALPHAS, distance="l2")
    torch.testing.assert_close(xi, by_definition(full, inner, data, "l2"), rtol=1e-10, atol=1e-10)
    full.encoder = bs.linearize(net, params="2")
    with pytest.raises(InputError, match=r"moves 'encoder.0.weight', not linearised"):
        bs.disentanglement_error(full, *inner, *data, alphas=ALPHAS)
    with pytest.raises(InputError, match=r"moves 'encoder.0.weight', not linearised"):
        inner[0].apply_to(full)


def test_layer_by_layer(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    """A vector that moves one layer only is the full one with zeros elsewhere."""
    net, (one, two), data = case
    part = one.restrict("0")
    padded = TaskVector.from_tensors({k: part[k] if k in part else torch.zeros_like(t) for k, t in one.tensors.items()})
    xi = bs.disentanglement_error(net, part, two, *data, alphas=ALPHAS, distance="l2")
    assert torch.equal(xi, bs.disentanglement_error(net, padded, two, *data, alphas=ALPHAS, distance="l2"))
    assert not torch.equal(xi, bs.disentanglement_error(net, one, two, *data, alphas=ALPHAS, distance="l2"))


def test_one_output_is_judged_by_its_sign() -> None:
    net = mlp(outputs=1)
    taus = [random_vector(net, s, 1.0) for s in (1, 2)]
    x = points(40, 3)
    xi = bs.disentanglement_error(net, *taus, x, x, [0.0, 1.0])
    signs = [m(x)[:, 0] > 0 for m in (net, taus[0].apply_to(net), taus[1].apply_to(net))]
    assert float(xi[1, 0]) == pytest.approx(float((signs[0] != signs[1]).double().mean()))
    assert float(xi[0, 1]) == pytest.approx(float((signs[0] != signs[2]).double().mean()))
    assert xi.max() > 0


@pytest.mark.parametrize("distance", ["argmax", "kl"])
def test_masked_classes_have_a_distance(case: tuple[nn.Module, list[TaskVector], list[Tensor]], distance: str) -> None:
    """A class at -infinity is one that is not there."""
    net, taus, data = case
    pair, x = dict(zip("ab", taus)), dict(zip("ab", data))
    masked, cut = (
        disentanglement(net, pair, x, ALPHAS, distance=distance, heads=dict.fromkeys("ab", head)).xi
        for head in (lambda out: torch.cat([out[:, :2], out[:, 2:] - torch.inf], 1), lambda out: out[:, :2])
    )
    torch.testing.assert_close(masked, cut)
    assert float(masked.max()) > 0


def test_what_predicts_no_class() -> None:
    nan, inf = torch.nan, torch.inf
    rows = torch.tensor([[nan, 1.0], [inf, 1.0], [-inf, -inf], [-inf, -5.0], [2.0, -inf]])
    torch.testing.assert_close(
        predicted_class(rows), torch.tensor([nan, nan, nan, 1.0, 0.0], dtype=torch.float64), equal_nan=True
    )
    one = predicted_class(torch.tensor([[inf], [-inf], [-3.0]]))
    torch.testing.assert_close(one, torch.tensor([nan, nan, 0.0], dtype=torch.float64), equal_nan=True)


def test_a_distance_of_ones_own_and_broken_outputs(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    net, taus, data = case
    own = bs.disentanglement_error(net, *taus, *data, ALPHAS, distance=lambda p, q: (p - q).norm(dim=1))
    torch.testing.assert_close(own, bs.disentanglement_error(net, *taus, *data, ALPHAS, distance="l2"))
    with pytest.raises(InputError, match=r"one number per example, shape \[30\]"):
        bs.disentanglement_error(net, *taus, *data, ALPHAS, distance=lambda p, q: p - q)

    class Broken(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (self.weight.sum() * 0 if self.weight.sum() < 10 else torch.nan)

    net = Broken(2, 2, bias=False)
    with torch.no_grad():
        net.weight.zero_()
    tau = TaskVector.from_tensors({"weight": torch.full((2, 2), 5.0)})
    xi = bs.disentanglement_error(net, tau, tau, torch.randn(4, 2), torch.randn(4, 2), [0.0, 1.0])
    assert xi[1, 1].isnan()  # never a number where the network gave none
    assert xi[0, 0] == 0


def test_data_are_read_once_and_sizes_of_batches_do_not_matter(
    case: tuple[nn.Module, list[TaskVector], list[Tensor]],
) -> None:
    net, taus, data = case
    whole = bs.disentanglement_error(net, *taus, *data, ALPHAS)
    parts = (iter([(d, None) for d in x.split(7)]) for x in data)
    assert torch.equal(bs.disentanglement_error(net, *taus, *parts, ALPHAS, batch_size=3), whole)
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    bs.disentanglement_error(net, *taus, *data, ALPHAS)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], t) for k, t in net.state_dict().items())


def test_statistics_move_with_a_vector_that_has_them() -> None:
    def build(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)).double()
        net(points(64, seed, 3))
        return net.eval()

    net = build(0)
    one, two = (TaskVector(net, build(s), buffers="move") for s in (1, 2))
    x = points(40, 7, 3)
    xi = bs.disentanglement_error(net, one, two, x, x, [0.0, 0.5], distance="l2")
    half = one.apply_to(net, 0.5)
    assert float(xi[1, 0]) == pytest.approx((half(x) - net(x)).norm(dim=1).mean().item(), rel=1e-10)
    with pytest.raises(InputError, match=r"moves '1.running_mean', not linearised: .* buffers='keep'"):
        bs.disentanglement_error(bs.linearize(net), one, two, x, x, [0.0, 0.5])
    with pytest.raises(InputError, match=r"the vector of 'a' moves the buffer '1.running_mean', '1.running_var'"):
        leakage(net, {"a": one}, {"a": x})


def test_a_hugging_face_classifier() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=3
    )
    net, one, two = (transformers.BertForSequenceClassification(config).double().eval() for _ in range(3))
    a, b = TaskVector(net, one), TaskVector(net, two)
    x = {"input_ids": torch.arange(18).reshape(6, 3), "attention_mask": torch.ones(6, 3, dtype=torch.long)}
    xi = bs.disentanglement_error(net, a, b, x, x, [0.0, 1.0], distance="l2")
    expected = (one(**x).logits - net(**x).logits).norm(dim=1).mean()
    assert float(xi[1, 0]) == pytest.approx(float(expected), rel=1e-6)
    lin = bs.linearize(net)
    fast = bs.disentanglement_error(lin, a, b, x, x, [0.0, 1.0], distance="l2")
    slow = (a.apply_to(lin)(**x).logits - lin(**x).logits).norm(dim=1).mean()
    assert float(fast[1, 0]) == pytest.approx(float(slow), rel=1e-6)


def test_refusals(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    net, taus, data = case
    vectors, inputs = dict(zip("ab", taus)), dict(zip("ab", data))
    with pytest.raises(InputError, match=r"distance='l1' is not known; did you mean l2"):
        disentanglement(net, vectors, inputs, ALPHAS, distance="l1")
    with pytest.raises(InputError, match="along='circle' is not known"):
        disentanglement(net, vectors, inputs, ALPHAS, along="circle")
    with pytest.raises(InputError, match=r"data: one entry per task is needed \(a, b\), got a"):
        disentanglement(net, vectors, {"a": data[0]}, ALPHAS)
    with pytest.raises(InputError, match=r"is needed \(a, b\), got a, b, c"):
        disentanglement(net, vectors, {**inputs, "c": data[0]}, ALPHAS)
    with pytest.raises(InputError, match="data: expected a dict, got list"):
        disentanglement(net, vectors, data, ALPHAS)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="heads: one entry per task"):
        disentanglement(net, vectors, inputs, ALPHAS, heads={"a": nn.Identity()})
    with pytest.raises(InputError, match="at least one task vector"):
        disentanglement(net, {}, {}, ALPHAS)
    with pytest.raises(InputError, match="a coefficient=nan: a finite number is needed"):
        disentanglement(net, vectors, inputs, [float("nan")])
    with pytest.raises(InputError, match=r"the model has no '0.weight'"):
        disentanglement(mlp()[2:], vectors, inputs, ALPHAS)
    image = nn.Conv2d(1, 2, 1)
    tau = TaskVector(image, nn.Conv2d(1, 2, 1))
    with pytest.raises(InputError, match=r"returned \[3, 2, 4, 4\]: say how to get \[n, classes\]"):
        bs.disentanglement_error(image, tau, tau, torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4), ALPHAS)
    pooled = bs.disentanglement_error(
        image, tau, tau, torch.randn(3, 1, 4, 4), torch.randn(3, 1, 4, 4), [0.0], output=lambda out: out.mean((2, 3))
    )
    assert pooled.shape == (1, 1)
    dropout = nn.Sequential(nn.Linear(2, 2), nn.Dropout()).train()
    tau = TaskVector(dropout, dropout)
    with pytest.raises(UnsupportedError, match="Dropout '1' is active"):
        bs.disentanglement_error(dropout, tau, tau, torch.randn(3, 2), torch.randn(3, 2), ALPHAS)


def test_pictures_and_tables(case: tuple[nn.Module, list[TaskVector], list[Tensor]]) -> None:
    pytest.importorskip("matplotlib").use("Agg")
    import matplotlib.pyplot as plt

    net, taus, data = case
    vectors, inputs = dict(zip("ab", taus)), dict(zip("ab", data))
    found = disentanglement(net, vectors, inputs, ALPHAS)
    figure = found.plot()
    assert figure.axes[0].get_xlabel().endswith("a")
    mesh = figure.axes[0].collections[0].get_array()
    assert mesh.reshape(5, 5)[0, 4] == pytest.approx(float(found.xi[4, 0]))  # a_1 to the right, a_2 up
    line = disentanglement(net, vectors, inputs, ALPHAS, along="line")
    assert line.plot().axes[0].get_ylabel()
    plt.close("all")
    assert "mean xi on [0, 1]" in found._repr_html_()
    assert "<td>-1.5</td>" in line._repr_html_()
    assert "largest xi" in disentanglement(net, vectors, inputs, [2.0])._repr_html_()
    cube = Disentanglement(("a",) * 3, torch.zeros(2), {"a": torch.zeros(2, 2, 2, 4)}, "l2", "grid")
    with pytest.raises(InputError, match="xi has 3 axes"):
        cube.plot()

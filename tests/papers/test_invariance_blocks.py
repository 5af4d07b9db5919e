"""Building blocks of the geometric invariance studies, against the data room, closed forms and slow versions."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from biascope import data
from biascope.ensembles import Initialiser, Networks, record
from biascope.geometry import containment, correlation, gsg, velocity
from biascope.geometry.data_directions import matched_count, removed_variance
from biascope.geometry.linear_cnn import pooled_cnn_evolution, tap_matrices
from biascope.geometry.mlp_theory import mlp_evolution
from biascope.support.errors import InputError
from biascope.support.seeds import generator
from biascope_papers.gih import fig1, fig6, fig7, fig9_15, sets
from biascope_papers.gih.averages import History, energy, jackknife, overlap
from biascope_papers.gih.fig2_8 import contained, highest, levels_of, random_rotations, summarise
from biascope_papers.gih.fig3_12_13 import batch_for, same_batches
from biascope_papers.gih.fig4_11 import labels_along, reach
from biascope_papers.gih.geometries import Geometry, decision, many_heads, spread_indices
from biascope_papers.gih.networks import DESIGNS, factory, is_a, scope, shape_of
from biascope_papers.gih.sets import stand_in
from biascope_papers.gih.tables import RATES, difference, keep, published
from biascope_papers.gih.training import Lazy

SHAPE = (1, 4, 4)


def unit(seed: int, k: int = 1, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    Q, _ = torch.linalg.qr(torch.randn(math.prod(shape), k, generator=torch.Generator().manual_seed(seed)))
    return Q.T.reshape(k, *shape).contiguous()


# ------------------------------------------------------------------------------------------------------------- rules


def test_what_did_not_run_is_named() -> None:
    assert scope(networks=(("mlp", "resnet18-narrow"), ("mlp", "resnet18"))) == " Not tested: networks resnet18."
    both = scope(networks=(["vit"], ["mlp", "vit"]), rates=([50], [50, 90]))
    assert both == " Not tested: networks mlp; rates 90."
    assert scope(networks=(["vit", "mlp", "lenet"], ["mlp", "vit"])) == ""
    assert "taken as they are, with their own" in scope(networks=(["a.py:x", "b.py:y"], []))


def test_reach_is_where_accuracy_falls() -> None:
    """A curve that holds for m of 10 directions and is at chance along the others reaches m / 10."""
    for m in (2, 5, 9):
        accuracy = torch.where(torch.arange(10) < m, 0.9, 0.5).double()
        assert float(reach(accuracy)) == pytest.approx(m / 10)
        assert float(reach(0.5 + 0.5 * (accuracy - 0.5))) == pytest.approx(m / 10)  # as far, but lower: the same


def test_a_rise_is_looked_for_at_a_fixed_epoch() -> None:
    """Gradients that are only noise: the highest epoch rises, on average, but neither a fixed one does so nor one that
    half of the networks have chosen for the others."""
    fixed, split, top = list[float](), list[float](), list[float]()
    S = torch.diag(torch.linspace(2, 0.1, 6, dtype=torch.float64))
    for seed in range(40):
        gradients = torch.randn(9, 6, 2, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        history, eye = History(gradients), torch.eye(6, dtype=torch.float64)
        levels = levels_of(history, {"S": S, "GSG": S, "I": eye, "G": eye})
        curves, found = summarise(history, levels, random_rotations(S), early=8)
        rise, excess, ahead, apart = list(found.values())[:4]
        curve = curves["Corr(G^t, GSG)"][0]
        assert rise.value == pytest.approx(float(curve[8] - curve[0]))
        rotated = curves["GSG randomly rotated"][0]
        assert excess.value == pytest.approx(rise.value - float(rotated[8] - rotated[0]))
        assert max(abs(ahead.value), abs(apart.value)) < 1e-12  # S and GSG are the same matrix here
        fixed.append(rise.value)
        top.append(float(curve[1:].max() - curve[0]))
        split.append(highest(history, levels, random_rotations(S))["rise of Corr(G^t, GSG) to its highest"].value)
    for values in (fixed, split):
        mean, error = (float(v) for v in (torch.tensor(values).mean(), torch.tensor(values).std() / 40**0.5))
        assert abs(mean) < 2.5 * error
    assert float(torch.tensor(top).mean()) > 5 * error


# ------------------------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
def test_boundary_task_is_the_isotropic_data_set(boundary: str) -> None:
    u, n, eps, seed = unit(0)[0], 200, 2.0, 5
    expected = data.isotropic(u, n, boundary, eps=eps, seed=seed)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(seed)  # the same numbers in the same order
    al = torch.randn(n, generator=rng, dtype=torch.float64)
    noise = sets.Noise(torch.randn(n, *SHAPE, generator=rng), torch.stack([al, al], 1).float())
    x, y = sets.boundary_task(noise, u, boundary, eps)  # type: ignore[arg-type]
    assert torch.allclose(x, expected.x, atol=1e-5)
    assert torch.equal(y, expected.y)
    assert int(y.sum()) == n // 2


def test_circles_and_contest_are_planted_exactly() -> None:
    U = unit(1, 3)
    noise = sets.Noise.draw(50, SHAPE, 1.0, 0, "cpu", "train", 0)
    x, y = sets.circles_task(noise, U[:2], (0.5, 2.0))
    plane = x.flatten(1) @ U[:2].flatten(1).T
    assert torch.allclose(plane.norm(dim=1), torch.where(y > 0, 2.0, 0.5), atol=1e-5)
    x, y = sets.contest_task(noise, list(U), 1.0, (0.25, 1.5))
    c = x.flatten(1) @ U.flatten(1).T
    assert torch.allclose(c[:, 0], torch.where(y > 0, 0.5, -0.5), atol=1e-5)
    assert torch.allclose(c[:, 1:].norm(dim=1), torch.where(y > 0, 1.5, 0.25), atol=1e-5)
    bare, same = sets.without((x, y), U[1], U[2])
    assert torch.allclose((bare.flatten(1) @ U.flatten(1).T)[:, 1:], torch.zeros(50, 2), atol=1e-5)
    assert torch.allclose(bare.flatten(1) @ U[0].flatten(), c[:, 0], atol=1e-5)
    assert same is y


def test_one_axis_of_the_circles_is_worth_what_the_formula_says() -> None:
    noise = sets.Noise.draw(40_000, (2,), 1.0, 0, "cpu", "train", 0)
    a = sets.circle_coefficients(noise, (0.5, 1.5))[:, 0].abs()
    right = ((a > 0.5) == (noise.signs > 0)).float().mean()
    assert float(right) == pytest.approx(fig1.one_axis_accuracy((0.5, 1.5)), abs=0.005)


def test_planes_have_one_scale_also_where_no_network_changes_its_mind(monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 2, squeeze=False)
    monkeypatch.setattr(fig1, "picture", lambda run, name, rows, columns, draw, *size, caption: draw(axes))
    line = torch.linspace(-1.0, 1.0, fig1.GRID)
    logits = {"A": line.expand(2, fig1.GRID, -1), "B": torch.ones(2, fig1.GRID, fig1.GRID)}
    dots = torch.tensor([[0.25, 0.0], [0.0, 1.5], [0.0, -1.5]]), torch.tensor([0, 1, 1])
    nothing = torch.tensor([]), torch.tensor([])  # a run begun when none were stored
    planes = {("mlp", name): fig1.Plane(each, (1.0, 0.5), *(dots if name == "A" else nothing))
              for name, each in logits.items()}  # fmt: skip
    fig1._picture(None, ("mlp",), planes, (0.25, {"mlp": 1.5}))  # type: ignore[arg-type]
    for axis in axes.flat:
        assert axis.get_xlim() == axis.get_ylim() == pytest.approx((-2.1, 2.1))
    drawn = [
        sum(len(each.get_offsets()) for each in axis.collections if hasattr(each, "get_sizes")) for axis in axes.flat
    ]
    assert drawn == [3, 0]
    assert axes[0, 1].get_ylabel() == "u2 (G: 0.5)"
    plt.close(figure)


def test_noise_is_shared_by_directions_and_differs_by_name() -> None:
    noise = sets.Noise.draw(20, SHAPE, 1.0, 0, "cpu", "train", 0)
    u, v = unit(2, 2)
    a, b = (sets.boundary_task(noise, d, "linear", 1.0) for d in (u, v))
    rest = [x.flatten(1) - (x.flatten(1) @ unit(2, 2).flatten(1).T) @ unit(2, 2).flatten(1) for x, _ in (a, b)]
    assert torch.allclose(rest[0], rest[1], atol=1e-5)
    assert not torch.equal(noise.w, sets.Noise.draw(20, SHAPE, 1.0, 0, "cpu", "test", 0).w)


def test_lazy_slices() -> None:
    lazy = Lazy(lambda i: (torch.tensor(float(i)), torch.tensor(i)), 7)
    assert [int(y) for _, y in lazy[2:5]] == [2, 3, 4]
    assert int(lazy[-1][1]) == 6
    with pytest.raises(IndexError):
        lazy[7]


# ----------------------------------------------------------------------------------------------------------- G and G^t


def test_many_heads_give_the_closed_form_of_the_mlp() -> None:
    """ReLU MLP, torch's initialisation: G = I / (3 D) 6^-L (Thm A.2)."""
    made = record(lambda: nn.Sequential(nn.Linear(5, 40), nn.ReLU(), nn.Linear(40, 16)))
    G = many_heads(made, (5,), 800, seed=0, probe_std=1.0, device="cpu")
    expected = torch.eye(5, dtype=torch.float64) / 15 / 6
    assert float((G - expected).abs().max()) < 0.06 * float(expected.max())


@pytest.mark.gpu
def test_many_heads_on_a_gpu_are_in_full_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Initialiser.draw  # a GPU's own random numbers would make other networks

    def same_networks(self: Initialiser, seed: int, start: int, stop: int, device: str) -> Networks:
        return draw(self, seed, start, stop).to(device)

    monkeypatch.setattr(Initialiser, "draw", same_networks)
    recorded = record(factory("lenet", (1, 16, 16), outputs=16, activation="gelu"))
    there, here = (many_heads(recorded, (1, 16, 16), 20, 0, 1e-3, device) for device in ("cuda", "cpu"))
    assert float((there - here).norm() / here.norm()) < 1e-5  # tf32 is off by 1e-4 and more


def test_lenet_oracle_is_the_sampled_geometry_of_the_linear_lenet() -> None:
    def linear() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(2, 6, 5, bias=False), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5, bias=False), nn.AvgPool2d(2),
            nn.Flatten(), nn.Linear(16, 8, bias=False),
        )  # fmt: skip

    sampled = many_heads(record(linear), (2, 16, 16), 400, seed=0, probe_std=1.0, device="cpu")
    assert correlation(sampled, fig9_15.lenet_geometry(16, channels=2)) > 0.95
    assert correlation(sampled, fig9_15.lenet_geometry(16, channels=2)) > correlation(sampled, torch.eye(512)) + 0.5
    with pytest.raises(InputError, match="divide evenly"):
        fig9_15.lenet_geometry(18)


def test_history_is_the_dense_computation() -> None:
    g = torch.randn(4, 5, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # times, R, P, D
    dense = torch.einsum("trpd,trpe->tde", g, g)
    history, w = History(g), torch.ones(5, dtype=torch.float64)
    each = torch.einsum("trpd,trpe->trde", g, g)

    def apart(a: torch.Tensor, b: torch.Tensor) -> float:
        return sum(float((a[i] * b[j]).sum()) for i in range(5) for j in range(5) if i != j)

    between = [1 - apart(a, b) / (apart(a, a) * apart(b, b)) ** 0.5 for a, b in pairwise(each)]
    assert history.velocity(w, between=True).tolist() == pytest.approx(between, abs=1e-12)
    M = dense[0] + torch.eye(6, dtype=torch.float64)
    energies, norm = history.energies(M), float(M.norm())
    expected = [velocity(b, a) for a, b in pairwise(dense)]
    assert history.velocity(w).tolist() == pytest.approx(expected, abs=1e-12)
    assert history.with_start(w).tolist() == pytest.approx([correlation(d, dense[0]) for d in dense], abs=1e-12)
    assert history.with_matrix(energies, norm, w).tolist() == pytest.approx([correlation(d, M) for d in dense])
    change = [correlation(d - dense[0], M) for d in dense[1:]]
    assert history.change_with_matrix(energies, norm, w).tolist() == pytest.approx(change, abs=1e-10)
    left = torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)  # without network 2
    fewer = torch.einsum("trpd,trpe->tde", g[:, [0, 1, 3, 4]], g[:, [0, 1, 3, 4]])
    assert float(history.with_start(left)[3]) == pytest.approx(correlation(fewer[3], fewer[0]), abs=1e-12)
    assert overlap(g[0], g[1]).shape == (5, 5)
    assert energy(g[0], M).shape == (5,)


def test_networks_that_wander_do_not_move_their_mean() -> None:
    """Each network has one direction, drawn anew every epoch: the mean over all networks is I at all times."""
    times, R, D = 200, 6, 8
    g = torch.randn(times, R, 1, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    g /= g.norm(dim=-1, keepdim=True)
    history, w = History(g), torch.ones(R, dtype=torch.float64)
    seen, between = history.velocity(w), history.velocity(w, between=True)
    assert float(seen.mean()) == pytest.approx(1 - (1 / D) / (1 / R + (1 - 1 / R) / D), abs=0.03)
    assert abs(float(between.mean())) < 0.08  # a ratio of sums over few pairs: biased by some per cent at R = 6
    moving = g.clone()
    moving[100:] = torch.eye(D, dtype=torch.float64)[0]  # now all of them turn to one direction
    assert float(History(moving).velocity(w, between=True)[99]) > 0.4


def test_containment_from_factors_is_the_dense_one() -> None:
    g = torch.randn(3, 6, 2, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    S = torch.diag(torch.logspace(0, -4, 20, dtype=torch.float64))
    g[2] = g[0] + 5 * g[2] @ S  # moves where S is large
    target = gsg(torch.eye(20, dtype=torch.float64), S)
    numbers = contained(History(g), target, [1, 2])
    for t in (1, 2):
        dense = torch.einsum("trpd,trpe->tde", g, g)
        found = containment(dense[t] - dense[0], target, (2, 6))
        for k, share, random in zip((2, 6), found.share, found.random):
            mine = numbers[f"share of G^{t} - G^0 within the first {k} eigenvectors of GSG"]
            assert mine.value == pytest.approx(share, rel=1e-9)
            assert mine.standard_error is not None
            assert numbers[f"share of G^{t} - G^0 within {k} random dimensions"].value == pytest.approx(
                random, rel=1e-9
            )
            inside = mine.value > random + 2 * mine.standard_error
            assert inside == (t == 2), (t, k)  # noise lies in random directions, the planted change does not
    still = g[[0, 0]]
    assert contained(History(still), target, [1]) == {}


def test_jackknife_of_a_mean_is_its_standard_error() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 9.0], dtype=torch.float64)
    mean, error = jackknife(lambda w: (w * values).sum() / w.sum(), 4)
    assert float(mean) == 4.0
    assert error is not None
    assert float(error) == pytest.approx(float(values.std() / 2))
    assert jackknife(lambda w: w.sum(), 2)[1] is None


def test_true_spread_sees_structure_and_not_noise() -> None:
    D, n = 40, 60
    eye = torch.eye(D, dtype=torch.float64)
    scale = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
    for spread, root in ((0.0, eye), (float(scale.std(correction=0)), scale.sqrt().diag())):
        groups = []
        for i in range(6):
            rows = torch.randn(n, D, generator=generator(0, i), dtype=torch.float64) @ root
            groups.append(rows.T @ rows / n)
        mean = torch.stack(groups).mean(0)
        found = fig9_15.true_spread(Geometry(mean, torch.ones(D), eye, tuple(groups), (D,), 6 * n))
        assert found.standard_error is not None
        assert abs(found.value - spread) < 4 * found.standard_error + 0.05
        assert float(torch.linalg.eigvalsh(mean).std()) > spread + 0.1  # the naive spread is fooled


def test_span_counts_the_true_orders_of_magnitude() -> None:
    D, n = 40, 400
    for orders in (0.0, 1.0, 3.0):
        scale = torch.logspace(0, -orders, D, dtype=torch.float64)
        groups = []
        for i in range(6):
            rows = torch.randn(n, D, generator=generator(1, i), dtype=torch.float64) * scale.sqrt()
            groups.append(rows.T @ rows / n)
        mean = torch.stack(groups).mean(0)
        found = fig9_15.span(Geometry(mean, torch.ones(D), torch.eye(D), tuple(groups), (D,), 6 * n))
        truth = math.log10(float(scale[0] / scale[-4:].mean()))
        assert found.standard_error is not None
        assert abs(found.value - truth) < 4 * found.standard_error + 0.02 * orders  # eigenvectors are not exact
    few = [g[:, :] for g in (torch.eye(D).double() + 0.0, torch.eye(D).double())]
    assert fig9_15.span(Geometry(few[0], torch.ones(D), torch.eye(D), tuple(few), (D,), 2)).value == pytest.approx(0.0)


def test_displacement_profile() -> None:
    side = 6
    band = torch.tensor([[1.0 if abs(i % side - j % side) <= 1 and i // side == j // side else 0.0
                          for j in range(36)] for i in range(36)])  # fmt: skip
    assert fig9_15.displacement_profile(band, side).tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_evolutions_of_the_two_theorems() -> None:
    S = torch.randn(30, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    taps = tap_matrices((4, 4), 3)
    K, patches = fig7.channel_overlap(4, 3, 1)
    expected = pooled_cnn_evolution(taps, S.T @ S, 5, 0.7, 1.3)
    assert torch.allclose(fig7.overlap_evolution(K, patches, S.T @ S, 5, 0.7, 1.3), expected, rtol=1e-10)
    root = fig7.square_root(S.T @ S)
    assert torch.allclose(mlp_evolution(root, 7, 0.5, 2.0), mlp_evolution(S, 7, 0.5, 2.0), rtol=1e-8)
    K3, _ = fig7.channel_overlap(4, 3, 3)
    assert torch.equal(K3[16:32, 16:32], K)
    assert not K3[:16, 16:].any()


# -------------------------------------------------------------------------------------------- labels, removals, pruning


@pytest.mark.parametrize("boundary", ["linear", "quadratic", "sinusoidal"])
def test_labels_along_are_those_of_relabel(boundary: str) -> None:
    train, test = (stand_in(100, 4, 0, part).x for part in ("train", "test"))
    U = unit(3, 2, (3, 4, 4))
    found = labels_along(train, test, U, boundary, 0.0, 0, 0)  # type: ignore[arg-type]
    for k in range(2):
        reference = data.relabel(train, U[k], boundary)  # type: ignore[arg-type]
        assert torch.equal(found.train[k], reference.y)
        again = data.relabel(test, U[k], boundary, reference=reference)  # type: ignore[arg-type]
        assert (found.test[k] == again.y).float().mean() > 0.98  # float32 against float64 at the boundary
    assert found.ceiling.tolist() == [1.0, 1.0]


def test_sinusoid_of_the_text_is_that_of_relabel() -> None:
    """sin(xbar.u) with standardised channels, against `data.relabel`; it is not the published code's."""
    train, test = (3.0 * stand_in(200, 4, 0, part).x + 1.0 for part in ("train", "test"))
    U = unit(3, 2, (3, 4, 4))
    text, code = (labels_along(train, test, U, "sinusoidal", 0.0, 0, 0, kind) for kind in ("channel", "projection"))
    for k in range(2):
        reference = data.relabel(train, U[k], "sinusoidal", sinusoid="channel")
        again = data.relabel(test, U[k], "sinusoidal", sinusoid="channel", reference=reference)
        assert (text.train[k] == reference.y).float().mean() > 0.99  # float32 against float64 at the boundary
        assert (text.test[k] == again.y).float().mean() > 0.98
        assert (text.train[k] == code.train[k]).float().mean() < 0.9
    noisy = labels_along(train, test, U, "sinusoidal", 0.2, 0, 0, "channel")
    assert 0.5 < float(noisy.ceiling.min()) < 1.0
    linear = [labels_along(train, test, U, "linear", 0.2, 0, 0, kind).train for kind in ("channel", "projection")]
    assert torch.equal(linear[0], linear[1])  # for the sinusoid alone


def test_label_noise_flips_as_many_labels_as_noise_on_the_images() -> None:
    """Two Gaussians at correlation r have equal signs with probability 1 - arccos(r)/pi."""
    n = 20_000
    train, test = (torch.randn(n, 1, 2, 2, generator=generator(0, part)) for part in ("a", "b"))
    found = labels_along(train, test, unit(4, 1, (1, 2, 2)), "linear", 0.5, 0, 0)
    r = 1 / math.sqrt(1.5)
    assert float(found.ceiling[0]) == pytest.approx(1 - math.acos(r) / math.pi, abs=0.015)


def test_removal_matches_variance() -> None:
    D = 12
    S = torch.diag(torch.arange(1.0, D + 1, dtype=torch.float64))
    guided, others = torch.eye(D, dtype=torch.float64), fig6.random_basis(D, generator(0, "basis"))
    assert torch.allclose(others @ others.T, torch.eye(D, dtype=torch.float64), atol=1e-12)
    shares, reached = removed_variance(S, guided), removed_variance(S, others)
    for k in (0, 1, 5, 11):
        assert fig6.matched(shares, reached, k) == matched_count(S, guided, others, k)
    x = torch.randn(9, 1, 3, 4, generator=generator(0, "x"), dtype=torch.float64)
    once = fig6.remove(x, others[:5])
    assert torch.allclose(fig6.remove(once, others[:5]), once)
    assert torch.linalg.matrix_rank(fig6.remove(torch.eye(D, dtype=torch.float64), others[:5])) == D - 5
    assert fig6.remove(x, others[:0]) is x


def test_what_is_removed_first() -> None:
    S, G = torch.diag(torch.tensor([3.0, 2.0])), torch.diag(torch.tensor([4.0, 1.0]))
    first = [fig6.guiding(S, G, way, 0.0)[0].abs().tolist() for way in ("generalised", "gsg")]  # type: ignore[arg-type]
    assert first == [[0.0, 1.0], [1.0, 0.0]]


def test_keep_drops_the_lowest_scores_of_each_class() -> None:
    y = torch.arange(40) % 4
    scores = torch.rand(40, generator=generator(0, "scores"))
    kept = keep(scores, y, 0.3, per_class=True)
    assert len(kept) == 28
    for c in range(4):
        own, left = scores[y == c], scores[kept[y[kept] == c]]
        assert torch.equal(left.sort().values, own.sort().values[3:])
    assert torch.equal(scores[keep(scores, y, 0.5, per_class=False)].sort().values, scores.sort().values[20:])
    ties = keep(torch.zeros(10), torch.zeros(10), 0.4, per_class=False)
    assert ties.tolist() == [4, 5, 6, 7, 8, 9]  # equal scores: the data's order


def test_published_gains_are_those_the_paper_states() -> None:
    cells = {(net, rate): [published()[f"{net}, {rate} % removed, {way}"] for way in ("random", "score")]
             for net in ("lenet", "resnet18", "vit") for rate in RATES}  # fmt: skip
    assert len(published()) == 3 * len(cells)  # and the difference of the two
    assert cells["lenet", 20] == [63.95, 65.1]
    gains = [score - random for random, score in cells.values()]
    assert min(gains) > 0.5
    assert max(gains) < 2.05
    few = difference(torch.tensor([[2.0, 4.0], [1.0, 1.0]]))
    assert (few.value, few.standard_error) == (2.0, None)


# ----------------------------------------------------------------------------------------------------------- odds, ends


def test_small_helpers() -> None:
    assert spread_indices(256, 100) == [0, 100, 200, 255]
    assert [math.ceil(n / batch_for(n, 10_000, 128)) for n in (10_000, 40_000, 100_000)] == [79, 79, 79]
    assert batch_for(20_000, 10_000, 128) == 254
    assert [same_batches(*each) for each in ((20_000, 10_000, 128), (128, 128, 64), (100, 50, 128))] == [
        False,
        True,
        True,
    ]
    assert is_a("resnet18-narrow", "resnet", "vit")
    assert not is_a("resnet.py:build", "resnet")
    assert [float(decision(torch.tensor([[1.0, 3.0, 5.0]])[:, :c])) for c in (2, 3)] == [2.0, 1.0]
    with pytest.raises(InputError, match="choose from"):
        shape_of(1, 32, ["lenat"])


def test_architectures_are_those_of_the_paper() -> None:
    count = {name: sum(p.numel() for p in factory(name, (3, 32, 32))().parameters()) for name in ("mlp", "lenet-small")}
    assert count["mlp"] == 317_602
    assert 47_000 < count["lenet-small"] < 49_500
    for name, (_, _, norm) in DESIGNS.items():
        if norm is not None:
            bare = factory(name, (1, 32, 32), norm=False)()
            assert not any(isinstance(m, nn.BatchNorm2d | nn.LayerNorm) for m in bare.modules()), name
    gelu = factory("lenet", (1, 16, 16), activation="gelu")()
    assert any(isinstance(m, nn.GELU) for m in gelu.modules())

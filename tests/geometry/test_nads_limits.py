"""Where NADs could go wrong without a word: fast spectra, heads that are not the end, errors of centred moments."""

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import input_gradients, record
from biascope.geometry import NADs, average_geometry, nads
from biascope.geometry.few_passes import few_passes
from biascope.geometry.gradients import find_head
from biascope.support.errors import InputError, UnsupportedError


def falling(decay: float, T: int = 300, D: int = 900) -> tuple[Tensor, Tensor, Tensor]:
    """Rows [T, D] with singular values i^-decay; those, and the right singular vectors [D, T]."""
    g = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(n, T, generator=g, dtype=torch.float64))[0] for n in (T, D))
    s = torch.arange(1, T + 1, dtype=torch.float64) ** -decay
    return (U * s) @ V.T, s, V


# ------------------------------------------------------------------------------------- directions of small eigenvalues


def test_small_eigenvalues_are_found_too() -> None:
    """The 40th is 1.4e-4 of the first: against the first alone, any direction would pass for it."""
    rows, s, V = falling(1.2)
    found = few_passes(lambda X: rows.T @ (rows @ X), 900, 40, passes=20, dtype=torch.float64)
    assert bool(found.converged.all())
    assert torch.allclose(found.values, s[:40] ** 2, rtol=1e-6)
    assert float((found.vectors * V[:, :40]).sum(0).abs().min()) > 0.9999


def test_what_rounding_hides_is_said() -> None:
    rows, s, _ = falling(1.2)
    single = rows.float()
    with pytest.warns(UserWarning, match="only the first [0-9]+ of 40 leading directions are certain"):
        found = few_passes(lambda X: single.T @ (single @ X), 900, 40, passes=20)
    sure = int(found.converged.long().cumprod(0).sum())
    assert 5 <= sure < 40
    assert torch.allclose(found.values[:sure], s[:sure] ** 2, rtol=1e-3)


class Falling(nn.Module):
    """A linear network whose gradient has standard deviations i^-decay in the coordinates."""

    def __init__(self, D: int, decay: float) -> None:
        super().__init__()
        self.linear = nn.Linear(D, 1, bias=False)
        self.scale = nn.Parameter(torch.arange(1, D + 1) ** -decay, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x * self.scale)
        return out


@pytest.mark.parametrize("memory", [None, "20MB"])
def test_matrix_free_directions_of_a_fast_spectrum(memory: str | None) -> None:
    """Gradients kept (their Gram matrix), or drawn again for every pass (block Krylov), against a decomposition."""
    T, D, k = 400, 5000, 30
    factory = record(lambda: Falling(D, 1.2))
    found = nads(factory, (D,), T, method="autograd", top=k, max_memory=memory)
    rows = input_gradients(factory.draw(0, 0, T), torch.zeros(1, D))[:, 0].double()
    exact = torch.linalg.svd(rows, full_matrices=False)
    sure = found.resolved
    assert sure is not None
    assert sure == k or memory is not None
    assert sure >= 10
    assert torch.allclose(found.eigenvalues[:sure], exact.S[:sure] ** 2 / T, rtol=2e-3)
    assert float((found.directions[:sure].double() * exact.Vh[:sure]).sum(1).abs().min()) > 0.99


def test_the_mixed_derivative_averaged_before_it_is_composed() -> None:
    """Against the matrices: the eigenvectors of Hm^T Hm, with jackknife errors; far below E[H^T H]."""
    factory = record(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)))
    x, T = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), 24
    drawn = factory.draw(0, 0, T, dtype=torch.float64)

    def mixed(t: int) -> Tensor:
        values = {name: value[t] for name, value in drawn.params.items()}

        def gradient(shift: Tensor) -> dict[str, Tensor]:
            return torch.func.grad(lambda p: torch.func.functional_call(drawn.template, p, ((x + shift)[None],)).sum())(
                values
            )

        jacobian = torch.func.jacfwd(gradient)(torch.zeros_like(x))
        return torch.cat([part.reshape(-1, 5) for part in jacobian.values()])

    H = [mixed(t) for t in range(T)]
    mean = sum(H[1:], H[0]) / T
    found = nads(factory, (5,), T, method="mixed-derivative", average="operator", x=x, top=5, dtype=torch.float64)
    exact = torch.linalg.eigvalsh(mean.T @ mean).flip(0)
    assert torch.allclose(found.eigenvalues, exact, rtol=1e-8)
    assert (found.standard_errors > 0).all()
    gram = nads(factory, (5,), T, method="mixed-derivative", x=x, top=5, dtype=torch.float64)
    assert float(gram.eigenvalues.sum()) > 5 * float(exact.sum())


def test_mixed_derivatives_say_how_far_they_got() -> None:
    """Float32 networks with a spectrum over seven decades: the rest is not passed off as found."""
    D = 200
    factory = lambda: nn.Sequential(Falling(D, 1.5), nn.Tanh())  # noqa: E731
    exact = nads(factory, (D,), 30, method="mixed-derivative", top=40, dtype=torch.float64)
    assert exact.resolved == 40
    with pytest.warns(UserWarning, match="are certain"):
        found = nads(factory, (D,), 30, method="mixed-derivative", top=40)
    assert found.resolved is not None
    assert 2 <= found.resolved < 40
    assert torch.allclose(found.eigenvalues[: found.resolved], exact.eigenvalues[: found.resolved], rtol=1e-2)
    assert f"the first {found.resolved};" in found._repr_html_()


# ------------------------------------------------------------------------------------------ heads that are not the end


class Ending(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.body, self.head, self.wide, self.how = nn.Linear(6, 5), nn.Linear(5, 1), nn.Linear(6, 1), how

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.body(x)))
        if self.how == "skip":
            out += 5 * self.wide(x)
        elif self.how == "relu":
            torch.relu_(out)
        return out


@pytest.mark.parametrize("how", ["skip", "relu"])
def test_a_head_that_is_changed_in_place_is_not_averaged_out(how: str) -> None:
    with pytest.raises(UnsupportedError, match="'head' is changed in place"):
        nads(lambda: Ending(how), (6,), 8, head="marginal")
    assert nads(lambda: Ending(""), (6,), 8, head="marginal").head == "marginal"


def test_a_head_over_several_places_is_not_averaged_out() -> None:
    factory = lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))  # noqa: E731
    with pytest.raises(UnsupportedError, match="several places"):
        nads(factory, (6,), 8, head="marginal", scalarise=None)


# ---------------------------------------------------------------------------------------------- centring and stability


class Shifted(nn.Module):
    """f = (30 + w)^T x with w ~ N(0, diag(9, 1, 0.09)): a mean gradient far from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3) * torch.tensor([3.0, 1.0, 0.3]))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (30 + self.w))[:, None]


def test_standard_errors_of_centred_moments() -> None:
    """Of the eigenvalues of a normal sample: lambda sqrt(2 / T); those of the raw moment are 10 to 100 times larger."""
    T = 4000
    found = nads(Shifted, (3,), T, method="autograd", centered=True, dtype=torch.float64)
    expected = found.eigenvalues * (2 / T) ** 0.5
    assert torch.allclose(found.eigenvalues, torch.tensor([9.0, 1.0, 0.09], dtype=torch.float64), rtol=0.15)
    # from 16 blocks: relative error of an error 1 / sqrt(30) = 0.18; within three of them
    assert ((found.standard_errors / expected - 1).abs() < 0.55).all()
    assert found.center
    assert found.stability[-1] == (T, pytest.approx(1.0, abs=1e-3))


def test_centring_leaves_an_averaged_head_alone() -> None:
    """Given the features, the mean gradient is zero; the rows of a network's features have another mean."""
    factory = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 1))  # noqa: E731
    plain, centred = (nads(factory, (4,), 64, head="marginal", centered=center) for center in (False, True))
    assert torch.allclose(plain.eigenvalues, centred.eigenvalues, rtol=1e-6)  # engines differ by rounding


def test_stability_is_never_about_the_whole_space() -> None:
    found = nads(lambda: nn.Linear(8, 1), (8,), 512, stability_k=10)
    assert found.stability_k == 4
    assert all(value < 0.99 for _, value in found.stability)
    assert nads(lambda: nn.Linear(400, 1), (400,), 6).stability_k == 3
    assert nads(lambda: nn.Linear(1, 1), (1,), 64).stability == ()
    with pytest.raises(InputError, match="stability_k must be at least 1"):
        nads(lambda: nn.Linear(8, 1), (8,), 16, stability_k=0)


def test_auto_says_that_it_did_not_become_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biascope.geometry.anisotropy.AUTO_LIMIT", 1024)
    with pytest.warns(UserWarning, match=r"first 4 directions of two halves of 1024 networks overlap by 0\."):
        found = nads(lambda: nn.Linear(8, 1), (8,), "auto", tolerance=0.999)
    assert found.n_networks == 1024
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert nads(lambda: Falling(8, 2.0), (8,), "auto").n_networks < 1024
        assert nads(lambda: nn.Linear(1, 1), (1,), "auto").n_networks == 256


# --------------------------------------------------------------------------------------- what is not used is not taken


@pytest.mark.parametrize(
    ("method", "changed", "name"),
    [
        ("mixed-derivative", {"head": "marginal"}, "head"),
        ("ntk", {"centered": True}, "centered"),
        ("ntk", {"x": torch.zeros(3)}, "x"),
        ("autograd", {"precision": "tf32"}, "precision"),
        ("ntk", {"average": "operator"}, "average"),
        ("mixed-derivative", {"precision": "tf32"}, "precision"),
        ("autograd", {"step": 1.0}, "step"),
        ("mixed-derivative", {"step": 1.0}, "step"),
        ("finite-difference", {"n_points": 8}, "n_points"),
    ],
)
def test_options_that_a_method_does_not_use_are_refused(method: str, changed: dict[str, object], name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"^{name} is for method"):
        nads(lambda: nn.Linear(3, 1), (3,), 4, method=method, **changed)  # type: ignore[arg-type]


def test_other_refusals() -> None:
    with pytest.raises(InputError, match="head='bogus'"):
        nads(lambda: nn.Linear(3, 1), (3,), 4, method="ntk", head="bogus")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="x has a NaN or infinity, first in"):
        nads(lambda: nn.Linear(3, 1), (3,), 4, x=torch.tensor([1.0, torch.nan, 0.0]))


def test_networks_whose_answers_depend_on_the_batch_are_refused() -> None:
    def factory(track: bool) -> nn.Module:
        norm = nn.BatchNorm2d(3, track_running_stats=track)
        return nn.Sequential(nn.Conv2d(1, 3, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(48, 1))

    with pytest.raises(UnsupportedError, match="BatchNorm2d '1' keeps no running statistics"):
        nads(lambda: factory(False), (1, 6, 6), 4)
    with pytest.raises(UnsupportedError, match="BatchNorm2d '1' keeps no running statistics"):
        average_geometry(lambda: factory(False), (1, 6, 6), n_networks=4)
    assert nads(lambda: factory(True), (1, 6, 6), 4).n_networks == 4


# -------------------------------------------------------------------------------------------------------- what is kept


def test_how_it_was_measured_is_kept(tmp_path: Path) -> None:
    x = torch.randn(1, 32, 32, generator=torch.Generator().manual_seed(3))
    found = nads(lambda: nets.build("lenet"), (1, 32, 32), 8, centered=True, x=x)
    found.save(tmp_path / "n.safetensors")
    again = NADs.load(tmp_path / "n.safetensors")
    assert again.x is not None
    assert torch.equal(again.x, x)
    assert (again.center, again.precision, again.resolved) == (True, "float32", 1024)
    ntk = nads(lambda: nn.Linear(3, 1), (3,), method="ntk", top=1, n_points=8)
    assert ntk.x is None
    ntk.save(tmp_path / "k.safetensors")
    assert NADs.load(tmp_path / "k.safetensors").x is None


def test_spectra_in_one_number() -> None:
    values = torch.tensor([4.0, 2.0, 1.0, 1.0], dtype=torch.float64)
    found = NADs(torch.eye(4), values, torch.zeros(4), 8.0, 1, 0, "autograd", 0.0)
    share = values / 8
    assert found.effective_rank() == pytest.approx(float(torch.exp(-(share * share.log()).sum())))
    assert found.effective_rank("participation") == pytest.approx(64 / 22)
    power = NADs(
        torch.eye(50), torch.arange(1, 51, dtype=torch.float64) ** -1.7, torch.zeros(50), 1.0, 1, 0, "autograd", 0.0
    )
    assert power.decay_index() == pytest.approx(1.7)
    with pytest.raises(UnsupportedError, match="all 4 eigenvalues are needed: leave out top=2"):
        NADs(torch.eye(4)[:2], values[:2], torch.zeros(2), 8.0, 1, 0, "autograd", 0.0).effective_rank()


# ------------------------------------------------------------------------------------------------- results, and slips


def directions(*shape: int, k: int = 3) -> NADs:
    """The first k unit vectors of inputs of a shape."""
    D = torch.Size(shape).numel()
    return NADs(torch.eye(D)[:k].view(k, *shape), torch.ones(k), torch.zeros(k), 1.0, 8, 0, "autograd", 0.0)


def test_inputs_of_another_shape_are_not_compared() -> None:
    """2 x 4 pixels are not 4 x 2; a flat list, or one channel more or less in the shape, is the same memory."""
    found = directions(1, 2, 4)
    for other in (directions(1, 4, 2), directions(4, 2).directions, directions(2, 2, 2)):
        with pytest.raises(InputError, match=r"inputs of different shape: \[1, 2, 4\] and"):
            found.overlap(other, 2)
        with pytest.raises(InputError, match="inputs of different shape"):
            found.principal_angles(other, 2)
    for same in (found, directions(2, 4), directions(8), torch.eye(8), directions(1, 2, 4).directions):
        assert found.overlap(same, 2) == pytest.approx(1.0)
    with pytest.raises(InputError, match=r"inputs of different shape: \[1, 2, 4\]"):
        found.overlap(torch.eye(6), 2)
    with pytest.raises(InputError, match=r"other \[8\] does not fit"):
        found.overlap(torch.ones(8), 1)


def test_as_many_angles_as_directions() -> None:
    found = directions(6)
    assert found.principal_angles(torch.eye(6)[1:], 2).shape == (2,)
    with pytest.raises(InputError, match="the first 2 directions of other span 1 dimension"):
        found.principal_angles(torch.ones(2, 6), 2)


def test_results_are_compared_by_identity() -> None:
    found = directions(6)
    assert found == found
    assert found != directions(6)
    assert len({found, found}) == 1


class Sometimes(nn.Linear):
    """Every other network is dead: its gate is open or shut by the sign of one weight."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.weight[0, 0] > 0)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_network_may_be_dead(seed: int) -> None:
    """With a small budget networks come one by one, and a dead one must not speak for all."""
    found = nads(lambda: Sometimes(9, 50), (9,), 12, seed=seed, scalarise=lambda out: out[:, 1], max_memory=2000)
    exact = nads(lambda: Sometimes(9, 50), (9,), 12, seed=seed, scalarise=lambda out: out[:, 1])
    assert found.trace == pytest.approx(exact.trace, rel=1e-5)
    with pytest.raises(InputError, match="all differences are zero"):
        nads(lambda: Sometimes(9, 50), (9,), 12, seed=seed, scalarise=lambda out: 0 * out[:, 1], max_memory=2000)


def test_slips_with_results() -> None:
    with pytest.raises(InputError, match="first must be at least 1, not -1"):
        directions(1, 2, 4).plot(-1)
    with pytest.raises(InputError, match="path=5: a string or a path is needed"):
        NADs.load(5)  # type: ignore[arg-type]
    for n_points in (0, -1):
        with pytest.raises(InputError, match=f"n_points must be at least 1, not {n_points}"):
            nads(lambda: nn.Linear(3, 1), (3,), method="ntk", n_points=n_points)


def test_the_picture_shows_the_channel_that_matters() -> None:
    """Only the third channel is used: pictures of the first would be empty."""

    class Third(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(16, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x[:, 2].flatten(1))
            return out

    found = nads(Third, (3, 4, 4), 64)
    axes = found.plot(2).axes
    assert [axes[0].get_title(), axes[2].get_title()] == ["$u_{1}$, channel 3 of 3", "$u_{2}$, channel 3 of 3"]
    shown = torch.as_tensor(axes[0].images[0].get_array())
    assert torch.allclose(shown.float(), found.directions[0, 2].float())
    one = directions(1, 4, 4).plot(2).axes
    assert one[0].get_title() == "$u_{1}$"


# ------------------------------------------------------------------------------------------------ normalised weights


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weight_normalisation_and_an_averaged_head() -> None:
    """Below the head it may be, in its old form too; on the head the weights are not independent."""
    old, new = nn.utils.weight_norm, nn.utils.parametrizations.weight_norm

    def body(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
        return nn.Sequential(norm(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 1))

    found = [nads(lambda: body(norm), (4,), 16, head="marginal") for norm in (old, new)]  # noqa: B023
    assert torch.allclose(found[0].eigenvalues, found[1].eigenvalues, rtol=1e-5)
    assert find_head(record(lambda: body(old)).draw(0, 0, 1), torch.ones(4)) == ("2", 1)
    for norm in (old, new):
        factory = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), norm(nn.Linear(8, 1)))  # noqa: E731, B023
        with pytest.raises(UnsupportedError, match="weight of the last layer '2' is computed from other parameters"):
            nads(factory, (4,), 16, head="marginal")


def test_one_network_has_nothing_about_its_mean() -> None:
    with pytest.raises(InputError, match="nothing is left of one network"):
        nads(lambda: nn.Linear(3, 1), (3,), 1, "autograd", centered=True)

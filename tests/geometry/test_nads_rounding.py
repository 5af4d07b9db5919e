"""Directions that are rounding: they count neither for stability nor, without a warning, for the trace."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from biascope import nets
from biascope.ensembles import Precision, record
from biascope.geometry import average_geometry, nads
from biascope.geometry.anisotropy import _warn_of_rounding
from biascope.geometry.gradients import Sampler
from biascope.geometry.moments import BlockMoments
from biascope.support.errors import InputError


def pooled() -> nn.Module:
    """Three directions: the means of the channels."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 1))


# ----------------------------------------------------------------------------------------------------------- stability


@pytest.mark.parametrize("method", ["autograd", "finite-difference"])
def test_auto_stops_for_an_architecture_of_few_directions(method: str) -> None:
    found = nads(pooled, (3, 8, 8), "auto", method=method)  # type: ignore[arg-type]
    assert (found.n_networks, found.stability_k) == (256, 3)
    assert found.stability[-1][1] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("center", [False, True])
def test_stability_does_not_count_null_directions(center: bool) -> None:
    found = nads(pooled, (3, 8, 8), 64, method="autograd", centered=center)
    assert found.stability_k == 3
    assert found.stability[-1][1] == pytest.approx(1.0, abs=1e-6)


def test_rounding_of_small_steps_is_no_direction_either() -> None:
    """At h = 0.001 the fourth eigenvalue is 1e-6 of the first: not the rounding of a sum, but rounding."""
    found = nads(pooled, (3, 8, 8), 256, step=1e-3)
    assert found.eigenvalues[3] > 1e-7 * found.eigenvalues[0]
    assert found.stability_k == 3


@pytest.mark.parametrize("networks", [8, 60])
def test_stability_of_few_directions_without_a_matrix(networks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biascope.geometry.anisotropy.DENSE_UP_TO", 10)  # by their Gram matrix, and by Krylov
    found = nads(pooled, (3, 8, 8), networks, method="autograd", top=3)
    assert found.stability_k == 3
    assert found.stability == ((networks, pytest.approx(1.0, abs=1e-6)),)


def test_stability_of_a_marginal_head_is_about_what_its_halves_span() -> None:
    """Two of four networks with two features each: rank four."""
    found = nads(lambda: nn.Sequential(nn.Linear(40, 2), nn.Tanh(), nn.Linear(2, 1)), (40,), 4, head="marginal")
    assert found.stability_k == 4
    assert "first 4" in found._repr_html_()


def test_halves_of_which_one_is_zero() -> None:
    moments = BlockMoments(dimension=4, blocks=2)
    moments.add(0, torch.stack([torch.eye(4)[:2], torch.zeros(2, 4)]))
    assert moments.split_half_overlap(2) == (0.0, 0)
    assert moments.trace == 1.0


def test_tolerances_that_no_overlap_has_are_refused() -> None:
    for tolerance in (float("nan"), 1.5, -0.1):
        with pytest.raises(InputError, match=f"tolerance={tolerance}: a number from 0 to 1"):
            nads(lambda: nn.Linear(8, 1), (8,), "auto", tolerance=tolerance)


# --------------------------------------------------------------------------------------------------------- small steps


@pytest.mark.parametrize("head", ["sampled", "marginal"])
def test_steps_lost_in_rounding_are_warned_about(head: str) -> None:
    """At h = 1e-6 rounding alone moves the trace by more than a tenth; the warning points at the caller."""
    exact = nads(smooth, (256,), 40, step=1e-6, head=head, dtype=torch.float64)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"step=1e-06 .* rounding .* of the trace: .* dtype=torch\.float64") as caught:
        found = nads(smooth, (256,), 40, step=1e-6, head=head)  # type: ignore[arg-type]
    assert found.trace > 1.1 * exact.trace
    assert caught[0].filename == __file__


def test_the_warning_comes_before_the_harm() -> None:
    """Silent where the trace is right to 1 %."""
    exact = nads(smooth, (256,), 40, step=1e-4, dtype=torch.float64).trace
    for step in (1e-1, 1e-2, 1e-3, 1e-4):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert nads(smooth, (256,), 40, step=step).trace == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("name", ["lenet", "logreg", "mlp", "autoencoder", "lenet-small"])
def test_the_default_step_is_silent(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = nads(lambda: nets.build(name), nets.info(name).input_shape, 1, scalarise=lambda out: out[:, 0])
    assert found.trace > 0


def test_small_steps_in_float64_are_silent() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = nads(smooth, (256,), 8, step=1e-4, head="marginal", dtype=torch.float64)
    assert found.trace == pytest.approx(nads(smooth, (256,), 8, step=1e-3, head="marginal").trace, rel=0.01)


def test_steps_that_do_not_move_the_input() -> None:
    with pytest.raises(InputError, match="all differences are zero: the network"):
        nads(smooth, (256,), 4, step=1e-12)
    with pytest.raises(InputError, match="step=nan: a finite number above 0"):
        nads(smooth, (256,), 4, step=float("nan"))


@pytest.mark.parametrize(("precision", "says"), [("tf32", None), ("bf16", "or precision='float32'")])
def test_coarse_arithmetic(precision: Precision, says: str | None) -> None:
    """tf32 gives float32 outputs and is no reason to warn; bf16 rounds them, and another dtype would not help."""
    x = torch.zeros(4)
    sampler = Sampler(record(smooth), x, 0, "finite-difference", 1.0, x.device, None, None, precision, None, None, 0.0)
    sampler.sizes.append(1e4)  # outputs a hundred times their differences
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _warn_of_rounding(sampler, trace=1.0)
    assert [says in str(warning.message) for warning in caught if says] == ([True] if says else [])
    assert says or not caught
    assert sampler.floor(1.0) > 1e-6


class Near(nn.Linear):
    """Linear in x - 100,000: small outputs of large inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - 1e5)


def test_inputs_are_rounded_too() -> None:
    """Numbers near 100,000 lie 1/128 apart, so x + 0.01 and x - 0.01 are 2/128 apart."""
    x = torch.full((9,), 1e5)
    with pytest.warns(UserWarning, match="rounding"):
        found = nads(lambda: Near(9, 1, bias=False), (9,), 64, step=0.01, x=x)
    exact = nads(lambda: Near(9, 1, bias=False), (9,), 64, step=0.01, x=x, dtype=torch.float64)
    assert found.trace == pytest.approx((2 / 128 / 0.02) ** 2 * exact.trace, rel=1e-3)


def test_networks_that_do_not_depend_on_their_input_are_told() -> None:
    """The mean of what instance normalisation gives is zero: what is left of gradients are directions of rounding."""

    def constant() -> nn.Module:
        pooled = (nn.InstanceNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
        return nn.Sequential(nn.Conv2d(1, 3, 3), *pooled)

    def usual() -> nn.Module:
        pooled = (nn.InstanceNorm2d(3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 1))
        return nn.Sequential(nn.Conv2d(1, 3, 3), *pooled)

    for use in (
        lambda build: nads(build, (1, 5, 5), 20, "autograd"),
        lambda build: average_geometry(build, (1, 5, 5), 20),
    ):
        with pytest.warns(UserWarning, match=r"rounding explains about 100% of the trace"):
            use(constant)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            use(usual)

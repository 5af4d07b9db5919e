"""The Monte Carlo floor of the geometric velocity (spec 02, 2.11)."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from biascope.ensembles import Networks, input_gradients, record
from biascope.geometry import geometry_of, velocity, velocity_floor
from biascope.support.errors import InputError, UnsupportedError

F64 = torch.float64


def networks(count: int = 6) -> Networks:
    return record(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))).draw(0, 0, count, dtype=F64)


def floor(drawn: Networks, probes: torch.Tensor) -> float:
    return velocity_floor(input_gradients(drawn, probes))


def draws(count: int, n: int) -> torch.Tensor:
    return 3 * torch.randn(count, n, 3, generator=torch.Generator().manual_seed(1), dtype=F64)


def test_against_moments_one_probe_after_another() -> None:
    """The variance of M_p across G from the matrices themselves, projected."""
    drawn, probes = networks(), draws(1, 5)[0]
    M = torch.stack([geometry_of(drawn, p[None]).matrix for p in probes])
    G = M.mean(0)
    unit = G / G.norm()
    along = (M * unit).sum((1, 2))
    off = M - along[:, None, None] * unit
    V = float((off - off.mean(0)).square().sum()) / 4
    apart = sum(float((M[p] * M[q]).sum()) for p in range(5) for q in range(5) if p != q) / 20
    assert floor(drawn, probes) == pytest.approx(1 - 1 / (1 + V / (5 * apart)), rel=1e-9)


@pytest.mark.parametrize("scale", [3.0, 0.3])
def test_it_is_the_velocity_between_independent_sets(scale: float) -> None:
    """Means over 400 sets of 16 probes and over their 200 pairs, within three standard errors.

    1 - E<G, G'> / E||G||^2, which counts noise along G too, would be 1.4 to 1.8 times as large.
    """
    drawn, sets = networks(), scale / 3 * draws(400, 16)
    floors = torch.tensor([floor(drawn, probes) for probes in sets])
    G = [geometry_of(drawn, probes).matrix for probes in sets]
    seen = torch.tensor([velocity(a, b) for a, b in zip(G[::2], G[1::2])])
    error = float((floors.var() / 400 + seen.var() / 200).sqrt())
    assert abs(float(floors.mean() - seen.mean())) < 3 * error
    assert 3 * error < 0.3 * float(seen.mean())  # so that the factor of 1.4 would be seen
    assert velocity(G[0], G[0]) == pytest.approx(0, abs=1e-12)


def test_limits() -> None:
    """Gradients with nothing in common: 1; gradients that differ in length alone: 0."""

    class Squares(nn.Module):
        def __init__(self, cross: bool) -> None:
            super().__init__()
            self.w, self.cross = nn.Parameter(torch.ones(3)), cross

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x.square() if self.cross else x.sum(1, keepdim=True).square()
            return (self.w * out).sum(1, keepdim=True)

    for cross, expected in ((True, 1.0), (False, 0.0)):
        drawn = record(lambda cross=cross: Squares(cross)).draw(0, 0, 1, dtype=F64)
        assert floor(drawn, torch.diag(torch.tensor([1.0, 2.0, 3.0]))) == pytest.approx(expected, abs=1e-12)


def test_where_there_is_no_noise_to_tell() -> None:
    """One probe with a gradient gave 0 / 0, and a floor of NaN."""
    alone = torch.zeros(2, 5, 3)
    alone[:, 2] = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    for gradients, message in (
        (alone, "gradients are zero at all, or all but"),
        (0 * alone, "gradients are zero at all, or all but"),
        (alone[:, :1], "gradients are zero at all, or all but"),
        (torch.ones(2, 3), r"gradients \[2, 3\] does not fit"),
        (torch.ones(0, 3, 2), "gradients is empty"),
        (torch.full((2, 3, 4), torch.nan), "gradients has a NaN or infinity, first"),
    ):
        with pytest.raises(InputError, match=message):
            velocity_floor(gradients)


def test_the_floor_has_no_scale() -> None:
    gradients = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    expected = velocity_floor(gradients)
    for scale in (1e-90, 1e90):  # the fourth powers of these are no float64
        assert velocity_floor(scale * gradients) == pytest.approx(expected, rel=1e-12)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor of float64 that was made."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == F64:
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


@pytest.mark.parametrize("room", [1, 2000, 3000, None])  # one row at a time, few, some; all take 3080 bytes
def test_the_products_are_made_in_blocks_that_fit(room: int | None) -> None:
    """Against sums of inner products of all pairs of rows in float64, for gradients that lie apart in memory too."""
    T, n, D = 7, 5, 11
    gradients = torch.randn(D, n, T, generator=torch.Generator().manual_seed(0)).permute(2, 1, 0)
    g = gradients.double()
    pairs = torch.einsum("spd,tqd->sptq", g, g).square().sum((0, 2))
    apart = (pairs.sum() - pairs.trace()) / (n * (n - 1))
    across = pairs.diagonal().mean() - apart - pairs.mean(1).var() / pairs.mean()
    with Largest() as made:
        found = velocity_floor(gradients, room)
    assert found == pytest.approx(float(across / (n * apart + across)), rel=1e-12)
    if room is not None and room > 1:
        assert made.bytes <= room


def test_the_budget_of_the_floor_is_the_callers() -> None:
    drawn = record(lambda: nn.Sequential(nn.Linear(40, 8), nn.Tanh(), nn.Linear(8, 1))).draw(0, 0, 30)
    probes = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    gradients = input_gradients(drawn, probes)
    with Largest() as made:
        few = velocity_floor(gradients, max_memory="20KB")
    assert made.bytes <= 20 * 2**10 < 8 * 30 * 6 * 40
    assert few == pytest.approx(floor(drawn, probes), rel=1e-5)  # the float32 gradients are in other blocks


def test_a_network_in_train_mode_is_refused() -> None:
    drawn = record(lambda: nn.Sequential(nn.Conv1d(1, 2, 2), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(4, 1))).draw(
        0, 0, 2
    )
    drawn.template.train()
    with pytest.raises(UnsupportedError, match="BatchNorm1d '1' is in train mode"):
        floor(drawn, torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0)))

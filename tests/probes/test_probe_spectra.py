"""Spectra of probes where rounding or the layout of a weight would show: against float64 and the layer itself."""

import numpy as np
import pytest
import torch
from torch import nn

from biascope.probes import View
from biascope.probes.kernel_metrics import effective_rank, spectrum
from biascope.probes.weight_metrics import norm_products, spectral_norm
from biascope.support.errors import InputError
from probes.probe_zoo import mlp


def test_a_kernel_that_is_rounding_after_centring_is_named_as_that() -> None:
    """To a deep ReLU network as torch draws it all inputs look alike; what is left has negative eigenvalues."""
    rng = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(14):
        layers += [nn.Linear(16, 16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(16, 3))
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.25, 0.25, generator=rng)
    view = View.of(net, torch.randn(40, 16, generator=rng))
    with pytest.raises(InputError, match="positive semi-definite"):
        view.kernel._with(view.kernel.values.double()).centered().eigh()
    assert float(view.eigenvalues.max()) < 2 * torch.finfo(torch.float32).eps * view._largest
    with pytest.raises(InputError, match=r"is zero .* after centring"):
        spectrum(View.of(net, torch.ones(40, 16)))


@pytest.mark.parametrize("spread", [0.1, 0.01])
def test_centred_spectra_of_float32_kernels_hold_no_rounding(spread: float) -> None:
    """Inputs close together: centring removes nearly all of the kernel, and rounding of the removed part is left."""
    rng = torch.Generator().manual_seed(0)
    net = mlp(10, 48, 48, 3)
    x = torch.randn(10, generator=rng) + spread * torch.randn(60, 10, generator=rng)
    single, double = (View.of(net.to(d), x.to(d)) for d in (torch.float32, torch.float64))
    assert single.kernel.values.dtype == torch.float32
    values, exact = single.eigenvalues, double.eigenvalues
    floor = torch.finfo(torch.float32).eps * float(double.uncentred_eigenvalues[0])
    assert float(exact.quantile(0.5)) < floor < float(exact[0])
    assert float((values - exact).abs().max()) < floor
    assert bool(((values == 0) | (values > 0.99 * floor)).all())
    assert int((values > 0).sum()) == pytest.approx(int((exact > floor).sum()), abs=3)
    assert spectrum(single)["median"] == 0  # and not a rounding error of 1e-8 of the largest
    assert effective_rank(single) == pytest.approx(effective_rank(double), rel=1e-2)
    assert torch.equal(double.eigenvalues > 0, double.kernel.centered().eigh().values > 2**-52 * double._largest)
    # the leading eigenvalues of the three outputs are close: 20 steps do not tell them apart, and a floor need not
    assert 0.99 < double._largest / float(double.uncentred_eigenvalues[0]) < 1 + 1e-12


@pytest.mark.parametrize("groups", [1, 2])
def test_spectral_norm_of_a_transposed_convolution(groups: int) -> None:
    """The norm is that of [out, in / groups * k * k], row by row as the layer uses its kernel."""
    layer = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False).double()
    net = nn.Sequential(layer, nn.Flatten(), nn.Linear(6 * 36, 1)).double()
    found = spectral_norm(View.of(net, torch.randn(3, 4, 4, 4).double()))
    rows = []
    for out in range(6):  # the kernel of one output channel: what a point in every input channel leaves there
        images = [layer(torch.eye(4, dtype=torch.float64)[i].view(1, 4, 1, 1))[0, out] for i in range(4)]
        group = slice(out // (6 // groups) * (4 // groups), (out // (6 // groups) + 1) * (4 // groups))
        rows.append(torch.stack(images)[group].flatten())
    matrix = torch.stack(rows).detach().numpy()
    assert matrix.shape == (6, 4 // groups * 9)
    assert found["0.weight"] == pytest.approx(np.linalg.svd(matrix)[1][0], rel=1e-12)


PARAMETRISED = {
    "weight": nn.utils.parametrizations.weight_norm,
    "spectral": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "old spectral": nn.utils.spectral_norm,
}


@pytest.mark.parametrize("kind", PARAMETRISED)
def test_spectral_norm_of_the_weights_a_layer_uses(kind: str) -> None:
    """By the layer as a function: its matrix is what it makes of the unit vectors, without the bias."""
    torch.manual_seed(0)
    layer = PARAMETRISED[kind](nn.Linear(6, 5).double())
    net = nn.Sequential(nn.Sequential(layer, nn.ReLU()), nn.Linear(5, 2).double()).eval()
    view = View.of(net, torch.randn(3, 6).double())
    with torch.no_grad():
        used = [layer(torch.eye(6).double()) - layer.bias, net[1].weight.detach()]
    exact = [float(np.linalg.svd(W.numpy(), compute_uv=False)[0]) for W in used]
    assert spectral_norm(view) == {"0.0.weight": pytest.approx(exact[0]), "1.weight": pytest.approx(exact[1])}
    found = norm_products(view)
    assert found["spectral"] == pytest.approx(exact[0] * exact[1])
    assert found["frobenius"] == pytest.approx(float(used[0].norm() * used[1].norm()))
    assert found["two_layers"] == pytest.approx(float(used[1].norm()) * exact[0])
    if kind == "spectral":
        assert exact[0] == pytest.approx(1.0, rel=1e-3)
    alone = View.of(layer, torch.randn(3, 6).double())
    assert list(spectral_norm(alone)) == ["weight"]

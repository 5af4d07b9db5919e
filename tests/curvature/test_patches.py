"""Second moments of patches without the patches, against the patches."""

import pytest
import torch

import biascope as bs
from biascope.curvature import contract, patches, sums
from biascope.curvature.patches import PatchMoment, patch_moment
from biascope.network.layers.rules import Conv, unfold


def by_patches(x, conv):
    patches = unfold(x, conv.kernel, conv.stride, conv.padding, conv.dilation, 1)[:, 0]
    Z = torch.cat([patches, patches.new_ones(len(x), 1, patches.shape[-1])], 1).transpose(0, 1).flatten(1)
    return Z @ Z.T


@pytest.mark.parametrize(
    ("kernel", "padding", "size"),
    [
        ((3, 3), ((1, 1), (1, 1)), (6, 5)),
        ((3, 3), ((0, 0), (0, 0)), (6, 7)),
        ((5, 3), ((2, 2), (0, 1)), (7, 6)),
        ((2, 4), ((3, 0), (1, 5)), (5, 4)),
        ((1, 3), ((0, 0), (1, 1)), (1, 9)),
        ((3, 3), ((1, 1), (1, 1)), (1, 1)),
        ((5, 5), ((2, 2), (2, 2)), (2, 3)),
        ((1, 1), ((0, 0), (0, 0)), (3, 2)),
    ],
)
def test_equals_the_second_moment_of_the_patches(kernel, padding, size):
    conv = Conv(kernel, (1, 1), padding, (1, 1), 1)
    x = torch.randn(4, 3, *size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    moment = PatchMoment(conv, 3, size, x.dtype, x.device)
    moment.add(x[:1])
    moment.add(x[1:])
    exact = by_patches(x, conv)
    for bias in (True, False):
        d = len(exact) - (not bias)
        assert float((moment.finish(bias) - exact[:d, :d]).abs().max()) < 1e-12 * float(exact.max())


@pytest.mark.parametrize("representation", ["diagonal", "kfac", "ekfac"])
def test_what_other_devices_do_is_the_same(representation, monkeypatch):
    """The forms for GPUs (few large products), on a CPU."""
    g = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(32, 4, 3, padding=1), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(4 * 17 * 17, 3)
    ).double()
    x = torch.randn(5, 32, 17, 17, generator=g, dtype=torch.float64)
    mine = bs.fisher(net, x, representation)
    monkeypatch.setattr(contract, "CACHED", ())
    monkeypatch.setattr(patches, "TERMS", {"cpu": 300})
    theirs = bs.fisher(net, x, representation)
    v = torch.randn(mine.shape[0], generator=g, dtype=torch.float64)
    torch.testing.assert_close(mine @ v, theirs @ v, rtol=1e-8, atol=1e-10)


def test_float32_keeps_its_digits():
    conv = Conv((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)
    x = torch.randn(120, 32, 8, 8, generator=torch.Generator().manual_seed(0)).relu()
    moment = PatchMoment(conv, 32, (8, 8), x.dtype, x.device)
    for part in x.split(7):
        moment.add(part)
    exact = by_patches(x.double(), conv)
    assert float((moment.finish(True) - exact).abs().max() / exact.max()) < 1e-6


def test_only_where_it_is_less_work():
    def found(channels=64, size=(16, 16), kernel=(3, 3), stride=(1, 1), dilation=(1, 1), groups=1):
        conv = Conv(kernel, stride, ((kernel[0] // 2,) * 2,) * 2, dilation, groups)
        return patch_moment(conv, torch.Size([channels, *size]), torch.float32, torch.device("cpu"))

    assert isinstance(found(), PatchMoment)
    assert isinstance(found(size=(4, 4)), PatchMoment)
    assert isinstance(found(size=(1, 1)), PatchMoment)  # of 81 pairs of offsets, one meets the image
    for no in (
        {"channels": 3},
        {"kernel": (1, 1)},
        {"stride": (2, 2)},
        {"dilation": (2, 2)},
        {"groups": 2},
    ):
        assert found(**no) is None, no


@pytest.mark.parametrize("bias", [True, False])
def test_kfac_of_a_wide_convolution_is_the_same_either_way(bias, monkeypatch):
    g = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(32, 4, 3, padding=1, bias=bias), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(100, 3)
    ).double()
    x = torch.randn(6, 32, 5, 5, generator=g, dtype=torch.float64)
    fast = bs.fisher(net, x, "kfac", batch_size=4)
    monkeypatch.setattr(sums, "patch_moment", lambda *_: None)
    slow = bs.fisher(net, x, "kfac")
    for one, two in zip(fast.pieces, slow.pieces, strict=True):
        torch.testing.assert_close(one.A, two.A, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(one.B, two.B, rtol=1e-12, atol=1e-12)

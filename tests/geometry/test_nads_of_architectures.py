"""Where the leading directions of the paper's architectures lie (spec 01, check 20), with narrow versions of them.

Algorithm 1 with h = 100 on 32 x 32 images, the last layer averaged out. Published, at full width and 10,000 networks:
57 % of LeNet's u_1 at DC, 90 % of VGG-11's; ResNet-18's first 64 on the frequencies that are multiples of 4.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from biascope import nets
from biascope.geometry import nads


def energy(net: str, n_networks: int, **options: Any) -> Tensor:
    """Fourier energy [16, 32, 32] of the first 16 directions, DC at [0, 0]."""
    factory = lambda: nets.build(net, in_channels=1, image_size=32, outputs=1, **options)  # noqa: E731
    found = nads(factory, (1, 32, 32), n_networks, head="marginal", top=16, seed=0)
    power = torch.fft.fft2(found.directions[:, 0].double()).abs().square()
    return power / power.sum((1, 2), keepdim=True)


@pytest.mark.slow
def test_lenet_and_vgg_look_at_the_mean_first() -> None:
    lenet = energy("lenet", 12)
    assert lenet[0].argmax() == 0
    assert 0.3 < float(lenet[0, 0, 0]) < 0.75
    vgg = energy("vgg11", 6, width=8, hidden=(64, 64))
    assert float(vgg[0, 0, 0]) > 0.65
    assert float(vgg[1:4, 0, 0].max()) < 0.1  # the others are orthogonal to it


@pytest.mark.slow
def test_resnet_looks_at_multiples_of_four() -> None:
    """Three strides of 2 alias them to DC. A random direction has 1/16 of its energy there."""
    comb = energy("resnet18", 6, width=4)[:, ::4, ::4].sum((1, 2))
    assert float(comb[:4].mean()) > 0.7
    assert float(comb.mean()) > 0.6

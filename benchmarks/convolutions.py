"""TFLOP/s of 3 x 3 convolutions of ResNet-18 in float32: forward, and back to the input in three ways.

    python benchmarks/convolutions.py --device cuda

For every size of image: cuDNN's (on a CPU: oneDNN's) way forward, its way back, the way back as a forward convolution
with the weights turned round, and as a product of patches. `biascope.network.layers.convolution` chooses by these.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from biascope.network.layers import convolution
from biascope.support.precision import arithmetic


def rate(call: Callable[[], Tensor], flop: float, device: str) -> float:
    """TFLOP/s of the best of three calls, after one."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds = []
    for _ in range(4):
        wait()
        start = time.perf_counter()
        call()
        wait()
        seconds.append(time.perf_counter() - start)
    return flop / min(seconds[1:]) / 1e12


def back(x: Tensor, w: Tensor, few: int, own: bool) -> Callable[[], Tensor]:
    """The way back from a gradient, with our convolution (patches up to `few` pixels) or torch's."""
    kept = convolution.DEVICES, convolution.MANY, convolution.FEW_PIXELS
    convolution.DEVICES, convolution.MANY, convolution.FEW_PIXELS = (x.device.type,) if own else (), 1, few
    y = convolution.conv2d(x.requires_grad_(True), w, padding=1)
    convolution.DEVICES, convolution.MANY, convolution.FEW_PIXELS = kept
    g = torch.randn_like(y)

    def call() -> Tensor:
        convolution.FEW_PIXELS = few
        (found,) = torch.autograd.grad(y, x, g, retain_graph=True)
        convolution.FEW_PIXELS = kept[2]
        return found

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--examples", type=int, default=2048)
    given = parser.parse_args()
    print("channels  image   forward  back  turned round  patches")
    with arithmetic("float32"):
        for c, side in ((64, 32), (128, 16), (256, 8), (512, 4)):
            x = torch.randn(given.examples, c, side, side, device=given.device)
            w = torch.randn(c, c, 3, 3, device=given.device)
            flop = 2.0 * given.examples * c * c * 9 * side * side
            ways = [lambda x=x, w=w: F.conv2d(x.detach(), w, padding=1), back(x, w, 0, own=False)]
            ways += [back(x, w, 0, own=True), back(x, w, 10**9, own=True)]
            found = "  ".join(f"{rate(way, flop, given.device):7.2f}" for way in ways)
            print(f"{c:8d}  {side:2d} x {side:<2d} {found}", flush=True)


if __name__ == "__main__":
    main()

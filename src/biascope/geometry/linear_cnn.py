"""Average geometry of linear convolutional networks, exactly (GIH paper, Thms 3.2, A.2, A.3, example A.10).

For a linear network (and for a smooth one at x -> 0, where an activation is a gain) G = E[df/dx df/dx^T] follows from a
recursion backwards through the layers: at initialisation channels are uncorrelated and share one covariance over
positions. It is an oracle for the sampler, and a G at no cost. float64 throughout.
"""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from biascope.geometry.measures import symmetric
from biascope.support.errors import InputError
from biascope.support.limits import Count, NonNegative, check_shapes
from biascope.support.signatures import checked

GELU_GAIN = 0.25  # GELU'(0)^2


@checked
def tap_matrices(
    shape: Sequence[int],
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Literal["same"] | None = None,
    circular: bool = False,
    dilation: int | Sequence[int] = 1,
) -> Tensor:
    """[taps, inputs, outputs] zeros and ones: which input position a tap of the kernel reads for an output position.

    As torch's convolutions do it, for zero padding and for `padding_mode="circular"`. Numbers are for all dimensions,
    or one for each.

    Args:
        shape: the input's (length,) or (height, width).
        kernel: taps per dimension.
        stride: as torch's.
        padding: positions added on both sides, or "same" (stride 1 only), which keeps the size; an even kernel then has
            one more on the right. By default 0, and "same" if circular.
        circular: whether the padding wraps around; at most once, as in torch.
        dilation: as torch's.

    Example:
        >>> tap_matrices((3,), kernel=2).shape
        torch.Size([2, 3, 2])
        >>> tap_matrices((4, 6), kernel=(1, 3)).shape
        torch.Size([3, 24, 16])
    """
    lines = tap_lines(shape, kernel, stride=stride, padding=padding, circular=circular, dilation=dilation)
    if len(lines) == 1:
        return lines[0]
    rows, columns = lines
    pairs = torch.einsum("aio,bjp->abijop", rows, columns)
    taps = rows.shape[0] * columns.shape[0]
    return pairs.reshape(taps, rows.shape[1] * columns.shape[1], rows.shape[2] * columns.shape[2])


@checked
def tap_lines(
    shape: Sequence[int],
    kernel: int | Sequence[int],
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | Literal["same"] | None = None,
    circular: bool = False,
    dilation: int | Sequence[int] = 1,
) -> list[Tensor]:
    """`tap_matrices` of each dimension by itself; a tap of an image is the Kronecker product of one of each.

    Example:
        >>> [list(line.shape) for line in tap_lines((4, 6), (1, 3))]
        [[1, 4, 4], [3, 6, 4]]
    """
    shape = _per_axis(shape, "shape", shape)
    padding = ("same" if circular else 0) if padding is None else padding
    kernels, strides = _per_axis(kernel, "kernel", shape), _per_axis(stride, "stride", shape)
    dilations = _per_axis(dilation, "dilation", shape)
    if isinstance(padding, str):
        if max(strides) > 1:
            raise InputError(f'{padding=} with {stride=}: "same" is for stride 1 alone; give a number of positions')
        sides = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernels, dilations)]
    else:
        sides = [(pad, pad) for pad in _per_axis(padding, "padding", shape, least=0)]
    axes = zip(shape, kernels, strides, dilations, sides, strict=True)
    return [_line(*axis, circular) for axis in axes]


def _line(extent: int, kernel: int, stride: int, dilation: int, sides: tuple[int, int], circular: bool) -> Tensor:
    left, right = sides
    outputs = (extent + left + right - dilation * (kernel - 1) - 1) // stride + 1
    if outputs < 1:
        raise InputError(f"a kernel of {kernel} at dilation {dilation} does not fit into {extent + left + right}")
    if circular and max(left, right) > extent:
        raise InputError(f"circular padding of {max(left, right)} wraps around {extent} positions more than once")
    made = torch.zeros(kernel, extent, outputs, dtype=torch.float64, device="cpu")
    for tap in range(kernel):
        for out in range(outputs):
            position = out * stride + tap * dilation - left
            position = position % extent if circular else position
            if 0 <= position < extent:
                made[tap, position, out] = 1.0
    return made


def _per_axis(value: int | Sequence[int], name: str, shape: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """A number for each dimension of shape, which has one or two."""
    each = (value,) * len(shape) if isinstance(value, int) else tuple(value)
    if len(each) != len(shape) or len(shape) not in (1, 2) or min(each) < least:
        raise InputError(f"{name}={value} for {tuple(shape)}, (length,) or (height, width): from {least} on, one each")
    return each


@checked
def through_convolution(covariance: Tensor, taps: Tensor, channels_out: Count, variance: NonNegative) -> Tensor:
    """Covariance at a convolution's input [in, in] from the one at its output: c_out s^2 sum_taps T Sigma T^T.

    Example:
        >>> through_convolution(torch.eye(2).double(), tap_matrices((3,), 2), 1, 1.0).diagonal()
        tensor([1., 2., 1.], dtype=torch.float64)
    """
    check_shapes("taps [taps, in, out], covariance [out, out]", taps, covariance)
    taps, covariance = taps.double(), symmetric(covariance, "covariance").double()
    return channels_out * variance * torch.einsum("tio,op,tjp->ij", taps, covariance, taps)


@checked
def through_sum(*branches: Tensor) -> Tensor:
    """Covariance at the input of a residual sum [in, in]: what came back through its branches, skip included, adds.

    So it does as long as all branches but one hold weights of their own, of mean zero: the cross terms vanish. For an
    identity skip give the covariance at the sum's output itself, for a 1 x 1 shortcut `through_convolution` of it.

    Example:
        >>> at_output = torch.eye(3).double()
        >>> branch = through_convolution(at_output, tap_matrices((3,), 2, circular=True), 1, 0.5)
        >>> through_sum(at_output, branch).diagonal()
        tensor([2., 2., 2.], dtype=torch.float64)
    """
    return torch.stack([branch.double() for branch in branches]).sum(0)


@checked
def pool_matrix(shape: Sequence[int], size: int | Sequence[int]) -> Tensor:
    """P [outputs, inputs], the average over blocks of `size` (one number, or one per dimension).

    The whole shape as the size is global pooling.

    Example:
        >>> pool_matrix((4,), 2)[0]
        tensor([0.5000, 0.5000, 0.0000, 0.0000], dtype=torch.float64)
        >>> pool_matrix((4, 6), (4, 6)).shape
        torch.Size([1, 24])
    """
    lines, shape = [], _per_axis(shape, "shape", shape)
    for extent, block in zip(shape, _per_axis(size, "size", shape), strict=True):
        if extent % block:
            raise InputError(f"pooling by {block} does not divide {extent} positions (shape={shape}, size={size})")
        blocks = torch.eye(extent // block, dtype=torch.float64, device="cpu")
        lines.append(blocks.repeat_interleave(block, dim=1) / block)
    return lines[0] if len(lines) == 1 else torch.kron(*lines)


@checked
def through_average_pool(covariance: Tensor, P: Tensor) -> Tensor:
    """Covariance at the pooling's input [in, in] from the one at its output: P^T Sigma P.

    Example:
        >>> through_average_pool(torch.eye(1).double(), pool_matrix((2,), 2))
        tensor([[0.2500, 0.2500],
                [0.2500, 0.2500]], dtype=torch.float64)
    """
    check_shapes("P [out, in], covariance [out, out]", P, covariance)
    return P.double().T @ symmetric(covariance, "covariance").double() @ P.double()


@checked
def dense_head(
    positions: Count, variances: Sequence[NonNegative], widths: Sequence[Count] = (), gain: NonNegative = 1.0
) -> Tensor:
    """Covariance [positions, positions] per channel at the input of a stack of dense layers.

    `variances` of the weights from the first dense layer to the last, `widths` of the hidden ones between, `gain` the
    squared slope of the activation between them.

    Example:
        >>> dense_head(2, [0.5, 0.1], widths=[10], gain=0.25)
        tensor([[0.1250, 0.0000],
                [0.0000, 0.1250]], dtype=torch.float64)
    """
    scale = variances[-1] * math.prod(n * s * gain for n, s in zip(widths, variances[:-1], strict=True))
    return scale * torch.eye(positions, dtype=torch.float64, device="cpu")


# ------------------------------------------------------------- one convolution and global average pooling (Thm 3.2)


@checked
def patch_overlap(taps: Tensor) -> Tensor:
    """K = C C^T with C = sum_j M_j [D, p]: banded, positive semi-definite, of rank at most p (Thm A.3 corrected).

    The paper calls the products M_i M_j^T diagonal; for i != j they are shifts.

    Example:
        >>> patch_overlap(tap_matrices((3,), 2))
        tensor([[1., 1., 0.],
                [1., 2., 1.],
                [0., 1., 1.]], dtype=torch.float64)
    """
    check_shapes("taps [taps, in, out]", taps)
    C = taps.double().sum(2).T  # [D, p]: how often tap p reads position D
    return C @ C.T


@checked
def pooled_cnn_geometry(taps: Tensor, n: Count, sw: NonNegative = 1.0, sp: NonNegative = 1.0) -> Tensor:
    """G = (n sw^2 sp^2 / k^2) K of f = (1/k) sum_i w_i sum_j phi_i^T M_j^T x, k the number of patches, [D, D].

    Example A.10 is D = 3, kernel 2, n = 1 with w = 1: G = (s^2/4) [[1,1,0],[1,2,1],[0,1,1]] (printed s^2/2).

    Example:
        >>> pooled_cnn_geometry(tap_matrices((3,), 2), n=1).diagonal()
        tensor([0.2500, 0.5000, 0.2500], dtype=torch.float64)
    """
    K = patch_overlap(taps)
    return n * sw**2 * sp**2 / taps.shape[2] ** 2 * K


@checked
def pooled_cnn_evolution(taps: Tensor, S: Tensor, n: Count, sw: NonNegative = 1.0, sp: NonNegative = 1.0) -> Tensor:
    """Delta at initialisation, exact for every n: [D, D] (Thm 3.2 corrected), from S = sum x x^T.

    -(2/k^4) { [n(n+1) sw^2 sp^4 + n(n+2) sw^4 sp^2] K S K + n sw^2 sp^4 tr(K S) K }; the paper prints n^2 for both
    n(n+1) and n(n+2) and drops the last term.

    Example:
        >>> pooled_cnn_evolution(tap_matrices((3,), 2), torch.eye(3).double(), n=4).shape
        torch.Size([3, 3])
    """
    check_shapes("taps [taps, in, out], S [in, in]", taps, S)
    K, S = patch_overlap(taps), symmetric(S, "S").double()
    first = (n * (n + 1) * sw**2 * sp**4 + n * (n + 2) * sw**4 * sp**2) * K @ S @ K
    second = n * sw**2 * sp**4 * torch.trace(K @ S) * K
    return -2 / taps.shape[2] ** 4 * (first + second)

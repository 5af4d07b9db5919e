"""Leading eigenvectors when every product is a pass over all networks: block Krylov, which wastes none of them.

Subspace iteration forgets all blocks but the last. Here all are kept and searched together (Rayleigh-Ritz on the block
Krylov space), which needs far fewer passes when eigenvalues lie close together, as those of gradients do.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from biascope.linalg.lanczos import Eigenpairs
from biascope.linalg.stable import fix_signs, symmetrise
from biascope.support.errors import InputError
from biascope.support.seeds import generator

OVERSAMPLING = 10  # columns of a block beyond those that are asked for


def few_passes(
    product: Callable[[Tensor], Tensor],
    dimension: int,
    k: int,
    *,
    passes: int,
    tol: float = 1e-3,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Eigenpairs:
    """The k eigenpairs of largest magnitude of a symmetric operator (values float64), from at most `passes` products.

    `product` maps a block [D, b] in `dtype` to a block of the same shape. Stops when each residual is below `tol` times
    the eigenvalue it belongs to (against the largest one, any direction of a small eigenvalue would pass for found);
    warns when the passes end first, or rounding does not let it come so far. `converged` says which ones are found.
    """
    width, rounding = min(dimension, k + OVERSAMPLING), 100 * torch.finfo(dtype).eps
    start = torch.randn(dimension, width, generator=generator(seed, "few passes"), device="cpu").to(device, dtype)
    block = torch.linalg.qr(start)[0]
    basis, image = block.new_zeros(dimension, 0), block.new_zeros(dimension, 0)
    for done in range(1, passes + 1):
        new = product(block)
        if not bool(torch.isfinite(new).all()):
            raise InputError("a network gave NaN or infinite gradients")
        basis, image = torch.cat([basis, block], 1), torch.cat([image, new], 1)
        values, S = torch.linalg.eigh(symmetrise((basis.T @ image).double()))
        order = values.abs().argsort(descending=True)[:k]
        values, S = values[order], S[:, order].to(basis)
        residuals = (image @ S - (basis @ S) * values.to(basis)).norm(dim=0).double()
        converged = residuals <= tol * values.abs()
        if bool(converged.all()) or done == passes:
            break
        block, R = torch.linalg.qr(new - basis @ (basis.T @ new))
        block = block[:, R.diagonal().abs() > rounding * abs(float(values[0]))][:, : dimension - basis.shape[1]]
        if block.shape[1] == 0:  # the space is exhausted: what is left is zero, which float32 cannot tell from small
            converged = converged | (values.abs() <= (rounding if dtype == torch.float64 else 0.0) * values[0].abs())
            break
        block = torch.linalg.qr(block - basis @ (basis.T @ block))[0]  # once more, against rounding
    if not bool(converged.all()):
        found = int(converged.long().cumprod(0).sum())
        worst = float((residuals / values.abs()).nan_to_num(0.0).max())
        warnings.warn(
            f"after {done} passes over the networks only the first {found} of {k} leading directions are certain: "
            f"others have residuals up to {worst:.1e} of their eigenvalue (wanted {tol:.0e}); ask for fewer "
            "directions, give more memory, or use float64 networks",
            stacklevel=2,
        )
    vectors = fix_signs(torch.linalg.qr(basis @ S)[0])
    return Eigenpairs(values, vectors, residuals, converged, done, basis.shape[1])


def resolved(pairs: Eigenpairs) -> int:
    """How many of the leading eigenpairs are certain, up to the first that is not."""
    return int(pairs.converged.long().cumprod(0).sum())

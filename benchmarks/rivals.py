"""The empirical neural tangent kernel as each public tool gives it, through its own documented interface.

Every function takes (model, x) and gives K [n, c, n, c], or [n, n] where its name ends in `_trace`. The two that need
only torch are how people write it by hand. Packages are imported inside the functions: none of them need be installed.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

Kernel = Callable[[nn.Module, Tensor], Tensor]


def trace_of(kernel: Kernel) -> Kernel:
    """For tools that know only the full kernel: sum its diagonal blocks."""
    return lambda model, x: torch.einsum("ncmc->nm", kernel(model, x))


def _sum_full(jacobians: Iterator[Tensor]) -> Tensor:
    """sum over parameters of J J^T from [n, c, ...] each."""
    return sum(torch.einsum("ncp,mdp->ncmd", j, j) for j in (j.flatten(2) for j in jacobians))  # type: ignore[return-value]


def _sum_trace(jacobians: Iterator[Tensor]) -> Tensor:
    return sum(torch.einsum("ncp,mcp->nm", j, j) for j in (j.flatten(2) for j in jacobians))  # type: ignore[return-value]


# ---- torch alone ----


def _func_jacobian(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def one(params: dict[str, Tensor], example: Tensor) -> Tensor:
        return functional_call(model, (params, buffers), (example[None],))[0]

    jacobian = vmap(jacrev(one), (None, 0))(params, x)
    return (jacobian.pop(name) for name in params)  # each part is freed once it is contracted


def torch_func(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_full(_func_jacobian(model, x))


def torch_func_trace(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_trace(_func_jacobian(model, x))


def _loop_jacobian(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    params = list(model.parameters())
    rows: list[list[Tensor]] = [[] for _ in params]
    c = 0
    for example in x:
        out = model(example[None])[0]
        c = len(out)
        for k in range(c):
            grads = torch.autograd.grad(out[k], params, retain_graph=k + 1 < c, materialize_grads=True)
            for row, grad in zip(rows, grads, strict=True):
                row.append(grad)
    for row in rows:
        yield torch.stack(row).unflatten(0, (-1, c))
        row.clear()


def loop(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_full(_loop_jacobian(model, x))


def loop_trace(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_trace(_loop_jacobian(model, x))


# ---- packages ----


def nngeometry(model: nn.Module, x: Tensor) -> Tensor:
    from nngeometry import GramMatrix
    from nngeometry.object import FMatDense

    y = torch.zeros(len(x), device=x.device)
    gram = GramMatrix(model, (x.detach(), y), representation=FMatDense)
    return gram.to_torch().permute(1, 0, 3, 2)


def curvlinops(model: nn.Module, x: Tensor, columns: int = 64) -> Tensor:
    """J (J^T I), a block of columns at a time."""
    from curvlinops import JacobianLinearOperator, TransposedJacobianLinearOperator

    params = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        c = model(x[:1]).shape[1]
    data = [(x, torch.zeros(len(x), c, device=x.device, dtype=x.dtype if x.is_floating_point() else None))]
    J = JacobianLinearOperator(model, params, data, check_deterministic=False)
    JT = TransposedJacobianLinearOperator(model, params, data, check_deterministic=False)
    eye = torch.eye(len(x) * c, device=x.device, dtype=params[0].dtype)
    K = torch.cat([J @ (JT @ eye[:, s : s + columns]) for s in range(0, len(eye), columns)], 1)
    return K.view(len(x), c, len(x), c)


def _backpack_jacobian(model: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Per-example gradients of one output after the other (BatchGrad)."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    extend(model)
    params = list(model.parameters())
    rows: list[list[Tensor]] = [[] for _ in params]
    with backpack(BatchGrad(), retain_graph=True):
        out = model(x)
        for k in range(out.shape[1]):
            out[:, k].sum().backward(retain_graph=True)
            for row, p in zip(rows, params, strict=True):
                row.append(p.grad_batch)
                del p.grad_batch
    model.zero_grad()
    for row in rows:
        yield torch.stack(row, 1)
        row.clear()


def backpack(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_full(_backpack_jacobian(model, x))


def backpack_trace(model: nn.Module, x: Tensor) -> Tensor:
    return _sum_trace(_backpack_jacobian(model, x))


def backpack_sqrt(model: nn.Module, x: Tensor) -> Tensor:
    """From SqrtGGNExact: the loss sum (f - y)^2 has Hessian 2 I, so its square root is sqrt(2) J^T."""
    from backpack import backpack, extend
    from backpack.extensions import SqrtGGNExact

    net, loss = extend(model, use_converter=not isinstance(model, nn.Sequential)), extend(nn.MSELoss(reduction="sum"))
    out = net(x)
    with backpack(SqrtGGNExact()):
        loss(out, torch.zeros_like(out)).backward()
    K = _sum_full(p.sqrt_ggn_exact.transpose(0, 1) for p in net.parameters())
    net.zero_grad()
    return K / 2


def asdl_trace(model: nn.Module, x: Tensor) -> Tensor:
    """Class-wise Hadamard kernel, summed over classes."""
    from asdl import empirical_class_wise_hadamard_ntk

    return empirical_class_wise_hadamard_ntk(model, x).sum(-1)


def asdl_implicit(model: nn.Module, x: Tensor) -> Tensor:
    from asdl import empirical_implicit_ntk

    return empirical_implicit_ntk(model, x).permute(0, 2, 1, 3)


def torchjd(model: nn.Module, x: Tensor) -> Tensor:
    """The autogram engine of TorchJD; its hooks go with it."""
    from torchjd.autogram import Engine

    engine = Engine(model, batch_dim=0)
    out = model(x)
    gramian: Tensor = engine.compute_gramian(out)
    return gramian.detach().reshape(*out.shape, *out.shape)

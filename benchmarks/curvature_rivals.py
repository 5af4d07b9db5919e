"""Diagonal, KFAC and EKFAC Fisher matrices as each public tool gives them, through its own documented interface.

Every function takes (model, batches, representation, monte_carlo) and gives a `Found`: how to multiply a vector and the
trace, both computed only when the result is checked. Packages are imported inside: none of them need be installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp, vmap
from torch.utils.data import DataLoader, TensorDataset

Batches = list[tuple[Tensor, Tensor]]  # inputs and (unused) labels


@dataclass(frozen=True)
class Found:
    """A curvature matrix: its product with one vector {parameter: tensor}, and its trace."""

    product: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    trace: Callable[[], Tensor]


def flat(model: nn.Module, v: dict[str, Tensor]) -> Tensor:
    return torch.cat([v[name].flatten() for name, _ in model.named_parameters()])


def by_name(model: nn.Module, v: Tensor) -> dict[str, Tensor]:
    parts = v.split([p.numel() for p in model.parameters()])
    return {name: part.view(p.shape) for part, (name, p) in zip(parts, model.named_parameters(), strict=True)}


def examples(batches: Batches) -> int:
    return sum(len(x) for x, _ in batches)


def biascope(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    import biascope as bs

    x = torch.cat([x for x, _ in batches]) if len(batches) > 1 else batches[0][0]
    F = bs.fisher(model, x, representation, estimator="monte-carlo" if monte_carlo else "exact")
    return Found(lambda v: F @ v, F.trace)


def nngeometry(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM, FIM_MonteCarlo
    from nngeometry.object import pspace
    from nngeometry.object.vector import PVector

    device = str(batches[0][0].device)
    forms = {"diagonal": pspace.PMatDiag, "kfac": pspace.PMatKFAC, "ekfac": pspace.PMatEKFAC}
    loader = _loader(batches)
    layers = LayerCollection.from_model(model)
    make = FIM_MonteCarlo if monte_carlo else FIM
    F = make(model, loader, forms[representation], device=device, layer_collection=layers)
    if representation == "ekfac":
        F.update_diag(loader)
    return Found(lambda v: by_name(model, F.mv(PVector(layers, vector_repr=flat(model, v))).to_torch()), F.trace)


def _loader(batches: Batches) -> Any:
    """What nngeometry takes: one minibatch, or a DataLoader."""
    if len(batches) == 1:
        return batches[0]
    x, y = (torch.cat(parts) for parts in zip(*batches))
    return DataLoader(TensorDataset(x, y), batch_size=len(batches[0][0]))


def curvlinops(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    from curvlinops import EKFACLinearOperator, KFACLinearOperator

    make = {"kfac": KFACLinearOperator, "ekfac": EKFACLinearOperator}[representation]
    params = list(model.parameters())
    F = make(
        model,
        nn.CrossEntropyLoss(),
        params,
        batches,
        fisher_type="mc" if monte_carlo else "type-2",
        check_deterministic=False,
        separate_weight_and_bias=False,
    )
    F.trace  # noqa: B018 (a property: what makes it compute)
    names = [name for name, _ in model.named_parameters()]
    return Found(lambda v: dict(zip(names, F @ [v[name] for name in names], strict=True)), lambda: F.trace)


def backpack(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    from backpack import backpack, extend
    from backpack.extensions import KFAC, KFLR, DiagGGNExact, DiagGGNMC

    net = extend(model, use_converter=not isinstance(model, nn.Sequential))
    loss = extend(nn.CrossEntropyLoss())
    which = {("diagonal", False): DiagGGNExact, ("diagonal", True): DiagGGNMC, ("kfac", False): KFLR}
    extension = which.get((representation, monte_carlo), KFAC)()
    n, total = examples(batches), {}
    for x, y in batches:
        with backpack(extension):
            loss(net(x), y).backward()
        for name, p in net.named_parameters():
            found = getattr(p, extension.savefield)
            if representation == "diagonal":
                total[name] = total.get(name, 0) + found * (len(x) / n)
            else:  # the factors are means over the batch
                total[name] = [a + b * (len(x) / n) for a, b in zip(total.get(name, [0] * len(found)), found)]
        net.zero_grad()
    if representation == "diagonal":
        return Found(
            lambda v: {k: d * v[k] for k, d in total.items()}, lambda: torch.stack([d.sum() for d in total.values()])
        )

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, factors in total.items():
            V = v[name].reshape(len(factors[0]), -1)
            V = factors[0] @ V
            out[name] = (V @ factors[1] if len(factors) > 1 else V).view_as(v[name])
        return out

    def trace() -> Tensor:
        return torch.stack([torch.stack([f.trace() for f in factors]).prod() for factors in total.values()])

    return Found(product, trace)


def asdl(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    from asdl import FISHER_EXACT, FISHER_MC, SHAPE_DIAG, SHAPE_KRON, FisherConfig, get_fisher_maker

    shape = {"diagonal": SHAPE_DIAG, "kfac": SHAPE_KRON}[representation]
    config = FisherConfig(FISHER_MC if monte_carlo else FISHER_EXACT, [shape], loss_type="cross_entropy")
    maker, n = get_fisher_maker(model, config), examples(batches)
    for i, (x, _) in enumerate(batches):
        maker.setup_model_call(model, x)
        maker.forward_and_backward(data_size=n, accumulate=i > 0)
    found = {name: m.fisher for name, m in model.named_modules() if getattr(m, "fisher", None) is not None}
    for name in found:
        del model.get_submodule(name).fisher
    kept = {f"{name}.": f for name, f in found.items()}

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        out = {}
        for name, F in kept.items():
            W, b = v[f"{name}weight"], v[f"{name}bias"]
            if representation == "diagonal":
                out |= {f"{name}weight": F.diag.weight * W, f"{name}bias": F.diag.bias * b}
                continue
            V = torch.cat([W.flatten(1), b[:, None]], 1)[:, : len(F.kron.A)]
            V = F.kron.B @ V @ F.kron.A
            out |= {f"{name}weight": V[:, : W[0].numel()].reshape(W.shape), f"{name}bias": V[:, -1]}
        return out

    def trace() -> Tensor:
        if representation == "diagonal":
            return torch.stack([F.diag.weight.sum() + F.diag.bias.sum() for F in kept.values()])
        return torch.stack([F.kron.A.trace() * F.kron.B.trace() for F in kept.values()])

    return Found(product, trace)


def kronfluence(model: nn.Module, batches: Batches, representation: str, monte_carlo: bool) -> Found:
    """Sampled labels only; covariances, eigenvectors and scalings as its Analyzer computes them, without the files."""
    import copy

    from kronfluence.analyzer import prepare_model
    from kronfluence.arguments import FactorArguments
    from kronfluence.factor.covariance import fit_covariance_matrices_with_loader
    from kronfluence.factor.eigen import fit_lambda_matrices_with_loader, perform_eigendecomposition
    from kronfluence.task import Task
    from kronfluence.utils.state import State

    class Classification(Task):
        def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
            logits = model(batch[0])
            with torch.no_grad():
                labels = torch.multinomial(logits.softmax(-1), 1).flatten()
            return nn.functional.cross_entropy(logits, labels, reduction="sum")

        def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
            return self.compute_train_loss(batch, model)

    task, arguments, state = Classification(), FactorArguments(), State(cpu=not batches[0][0].is_cuda)
    net = prepare_model(copy.deepcopy(model), task).to(batches[0][0].device)  # its own parameters start on the CPU
    batches = [part for x, y in batches for part in zip(x.split(256), y.split(256))]  # it keeps per-example gradients
    common = {"model": net, "state": state, "factor_args": arguments, "disable_tqdm": True}
    n, covariances = fit_covariance_matrices_with_loader(task=task, loader=batches, **common)
    eigen = perform_eigendecomposition(covariances, **common)
    n, scalings = fit_lambda_matrices_with_loader(task=task, loader=batches, eigen_factors=eigen, **common)
    found = scalings["lambda_matrix"]
    return Found(lambda v: v, lambda: torch.stack([s.sum() / int(n) for s in found.values()]))


# ---- products without a stored matrix ----


def biascope_product(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    import biascope as bs

    F = bs.fisher(model, x, "implicit")
    return lambda v: F @ v


def functional_product(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """The Fisher times a vector as written by hand: torch.func jvp, softmax's Hessian, vjp; vmap for a block."""
    params = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def f(params: dict[str, Tensor]) -> Tensor:
        return functional_call(model, (params, buffers), (x,))

    def one(v: dict[str, Tensor]) -> Tensor:
        z, u = jvp(f, (params,), (v,))
        p = z.softmax(-1)
        u = p * u - p * (p * u).sum(-1, keepdim=True)
        return torch.cat([g.flatten() for g in vjp(f, params)[1](u)[0].values()]) / len(x)

    def product(v: Tensor) -> Tensor:
        if v.dim() == 1:
            return one(by_name(model, v))
        parts = v.T.split([p.numel() for p in model.parameters()], -1)
        block = {name: t.reshape(-1, *p.shape) for t, (name, p) in zip(parts, params.items(), strict=True)}
        return vmap(one)(block).T

    return product


def curvlinops_product(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    from curvlinops import GGNLinearOperator

    y = torch.zeros(len(x), dtype=torch.long, device=x.device)
    F = GGNLinearOperator(model, nn.CrossEntropyLoss(), list(model.parameters()), [(x, y)], check_deterministic=False)
    return lambda v: F @ v


def nngeometry_product(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM
    from nngeometry.object import pspace
    from nngeometry.object.vector import PVector

    layers = LayerCollection.from_model(model)
    loader = (x, torch.zeros(len(x), device=x.device))
    F = FIM(model, loader, pspace.PMatImplicit, device=str(x.device), layer_collection=layers)
    return lambda v: F.mv(PVector(layers, vector_repr=v)).to_torch()


def backpack_product(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    from backpack.hessianfree.ggnvp import ggn_vector_product
    from backpack.utils.convert_parameters import vector_to_parameter_list

    y = torch.zeros(len(x), dtype=torch.long, device=x.device)

    def product(v: Tensor) -> Tensor:
        z = model(x)
        loss = nn.functional.cross_entropy(z, y)
        parts = vector_to_parameter_list(v, list(model.parameters()))
        return torch.cat([g.flatten() for g in ggn_vector_product(loss, z, model, parts)])

    return product

"""Fisher matrices in three representations, exact and sampled, and products without a stored matrix, against rivals.

    python benchmarks/curvature.py [--device cpu|cuda] [--only mlp-ekfac] [--repeats 5] [--out FILE]
    python benchmarks/curvature.py --device cuda --in-process --call-limit 60 --repeats 3      # saves GPU minutes

MLP 784-512-512-10 and ResNet-18 without normalisation (which several rivals do not know), float32, no tf32. Every
contender's exact matrix is multiplied with a random vector on four layers and compared with an independent float64
implementation in this file; a sampled one is compared by its trace, within the noise of the sample. On a CPU everything
runs with one thread and the headline is CPU seconds.
"""

import copy
import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import curvature_rivals as rivals
import torch
from curvature_rivals import Batches, Found
from harness import Case, Contender, main
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class State:
    model: nn.Module
    x: Tensor
    batch: int

    @property
    def batches(self) -> Batches:
        y = torch.zeros(len(self.x), dtype=torch.long, device=self.x.device)
        return list(zip(self.x.split(self.batch), y.split(self.batch)))


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def resnet18() -> nn.Module:
    from biascope import nets

    return nets.build("resnet18", in_channels=3, outputs=10, norm="none", init="bn_free")


def setup(name: str, device: str) -> State:
    torch.backends.cudnn.allow_tf32 = False  # cuDNN's default would cost three digits
    torch.set_float32_matmul_precision("highest")  # torch's default, unless the environment says otherwise
    torch.manual_seed(0)  # this process is the contender's own
    build, shape, n, batch = MODELS[name]
    model = build().eval().to(device)
    kind = device.split(":")[0]
    x = torch.randn(n[kind] + n[kind] // 64, *shape).to(device)
    return State(model, clear_of_kinks(model, x, n[kind]) if name == "mlp" else x[: n[kind]], batch[kind])


def clear_of_kinks(model: nn.Module, x: Tensor, n: int) -> Tensor:
    """The n examples [n, ...] of x whose ReLUs are farthest from zero, where float32 and float64 may disagree.

    One unit switched in one example is an error far above rounding in its row, for every contender alike.
    """
    margins: list[Tensor] = []
    relus = [m for m in model.modules() if isinstance(m, nn.ReLU)]
    hooks = [m.register_forward_pre_hook(lambda m, a: margins.append(a[0].abs().flatten(1).amin(1))) for m in relus]
    with torch.no_grad():
        model(x)
    for hook in hooks:
        hook.remove()
    keep = torch.stack(margins).amin(0).argsort(descending=True)[:n].sort().values
    return x[keep]


# ---- the truth, written once more and in float64 ----

CHECKED = {"mlp": ("0", "2", "4"), "resnet18": ("stem.conv", "stages.1.0.shortcut.conv", "stages.1.1.conv1", "fc")}


def vector(model: nn.Module, layers: tuple[str, ...]) -> dict[str, Tensor]:
    """Random on the checked layers' weights, zero elsewhere (biases: BackPACK's factors leave them apart)."""
    g = torch.Generator().manual_seed(1)
    out = {}
    for name, p in model.named_parameters():
        draw = torch.randn(p.shape, generator=g).to(p)
        out[name] = draw if name.rsplit(".", 1)[0] in layers and name.endswith("weight") else torch.zeros_like(p)
    return out


def flow(model: nn.Module, x: Tensor, layers: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
    """Homogeneous inputs [b, i + 1, T] and, for each class, output gradients [b, o, T] of sqrt(p_k) (z_k - p z)."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(lambda m, a, out, name=name: seen.update({name: (a[0], out)}))
        for name in layers
    ]
    z = model(x)
    for handle in handles:
        handle.remove()
    p = z.softmax(-1).detach()
    inputs = {}
    for name in layers:
        m, a = model.get_submodule(name), seen[name][0].detach()
        a = F.unfold(a, m.kernel_size, m.dilation, m.padding, m.stride) if isinstance(m, nn.Conv2d) else a[..., None]
        inputs[name] = torch.cat([a, a.new_ones(len(a), 1, a.shape[2])], 1)
    grads: dict[str, list[Tensor]] = {name: [] for name in layers}
    for k in range(z.shape[1]):
        cot = p[:, k].sqrt()[:, None] * (F.one_hot(torch.tensor(k), z.shape[1]).to(z) - p)
        found = torch.autograd.grad(z, [seen[name][1] for name in layers], cot, retain_graph=True)
        for name, g in zip(layers, found, strict=True):
            grads[name].append(g.flatten(2) if g.dim() > 2 else g[..., None])
    return inputs, grads


def squared(g: Tensor, a: Tensor) -> Tensor:
    """Sum over examples of the squared gradients (sum_t g_t a_t^T)^2, [o, i]."""
    if g.shape[2] == 1:
        return g[..., 0].square().T @ a[..., 0].square()
    return (g @ a.mT).square().sum(0)


def oracle(state: State, layers: tuple[str, ...]) -> dict[str, Tensor]:
    """{representation: F v on the checked layers' weights} and the traces over all layers, by definition."""
    model = copy.deepcopy(state.model).double()
    n, v = len(state.x), vector(model, layers)
    every = [name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    A: dict[str, Tensor] = {}
    B: dict[str, Tensor] = {}
    squares: dict[str, Tensor] = {}
    trace = dict.fromkeys(("diagonal", "kfac", "ekfac"), torch.zeros(()))
    pieces = [chunk.double() for chunk in state.x.split(128 if state.x.is_cuda else 32)]
    a2, b2 = dict.fromkeys(every, 0.0), dict.fromkeys(every, 0.0)
    for x in pieces:
        inputs, grads = flow(model, x, tuple(every))
        for name in every:
            a = inputs[name]
            a2[name] += float(a.square().sum()) / n
            for g in grads[name]:
                b2[name] += float(g.square().sum()) / (n * a.shape[2])
                G2 = squared(g, a)
                trace["diagonal"] = trace["diagonal"] + G2.sum().cpu() / n
                if name in layers:
                    squares[name] = squares.get(name, 0) + G2 / n
                    B[name] = B.get(name, 0) + torch.einsum("bot,bpt->op", g, g) / (n * a.shape[2])
            if name in layers:
                A[name] = A.get(name, 0) + torch.einsum("bit,bjt->ij", a, a) / n
    trace["ekfac"] = trace["diagonal"]  # the trace does not depend on the basis
    trace["kfac"] = torch.tensor(sum(a2[name] * b2[name] for name in every))
    V = {name: F.pad(v[f"{name}.weight"].flatten(1), (0, 1)) for name in layers}
    basis = {name: (torch.linalg.eigh(B[name])[1], torch.linalg.eigh(A[name])[1]) for name in layers}
    s: dict[str, Tensor] = {}
    for x in pieces:
        inputs, grads = flow(model, x, layers)
        for name in layers:
            U, W = basis[name]
            for g in grads[name]:
                s[name] = s.get(name, 0) + squared(U.T @ g, W.T @ inputs[name]) / n
    products = {
        "diagonal": [squares[name] * V[name] for name in layers],
        "kfac": [B[name] @ V[name] @ A[name] for name in layers],
        "ekfac": [U @ (s[name] * (U.T @ V[name] @ W)) @ W.T for name in layers for U, W in (basis[name],)],
    }
    out = {f"trace {key}": value.reshape(1) for key, value in trace.items()}
    for key, Ps in products.items():
        weights = [P[:, :-1].flatten() for P in Ps]
        out[f"scale {key}"] = torch.stack([w.abs().max() for w in weights])
        out[key] = torch.cat([w / w.abs().max() for w in weights])
    return out


def reference(state: State, name: str, what: str) -> Tensor:
    """From the oracle, which is computed once per model, weights and data."""
    digest = hashlib.sha256()
    for t in (*state.model.parameters(), state.x):
        digest.update(t.detach().cpu().numpy().tobytes())
    kept = Path(tempfile.gettempdir()) / f"biascope-curvature-{os.getuid()}-{name}-{digest.hexdigest()[:16]}.pt"
    if not kept.exists():
        torch.save(oracle(state, CHECKED[name]), kept.with_suffix(f".{os.getpid()}"))
        os.replace(kept.with_suffix(f".{os.getpid()}"), kept)
    return torch.load(kept)[what]


def checked(output: tuple[State, Found], name: str, representation: str, monte_carlo: bool) -> Tensor:
    """What is compared: F v layer by layer, relative to the largest entry of each; sampled: the trace."""
    state, found = output
    if monte_carlo:
        return found.trace().sum().reshape(1)
    product = found.product(vector(state.model, CHECKED[name]))
    scales = reference(state, name, f"scale {representation}").cpu()
    parts = zip((product[f"{layer}.weight"] for layer in CHECKED[name]), scales, strict=True)
    return torch.cat([p.detach().flatten().double().cpu() / s for p, s in parts])


# ---- the cases ----

MODELS = {  # how to build it, the shape of an example, examples per device, examples per batch for those that need it
    "mlp": (mlp, (784,), {"cpu": 2048, "cuda": 8192}, {"cpu": 2048, "cuda": 8192}),
    "resnet18": (resnet18, (3, 32, 32), {"cpu": 256, "cuda": 2048}, {"cpu": 64, "cuda": 256}),
}
TOOLS = {  # which representations each has, and whether only sampled
    "biascope": (rivals.biascope, (), ("diagonal", "kfac", "ekfac"), False),
    "nngeometry": (rivals.nngeometry, ("nngeometry",), ("diagonal", "kfac", "ekfac"), False),
    "curvlinops": (rivals.curvlinops, ("curvlinops",), ("kfac", "ekfac"), False),
    "BackPACK": (rivals.backpack, ("backpack",), ("diagonal", "kfac"), False),
    "ASDL": (rivals.asdl, ("asdl",), ("diagonal", "kfac"), False),
    "kronfluence": (rivals.kronfluence, ("kronfluence", "accelerate"), ("ekfac",), True),
}
PRODUCTS = {
    "biascope": (rivals.biascope_product, ()),
    "torch.func": (rivals.functional_product, ()),
    "curvlinops": (rivals.curvlinops_product, ("curvlinops",)),
    "nngeometry": (rivals.nngeometry_product, ("nngeometry",)),
    "BackPACK": (rivals.backpack_product, ("backpack",)),
}
COLUMNS = {"product": 1, "block-of-8": 8}


def matrix_case(name: str, representation: str, monte_carlo: bool) -> Case:
    contenders = [
        Contender(
            tool,
            lambda state, make=make: (state, make(state.model, state.batches, representation, monte_carlo)),
            requires,
            cpu_limit=None if tool == "biascope" else 2400,
        )
        for tool, (make, requires, has, sampled) in TOOLS.items()
        if representation in has and (monte_carlo or not sampled)
    ]
    # a float32 eigenbasis mixes directions of nearly equal eigenvalues: EKFAC itself then changes in the third digit
    exact = {"diagonal": 1e-4, "kfac": 1e-4, "ekfac": 5e-3}[representation]
    if name == "resnet18":  # ReLUs near zero switch in float32
        exact = max(exact, 1e-3)
    return Case(
        f"{name}-{representation}-{'sampled' if monte_carlo else 'exact'}",
        lambda device: setup(name, device),
        tuple(contenders),
        reference=lambda state: reference(state, name, f"trace {representation}" if monte_carlo else representation),
        extract=lambda output: checked(output, name, representation, monte_carlo),
        tolerance=0.2 if monte_carlo else exact,
    )


def block(state: State, columns: int) -> Tensor:
    p = sum(p.numel() for p in state.model.parameters())
    v = torch.randn(p, columns, generator=torch.Generator().manual_seed(1)).to(state.x)
    return v[:, 0] if columns == 1 else v


def product_case(name: str, label: str, columns: int) -> Case:
    def prepare(state: State, make: object) -> tuple[object, Tensor]:
        return make(state.model, state.x), block(state, columns)  # type: ignore[operator]

    def truth(state: State) -> Tensor:
        """Ten columns' entries of J^T H J v in float64, in pieces; the first column alone."""
        model = copy.deepcopy(state.model).double()
        v, total = block(state, columns).double(), 0.0
        for x in state.x.double().split(64):
            total = total + rivals.functional_product(model, x)(v if columns == 1 else v[:, 0]) * len(x)
        return total / len(state.x)  # type: ignore[return-value]

    return Case(
        f"{name}-{label}",
        lambda device: setup(name, device),
        tuple(
            Contender(tool, lambda s: s[0](s[1]), requires, lambda state, make=make: prepare(state, make))
            for tool, (make, requires) in PRODUCTS.items()
            if columns == 1 or tool in ("biascope", "torch.func", "curvlinops")
        ),
        reference=truth,
        extract=lambda out: out.detach() if out.dim() == 1 else out.detach()[:, 0],
    )


CASES = [
    *(
        matrix_case(name, representation, monte_carlo)
        for name in MODELS
        for representation in ("diagonal", "kfac", "ekfac")
        for monte_carlo in (False, True)
    ),
    *(product_case(name, label, columns) for name in MODELS for label, columns in COLUMNS.items()),
]

if __name__ == "__main__":
    import sys

    from curvature_floor import announce

    known = dict(zip(sys.argv[1:], sys.argv[2:]))
    if "-h" not in sys.argv and "--help" not in sys.argv:
        announce(known.get("--device", "cpu"), known.get("--only", ""))
    main(CASES, __file__, threads=1, baseline="torch.func")

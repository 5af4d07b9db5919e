"""Cost of the linearised network against the plain one: forward pass and training step, time and memory.

All contenders are at theta0, where f_lin = f and the gradients agree, so the plain network in float64 is the reference.
"biascope" is the default engine; "plain" is the network itself, so "best rival / biascope" is 1 / (our cost ratio).
"""

import copy
from typing import Any

import torch
from harness import Case, Contender, main
from torch import Tensor, nn
from torch.nn import functional as F

import biascope as bs
from biascope import nets
from biascope.linearize import dual

State = tuple[nn.Module, Tensor, Tensor]


def setup(name: str, batch: int, device: str) -> State:
    gen = torch.Generator().manual_seed(0)
    shape = nets.info(name).input_shape
    model = nets.build(name, 0).eval().to(device)
    x = torch.randn(batch, *shape, generator=gen).to(device)
    with torch.no_grad():
        classes = model(x[:2]).shape[1]
    return model, x, torch.randint(max(classes, 2), (batch,), generator=gen).to(device).clamp(max=classes - 1)


def without_rules(model: nn.Module) -> nn.Module:
    """The same without the operations done by hand (this process only)."""
    dual._RULES.clear()
    return bs.linearize(model)


class FuncJvp(nn.Module):
    """The textbook: torch.func.jvp and autograd through it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.params0 = {k: p.detach().clone() for k, p in model.named_parameters()}

    def forward(self, x: Tensor) -> Tensor:
        moved = {k: p - self.params0[k] for k, p in self.model.named_parameters()}
        f0, Jv = torch.func.jvp(lambda p: torch.func.functional_call(self.model, p, (x,)), (self.params0,), (moved,))
        return f0 + Jv


def forward(state: State) -> Tensor:
    with torch.no_grad():
        return state[0](state[1])


def step(state: State) -> Tensor:
    model, x, y = state
    model.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    grads = [p.grad for p in model.parameters()]
    return torch.cat([grads[0].flatten(), grads[-1].flatten()])


def double(job: Any) -> Any:
    return lambda state: job((copy.deepcopy(state[0]).double(), state[1].double(), state[2]))


def with_model(wrap: Any) -> Any:
    return lambda state: (wrap(state[0]), *state[1:])


WAYS = {
    "biascope": bs.linearize,
    "plain": lambda model: model,
    "engine=jvp": lambda model: bs.linearize(model, engine="jvp"),
    "no rules by hand": without_rules,
    "torch.func.jvp": FuncJvp,
}
SIZES = [
    ("lenet", 32, "cpu"),
    ("resnet18", 32, "cpu"),
    ("lenet", 256, "cuda"),
    ("resnet18", 256, "cuda"),
    ("vit", 256, "cuda"),
]
CASES = [
    Case(
        f"{job.__name__}-{name}-{batch}",
        lambda device, name=name, batch=batch: setup(name, batch, device),
        tuple(Contender(way, job, prepare=with_model(wrap)) for way, wrap in WAYS.items()),
        reference=double(job),
        tolerance=1e-3 if device == "cpu" else 2e-2,  # tf32 convolutions are on by default on GPUs
        devices=(device,),
    )
    for name, batch, device in SIZES
    for job in (forward, step)
]

if __name__ == "__main__":
    main(CASES, __file__)

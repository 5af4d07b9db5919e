"""Empirical neural tangent kernels, full and trace, float32: biascope against every PyTorch rival, in one run.

    python benchmarks/ntk.py [--device cpu|cuda] [--only resnet18] [--repeats 5] [--out FILE]

Sizes depend on the device. All contenders get the same weights, the same inputs and the same arithmetic (no tf32). Four
examples spread over the data are checked against brute force in float64: more than 1e-4 off is a failure, not a time.
On a CPU everything runs with one thread and the headline is CPU seconds. Behind the table stands the floor of every
case (`ntk_floor.py`) and the share of it that was reached.
"""

import copy
import importlib.util
from dataclasses import dataclass

import rivals
import torch
from harness import Case, Contender, main
from torch import Tensor, nn


@dataclass(frozen=True)
class State:
    model: nn.Module
    x: Tensor


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )  # fmt: skip


def lenet() -> nn.Module:
    features = (nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
    head = (nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), *head)


def resnet18() -> nn.Module:
    from biascope import nets

    return nets.build("resnet18", in_channels=3, outputs=10)


def vit() -> nn.Module:
    from biascope import nets

    return nets.build("vit", in_channels=3, outputs=10, depth=6, width=192, heads=3, patch=4, mlp=768)


class Logits(nn.Module):
    """A model of transformers as a function of one tensor; of logits per token, those of the last one's first words."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x).logits
        return logits if logits.dim() == 2 else logits[:, -1, :10]


def transformer(name: str, auto: str, **sizes: object) -> nn.Module:
    import transformers

    wanted = {"hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 3, "vocab_size": 500, **sizes}
    return Logits(getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(name, **wanted)))


def bert() -> nn.Module:
    return transformer("bert", "AutoModelForSequenceClassification", intermediate_size=768, num_labels=10)


def llama() -> nn.Module:
    return transformer("llama", "AutoModelForCausalLM", intermediate_size=512, use_cache=False)


def gpt2() -> nn.Module:
    return transformer("gpt2", "AutoModelForCausalLM", n_positions=128, use_cache=False)


def setup(build: object, shape: tuple[int, ...], n: dict[str, int], device: str) -> State:
    torch.backends.cudnn.allow_tf32 = False  # cuDNN's default would cost three digits
    torch.set_float32_matmul_precision("highest")  # torch's default, unless the environment says otherwise
    torch.manual_seed(0)  # this process is the contender's own
    model, size = build().eval().to(device), n[device.split(":")[0]]  # type: ignore[operator]
    x = torch.randint(3, 500, (size, *shape)) if build in TOKENS else torch.randn(size, *shape)
    return State(model, x.to(device))


def chosen(n: int) -> list[int]:
    """Examples that are checked."""
    return [0, 1, n // 2, n - 1]


def brute_force(state: State, trace: bool) -> Tensor:
    """The kernel of the chosen examples, by autograd in float64, one output at a time."""
    model = copy.deepcopy(state.model).double()
    jacobian = []
    x = state.x[chosen(len(state.x))]
    for example in x.double() if x.is_floating_point() else x:
        out = model(example[None])[0]
        for k in range(len(out)):
            grads = torch.autograd.grad(out[k], list(model.parameters()), retain_graph=True, materialize_grads=True)
            jacobian.append(torch.cat([g.flatten() for g in grads]))
    J = torch.stack(jacobian)
    K = (J @ J.T).view(4, -1, 4, len(J) // 4)
    return torch.einsum("ncmc->nm", K) if trace else K


def block(K: Tensor) -> Tensor:
    i = torch.tensor(chosen(len(K)), device=K.device)
    return K[i][:, i] if K.dim() == 2 else K[i][:, :, i]


def biascope(state: State, outputs: str) -> Tensor:
    import biascope as bs

    return bs.ntk(state.model, state.x, outputs=outputs).tensor


def rival(name: str, kernel: rivals.Kernel, *requires: str, cuda: bool = False, cpu_limit: int = 40) -> Contender:
    return Contender(
        name,
        lambda state: kernel(state.model, state.x),
        requires,
        devices=("cpu", "cuda") if cuda else ("cpu",),
        cpu_limit=cpu_limit,
    )


FULL = (
    Contender("biascope", lambda state: biascope(state, "full")),
    rival("torch.func", rivals.torch_func, cuda=True, cpu_limit=200),
    rival("nngeometry", rivals.nngeometry, "nngeometry", cuda=True),
    rival("autograd loop", rivals.loop),
    rival("TorchJD", rivals.torchjd, "torchjd", cuda=True),
    rival("curvlinops", rivals.curvlinops, "curvlinops"),
    rival("BackPACK", rivals.backpack, "backpack"),
    rival("ASDL", rivals.asdl_implicit, "asdl"),
)
TRACE = (
    Contender("biascope", lambda state: biascope(state, "trace")),
    rival("torch.func", rivals.torch_func_trace, cuda=True, cpu_limit=200),
    rival("nngeometry", rivals.trace_of(rivals.nngeometry), "nngeometry", cuda=True),
    rival("autograd loop", rivals.loop_trace),
    rival("TorchJD", rivals.trace_of(rivals.torchjd), "torchjd", cuda=True),
    rival("BackPACK", rivals.backpack_trace, "backpack"),
    rival("ASDL", rivals.asdl_trace, "asdl"),
)
TOKENS = (bert, llama, gpt2)
MODELS = {  # how to build it, the shape of an example, examples per device
    "mlp": (mlp, (784,), {"cpu": 256, "cuda": 1024}),
    "lenet": (lenet, (1, 28, 28), {"cpu": 128, "cuda": 512}),
    "resnet18": (resnet18, (3, 32, 32), {"cpu": 16, "cuda": 64}),
    "vit": (vit, (3, 32, 32), {"cpu": 16, "cuda": 64}),
    "vit-n4": (vit, (3, 32, 32), {"cpu": 4}),
}
if importlib.util.find_spec("transformers") is not None:
    MODELS |= {
        "bert": (bert, (32,), {"cpu": 8, "cuda": 64}),
        "llama": (llama, (32,), {"cpu": 8, "cuda": 64}),
        "gpt2": (gpt2, (32,), {"cpu": 8, "cuda": 64}),
    }
CASES = [
    Case(
        f"{name}-{outputs}",
        lambda device, model=model: setup(*model, device),
        contenders,
        reference=lambda state, outputs=outputs: brute_force(state, outputs == "trace"),
        extract=block,
        devices=tuple(model[2]),
    )
    for name, model in MODELS.items()
    for outputs, contenders in (("full", FULL), ("trace", TRACE))
]

if __name__ == "__main__":
    report = main(CASES, __file__, threads=1, baseline="torch.func")
    from ntk_floor import print_shares

    print_shares(report)

"""A ReLU network as what it is: affine maps with a mask between them.

f = T_{L+1} ∘ relu ∘ T_L ∘ ... ∘ relu ∘ T_1. On each activation pattern the masks are fixed and f is one affine map
W_eps x + b_eps. Everything here is float64, on the CPU, and detached from the user's module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from biascope.errors import InputError, UnsupportedError
from biascope.precision import without_autocast


@dataclass(frozen=True)
class ReLUNetwork:
    """Weights [d_k, d_{k-1}] and biases [d_k] of the affine maps, a ReLU between any two of them.

    Example:
        >>> net = relu_network(nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1)))
        >>> net.widths, net(torch.zeros(3, 2)).shape
        ((2, 5, 1), torch.Size([3, 1]))
    """

    weights: tuple[Tensor, ...] = field(repr=False)
    biases: tuple[Tensor, ...] = field(repr=False)

    @property
    def widths(self) -> tuple[int, ...]:
        """d_0 (input), d_1, ..., d_L (hidden), d_{L+1} (output)."""
        return (self.weights[0].shape[1], *(len(w) for w in self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [n, c] at x [n, ...]."""
        return self.preactivations(x)[-1]

    def preactivations(self, x: Tensor) -> list[Tensor]:
        """What every affine map gives, [n, d_k] each; the last one is the output."""
        h = self.inputs(x)
        found = []
        for i, (w, b) in enumerate(zip(self.weights, self.biases)):
            h = (h.clamp(min=0) if i else h) @ w.T + b
            found.append(h)
        return found

    def inputs(self, x: Tensor) -> Tensor:
        """x as float64 [n, d] on the CPU."""
        flat = x.detach().reshape(len(x), -1) if x.dim() else x.reshape(1, 1)
        if flat.shape[1] != self.widths[0]:
            raise InputError(f"x has shape {list(x.shape)}; this network takes [n, {self.widths[0]}]")
        return flat.to("cpu", torch.float64)


@without_autocast()
def relu_network(model: nn.Module | ReLUNetwork) -> ReLUNetwork:
    """Read the affine maps of a ReLU network; anything that is not Linear, ReLU or Flatten is refused by name.

    Containers other than `nn.Sequential` are read child by child, and the result is checked against the module at
    random points, so a `forward` that does something else is found out.

    Example:
        >>> relu_network(nn.Sequential(nn.Linear(1, 4), nn.Tanh()))
        Traceback (most recent call last):
        biascope.errors.UnsupportedError: layer '1' is a Tanh; only Linear, ReLU and Flatten layers can be read
    """
    if isinstance(model, ReLUNetwork):
        return model
    weights: list[Tensor] = []
    biases: list[Tensor] = []
    rectify = False  # a ReLU stands before the next affine map
    for name, layer in _leaves(model, ""):
        if isinstance(layer, nn.ReLU):
            if not weights:
                raise UnsupportedError(f"layer {name!r}: a ReLU before the first Linear layer; put a Linear before it")
            rectify = True
        elif isinstance(layer, nn.Linear):
            w = layer.weight.detach().to("cpu", torch.float64).clone()
            b = w.new_zeros(len(w)) if layer.bias is None else layer.bias.detach().to("cpu", torch.float64).clone()
            if weights and not rectify:  # two affine maps in a row are one
                w, b = w @ weights.pop(), w @ biases.pop() + b
            weights.append(w)
            biases.append(b)
            rectify = False
    if not weights:
        raise UnsupportedError(f"{type(model).__name__} has no Linear layer")
    if rectify:  # the output itself is rectified
        weights.append(torch.eye(len(weights[-1]), dtype=torch.float64, device="cpu"))
        biases.append(weights[-1].new_zeros(len(weights[-1])))
    net = ReLUNetwork(tuple(weights), tuple(biases))
    _check(model, net)
    return net


@without_autocast()
def activation_pattern(model: nn.Module | ReLUNetwork, x: Tensor) -> list[Tensor]:
    """Which hidden units are active at x [n, d]: one boolean tensor [n, d_k] for each hidden layer.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
        >>> [p.shape for p in activation_pattern(net, torch.zeros(3, 2))]
        [torch.Size([3, 5])]
    """
    return [z > 0 for z in relu_network(model).preactivations(x)[:-1]]


@without_autocast()
def affine_map(model: nn.Module | ReLUNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """W_eps [n, c, d] and b_eps [n, c] of the linear region that each x lies in: f(x) = W_eps x + b_eps there.

    Inactive units zero a *row* of W_k as torch stores it (the text's "column" is for the transposed matrix).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1))
        >>> x = torch.randn(4, 2)
        >>> w, b = affine_map(net, x)
        >>> torch.allclose((w @ x.double()[:, :, None])[..., 0] + b, net(x).double(), atol=1e-6)
        True
    """
    net = relu_network(model)
    pattern = activation_pattern(net, x)
    w = net.weights[-1].expand(len(x), -1, -1)
    b = net.biases[-1].expand(len(x), -1)
    for layer in reversed(range(len(pattern))):
        w = w * pattern[layer][:, None, :]
        b = b + w @ net.biases[layer]
        w = w @ net.weights[layer]
    return w, b


def _leaves(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    if isinstance(module, nn.Linear | nn.ReLU | nn.Flatten | nn.Identity):
        return [(name, module)]
    if isinstance(module, nn.Dropout) and (not module.training or module.p == 0):
        return []
    children = list(module._modules.items())  # not named_children: a module that is used twice counts twice
    if not children or isinstance(module, nn.ModuleDict | nn.MultiheadAttention):
        what = "the model" if not name else f"layer {name!r}"
        mode = " in train mode; call .eval()" if isinstance(module, nn.Dropout) else ""
        raise UnsupportedError(
            f"{what} is a {type(module).__name__}{mode or '; only Linear, ReLU and Flatten layers can be read'}"
        )
    found = []
    for child, inside in children:
        if inside is not None:
            found += _leaves(inside, f"{name}.{child}" if name else child)
    return found


def _check(model: nn.Module, net: ReLUNetwork) -> None:
    x = torch.randn(8, net.widths[0], dtype=torch.float64, generator=torch.Generator().manual_seed(0), device="cpu")
    twin = copy.deepcopy(model).to("cpu", torch.float64).eval()
    try:
        with torch.no_grad():
            out = twin(x)
    except (RuntimeError, ValueError, TypeError) as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be evaluated at x [n, {net.widths[0]}] ({error}); "
            "give a network of Linear, ReLU and Flatten layers"
        ) from error
    mine = net(x)
    if not isinstance(out, Tensor) or not torch.allclose(out.reshape(len(x), -1), mine, rtol=1e-8, atol=1e-10):
        raise UnsupportedError(
            f"the forward of {type(model).__name__} is not its Linear and ReLU layers one after another; "
            "write it as an nn.Sequential of Linear, ReLU and Flatten"
        )

"""A ReLU network as what it is: affine maps with a mask between them.

f = T_{L+1} ∘ relu ∘ T_L ∘ ... ∘ relu ∘ T_1. On each activation pattern the masks are fixed and f is one affine map
W_eps x + b_eps. Everything here is float64, on the CPU, and detached from the user's module.
"""

import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from biascope.support.errors import InputError, UnsupportedError
from biascope.support.limits import FiniteTensor, check_shapes
from biascope.support.precision import without_autocast
from biascope.support.signatures import checked

READ = (nn.Linear, nn.ReLU, nn.Flatten, nn.Identity)
READABLE = "Linear, ReLU and Flatten layers"
PLAIN = f"an nn.Sequential of {READABLE}"
SCALES = (1e-2, 1.0, 1e2, 1e4)  # of the points that every network is checked at
ROUNDING = 1e-11  # of float64 sums: two ways of adding up, and affine maps that were put into one


@dataclass(frozen=True)
class ReLUNetwork:
    """Weights [d_k, d_{k-1}] and biases [d_k] of the affine maps, a ReLU between any two of them."""

    weights: tuple[Tensor, ...] = field(repr=False)
    biases: tuple[Tensor, ...] = field(repr=False)

    @property
    def widths(self) -> tuple[int, ...]:
        """d_0 (input), d_1, ..., d_L (hidden), d_{L+1} (output)."""
        return (self.weights[0].shape[1], *(len(w) for w in self.weights))

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs [n, c] at x [n, ...]."""
        return self.preactivations(x)[-1]

    @checked
    def preactivations(self, x: Tensor) -> list[Tensor]:
        """What every affine map gives, [n, d_k] each; the last one is the output."""
        h = self.inputs(x)
        found = []
        for i, (w, b) in enumerate(zip(self.weights, self.biases)):
            h = (h.clamp(min=0) if i else h) @ w.T + b
            found.append(h)
        return found

    @checked
    def inputs(self, x: FiniteTensor) -> Tensor:
        """x as float64 [n, d] on the CPU."""
        flat = x.detach().flatten(1) if x.dim() else x.reshape(1, 1)
        check_shapes(f"x [n, {self.widths[0]}]", flat)
        return flat.to("cpu", torch.float64)


@checked
@without_autocast()
def relu_network(model: nn.Module | ReLUNetwork, x: Tensor | None = None) -> ReLUNetwork:
    """Read the affine maps of a ReLU network; anything that is not Linear, ReLU or Flatten is refused by name.

    Containers are read child by child, and the result is then checked against the module:

    - by structure: the layers must be called one after another, each on the untouched output of the one before (or a
      reshape of it). A function called in between (`torch.relu`, `clamp`, a sum) is found out wherever it acts.
    - by value, in float64, at random points of scales 0.01 to 10,000 and at x [n, d], the points that are asked about.

    So a `forward` without branches is certain to be what is read. What is seen at the points only: a `forward` that
    decides by the values of its input, and hooks of the user.
    """
    if isinstance(model, ReLUNetwork):
        return model
    model = getattr(model, "_orig_mod", model)  # of torch.compile, which calls the layers in its own way
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
    if not all(bool(v.isfinite().all()) for v in weights + biases):
        raise InputError(f"{type(model).__name__} has NaN or infinite weights: it has no linear regions")
    net = ReLUNetwork(tuple(weights), tuple(biases))
    rng = torch.Generator().manual_seed(0)
    points = torch.randn(len(SCALES), 8, net.widths[0], dtype=torch.float64, generator=rng, device="cpu")
    scales = torch.tensor(SCALES, dtype=torch.float64, device="cpu").view(-1, 1, 1)
    certify(model, net, (points * scales).flatten(0, 1))
    if x is not None:
        certify(model, net, x)
    return net


@without_autocast()
def activation_pattern(model: nn.Module | ReLUNetwork, x: Tensor) -> list[Tensor]:
    """Which hidden units are active at x [n, d]: one boolean tensor [n, d_k] for each hidden layer."""
    return [z > 0 for z in relu_network(model, x).preactivations(x)[:-1]]


@checked
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
    net = relu_network(model, x)
    pattern = [z > 0 for z in net.preactivations(x)[:-1]]  # which hidden units are active
    w = net.weights[-1].expand(len(x), -1, -1)
    b = net.biases[-1].expand(len(x), -1)
    for layer in reversed(range(len(pattern))):
        w = w * pattern[layer][:, None, :]
        b = b + w @ net.biases[layer]
        w = w @ net.weights[layer]
    return w, b


def _leaves(module: nn.Module, name: str) -> list[tuple[str, nn.Module]]:
    if isinstance(module, READ):
        if not any(type(module).forward is kind.forward for kind in READ):
            raise UnsupportedError(f"layer {name!r} is a {type(module).__name__} with its own forward; use {PLAIN}")
        return [(name, module)]
    if isinstance(module, nn.Dropout) and (not module.training or module.p == 0):
        return []
    children = list(module._modules.items())  # not named_children: a module that is used twice counts twice
    if not children or isinstance(module, nn.ModuleDict | nn.MultiheadAttention):
        what = f"layer {name!r}" if name else "the model"
        fix = " in train mode; call .eval()" if isinstance(module, nn.Dropout) else f"; only {READABLE} can be read"
        raise UnsupportedError(f"{what} is a {type(module).__name__}{fix}")
    found = []
    for child, inside in children:
        if inside is not None:
            found += _leaves(inside, f"{name}.{child}" if name else child)
    return found


@without_autocast()
def certify(model: nn.Module | ReLUNetwork, net: ReLUNetwork, x: Tensor) -> None:
    """Raise if `net` is not what the module does at (some 64 of) the points x [n, d], in its steps and values."""
    if isinstance(model, ReLUNetwork):
        return
    x = net.inputs(x)
    x = x[:: max(1, len(x) // 64)]
    # copied so that neither the parameters' dtype nor the mode of the user's module is touched
    twin = copy.deepcopy(getattr(model, "_orig_mod", model)).to("cpu", torch.float64).eval()
    # in inference mode tensors do not say whether they were changed
    with torch.inference_mode(False), torch.no_grad():
        given = x.clone()  # layers may work in place
        chain = _Chain([layer for _, layer in _leaves(twin, "")], given)
        try:
            out = twin(given)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UnsupportedError(f"{type(model).__name__} cannot be evaluated at x ({error}); use {PLAIN}") from error
    if not isinstance(out, Tensor) or not chain.ends_in(out) or not _agree(net, x, out):
        what = f"the forward of {type(model).__name__} is not its Linear and ReLU layers one after another"
        raise UnsupportedError(f"{what}; use {PLAIN}")


class _Chain:
    """Whether layers were called in order, each on what the one before gave."""

    def __init__(self, layers: list[nn.Module], x: Tensor) -> None:
        self.left = list(layers)
        self.sound = True
        self.keep(x)
        for layer in set(layers):  # one that is used twice gets one hook
            layer.register_forward_pre_hook(self.before)
            layer.register_forward_hook(self.after)

    def keep(self, value: Tensor) -> None:
        self.last, self.version = value, value._version

    def follows(self, value: object) -> bool:
        """The last tensor itself, not changed in place since, or a reshape of it."""
        last = self.last
        if not isinstance(value, Tensor) or last._version != self.version:
            return False
        same = value.data_ptr() == last.data_ptr() and value.numel() == last.numel() and value.dtype == last.dtype
        return value is last or (same and value.is_contiguous() and last.is_contiguous())

    def before(self, layer: nn.Module, args: tuple[object, ...]) -> None:
        if not self.left or self.left.pop(0) is not layer or len(args) != 1 or not self.follows(args[0]):
            self.sound = False

    def after(self, layer: nn.Module, args: tuple[object, ...], out: Tensor) -> None:
        self.keep(out)

    def ends_in(self, out: Tensor) -> bool:
        return self.sound and not self.left and self.follows(out)


def _agree(net: ReLUNetwork, x: Tensor, out: Tensor) -> bool:
    """Equal up to rounding, which is followed through the layers: relative to the terms of every sum, not to out."""
    h, error = x, torch.zeros_like(x)
    for i, (w, b) in enumerate(zip(net.weights, net.biases)):
        h = h.clamp(min=0) if i else h
        error = error @ w.abs().T + ROUNDING * (h.abs() @ w.abs().T + b.abs())
        h = h @ w.T + b
    return out.numel() == h.numel() and bool(((out.reshape(len(x), -1) - h).abs() <= error).all())

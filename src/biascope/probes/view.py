"""A network at one moment, seen on a fixed batch: what metrics are computed from.

Everything is computed when a metric first asks for it and then shared: one kernel, one spectrum, one forward pass per
moment, however many metrics use them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from biascope.curvature.complexity import feature_norm
from biascope.kernels import Kernel, ntk
from biascope.kernels.empirical import Outputs
from biascope.linalg import psd_eigh
from biascope.network.door import refuse_wrappers
from biascope.network.functional import Functional, ParamSelection, functional
from biascope.probes.activations import activation_signs, last_hidden
from biascope.probes.groups import Group, Loss, as_groups, check_labels, example_losses
from biascope.support.arguments import check_choice, check_number
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.inputs import Inputs, batch_size, check_inputs, take, tensors_of
from biascope.support.precision import Precision, arithmetic
from biascope.support.signatures import checked
from biascope.tangent.anchored import Anchored, copy_of
from biascope.tangent.linearized import Linearized

CHUNK = 1024  # examples per forward pass


@dataclass(frozen=True, eq=False)
class Setup:
    """What stays the same during a run: the batch, the groups, and how the network is read; arguments of `Probe`."""

    x: Inputs
    y: Tensor | None = None
    groups: Mapping[str, Group] = field(default_factory=dict)
    loss_fn: Loss | None = None
    output: Callable[[Any], Tensor] | None = None
    params: ParamSelection = None
    outputs: Outputs = "full"
    precision: Precision = "float32"
    by_layer: bool = False  # whether the kernels of the layers will be asked for
    seed: int = 0


def frozen_copy(model: nn.Module) -> nn.Module:
    """A copy of a network in eval mode, which its training will not change."""
    copied = copy_of(unwrapped(model))
    for p in copied.parameters():
        p.grad = None
    return copied.eval()


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside torch.compile, DataParallel and DistributedDataParallel."""
    while True:
        if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            refuse_wrappers(model)
            return model


class View:
    """A network at one moment on the batch of a `Setup`; lazily evaluated, each quantity once.

    `View.of` copies the network; the constructor uses the one it is given, which must be in eval mode and must not
    change while the view is used.

    `step` and `loss` say where training is; `init` is the view at the start of the run, `previous` the one at the last
    measurement, which keeps only what metrics asked it to keep; `path` the sum of step lengths ||dw_t|| since then, NaN
    if not followed; `totals` are running sums that metrics carry from one measurement to the next.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> start = View.of(net, torch.randn(5, 3), torch.tensor([0, 1, 0, 1, 1]))
        >>> now = View.of(net, start.x, start.y, init=start)
        >>> round(now.kernel.alignment(now.init.kernel), 6), now.outputs.shape
        (1.0, torch.Size([5, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        setup: Setup,
        *,
        init: View | None = None,
        previous: View | None = None,
        step: int = 0,
        loss: float | None = None,
        path: float = math.nan,
    ) -> None:
        self.model: nn.Module | None = model
        self.setup, self.step, self.loss, self.path = setup, step, loss, path
        self.init: View = init or self
        self.previous = previous
        self.totals: dict[str, float] = {}
        self._hidden: dict[str | None, Tensor] = {}
        self._slopes: dict[float | None, Tensor] = {}

    @classmethod
    @checked
    def of(
        cls,
        model: nn.Module,
        x: Any,
        y: Tensor | None = None,
        *,
        init: View | None = None,
        previous: View | None = None,
        step: int = 0,
        loss: float | None = None,
        **options: Any,
    ) -> View:
        """A view of a copy of the network, made now; `options` are the fields of `Setup`."""
        inputs = check_inputs(x)
        n = batch_size(inputs)
        options["groups"] = as_groups(options.get("groups"), n)
        setup = Setup(inputs, None if y is None else check_labels(y, n, "y"), **options)
        return cls(frozen_copy(model), setup, init=init, previous=previous, step=step, loss=loss)

    @property
    def x(self) -> Inputs:
        """Inputs of the batch."""
        return self.setup.x

    @property
    def y(self) -> Tensor:
        """Labels of the batch; an error says that there are none."""
        if self.setup.y is None:
            raise InputError("this metric needs labels: pass y_probe")
        return self.setup.y

    @property
    def n(self) -> int:
        """Number of examples in the batch."""
        return batch_size(self.x)

    @property
    def network(self) -> nn.Module:
        """The network; an error once the view is sealed."""
        if self.model is None:
            raise UnsupportedError("the previous measurement did not keep this quantity")
        return self.model

    def seal(self, keep: Iterable[str] = ()) -> None:
        """Forget the network and all that was computed except `keep`: the network will be changed."""
        kept = {*keep, "model", "setup", "step", "loss", "init", "previous", "totals", "path"}
        self.model, self.previous = None, None
        for name in set(self.__dict__) - kept:
            del self.__dict__[name]
        self.__dict__.setdefault("_hidden", {})
        self.__dict__.setdefault("_slopes", {})

    @cached_property
    def f(self) -> Functional:
        """The network as a function of the chosen parameters."""
        s = self.setup
        return functional(self.network, s.params, s.output, s.precision)

    @cached_property
    def theta(self) -> Tensor:
        """The chosen parameters in one vector [p]."""
        return torch.cat([p.reshape(-1) for p in self.f.params.values()])

    @arithmetic("float32")  # cuDNN would convolve in tf32
    def evaluate(self, x: Inputs) -> Tensor:
        """Outputs [n, c] on any inputs, in pieces."""
        with torch.no_grad():
            starts = range(0, batch_size(x), CHUNK)
            return torch.cat([self.f(self.f.params, self.f.prepare(take(x, slice(i, i + CHUNK)))) for i in starts])

    @cached_property
    def outputs(self) -> Tensor:
        """Outputs [n, c] on the batch."""
        return self.evaluate(self.x)

    @cached_property
    def losses(self) -> Tensor:
        """Loss of every example [n]."""
        return example_losses(self.outputs, self.y.to(self.outputs.device), self.setup.loss_fn)

    def _inside(self) -> Functional:
        """The function whose activations count: of a lazy or linearised network, the network it was made from."""
        model, s = self.network, self.setup
        if not isinstance(model, Anchored):
            return self.f
        f = functional(model._skeleton.eval(), "all", s.output, s.precision)
        if isinstance(model, Linearized):  # its features are those of the expansion point
            f.params.update({k: model.point[k].to(f.dtype) for k in f.params})
        return f

    @cached_property
    def signs(self) -> list[Tensor]:
        """Activation pattern: boolean [n, units] for every activation of the network."""
        f = self._inside()
        return activation_signs(lambda: f(f.params, f.prepare(self.x)), self.n)

    def hidden(self, layer: str | None = None) -> Tensor:
        """Input [n, d] of the last linear layer, or of a named one."""
        if layer not in self._hidden:
            f = self._inside()
            names = dict(f.module.named_modules())
            module = None if layer is None else names[check_choice(layer, "layer", names)]
            self._hidden[layer] = last_hidden(lambda: f(f.params, f.prepare(self.x)), self.n, module)
        return self._hidden[layer]

    @cached_property
    def kernel(self) -> Kernel:
        """Tangent kernel of the batch."""
        return self._kernel(self.setup.x, self.setup.by_layer)

    def _kernel(self, x: Inputs, by_layer: bool = False) -> Kernel:
        s = self.setup
        how: dict[str, Any] = {"params": s.params, "output": s.output, "precision": s.precision, "by_layer": by_layer}
        return ntk(self.network, x, outputs=s.outputs, **how)

    @cached_property
    def layer_kernels(self) -> dict[str, Kernel]:
        """Tangent kernels of the layers, which sum to `kernel`."""
        return (self.kernel if self.setup.by_layer else self._kernel(self.setup.x, by_layer=True)).by_layer()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel of centred features (per output), largest first, float64.

        Centring removes what may be nearly all of the kernel, and leaves the rounding of what it removed. So it is done
        in float64, and eigenvalues below eps times the largest one of the *uncentred* kernel are 0 here, eps that of
        the dtype the kernel was computed in. The error of float32 kernels was measured to be 0.03 to 0.2 of that, for
        30 to 800 rows of ten small networks, and does not grow with the rows. `precision="float64"` resolves more.
        """
        K = self.kernel
        if not bool(torch.isfinite(K.values).all()):
            raise InputError("the kernel has NaN or infinite entries: it has no spectrum")
        # not by eigh, which refuses negative eigenvalues: what centring leaves may be rounding alone
        values = psd_eigh(K._with(K.values.double()).centered().matrix(), clip=False).values
        return _resolved(values, self._largest, K.values.dtype)

    @cached_property
    def uncentred_eigenvalues(self) -> Tensor:
        """Eigenvalues of the kernel, largest first, float64; 0 below eps of the largest (see `eigenvalues`)."""
        K = self.kernel
        values = K._with(K.values.double()).eigh().values
        return _resolved(values, float(values[0]), K.values.dtype)

    @cached_property
    def _largest(self) -> float:
        """The largest eigenvalue of the uncentred kernel, from below; its order is enough."""
        from biascope.spectral.norms import spectral_norm  # late: the room of spectra brings scipy

        return float(spectral_norm(self.kernel.matrix().double(), 20))

    @cached_property
    def feature_norm(self) -> float:
        """||Phi||_F = sqrt(tr K), over all outputs."""
        s = self.setup
        if "kernel" in self.__dict__ and s.outputs in ("full", "trace", "diagonal"):
            return math.sqrt(max(0.0, self.kernel.trace()))
        return feature_norm(self.network, s.x, params=s.params, output=s.output, precision=s.precision)

    def input_gradients(self, std: float | None = None) -> Tensor:
        """Input gradients of all outputs, [probes * c, D], at the batch or at n Gaussian inputs of deviation `std`."""
        if std not in self._slopes:
            self._slopes[std] = _input_gradients(self, std)
        return self._slopes[std]

    def _group(self, name: str) -> Group:
        return self.setup.groups[check_choice(name, "group", self.setup.groups)]

    def group_kernel(self, name: str) -> Kernel:
        """Tangent kernel of a group's examples."""
        group = self._group(name)
        if isinstance(group, tuple):
            return self._kernel(group[0])
        K, i = self.kernel, group.to(self.kernel.values.device)
        values = K.values[:, i][:, :, :, i] if K.mode == "full" else K.values[..., i, :][..., i]
        return K._with(values)

    def group_labels(self, name: str) -> Tensor:
        """Labels of a group."""
        group = self._group(name)
        return group[1] if isinstance(group, tuple) else self.y[group.to(self.y.device)]

    def group_outputs(self, name: str) -> Tensor:
        """Outputs for a group's examples."""
        group = self._group(name)
        return self.evaluate(group[0]) if isinstance(group, tuple) else self.outputs[group.to(self.outputs.device)]


def _resolved(values: Tensor, largest: float, dtype: torch.dtype) -> Tensor:
    """Eigenvalues with those that are rounding set to 0: below eps of the dtype times `largest`."""
    return torch.where(values > torch.finfo(dtype).eps * largest, values, 0.0)


@arithmetic("float32")  # cuDNN would convolve in tf32
def _input_gradients(view: View, std: float | None) -> Tensor:
    f = view.f
    inputs = f.prepare(view.x)
    if len(tensors_of(inputs)) != 1 or not tensors_of(inputs)[0].is_floating_point():
        raise UnsupportedError("input gradients need one floating-point input tensor; these inputs are not one")
    if std is not None:
        check_number(std, "std", above=0)
        generator = torch.Generator().manual_seed(view.setup.seed)
        drawn = std * torch.randn(tensors_of(inputs)[0].shape, generator=generator, device="cpu")
        inputs = {next(iter(inputs)): drawn} if isinstance(inputs, dict) else drawn
        inputs = f.prepare(inputs)
    x = tensors_of(inputs)[0].detach().clone().requires_grad_(True)
    with torch.enable_grad():
        out = f(f.params, {next(iter(inputs)): x} if isinstance(inputs, dict) else x)
        c = out.shape[1]
        slopes = [torch.autograd.grad(out[:, i].sum(), x, retain_graph=i < c - 1)[0] for i in range(c)]
    return torch.stack(slopes, 1).reshape(x.shape[0] * c, -1).detach()

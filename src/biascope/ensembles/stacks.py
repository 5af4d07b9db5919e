"""vmap: many small networks trained as one stack, a step at a time."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap

from biascope.ensembles.engines import logits_of
from biascope.ensembles.graphs import capture
from biascope.ensembles.networks import Networks
from biascope.ensembles.precision import arithmetic
from biascope.ensembles.products import ConvolutionsAsProducts
from biascope.ensembles.work import SGD, Work
from biascope.network.derivatives import RightGradients, plain_containers
from biascope.network.swapped import functional_call
from biascope.support.seeds import derive, seeded


class Together:
    """vmap: one step for all networks; captured on CUDA, where a step of small networks is all launching."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.stack: Stack | None = None
        self.steps: dict[int, Callable[[], None]] = {}

    def __call__(self, indices: range, x: Tensor, y: Tensor) -> tuple[Networks, Tensor]:
        """Train the networks; tensors and captured steps of the last call serve again if the shapes are the same."""
        work, n = self.work, x.shape[1]
        with own_randomness(work, indices), arithmetic(x.device, work.precision):
            if self.stack is None or not same_kind(x, self.stack.x) or not same_kind(y, self.stack.y):
                self.steps, self.stack = {}, Stack(work, work.start(indices), x, y)
            stack = self.stack
            stack.load(work.start(indices), x, y)
            sizes = [min(stack.full, n - start) for start in range(0, n, stack.full)]
            if not self.steps:
                where, state, long = x.device, stack.state(), work.is_long
                for size in set(sizes):
                    step = partial(stack.step, size)
                    self.steps[size] = capture(step, device=where, state=state, warm_up=2, optional=True, search=long)
            for epoch in range(work.sgd.epochs):
                stack.shuffle(work.order(indices, epoch, n))
                for size in sizes:
                    self.steps[size]()
            return stack.networks(), stack.history.clone()


def same_kind(a: Tensor, b: Tensor) -> bool:
    """Same shape and precision: can one be copied into the other without loss?"""
    return a.shape == b.shape and a.dtype == b.dtype


class Stack:
    """The training of stacked networks in tensors that stay where they are.

    The losses of the networks are independent, so the gradient of their sum holds each one's own.
    """

    def __init__(self, work: Work, networks: Networks, x: Tensor, y: Tensor) -> None:
        self.work, self.template = work, networks.template
        module = pool_first(copy.deepcopy(networks.template).train())

        def loss(
            params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor
        ) -> tuple[Tensor, dict[str, Tensor]]:
            """The loss, and what the module put in the place of buffers; BatchNorm writes into them."""
            values = {**params, **buffers}
            with plain_containers(module):
                out = logits_of(functional_call(module, values, (x,)))
            replaced = {name: values[name].detach() for name, held in buffers.items() if values[name] is not held}
            return work.loss(out, y), replaced

        self.losses_of = vmap(loss, randomness="different")
        self.params = {name: torch.empty_like(value).requires_grad_(True) for name, value in networks.params.items()}
        self.buffers = {name: torch.empty_like(value) for name, value in networks.buffers.items()}
        self.momenta = [torch.empty_like(value) for value in networks.params.values()] if work.sgd.momentum else []
        self.x, self.y = torch.empty_like(x), torch.empty_like(y)
        T, n, self.full = len(x), x.shape[1], min(work.sgd.batch_size, x.shape[1])
        self.firsts = n * torch.arange(T, device=x.device)[:, None]  # of each network's examples among all
        dtype = next(iter(self.params.values())).dtype
        self.rates = torch.tensor(work.sgd.rates(n), dtype=dtype, device=x.device)
        self.order = torch.zeros(-(-n // self.full), T, self.full, dtype=torch.long, device=x.device)
        self.history = torch.zeros(T, len(self.rates), dtype=dtype, device=x.device)
        self.count = torch.zeros(1, dtype=torch.long, device=x.device)

    @torch.no_grad()
    def load(self, networks: Networks, x: Tensor, y: Tensor) -> None:
        """Fresh networks and their data."""
        for own, new in ((self.params, networks.params), (self.buffers, networks.buffers)):
            for name, value in new.items():
                own[name].copy_(value)
        for value in (*self.momenta, self.count):
            value.zero_()
        self.x.copy_(x)
        self.y.copy_(y)

    def shuffle(self, order: Tensor) -> None:
        """The order [T, n] of an epoch; the last batch is filled up with positions that no step reads.

        It is kept as places among the examples of all networks: one index gathers faster than two.
        """
        missing = self.order.shape[0] * self.full - order.shape[1]
        filled = self.firsts + torch.nn.functional.pad(order, (0, missing))
        self.order.copy_(filled.view(len(order), -1, self.full).transpose(0, 1))

    def state(self) -> list[Tensor]:
        """What a step changes and later steps read."""
        return [*self.params.values(), *self.buffers.values(), *self.momenta, self.count]

    def step(self, size: int) -> None:
        """One step of SGD for every network, on the first `size` examples of the batch whose turn it is."""
        sgd, params = self.work.sgd, list(self.params.values())
        batch = self.order.index_select(0, self.count % len(self.order))[0, :, :size]
        with RightGradients(), ConvolutionsAsProducts() if self.x.is_cuda else nullcontext():
            x, y = self.x.flatten(0, 1)[batch], self.y.flatten(0, 1)[batch]
            losses, replaced = self.losses_of(self.params, self.buffers, x, y)
        gradients = torch.autograd.grad(losses.sum(), params, allow_unused=True)
        with torch.no_grad():
            for name, value in replaced.items():  # only now: the backward pass may read the old ones
                self.buffers[name].copy_(value)
            update(sgd, params, self.momenta, gradients, self.rates.index_select(0, self.count), stacked=True)
            self.history.index_copy_(1, self.count, losses.detach().to(self.history)[:, None])
            self.count += 1

    def networks(self) -> Networks:
        """A copy of the networks as they are now."""
        params = {name: value.detach().clone() for name, value in self.params.items()}
        return Networks(self.template, params, {name: value.clone() for name, value in self.buffers.items()})


class PoolFirst(nn.Sequential):
    """A Sequential that takes the maxima of pools before the ReLU in front of them, not after it.

    Values and gradients are the same, since the largest value stays the largest, and ReLU has a quarter of the values
    to look at. What others see by index or by iteration is in its old order.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Like nn.Sequential."""
        parts = list(self)
        for i in range(len(parts) - 1):
            if can_change_places(parts[i], parts[i + 1], before=parts[i - 1] if i else None):
                parts[i : i + 2] = parts[i + 1], parts[i]
        for part in parts:
            input = part(input)
        return input


MAKERS = (nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.GroupNorm)  # layers whose output is a new tensor


def can_change_places(relu: nn.Module, pool: nn.Module, before: nn.Module | None) -> bool:
    """Are they a ReLU and a pool with no hook between them?

    A ReLU in place changes what the module `before` it gave: where others may read that, it stays where it is.
    """
    if type(relu) is not nn.ReLU or type(pool) is not nn.MaxPool2d or pool.return_indices:
        return False
    if relu.inplace and type(before) not in MAKERS:
        return False
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    watched = (relu, pool, before) if relu.inplace and before is not None else (relu, pool)
    return not any(getattr(part, kind) for part in watched for kind in hooks)


def pool_first(module: nn.Module) -> nn.Module:
    """The same module, with every Sequential in it as a `PoolFirst`."""
    for part in module.modules():
        if type(part) is nn.Sequential:
            part.__class__ = PoolFirst
    return module


def update(
    sgd: SGD,
    params: list[Tensor],
    momenta: list[Tensor],
    found: Sequence[Tensor | None],
    rate: Tensor,
    stacked: bool = False,
) -> None:
    """A step of SGD in place, with `rate` [1] on the device; the norm is clipped for each network of a stack alone.

    What has no gradient (None) is left as it is, without weight decay, as torch.optim.SGD leaves it.
    """
    used = [i for i, gradient in enumerate(found) if gradient is not None]
    params, momenta = [params[i] for i in used], [momenta[i] for i in used] if momenta else []
    gradients = [gradient for gradient in found if gradient is not None]
    if not gradients:
        return
    if sgd.clip_norm is not None:
        norms = (
            [g.reshape(len(g), -1).norm(dim=1) for g in gradients] if stacked else list(torch._foreach_norm(gradients))
        )
        factor = (sgd.clip_norm / (torch.stack(norms).norm(dim=0) + 1e-6)).clamp(max=1.0)  # [T], or one number
        if stacked:
            gradients = [g * factor.view(-1, *[1] * (g.dim() - 1)) for g in gradients]
        else:
            gradients = list(torch._foreach_mul(gradients, factor))
    if sgd.weight_decay:
        gradients = list(torch._foreach_add(gradients, params, alpha=sgd.weight_decay))
    if sgd.momentum:
        torch._foreach_mul_(momenta, sgd.momentum)
        torch._foreach_add_(momenta, gradients)
        gradients = momenta
    torch._foreach_sub_(params, list(torch._foreach_mul(gradients, rate.to(params[0].dtype).view(()))))


def own_randomness(work: Work, indices: range) -> AbstractContextManager[None]:
    """Dropout draws from torch's global state: seed it for a moment and put it back (CPU and this device)."""
    return seeded(derive(work.seed, "noise", indices.start), work.device)

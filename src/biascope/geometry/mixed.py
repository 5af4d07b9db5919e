"""The mixed derivative d2f/dtheta dx, matrix-free: Algorithm 2 of the NAD paper and the NADs of the tangent kernel.

H [p, D] is never formed: H v is the derivative of grad_theta f along v in input space, H^T w the derivative of grad_x f
along w in parameter space. Both methods are one operator on input space:
    v -> (1/T) sum_t Hbar_t^T Hbar_t v,   Hbar_t = mean over points of H_t(x).
Algorithm 2: many networks, one point. (As printed it averages H over networks first, and resets its accumulator; what
is meant, E[H^T H], is computed by `gram`.) NTK-NADs: one network, many Gaussian points.

The printed order is here too, `mean_gram`: v -> Hm^T Hm v with Hm = (1/T) sum_t Hbar_t. At initialisation the signs of
the weights cancel in Hm: E[Hm^T Hm] = E[H]^T E[H] + (E[H^T H] - E[H]^T E[H]) / T, so where E[H] = 0 its eigenvectors
are those of E[H^T H], its eigenvalues T times smaller, and the noise of one network is left however many are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

from biascope.derivatives import call, differentiable_attention
from biascope.ensembles import Networks, scalar_of
from biascope.ensembles.evaluate import Scalarise
from biascope.errors import InputError
from biascope.functional import as_rows

Params = dict[str, Tensor]
Groups = Callable[[], Iterable[Networks]]  # the same networks, group by group, at every call

NO_MIXED = (
    "all mixed derivatives are zero: at x = 0 a ReLU network without biases has none, use another x; elsewhere what "
    "the output makes of the input is not up to the parameters"
)


class MixedDerivative:
    """Hbar of networks at points [n, *shape]; vectors are flat [D] or blocks [D, k]."""

    def __init__(self, template: torch.nn.Module, points: Tensor, scalarise: Scalarise | None = None) -> None:
        self.template, self.points, self.scalarise = template, points, scalarise

    def _mean(self, points: Tensor) -> Callable[[Params, Params, Tensor], Tensor]:
        """(params, buffers, shift) -> mean over the points of f(x + shift); its mixed derivative at 0 is Hbar."""

        def f(params: Params, buffers: Params, shift: Tensor) -> Tensor:
            inputs = points + shift.view(points.shape[1:])
            out = as_rows(call(self.template, (params, buffers), (inputs,)), len(inputs), None, self.template)
            return scalar_of(out, self.scalarise).mean()

        return f

    def push(self, params: Params, buffers: Params, v: Tensor, points: Tensor | None = None) -> Params:
        """Hbar v for one network, by parameter."""
        f, zero = self._mean(self.points if points is None else points), torch.zeros_like(v)
        with differentiable_attention():
            along: Params = jvp(lambda shift: grad(f)(params, buffers, shift), (zero,), (v,))[1]
        return along

    def pull(self, params: Params, buffers: Params, w: Params) -> Tensor:
        """Hbar^T w for one network, [D]."""
        f = self._mean(self.points)
        zero = torch.zeros(self.points[0].numel(), dtype=self.points.dtype, device=self.points.device)
        with differentiable_attention():
            along: Tensor = jvp(lambda p: grad(f, argnums=2)(p, buffers, zero), (params,), (w,))[1]
        return along

    def gram(self, networks: Networks, V: Tensor) -> Tensor:
        """sum over networks of Hbar^T Hbar V, for V [D, k]: [D, k] in float64."""

        def one(params: Params, buffers: Params, v: Tensor) -> Tensor:
            return self.pull(params, buffers, self.push(params, buffers, v))

        both = vmap(vmap(one, in_dims=(None, None, 0)), in_dims=(0, 0, None))
        found: Tensor = both(dict(networks.params), dict(networks.buffers), V.T.to(self.points))
        return found.detach().double().sum(0).T

    def energies(self, networks: Networks, V: Tensor) -> Tensor:
        """||Hbar_t v||^2 for every network and column: [T, k] in float64."""

        def one(params: Params, buffers: Params, v: Tensor) -> Tensor:
            return torch.stack([part.abs().square().sum() for part in self.push(params, buffers, v).values()]).sum()

        both = vmap(vmap(one, in_dims=(None, None, 0)), in_dims=(0, 0, None))
        found: Tensor = both(dict(networks.params), dict(networks.buffers), V.T.to(self.points))
        return found.detach().double()

    def mean_push(self, groups: Groups, V: Tensor) -> tuple[Params, int]:
        """Hm V, the average over networks first: {parameter: [k, *shape]} in float64, and the number of networks."""
        total, count = Params(), 0
        for networks in groups():
            part = self._push_sum(networks, V)
            total = {name: total[name] + value for name, value in part.items()} if total else part
            count += len(networks)
        if count == 0:
            raise InputError("there is no network to average over")
        return {name: value / count for name, value in total.items()}, count

    def mean_gram(self, groups: Groups, V: Tensor) -> Tensor:
        """Hm^T Hm V for V [D, k], Hm the mean of Hbar over all networks: [D, k] in float64, in two passes over them."""
        pushed, count = self.mean_push(groups, V)
        W = {name: value.to(self.points) for name, value in pushed.items()}
        both = vmap(vmap(self.pull, in_dims=(None, None, 0)), in_dims=(0, 0, None))
        total = torch.zeros(V.shape, dtype=torch.float64, device=V.device)
        for networks in groups():
            found: Tensor = both(dict(networks.params), dict(networks.buffers), W)
            total += found.detach().double().sum(0).T
        return total / count

    def mean_jackknife(self, groups: Groups, V: Tensor) -> tuple[Tensor, Tensor]:
        """||Hm v||^2 of the columns of V and their standard errors, [k] each, by leaving out one group at a time.

        NaN with fewer than two groups; best with groups of one size. Two passes over the networks.
        """
        whole, count = self.mean_push(groups, V)
        values = _squares(whole).cpu()
        left = []
        for networks in groups():
            if len(networks) == count:
                return values, torch.full_like(values, float("nan"))
            part, n = self._push_sum(networks, V), len(networks)
            left.append(_squares({name: (count * whole[name] - part[name]) / (count - n) for name in whole}).cpu())
        others = torch.stack(left)
        spread = (others - others.mean(0)).square().sum(0)
        return values, ((len(left) - 1) / len(left) * spread).sqrt()

    def _push_sum(self, networks: Networks, V: Tensor) -> Params:
        """sum over networks of Hbar_t V: {parameter: [k, *shape]} in float64."""
        both = vmap(vmap(self.push, in_dims=(None, None, 0)), in_dims=(0, 0, None))
        found = both(dict(networks.params), dict(networks.buffers), V.T.to(self.points))
        return {name: value.detach().double().sum(0) for name, value in found.items()}

    def jackknife(self, network: Networks, V: Tensor, groups: int) -> Tensor:
        """Standard errors [k] of ||Hbar v||^2 of one network over its points, by leaving out one group at a time."""
        pieces = [piece for piece in self.points.chunk(groups) if len(piece)]
        if len(pieces) < 2:
            return torch.full((V.shape[1],), float("nan"), dtype=torch.float64, device="cpu")
        params = {name: value[0] for name, value in network.params.items()}
        buffers = {name: value[0] for name, value in network.buffers.items()}
        weights = [len(piece) / len(self.points) for piece in pieces]

        def flat(v: Tensor, points: Tensor) -> Tensor:
            return torch.cat([part.flatten() for part in self.push(params, buffers, v, points).values()])

        parts = [vmap(lambda v, p=piece: flat(v, p))(V.T.to(piece)).detach().double() for piece in pieces]
        whole = sum((w * part for w, part in zip(weights, parts)), start=torch.zeros_like(parts[0]))
        left = torch.stack([((whole - w * part) / (1 - w)).square().sum(1) for w, part in zip(weights, parts)])
        n = len(pieces)
        return ((n - 1) / n * (left - left.mean(0)).square().sum(0)).sqrt().cpu()


def _squares(pushed: Params) -> Tensor:
    """||H v||^2 of every column, [k], from {parameter: [k, *shape]}."""
    return torch.stack([part.reshape(len(part), -1).square().sum(1) for part in pushed.values()]).sum(0)

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

import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.func import grad, jvp, vmap

from biascope.ensembles import Networks
from biascope.ensembles.engines import try_input
from biascope.ensembles.evaluate import Scalarise, scalar_of
from biascope.geometry.few_passes import few_passes, resolved
from biascope.geometry.gradients import ROUNDING, Sampler, perturbed
from biascope.geometry.moments import BlockMoments, blocks_for
from biascope.geometry.nad_result import NADs
from biascope.kernels import ntk
from biascope.network.derivatives import call, differentiable_attention
from biascope.network.functional import as_rows
from biascope.support.bars import progress
from biascope.support.errors import UnsupportedError
from biascope.support.memory import budget
from biascope.support.processes import ALONE
from biascope.support.seeds import generator

Params = dict[str, Tensor]
Groups = Callable[[], Iterable[Networks]]  # the same networks, group by group, at every call


class MixedDerivative:
    """Hbar, the mean of d2f/dtheta dx over points [n, *shape], of networks; vectors are flat [D] or blocks [D, k].

    Example:
        >>> from biascope.ensembles import record
        >>> drawn = record(lambda: torch.nn.Linear(2, 1)).draw(seed=0, start=0, stop=3)
        >>> H = MixedDerivative(drawn.template, torch.ones(1, 2))
        >>> H.gram(drawn, torch.eye(2)), H.energies(drawn, torch.eye(2)).shape  # f = w x + b, so H = I for w
        (tensor([[3., 0.],
                [0., 3.]], dtype=torch.float64), torch.Size([3, 2]))
    """

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


def by_products(sampler: Sampler, n_networks: int, top: int, n_points: int, operator: bool) -> NADs:
    """Algorithm 2 and NTK-NADs with exact derivatives, by block Krylov; `operator` averages H first, as printed."""
    initialiser, x = sampler.initialiser, sampler.x
    if any(parameter.is_complex() for parameter in initialiser.template.parameters()):
        raise UnsupportedError(f"method={sampler.method!r} needs real parameters, some are complex; use 'autograd'")
    D, one = x.numel(), sampler.method == "ntk"
    T = 1 if one else n_networks
    points = x[None]
    if one:
        points = torch.randn(n_points, *x.shape, generator=generator(sampler.seed, "points"), device="cpu").to(x)
    try_input(sampler.draw(0, 1), points)
    H = MixedDerivative(initialiser.template, points, sampler.scalarise)
    weight = sum(p.numel() for p in initialiser.template.parameters()) * (top + 10) * 4
    group = max(1, min(T, initialiser.block, 2**27 // max(1, weight)))
    group = min(group, max(1, T // 8)) if operator else group  # some to leave out, for the errors

    # ranks have shares of the networks whose Gram matrices are added up, and each has all of the others
    team = ALONE if one or operator else sampler.team
    share = team.share(T)

    def groups() -> Iterator[Networks]:
        for start in range(share.start, share.stop, group):
            yield sampler.draw(start, min(start + group, share.stop))

    def product(X: Tensor) -> Tensor:
        if operator:
            return H.mean_gram(groups, X).to(X)
        total = torch.zeros(X.shape, dtype=torch.float64, device=X.device)
        for networks in progress(groups(), "networks", leave=False):
            team.check()
            total += H.gram(networks, X)
        return (team.sum(total) / T).to(X)

    tol = 1e-8 if x.dtype == torch.float64 else 1e-3  # of each eigenvalue
    kind = torch.promote_types(x.dtype, torch.float32)  # torch has no factorisations of halves
    pairs = few_passes(product, D, top, passes=20, tol=tol, seed=sampler.seed, device=sampler.device, dtype=kind)
    if one:
        errors = H.jackknife(sampler.draw(0, 1), pairs.vectors, groups=16)
    elif operator:
        errors = H.mean_jackknife(groups, pairs.vectors)[1]
    else:
        energies = torch.zeros(T, len(pairs.values), dtype=torch.float64, device=sampler.device)
        found = [H.energies(networks, pairs.vectors) for networks in groups()]
        energies[share] = torch.cat(found) if found else energies[share]
        team.sum(energies)
        errors = energies.std(0) / T**0.5 if T > 1 else torch.full((top,), float("nan"), device="cpu")
    nothing = float("nan")  # the trace would cost D products
    values, sure = pairs.values, resolved(pairs)
    return sampler.result(pairs.vectors, values, errors, nothing, T, 0.0, resolved=sure, inputs=len(points))


# ------------------------------------------------------------------------------------------------- finite differences
#
# The paper takes the derivative of grad_theta f by x as a central difference of width h. Along the coordinates that is
# H_h [p, D] with the columns (grad_theta f(x + h e_i) - grad_theta f(x - h e_i)) / 2h, and H_h^T H_h is made of the
# tangent kernel K of the 2D perturbed inputs: (K++ - K+- - K-+ + K--) / 4h^2. H_h tends to d2f/dtheta dx as h goes to
# 0. With ReLU it does not leave out the kinks; of a wide step it hardly depends on x.
#
# Printed is the difference along v itself, the vector of the power iteration, of length h for all of v and not for each
# coordinate, and then the exact H^T. That is no linear map of v: its iteration may settle, but on no eigenvector
# (LeNet, 16 x 16 pixels, h = 100, 24 networks, H^T H averaged: on a direction with 0.70 of its energy in the first ten
# of Algorithm 1; h = 0.01: 0.07).


def difference_gram(
    module: nn.Module, x: Tensor, step: float, scalarise: Scalarise | None = None, max_memory: str | int | None = None
) -> Tensor:
    """H_h^T H_h [D, D] of one network at x [*shape], in float64 throughout: kernels of small steps cancel."""
    D = x.numel()
    points = perturbed(x.double(), 0, D, step)

    def output(out: Tensor) -> Tensor:
        return scalar_of(as_rows(out, len(out), None, module), scalarise)[:, None]

    K = ntk(module, points, outputs="sum", precision="float64", max_memory=max_memory, output=output).tensor
    both = K[:D] - K[D:]
    gram: Tensor = (both[:, :D] - both[:, D:]) / (4 * step**2)
    rounding = torch.finfo(torch.float64).eps * float(K.diagonal().sum()) / (4 * step**2)
    if rounding > ROUNDING * float(gram.diagonal().sum()):
        warnings.warn(f"step={step:g} is so small that differences are made of rounding", stacklevel=2)
    return (gram + gram.T) / 2


def by_differences(sampler: Sampler, T: int, top: int | None, stability_k: int) -> NADs:
    """Directions of E[H_h^T H_h], formed in full, of T networks at x: `nads` with derivative="finite-difference"."""
    x, step, room, block = sampler.x, sampler.step, sampler.max_memory, sampler.initialiser.block
    D = x.numel()
    team, (first, end) = sampler.team, sampler.share(0, T)
    most = min(team.gather(budget(room, sampler.device)))
    moments = BlockMoments(D, min(blocks_for(D, most), T), sampler.device)
    for start in progress(range(first, end, block), "networks"):
        networks = sampler.draw(start, min(start + block, end))
        for i in range(len(networks)):
            team.check()
            moments.add_matrix(start + i, difference_gram(networks.module(i), x, step, sampler.scalarise, room))
    moments.merge(team)
    stability, k = list[tuple[int, float]](), min(stability_k, D // 2)
    if k and len(moments.sums) > 1:
        overlap, k = moments.split_half_overlap(k)
        stability.append((T, overlap))
    values, vectors = moments.eigh()
    vectors = vectors[:, :top]
    about = {"stability": tuple(stability), "stability_k": k}
    return sampler.result(vectors, values[:top], moments.spread(vectors), moments.trace, T, step, **about)

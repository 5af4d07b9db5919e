"""Many settings of one optimiser trained together: K auto-encoders, and every product of matrices is one of K.

A single training of the auto-encoder leaves a GPU idle: its products are small, and most of the time goes into starting
them. Here the same network is trained with K learning rates, dampings (momenta, epsilons) and seeds at once, weights
[K, o, i + 1] with the bias as the last column. What a step does is what the optimiser of that name does to each network
by itself (`contest.optimiser`), with one difference: EKFAC's basis of the null space of its factors (`bases`). A
network whose loss is not finite is left out from then on.

Where a batch is small beside a layer, the gradients of the individual losses g [n, o] and the inputs a [n, i + 1] are
turned into the eigenbasis or multiplied by the inverses, not their product g^T a / n: that is less work.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from biascope.support import progress
from biascope.support.memory import free_memory
from biascope_papers.ekfac.bases import eigenbases, inverses

Layer = dict[str, Tensor]  # by name, [k, ...]: weights and what is kept between steps
PLAIN = "sgd", "adam"
LOOK = 1000  # images at a time when a loss is evaluated
MEAN_OF = 0.25, 0.1  # weights of the newest in EKFAC-ra's scalings, and in the statistics of batch normalisation


def of_network(nets: Sequence[nn.Module]) -> list[Layer]:
    """Weights of K networks of Linear layers, with or without batch normalisation in front of the sigmoids."""
    layers: list[Layer] = []
    for same in zip(*(net.modules() for net in nets)):
        if isinstance(same[0], nn.Linear):
            layers.append({"W": torch.stack([torch.cat([m.weight, m.bias[:, None]], 1) for m in same]).detach()})
        if isinstance(same[0], nn.BatchNorm1d):
            for name in ("weight", "bias", "running_mean", "running_var"):
                layers[-1][name] = torch.stack([getattr(m, name) for m in same]).detach()[:, None]
    return layers


class Together:
    """K networks and their optimiser: `name`, with learning rates and second parameters [K]."""

    def __init__(self, nets: Sequence[nn.Module], name: str, lr: Tensor, second: Tensor, refresh: int) -> None:
        self.layers, self.name, self.refresh, self.steps = of_network(nets), name, refresh, 0
        first = self.layers[0]["W"]
        self.lr, self.second = (value.to(first)[:, None, None] for value in (lr, second))
        for layer in self.layers if name.startswith(PLAIN) else ():
            for key in {"W", "weight", "bias"} & set(layer):
                layer |= {f"{of} of {key}": torch.zeros_like(layer[key]) for of in ("mean", "square")}

    def keep(self, which: Tensor) -> None:
        """Go on with some of the networks."""
        self.layers = [{name: value[which] for name, value in layer.items()} for layer in self.layers]
        self.lr, self.second = self.lr[which], self.second[which]

    def outputs(self, x: Tensor, seen: list[tuple[Tensor, ...]] | None = None) -> Tensor:
        """Logits [k, n, d] for x [k, n, d + 1], which ends with ones; with `seen` as in training, which fills it."""
        more: tuple[Tensor, ...]
        for layer in self.layers[:-1]:
            z, more = x @ layer["W"].mT, ()
            if "weight" in layer:
                z, more = self.normalised(layer, z, seen is not None)
            if seen is not None:
                seen.append((x, *more))
            x = F.pad(torch.sigmoid_(z), (0, 1), value=1.0)
        if seen is not None:
            seen.append((x,))
        return x @ self.layers[-1]["W"].mT

    def normalised(self, layer: Layer, z: Tensor, training: bool) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Batch normalisation as torch has it; also what its gradient needs."""
        mean, var = layer["running_mean"], layer["running_var"]
        if training:
            var_n, mean_n = torch.var_mean(z, 1, keepdim=True, correction=0)
            mean.lerp_(mean_n, MEAN_OF[1])
            var.lerp_(var_n * (z.shape[1] / (z.shape[1] - 1)), MEAN_OF[1])
            mean, var = mean_n, var_n
        root = (var + 1e-5).rsqrt()
        unit = (z - mean) * root
        return torch.addcmul(layer["bias"], layer["weight"], unit), (unit, root)

    def step(self, x: Tensor) -> None:
        """One step on batches x [k, n, d + 1]."""
        seen: list[tuple[Tensor, ...]] = []
        g = torch.sigmoid_(self.outputs(x, seen)).sub_(x[..., :-1])
        flows: list[tuple[Tensor, Tensor]] = []  # inputs, and gradients of the individual losses by the outputs
        for layer, (a, *more), after in zip(self.layers[::-1], seen[::-1], [None, *seen[:0:-1]]):
            if after is not None:
                h = after[0][..., :-1]
                g = g.mul_(h).mul_(1 - h)
            if more:
                unit, root = more
                slopes = {"weight": (g * unit).mean(1, keepdim=True), "bias": g.mean(1, keepdim=True)}
                g = (g - slopes["bias"] - unit * slopes["weight"]) * (layer["weight"] * root)
                for name, slope in slopes.items():
                    self.move(layer, name, slope)
            flows.append((a, g))
            if layer is not self.layers[0]:
                g = g @ layer["W"][..., :-1]
        flows.reverse()
        if not self.name.startswith(PLAIN) and self.steps % self.refresh == 0:
            self.renew(flows)
        for layer, (a, g) in zip(self.layers, flows):
            self.turn(layer, a, g)
        self.steps += 1

    def move(self, layer: Layer, name: str, slope: Tensor) -> None:
        """SGD with momentum or Adam: a step of weights along their gradient."""
        mean, square = layer[f"mean of {name}"], layer[f"square of {name}"]
        if self.name.startswith("sgd"):
            layer[name].addcmul_(mean.mul_(self.second).add_(slope), self.lr, value=-1)
            return
        mean.lerp_(slope, 0.1)
        square.mul_(0.999).addcmul_(slope, slope, value=0.001)
        t = self.steps + 1
        root = square.sqrt().div_(math.sqrt(1 - 0.999**t)).add_(self.second)
        layer[name].addcdiv_(mean * self.lr, root, value=-1 / (1 - 0.9**t))

    def turn(self, layer: Layer, a: Tensor, g: Tensor) -> None:
        """A step of one layer."""
        n = a.shape[1]
        if self.name.startswith(PLAIN):
            self.move(layer, "W", (g.mT @ a).div_(n))
        elif self.name.startswith("kfac"):
            layer["W"].addcmul_(turned(g, a, layer["B"], layer["A"]), self.lr, value=-1 / n)
        else:
            if self.name == "ekfac":
                P, Q = g @ layer["B"], a @ layer["A"]
                V = (P.mT @ Q).div_(n)
                s = (P.square_().mT @ Q.square_()).div_(n)
            else:
                V = turned(g, a, layer["B"], layer["A"]).div_(n)
                s = layer["s"].mul_(1 - MEAN_OF[0]).addcmul_(V, V, value=MEAN_OF[0] * n)
            V.mul_(self.lr).div_(s + self.second)
            layer["W"].baddbmm_(layer["B"] @ V, layer["A"].mT, alpha=-1)

    def renew(self, flows: Sequence[tuple[Tensor, Tensor]]) -> None:
        """New inverses or eigenbases of the factors B = E[g g^T] and A = E[a a^T] of a batch alone."""
        dtype = self.lr.dtype
        rows = [(x.double() / math.sqrt(x.shape[1])) for a, g in flows for x in (g, a)]
        if self.name.startswith("kfac"):
            means = [Z.square().sum((1, 2)) / Z.shape[2] for Z in rows]  # of eigenvalues
            added = []
            for b, a in zip(means[::2], means[1::2]):
                pi = torch.where((a > 0) & (b > 0), (a / b).sqrt(), 1.0)
                added += [self.second[:, 0, 0].double().sqrt() * factor for factor in (1 / pi, pi)]
            found = inverses(rows, added)
            for layer, B, A in zip(self.layers, found[::2], found[1::2]):
                layer["B"], layer["A"] = B.to(dtype), A.to(dtype)
            return
        # where a basis serves its own batch alone, nothing reaches out of the span of the rows
        pairs = eigenbases(rows, complete=self.refresh > 1)
        for layer, (U_B, s_B), (U_A, s_A) in zip(self.layers, pairs[::2], pairs[1::2]):
            layer["B"], layer["A"] = U_B.to(dtype), U_A.to(dtype)
            layer["s"] = (s_B[:, :, None] * s_A[:, None, :]).to(dtype)

    @torch.no_grad()
    def losses(self, x: Tensor) -> Tensor:
        """Mean cross-entropy [k] of images x [n, d + 1], summed over pixels, of the networks in use."""
        total = torch.zeros_like(self.lr[:, 0, 0])
        for part in torch.split(x.expand(len(total), -1, -1), LOOK, 1):
            y = part[..., :-1]
            total += F.binary_cross_entropy_with_logits(self.outputs(part), y, reduction="none").sum((1, 2))
        return total / len(x)


def turned(g: Tensor, a: Tensor, B: Tensor, A: Tensor) -> Tensor:
    """B^T g^T a A for rows g [k, n, o] and a [k, n, i], B [k, o, r] and A [k, i, s], in the order that is less work."""
    n, (o, r), (i, s) = g.shape[1], B.shape[1:], A.shape[1:]
    if n * (o * r + i * s + r * s) < n * o * i + o * i * r + r * i * s:
        return (g @ B).mT @ (a @ A)
    return B.mT @ (g.mT @ a) @ A


def at_once(net: nn.Module, size: int, refresh: int, device: torch.device) -> int:
    """How many networks are trained together: as many as half of the memory that is free holds.

    Where a basis is computed in every step, that is what takes the time; fewer lose less when a training is cut off.
    """
    shapes = [m.weight.shape for m in net.modules() if isinstance(m, nn.Linear)]
    weights, sides = sum(o * (i + 1) for o, i in shapes), sum(o**2 + (i + 1) ** 2 for o, i in shapes)
    rows = sum(o + i + 1 for o, i in shapes)
    need = 4 * (8 * weights + 8 * sides + rows * (3 * LOOK + 12 * size))
    return max(1, min(8 if refresh == 1 else 10**6, free_memory(device) // 2 // need))


def curves(
    group: Together,
    x: Tensor,
    looked_at: Sequence[Tensor],
    ticks: Sequence[int],
    batches: Callable[[int, int], Tensor],
    title: str,
) -> list[Tensor]:
    """Losses [K, ticks] on every one of some sets of images, in training on x.

    Where the first of them is not finite, the training has ended: all of its losses are infinite from there.
    `batches(start, stop)` are indices [K, steps, n] into x.
    """
    x, *looked_at = (F.pad(images, (0, 1), value=1.0) for images in (x, *looked_at))
    going = torch.arange(len(group.lr), device=x.device)
    out = [torch.full((len(going), len(ticks)), math.inf, dtype=torch.float64) for _ in looked_at]
    for look, stop in enumerate(progress(ticks, title, leave=False)):
        if look and len(going):
            for chosen in batches(ticks[look - 1], stop)[going].unbind(1):
                group.step(x[chosen])
        found = torch.stack([group.losses(images) for images in looked_at])
        found = torch.where(found.isfinite(), found, math.inf)
        for values, losses in zip(out, found.cpu()):
            values[going.cpu(), look] = losses.to(values)
        if not bool((well := found[0].isfinite()).all()):
            going = going[well]
            group.keep(well)
            for values in out:
                values[~torch.isin(torch.arange(len(values)), going.cpu()), look] = math.inf
    return out

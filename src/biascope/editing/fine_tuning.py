"""Fine-tuning, in the tangent space or as usual, by one protocol. Four predictors are compared:

f(theta0)              pre-trained
f(theta0 + tau)        non-linear fine-tuning
f_lin(theta0 + tau)    post-hoc linearisation: equal to it if, and only if, fine-tuning was linear
f_lin(theta0 + tau')   tangent fine-tuning: tau' was found by training f_lin itself
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from biascope.editing.plane import Head, Output, labelled, prediction_rows
from biascope.editing.vectors import TaskVector
from biascope.ensembles.graphs import capture
from biascope.network.functional import ParamSelection, as_rows, explained, select_params
from biascope.support.arguments import check_number
from biascope.support.bars import progress
from biascope.support.errors import InputError
from biascope.support.inputs import gather, map_inputs, take, tensors_of
from biascope.support.precision import without_autocast
from biascope.support.seeds import generator
from biascope.support.signatures import checked
from biascope.support.tables import facts
from biascope.tangent.anchored import check_model, copy_of
from biascope.tangent.linearized import Linearized, linearize

FEW = 8  # steps, for which a capture does not pay
Loss = Callable[[Tensor, Tensor], Tensor]  # (outputs [n, c], labels) -> a scalar


@dataclass(frozen=True)
class FineTuned:
    """A fine-tuned network: `model` (a `bs.linearize`d one if tangent), its task `vector`, `losses` [steps]."""

    model: nn.Module = field(repr=False)
    vector: TaskVector
    losses: Tensor = field(repr=False)
    tangent: bool
    steps: int
    seed: int

    def _repr_html_(self) -> str:
        """What was trained and how far it went, for notebooks."""
        title = "Tangent fine-tuning" if self.tangent else "Fine-tuning"
        rows = {"steps": self.steps, "first loss": float(self.losses[0]), "last loss": float(self.losses[-1])}
        return facts(title, {**rows, "vector": repr(self.vector)})


@checked
@without_autocast()
def fine_tune(
    model: nn.Module,
    data: Any,
    *,
    tangent: bool = False,
    steps: int = 2000,
    batch_size: int = 128,
    lr: float = 1e-5,
    warmup: int | None = None,
    weight_decay: float = 0.1,
    clip: float | None = 1.0,
    params: ParamSelection = None,
    head: Head | None = None,
    loss: Loss = nn.functional.cross_entropy,
    output: Output | None = None,
    seed: int = 0,
) -> FineTuned:
    """Fine-tune a copy of a network and take its task vector: AdamW, warm-up, cosine annealing, gradient clipping.

    The protocol and its defaults are the paper's (2,000 steps of 128 examples, learning rate 1e-5, 200 steps of
    warm-up; weight decay 0.1 and clipping at 1 as its code has them), the same for both kinds. Weight decay pulls
    towards 0, not towards theta0. The network must be in eval mode (statistics of BatchNorm stay, dropout is off). For
    a loop of your own: train `bs.linearize(model)` and take `TaskVector(model, trained)`.

    Args:
        model: theta0; not changed.
        data: (x, y), or batches of those; all of it is held in memory. On the GPU of the network already, steps are
            captured once as a CUDA graph and replayed.
        tangent: train the linearised network.
        steps: number of updates.
        batch_size: examples per update, drawn without replacement within an epoch.
        lr: highest learning rate.
        warmup: steps of linear warm-up; a tenth of all if None.
        weight_decay: of AdamW.
        clip: largest norm of the gradient, or None.
        params: which parameters are trained, None for those with requires_grad.
        head: frozen function [n, c] -> [n, classes] behind the network; not changed, not part of the vector.
        loss: (outputs, labels) -> scalar.
        output: how to get a tensor [n, c] from what the model returns.
        seed: of the order of the examples.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> x = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        >>> found = fine_tune(net, (x, (x[:, 0] > 0).long()), tangent=True, steps=50, batch_size=16, lr=1e-2)
        >>> bool(found.losses[-5:].mean() < found.losses[:5].mean())
        True
    """
    model = getattr(model, "_orig_mod", model)
    check_model(model)
    warmup = steps // 10 if warmup is None else warmup
    if clip is not None:
        check_number(clip, "clip", above=0)  # 0 stops the training, a negative one turns it round
    pieces, labels = labelled(data, "data", 1 << 30)
    x, n = gather(pieces, "data"), len(labels)
    device = next(model.parameters()).device
    if tangent:
        tuned: nn.Module = linearize(model, params=params)
    else:
        tuned = copy_of(model)
        chosen = select_params(dict(tuned.named_parameters()), params)
        for name, p in tuned.named_parameters():
            p.requires_grad_(name in chosen)
    trained = [p for p in tuned.parameters() if p.requires_grad]
    dtype = trained[0].dtype
    # a step asks the host nothing then
    there = device.type == "cuda" and all(t.device == device for t in tensors_of(x))
    order, rows = _order(n, min(batch_size, n), steps, seed), prediction_rows(output)
    rates = [lr * schedule(step, steps, warmup) for step in range(steps)]
    count = torch.zeros(1, dtype=torch.long, device="cpu")
    losses, table = torch.zeros(steps, dtype=torch.float64, device=device), torch.tensor(rates, device=device)
    if there:
        labels, order, count = labels.to(device), order.to(device), count.to(device)
    rate = table[0].clone() if there else lr
    optimiser = torch.optim.AdamW(trained, lr=rate, weight_decay=weight_decay, capturable=there)

    def update() -> None:
        index = order.index_select(0, count)[0]
        args = map_inputs(take(x, index), lambda t: t.to(device, dtype if t.is_floating_point() else None))
        with explained(model, args):
            found_rows = tuned(**args) if isinstance(args, dict) else tuned(args)
        out = as_rows(found_rows, len(index), rows, tuned)
        out = out if head is None else head(out)
        known = optimiser.state or loss is not nn.functional.cross_entropy
        if not known and _beyond(labels, out.shape[1]):  # stops a GPU for good
            raise InputError(f"data: labels must be classes from 0 to {out.shape[1] - 1}, or -100")
        value = loss(out, labels[index].to(device))
        # not backward(): the head's own parameters must not collect gradients
        for p, g in zip(trained, torch.autograd.grad(value, trained, allow_unused=True)):
            p.grad = g
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        for group in optimiser.param_groups:
            group["lr"] = rate.copy_(table.index_select(0, count)[0]) if isinstance(rate, Tensor) else rates[int(count)]
        optimiser.step()
        losses.index_copy_(0, count.to(device), value.detach().double()[None])
        count.add_(1)

    advance = update
    for step in progress(range(steps), "tangent fine-tuning" if tangent else "fine-tuning", leave=False):
        if step == 1 and there and steps > FEW:  # the first step has checked the labels and made the momenta
            moments = [t for each in optimiser.state.values() for t in each.values()]
            advance = capture(update, device=device, state=[*trained, *moments, count, losses], optional=True)
        advance()
    for p in trained:
        p.grad = None
    found = losses.cpu()
    if not bool(found.isfinite().all()):
        raise InputError(f"the loss is not finite: use a smaller lr than {lr:g}")
    return FineTuned(tuned, TaskVector(model, tuned), found, tangent, steps, seed)


def _order(n: int, batch: int, steps: int, seed: int) -> Tensor:
    """Which examples every step sees [steps, batch]: one shuffled epoch after another."""
    rng, total = generator(seed, "fine-tune"), steps * batch
    epochs = [torch.randperm(n, generator=rng, device="cpu") for _ in range(-(-total // n))]
    return (
        torch.cat(epochs)[:total].view(steps, batch)
        if epochs
        else torch.empty(0, batch, dtype=torch.long, device="cpu")
    )


def _beyond(labels: Tensor, classes: int) -> bool:
    """Is a label [n] no class? Cross-entropy leaves -100 out."""
    return labels.dim() == 1 and bool((((labels < 0) | (labels >= classes)) & (labels != -100)).any())


def schedule(step: int, steps: int, warmup: int) -> float:
    """Factor of the learning rate: linear warm-up, then a half cosine to zero."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@checked
def posthoc(model: nn.Module, vector: TaskVector, scale: float = 1.0, **options: Any) -> Linearized:
    """f_lin(x; theta0 + scale tau): a task vector of the plain network, in its tangent space. `options`: `linearize`.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> tau = TaskVector.from_tensors({"weight": torch.ones(1, 2)})
        >>> torch.equal(posthoc(net, tau)(torch.eye(2)), tau.apply_to(net)(torch.eye(2)))  # a linear model
        True
    """
    return vector.apply_to(linearize(model, **options), scale)

"""What the studies of task arithmetic measure of a network and its task vectors, kept in the cache, and its charts."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from biascope import InputError
from biascope.editing import disentanglement, localisation, task_addition, task_negation
from biascope.studies import Chart, Estimate, HeatMap, Run
from biascope.studies.estimates import curve, difference, errors_over, jackknife_error, mean_error
from biascope.support import generator
from biascope_papers.editing.stand_in import LABELS, METHODS, Networks, Setting, Start, networks, store

STARTS: tuple[Start, ...] = ("random", "pre-trained")
SHOWN = 3  # pairs of which maps are drawn
MAP = (
    "Share of the test images whose class changes where the other task's vector is added, summed over both tasks (0 to "
    "2), light where it is small; mean over seeds. Red: [0, 1]^2, where merging looks for its coefficient."
)


@dataclass(frozen=True)
class Accuracies:
    """Test accuracies of one method [seeds, tasks]: of theta_0, every task alone, and all added with alpha [seeds].

    `each_single` and `each_multi` [seeds, tasks, images]: 1 where the class was right, NaN past a task's images.
    """

    before: Tensor
    single: Tensor
    multi: Tensor
    alpha: Tensor
    each_single: Tensor
    each_multi: Tensor


def accuracies(
    run: Run, setting: Setting, stages: int, start: Start = "pre-trained", methods: Sequence[str] = METHODS
) -> dict[str, Accuracies]:
    """Of every method: each task alone, and all added with the one coefficient that is best on held-out images."""

    def measure(method: str, seed: int) -> dict[str, Tensor]:
        made = networks(run, setting, stages, seed, start, methods=[method])
        held, test = ({t: getattr(made.images[t], part) for t in setting.tasks} for part in ("held", "test"))
        added = task_addition(*made.predictor(method), held, test, heads=_heads(made, setting.tasks))
        scores = {"single": added.single, "multi": added.multi, "before": added.pretrained}
        means = {name: torch.stack([each[t].mean() for t in setting.tasks]) for name, each in scores.items()}
        run.log(start=start, stages=stages, seed=seed, method=method, **{k: float(v.mean()) for k, v in means.items()})
        means["alpha"] = torch.tensor(added.alpha, dtype=torch.float64)
        hits = {f"each_{name}": [scores[name][t].float() for t in setting.tasks] for name in ("single", "multi")}
        return means | {k: pad_sequence(v, batch_first=True, padding_value=math.nan) for k, v in hits.items()}

    return {
        method: Accuracies(**_kept(run, setting, stages, f"accuracies, {start}, {method}", partial(measure, method)))
        for method in methods
    }


def paired(one: Tensor, other: Tensor) -> list[Estimate]:
    """Of every task the difference of two methods, from [seeds, tasks, images] of both: error over seeds; of one seed
    over its images.
    """
    rows = (one - other).double()
    if len(rows) > 1:
        return [Estimate.of(rows[:, t].nanmean(1)) for t in range(rows.shape[1])]
    return [Estimate.of(row[~row.isnan()]) for row in rows[0]]


def share_kept(found: Accuracies) -> Tensor:
    """(merged - before) / (single - before), each averaged over tasks: [seeds]. Of one seed alone its share,
    followed by the shares with one task left out: [1 + tasks].
    """
    multi, single = found.multi - found.before, found.single - found.before
    if len(multi) > 1:
        return multi.mean(1) / single.mean(1)
    left = [[i for i in range(multi.shape[1]) if i != t] for t in range(-1, multi.shape[1])]
    return torch.stack([multi[0, each].mean() / single[0, each].mean() for each in left])


def share(values: Tensor, seeds: int) -> Estimate:
    """Mean over seeds of `share_kept` or a difference of two; of one seed its value, with the error over its tasks."""
    if seeds > 1:
        return Estimate.of(values)
    return Estimate(float(values[0]), jackknife_error(values[1:].numpy()), len(values) - 1)


def controlled(
    run: Run, setting: Setting, stages: int, methods: Sequence[str] = ("non-linear",)
) -> dict[str, Estimate]:
    """Share of the gain of fine-tuning that addition keeps, pre-trained minus random; nothing if not asked for."""
    if not setting.check:
        return {}
    made = {}
    for method in methods:
        random, trained = (share_kept(accuracies(run, setting, stages, start, [method])[method]) for start in STARTS)
        gap = share(trained - random, setting.seeds)
        made[f"share of the gain kept, pre-trained minus random, {LABELS[method]}"] = gap
    return made


def negations(
    run: Run, setting: Setting, stages: int, keep: float, methods: Sequence[str] = METHODS
) -> dict[str, dict[str, Tensor]]:
    """Each task subtracted, by every method: `target`, `control`, `alpha` [seeds, tasks]; of theta_0 `*_before`."""
    names = ("target", "control", "target_before", "control_before")

    def measure(method: str, seed: int) -> dict[str, Tensor]:
        made = networks(run, setting, stages, seed, methods=[method])
        control, (model, vectors), rows = made.images[setting.control], made.predictor(method), []
        for task in setting.tasks:
            parts = made.images[task]
            gone = task_negation(
                model, vectors[task], parts.held, control.held, (parts.test, control.test), keep=keep,
                heads=(made.head(task), made.head(setting.control)),
            )  # fmt: skip
            rows.append([gone.means()[name][0] for name in names] + [gone.alpha])
        return dict(zip([*names, "alpha"], torch.tensor(rows, dtype=torch.float64).T.contiguous()))

    return {m: _kept(run, setting, stages, f"negations, {keep}, {m}", partial(measure, m)) for m in methods}


@dataclass(frozen=True)
class Maps:
    """xi of pairs of tasks, {method: [seeds, pairs, A, A]} with the first task's coefficient down the rows.

    `rms` {method: [seeds, pairs]}: how far a weight moved in fine-tuning, ||tau|| / sqrt(m), averaged over the pair.
    """

    alphas: tuple[float, ...]
    pairs: tuple[tuple[str, str], ...]
    xi: Mapping[str, Tensor]
    rms: Mapping[str, Tensor]

    def beyond(self, method: str) -> Tensor:
        """Mean of xi where both coefficients are above 1, [seeds, pairs]."""
        above = torch.tensor([a > 1 + 1e-6 for a in self.alphas])
        return self.xi[method][..., above, :][..., above].mean((-2, -1))

    def everywhere(self, method: str) -> Tensor:
        """Mean of xi over the map, [seeds, pairs]."""
        return self.xi[method].mean((-2, -1))

    def box(self, method: str) -> Tensor:
        """Mean of xi over the coefficients that are searched, [0, 1]^2: [seeds, pairs]."""
        inside = torch.tensor([-1e-6 <= a <= 1 + 1e-6 for a in self.alphas])
        return self.xi[method][..., inside, :][..., inside].mean((-2, -1))


def maps(
    run: Run,
    setting: Setting,
    stages: int,
    *,
    methods: Sequence[str] = METHODS,
    start: Start = "pre-trained",
    pairs: int = 3,
    points: int = 200,
    grid: int = 13,
) -> Maps:
    """Disentanglement errors on [-3, 3]^2 of the first `pairs` pairs of neighbours in the list of tasks."""
    chosen = tuple(itertools.pairwise(setting.tasks))[:pairs]
    if not chosen:
        raise InputError(f"tasks={','.join(setting.tasks)} and pairs={pairs} make no pair: name two tasks or more")
    alphas = tuple(torch.linspace(-3, 3, grid, dtype=torch.float64).tolist())

    def measure(method: str, seed: int) -> dict[str, Tensor]:
        tasks = tuple(dict.fromkeys(itertools.chain(*chosen)))
        made = networks(run, setting, stages, seed, start, tasks, [method])
        model, vectors = made.predictor(method)
        xi = []
        for pair in chosen:
            two = {task: vectors[task] for task in pair}
            x = {task: made.images[task].test[0][:points] for task in pair}
            xi.append(disentanglement(model, two, x, alphas, heads=_heads(made, pair), batch_size=1024).xi)
        moved = [sum(vectors[task].rms() for task in pair) / 2 for pair in chosen]
        return {"xi": torch.stack(xi), "rms": torch.tensor(moved, dtype=torch.float64)}

    size = f"{len(chosen)} pairs, {points}, {grid}"
    found = {m: _kept(run, setting, stages, f"xi, {start}, {m}, {size}", partial(measure, m)) for m in methods}
    xi, rms = ({method: each[name] for method, each in found.items()} for name in ("xi", "rms"))
    return Maps(alphas, chosen, xi, rms)


def energies(
    run: Run, setting: Setting, stages: int, points: int, outputs: int, start: Start = "pre-trained"
) -> dict[str, Tensor]:
    """Local energy of the tangent kernel: {task: [seeds, outputs, 2 points]}, the task's inputs before the control's;
    one kernel for each of the first `outputs` classes of the task.
    """

    def some(x: Tensor, seed: int, name: str) -> Tensor:
        if points > len(x):
            raise InputError(
                f"{points} images were asked for, {name} has {len(x)} for tests: raise `test` or ask for fewer"
            )
        return x[torch.randperm(len(x), generator=generator(seed, "points"))[:points].to(x.device)]

    def measure(seed: int) -> dict[str, Tensor]:
        made = networks(run, setting, stages, seed, start, methods=())
        found = {}
        for task in setting.tasks:
            rows = made.images[task].texts
            head = nn.Linear(rows.shape[1], len(rows), bias=False, device=rows.device)
            head.weight = nn.Parameter(rows, requires_grad=False)
            model = nn.Sequential(made.encoder, head).eval()
            x, z = (some(made.images[name].test[0], seed, name) for name in (task, setting.control))
            classes = range(min(outputs, len(rows)))
            each = [localisation(model, x, z, outputs=c, params=["0"]).energy.values.flatten() for c in classes]
            found[task] = torch.stack(each).double()
        return found

    found = _kept(run, setting, stages, f"energies, {start}, {points}, {outputs}", measure)
    return {task: found[task] for task in setting.tasks}  # stored by name


def contrasts(energy: Tensor) -> Tensor:
    """Energy on the task minus that on the control set, [seeds], from [seeds, outputs, points of both]."""
    task, control = energy.chunk(2, -1)
    return (task - control).mean((1, 2))


def contrast(energy: Tensor) -> Estimate:
    """Its mean over seeds; of one seed with the error over its points."""
    if len(energy) > 1:
        return Estimate.of(contrasts(energy))
    task, control = energy[0].mean(0).chunk(2)
    return difference(Estimate.of(task), Estimate.of(control))


def _heads(made: Networks, tasks: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    return {task: made.head(task) for task in tasks}


def _kept(
    run: Run, setting: Setting, stages: int, key: str, measure: Callable[[int], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """What `measure` gives of all seeds: from the run folder, else from the cache, else now; {name: [seeds, ...]}."""

    def take(seed: int) -> dict[str, Any]:
        cache = store(run, setting, stages, seed)
        run.log(measured=key, stages=stages, seed=seed, from_cache=key in cache.arrays())
        return cache.cached(key, lambda: measure(seed))

    rows: list[dict[str, Any]] = [
        run.cached(f"{key}, {stages} stages, seed {seed}", partial(take, seed)) for seed in range(setting.seeds)
    ]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


# ----------------------------------------------------------------------------------------------- charts and sentences


def by_task(name: str, title: str, tasks: Sequence[str], rows: Mapping[str, Tensor], alt: str) -> Chart:
    """Accuracies of several networks, {label: [seeds, tasks]}, task by task."""
    places = range(1, len(tasks) + 1)
    return Chart(
        name, title, "task", "test accuracy",
        tuple(curve(label, places, table, "points") for label, table in rows.items()),
        alt=alt, caption=f"Mean and error over seeds.{_classes(tasks)}", x_names=tuple(map(spoken, tasks)),
    )  # fmt: skip


def heat_maps(found: Maps, methods: Sequence[str], where: str = "") -> tuple[HeatMap, ...]:
    """One map of xi, averaged over seeds, per pair of tasks and method."""
    made = list[HeatMap]()
    for p, pair in enumerate(found.pairs[:SHOWN]):
        one, two = map(spoken, pair)
        for method in methods:
            # the first task's coefficient goes right, as in the paper
            z = mean_error(found.xi[method][:, p].flatten(1))[0].reshape(len(found.alphas), -1).T
            made.append(
                HeatMap.of(
                    f"xi-{p + 1}-{method}{'-' + where.replace(' ', '-') if where else ''}",
                    f"{one} and {two}: {LABELS[method]}{', ' + where if where else ''}",
                    x=found.alphas, y=found.alphas, z=z.tolist(),
                    x_label=f"coefficient of {one}", y_label=f"coefficient of {two}",
                    z_label="disentanglement error", low=0.0, high=1.6, light_low=True, box=(0, 0, 1, 1),
                    alt="Disentanglement error over both coefficients, zero at the origin.",
                    caption=("As above." if made else MAP) + _classes(pair),
                )
            )  # fmt: skip
    return tuple(made)


def spoken(task: str) -> str:
    """A task in words: `quickdraw:0-30` are its classes 0 to 29, "quickdraw 0-29"; "inverted digits"."""
    name, _, turn = task.partition("/")
    name, _, span = name.partition(":")
    low, _, high = span.partition("-")
    return f"{turn} {name} {f'{low}-{int(high) - 1}' if span else ''}".strip()


def _classes(tasks: Sequence[str]) -> str:
    return " Numbers behind a name: classes of that set." if any(":" in task for task in tasks) else ""


def about(setting: Setting, stages: int | Sequence[int]) -> str:
    """The deviation from the paper, in a sentence or two."""
    which = str(stages) if isinstance(stages, int) else ", ".join(map(str, stages))
    n, sets = setting.seeds, ", ".join(map(spoken, (setting.control, *setting.beside)))
    errors = f"errors over {n} pre-trainings" if n > 1 else errors_over(n, len(setting.tasks), "tasks (of one: images)")
    towers = "ImageNet's MobileNetV2 and MiniLM" if setting.towers == "imagenet" else "drawn at random"
    return (
        f"Stand-in: not CLIP. Two towers ({towers}; {which} stages, {setting.side} px), aligned here on {sets}; "
        f"{setting.steps} steps of fine-tuning at {setting.lr:g}; {errors}."
    )

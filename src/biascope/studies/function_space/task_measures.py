"""What the studies of task arithmetic measure of a network and its task vectors, kept beside them in the cache."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from biascope.editing import disentanglement, localisation, task_addition, task_negation
from biascope.errors import InputError
from biascope.seeds import generator
from biascope.studies.function_space.task_networks import METHODS, Networks, Setting, Start, networks, store
from biascope.studies.runs import Run, Value

LOW = 0.2  # a disentanglement error up to a tenth of its range counts as low


@dataclass(frozen=True)
class Accuracies:
    """Test accuracies of every method and task, [seeds, methods, tasks]; before: [seeds, tasks], of theta_0."""

    before: Tensor
    single: Tensor
    multi: Tensor
    alpha: Tensor  # [seeds, methods]

    def of(self, method: str) -> "Accuracies":
        """Those of one method: [seeds, tasks]."""
        i = METHODS.index(method)
        return Accuracies(self.before, self.single[:, i], self.multi[:, i], self.alpha[:, i])


def accuracies(run: Run, setting: Setting, width: int, start: Start = "pre-trained") -> Accuracies:
    """Every task alone, and all added with the one coefficient that is best on held-out images."""

    def measure(seed: int) -> dict[str, Value]:
        made = networks(run, setting, width, seed, start)
        held, test = ({t: getattr(made.images[t], part) for t in setting.tasks} for part in ("held", "test"))
        found: dict[str, list[Tensor]] = {"single": [], "multi": [], "alpha": [], "before": []}
        for method in METHODS:
            model, vectors = made.predictor(method)
            added = task_addition(model, vectors, held, test, heads=_heads(made, setting.tasks))
            found["alpha"].append(torch.tensor(added.alpha, dtype=torch.float64))
            for name, scores in (("single", added.single), ("multi", added.multi), ("before", added.pretrained)):
                found[name].append(torch.stack([scores[t].mean() for t in setting.tasks]))
        return {**{name: torch.stack(rows) for name, rows in found.items()}, "before": found["before"][0]}

    rows = [_kept(run, setting, width, seed, f"accuracies, {start}", measure) for seed in range(setting.seeds)]
    parts = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    for seed, row in enumerate(rows):
        for i, method in enumerate(METHODS):
            means = {name: float(row[name][i].mean()) for name in ("single", "multi", "alpha")}
            run.log(start=start, width=width, seed=seed, method=method, before=float(row["before"].mean()), **means)
    return Accuracies(**parts)


def negations(run: Run, setting: Setting, width: int, keep: float) -> dict[str, Tensor]:
    """Every task subtracted: `target`, `control`, `alpha` [seeds, methods, tasks]; of theta_0: `target_before`, ..."""

    def measure(seed: int) -> dict[str, Value]:
        made = networks(run, setting, width, seed)
        control = made.images[setting.control]
        names = ("target", "control", "target_before", "control_before")
        table = torch.zeros(len(METHODS), len(setting.tasks), 5, dtype=torch.float64)
        for (i, method), (j, task) in itertools.product(enumerate(METHODS), enumerate(setting.tasks)):
            model, vectors = made.predictor(method)
            parts = made.images[task]
            gone = task_negation(
                model, vectors[task], parts.held, control.held, (parts.test, control.test), keep=keep,
                heads=(made.head(task), made.head(setting.control)),
            )  # fmt: skip
            table[i, j] = torch.tensor([gone.means()[name][0] for name in names] + [gone.alpha])
        return {name: table[..., k] for k, name in enumerate([*names, "alpha"])}

    rows = [_kept(run, setting, width, seed, f"negations, {keep}", measure) for seed in range(setting.seeds)]
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Maps:
    """xi of pairs of tasks, {method: [seeds, pairs, A, A]} with the first task's coefficient down the rows.

    `rms` {method: [seeds, pairs]}: how far a weight moved in fine-tuning, ||tau|| / sqrt(m), averaged over the pair.
    """

    alphas: tuple[float, ...]
    pairs: tuple[tuple[str, str], ...]
    xi: Mapping[str, Tensor]
    rms: Mapping[str, Tensor]

    def region(self, method: str) -> Tensor:
        """Share of the map where xi is low, [seeds, pairs]."""
        return (self.xi[method] <= LOW).double().mean((-2, -1))

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
    width: int,
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

    def measure(seed: int, method: str) -> dict[str, Value]:
        tasks = tuple(dict.fromkeys(itertools.chain(*chosen)))
        made = networks(run, setting, width, seed, start, tasks, [method])
        model, vectors = made.predictor(method)
        xi = [
            disentanglement(
                model,
                {task: vectors[task] for task in pair},
                {task: made.images[task].test[0][:points] for task in pair},
                alphas,
                heads=_heads(made, pair),
                batch_size=1024,
            ).xi
            for pair in chosen
        ]
        moved = [sum(vectors[task].rms() for task in pair) / 2 for pair in chosen]
        return {"xi": torch.stack(xi), "rms": torch.tensor(moved, dtype=torch.float64)}

    found: dict[str, list[dict[str, Tensor]]] = {
        method: [
            _kept(
                run, setting, width, seed, f"xi, {start}, {method}, {len(chosen)} pairs, {points}, {grid}",
                partial(measure, method=method),
            )
            for seed in range(setting.seeds)
        ]
        for method in methods
    }  # fmt: skip
    xi = {method: torch.stack([row["xi"] for row in rows]) for method, rows in found.items()}
    rms = {method: torch.stack([row["rms"] for row in rows]) for method, rows in found.items()}
    return Maps(alphas, chosen, xi, rms)


def energies(
    run: Run, setting: Setting, width: int, points: int, outputs: int, start: Start = "pre-trained"
) -> dict[str, Tensor]:
    """Local energy of the tangent kernel: {task: [seeds, outputs, 2 points]}, the task's inputs before the control's.

    One kernel per class of the task (the first `outputs`), K(task, task and control) on equally many test images.
    """

    def measure(seed: int) -> dict[str, Value]:
        made = networks(run, setting, width, seed, start, methods=())
        found: dict[str, Value] = {}
        for task in setting.tasks:
            rows = made.rows[task]
            head = nn.Linear(rows.shape[1], len(rows), bias=False, device=rows.device)
            head.weight = nn.Parameter(rows, requires_grad=False)
            model = nn.Sequential(made.encoder, head).eval()
            x, z = (_some(made.images[name].test[0], points, seed, name) for name in (task, setting.control))
            classes = range(min(outputs, len(rows)))
            each = [localisation(model, x, z, outputs=c, params=["0"]).energy.values.flatten() for c in classes]
            found[task] = torch.stack(each).double()
        return found

    key = f"energies, {start}, {points}, {outputs}"
    rows = [_kept(run, setting, width, seed, key, measure) for seed in range(setting.seeds)]
    return {task: torch.stack([row[task] for row in rows]) for task in setting.tasks}


def _heads(made: Networks, tasks: Sequence[str]) -> dict[str, Callable[[Tensor], Tensor]]:
    return {task: made.head(task) for task in tasks}


def _some(x: Tensor, n: int, seed: int, name: str) -> Tensor:
    if n > len(x):
        raise InputError(f"{n} images were asked for, {name} has {len(x)} for tests: raise `test` or ask for fewer")
    return x[torch.randperm(len(x), generator=generator(seed, "points"))[:n].to(x.device)]


def _kept(
    run: Run, setting: Setting, width: int, seed: int, key: str, measure: Callable[[int], Mapping[str, Value]]
) -> dict[str, Tensor]:
    """What `measure` gives: from the run folder, else from the cache, else now. Judging a run again needs no cache."""

    def take() -> dict[str, Value]:
        cache = store(run, setting, width, seed)
        run.log(measured=key, width=width, seed=seed, from_cache=key in cache.arrays())
        return cache.cached(key, lambda: measure(seed))

    found = run.cached(f"{key}, width {width}, seed {seed}", take)
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}

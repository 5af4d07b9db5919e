"""Train one network per task (a direction, a set of labels, a pruned set), in pieces that survive an interruption."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, overload

import torch
from torch import Tensor

from biascope.ensembles import Factory, accuracy, record, train_ensemble
from biascope.ensembles.work import SGD
from biascope.studies import Estimate, Run
from biascope.support import derive
from biascope_papers.gih.geometries import Drawn
from biascope_papers.gih.networks import at_least

Task = tuple[Tensor, Tensor]  # inputs [n, ...] and labels [n]
Precision = Literal["float32", "tf32", "fp16", "bf16"]
Engine = Literal["auto", "vmap", "loop", "graph"]


class Lazy(Sequence[Task]):
    """Tasks made when they are asked for, so that a sweep needs memory for a few of them only."""

    def __init__(self, make: Callable[[int], Task], n: int) -> None:
        self.make, self.n = make, n

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            chosen = range(self.n)[index]
            return Lazy(lambda i: self.make(chosen[i]), len(chosen))
        return self.make(range(self.n)[index])


@dataclass(frozen=True)
class Protocol(SGD):
    """How a figure trains. The defaults are the synthetic protocol of the NAD paper, which Figs 4 and 5 use.

    The largest gradient norm is that of the published code; the text does not speak of one.
    """

    precision: Precision = "float32"
    engine: Engine = "auto"


@dataclass(frozen=True)
class Training(Drawn):
    """Options of all studies that train networks to the end."""

    epochs: Annotated[int, "epochs"] = 20
    clip_norm: Annotated[float, "largest gradient norm, 0 for none"] = 0.5
    precision: Annotated[Precision, "arithmetic on CUDA"] = "tf32"
    engine: Annotated[Engine, "how networks are trained"] = "auto"

    def protocol(
        self, lr: float, batch_size: int = 128, momentum: float = 0.0, decay: float = 0.0, longer: float = 1.0
    ) -> Protocol:
        """How networks are trained, for `longer` times the epochs."""
        return Protocol(round(self.epochs * longer), batch_size, lr, momentum, decay, self.clip_norm or None,
                        precision=self.precision, engine=self.engine)  # fmt: skip


def train_tasks(
    run: Run,
    key: str,
    factory: Factory,
    tasks: Sequence[Task],
    tests: Sequence[Sequence[Task]],
    protocol: Protocol,
    *,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Training accuracy [T] and test accuracy [T, tests] of one network per task.

    `tests` are one or more sequences with a test set for each task. Every `chunk` networks are trained together and
    written to the run folder under `key`.
    """
    at_least(1, repeats=len(tasks))
    recorded, options = record(factory), options_of(run, protocol)

    def piece(start: int) -> dict[str, Tensor | float]:
        stop = min(start + chunk, len(tasks))
        done = train_ensemble(
            recorded, tasks[start:stop], test=tests[0][start:stop], seed=derive(run.seed, key, start),
            device=run.device, keep=len(tests) > 1, **options,
        )  # fmt: skip
        options["engine"] = done.engine  # timed once, not for every piece
        columns = [done.test_accuracy]
        if done.networks is not None:
            networks = done.networks.to(run.device)
            for more in tests[1:]:
                sets = [more[i] for i in range(start, stop)]
                found = [accuracy(networks[i : i + 1], x[None].to(run.device), y[None].to(run.device))
                         for i, (x, y) in enumerate(sets)]  # fmt: skip
                columns.append(torch.cat(found))
        return {"train": done.train_accuracy, "test": torch.stack(columns, 1), "seconds": done.seconds}

    made = run.cached_each(key, range(0, len(tasks), chunk), piece)
    train, test = (torch.cat([torch.as_tensor(each[part]) for each in made]) for part in ("train", "test"))
    return train, test


def options_of(run: Run, protocol: Protocol) -> dict[str, Any]:
    """Keyword arguments of `train_ensemble`; the reduced precisions are CUDA's."""
    options = {name: getattr(protocol, name) for name in Protocol.__dataclass_fields__}
    return options if torch.device(run.device).type == "cuda" else {**options, "precision": "float32"}


def percent(values: Tensor) -> Tensor:
    """Accuracies in percent."""
    return 100.0 * torch.as_tensor(values).double()


def mean_of(samples: Iterable[Any]) -> Estimate:
    """Mean of independent samples; the error of fewer than three is not worth the name and is left out.

    Example:
        >>> print(mean_of([1.0, 2.0, 3.0]), mean_of([1.0, 2.0]))
        2.00 ± 0.58 (n = 3) 1.5
    """
    values = list(samples)
    found = Estimate.of(values)
    return found if len(values) > 2 else replace(found, standard_error=None)

"""Train one network per task (direction, set of labels, pruned set, ...), in pieces that survive an interruption."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from biascope.ensembles import Factory, accuracy, record, train_ensemble
from biascope.ensembles.arithmetic import Precision
from biascope.ensembles.train import Schedule, TrainEngine
from biascope.errors import InputError
from biascope.seeds import derive
from biascope.studies.invariance.tasks import Task
from biascope.studies.runs import Run, Value


@dataclass(frozen=True)
class Protocol:
    """How a figure trains. The defaults are the synthetic protocol of the NAD paper, which Figs 4 and 5 use.

    The largest gradient norm is that of the published code; the text does not speak of one.
    """

    epochs: int = 20
    batch_size: int = 128
    lr: float = 0.5
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = 0.5
    schedule: Schedule = "linear"
    precision: Precision = "float32"
    engine: TrainEngine = "auto"


@dataclass(frozen=True)
class Accuracies:
    """Training accuracy [T] and accuracy on each of the test sets [T, tests]."""

    train: Tensor = field(repr=False)
    test: Tensor = field(repr=False)


def train_tasks(
    run: Run,
    key: str,
    factory: Factory,
    tasks: Sequence[Task],
    tests: Sequence[Sequence[Task]],
    protocol: Protocol,
    *,
    chunk: int = 64,
) -> Accuracies:
    """One network per task; `tests` are one or more sequences with a test set for each task.

    Every `chunk` networks are trained together and written to the run folder under `key`.
    """
    if not len(tasks):
        raise InputError("there is nothing to train: one repeat or more is needed")
    recorded = record(factory)
    options = {name: getattr(protocol, name) for name in Protocol.__dataclass_fields__}
    if torch.device(run.device).type != "cuda":
        options["precision"] = "float32"  # the reduced precisions are CUDA's

    def piece(start: int) -> dict[str, Value]:
        stop = min(start + chunk, len(tasks))
        done = train_ensemble(
            recorded,
            tasks[start:stop],
            test=tests[0][start:stop],
            seed=derive(run.seed, key, start),
            device=run.device,
            keep=len(tests) > 1,
            **options,
        )
        options["engine"] = done.engine  # timed once, not for every piece
        columns = [done.test_accuracy]
        if done.networks is not None:
            networks = done.networks.to(run.device)
            for more in tests[1:]:
                found = []
                for i in range(stop - start):
                    x, y = more[start + i]
                    found.append(accuracy(networks[i : i + 1], x[None].to(run.device), y[None].to(run.device)))
                columns.append(torch.cat(found))
        return {"train": done.train_accuracy, "test": torch.stack(columns, 1), "seconds": done.seconds}

    made = run.cached_each(key, range(0, len(tasks), chunk), piece)
    train, test = (torch.cat([torch.as_tensor(each[part]) for each in made]) for part in ("train", "test"))
    return Accuracies(train, test)

"""The probe: measures a network while it trains, at scheduled moments, within a share of the time."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from biascope.kernels.empirical import Outputs
from biascope.network.functional import ParamSelection
from biascope.probes.batch import probe_batch, probe_data
from biascope.probes.checks import eval_notes, read_loss, refuse_random
from biascope.probes.groups import Loss, as_groups
from biascope.probes.metrics import Metric, as_metrics
from biascope.probes.records import Folder, Record, fill, state_of, write_scalars, writer_of
from biascope.probes.schedules import Moment, Overhead, Schedule, as_schedule
from biascope.probes.view import Setup, View, frozen_copy, unwrapped
from biascope.support.arguments import check_count, check_number
from biascope.support.errors import BiascopeError, InputError
from biascope.support.limits import CountOrZero
from biascope.support.precision import Precision, arithmetic, without_autocast
from biascope.support.signatures import checked
from biascope.support.tables import grid

DEFAULT = ("ntk_alignment", "label_alignment", "effective_rank", "sign_similarity", "parameter_distance")
COLUMNS = 8  # values shown in a notebook
GROWTH = 1.25  # of the number of steps, between two measurements that are made in spite of the cap


class Probe:
    """Measures a network while it trains.

    Make it before training (that moment is "initialisation"; a record at step 0 is made at once), call `step` after
    every optimiser step, read `records`.

    The network is never touched: a copy in eval mode is measured, without dropout and with BatchNorm's running
    statistics, whatever mode training uses (`notes` says where that matters). Modes, gradients and the global random
    state stay as they are.

    Args:
        model: the network that is trained.
        x_probe: inputs [n, ...] or a dict of keyword tensors, on the model's device; fixed during the run. A pair
            (x, y), a data set or a DataLoader brings its labels; of the last two 128 random examples are read once.
        y_probe: labels [n] or targets [n, c], if metrics need them.
        metrics: names, `metric(name, **options)`, functions of a `View`, or {name: one of those}.
        schedule: "log", "loss", "epochs", "steps", a number of steps, or an object of `schedules`.
        groups: {name: indices, mask [n], or a batch (x, y) of its own}, for `group_losses` and `group_alignment`.
        max_overhead: share of wall time (since the probe was made) that measuring may take; measurements that would
            exceed it are left out and recorded as skipped. None: no cap. The first and the last are always made.
        out: a folder for the records, as JSON lines; a killed run that is made again with the same folder goes on.
        seed: of everything random.
        least: so many measurements between the first and the last are made whatever the cap says, and after these at
            least one whenever the number of steps has grown by a quarter. 0: the cap alone decides.
        tensorboard: a folder or a SummaryWriter.
        loss_fn: loss per example for groups; None for what the labels suggest.
        output: how to get a tensor from what the model returns.
        params: which parameters to differentiate (as for `bs.ntk`).
        outputs: which kernel: "full", "trace", "diagonal", "sum" or an output's index.
        precision: "float32" (a float64 network stays float64) or "float64".
        clock: seconds, for tests.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> x, y = torch.randn(6, 2), torch.arange(6) % 2
        >>> probe = Probe(net, x, y, metrics=["sign_similarity"], schedule=5, max_overhead=None)
        >>> sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        >>> for _ in range(10):
        ...     loss = nn.functional.cross_entropy(net(x), y)
        ...     sgd.zero_grad(); loss.backward(); sgd.step()
        ...     _ = probe.step(loss)
        >>> [record.step for record in probe.finish()]
        [0, 5, 10]
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        x_probe: Any,
        y_probe: Tensor | None = None,
        metrics: str | Callable[..., Any] | Sequence[Any] | Mapping[str, Any] = DEFAULT,
        schedule: Schedule | str | int = "log",
        groups: Mapping[str, Any] | None = None,
        max_overhead: float | None = 0.05,
        out: str | Path | None = None,
        seed: int = 0,
        *,
        least: CountOrZero = 20,
        tensorboard: Any = None,
        loss_fn: Loss | None = None,
        output: Callable[[Any], Tensor] | None = None,
        params: ParamSelection = None,
        outputs: Outputs = "full",
        precision: Precision = "float32",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._time, self._least = Overhead(max_overhead, clock), least
        self.metrics: tuple[Metric, ...] = tuple(as_metrics(metrics))
        self.schedule = as_schedule(schedule)
        self.model = unwrapped(model)
        self.device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        x_probe, y_probe, note = probe_data(x_probe, y_probe, self.model, self.device, seed)
        x, n = probe_batch(x_probe, y_probe, groups or {}, self.metrics, self.device)
        layers = any("layers" in m.needs for m in self.metrics)
        found = as_groups(groups, n)
        self.setup = Setup(x, y_probe, found, loss_fn, output, params, outputs, precision, layers, seed)
        self.notes: tuple[str, ...] = (*eval_notes(self.model), *([note] if note else []))
        self._keep = tuple({name for m in self.metrics for name in m.keeps})
        self._follow = any("steps" in m.needs for m in self.metrics)
        self._start, self._now = frozen_copy(self.model), frozen_copy(self.model)
        self._init, self._previous = View(self._start, self.setup), None  # type: tuple[View, View | None]
        self._writer = None if tensorboard is None else writer_of(tensorboard)
        self._folder = None if out is None else Folder(out, self._header(n))
        self._records: list[Record] = []
        self._here, self._level = Moment(0, 0.0), self.schedule.level(Moment(0))
        self._caught_up = 0  # the last step recorded by an earlier process
        self._loss: Tensor | float | None = None  # the last one given, not read yet
        self._path: Tensor | None = None  # sum of step lengths since the last measurement, on the device
        self._theta: Tensor | None = None  # parameters at the last step, if steps are followed
        self._warned: set[str] = set()
        self._closed = False
        with without_autocast(), self._time.counted():
            self._begin()

    def step(
        self, loss: Tensor | float | None = None, *, step: int | None = None, epoch: float | None = None
    ) -> Record | None:
        """Report an optimiser step to the probe; gives a record if something was measured (or skipped).

        Args:
            loss: training loss of this step; may be left out unless the schedule goes by the loss. It is read (which
                waits for a GPU) only when it is needed; a loss that is NaN or infinite then is refused.
            step: number of steps taken so far; None counts the calls. Needed when training resumes from a checkpoint.
            epoch: number of epochs so far, for a schedule by epochs.
        """
        with without_autocast(), self._time.counted():
            return self._on_step(loss, step, epoch)

    def measure(self, loss: Tensor | float | None = None) -> Record:
        """Measure now, whatever schedule and cap say."""
        with without_autocast(), self._time.counted():
            raw = read_loss(loss, self._here.step)
            return self._measure(Moment(self._here.step, self._here.epoch, raw), raw, None)

    def finish(self) -> tuple[Record, ...]:
        """Measure the last state (if it is not measured yet), warn of skipped ones, close files, give the records."""
        fresh = not self._closed
        try:
            if fresh and self._here.step > max(self._caught_up, self._last_measured()):
                with without_autocast(), self._time.counted():
                    raw = read_loss(self._loss, self._here.step)
                    loss = self._here.loss if self.schedule.needs_loss else raw
                    self._measure(Moment(self._here.step, self._here.epoch, loss), raw, None)
        finally:
            self.close()
        skipped = {r.step for r in self._records if r.skipped} - {r.step for r in self._records if not r.skipped}
        if fresh and skipped:
            due = len({record.step for record in self._records})
            warnings.warn(
                f"probe: {len(skipped)} of {due} measurements were skipped to keep max_overhead="
                f"{self._time.cap:g}; raise it, or pass None, for all of them",
                stacklevel=2,
            )
        return self.records

    def close(self) -> None:
        """Close files."""
        self._closed = True
        if self._folder is not None:
            self._folder.close()
        if self._writer is not None:
            self._writer.flush()

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: BaseException | TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self.close()

    @property
    def records(self) -> tuple[Record, ...]:
        """All records so far, skipped ones too."""
        return tuple(self._records)

    @property
    def at(self) -> int:
        """The step that was reported last."""
        return self._here.step

    @property
    def overhead(self) -> float:
        """Share of the wall time since the probe was made that was spent measuring."""
        return self._time.share

    def to_dicts(self) -> list[dict[str, Any]]:
        """Measurements as flat dicts (step, loss, epoch, elapsed and all values), for a table of your choice."""
        seen = [r for r in self._records if not r.skipped]
        return [{"step": r.step, "loss": r.loss, "epoch": r.epoch, "elapsed": r.elapsed, **r.values} for r in seen]

    def plot(self, against: str = "step", log: bool = True, metrics: str | Sequence[str] | None = None) -> Any:
        """One panel per metric against "step", "loss", "elapsed" or a value measured; returns the matplotlib figure.

        `metrics` are the ones to draw, None for all: one of them fills a column of a paper, e.g.
        `probe.plot(metrics="ntk_alignment")`.
        """
        from biascope.probes.figures import plot_records

        return plot_records(self._records, against, log, metrics)

    def _repr_html_(self) -> str:
        """The measurements, one row each (of many: some), for notebooks."""
        seen = [r for r in self._records if not r.skipped]
        names = list(dict.fromkeys(name for r in seen for name in r.values))
        head = ["step", "loss", *names[:COLUMNS], *(["..."] if names[COLUMNS:] else [])]
        rows = [[r.step, "" if r.loss is None else r.loss, *(r.values.get(n, "") for n in head[2:])] for r in seen]
        return grid(f"{len(seen)} measurements, {len(self._records) - len(seen)} skipped", head, rows)

    def __repr__(self) -> str:
        skipped = sum(r.skipped for r in self._records)
        text = f"Probe({', '.join(m.name for m in self.metrics)}; {self.schedule}; step {self._here.step}, "
        text += f"{len(self._records) - skipped} measurements, {skipped} skipped)"
        return "\n".join([text, *self.notes])

    def _begin(self) -> None:
        """The first measurement, or the state of an earlier process."""
        if self._folder is not None:
            self._records = self._folder.resume()
            if self._records:
                return self._resume(self._folder)
            self._folder.save("init", state_of(self._start), {})
        with self._undisturbed():
            refuse_random(self._init)
        self._measure(self._here, None, None)
        self._theta = self._followed(self.model) if self._follow else None
        return None

    def _resume(self, folder: Folder) -> None:
        fill(self._start, folder.load("init")[0], "the start of the run in out")
        tensors, about = folder.load("state")
        last = self._records[-1]
        self._caught_up = max(about["step"], last.step)
        self._here = Moment(self._caught_up, last.epoch, about["loss"])
        levels = [about["level"], self.schedule.level(Moment(last.step, last.epoch, last.loss))]
        self._level = max((level for level in levels if level is not None), default=None)
        self._time.spent, self._time.before, self._time.cost = about["spent"], about["elapsed"], about["cost"]
        if self._keep:
            past = frozen_copy(self.model)
            fill(past, tensors, "the last measurement in out")
            self._previous = View(past, self.setup, init=self._init, step=about["step"])
            self._previous.totals = {k: math.nan if v is None else v for k, v in about["totals"].items()}
            self._theta = self._followed(past) if self._follow else None

    def _on_step(self, loss: Tensor | float | None, step: int | None, epoch: float | None) -> Record | None:
        if self._closed:
            raise InputError("this probe is finished; make a new one")
        count = self._here.step + 1 if step is None else check_count(step, "step", least=0)
        epoch = None if epoch is None else check_number(epoch, "epoch", least=0)
        if count <= self._caught_up:
            return None  # a resumed run walks again through what is recorded already
        if count < self._here.step:
            raise InputError(f"step={count} after step {self._here.step}: steps must not go back")
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss
        if self._follow:
            self._lengthen()
        raw = smooth = None
        if self.schedule.needs_loss:
            raw = read_loss(loss, count)
            if raw is None:
                raise InputError(f"{type(self.schedule).__name__} goes by the loss: call probe.step(loss)")
            past, a = self._here.loss, getattr(self.schedule, "smoothing", 0.0)
            smooth = raw if past is None else a * past + (1 - a) * raw
        self._here = Moment(count, epoch, smooth)
        level = self.schedule.level(self._here)
        if level is None or (self._level is not None and level <= self._level):
            return None
        self._level = level
        if raw is None:
            raw = read_loss(loss, count)
        now = Moment(count, epoch, raw if smooth is None else smooth)
        return self._due(now, raw, self.schedule.threshold(level))

    def _due(self, now: Moment, raw: float | None, threshold: float | None) -> Record:
        """Measure if the cap allows it or the curve needs it, else record that it was skipped."""
        if self._time.allows() or self._needed(now.step):
            return self._measure(now, raw, threshold)
        return self._write(Record(now.step, now.loss, raw, now.epoch, threshold, self._time.elapsed, skipped=True))

    def _needed(self, step: int) -> bool:
        """Would the curve be too thin without a measurement here?"""
        made = sum(not record.skipped for record in self._records) - 1  # without the first
        return self._least > 0 and (made < self._least or step >= GROWTH * self._last_measured())

    def _last_measured(self) -> int:
        return next((record.step for record in reversed(self._records) if not record.skipped), 0)

    def _measure(self, now: Moment, raw: float | None, threshold: float | None) -> Record:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # training's own work is not the probe's
        begin = self._time.clock()
        first = not self._records
        with self._undisturbed():
            view = self._init if first else self._view(now)
            values, failed = self._evaluate(view, first)
        if self._keep:
            if not first:
                view.seal(self._keep)  # the copy it looks at will be overwritten
            self._previous = view
        self._path = None
        self._time.cost = self._time.clock() - begin
        elapsed = self._time.elapsed
        if self._folder is not None:  # state first: it may be ahead of the records by one, never behind
            tensors = state_of(self._start if first else self._now) if self._keep else {}
            self._folder.save("state", tensors, self._about(now.step, elapsed))
        return self._write(
            Record(now.step, now.loss, raw, now.epoch, threshold, elapsed, self._time.cost, False, values, failed)
        )

    def _view(self, now: Moment) -> View:
        """The network as it is now, in the copy that is measured."""
        fill(self._now, state_of(self.model), "the model")
        path = math.nan if self._path is None else float(self._path)
        past = {"init": self._init, "previous": self._previous}
        return View(self._now, self.setup, **past, step=now.step, loss=now.loss, path=path)

    def _evaluate(self, view: View, first: bool) -> tuple[dict[str, float], dict[str, str]]:
        values: dict[str, float] = {}
        failed: dict[str, str] = {}
        for m in self.metrics:
            try:
                values |= m(view)
            except (BiascopeError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
                if first:  # a mistake to correct. Later: a dead network must not end its training
                    raise type(error)(f"{m.name}: {error}") from error
                failed[m.name] = str(error)
                if m.name not in self._warned:
                    self._warned.add(m.name)
                    warnings.warn(f"probe: {m.name} has no value at step {view.step}: {error}", stacklevel=6)
        return values, failed

    def _write(self, record: Record) -> Record:
        self._records.append(record)
        if self._folder is not None:
            self._folder.write(record.as_dict())
        if self._writer is not None and not record.skipped:
            write_scalars(self._writer, record)
        return record

    def _about(self, step: int, elapsed: float) -> dict[str, Any]:
        totals = self._previous.totals if self._previous is not None else {}
        return {
            "step": step,
            "level": self._level,
            "loss": self._here.loss,
            "spent": self._time.spent + self._time.cost,
            "elapsed": elapsed,
            "cost": self._time.cost,
            "totals": {k: v if math.isfinite(v) else None for k, v in totals.items()},
        }

    def _header(self, n: int) -> dict[str, Any]:
        return {
            "biascope_probe": 1,
            "metrics": [m.name for m in self.metrics],
            "schedule": repr(self.schedule),
            "examples": n,
            "seed": self.setup.seed,
            "notes": list(self.notes),
        }

    def _followed(self, model: nn.Module) -> Tensor:
        named = dict(model.named_parameters())
        return torch.cat([named[k].detach().reshape(-1) for k in self._init.f.params])

    def _lengthen(self) -> None:
        """Add the length of the step from the last call to now."""
        now = self._followed(self.model)
        if self._theta is not None:
            length = torch.linalg.vector_norm(now - self._theta.to(now.device), dtype=torch.float64)
            self._path = length if self._path is None else self._path + length
        self._theta = now

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Measure with gradients on, in the network's precision (not tf32), and leave the random state as it was."""
        devices = [self.device.index or 0] if self.device.type == "cuda" else []
        with (
            torch.random.fork_rng(devices=devices),
            torch.autocast(self.device.type, enabled=False),
            arithmetic("float32"),  # metrics of users too
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            yield

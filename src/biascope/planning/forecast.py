"""`bs.plan`: what a computation will take on one process or many, from a few small runs on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

import torch
from torch import nn

from biascope.curvature import fisher
from biascope.kernels import ntk
from biascope.kernels.empirical import cotangents
from biascope.network.functional import functional
from biascope.network.stream import anatomy
from biascope.planning.costs import Costs, KernelCosts, MetricCosts
from biascope.support.errors import InputError
from biascope.support.inputs import Inputs, batch_size, check_inputs, map_inputs, take, tensors_of
from biascope.support.limits import Count, Positive
from biascope.support.memory import budget, readable
from biascope.support.signatures import checked
from biascope.support.tables import columns, grid

What = Literal["ntk", "diagonal", "kfac", "ekfac"]
WORLDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LATENCY = 3e-5  # seconds that a collective call takes at least, per doubling of the processes
MOST = 2**40  # examples, beyond which nobody asks


@dataclass(frozen=True)
class Forecast:
    """What a computation takes; `print` it for a table over numbers of processes.

    Attributes:
        what: "ntk" or a representation of the Fisher information.
        n: examples.
        world_size: processes.
        memory: bytes per process: network, data, result and everything in between.
        seconds: wall time.
        sent: bytes that each process hands to collectives.
        flops: of all processes together (products and convolutions).
        largest_n: examples that `budget` has room for; None if any number.
        largest_model: parameters of a wider network of this shape that `budget` has room for, at n examples.
        budget: bytes per process.
        bandwidth: bytes per second between processes, as it was given or assumed.
        rate: FLOP per second of the largest pilot.
        parameters: of the network.
    """

    what: str
    n: int
    world_size: int
    memory: float
    seconds: float
    sent: float
    flops: float
    largest_n: int | None
    largest_model: int
    budget: int
    bandwidth: float
    rate: float
    parameters: int
    _costs: Costs = field(repr=False, compare=False)
    _constant: float = field(repr=False)  # bytes of the network
    _each: float = field(repr=False)  # bytes of an example

    def at(self, world_size: int, n: int | None = None) -> dict[str, float]:
        """Memory, seconds and bytes sent of another number of processes (or examples), computed from the same pilots.

        Example:
            >>> found = plan(nn.Linear(4, 2), "ntk", torch.randn(8, 4), n=100)
            >>> found.at(8)["memory"] > 0
            True
        """
        n = self.n if n is None else n
        sent = self._costs.sent(n, world_size)
        # a ring of all processes passes a sum on twice; the time of a collective call grows with the logarithm
        ring = 2 * (world_size - 1) / world_size * sent / self.bandwidth
        wire = ring + LATENCY * (world_size - 1).bit_length()
        return {
            "memory": self._constant + self._each * n + self._costs.memory(n, world_size),
            "seconds": self._costs.seconds(n, world_size) + wire,
            "sent": sent,
        }

    def scaling(self) -> list[dict[str, float]]:
        """`at` for 1 to 512 processes, with the speed-up: simulated, not measured."""
        alone, rows = self.at(1)["seconds"], []
        for size in WORLDS:
            there = self.at(size)
            rows.append({"processes": size, **there, "speed-up": alone / there["seconds"]})
        return rows

    def _head(self) -> str:
        n = "any number" if self.largest_n is None else f"{self.largest_n:,}"
        return (
            f"{self.what} of {self.n:,} examples, {self.parameters:,} parameters, {self.world_size} process(es): "
            f"{readable(self.memory)} each, {_time(self.seconds)}, {readable(self.flops, 'FLOP')}, "
            f"{readable(self.sent)} sent by each\n"
            f"{readable(self.budget)} have room for {n} of examples, or for {self.largest_model:,} parameters"
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{row['processes']:.0f}",
                readable(row["memory"]) if isfinite(row["memory"]) else "does not fit",
                _time(row["seconds"]),
                readable(row["sent"]),
                f"{row['speed-up']:.1f}" if isfinite(row["speed-up"]) else "",
            )
            for row in self.scaling()
        ]

    def _title(self) -> str:
        return (
            f"simulated from {readable(self.rate, 'FLOP/s')} measured here and {readable(self.bandwidth, 'B/s')} "
            "between processes"
        )

    def __str__(self) -> str:
        table = columns(["processes", "memory each", "time", "sent by each", "speed-up"], self._rows())
        return f"{self._head()}\n\n{self._title()}:\n{table}"

    def _repr_html_(self) -> str:
        """The table of `print`, for notebooks."""
        return grid(
            f"{self._head()}; {self._title()}",
            ["processes", "memory each", "time", "sent by each", "speed-up"],
            self._rows(),
        )


@checked
def plan(
    model: nn.Module,
    what: What,
    data: Any,
    world_size: Count = 1,
    *,
    n: Count | None = None,
    max_memory: str | int | None = None,
    bandwidth: Positive = 1e10,
    patience: Positive = 3.0,
    options: Mapping[str, Any] | None = None,
) -> Forecast:
    """What `bs.ntk` or `bs.fisher` will take, on `world_size` processes like this one, before it is started.

    The computation itself runs here on a few examples, which measures its memory exactly and its speed; from that
    follow larger numbers of examples, and of processes. Memory is right to a few percent where the pilots reach the
    regime of the whole; time to about a factor of 1.5 on a machine that does nothing else.

    Args:
        model: the network.
        what: "ntk"; or "diagonal", "kfac" or "ekfac" of `bs.fisher`.
        data: what will be given to the function: inputs [n, ...] or a dict of keyword tensors, (inputs, labels), or a
            sample of them with `n`.
        world_size: processes, each with a device like this one's.
        n: examples; by default those of `data`.
        max_memory: per process, such as "80GB"; 60 % of what is free if None.
        bandwidth: bytes per second from process to process: 1e10 is assumed (about 100 Gbit/s).
        patience: seconds that a run of the largest pilot may take, about; there are four of them.
        options: keyword arguments of the function, such as {"outputs": "trace"}.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> found = plan(net, "ntk", torch.randn(32, 4), world_size=8, n=10_000)
        >>> found.sent == (2 * 10_000) ** 2 * 4
        True
    """
    x, y = data if isinstance(data, tuple | list) and len(data) == 2 else (data, None)
    x, options = check_inputs(x, "data"), dict(options or {})
    n = batch_size(x) if n is None else n
    known = _NTK if what == "ntk" else _FISHER
    for name in options:
        if name not in known:
            raise InputError(f"options: {name!r} is not planned for; known are {', '.join(known)}")
    f = functional(model, options.get("params"), options.get("output"), options.get("precision", "float32"))
    limit = budget(max_memory, f.device)

    def some(count: int) -> Any:
        index = torch.arange(count, device="cpu") % batch_size(x)
        inputs = map_inputs(take(x, index), lambda t: t.to(f.device))
        return inputs if y is None else (inputs, torch.as_tensor(y)[index])

    costs: KernelCosts | MetricCosts
    if what == "ntk":
        found = anatomy(f, _inputs(some(2)))
        mode, cot = cotangents(options.get("outputs", "full"), found.outputs)
        y = None
        costs = KernelCosts(
            lambda rows, columns: ntk(
                model, some(rows), None if columns is None else some(columns), max_memory=max_memory, **options
            ), found, mode, len(cot),
            options.get("strategy", "auto"), options.get("precision", "float32"), f.dtype, f.device, limit, patience,
        )  # fmt: skip
    else:
        batch = options.get("batch_size")
        costs = MetricCosts(
            lambda count, step: fisher(
                model, some(count), what, max_memory=max_memory, **(options | {"batch_size": step})
            ), batch, f.device, limit, patience,
        )  # fmt: skip
    costs.learn(n)
    constant = float(sum(t.nbytes for t in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()))
    each = sum(t[:1].nbytes for t in tensors_of(x)) + (0 if y is None else torch.as_tensor(y)[:1].nbytes)
    last = costs.pilots[-1]
    made = Forecast(
        what, n, world_size, 0.0, 0.0, 0.0, costs.flops(n), None, 0, limit, bandwidth,
        last.flops / last.seconds, sum(p.numel() for p in model.parameters()), costs, constant, float(each),
    )  # fmt: skip
    there = made.at(world_size)
    wider = int(made.parameters * limit / there["memory"]) if isfinite(there["memory"]) else 0
    return Forecast(
        what, n, world_size, there["memory"], there["seconds"], there["sent"], made.flops, _largest(made, limit), wider,
        limit, bandwidth, made.rate, made.parameters, costs, constant, float(each),
    )  # fmt: skip


_NTK = ("outputs", "strategy", "precision", "params", "output")
_FISHER = (
    "likelihood", "estimator", "samples", "precision", "params", "output", "class_dim", "sharing", "sua", "batch_size",
)  # fmt: skip


def _inputs(data: Any) -> Inputs:
    found: Inputs = data[0] if isinstance(data, tuple) else data
    return found


def _largest(made: Forecast, limit: int) -> int | None:
    """The number of examples that fit, to three digits; None if there is no end."""

    def fits(n: int) -> bool:
        return made.at(made.world_size, n)["memory"] <= limit

    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MOST:
            return None
    while high - low > max(1, low // 1000):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _time(seconds: float) -> str:
    if not isfinite(seconds):
        return "-"
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"

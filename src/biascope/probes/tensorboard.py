"""Values of records as TensorBoard scalars."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from biascope.errors import InputError, UnsupportedError
from biascope.probes.record import Record


def writer_of(tensorboard: Any) -> Any:
    """A SummaryWriter from a folder or from a writer (anything with `add_scalar`)."""
    if hasattr(tensorboard, "add_scalar"):
        return tensorboard
    if not isinstance(tensorboard, str | Path):
        raise InputError(f"tensorboard: expected a folder or a SummaryWriter, got {type(tensorboard).__name__}")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UnsupportedError("tensorboard=... needs the tensorboard package: pip install tensorboard") from error
    return SummaryWriter(str(tensorboard))


def write_scalars(writer: Any, record: Record) -> None:
    """Write the finite values of a record as probe/<name>, and the loss."""
    numbers = {**record.values} if record.loss is None else {"loss": record.loss, **record.values}
    for name, value in numbers.items():
        if math.isfinite(value):
            writer.add_scalar(f"probe/{name}", value, record.step)

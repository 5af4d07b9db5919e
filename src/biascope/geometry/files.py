"""Results on disk: one safetensors file each, written whole or not at all, with what is not a tensor in its header."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from biascope.support.errors import CorruptError
from biascope.support.files import read_tensors, write_tensors


def write(path: str | Path, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors, and `about` under `key` in the header."""
    write_tensors(Path(path), tensors, {key: json.dumps(about)})


def read(path: str | Path, key: str, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write` wrote; a file that holds something else is refused, `what` says what it should hold."""
    try:
        tensors, metadata = read_tensors(Path(path))
        return dict(tensors), json.loads(metadata[key])
    except (CorruptError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} does not hold {what} ({error})") from error

"""Results on disk: one safetensors file each, written whole or not at all, with what is not a tensor in its header."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from biascope.errors import CorruptError, InputError


def write(path: str | Path, key: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors, and `about` under `key` in the header."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(whole, temporary, {key: json.dumps(about)})
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | Path, key: str, what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `write` wrote; a file that holds something else is refused, `what` says what it should hold."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})[key])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (not a dict)
    except FileNotFoundError as error:
        raise InputError(f"there is no file {path}") from error
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise CorruptError(f"{path} does not hold {what} ({error})") from error

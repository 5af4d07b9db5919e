"""Writing to disk so that a kill, a power cut or a full disk never leaves half a file under its real name."""

import errno
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from biascope.support.errors import BiascopeError, CorruptError, InputError

TEMPORARY = ".tmp-"


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    """Turn "disk full" and its relatives into one sentence that names the file and says what is safe."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, BiascopeError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise BiascopeError(
            f"cannot write {path}: {reason}. Everything written before is intact; "
            "make room (or fix the permissions) and try again."
        ) from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it in place in one step."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            write(temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def make_array(path: Path, kind: Any, shape: tuple[int, ...]) -> None:
    """A new .npy file of zeros to be mapped, whole: on a full disk, a write to the map would end the process."""
    need, free = prod(shape) * np.dtype(kind).itemsize, shutil.disk_usage(path.parent).free
    if free < need:
        raise InputError(f"{path.parent}: {need:,} bytes are needed, the disk has {free:,} free")
    np.lib.format.open_memmap(path, "w+", kind, shape).flush()
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # of file systems that cannot promise it
                    path.unlink()
                    raise


@contextmanager
def explain_read_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says of a file that cannot be read into a sentence that names it and the fix.

    A file that is missing, or a folder in its place, is damage (`CorruptError`); one that only may not be read is not:
    deleting it is never the advice.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CorruptError(f"{path} is missing") from error
    except OSError as error:
        if isinstance(error, BiascopeError):
            raise
        if path.is_dir() and isinstance(error, IsADirectoryError | PermissionError):  # the second on Windows
            raise CorruptError(
                f"{path} is a folder, a file belongs there: move it away and put the file back"
            ) from error
        reason = error.strerror or str(error)
        raise BiascopeError(f"cannot read {path}: {reason}. Fix that (or the permissions), then try again.") from error


def read_bytes(path: Path) -> bytes:
    """All bytes of a file; what cannot be read is named."""
    with explain_read_errors(path):
        return path.read_bytes()


def read_json(path: Path) -> Any:
    """Read a JSON file; a broken or missing one is named."""
    try:
        return json.loads(read_bytes(path).decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CorruptError(f"{path} is not valid JSON ({error})") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically: tensors from any device, and texts in its header.

    Tensors that share memory are copied, as the format wants it; a large one alone is not.
    """
    seen: set[int] = set()
    whole = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        place = own.untyped_storage().data_ptr()
        whole[name] = own.clone() if place in seen else own
        seen.add(place)
    write_atomically(path, lambda temporary: save_file(whole, temporary, dict(metadata)))


def read_tensors(path: Path, names: Iterable[str] | None = None) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `write_tensors` wrote (or the arrays of these names), on the CPU; a file that is not whole is named."""
    try:
        with explain_read_errors(path):
            path.open("rb").close()  # safetensors does not tell a file that may not be read from a damaged one
            with safe_open(path, framework="pt", device="cpu") as file:
                wanted = file.keys() if names is None else names
                return {name: file.get_tensor(name) for name in wanted}, file.metadata() or {}
    except SafetensorError as error:
        raise CorruptError(f"{path} is not a whole safetensors file ({error})") from error


def checksum(tensor: Tensor) -> int:
    """CRC of the bytes of a tensor on the CPU."""
    return zlib.crc32(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line and hand it to the disk; a failed write is taken back so that the file stays readable."""
    with explain_write_errors(path):
        data = (json.dumps(value, ensure_ascii=False) + "\n").encode()
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                if file.write(data) != len(data):  # a nearly full disk takes part of the line without an error
                    raise OSError(28, "No space left on device")
            except OSError:
                os.ftruncate(file.fileno(), size)
                raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Every JSON line of a file; a torn last line (the process was killed while writing it) is dropped."""
    if not path.exists():
        return []
    *lines, tail = read_bytes(path).split(b"\n")
    del tail  # empty, or torn: whole lines end with a newline
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CorruptError(f"{path}, line {number}: not valid JSON ({error})") from error
        if not isinstance(rows[-1], dict):
            raise CorruptError(f"{path}, line {number}: every line should hold a JSON object")
    return rows


def mend_tail(path: Path) -> None:
    """Cut a torn last line off, so that the next append starts on a line of its own."""
    if path.exists():
        data = read_bytes(path)
        if data and not data.endswith(b"\n"):
            write_bytes(path, data[: data.rfind(b"\n") + 1])

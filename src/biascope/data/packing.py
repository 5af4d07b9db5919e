"""Carrying a set to another machine in parts that each stay under a size limit."""

from pathlib import Path
from typing import Any

from biascope.data.catalogue import source
from biascope.data.clients import sha256
from biascope.data.store import SIDECAR, check, data_root, get, install, workspace
from biascope.support.errors import CorruptError, InputError
from biascope.support.files import read_bytes, read_json, write_bytes, write_json
from biascope.support.limits import Positive
from biascope.support.signatures import checked

_MANIFEST = ".manifest.json"


@checked
def pack(name: str, out_dir: str | Path, part_mib: Positive = 60, *, root: str | Path | None = None) -> Path:
    """Write a cached set as parts, each strictly under `part_mib` MiB, and a manifest with their sums; its path.

    The set is fetched first if need be. Carry the parts and the manifest in any order, then `unpack` their folder.
    """
    src = source(name)
    if src.client == "none":
        raise InputError(f"{name} is part of biascope: there is nothing to carry")
    folder, out, limit = get(name, root=root), Path(out_dir), max(1, int(part_mib * 2**20) - 1)
    # the parts hold the sidecar followed by the files it describes, cut wherever a part is full
    files = {file: read_bytes(folder / file) for file in (SIDECAR, *check(folder, src)["files"])}
    stream = b"".join(files.values())
    parts = {f"{name}.part{i // limit:03d}": stream[i : i + limit] for i in range(0, len(stream), limit)}
    for file, data in parts.items():
        write_bytes(out / file, data)
    path = out / f"{name}{_MANIFEST}"
    write_json(path, {"name": name, "files": _entries(files), "parts": _entries(parts)})  # last: it vouches for all
    return path


def _entries(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"file": file, "bytes": len(data), "sha256": sha256(data)} for file, data in files.items()]


@checked
def unpack(folder: str | Path, name: str | None = None, *, root: str | Path | None = None) -> Path:
    """Put a packed set back together into the cache and verify it; a missing or damaged part is named.

    `name` is needed only where `folder` holds several sets. Returns the set's folder in the cache.
    """
    folder = Path(folder)
    manifests = sorted(folder.glob(f"{name or '*'}{_MANIFEST}"))
    if len(manifests) != 1:
        raise InputError(f"{folder} holds {len(manifests)} files *{_MANIFEST}; where there are several, pass name")
    parts, files, src_name = _read_manifest(manifests[0])
    src, stream = source(src_name), b""
    for part, size, digest in parts:
        data = read_bytes(folder / part)
        if len(data) != size or sha256(data) != digest:
            raise CorruptError(f"{part} in {folder} is damaged (size or sha256 differs): carry it again")
        stream += data
    target = data_root(root) / src_name
    with workspace(target.parent, src) as work:
        ready = work / "ready"
        ready.mkdir()
        for file, size, digest in files:
            data, stream = stream[:size], stream[size:]
            if len(data) != size or sha256(data) != digest:
                raise CorruptError(f"{file} does not match its sha256 in {manifests[0].name}: pack the set again")
            (ready / file).write_bytes(data)
        check(ready, src, deep=True)
        install(ready, target, work, keep_existing=True)
    return target


def _read_manifest(path: Path) -> tuple[list[tuple[str, int, str]], list[tuple[str, int, str]], str]:
    record = read_json(path)
    try:
        lists = [[(str(e["file"]), int(e["bytes"]), str(e["sha256"])) for e in record[k]] for k in ("parts", "files")]
        name = str(record["name"])
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a manifest ({type(error).__name__}): carry it again") from error
    if any(Path(file).name != file or file in ("", "..") for entries in lists for file, _, _ in entries):
        raise CorruptError(f"{path} names files outside its folder: refused")
    return lists[0], lists[1], name

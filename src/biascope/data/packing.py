"""Carrying a set to another machine in parts that each stay under a size limit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

from biascope.data.catalogue import source
from biascope.data.store import SIDECAR, check, data_root, file_sha256, get, install, workspace
from biascope.errors import CorruptError, InputError
from biascope.signatures import checked

_MANIFEST = ".manifest.json"


@checked
def pack(name: str, out_dir: str | Path, part_mib: float = 60, *, root: str | Path | None = None) -> Path:
    """Write a cached set as parts, each strictly under `part_mib` MiB, and a manifest with their sums; its path.

    The set is fetched first if need be. Carry the parts and the manifest in any order, then `unpack` their folder.

    Example:
        >>> pack("cifar10", "carry")  # doctest: +SKIP
    """
    src = source(name)
    if src.client == "none":
        raise InputError(f"{name} is part of biascope: there is nothing to carry")
    limit = int(part_mib * 2**20) - 1
    if limit < 1:
        raise InputError(f"part_mib must be positive, got {part_mib}")
    folder, out = get(name, root=root), Path(out_dir)
    record = check(folder, src)
    try:
        out.mkdir(parents=True, exist_ok=True)
        # the stream is the sidecar followed by the files it describes, cut wherever a part is full
        files = [SIDECAR, *record["files"]]
        parts: list[dict[str, Any]] = []
        for file in files:
            with (folder / file).open("rb") as handle:
                while chunk := handle.read(2**20):
                    parts = _append(out, name, parts, chunk, limit)
        manifest = {
            "name": name,
            "files": [
                {"file": f, "bytes": (folder / f).stat().st_size, "sha256": file_sha256(folder / f)} for f in files
            ],
            "parts": [{"file": p["file"], "bytes": p["bytes"], "sha256": p["hash"].hexdigest()} for p in parts],
        }
        path = out / f"{name}{_MANIFEST}"
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)  # last: a manifest that is there vouches for all parts
    except OSError as error:
        raise InputError(f"cannot write to {out} ({error.strerror}): choose another folder") from error
    return path


def _append(out: Path, name: str, parts: list[dict[str, Any]], chunk: bytes, limit: int) -> list[dict[str, Any]]:
    """Add bytes to the last part, opening the next one when it is full."""
    while chunk:
        if not parts or parts[-1]["bytes"] == limit:
            file = f"{name}.part{len(parts):03d}"
            (out / file).write_bytes(b"")
            parts = [*parts, {"file": file, "bytes": 0, "hash": hashlib.sha256()}]
        last = parts[-1]
        piece, chunk = chunk[: limit - last["bytes"]], chunk[limit - last["bytes"] :]
        with (out / last["file"]).open("ab") as handle:
            handle.write(piece)
        last["bytes"] += len(piece)
        last["hash"].update(piece)
    return parts


@checked
def unpack(folder: str | Path, name: str | None = None, *, root: str | Path | None = None) -> Path:
    """Put a packed set back together into the cache and verify it; a missing or damaged part is named.

    `name` is needed only where `folder` holds several sets. Returns the set's folder in the cache.

    Example:
        >>> unpack("carry")  # doctest: +SKIP
    """
    folder = Path(folder)
    manifests = sorted(folder.glob(f"{name or '*'}{_MANIFEST}"))
    if len(manifests) != 1:
        found = ", ".join(m.name for m in manifests) or "none"
        raise InputError(f"{folder}: expected one *{_MANIFEST}, found {found}" + ("; pass name" if manifests else ""))
    parts, files, src_name = _read_manifest(manifests[0])
    src = source(src_name)
    for part, size, digest in parts:
        path = folder / part
        if not path.is_file():
            raise CorruptError(f"{part} is missing in {folder}: carry it again")
        if path.stat().st_size != size or file_sha256(path) != digest:
            raise CorruptError(f"{part} in {folder} is damaged (size or sha256 differs): carry it again")
    target = data_root(root) / src_name
    with workspace(target.parent, src) as work:
        ready = work / "ready"
        ready.mkdir()
        stream = _Chain([folder / part for part, _, _ in parts])
        for file, size, digest in files:
            with (ready / file).open("wb") as out:
                stream.copy(out, size)
            if file_sha256(ready / file) != digest:
                raise CorruptError(f"{file} does not match its sha256 in {manifests[0].name}: pack the set again")
        check(ready, src, deep=True)
        install(ready, target, work, keep_existing=True)
    return target


def _read_manifest(path: Path) -> tuple[list[tuple[str, int, str]], list[tuple[str, int, str]], str]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        lists = [[(str(e["file"]), int(e["bytes"]), str(e["sha256"])) for e in record[k]] for k in ("parts", "files")]
        name = str(record["name"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CorruptError(f"{path} is not a manifest ({type(error).__name__}): carry it again") from error
    if any(Path(file).name != file or file in ("", "..") for entries in lists for file, _, _ in entries):
        raise CorruptError(f"{path} names files outside its folder: refused")
    return lists[0], lists[1], name


class _Chain:
    """Several files read as one stream."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.position = 0  # within the first remaining file

    def copy(self, out: BinaryIO, size: int) -> None:
        while size:
            if not self.paths:
                raise CorruptError("the parts hold fewer bytes than the manifest says: pack the set again")
            with self.paths[0].open("rb") as handle:
                handle.seek(self.position)
                chunk = handle.read(min(size, 2**24))
            if chunk:
                out.write(chunk)
                size -= len(chunk)
                self.position += len(chunk)
            else:
                self.paths, self.position = self.paths[1:], 0

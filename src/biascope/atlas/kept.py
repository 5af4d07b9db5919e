"""Fingerprints on disk, one file each, and all of them together as an `Atlas`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from biascope.atlas.measure import Fingerprint
from biascope.support.errors import CorruptError, InputError, near
from biascope.support.files import read_tensors, write_tensors
from biascope.support.signatures import checked

PACKAGED = Path(__file__).with_name("atlas.safetensors")
FORMAT = "1"


@dataclass(frozen=True)
class Atlas:
    """Fingerprints of many architectures.

    Example:
        >>> atlas = Atlas.load()
        >>> len(atlas.fingerprints) >= 40, [n for n, _ in atlas.nearest(atlas["lenet-avg"], 1)]
        (True, ['lenet-small'])
    """

    fingerprints: tuple[Fingerprint, ...]

    def __getitem__(self, name: str) -> Fingerprint:
        """The fingerprint of a network by name."""
        for one in self.fingerprints:
            if one.name == name:
                return one
        known = [one.name for one in self.fingerprints]
        raise InputError(f"the atlas has no {name!r}{near(name, known)}")

    @checked
    def nearest(self, found: Fingerprint, k: int = 5) -> list[tuple[str, float]]:
        """The k nearest networks and their distances; the typical distance of two networks of the atlas is 1."""
        from biascope.atlas.distances import distances_to

        total = distances_to(self.fingerprints, found)
        order = sorted(range(len(total)), key=lambda i: float(total[i]))
        kept = [i for i in order if self.fingerprints[i].name != found.name]
        return [(self.fingerprints[i].name, float(total[i])) for i in kept[:k]]

    @classmethod
    @checked
    def load(cls, path: str | Path | None = None) -> Atlas:
        """The atlas that comes with biascope, or one that `save` wrote."""
        return cls(tuple(read(PACKAGED if path is None else Path(path))))

    @checked
    def save(self, path: str | Path) -> None:
        """Write one safetensors file."""
        write(Path(path), self.fingerprints)


def write(path: Path, fingerprints: Sequence[Fingerprint]) -> None:
    """Write fingerprints to one file, whole or not at all."""
    tensors: dict[str, Tensor] = {}
    entries: list[dict[str, Any]] = []
    for i, one in enumerate(fingerprints):
        plain = {}
        for part in fields(one):
            value = getattr(one, part.name)
            if isinstance(value, Tensor):
                tensors[f"{i}.{part.name}"] = value
            else:
                plain[part.name] = value
        entries.append(plain)
    write_tensors(path, tensors, {"atlas": FORMAT, "entries": json.dumps(entries)})


def read(path: Path) -> Iterable[Fingerprint]:
    """The fingerprints of a file."""
    tensors, about = read_tensors(path)
    if about.get("atlas") != FORMAT:
        raise CorruptError(f"{path} is no atlas of this version of biascope")
    try:
        for i, plain in enumerate(json.loads(about["entries"])):
            own = {name.partition(".")[2]: value for name, value in tensors.items() if name.startswith(f"{i}.")}
            whole: dict[str, Any] = {**plain, **own, "input_shape": tuple(plain["input_shape"])}
            yield Fingerprint(**whole)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged ({error}): make it again with `biascope atlas build`") from error

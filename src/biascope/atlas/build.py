"""Computing the atlas: one file per network, so that a build that was cut off goes on where it was."""

import tomllib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from biascope.atlas.kept import Atlas, read, write
from biascope.atlas.measure import Fingerprint, fingerprint
from biascope.atlas.probing import Kind
from biascope.support.errors import BiascopeError

ENTRIES = Path(__file__).with_name("entries.toml")
OWN = "biascope.atlas.networks:"


@dataclass(frozen=True)
class Entry:
    """A network of the atlas: its name there, and how to build it."""

    name: str
    spec: str
    family: str
    kind: Kind
    input_shape: tuple[int, ...]
    options: dict[str, Any] = field(default_factory=dict)


def entries(path: Path = ENTRIES) -> list[Entry]:
    """All networks of a list like entries.toml, in its order."""
    listed = tomllib.loads(path.read_text(encoding="utf-8"))
    found = []
    for group in listed["group"]:
        shape = tuple(listed["kinds"][group["kind"]])
        for spec in group["networks"]:
            name = spec.removeprefix(OWN).replace("_", "-").lower() if spec.startswith(OWN) else spec
            found.append(Entry(name, spec, group["family"], group["kind"], shape, group.get("options", {})))
    return found


def build(
    folder: Path,
    chosen: Sequence[Entry],
    device: str = "cpu",
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> tuple[Atlas, dict[str, str]]:
    """Measure what is missing in a folder, one file per network; the atlas, and why networks are left out."""
    found: list[Fingerprint] = []
    left_out: dict[str, str] = {}
    for number, entry in enumerate(chosen, 1):
        path = folder / f"{entry.name.replace(':', '-').replace('/', '-')}-{seed}.safetensors"
        if path.exists():
            found += read(path)
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a build speaks of many networks: one line each
                made = fingerprint(entry.spec, entry.input_shape, seed, device, entry.options, entry.kind)
        except Exception as error:  # of a network in somebody's package: the others are still made
            left_out[entry.name] = (
                str(error) if isinstance(error, BiascopeError) else f"{type(error).__name__}: {error}"
            )
            report(f"{number}/{len(chosen)} {entry.name}: left out: {left_out[entry.name]}")
            continue
        made = replace(made, name=entry.name, about={"family": entry.family, "spec": entry.spec})
        write(path, [made])
        found.append(made)
        report(f"{number}/{len(chosen)} {entry.name}: {made.seconds:.0f} s")
    return Atlas(tuple(found)), left_out

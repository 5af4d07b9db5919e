"""Finished runs of one network each, read by studies that compare networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor

from biascope.errors import InputError
from biascope.studies.registry import load_result

Runs = Annotated[tuple[str, ...], "folders of finished runs, one for each network, in place of training"]


@dataclass(frozen=True)
class Finished:
    """Options and one of the arrays of a finished run."""

    net: str
    options: dict[str, Any]
    arrays: dict[str, Tensor]


def finished_runs(folders: Sequence[str], study: str, array: str, alike: Sequence[str]) -> list[Finished]:
    """The runs of `study` in these folders; refused unless they are of different networks with the same `alike`."""
    found = []
    for folder in folders:
        run, _, _ = load_result(folder)
        if run.config["study"] != study:
            raise InputError(f"{folder} holds a run of {run.config['study']}; runs of {study} are compared here")
        options = run.config["options"]
        found.append(Finished(str(options["net"]), options, run.load_arrays(array)))
    if len({each.net for each in found}) < len(found):
        raise InputError(f"runs of {', '.join(each.net for each in found)}: give one for each network")
    for name in alike:
        values = [each.options.get(name) for each in found]
        if any(value != values[0] for value in values):
            raise InputError(f"the runs differ in {name} ({', '.join(map(str, values))}): they cannot be compared")
    return found

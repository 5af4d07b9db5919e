"""The claims of the papers: every experiment of the five documents, read from `claims.toml`."""

import functools
import tomllib
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biascope.errors import CorruptError, InputError
from biascope.studies.conditions import Condition
from biascope.studies.registry import PAPERS

FILE = Path(__file__).with_name("claims.toml")


@dataclass(frozen=True)
class Claim:
    """What a document says in one figure or table, and which studies test it."""

    id: str
    paper: str
    figure: str
    claim: str
    studies: tuple[str, ...]
    data: str
    also: str = ""  # the same figure in another document
    where: Mapping[str, Any] = field(default_factory=dict, hash=False)  # options a run must have to test this claim
    why: str = ""  # why it cannot be tested as published, where it cannot
    holds: tuple[Condition, ...] = ()  # on numbers of its studies' runs, where their verdict is on another claim
    stand_in: str = ""  # what its studies run on instead; such a run says nothing sure about the document's own claim

    def tested_by(self, study: str, options: Mapping[str, Any], numbers: Collection[str] = ()) -> bool:
        """Whether a run of that study with those options, which has these numbers, tests this claim."""
        mine = study in self.studies and all(options.get(key) == value for key, value in self.where.items())
        return mine and all(name in numbers for condition in self.holds for name in condition.needs)


@functools.cache
def claims(file: Path = FILE) -> tuple[Claim, ...]:
    """Every claim, in the order of the papers.

    Example:
        >>> claims()[0].id, claims()[0].studies
        ('nad/1', ('nad/fig1',))
    """
    try:
        rows = tomllib.loads(file.read_text(encoding="utf-8"))["claim"]
        made = tuple(_claim(row) for row in rows)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, InputError) as error:
        raise CorruptError(f"{file} is not a catalogue of claims: {error}") from error
    twice = [name for name, count in Counter(claim.id for claim in made).items() if count > 1]
    foreign = [claim.id for claim in made if claim.paper not in PAPERS]
    mute = [claim.id for claim in made if not claim.studies and not claim.why]
    for problem, ids in (("more than once", twice), ("of an unknown paper", foreign), ("no study, no reason", mute)):
        if ids:
            raise CorruptError(f"{file}: {problem}: {', '.join(ids)}")
    order = list(PAPERS)
    return tuple(sorted(made, key=lambda claim: order.index(claim.paper)))


def _claim(row: Mapping[str, Any]) -> Claim:
    holds = tuple(Condition(**each) for each in row.get("holds", ()))
    return Claim(**{**row, "studies": tuple(row["studies"]), "holds": holds})

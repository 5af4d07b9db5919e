"""How much of a document's experiment a run has done: the published setting as data, and the run's share of it.

Every study has one table `[[experiment]]` in the `claims.toml` of its folder. "Published size" is earned by it: all
shares at least one, everything else as published, no stand-in. What the size preset of a run is called plays no part.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from biascope.support.errors import InputError

Level = Literal["published size", "reduced size", "stand-in", "not counted"]
NETWORKS = ("net", "nets", "network", "networks", "architectures")  # usual names of the option that holds networks


@dataclass(frozen=True)
class Experiment:
    """The published setting of a study, by the names of its options.

    `size`: more is more. `smaller`: less is more (strides). `same`: to be equal. `parts`: what the document's list
    holds; a run may have some of it and says something of those alone. `all`: options whose value 0 means all there is.
    `diagnostic`: values of options with which a run is a check of ours and never counts. `stand_in`: what values of
    options stand in for, or one sentence where every run is on a stand-in. `networks`: the option that holds networks.
    `silent`: settings that matter and that the document does not give, in words; no run can have them, so a rule that
    fails contradicts nothing.
    """

    study: str
    parts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    size: Mapping[str, float] = field(default_factory=dict, hash=False)
    smaller: Mapping[str, float] = field(default_factory=dict, hash=False)
    same: Mapping[str, Any] = field(default_factory=dict, hash=False)
    all: tuple[str, ...] = ()
    diagnostic: Mapping[str, Any] = field(default_factory=dict, hash=False)
    stand_in: Any = field(default_factory=dict, hash=False)
    networks: str = ""
    silent: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.networks:
            object.__setattr__(self, "networks", next((key for key in NETWORKS if key in self.parts), ""))

    @property
    def options(self) -> tuple[str, ...]:
        """Every option that it names."""
        by_option = {} if isinstance(self.stand_in, str) else self.stand_in
        tables = (self.parts, self.size, self.smaller, self.same, self.diagnostic, by_option)
        names = dict.fromkeys(key for table in tables for key in table)
        return (*names, *([self.networks] if self.networks and self.networks not in names else []))

    def networks_of(self, options: Mapping[str, Any]) -> tuple[str, ...]:
        """The networks that a run with these options has."""
        return _listed(options[self.networks]) if self.networks in options else ()

    def scope(self, options: Mapping[str, Any], parts: Mapping[str, Any] | None = None) -> "Scope":
        """What a run with these options has of it; `parts` narrow the document's lists for one claim."""
        shares = {key: self._share(key, options, want) for key, want in self.size.items() if key in options}
        less = {
            key: Share(float(want), _number(options[key]), min(1.0, want / max(_number(options[key]), 1e-300)))
            for key, want in self.smaller.items()
            if key in options
        }
        listed = {}
        for key, want in {**self.parts, **(parts or {})}.items():
            wanted = _listed(want)
            have = [each for each in _listed(options.get(key, ())) if each in wanted]
            listed[key] = Share(len(have), len(wanted), len(have) / max(len(wanted), 1))
        other = tuple(
            f"{key} {_short(options[key])} instead of {_short(want)}"
            for key, want in self.same.items()
            if key in options and not _equal(options[key], want)
        )
        checks = [
            f"{key} {_short(options[key])}" for key, values in self.diagnostic.items() if options.get(key) in values
        ]
        stand_in = self._stand_in(options)
        return Scope(listed, shares | less, other, stand_in, ", ".join(checks), silent=", ".join(self.silent))

    def _share(self, key: str, options: Mapping[str, Any], want: float) -> "Share":
        have = _number(options[key])
        if have == 0 and key in self.all:
            have = float(want)
        return Share(have, float(want), min(1.0, have / want))

    def _stand_in(self, options: Mapping[str, Any]) -> str:
        if isinstance(self.stand_in, str):
            return self.stand_in
        found = [
            named[each]
            for key, named in self.stand_in.items()
            for each in _listed(options.get(key, ()))
            if each in named
        ]
        return "; ".join(dict.fromkeys(found))


@dataclass(frozen=True)
class Share:
    """What a run has of what was published, as a share between 0 and 1."""

    have: float
    want: float
    share: float

    def __str__(self) -> str:
        return f"{self.have:g}/{self.want:g}"


@dataclass(frozen=True)
class Scope:
    """A run's shares of the published setting, and where it departs from it."""

    parts: Mapping[str, Share] = field(default_factory=dict, hash=False)
    shares: Mapping[str, Share] = field(default_factory=dict, hash=False)
    departures: tuple[str, ...] = ()
    stand_in: str = ""
    diagnostic: str = ""
    known: bool = True  # whether the published setting stands in a catalogue at all
    silent: str = ""  # what the document does not say of its setting

    @property
    def level(self) -> Level:
        """What the run can say: at the published size it decides, otherwise it can support only."""
        if self.diagnostic:
            return "not counted"
        if self.stand_in:
            return "stand-in"
        reduced = not self.known or self.departures or any(share.share < 1 for share in self.shares.values())
        return "reduced size" if reduced else "published size"

    @property
    def share(self) -> float:
        """All shares multiplied: how large the run is, to say which of two is the larger one."""
        return math.prod(share.share for share in (*self.parts.values(), *self.shares.values()))

    def __str__(self) -> str:
        if not self.known:
            return "published setting not catalogued"
        parts = [f"{key} {share}" for key, share in self.parts.items() if share.share < 1]
        shares = [f"{key} {share}" for key, share in self.shares.items() if share.share < 1]
        other = [f"on a stand-in: {self.stand_in}"] if self.stand_in else []
        check = [f"a check of ours: {self.diagnostic}"] if self.diagnostic else []
        text = ", ".join([*parts, *shares, *self.departures, *other, *check]) or "as published"
        return text + (f" (not printed: {self.silent})" if self.silent else "")


def _listed(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else (str(value),)


def _number(value: Any) -> float:
    """A number, or how many things a sequence holds."""
    if isinstance(value, list | tuple):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"a size in an experiment's table must be a number or a list, not {value!r}")
    return float(value)


def _equal(have: Any, want: Any) -> bool:
    have, want = (list(each) if isinstance(each, tuple) else each for each in (have, want))
    return bool(have == want) or (isinstance(want, list) and isinstance(have, list) and sorted(have) == sorted(want))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_short, value)) if isinstance(value, list | tuple) else str(value)

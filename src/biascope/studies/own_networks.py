"""The user's own networks in studies, named `module:factory` or `script.py:factory`: built, explained, recognised.

What such a name builds can change while a run is interrupted. So a run notes when it begins what its networks look like
(`networks.json`): names and shapes of parameters and buffers, layers, a checksum of a build under a fixed seed, and one
of the source file. A resumed run goes on with the same networks or not at all.
"""

import re
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from biascope import nets
from biascope.ensembles.engines import try_input
from biascope.ensembles.initialisers import build, record, tensors_of
from biascope.nets import registry
from biascope.studies.environment import device_name
from biascope.studies.runs import NETWORKS, Run
from biascope.support import files
from biascope.support.errors import BiascopeError, CorruptError, InputError
from biascope.support.seeds import derive

OWN = re.compile(r"(?:.+\.py|\w+(?:\.\w+)*):\w+")
PARTS = {"tensors": dict, "layers": int, "values": int, "source": int | None}  # of a fingerprint


def own_networks(options: Mapping[str, Any]) -> list[str]:
    """What among the values of options names an own network."""
    values = [each for value in options.values() for each in (value if isinstance(value, tuple | list) else [value])]
    return list(dict.fromkeys(value for value in values if isinstance(value, str) and OWN.fullmatch(value)))


def own_factory(spec: str, settable: bool = False) -> Callable[..., nn.Module]:
    """The factory behind `module:factory`; where it fails, the error has the line of the user's file and what to type.

    `settable`: the command has `--set name=value` for the factory's arguments.

    Example:
        >>> own_factory("torch.nn:Flatten")()
        Flatten(start_dim=1, end_dim=-1)
    """
    try:
        factory = nets.resolve(spec)
    except SystemExit as error:
        raise InputError(
            f"{spec} ended the program while it was read (exit {error.code}): put what it does beside defining the "
            "network under `if __name__ == '__main__':`"
        ) from error

    def make(**options: Any) -> nn.Module:
        try:
            return factory(**options)
        except SystemExit as error:
            raise InputError(f"{spec} ended the program (exit {error.code}) instead of returning a network") from error
        except InputError as error:
            if error.__cause__ is None:
                raise
            raise InputError(f"{error}{_where(spec, error.__cause__, settable)}") from error.__cause__

    return make


def own_classifier(spec: str, shape: Sequence[int], outputs: int, exactly: bool = False) -> Callable[..., nn.Module]:
    """The factory behind `module:factory`, if its network takes inputs of the shape and has an output for every class.

    `exactly`: more outputs than classes are refused too.

    Example:
        >>> import tempfile
        >>> script = Path(tempfile.mkdtemp()) / "mine.py"
        >>> _ = script.write_text("from torch import nn\\ndef line(): return nn.Linear(3, 2)")
        >>> own_classifier(f"{script}:line", (3,), 2)()
        Linear(in_features=3, out_features=2, bias=True)
    """
    factory, needed = own_factory(spec), f"{outputs} logits, one for each class"
    try:
        found = try_input(record(factory).draw(0, 0, 1), torch.zeros(1, *shape)).shape[1]
    except InputError as error:
        given = ", ".join(map(str, shape))
        raise InputError(f"{error}. This study gives {spec} inputs [n, {given}] and needs {needed}") from error
    if found < outputs or (exactly and found > outputs):
        many = "" if found == 1 else "s"
        raise InputError(f"{spec} gives {found} output{many}; this study needs {needed}")
    return factory


def _where(spec: str, cause: BaseException, settable: bool) -> str:
    """Where in the user's files an error arose, or which arguments are missing; empty where neither is known."""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [frame for frame in frames if frame.filename not in (__file__, registry.__file__)]
    if not own and (missing := re.search(r"missing .* required .*arguments?: (.*)", str(cause))):
        settings = " ".join(f"--set {name}=..." for name in re.findall(r"'(\w+)'", missing.group(1)))
        return f"; {f'add {settings}, or ' if settable else ''}write a function without arguments that calls it"
    script = [frame for frame in own if "site-packages" not in frame.filename]  # where torch is
    if not script or spec in nets.names():
        return ""
    last = script[-1]
    return f" (line {last.lineno} of {Path(last.filename).name}: {last.line}); BIASCOPE_DEBUG=1 shows how it got there"


def fingerprint(spec: str) -> dict[str, Any]:
    """What an own network looks like, JSON-able. Global random states are left as they were."""
    made = build(own_factory(spec), derive(0, "fingerprint"))
    trained = {name: parameter.requires_grad for name, parameter in made.named_parameters()}
    values, tensors = 0, dict[str, str]()
    for name, value in tensors_of(made).items():
        kind = ("parameter" if trained[name] else "frozen parameter") if name in trained else "buffer"
        tensors[name] = f"{kind} {str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
        values = zlib.crc32(str(files.checksum(value.cpu())).encode(), values)
    layers = re.sub(r" at 0x\w+", "", repr(made))  # functions show where they lie in memory
    return {"tensors": tensors, "layers": zlib.crc32(layers.encode()), "values": values, "source": _source(spec)}


def _source(spec: str) -> int | None:
    """Checksum of the file that a name stands in; None where there is none to read."""
    where = spec.rpartition(":")[0]
    file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    try:
        return zlib.crc32(Path(file).expanduser().read_bytes()) if file else None
    except OSError:
        return None


def watch_networks(run: Run, options: Mapping[str, Any]) -> None:
    """Note the own networks of a run that begins; refuse to go on with others than it began with.

    Runs that were begun without such a note go on without it.
    """
    path, made_with = run.path / NETWORKS, {"torch": torch.__version__, "processor": device_name("cpu")}
    if run.bare:  # also a run that was stopped before it stored anything: it may begin with something else
        noted: dict[str, Any] = {}
        for spec in own_networks(options):
            try:
                noted[spec] = fingerprint(spec)
            except BiascopeError:
                continue  # the study will say so, if it is a network at all
        if noted:
            files.write_json(path, {"made_with": made_with, "networks": noted})
    elif path.exists():
        stored = _read(path)
        for spec, before in stored["networks"].items():
            _compare(run, spec, before, elsewhere=stored.get("made_with") != made_with)


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = files.read_json(path)
        whole = all(isinstance(each[key], kind) for each in stored["networks"].values() for key, kind in PARTS.items())
        if not whole:
            raise CorruptError(f"{path} is damaged")
        return dict(stored)
    except (CorruptError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise CorruptError(
            f"{path} does not say what the networks of the run were ({error}); if they are still the same, delete it "
            "and resume"
        ) from error


def _compare(run: Run, spec: str, before: Mapping[str, Any], elsewhere: bool) -> None:
    now = fingerprint(spec)
    same = {key: now[key] == before[key] for key in PARTS}
    if same["tensors"] and same["layers"] and not same["values"] and elsewhere:
        # the same seed may give other last digits there, or other numbers: no sign that the network is another
        warnings.warn(
            f"{spec} has other initial values than when {run.path} began, with another torch or processor", stacklevel=4
        )
    elif not (same["tensors"] and same["layers"] and same["values"]):
        raise InputError(
            f"{spec} builds another network than when the run began ({_difference(before, now)}): put it back or start "
            "a new run"
        )
    elif not same["source"]:
        warnings.warn(
            f"the file of {spec} is another than when {run.path} began, though it builds the same parameters and "
            "layers: if what they compute has changed, start a new run",
            stacklevel=4,
        )


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    for name in dict.fromkeys([*before["tensors"], *now["tensors"]]):
        was, is_ = before["tensors"].get(name), now["tensors"].get(name)
        if was is None:
            return f"{name} is new, {is_}"
        if is_ is None:
            return f"{name}, a {was}, is gone"
        if was != is_:
            return f"{name} was a {was} and is a {is_}"
    if before["layers"] != now["layers"]:
        return "the same parameters in other layers"
    return "the same parameters with other initial values"

"""What a kernel was computed from, as hashes that are the same in another process: tensors by value, functions by code.

Python cannot say of every object what it does. Attributes of a module that cannot be told apart (open files, objects of
compiled classes) count by their type alone; `function_fingerprint`, which must be sure, refuses them.
"""

from __future__ import annotations

import functools
import hashlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biascope.network.door import modules_of
from biascope.support.errors import UnsupportedError
from biascope.support.inputs import Inputs

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
BOOKKEEPING = frozenset(vars(nn.Module())) - {"training", *HOOKS}  # tensors and children are looked at by name
OWNERS = ("torch", "numpy", "builtins")  # code that comes with a version, and counts by its name
MANGLED = re.compile(r"___torch_mangle_\d+\.")  # numbers of one process, in the code of scripted modules
DEPTH = 12  # of objects in objects


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """A hash of names, values, shapes and types."""
    h = hashlib.blake2b(digest_size=16)
    for name, t in tensors.items():
        h.update(f"{name!r} {tuple(t.shape)} {t.dtype} ".encode())
        for kind, part in _parts(t):
            h.update(kind.encode())
            h.update(part.cpu().view(torch.uint8).numpy().data)
    return h.hexdigest()


def _parts(t: Tensor) -> list[tuple[str, Tensor]]:
    """What a tensor holds, as vectors: itself under no name, or the indices and values of a sparse one."""
    t = t.detach()
    if t.layout == torch.sparse_coo:
        t = t.coalesce()
        found = [t.indices(), t.values()]
    elif t.layout in (torch.sparse_csr, torch.sparse_bsr):
        found = [t.crow_indices(), t.col_indices(), t.values()]
    elif t.layout in (torch.sparse_csc, torch.sparse_bsc):
        found = [t.ccol_indices(), t.row_indices(), t.values()]
    else:
        return [("", _flat(t))]
    return [(f"{t.layout} {tuple(p.shape)} ", _flat(p)) for p in found]


def _flat(t: Tensor) -> Tensor:
    """All entries in a row, one after another in memory: torch lets a single one keep any stride."""
    return t.resolve_conj().resolve_neg().contiguous().as_strided((t.numel(),), (1,))


def inputs_fingerprint(*inputs: Inputs | None) -> str:
    """A hash of batches, with the keywords of keyword tensors.

    Example:
        >>> a, b = torch.ones(2, 1), torch.zeros(2, 1)
        >>> inputs_fingerprint({"a": a, "b": b}) == inputs_fingerprint({"b": a, "a": b})
        False
    """
    return fingerprint(_named(inputs))


def _named(inputs: Sequence[Inputs | None]) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {}
    for i, batch in enumerate(inputs):
        if batch is not None:
            named |= {f"{i} {k}": t for k, t in (batch if isinstance(batch, dict) else {"": batch}).items()}
    return named


def module_fingerprint(module: nn.Module) -> str:
    """A hash of what a module does with its parameters and buffers.

    In it are the classes of all modules with the code of their methods, children by name, modes, forward hooks, and
    plain attributes: numbers, text, tensors, functions, and objects made of those.
    """
    return _hash(_Writer().module(module, values=False))


def function_fingerprint(f: Callable[..., Any] | None) -> str:
    """A hash of a function by its code and what it holds on to; refused where that cannot be known.

    Example:
        >>> first, second = (lambda out: out[0]), (lambda out: out[1])
        >>> function_fingerprint(first) == function_fingerprint(second)
        False
    """
    writer = _Writer()
    text = writer(f)
    if writer.unknown:
        raise UnsupportedError(
            f"output={f!r} holds {writer.unknown[0]}, which cannot be compared with what another run has, so "
            "store= could not know which kernel it holds: pass a plain function, or compute without store="
        )
    return _hash(text)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


class _Writer:
    """Writes an object as text that is the same in another process; `unknown` names what it could not write."""

    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.known: dict[int, tuple[Any, str]] = {}  # with the object itself: ids are used again
        self.depth = 0

    def __call__(self, value: Any) -> str:
        if isinstance(value, PLAIN):
            return repr(value)
        if id(value) in self.known:
            return self.known[id(value)][1]
        if self.depth >= DEPTH:
            return self._give_up(value)
        self.known[id(value)] = value, "itself"  # inside of itself
        self.depth += 1
        text = self._write(value)
        self.depth -= 1
        text = text if len(text) < 200 else _hash(text)
        self.known[id(value)] = value, text
        return text

    def _write(self, v: Any) -> str:
        if isinstance(v, Tensor):
            return fingerprint({"": v})
        if isinstance(v, np.ndarray) and not v.dtype.hasobject:
            return f"{v.dtype} {v.shape} {hashlib.blake2b(np.ascontiguousarray(v).tobytes()).hexdigest()}"
        if isinstance(v, nn.Module):
            return self.module(v, values=True)
        if isinstance(v, list | tuple):
            return f"{type(v).__name__}({', '.join(map(self, v))})"
        if isinstance(v, set | frozenset):
            return f"{type(v).__name__}({', '.join(sorted(map(self, v)))})"
        if isinstance(v, dict):
            return f"{type(v).__name__}({', '.join(f'{self(k)}: {self(x)}' for k, x in v.items())})"
        if isinstance(v, types.ModuleType):
            return v.__name__
        if isinstance(v, type):
            return self._class(v)
        return self._function(v) if callable(v) else self._object(v)

    def module(self, module: nn.Module, values: bool) -> str:
        """A module and all in it; with the `values` of parameters and buffers, or their names alone."""
        parts, lines = modules_of(module), []
        number = {m: i for i, m in enumerate(parts)}
        for m, name in parts.items():
            children = {k: number.get(child) for k, child in m._modules.items()}  # type: ignore[arg-type]
            scripted = isinstance(m, torch.jit.ScriptModule)
            plain = {k: v for k, v in vars(m).items() if k not in BOOKKEEPING and k not in HOOKS}
            own = self._script(m) if scripted else self(plain)
            hooks = [self(list(getattr(m, k).values())) for k in HOOKS]  # their keys count all hooks of a process
            named = [dict(t.items()) for t in (m._parameters, m._buffers)]  # scripted modules have no plain dicts
            mine = [self(t if values else list(t)) for t in named]
            lines.append(f"{name} {self(type(m))} {m.extra_repr()} {children} {mine} {own} {hooks}")
        return "\n".join(lines)

    def _script(self, m: Any) -> str:
        """Code, constants and attributes of a scripted or traced module, which lie outside of Python."""
        if not hasattr(m, "_c") or not m._c._has_method("forward"):  # a container
            return ""
        code, constants = m.code_with_constants
        names = m._concrete_type.get_attributes() if "_concrete_type" in vars(m) else ()  # frozen ones have none
        values = {k: m._c.getattr(k) for k in sorted(names)}
        values = {k: v for k, v in values.items() if not isinstance(v, Tensor | torch._C.ScriptObject)}
        graph = m.inlined_graph.str(False)  # with the functions that the code calls by name, without lines of files
        return f"{re.sub(MANGLED, '', code + graph)} {self(dict(constants.const_mapping))} {self(values)}"

    def _class(self, cls: type) -> str:
        """Name and, where it does not come with torch, the code of all methods."""
        code: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            if not _owned(base):
                code |= {k: _plain_function(v) for k, v in vars(base).items()}
        told = {k: self(v) for k, v in code.items() if isinstance(v, types.FunctionType)}
        return f"{cls.__module__ if _owned(cls) else ''}.{cls.__qualname__} {told if told else ''}"

    def _function(self, f: Any) -> str:
        if isinstance(f, functools.partial):
            return f"partial {self(f.func)} {self(f.args)} {self(f.keywords)}"
        if isinstance(f, types.MethodType):
            return f"method {self(f.__func__)} {self(f.__self__)}"
        if isinstance(f, types.FunctionType):
            cells = [c.cell_contents for c in f.__closure__ or () if _filled(c)]
            if _owned(f):
                return f"{f.__module__}.{f.__qualname__} {self(cells)}"
            used = {n: f.__globals__[n] for n in f.__code__.co_names if n in f.__globals__}
            used = {n: v for n, v in used.items() if isinstance(v, (*PLAIN, types.FunctionType, Tensor))}
            return f"function {self._code(f.__code__)} {self([f.__defaults__, f.__kwdefaults__, used, cells])}"
        if isinstance(f, types.BuiltinFunctionType | types.MethodWrapperType | types.MethodDescriptorType):
            owner = getattr(f, "__self__", None)
            held = "" if owner is None or isinstance(owner, types.ModuleType | type) else self(owner)
            return f"builtin {f.__qualname__} {held}"
        return self._object(f)

    def _code(self, code: types.CodeType) -> str:
        constants = [self._code(c) if isinstance(c, types.CodeType) else self(c) for c in code.co_consts]
        return _hash(f"{code.co_code!r} {constants} {code.co_names} {code.co_varnames} {code.co_freevars}")

    def _object(self, v: Any) -> str:
        if type(v).__module__ == "operator":  # itemgetter and its like say what they hold
            return self(v.__reduce__())
        if not hasattr(v, "__dict__") or _owned(type(v)):
            return self._give_up(v)
        return f"{self(type(v))} {self(vars(v))}"

    def _give_up(self, v: Any) -> str:
        text = f"{type(v).__module__}.{type(v).__qualname__}"
        self.unknown.append(f"an object of {text}")
        return text


def _owned(v: Any) -> bool:
    return (v.__module__ or "builtins").split(".")[0] in OWNERS


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell  # a name that is not bound yet has no contents
    except ValueError:
        return False


def _plain_function(v: Any) -> Any:
    """The function inside of a static method, class method or property."""
    v = v.fget if isinstance(v, property) else v
    return v.__func__ if isinstance(v, staticmethod | classmethod) else v

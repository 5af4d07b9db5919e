"""Rows that an index picked from a batch: the tokens of an expert, the words under a mask.

How many of them an example has, and in which order they stand, depends on the data. That the first examples look as if
rows came example by example says nothing about the next ones, so no layer rule may read such rows: their parameters are
left to autograd.
"""

from typing import Any

import torch
from torch import Tensor

from biascope.network.layers.record import Recorder, flat

_T: Any = torch.Tensor
GETITEM = _T.__getitem__
PICKS = {torch.index_select, _T.index_select, torch.masked_select, _T.masked_select}
COUNTS = {torch.arange}
VIEWS = {_T.view, _T.reshape, torch.reshape, _T.unflatten, torch.unflatten, _T.flatten, torch.flatten,
         _T.unsqueeze, torch.unsqueeze, _T.transpose, torch.transpose, _T.permute, torch.permute, _T.expand, _T.to,
         _T.movedim, torch.movedim, GETITEM}  # fmt: skip
SCATTER = ("index_add", "index_put", "index_copy", "scatter", "scatter_add", "scatter_reduce", "masked_scatter")
INTO = {getattr(_T, name + end) for name in SCATTER for end in ("", "_")} | {getattr(torch, name) for name in SCATTER}
WHY = "used for rows that an index picks, whose examples depend on the data"


class Watcher(Recorder):
    """A recorder for the first look: parameters that meet picked rows are raw."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.picked: dict[int, Tensor] = {}  # kept, so that ids stay unique
        self.counted: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(flat((args, kwargs)))
        picked = [t for t in given if id(t) in self.picked]
        if picked:
            for name in self._touched((*args, *kwargs.values())):
                for root in (name,) if isinstance(name, str) else self.derived[name].roots:
                    self.raw.setdefault(root, WHY)
        out = super().__torch_function__(func, types, args, kwargs)
        made = list(flat(out))
        if func in COUNTS or (func in VIEWS and given and id(given[0]) in self.counted):
            self.counted |= {id(t): t for t in made}
        elif self._picks(func, given, args, kwargs) or (picked and self._follows(func, given[0], made)):
            self.picked |= {id(t): t for t in made if t.is_floating_point()}
        return out

    def _picks(self, func: Any, given: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Does it take rows of activations by an index that is not 0, 1, 2, ...?"""
        if (func not in PICKS and func is not GETITEM) or self.name(given[0]):
            return False
        if func in PICKS:  # a mask has no dimension
            dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
            return not isinstance(dim, int) or dim % given[0].dim() == 0
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        return isinstance(index, Tensor) and index.dim() > 0 and id(index) not in self.counted

    def _follows(self, func: Any, first: Tensor, made: list[Tensor]) -> bool:
        """Do picked rows that went in come out as such? Not where they are put back, or made a batch again."""
        if func in INTO:
            return id(first) in self.picked
        return func not in VIEWS or any(len(t) == len(first) for t in made if t.dim())

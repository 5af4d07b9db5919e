"""Headings of the reference as the names that one types: `bs.ntk`, not `biascope.kernels.ntk.ntk`."""

import re
from importlib import import_module
from typing import Any

import biascope


def short(path: str) -> str:
    """`biascope.kernels.ntk` as `bs.ntk`, where that is the same object, else as `bs.kernels...`."""
    module, _, name = path.rpartition(".")
    if name in biascope._PUBLIC and getattr(import_module(module), name, None) is getattr(biascope, name):
        return f"bs.{name}"
    return path.replace("biascope", "bs", 1)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Every entry of the reference with its heading."""

    def entry(found: re.Match[str]) -> str:
        name = short(found[1])
        return f"{found[0]}\n    options:\n      heading: {name}\n      toc_label: {name}"

    return re.sub(r"^::: (biascope[\w.]*)$", entry, markdown, flags=re.MULTILINE)

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
    """Every entry of the reference with its heading, a level below the heading that it stands under."""
    level, lines = 1, []
    for line in markdown.splitlines():
        lines.append(line)
        if above := re.match(r"(#+) ", line):
            level = len(above[1])
        if entry := re.fullmatch(r"::: (biascope[\w.]*)", line):
            name = short(entry[1])
            options = {"heading": name, "toc_label": name, "heading_level": level + 1}
            lines += ["    options:", *(f"      {key}: {value}" for key, value in options.items())]
    return "\n".join(lines) + "\n"

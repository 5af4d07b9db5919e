"""Wheels hold the benchmarks, so that `biascope bench` works without a checkout; editable installs have them anyway."""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Benchmarks(BuildHookInterface):  # type: ignore[type-arg]
    """Adds the folder `benchmarks/` to wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a wheel is built; `version` is "standard" or "editable"."""
        if version == "standard":
            build_data["force_include"]["benchmarks"] = "biascope/_benchmarks"

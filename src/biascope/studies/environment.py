"""What a run was made with: versions, device, threads, git state, command line."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import biascope

MADE_WITH = ("torch", "biascope", "git", "device_name")  # what numbers may depend on


def describe(device: str | torch.device = "cpu", seed: int | None = None) -> dict[str, Any]:
    """A JSON-able description of this process and machine; goes into `environment.json` of every run folder.

    Example:
        >>> describe()["biascope"] == biascope.__version__
        True
    """
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": metadata.version("numpy"),
        "biascope": biascope.__version__,
        "platform": platform.platform(),
        "device": str(device),
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "git": git_state(Path(__file__).parent),
        "seed": seed,
        "argv": list(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the code and the device that numbers are computed with is another now, in words."""
    told = [(key, *(_short(held.get(key)) for held in (before, now))) for key in MADE_WITH if key in before]
    return [f"{name} {was} then, {is_} now" for name, was, is_ in told if was != is_]


def _short(value: Any) -> str:
    """A state of git as the beginning of its commit, and a plus where files differ from it."""
    if not isinstance(value, dict):
        return str(value)
    return f"{str(value.get('commit'))[:10]}{'+' if value.get('dirty') else ''}"


def device_name(device: str | torch.device = "cpu") -> str:
    """The GPU's or CPU's own name."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(device))
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit and whether files differ from it, when `folder` lies in a git checkout; None otherwise.

    Example:
        >>> git_state(Path("/")) is None
        True
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True, env=environment
    )
    return done.stdout.strip()

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


def device_name(device: str | torch.device = "cpu") -> str:
    """The GPU's or CPU's own name.

    Example:
        >>> bool(device_name("cpu"))
        True
    """
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

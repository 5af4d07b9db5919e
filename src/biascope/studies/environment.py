"""What a run was made with: versions, device, threads, git state, command line."""

import hashlib
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
from biascope.support.files import explain_read_errors

MADE_WITH = ("torch", "biascope", "git", "device_name")  # what numbers may depend on

CODE = Path(biascope.__file__).parents[1]  # the folder of the library and the papers


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
        "git": git_state(),
        "seed": seed,
        "argv": list(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of the code and the device that numbers are computed with is another now, in words."""
    compared = [(key, *(_short(held.get(key)) for held in (before, now))) for key in MADE_WITH if key in before]
    return [f"{name} {was} then, {is_} now" for name, was, is_ in compared if was != is_]


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


def git_state(code: Path = CODE) -> dict[str, Any] | None:
    """Commit, and whether the code differs from it; None where neither git nor $BIASCOPE_TREE says.

    A copy without git names its commit by a list of files: BIASCOPE_TREE is the path of what
    `{ git rev-parse HEAD; git ls-tree -r HEAD src; }` printed, and every file is compared with it.
    """
    if listed := os.environ.get("BIASCOPE_TREE"):
        return _listed_state(code, Path(listed))
    try:
        commit = _git(code, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(code, "status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return None


def _listed_state(code: Path, listed: Path) -> dict[str, Any]:
    """The state of a copy by a list of its files; one that differs, lacks or is not listed makes it dirty."""
    with explain_read_errors(listed):
        commit, *lines = listed.read_text(encoding="utf-8").splitlines()
    blobs = {path: entry.split()[2] for entry, path in (line.split("\t") for line in lines)}
    there = {file.relative_to(code.parent).as_posix(): file for file in code.rglob("*") if file.is_file()}
    changed = [path for path, blob in blobs.items() if path not in there or _blob(there[path]) != blob]
    unlisted = [path for path in there if path.endswith((".py", ".toml")) and path not in blobs]
    return {"commit": commit, "dirty": bool(changed or unlisted), "from": "BIASCOPE_TREE"}


def _blob(file: Path) -> str:
    """The name that git gives to the content of a file."""
    content = file.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True, env=environment
    )
    return done.stdout.strip()

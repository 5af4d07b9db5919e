"""Memory as a budget the user gives: parse "4GB", and find out what is free when there is none."""

import os
import re

import torch

from biascope.support.errors import InputError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(size: str | int | float) -> int:
    """Bytes from a number or a text such as "4GB", "500 MiB" (binary units, as memory is sold)."""
    if isinstance(size, int | float):
        value = float(size)
    else:
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMGT]?)(?:i?B)?\s*", size, re.IGNORECASE)
        if match is None:
            raise InputError(f"max_memory={size!r} is not a size; write for example '4GB' or '500MB'")
        value = float(match[1]) * _UNITS[match[2].upper()]
    if value < 1:
        raise InputError(f"max_memory={size!r}: a budget must be positive")
    return int(value)


def free_memory(device: torch.device) -> int:
    """Bytes that could be allocated now on the device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory.memory_stats_as_nested_dict(device)  # once: building it is slow
        if held:  # empty before the first allocation
            free += held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"]
        return int(free)
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def budget(max_memory: str | int | None, device: torch.device) -> int:
    """The user's budget, or 60 % of what is free."""
    return parse_bytes(max_memory) if max_memory is not None else int(0.6 * free_memory(device))


def readable(n: float, unit: str = "B") -> str:
    """A number with a binary (bytes) or decimal (other units) prefix."""
    base, prefixes = (
        (1024.0, ["", "Ki", "Mi", "Gi", "Ti", "Pi"]) if unit == "B" else (1000.0, ["", "k", "M", "G", "T", "P"])
    )
    for prefix in prefixes:
        if abs(n) < base or prefix == prefixes[-1]:
            break
        n /= base
    return f"{n:.1f} {prefix}{unit}"

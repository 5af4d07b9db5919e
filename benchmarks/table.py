"""Print a committed benchmark result as a Markdown table: python benchmarks/table.py benchmarks/results/ntk-cpu.json"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path


def cell(row: dict[str, object] | None, headline: str) -> str:
    """Seconds, or why there are none."""
    if row is None or row["status"] == "skipped":
        return ""
    if row["status"] == "ok":
        return f"{float(row[headline]):.3g}"  # type: ignore[arg-type]
    reason = str(row["reason"])
    if reason.removeprefix("TimeoutError: ").startswith("more than"):
        return "too slow"
    return reason.split(" above")[0] if reason.startswith("error") else "refuses"


def table(path: Path) -> str:
    """One line per case; the ratio is against the fastest rival that is right."""
    report = json.loads(path.read_text())
    headline = report["settings"]["headline"]
    rows = report["measurements"]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    names = list(dict.fromkeys(r["contender"] for r in rows))
    found = {(r["case"], r["contender"]): r for r in rows}
    head = [*names, "best rival / biascope", "memory, torch.func / biascope"]
    lines = ["| kernel | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    times, memories = [], []
    for case in cases:
        ours = found[case, "biascope"]
        right = [r for r in rows if r["case"] == case and r["contender"] != "biascope" and r["status"] == "ok"]
        ratio = min((r[headline] for r in right), default=math.nan) / ours[headline]
        base = found.get((case, "torch.func"))
        memory = base["peak_bytes"] / ours["peak_bytes"] if base and base["status"] == "ok" else math.nan
        times += [ratio] if right else []
        memories += [memory] if not math.isnan(memory) else []
        tail = [f"**{ratio:.2f}**" if right else "no rival is right", "" if math.isnan(memory) else f"{memory:.1f}"]
        cells = [cell(found.get((case, name)), headline) for name in names]
        lines.append(f"| {case} | " + " | ".join([*cells, *tail]) + " |")

    def mean(values: list[float]) -> float:
        return math.exp(sum(map(math.log, values)) / len(values))

    where = report["machine"].get("gpu") or report["machine"].get("cpu")
    lines.append("")
    lines.append(
        f"Geometric means over {len(times)} cases with a right rival: time {mean(times):.2f}, "
        f"memory of torch.func {mean(memories):.1f}. {headline} on {where}."
    )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(Path(sys.argv[1])))

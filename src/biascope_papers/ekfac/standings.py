"""What comes out of a contest of optimisers: numbers, sentences, charts."""

import math
from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from biascope.studies import Chart, Estimate, Series
from biascope.studies.estimates import mean_error
from biascope_papers.ekfac.common import Row
from biascope_papers.ekfac.contest import LEARNT, NAMES, Outcome, lowest_error


def compare(out: Outcome, mine: Sequence[str], rivals: Sequence[str]) -> tuple[dict[str, Estimate], str]:
    """By how much the losses of the rivals are above mine, paired by seed, and who did not take part."""
    gaps = dict[str, Estimate]()
    for a, b in product(mine, rivals):
        if a in out.rows and b in out.rows:
            pair = f"{NAMES[b]} minus {NAMES[a]}"
            rows = list(zip(out.rows[a], out.rows[b]))
            gaps[f"loss of {pair}"] = Estimate.of([y - x for x, y in zip(out.final(a), out.final(b))])
            gaps[f"loss at equal time of {pair}"] = Estimate.of([at_equal_time(x, y) for x, y in rows])
            if all("test" in row for pair_of in rows for row in pair_of):
                ends = [(float(x["test"][-1]), float(y["test"][-1])) for x, y in rows]
                gaps[f"test loss of {pair}"] = Estimate.of([y - x for x, y in ends])
                gaps[f"test loss of {pair}, relative"] = Estimate.of([y / x - 1 for x, y in ends])
        if a in out.validated and b in out.validated:
            errors = [[lowest_error(row) for row in out.validated[name]] for name in (b, a)]
            gaps[f"validation error of {NAMES[a]} minus {NAMES[b]}"] = Estimate.of([y - x for x, y in zip(*errors)])
    absent = [NAMES[name] for name in (*mine, *rivals) if name not in out.rows]
    return gaps, sentences({"Did not take part, and is not judged": absent})


def at_equal_time(mine: Row, theirs: Row) -> float:
    """Training loss of theirs minus mine when the first of the two has ended; between two looks, interpolated."""
    end = min(float(row["seconds"][-1]) for row in (mine, theirs))
    ours, other = (float(np.interp(end, row["seconds"], row["loss"])) for row in (mine, theirs))
    return other - ours


def sentences(parts: Mapping[str, Sequence[str]]) -> str:
    """A sentence (heading: one; two) for every heading that has something below it."""
    return " ".join(f"{heading}: {'; '.join(names)}." for heading, names in parts.items() if names)


def remarks(out: Outcome) -> str:
    """What a reader must know of the search, and of those who did not learn."""
    flat = [NAMES[name] for name in out.rows if not out.learnt(name)] if math.isfinite(out.plateau) else []
    plateau = f"Not below {LEARNT:g} of the plateau ({out.plateau:.4g}, the best constant output)"
    return " ".join(filter(None, [searched(out), sentences({plateau: flat})]))


def searched(out: Outcome, where: str = "") -> str:
    """How many trainings each search took, and whose result is provisional."""
    spent = ", ".join(f"{NAMES[name]} {count}" for name, count in out.spent.items())
    return sentences(
        {
            f"Trainings of the search{where} (one rule for all)": [spent] if spent else [],
            "Best learning rate at the edge of the grid": out.loose,
        }
    )


def timing(out: Outcome, where: str = "") -> dict[str, Estimate]:
    """Milliseconds per iteration."""
    return {
        f"milliseconds per iteration, {NAMES[name]}{where}": Estimate.of(
            [1e3 * float(row["seconds"][-1]) / out.best[name].steps for row in rows]
        )
        for name, rows in out.rows.items()
    }


def report(out: Outcome, mine: Sequence[str], rivals: Sequence[str], begin: str) -> tuple[dict[str, Estimate], str]:
    """The report on one contest: numbers, and a text that begins with the final losses."""
    final = {NAMES[name]: Estimate.of(out.final(name)) for name in out.rows}
    losses = ", ".join(f"{name} {value}" for name, value in final.items())
    gaps, standing = compare(out, mine, rivals)
    numbers = {f"final training loss, {name}": value for name, value in final.items()}
    for name, rows in out.rows.items():
        if all("test" in row for row in rows):
            numbers[f"final test loss, {NAMES[name]}"] = Estimate.of([float(row["test"][-1]) for row in rows])
    for name, rows in out.validated.items():
        numbers[f"lowest validation error, {NAMES[name]}"] = Estimate.of(map(lowest_error, rows))
    text = " ".join(filter(None, [f"{begin}: {losses}.", standing, remarks(out)]))
    return {**numbers, **progress_made(out), **timing(out), **gaps}, text


def progress_made(out: Outcome, where: str = "") -> dict[str, Estimate]:
    """The final loss of the worst seed as a share of the plateau, or of the start where that is lower: a gate."""
    return {
        f"worst final loss / plateau, {NAMES[name]}{where}": Estimate(
            max(float(row["final"]) / min(out.plateau, float(row["loss"][0]) / LEARNT) for row in rows)
        )
        for name, rows in out.rows.items()
    }


def charts(out: Outcome, loss: str, note: str, name: str = "", title: str = "") -> tuple[Chart, ...]:
    """Training loss against epochs (or iterations, where all batches have one size) and time, test loss if known."""
    curves = {key: mean_error([row["loss"] for row in rows]) for key, rows in out.rows.items()}
    times = {key: mean_error([row["seconds"] for row in rows])[0] for key, rows in out.rows.items()}
    same = len({s.size for s in out.best.values()}) == 1
    unit = "iteration" if same else "epoch"
    at = {k: s.ticks if same else [t * s.size / out.n for t in s.ticks] for k, s in out.best.items()}
    settings = "; ".join(map(str, out.best.values()))
    tests = {key: mean_error([row["test"] for row in rows]) for key, rows in out.rows.items() if "test" in rows[0]}
    held = Chart(
        f"{name}test",
        f"Test loss against {unit}s{title}",
        unit,
        loss,
        tuple(Series.of(NAMES[key], at[key], *curve) for key, curve in tests.items()),
        log_y=True,
        alt=f"One curve per optimiser over {unit}s.",
        caption=f"{note} Mean over seeds, band: standard error.",
    )
    return (
        Chart(f"{name}{unit}s", f"Training loss against {unit}s{title}", unit, loss,
              tuple(Series.of(NAMES[key], at[key], *curve) for key, curve in curves.items()), log_y=True,
              alt=f"One falling curve per optimiser over {unit}s.",
              caption=f"{note} Best setting each: {settings}. Mean over seeds, band: standard error."),
        Chart(f"{name}time", f"Training loss against time{title}", "seconds of training on this machine", loss,
              tuple(Series.of(NAMES[key], times[key], curve[0]) for key, curve in curves.items()), log_y=True,
              alt="One falling curve per optimiser over seconds."),
        *([held] if tests else []),
    )  # fmt: skip

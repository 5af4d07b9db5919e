"""`biascope queue`: long runs one after the other, until a time limit."""

from pathlib import Path
from typing import Annotated

import typer

from biascope.studies.queue import memory, read_queue, run_queue
from biascope.support.errors import InputError

app = typer.Typer(help="Long runs from a queue, until a time limit: list, run, keep.", no_args_is_help=True)
Folder = Annotated[Path, typer.Option(help="Folder of the queue's files.")]
Runs = Annotated[Path, typer.Option(help="Folder of the run folders.")]
Only = Annotated[str, typer.Option(help="Names of runs or studies, as patterns, first things first: 'nad/*,*-lenet'.")]
FOLDER, RUNS = Path("reproductions/queue"), Path("runs/queue")


@app.command("list")
def list_queue(folder: Folder = FOLDER, runs: Runs = RUNS, only: Only = "*") -> None:
    """The runs in the order in which they are started: minutes expected and measured, state, claims."""
    entries, known = read_queue(folder, only), memory(runs)
    wide = max(len(entry.name) for entry in entries)
    typer.echo(f"{'run':{wide}} expected measured  state    claims")
    for entry in entries:
        past, state = known.get(entry.name, {}), entry.state(runs)
        measured = f"{past['seconds'] / 60:.1f}" if past and state != "waiting" else ""
        notes = ["failed"] * bool(past.get("failed") and state != "done") + ["alone"] * entry.alone
        notes += [f"needs {name}" for name in entry.absent()]
        end = ", ".join(entry.claims) + f" ({'; '.join(notes)})" * bool(notes)
        typer.echo(f"{entry.name:{wide}} {entry.minutes:8.1f} {measured:>8}  {state:8} {end}")
    states = [entry.state(runs) for entry in entries]
    open_ = [entry for entry, state in zip(entries, states) if state != "done"]
    counts = ", ".join(f"{states.count(state)} {state}" for state in ("done", "begun", "waiting"))
    minutes, left = (sum(entry.minutes for entry in some) for some in (entries, open_))
    decided, all_ = (len({claim for entry in some for claim in entry.claims}) for some in (open_, entries))
    typer.echo(f"{len(entries)} runs, {minutes:.0f} minutes, {all_} claims: {counts}")
    typer.echo(f"still to run: {left:.0f} minutes, {decided} claims")


@app.command("run")
def run_entries(
    minutes: Annotated[float, typer.Option(help="Stop after so many minutes.")],
    folder: Folder = FOLDER,
    runs: Runs = RUNS,
    jobs: Annotated[int, typer.Option(min=1, help="Most runs side by side.")] = 4,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")] = "cpu",
    only: Only = "*",
    start_anyway: Annotated[
        bool, typer.Option("--start-anyway", help="Also start what does not fit the time; it goes on next time.")
    ] = False,
) -> None:
    """Run the next entries until the time limit; what was cut off is resumed."""
    failed = run_queue(
        read_queue(folder, only, any_claims=True),
        runs,
        minutes,
        jobs=jobs,
        device=device,
        start_anyway=start_anyway,
        say=typer.echo,
    )
    for name, last in failed.items():
        typer.echo(f"\n{name} failed:\n{last}", err=True)
    if failed:
        raise typer.Exit(1)


@app.command("keep")
def keep_finished(
    runs: Runs = RUNS,
    into: Annotated[Path, typer.Option(help="Folder of kept runs.")] = Path("reproductions"),
    replace: Annotated[bool, typer.Option("--replace", help="Replace earlier ones of the same names.")] = False,
) -> None:
    """Keep every finished run that is not kept yet; what cannot be kept is reported, and the others are kept."""
    from biascope.reports.kept import device_part, is_kept, keep
    from biascope.studies import Run

    refused = 0
    for result in sorted(runs.glob("*/result.json")):
        run = Run.open(result.parent)
        if is_kept(run, into):
            continue
        try:
            typer.echo(str(keep(run.path, into, f"{run.path.name}-{device_part(run)}", replace).path))
        except InputError as error:
            refused += 1
            typer.echo(f"{run.path.name} was not kept: {error}", err=True)
    if refused:
        raise typer.Exit(1)

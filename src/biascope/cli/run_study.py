"""`biascope run`: make or resume a run folder, execute the study, write its page."""

import difflib
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from biascope.cli.interrupts import plain_interrupts
from biascope.cli.studies import describe
from biascope.studies import Run, configure, execute, find, load_result
from biascope.studies.replication import beside
from biascope.studies.runs import way_out
from biascope.support.arguments import device_of
from biascope.support.errors import BiascopeError, CorruptError, InputError, UnsupportedError
from biascope.support.executors import Choice

# options of the study itself (--sigma 3) are not known here: they arrive as extra arguments
RUNNERS = ("executor", "address", "jobs", "job-cpus", "job-gpus")
OPTIONS = ("size", "seed", "out", "resume", "like", "device", "set", *RUNNERS)  # those of every study
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def run_study(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="The study, e.g. nad/fig4a; `biascope list` shows all.")] = None,
    size: Annotated[
        str | None, typer.Option(help="smoke: seconds; laptop: minutes on a CPU; paper: the paper's.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random. [default: 0]")] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder. [default: runs/NAME-SIZE]")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    like: Annotated[
        Path | None, typer.Option(help="Run what this folder holds again, with its options, and compare the numbers.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. [default: cpu]")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="An option of the study, as key=value.")] = None,
    executor: Annotated[
        str | None, typer.Option(help="ray, or processes of this machine: independent trainings side by side.")
    ] = None,
    address: Annotated[str | None, typer.Option(help="Of a Ray cluster, e.g. auto. [default: Ray is started]")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="So many at a time.")] = None,
    job_cpus: Annotated[float, typer.Option(min=0, help="Processors of each.")] = 1.0,
    job_gpus: Annotated[float | None, typer.Option(min=0, help="GPUs of each on Ray, may be 0.25.")] = None,
    help_: Annotated[bool, typer.Option("--help", help="Show this; with a study's name, also its options.")] = False,
) -> None:
    """Run a study: every option of the study is also an option here, e.g. `biascope run nad/fig4a --sigma 2`."""
    console = Console(highlight=False)
    if help_ or (name is None and resume is None and like is None):
        typer.echo(context.get_help())
        if name is not None:
            describe(find(name), console)
        return
    if executor not in {None, *get_args(Choice)}:
        raise InputError(f"--executor {executor!r} should be {' or '.join(get_args(Choice))}")
    if executor is None and (address, jobs, job_cpus, job_gpus) != (None, None, 1.0, None):
        raise InputError("--address, --jobs, --job-cpus and --job-gpus are for --executor ray or processes")
    extra = list(context.args)
    if name is not None and name.startswith("-"):  # `--resume PATH --sigma 3`: there was no name
        extra.insert(0, name)
        name = None
    asked: dict[str, Any] = {"size": size, "seed": seed, "device": device}
    asked = {key: value for key, value in asked.items() if value is not None}
    if device is not None:
        device_of(device)
    overrides = {**study_options(extra), **dict(_key_value(setting) for setting in settings or [])}
    if like is not None:
        if resume is not None:
            raise InputError("--like starts a new run and --resume goes on with one: give one of them")
        name, asked, overrides = _again(like, name, asked, overrides)
    new = resume is None and (out is None or not os.path.exists(out))  # a folder that this command makes
    run = _resumed(resume, name, asked, overrides) if resume else _started(str(name), out, asked, overrides)
    try:
        if run.finished:
            console.print(f"{escape(str(run.path))} was finished already; making its page again")
        else:
            with plain_interrupts():
                kind = cast(Choice | None, executor)
                execute(run, kind, address=address, jobs=jobs, cpus=job_cpus, gpus=job_gpus)
        _show(run, console)
        if like is not None:
            _compare(like, run, console)
    except KeyboardInterrupt:
        print(f"\ninterrupted; go on with: {_resume_command(run)}", file=sys.stderr)
        raise typer.Exit(130) from None
    except Exception as error:
        _say_how_to_go_on(run, error, new)
        raise


def _say_how_to_go_on(run: Run, error: Exception, new: bool) -> None:
    """One line about a run that stopped; a new folder in which nothing was stored is removed."""
    damaged = run.path / "result.json"
    if isinstance(error, CorruptError) and damaged.exists():  # resuming alone would stop at the same place for ever
        print(f"delete {damaged}, then make it again from what is stored: {_resume_command(run)}", file=sys.stderr)
    elif run.bare:  # refused before anything was measured
        gone = ", which was removed" if new and run.discard() else ""
        print(f"the run stopped before it began; nothing is lost with {run.path}{gone}", file=sys.stderr)
    elif isinstance(error, BiascopeError) and not isinstance(error, CorruptError):
        print(f"the run stopped; with the same options it goes on by: {_resume_command(run)}", file=sys.stderr)


def study_options(arguments: list[str]) -> dict[str, str]:
    """`--key value`, `--key=value` and `--flag` as a dict."""
    found: dict[str, str] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise InputError(f"did not understand {word!r}; options of a study read --key value or --set key=value")
        key, equals, value = word[2:].partition("=")
        if not equals:
            takes_next = bool(rest) and not rest[0].startswith("--")
            value = rest.pop(0) if takes_next else "true"
        found[key] = value
    return found


def _key_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text!r} should read key=value")
    return key.strip(), value.strip()


def _started(name: str, out: Path | None, asked: dict[str, Any], overrides: dict[str, str]) -> Run:
    _refuse_misspelt(overrides, name)
    config = configure(name, overrides=overrides, **asked)
    return Run.create(out or _free_folder(f"{name.replace('/', '-')}-{config['size']}"), config)


def _refuse_misspelt(overrides: Iterable[str], name: str) -> None:
    """Raise if what was taken for an option of the study is nearer to one that every study has."""
    own = {option.name for option in find(name).options}
    for key in overrides:
        meant = difflib.get_close_matches(key, [*own, *OPTIONS], n=1, cutoff=0.5)
        if key not in own and meant and meant[0] in OPTIONS:
            raise InputError(f"unknown option --{key}; did you mean --{meant[0]}?")


def _free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, ... if that is taken."""
    path, count = Path("runs") / name, 1
    while os.path.exists(path):  # Path.exists raises where a folder may not be entered; making the run explains it
        count += 1
        path = Path("runs") / f"{name}-{count}"
    return path


def _again(
    like: Path, name: str | None, asked: dict[str, Any], overrides: dict[str, str]
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Study, size, seed, device and options of an earlier run; what the command line gives goes before."""
    from biascope.reports.study_page import finished

    stored = finished(like)[0].config
    study = _study_of(like, stored, name)
    settings = {key: stored[key] for key in ("size", "seed", "device") if key in stored}
    return study, settings | asked, {**stored.get("options", {}), **overrides}


def _resumed(path: Path, name: str | None, asked: dict[str, Any], overrides: dict[str, str]) -> Run:
    """Whatever the command line gives again must be what the folder was started with."""
    from biascope.reports.study_page import check_config

    opened = Run.open(path)
    with way_out(opened.path / "config.json"):
        stored = check_config(opened).config
    study = _study_of(path, stored, name)
    options: dict[str, Any] = {**stored.get("options", {}), **overrides}
    again: dict[str, Any] = {key: stored[key] for key in ("size", "seed", "device") if key in stored}
    again |= asked
    return Run.resume(path, configure(study, overrides=options, **again))


def _study_of(path: Path, stored: dict[str, Any], name: str | None) -> str:
    """The study of a run folder; a name on the command line must be the same."""
    study = str(stored.get("study"))
    if name not in {None, study}:
        raise InputError(f"{path} is a run of {study}, not of {name}")
    return study


def _resume_command(run: Run) -> str:
    return f"biascope run --resume {shlex.quote(str(run.path))}"


def _show(run: Run, console: Console) -> None:
    from biascope.reports import write_study_page
    from biascope.reports.study_page import finished
    from biascope.studies.judging import judgements

    _, result, _ = finished(run.path)
    smoke = run.config.get("size") == "smoke"
    console.print(f"Measured: {escape(result.measured)}")
    for each in judgements(run, result.numbers):
        colour = {"supported": "green", "contradicted": "red"}.get(each.verdict, "yellow")
        console.print(f"Claim:    {escape(each.claim.statement)}")
        verdict = f"{each.verdict} (proves nothing)" if smoke else f"[bold {colour}]{each.verdict}[/]"
        console.print(f"          {verdict} at {each.level} ({escape(str(each.scope))})")
    if smoke:
        console.print("Size:     smoke, to see that it runs: it proves nothing")
    try:
        console.print(f"Page:     {escape(str(write_study_page(run.path)))}", soft_wrap=True)
    except UnsupportedError as error:  # the numbers are there, only the drawing is missing
        console.print(f"No page: {escape(str(error))}; then `{_resume_command(run)}` makes it", soft_wrap=True)


def _compare(like: Path, run: Run, console: Console) -> None:
    before, now = load_result(like)[1], load_result(run.path)[1]
    table = Table(box=None, pad_edge=False, title=f"Beside {like}", title_justify="left")
    for header in ("number", "before", "now", "apart, in standard errors"):
        table.add_column(header)
    for pair in beside(before, now):
        old, new = ("-" if e is None else str(e) for e in (pair.before, pair.now))
        table.add_row(escape(pair.name), old, new, "" if pair.apart is None else f"{pair.apart:.2g}")
    console.print(table)

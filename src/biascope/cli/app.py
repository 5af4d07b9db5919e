"""The command assembled from its subcommands, and what happens to errors."""

import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

import biascope
from biascope.cli import (
    atlas,
    bench,
    card,
    compare,
    data,
    geometry,
    keep,
    ledger,
    nads,
    nets,
    ntk,
    plan,
    queue,
    run_study,
    studies,
    watch,
)
from biascope.cli.interrupts import plain_interrupts
from biascope.support.errors import BiascopeError

app = typer.Typer(
    name="biascope",
    help="See the inductive bias of a PyTorch network, and run the papers about it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("list")(studies.list_studies)
app.command("run", context_settings=run_study.CONTEXT)(run_study.run_study)
app.command("card")(card.card)
app.command("compare")(compare.compare)
app.command("nads")(nads.nads)
app.command("geometry")(geometry.geometry)
app.command("ntk")(ntk.ntk)
app.command("plan")(plan.plan)
app.add_typer(data.app, name="data")
app.command("bench", context_settings=bench.CONTEXT)(bench.bench)
app.command("ledger")(ledger.show_ledger)
app.command("keep")(keep.keep_run)
app.command("watch")(watch.watch)
app.add_typer(queue.app, name="queue")
app.add_typer(atlas.app, name="atlas")
app.command("nets")(nets.show_nets)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"biascope {biascope.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    """See the inductive bias of a PyTorch network, and run the papers about it."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; every expected failure becomes one line on standard error and an exit code."""
    try:
        with plain_interrupts():
            code = app(args=list(arguments), prog_name="biascope", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except BiascopeError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        # typer brings its own or the user's click, depending on its version: both name their exceptions alike
        if type(error).__name__ == "Abort":
            return _interrupted()
        if type(error).__name__ == "NoArgsIsHelpError":  # `biascope data`: its help is the answer
            if str(error):  # else typer has printed it
                print(error)
            return 0
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):
            return _fail(f"{error.format_message()} (biascope --help shows what there is)")
        raise


def _interrupted() -> int:
    print("interrupted", file=sys.stderr)
    return 130


def _fail(message: str) -> int:
    if os.environ.get("BIASCOPE_DEBUG", "") not in {"", "0"}:
        traceback.print_exc()
    print(f"error: {message}", file=sys.stderr)
    return 1

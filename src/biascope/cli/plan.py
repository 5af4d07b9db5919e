"""`biascope plan`: what a computation will take, on one process or many, before it is started."""

from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from biascope.cli.card import network_options
from biascope.cli.nads import Device, Memory, Seed, Settings
from biascope.cli.ntk import Data, Name, network
from biascope.support.errors import InputError


def plan(
    name: Name,
    what: Annotated[str, typer.Argument(help="ntk; diagonal, kfac or ekfac of the Fisher information.")],
    data: Data,
    examples: Annotated[int | None, typer.Option(min=1, help="How many. [default: those of the data]")] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Processes, each with a device like this one's.")] = 1,
    max_memory: Memory = None,
    bandwidth: Annotated[float, typer.Option(min=1, help="Bytes per second between processes.")] = 1e10,
    outputs: Annotated[str | None, typer.Option(help="Of ntk: full, trace, diagonal, sum, or a number.")] = None,
    weights: Annotated[Path | None, typer.Option(help="Trained weights: .safetensors, or a saved state dict.")] = None,
    seed: Seed = 0,
    device: Device = "cpu",
    settings: Settings = None,
) -> None:
    """Memory, time and traffic from a few small runs here, and a table for 1 to 512 processes."""
    from biascope.planning.forecast import What
    from biascope.planning.forecast import plan as forecast
    from biascope.reports.panels.examples import load_inputs

    if what not in get_args(What):
        raise InputError(f"{what!r} cannot be planned; {', '.join(get_args(What))} can")
    if outputs is not None and what != "ntk":
        raise InputError(f"--outputs is for ntk, not for {what}")
    x = load_inputs(data)
    model = network(name, x, seed, weights, network_options(settings or [])).to(device)
    options: dict[str, Any] = {}
    if outputs is not None:
        options["outputs"] = int(outputs) if outputs.isdecimal() else outputs
    more = {"n": examples, "max_memory": max_memory, "bandwidth": bandwidth, "options": options}
    print(forecast(model, cast(What, what), x, world_size, **more))  # type: ignore[arg-type]

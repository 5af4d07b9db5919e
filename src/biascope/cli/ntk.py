"""`biascope ntk`: a tangent kernel in a folder, filled by as many of these commands as are started."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console
from rich.markup import escape

from biascope.cli.card import network_options
from biascope.cli.nads import Device, Memory, Seed, Settings
from biascope.support.errors import InputError

if TYPE_CHECKING:
    from torch import nn

PRECISIONS = ("float32", "float64", "tf32", "bf16")
OUTPUTS = ("full", "trace", "diagonal", "sum")
Name = Annotated[str, typer.Argument(help="A network as `biascope card` takes them.")]
Data = Annotated[str, typer.Option(help="A data set (cifar10), or a file with x: .npz, .safetensors, .pt.")]


def ntk(
    name: Name,
    data: Data,
    store: Annotated[Path, typer.Option(help="The folder, the same for every process.")],
    against: Annotated[str | None, typer.Option(help="Other data, for the cross kernel.")] = None,
    examples: Annotated[int | None, typer.Option(min=1, help="Only the first so many.")] = None,
    outputs: Annotated[str, typer.Option(help="full, trace, diagonal, sum, or the number of one output.")] = "full",
    precision: Annotated[str, typer.Option(help="float32, float64, tf32 or bf16.")] = "float32",
    params: Annotated[str | None, typer.Option(help="A layer, a name or a glob. [default: all parameters]")] = None,
    weights: Annotated[Path | None, typer.Option(help="Trained weights: .safetensors, or a saved state dict.")] = None,
    wait: Annotated[bool, typer.Option(help="Stay until the tiles of the others are done too.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    max_memory: Memory = None,
    settings: Settings = None,
) -> None:
    """The tangent kernel of a network, tile by tile: start it as often as you have processors, anywhere.

    Every process takes the next tile that nobody has. Whatever happens to one, the others finish.
    """
    from biascope.kernels.tiles import stored_ntk
    from biascope.network.functional import functional
    from biascope.reports.panels.examples import load_inputs
    from biascope.support.inputs import check_inputs, map_inputs, take
    from biascope.support.memory import parse_bytes

    if precision not in PRECISIONS:
        raise InputError(f"--precision {precision!r} should be {', '.join(PRECISIONS)}")
    if outputs not in OUTPUTS and not outputs.isdecimal():
        raise InputError(f"--outputs {outputs!r} should be {', '.join(OUTPUTS)}, or the number of one output, from 0")
    if max_memory is not None:
        parse_bytes(max_memory)
    one, two = (None if spec is None else load_inputs(spec) for spec in (data, against))
    model = network(name, one, seed, weights, network_options(settings or [])).to(device)

    def ready(x: Any) -> Any:
        return map_inputs(take(check_inputs(x, "--data"), slice(0, examples)), lambda t: t.to(device))

    f, number = functional(model, params, None, precision), cast(Any, precision)
    which = cast(Any, int(outputs) if outputs.isdecimal() else outputs)
    x2 = None if two is None else ready(two)
    K = stored_ntk(f, ready(one), x2, which, "auto", number, max_memory, store, wait=wait)
    console = Console(highlight=False)
    if K is None:
        console.print("The last tiles are in the hands of other processes.")
    else:
        console.print(escape(repr(K)))
        console.print(escape(f'Open it with biascope.kernels.open_kernel("{store}").'), soft_wrap=True)
    console.print(escape(str(store.resolve())), soft_wrap=True)


def network(name: str, x: Any, seed: int, weights: Path | None, options: dict[str, Any]) -> "nn.Module":
    """The network in eval mode, the same in every process that is given the same seed, or with these weights."""
    from biascope.reports.panels.loading import load_state, put_weights
    from biascope.reports.panels.sources import resolve
    from biascope.support.seeds import seeded

    # keyword arguments have no one shape; only a factory of the user's takes them, and it is not asked for one
    shape = (1,) if isinstance(x, dict) else tuple(x.shape[1:])
    factory, _ = resolve(name, shape, **options)
    with seeded(seed):
        made = factory().eval()
    return made if weights is None else put_weights(made, load_state(weights), weights)

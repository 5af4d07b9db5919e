"""`biascope nads`: the neural anisotropy directions of a network, as a file and a picture."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from biascope.cli.card import network_options, shape
from biascope.support.errors import InputError
from biascope.support.files import explain_write_errors, write_atomically

if TYPE_CHECKING:
    from torch import Tensor, nn

SUFFIX = ".safetensors"
Name = Annotated[str, typer.Argument(help="A network as `biascope card` takes them, or a file this command wrote.")]
Input = Annotated[str | None, typer.Option("--input", help="Shape of one input, e.g. 3,64,64.")]
Out = Annotated[Path | None, typer.Option(help="The file; the picture goes beside it. [default: under runs/]")]
Against = Annotated[Path | None, typer.Option(help="A file of another network, to compare with.")]
Output = Annotated[
    int | None,
    typer.Option(min=0, help="Which output, from 0. [default: the only one, the difference of two, the first of more]"),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1.")]
Memory = Annotated[str | None, typer.Option(help="For example 4GB. [default: 60 % of what is free]")]
Settings = Annotated[list[str] | None, typer.Option("--set", help="An option of the network, key=value.")]


def nads(
    name: Name,
    input_: Input = None,
    networks: Annotated[str, typer.Option(help="How many, or auto: until the leading directions are stable.")] = "1000",
    method: Annotated[
        str, typer.Option(help="finite-difference, autograd, mixed-derivative or ntk.")
    ] = "finite-difference",
    step: Annotated[float | None, typer.Option(help="Of the finite differences. [default: 100]")] = None,
    derivative: Annotated[str, typer.Option(help="Of mixed-derivative: exact or finite-difference.")] = "exact",
    head: Annotated[str, typer.Option(help="sampled, or marginal: the last layer is averaged out.")] = "sampled",
    top: Annotated[int | None, typer.Option(min=1, help="How many directions. [default: all, or 64]")] = None,
    precision: Annotated[str, typer.Option(help="On CUDA: float32, tf32, fp16, bf16.")] = "float32",
    output: Output = None,
    out: Out = None,
    against: Against = None,
    seed: Seed = 0,
    device: Device = "cpu",
    max_memory: Memory = None,
    settings: Settings = None,
) -> None:
    """Directions of the input that a fresh network prefers: eigenvectors, eigenvalues with errors, pictures."""
    from biascope.geometry import NADs
    from biascope.geometry import nads as measure

    other = NADs.load(against) if against is not None else None  # before the work, if it cannot be read
    if is_file(name):
        found, written = NADs.load(name), Path(name)
    else:
        factory, inputs, written = network(name, input_, settings, out, "nads")
        given: dict[str, Any] = {"method": method, "derivative": derivative, "head": head, "precision": precision}
        given |= {} if step is None else {"step": step}
        found = measure(
            factory,
            inputs,
            count(networks),
            device=device,
            seed=seed,
            max_memory=max_memory,
            top=top,
            scalarise=one_of(output),
            **given,
        )
        found.save(written)
    facts = [repr(found)]
    if found.head == "sampled" and found.method in ("finite-difference", "autograd"):
        above = int((found.eigenvalues > found.marchenko_pastur().upper).sum())
        facts.append(f"Eigenvalues above the band that an isotropic network would fill: {above}.")
    if other is not None:
        most = min(len(found.directions), len(other.directions), found.dimension - 1)
        shares = ", ".join(f"{found.overlap(other, k):.3f} ({k})" for k in (1, 3, 10, 30, 100) if k <= most)
        facts.append(f"Overlap of the first directions with those of {against}: {shares}; 1 if they span the same.")
    tell(facts, written, found.plot)


def is_file(name: str) -> bool:
    """Whether what was named is a file of an earlier call."""
    return name.endswith(SUFFIX)


def count(networks: str) -> Any:
    """A number of networks, or "auto"."""
    if networks != "auto" and not networks.isdecimal():
        raise InputError(f"--networks {networks!r} should be a number, or auto")
    return networks if networks == "auto" else int(networks)


def one_of(output: int | None) -> "Callable[[Tensor], Tensor] | None":
    """The function that takes one of several outputs."""
    if output is None:
        return None

    def take(out: "Tensor") -> "Tensor":
        if output >= out.shape[1]:
            raise InputError(f"--output {output}: the network has {out.shape[1]} outputs, from 0 on")
        return out[:, output]

    return take


def network(
    name: str, input_: str | None, settings: list[str] | None, out: Path | None, what: str
) -> "tuple[Callable[[], nn.Module], tuple[int, ...], Path]":
    """A factory, the shape of one input, and the file that will be written."""
    from biascope.reports.card import slug
    from biascope.reports.panels.sources import Copies, resolve

    factory, inputs = resolve(name, shape(input_), **network_options(settings or []))
    factory = factory.network if isinstance(factory, Copies) else factory  # which is drawn again
    written = out or Path("runs") / f"{what}-{slug(name)}{SUFFIX}"
    if written.suffix != SUFFIX:
        raise InputError(f"--out {written}: the file is a {SUFFIX} file; its picture goes beside it")
    with explain_write_errors(written):
        written.parent.mkdir(parents=True, exist_ok=True)
    return factory, inputs, written


def tell(facts: list[str], written: Path, plot: Callable[[], Any]) -> None:
    """Print what was found, and draw it beside the file."""
    console, drawn = Console(highlight=False), written.with_suffix(".png")
    for fact in facts:
        console.print(escape(fact))
    write_atomically(drawn, lambda path: plot().savefig(path, format="png", dpi=200))
    console.print(escape(str(written.resolve())), soft_wrap=True)
    console.print(escape(str(drawn.resolve())), soft_wrap=True)

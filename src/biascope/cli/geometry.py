"""`biascope geometry`: the average geometry of a network, as a file and a picture."""

from pathlib import Path
from typing import Annotated

import typer

from biascope.cli.nads import (
    Against,
    Device,
    Input,
    Memory,
    Name,
    Out,
    Output,
    Seed,
    Settings,
    is_file,
    network,
    one_of,
    tell,
)
from biascope.support.errors import InputError


def geometry(
    name: Name,
    input_: Input = None,
    networks: Annotated[int, typer.Option(min=1, help="How many.")] = 1000,
    probes: Annotated[int, typer.Option(min=1, help="Inputs per network.")] = 1,
    probe_std: Annotated[float, typer.Option(min=0, help="Of the inputs; small for smooth activations.")] = 1.0,
    analytic: Annotated[bool, typer.Option("--analytic", help="Exact, without sampling, where it can be had.")] = False,
    output: Output = None,
    out: Out = None,
    against: Against = None,
    seed: Seed = 0,
    device: Device = "cpu",
    max_memory: Memory = None,
    settings: Settings = None,
) -> None:
    """G, the mean of g gᵀ over fresh networks, g the derivative of the output by the input."""
    from biascope.geometry import AverageGeometry, analytic_geometry, average_geometry

    other = AverageGeometry.load(against) if against is not None else None  # before the work, if it cannot be read
    if is_file(name):
        found, written = AverageGeometry.load(name), Path(name)
    else:
        factory, inputs, written = network(name, input_, settings, out, "geometry")
        if analytic:
            if output is not None:
                raise InputError("--analytic takes the only output, or the difference of two: leave --output out")
            found = AverageGeometry.exact(analytic_geometry(factory, inputs, max_memory), inputs)
        else:
            found = average_geometry(
                factory, inputs, networks, probes, seed, probe_std, one_of(output), device, max_memory
            )
        found.save(written)
    D = len(found.matrix)
    facts = [
        repr(found),
        f"trace {found.trace():.4g}; {found.rank()} of {D} eigenvalues above a thousandth of the largest, "
        f"{found.rank(share=0.9)} hold 90 % of the trace.",
    ]
    if other is not None:
        compared = found.correlation(other)
        facts.append(
            f"Correlation with {against}: {compared.value:.3f}; matrices with these spectra in random positions have "
            f"{compared.null:.3f} ± {compared.null_std:.2g}."
        )
    tell(facts, written, found.plot)

"""Fig. 4.4 and 4.5: the anisotropy directions of one network's tangent kernel (NTK-NADs), and learning along them.

Right singular vectors u_i of D = E_x[d2f / dtheta dx] over Gaussian inputs, at the initial weights, are the directions;
D^T D is formed column by column, which gives the whole basis in one pass. Stein's lemma, by which squared singular
values are alignments, needs the derivative in the sense of distributions. The published code, followed here,
differentiates twice and leaves out what the kinks of ReLU contribute: for LeNet alignments come out about half as
large.

Fig. 4.4: tasks x = +-eps u_i + noise orthogonal to u_i. Fig. 4.5: the overlap of two spans of k directions is the mean
squared cosine of their principal angles, k / D for random ones.
"""

from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from biascope import nads
from biascope import nets as registry
from biascope.data import directional
from biascope.ensembles import Initialiser, record
from biascope.geometry.mixed import MixedDerivative
from biascope.linalg import psd_eigh, subspace_overlap
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import curve, errors_over, over_seeds, rank_correlations
from biascope.studies.pictures import direction_picture
from biascope.support import derive, generator, progress
from biascope_papers.nad.anisotropy import concentration
from biascope_papers.ntk import setting as s
from biascope_papers.ntk import training as t
from biascope_papers.ntk.initial import Init, redraw

Side = Annotated[int, "side of the grey input"]
Points = Annotated[int, "Gaussian inputs in the mean of the mixed derivative"]
TWENTY = t.Training(epochs=20)


def initialiser(name: str, image_size: int, init: Init = "torch") -> Initialiser:
    """The networks that are drawn: one output, one input channel."""
    kind, options = s.design(name, (1, image_size, image_size))
    return record(lambda: redraw(registry.build(kind, **options), init))


def first_network(drawn: Initialiser, seed: int, device: str) -> nn.Module:
    """The network whose directions are measured, in eval mode: the first one of a seed."""
    return drawn.draw(seed, 0, 1, torch.device(device)).module(0).eval()


def kernel_directions(
    drawn: Initialiser, image_size: int, seed: int, n_points: int, device: str = "cpu", columns: int = 16
) -> tuple[Tensor, Tensor]:
    """Directions [D, 1, side, side], leading first, and alignments [D] of the first network of a seed.

    `columns` directions are differentiated along at once, which decides how much memory is needed.
    """
    size = image_size**2
    points = torch.randn(n_points, 1, image_size, image_size, generator=generator(seed, "points")).to(device)
    H, network = MixedDerivative(drawn.template, points), drawn.draw(seed, 0, 1, torch.device(device))
    basis = torch.eye(size, device=device)
    gram = torch.cat([H.gram(network, part.T) for part in torch.split(basis, columns)], 1)
    values, vectors = psd_eigh(gram)
    return vectors.T.reshape(size, 1, image_size, image_size).float().cpu(), values.cpu()


def cached_directions(
    run: Run, name: str, image_size: int, n_points: int, seed: int, init: Init
) -> tuple[Tensor, Tensor]:
    """`kernel_directions`, kept in the run's folder."""

    def compute() -> dict[str, Any]:
        own = derive(run.seed, "init", name, seed)
        found = kernel_directions(initialiser(name, image_size, init), image_size, own, n_points, run.device)
        return {"directions": found[0], "alignments": found[1]}

    kept: dict[str, Any] = run.cached(f"directions {name} {image_size} {n_points} {seed}", compute)
    return kept["directions"], kept["alignments"]


@study(
    "ntk/fig4.4",
    sizes={
        "smoke": {"image_size": 8, "n": 512, "indices": "0,40", "epochs": 12, "n_points": 16, "batch": 32,
                  **s.PUBLISHED},
        "laptop": s.PUBLISHED,
        "paper": {"nets": "lenet,resnet18", "image_size": 32, "n": 10_000, "indices": "0,5,10,20,50,100,200,400,800",
                  "epochs": 100, **s.PUBLISHED},
    },
)  # fmt: skip
def fig4_4(
    run: Run,
    *,
    nets: s.Nets = ("lenet",),
    image_size: Side = 16,
    indices: Annotated[tuple[int, ...], "directions to learn; 0 has the largest alignment"] = (0, 5, 20, 60, 150),
    n: Annotated[int, "training examples, and as many for testing"] = 2000,
    eps: Annotated[float, "distance of the classes from 0 along the direction"] = 1.0,
    sigma: Annotated[float, "noise orthogonal to the direction"] = 1.0,
    n_points: Points = 64,
    training: t.Training = TWENTY,
) -> StudyResult:
    """Accuracy of networks and linearised networks on tasks along the kernel's own directions."""
    numbers: dict[str, Estimate] = {}
    charts, findings, seeds = list[Chart](), list[str](), training.seeds

    def learn(name: str, direction: Tensor, seed: int, kind: str, index: int) -> dict[str, Any]:
        net = first_network(
            initialiser(name, image_size, training.init), derive(run.seed, "init", name, seed), run.device
        )
        # the same noise for every direction and both models: they differ in the direction alone
        both = directional(direction, 2 * n, eps=eps, sigma=sigma, seed=derive(run.seed, "data", seed))
        train, test = both.to(run.device).train_test(n)
        model = training.copy_of(net, kind)
        losses = t.fit(model, train.x, train.y, training.recipe(n), derive(run.seed, "order", seed))
        accuracy = t.evaluate(model, test.x, test.y)[1]
        run.log(net=name, kind=kind, index=index, seed=seed, accuracy=accuracy, loss=float(losses[-10:].mean()))
        return {"accuracy": accuracy, "losses": losses}

    for name in progress(nets, "networks"):
        spectra, tables = [], dict[str, list[list[float]]]({kind: [] for kind in t.KINDS})
        ends: dict[str, list[list[float]]] = {kind: [] for kind in t.KINDS}
        for seed in range(seeds):
            directions, alignments = cached_directions(run, name, image_size, n_points, seed, training.init)
            spectra.append(alignments / alignments[0])
            for kind in t.KINDS:
                found: list[dict[str, Any]] = [
                    run.cached(f"{name} {kind} {i} {seed}", partial(learn, name, directions[i], seed, kind, i))
                    for i in progress(indices, f"{name}, {t.KINDS[kind]}", leave=False)
                ]
                tables[kind].append([float(row["accuracy"]) for row in found])
                each = t.per_epoch(n, training.batch)
                ends[kind].append([float(row["losses"][-each:].mean()) for row in found])
        f, lin = (torch.tensor(rows, dtype=torch.float64) for rows in tables.values())
        advantage, spectrum = over_seeds(f - lin), torch.stack(spectra).mean(0)
        losses = {kind: torch.tensor(rows, dtype=torch.float64) for kind, rows in ends.items()}  # [seeds, indices]
        falls = {kind: rank_correlations(indices, rows) for kind, rows in tables.items()}
        tenth = float(spectrum[min(9, len(spectrum) - 1)])
        own = {"accuracy of f minus f_lin": advantage}
        own |= {f"rank correlation of index and accuracy of {kind}": value for kind, value in falls.items()}
        own["alignment of the 10th direction relative to the first"] = Estimate(tenth)
        own["accuracy of f on the first direction"] = Estimate(float(f[:, 0].mean()))
        own["decay of the alignment from the first to the last direction"] = Estimate.of(
            [float(each[indices[0]] - each[indices[-1]]) for each in spectra]
        )
        for kind, rows in losses.items():
            own[f"largest last training loss of {kind}"] = Estimate(float(rows.mean(0).max()))
            own[f"last training loss of {kind} on the first direction"] = Estimate(float(rows[:, 0].mean()))
        numbers |= {f"{key}, {name}": value for key, value in own.items()}
        findings.append(
            f"{s.title(name)}: f minus f_lin {advantage}, rank correlations {falls['f']} (f), {falls['lin']} (f_lin)"
        )
        places = [i + 1 for i in indices]
        series = [curve(t.KINDS[kind], places, rows) for kind, rows in tables.items()]
        series.append(Series.of("alignment, relative", places, spectrum[list(indices)], style="dashed"))
        charts.append(
            Chart(
                f"accuracy-{name}",
                f"Learning along the directions of the kernel, {s.title(name)}",
                "direction",
                "test accuracy; alignment relative to the first",
                tuple(series),
                alt="Test accuracy of the network and of its linearisation against the index of the direction; both "
                "fall.",
                log_x=True,
            )
        )
    return StudyResult(
        measured=f"{'; '.join(findings)}. {n} examples of side {image_size}, {training.epochs:g} epochs; "
        f"{errors_over(seeds, len(indices), 'directions')}.",
        numbers=numbers,
        figures=tuple(charts),
    )


@study(
    "ntk/fig4.5",
    sizes={
        "smoke": {"nets": "lenet", "image_size": 8, "networks": 64, "n_points": 16, "seeds": 2, "init": "lecun"},
        "laptop": {"init": "lecun"},
        "paper": {"nets": "lenet,resnet18", "image_size": 32, "networks": 10_000, "seeds": 3, "init": "lecun"},
    },
)
def fig4_5(
    run: Run,
    *,
    nets: s.Nets = ("lenet",),
    image_size: Side = 16,
    networks: Annotated[int, "networks for the directions of the architecture"] = 1000,
    n_points: Points = 64,
    k: Annotated[int, "leading directions that are compared"] = 10,
    seeds: Annotated[int, "single networks"] = 3,
    init: Init = "torch",
) -> StudyResult:
    """Directions of single networks' kernels, in pixels and Fourier space, and against the architecture's."""
    shape, D = (1, image_size, image_size), image_size**2
    numbers: dict[str, Estimate] = {}
    charts, findings = list[Chart](), list[str]()

    def measure(name: str) -> dict[str, Any]:
        seed, drawn = derive(run.seed, "architecture", name), initialiser(name, image_size, init)
        x = torch.randn(shape, generator=generator(seed, "x"))
        found = nads(drawn, shape, networks, device=run.device, seed=seed, head="marginal", x=x)
        return {"directions": found.directions[:64]}

    for name in progress(nets, "networks"):
        kept = run.cached(f"architecture {name}", partial(measure, name))
        reference = torch.as_tensor(kept["directions"]).flatten(1).double()
        spectra, overlaps, sharp = [], [], []
        for seed in range(seeds):
            directions, alignments = cached_directions(run, name, image_size, n_points, seed, init)
            overlaps.append(subspace_overlap(directions[:k].flatten(1).double().T, reference[:k].T))
            sharp.append(concentration(directions[:3, 0]))
            spectra.append(alignments / alignments[0])
            if seed == 0:
                subject, titles = f"First NTK-NADs of {name}", [str(i + 1) for i in range(k)]
                direction_picture(run, f"directions-{name}", subject, directions[:k, 0], titles, k)
        overlap, energy = Estimate.of(overlaps), Estimate.of(sharp)
        numbers[f"overlap of the first {k} with the architecture's, {name}"] = overlap
        margin = Estimate(overlap.value - 3 * k / D, overlap.standard_error, overlap.n)
        numbers[f"overlap above three times that of random directions, {name}"] = margin
        numbers[f"energy in the strongest 5 % of frequencies, {name}"] = energy
        findings.append(f"{s.title(name)}: overlap {overlap} (random: {k / D:.3f}), energy {energy}")
        charts.append(
            Chart(
                f"alignments-{name}",
                f"Alignment of the kernel with linear functions along its directions, {s.title(name)}",
                "direction",
                "alignment relative to the first",
                (curve(f"mean over {seeds} networks", range(1, D), torch.stack(spectra)[:, : D - 1]),),
                alt="Alignments fall over the index of the direction.",
                log_x=True,
                log_y=True,
            )
        )
    return StudyResult(
        measured=f"{'; '.join(findings)}. Inputs of side {image_size}, {seeds} networks, {n_points} points each.",
        numbers=numbers,
        figures=tuple(charts),
    )

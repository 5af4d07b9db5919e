"""Tasks made from the eigenfunctions of a network's own tangent kernel, and the two models that learn them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from biascope.kernels import Spectrum, eigenfunction_targets, ntk
from biascope.seeds import derive
from biascope.studies.function_space.setting import images, network
from biascope.studies.function_space.training import Recipe, displacement, evaluate, fit, iterations_to, per_epoch
from biascope.studies.runs import Run, Value

LEVEL = 0.01  # the training loss that counts as learnt


@dataclass(frozen=True)
class Benchmark:
    """A network at its initial weights, its inputs, the leading eigenpairs of its kernel on them, and the split."""

    net: nn.Module
    x: Tensor
    spectrum: Spectrum
    n_train: int
    held_out: Tensor | None  # [n_test, k]: predictions of kernel regression for the eigenfunctions, where asked for

    def labels(self, index: int) -> Tensor:
        """sign(phi_index) as classes 0 and 1, [n]."""
        return (eigenfunction_targets(self.spectrum, index) > 0).long().to(self.x.device)

    def task(self, index: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Training and validation inputs and labels."""
        y, cut = self.labels(index), self.n_train
        return (self.x[:cut], y[:cut]), (self.x[cut:], y[cut:])


def benchmark(
    run: Run, dataset: str, name: str, n: int, top: int, seed: int = 0, ridge: float | None = None
) -> Benchmark:
    """The benchmark of a network on n images (training and test images together), with `top` eigenfunctions.

    The first five sixths are for training, as 50,000 of 60,000. With `ridge`, kernel regression with the initial kernel
    (ridge times the largest eigenvalue, relative) predicts the eigenfunctions on the rest: a check without SGD.
    """
    found = images(dataset, None, n, derive(run.seed, "images"), run.device)
    net = network(name, found.x.shape[1:], derive(run.seed, "init", name, seed), run.device)
    size, cut = len(found.x), round(len(found.x) * 5 / 6)

    def solve() -> dict[str, Value]:
        K = ntk(net, found.x, outputs=0)
        pairs = K.eigh(min(top, size))
        extra: dict[str, Value] = {}
        if ridge is not None:
            M, phi = K.matrix(), pairs.vectors.to(K.values.dtype)
            A = M[:cut, :cut].clone()
            A.diagonal().add_(ridge * float(pairs.values[0]))
            extra["held_out"] = M[cut:, :cut] @ torch.cholesky_solve(phi[:cut], torch.linalg.cholesky(A))
        return {"values": pairs.values, "vectors": pairs.vectors.float(), "residuals": pairs.residuals, **extra}

    kept: dict[str, Any] = run.cached(f"eigenfunctions {name} {dataset} {size} {top} {seed}", solve)
    vectors = kept["vectors"].to(run.device)
    values, residuals = (kept[name].to(run.device) for name in ("values", "residuals"))
    return Benchmark(net, found.x, Spectrum(values, vectors, residuals), cut, kept.get("held_out"))


def learn(
    model: nn.Module, start: nn.Module, bench: Benchmark, index: int, recipe: Recipe, seed: int
) -> dict[str, Any]:
    """Train `model` on an eigenfunction: validation accuracy, iterations to the level, distances, and the losses."""
    (x, y), (test_x, test_y) = bench.task(index)
    losses = fit(model, x, y, recipe, seed)
    distance, turn = displacement(model, start)
    return {
        "accuracy": evaluate(model, test_x, test_y)[1],
        "iterations": min(iterations_to(losses, LEVEL, per_epoch(len(x), recipe.batch)), float(len(losses))),
        "distance": distance,
        "turn": turn,
        "loss": float(losses[-per_epoch(len(x), recipe.batch) :].mean()),
        "losses": losses,
    }

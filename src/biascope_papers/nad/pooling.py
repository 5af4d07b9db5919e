"""Fig. 4: how much of the label survives average pooling (a), and how fast a model with pooling learns it (b).

(a) is exact, beside the paper's closed form. In (b) the best accuracy is the same for every frequency l that the filter
lets through, so what depends on these is optimisation: zeta(l) = eps^2 m^2[l] / (sigma^2 max m^2) (the Hessians behind
it miss a factor 1/S in the paper, which cancels). Where m[l] = 0 nothing can be learnt.
"""

from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, grad_and_value, vmap

from biascope import InputError, nets
from biascope.geometry.pooling import box_prefilter, curvature_ratio, pooling_bayes_accuracy, transfer
from biascope.studies import Chart, Estimate, Run, Series, StudyResult, study
from biascope.studies.estimates import Array, curve, jackknife_error, spearman
from biascope.support import derive, generator, progress

Length = Annotated[int, "signal length"]
Factor = Annotated[int, "pooling factor"]


@study("nad/fig4a", sizes={"smoke": {"D": 64}, "laptop": {}, "paper": {}})
def fig4a(
    run: Run,
    *,
    D: Length = 128,
    S: Factor = 4,
    eps: Annotated[float, "distance of a class mean from the origin (not in the paper)"] = 1.0,
    sigma: Annotated[float, "noise level (not in the paper)"] = 3.0,
) -> StudyResult:
    """Bayes accuracy after average pooling, exact and by the paper's closed form."""
    box, frequencies = box_prefilter(S, D), range(D // 2 + 1)
    ordinary = np.array([(2 * k) % (D // S) != 0 for k in frequencies])
    if D % S or ordinary.sum() < 3:
        raise InputError(
            f"D = {D}, S = {S}: S must divide D, and leave at least three frequencies that do not alias onto their own "
            f"conjugates (here {ordinary.sum()}); a longer signal or a smaller pooling factor has more"
        )

    def curves() -> dict[str, Any]:
        return {
            variant: torch.tensor(
                [pooling_bayes_accuracy(box, S, k, eps, sigma, variant) for k in frequencies], dtype=torch.float64
            )
            for variant in ("exact", "real", "complex", "printed")
        }

    accuracy = {name: np.asarray(values, dtype=float) for name, values in run.cached("curves", curves).items()}
    exact, gain = accuracy["exact"], np.abs(transfer(box))[: D // 2 + 1]
    order = spearman(gain[ordinary], exact[ordinary])
    wrong = {name: float(np.abs(accuracy[name] - exact)[ordinary].max()) for name in ("real", "printed")}
    run.log(spearman=order, closed_form_error=wrong["real"], printed_error=wrong["printed"])
    chart = Chart(
        "bayes-accuracy",
        f"Bayes accuracy after average pooling (D = {D}, S = {S})",
        "frequency l of the discriminative direction",
        "best possible accuracy",
        (
            Series.of("exact (any classifier)", frequencies, exact),
            Series.of("Theorem 1, corrected, real signals", frequencies, accuracy["real"], style="points"),
            Series.of("Theorem 1, as printed", frequencies, accuracy["printed"], style="dashed"),
        ),
        alt=f"Accuracy starts at 1 for frequency 0, falls to one half at frequency {D // S} and stays near one half.",
        caption=f"Box filter, eps = {eps:g}, sigma = {sigma:g}. The paper does not give eps and sigma.",
    )
    return StudyResult(
        measured=f"Rank correlation of the accuracy with |m^| is {order:.3f}. The corrected closed form is exact to "
        f"{wrong['real']:.0e}; the printed one is off by up to {wrong['printed']:.3f}.",
        numbers={
            "Spearman(|m^|, accuracy)": Estimate(order),
            "accuracy at DC": Estimate(float(exact[0])),
            "largest error of the corrected closed form": Estimate(wrong["real"]),
            "largest error of the printed formula": Estimate(wrong["printed"]),
        },
        figures=(chart,),
    )


@study(
    "nad/fig4b",
    sizes={
        "smoke": {"D": 64, "steps": 200, "seeds": 16, "frequencies": 9},
        "laptop": {},
        "paper": {"steps": 2000, "seeds": 50},
    },
)
def fig4b(
    run: Run,
    *,
    D: Length = 128,
    S: Factor = 4,
    eps: Annotated[float, "size of the signal (not in the paper)"] = 1.0,
    sigma: Annotated[float, "noise level (not in the paper)"] = 0.3,
    lr: Annotated[float, "learning rate (not in the paper)"] = 0.05,
    batch: Annotated[int, "fresh samples per step"] = 64,
    steps: Annotated[int, "steps of gradient descent"] = 600,
    seeds: Annotated[int, "independent initialisations, for the error bars"] = 8,
    frequencies: Annotated[int, "how many frequencies between 0 and D/2"] = 17,
) -> StudyResult:
    """Training loss of the deep linear pooling model for signals at different frequencies."""
    at = sorted({round(value) for value in np.linspace(0, D // 2, frequencies)})
    zeta = curvature_ratio(nets.LinearPooling(in_features=D, stride=S).prefilter.numpy(), eps, sigma)[at]
    train = partial(_train, run, at, D, S, eps, sigma, lr, batch, steps)
    found = run.cached_each("seed", progress(range(seeds), "seeds"), train)
    losses = np.stack([np.asarray(each["losses"]) for each in found])  # [seeds, steps, l]
    area = losses.mean(1)  # mean training loss over the whole run: small when learning is fast
    passed = zeta > 1e-9 * zeta.max()
    seen, judged = zeta[passed], area[:, passed]
    each_seed = [spearman(seen, row) for row in judged]
    for i, value in enumerate(each_seed):
        run.log(seed=i, spearman=value)
    order, single = _averaged(seen, judged), Estimate.of(each_seed)
    gap = Estimate.of(judged[:, seen.argmin()] - judged[:, seen.argmax()])
    zeros = ", ".join(str(frequency) for frequency, there in zip(at, passed) if not there)
    left_out = f" Left out, since the filter is zero there and nothing can be learnt: l = {zeros}." if zeros else ""
    shown = [int(i) for i in np.linspace(0, len(at) - 1, min(5, len(at)))]
    window = max(1, steps // 60)
    smooth = losses[:, : steps // window * window].reshape(seeds, -1, window, len(at)).mean(2)
    ticks = (np.arange(smooth.shape[1]) + 0.5) * window
    charts = (
        Chart(
            "training-loss",
            f"Training loss of the deep linear pooling model (D = {D}, S = {S})",
            "step",
            "training loss",
            tuple(curve(f"l = {at[i]}, zeta = {zeta[i]:.2g}", ticks, smooth[:, :, i]) for i in shown),
            alt="Loss curves over steps: those of a large zeta fall first, those where the filter is zero stay up.",
            caption=f"Mean over {seeds} initialisations, band: one standard error. "
            f"eps = {eps:g}, sigma = {sigma:g}, lr = {lr:g}.",
        ),
        Chart(
            "loss-by-zeta",
            "Mean training loss against the curvature ratio",
            "zeta(l)",
            "mean loss over training",
            (curve("one frequency each", zeta, area, "points"),),
            alt="Mean training loss decreases as zeta grows.",
        ),
    )
    return StudyResult(
        measured=f"Spearman correlation of zeta(l) with the training loss averaged over seeds is {order}.{left_out}",
        numbers={
            "Spearman(zeta, loss averaged over seeds)": order,
            "Spearman(zeta, loss), single seeds": single,
            "loss at the smallest zeta minus at the largest": gap,
        },
        figures=charts,
    )


def _averaged(zeta: Array, area: Array) -> Estimate:
    """Spearman correlation with the mean over seeds; its standard error by leaving one seed out at a time."""
    n = len(area)
    left_out = [spearman(zeta, np.delete(area, i, 0).mean(0)) for i in range(n)] if n > 2 else []
    return Estimate(spearman(zeta, area.mean(0)), jackknife_error(left_out) if left_out else None, n)


def _train(
    run: Run, at: list[int], D: int, S: int, eps: float, sigma: float, lr: float, batch: int, steps: int, i: int
) -> dict[str, Any]:
    """One initialisation, every frequency at once (vmapped), the same noise for all: losses [steps, frequencies]."""
    net = nets.build("linear-pooling", seed=derive(run.seed, "init", i), in_features=D, stride=S).to(run.device)
    buffers = dict(net.named_buffers())
    parameters = {name: p.detach().expand(len(at), *p.shape).clone() for name, p in net.named_parameters()}
    rng = generator(run.seed, "data", i, device=run.device)
    frequency = torch.eye(D, device=run.device)[at]

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        prediction: Tensor = functional_call(net, (parameters, buffers), (x,))
        return (y - prediction.squeeze(1)).square().mean()

    step = vmap(grad_and_value(loss), in_dims=(0, 0, None))
    history = torch.empty(steps, len(at))
    for t in range(steps):
        y = torch.randint(0, 2, (batch,), generator=rng, device=run.device) * 2.0 - 1.0
        noise = sigma * torch.randn(batch, D, generator=rng, device=run.device)
        x = eps * y[:, None] * frequency[:, None, :] + noise  # [frequencies, batch, D]
        gradient, value = step(parameters, x, y)
        parameters = {name: p - lr * gradient[name] for name, p in parameters.items()}
        history[t] = value.detach().cpu()
    return {"losses": history}

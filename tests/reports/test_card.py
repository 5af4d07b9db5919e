"""The bias card: panels checked against closed forms, and bad input answered in words."""

import html
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from biascope.reports import card as card_module
from biascope.reports import make_card, make_compare
from biascope.reports.card import card_page
from biascope.reports.panels import PANELS, anatomy, base, directional, input_geometry, labels, regime, tangent_kernel
from biascope.reports.panels.anatomy import layers
from biascope.reports.panels.base import Panel, Subject, make_subject
from biascope.reports.panels.budget import SHARES, Budget
from biascope.reports.panels.examples import Examples, load_examples
from biascope.reports.panels.initialisations import Spread
from biascope.reports.panels.input_geometry import (
    by_autograd,
    by_differences,
    gradients,
    held_out_response,
    input_spectrum,
    mean_frequency,
    plan,
)
from biascope.reports.panels.pace import Pace
from biascope.support.errors import InputError, UnsupportedError
from biascope.support.seeds import derive

Check = Callable[[str], None]

SCRIPT = """
import functools
import torch
from torch import nn
def good(): return nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
def pair():
    class Pair(nn.Module):
        def forward(self, x): return x, x
    return Pair()
def raises(): raise RuntimeError("no weights")
def constant():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(1))
        def forward(self, x): return self.w * x.flatten(1).sum(1, keepdim=True) + self.b
    return Constant()
@functools.cache
def trained(): return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
def loaded():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    network.load_state_dict(trained().state_dict())
    return network
def scalar():
    class Scalar(nn.Module):
        def forward(self, x): return x.sum()
    return Scalar()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "models.py"
    path.write_text(SCRIPT)
    return str(path)


def subject(network: nn.Module, shape: tuple[int, ...], **more: object) -> Subject:
    return Subject("test", lambda _: network, shape, **more)  # type: ignore[arg-type]


def test_a_card_of_a_users_own_network(script: str, tmp_path: Path, check_page: Check) -> None:
    before = torch.get_rng_state()
    card = make_card(f"{script}:good", (3, 2, 2), tmp_path / "c.html", networks=40)
    assert torch.equal(torch.get_rng_state(), before)
    page = card.path.read_text()
    check_page(page)
    assert [panel.title for panel in card.panels if panel.skipped] == ["Alignment with the labels"]  # no --data
    assert "39" in page  # parameters
    assert page.count("What this means") == 5
    assert page.count("Download ") == 7
    assert 'type="range"' in page
    shown = card._repr_html_()
    check_page(shown)
    assert all(html.escape(panel.meaning) in shown for panel in card.panels)


def test_a_card_says_what_it_is_in_one_line(script: str, tmp_path: Path) -> None:
    card = make_card(f"{script}:good", (3, 2, 2), tmp_path / "c.html", networks=8)
    assert len(repr(card)) < 400 + len(script) + len(str(tmp_path))
    assert all(word in repr(card) for word in (":good", "c.html", f"{len(card.panels)} panels", card.panels[0].title))
    assert len(repr(card.panels[0])) < 2000


def test_only_the_same_card_replaces_a_card(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check_page: Check
) -> None:
    monkeypatch.chdir(tmp_path)

    def made(**options: Any) -> str:
        return make_card(f"{script}:good", (3, 2, 2), networks=4, panels=PANELS[:1], **options).path.stem

    name = made()
    first = Path("runs") / f"{name}.html"
    check_page(first.read_text())
    before = first.read_text()
    assert made(seed=1) == f"{name}-2"
    assert first.read_text() == before
    assert made(seed=1) == f"{name}-2"  # again
    assert made() == name
    assert made(seed=2) == f"{name}-3"
    assert made(seed=3, out=first) == name  # asked for by name


def test_a_card_is_the_same_every_time(script: str, tmp_path: Path) -> None:
    one, two = (make_card(f"{script}:good", (3, 2, 2), tmp_path / n, networks=8).panels for n in ("a", "b"))
    assert one == two


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("good", None, r"say what one input looks like, for example input_shape=\(3, 32, 32\)"),
        ("good", (3, 4, 4), "does not take inputs of shape 3,4,4"),
        ("pair", (3, 2, 2), "has no parameters"),
        ("raises", (3, 2, 2), "RuntimeError: no weights"),
        ("scalar", (3, 2, 2), "the first axis must stay"),
        ("goood", (3, 2, 2), "good"),
    ],
)
def test_bad_networks_are_answered_in_words(script: str, name: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_card(f"{script}:{name}", shape, networks=4)


@pytest.mark.parametrize("name", ["trained", "loaded"])
def test_a_function_that_loads_weights_is_one_network(script: str, name: str) -> None:
    """Its weights are the given ones; initialisations are drawn by its layers."""
    made = make_subject(f"{script}:{name}", (3, 2, 2))
    assert made.trained is not None
    assert "Given as one network" in made.notes[-1]
    x = made.inputs(3)
    assert not torch.equal(made.trained(x), made.network(x))
    assert not torch.equal(made.network(x), made.build(1)(x))


def test_one_network_that_cannot_be_drawn_again_shows_what_it_can(
    script: str, tmp_path: Path, check_page: Check
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(12, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.flatten(1) @ self.w

    net, x, y = Own(), torch.randn(32, 3, 2, 2), torch.arange(32) % 3
    card = make_card(net, out=tmp_path / "c.html", networks=4, data=(x, y))
    assert "32 given inputs" in card.path.read_text()
    check_page(card.path.read_text())
    shown = [panel.title for panel in card.panels if not panel.skipped]
    assert shown == ["Anatomy", "Tangent kernel", "Alignment with the labels", "Linear or not"]
    assert "no reset_parameters draws w again" in card.path.read_text()
    assert "given weights" in card.panels[3].meaning
    with pytest.raises(InputError, match="pass a function that builds a new network"):
        make_compare(["logreg", net], (3, 2, 2), tmp_path / "c.html", networks=4)


def test_a_panel_that_cannot_be_made_says_why(script: str, tmp_path: Path, check_page: Check) -> None:
    card = make_card(f"{script}:constant", (3, 2, 2), tmp_path / "c.html", networks=4)
    assert card.panels[1].skipped
    assert "does not depend on the input" in card.panels[1].meaning
    check_page(card.path.read_text())


def test_sequences_have_entries_and_no_frequencies(tmp_path: Path, check_page: Check) -> None:
    """What lies beside what among features means nothing; images keep their map of frequencies."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(30, 1))

    for shape, words, other in (((6, 5), "entry by entry", "in pixel"), ((1, 6, 5), "in pixel", "entry by entry")):
        card = make_card(build, shape, tmp_path / "c.html", networks=8, panels=[input_geometry.panel])
        page = card.path.read_text()
        check_page(page)
        assert words in card.panels[0].read
        assert f"direction 1{', ' if len(shape) == 2 else ' '}{words}" in page
        assert other not in page
        assert ("Fourier" in page) == (len(shape) == 3)


def test_registry_network_at_another_shape() -> None:
    made = make_subject("lenet", (3, 28, 28))
    assert made.build(0)(made.inputs(2)).shape == (2, 1)
    assert make_subject("lenet").input_shape == (1, 32, 32)


def test_layers_are_counted_once_and_hooks_are_gone() -> None:
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    rows = layers(network, torch.zeros(2, 1, 4, 4))
    assert rows == [
        ("0", "Conv2d", "2 × 2 × 2", 20),
        ("1", "ReLU", "2 × 2 × 2", 0),
        ("2", "Flatten", "8", 0),
        ("3", "Linear", "3", 27),
    ]
    assert not any(module._forward_hooks for module in network.modules())


class Half(nn.Module):
    """Uses one of two layers of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def test_parameters_that_play_no_part_are_said() -> None:
    assert anatomy.unused(Half(), torch.ones(2, 4)) == 5
    said = anatomy.panel(subject(Half(), (4,))).meaning
    assert said == "50% of the parameters sit in used (Linear). 50% of the parameters play no part for these inputs."


def test_derivatives_of_a_linear_network_are_its_weights() -> None:
    """By both methods, for the same networks; and the sample does not depend on how it is cut into pieces."""
    made = make_subject("logreg", (1, 4, 4), networks=40)  # more than one piece
    drawn = made.initialiser().draw(derive(0, "card networks"), 0, 40)
    (weight,) = (value[:, 0] for value in drawn.params.values() if value.dim() == 3)
    for method in (by_autograd, by_differences):
        pieces = list(method(made, 40))
        assert [len(piece) for piece in pieces] == [32, 8]
        assert torch.allclose(torch.cat(pieces), weight, atol=1e-5)


def test_spectrum_is_the_eigenvalues_of_the_covariance() -> None:
    sample = torch.randn(50, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * torch.arange(1, 9)
    oracle = np.linalg.eigvalsh((sample.T @ sample / 50).numpy())[::-1]
    spectrum = input_spectrum(sample)
    assert np.allclose(spectrum.values, oracle / oracle.mean(), atol=1e-12)
    assert spectrum.band == pytest.approx(((1 - math.sqrt(0.16)) ** 2, (1 + math.sqrt(0.16)) ** 2))
    with pytest.raises(InputError, match="does not depend on the input"):
        input_spectrum(torch.zeros(3, 2))


def test_logistic_regression_is_isotropic_and_the_band_says_so() -> None:
    sample, method = gradients(make_subject("logreg", (1, 8, 8), networks=400))
    spectrum = input_spectrum(sample)
    assert method == "finite differences"
    assert spectrum.values.max() < 1.1 * spectrum.band[1]
    assert spectrum.values.min() > 0.9 * spectrum.band[0]


def test_lenet_prefers_low_frequencies() -> None:
    made = make_subject("lenet-avg", networks=24)
    spectrum = input_spectrum(gradients(made)[0])
    mine, white = mean_frequency(made, spectrum.vectors[:4])
    assert white == pytest.approx(0.383, abs=1e-3)
    assert mine < 0.5 * white


def test_frequency_of_a_pure_wave() -> None:
    wave = np.cos(2 * np.pi * 3 * np.arange(16) / 16)[:, None] * np.ones((1, 16))
    mine, _ = mean_frequency(make_subject("logreg", (1, 16, 16)), wave.reshape(1, -1))
    assert mine == pytest.approx(3 / 16)


def test_the_method_depends_on_the_network_and_the_number_on_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(input_geometry, "timed", lambda work, device: 1e-3)  # a draw, whatever else the machine does
    for name, method in (("lenet", "finite differences"), ("resnet18", "autograd")):
        made = make_subject(name)
        made._shared["pace"] = Pace(1e-5, 0.02, 1.0)
        assert plan(made)[0] == method
        assert plan(made)[1] >= 256
        made._shared["pace"] = Pace(1.0, 1.0, 1.0)
        assert plan(made) == (method, {"lenet": 8, "resnet18": 16}[name])
    assert plan(make_subject("lenet", networks=7))[1] == 7


def test_too_small_a_sample_says_so() -> None:
    """Eight gradients of very different lengths: eigenvalues leave the band, yet the halves share no direction."""
    rng = torch.Generator().manual_seed(0)
    sample = torch.randn(8, 64, dtype=torch.float64, generator=rng) * torch.tensor([9.0, 8, 1, 1, 1, 1, 1, 1])[:, None]
    made = subject(nn.Identity(), (1, 8, 8), _shared={"gradients": (sample, "autograd")})
    assert input_spectrum(sample).values[0] > input_spectrum(sample).band[1]
    assert "No preferred direction can be told from 8 networks" in input_geometry.panel(made).meaning
    ones = torch.randn(8, 64, dtype=torch.float64, generator=rng) + 5
    made = subject(nn.Identity(), (1, 8, 8), _shared={"gradients": (ones, "autograd")})
    assert "1 of 64 directions stand above" in input_geometry.panel(made).meaning


def test_names_are_escaped_on_the_page() -> None:
    made = Subject("<i>net</i>", nn.Identity, (2,))  # type: ignore[arg-type]
    page = card_page(made, [Panel("T", "read <b>", "mean <b>")], 1.0)
    assert "<i>net" not in page
    assert "read &lt;b&gt;" in page


def test_held_out_response_has_no_bias_on_isotropic_noise() -> None:
    """On noise the top eigenvalue is far above 1 (about 4 here); the held-out response is 1 within its error."""
    sample = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    response = held_out_response(sample)
    assert input_spectrum(sample).values[0] > 3
    assert response.n == 32
    assert response.standard_error is not None
    assert abs(response.value - 1) < 3 * response.standard_error


# ---- weights and data ----


@pytest.fixture
def trained(script: str, tmp_path: Path) -> Path:
    torch.save({"state_dict": {"1.weight": torch.ones(3, 12), "1.bias": torch.zeros(3)}}, tmp_path / "w.pt")
    return tmp_path / "w.pt"


def test_a_file_sorted_by_class_gives_all_classes(tmp_path: Path) -> None:
    y = torch.arange(3).repeat_interleave(1000)
    torch.save({"x": y[:, None].float().expand(-1, 4), "y": y}, tmp_path / "sorted.pt")
    found = load_examples(str(tmp_path / "sorted.pt"))
    assert len(found.x) == len(found.y) == 512
    assert found.y.bincount().min() > 100
    assert torch.equal(found.x[:, 0].long(), found.y)


def test_weights_and_data_are_used(script: str, trained: Path, tmp_path: Path, check_page: Check) -> None:
    x = torch.randn(40, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=(x[:, 0, 0, 0] > 0).long().numpy())
    card = make_card(
        f"{script}:good", out=tmp_path / "c.html", networks=16, weights=trained, data=str(tmp_path / "d.npz")
    )
    assert not any(panel.skipped for panel in card.panels)
    page = card.path.read_text()
    check_page(page)
    assert "Compared with the weights of w.pt. Data: d.npz." in page
    assert "Alignment, given weights" in page


def test_a_linear_network_is_linear_and_its_alignment_is_the_closed_form() -> None:
    """f = w x: the residual is rounding, and the kernel of one linear output without bias is X X^T."""
    network = nn.Linear(5, 1, bias=False)
    x = torch.randn(30, 5, generator=torch.Generator().manual_seed(3))
    y = (x[:, 0] > 0).long()
    made = Subject("linear", lambda _: network, (5,), data=Examples("xy", x, y))
    seen, _ = regime.train(made, x, y)
    assert max(one.residual for one in seen) < 1e-4
    assert seen[-1].loss < seen[0].loss
    assert math.isnan(seen[-1].signs)  # there is no activation
    c = (x - x.mean(0)).double()
    t = (2.0 * y - 1.0).double()
    t = t - t.mean()
    want = float(t @ (c @ c.T) @ t / (torch.linalg.norm(c @ c.T) * t.square().sum()))
    assert labels.measure(made, network).value == pytest.approx(want, rel=1e-4)


def test_complexity_is_the_sum_of_steps_times_feature_norms() -> None:
    """For a linear network ||Phi|| is constant, so C = ||X||_F times the length of the path."""
    network = nn.Linear(3, 1, bias=False)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    made = Subject("linear", lambda _: network, (3,), data=Examples("xy", x, y))
    seen, lr = regime.train(made, x, y)
    w, length = network.weight.detach().clone().double()[0], 0.0
    for _ in range(seen[-1].step):
        p = torch.sigmoid(x.double() @ w)
        step = lr * (x.double().T @ (p - y.double())) / len(x)
        w, length = w - step, length + float(step.norm())
    assert seen[-1].complexity == pytest.approx(length * float(x.norm()), rel=1e-4)


def test_complexity_of_many_outputs_counts_the_first_ten() -> None:
    """k outputs of a linear network: ||Phi||_F = sqrt(k) ||X||_F; the first step is lr times the gradient."""
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    y = (x.sum(1) > 0).long()
    network = nn.Linear(3, 50, bias=False)
    made = Subject("linear", lambda _: network, (3,), data=Examples("xy", x, y))
    seen, lr = regime.train(made, x, y)
    loss = nn.functional.cross_entropy(network(x), y)
    step = lr * float(torch.autograd.grad(loss, network.weight)[0].norm())
    assert seen[1].step == 1
    assert seen[1].complexity == pytest.approx(step * math.sqrt(10) * float(x.norm()), rel=1e-4)
    assert regime.measured_on(made, 20) == "on 20 examples and 10 of 50 outputs"
    few = Subject("linear", lambda _: nn.Linear(3, 10), (3,), data=Examples("xy", x, y))
    assert regime.measured_on(few, 64) == "on 64 examples"


def test_the_steps_have_as_many_examples_as_the_time_allows() -> None:
    made = make_subject("lenet")
    seconds = Budget(30.0 / SHARES["Linear or not"], lambda: 1e9)  # its share and nothing else: 30 seconds
    made._shared.update({"feature norm": 0.0, "budget": seconds})
    for train, want in ((1e-5, (128, 64)), (0.005, (64, 16)), (0.013, (16, 16))):
        made._shared["pace"] = Pace(train, train, train)
        assert regime.sizes(made) == want
    made._shared["feature norm"] = 0.03  # a layer without a rule: norms take long, steps do not
    made._shared["pace"] = Pace(1e-5, 1e-5, 1e-5)
    assert regime.sizes(made) == (128, 16)
    made._shared["pace"] = Pace(1.0, 1.0, 1.0)
    with pytest.raises(UnsupportedError, match=r"would take about 12 minutes on this CPU; give the card \d+ minutes"):
        regime.sizes(made)
    many = make_subject("lenet", options={"outputs": 10})
    many._shared.update({"pace": Pace(0.004, 0.004, 0.004), "feature norm": 0.0, "budget": seconds})
    assert regime.sizes(many) == (64, 4)  # the complexity of ten outputs costs ten times as much


def test_a_tuple_in_training_mode_and_a_failure_of_the_network_skip_one_panel(tmp_path: Path) -> None:
    (tmp_path / "pairs.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Pair(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.linear = nn.Linear(4, 1)\n"
        "    def forward(self, x):\n        y = self.linear(x)\n        return (y, y) if self.training else y\n"
        "class Fails(Pair):\n"
        "    def forward(self, x):\n        if self.training: raise RuntimeError('no training here')\n"
        "        return self.linear(x)\n"
    )
    card = make_card(f"{tmp_path}/pairs.py:Pair", (4,), tmp_path / "c.html", networks=8)
    assert [panel.skipped for panel in card.panels] == [False, False, True, False, True, False]
    assert "in training mode" in card.panels[2].meaning
    assert "returns a tuple, not a tensor: switch off what it adds" in card.panels[2].meaning
    with pytest.warns(UserWarning, match="no training here"):
        card = make_card(f"{tmp_path}/pairs.py:Fails", (4,), tmp_path / "c.html", networks=8)
    assert card.panels[2].meaning == "Skipped: this network cannot be shown here (RuntimeError: no training here)"


def test_a_network_too_large_for_the_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_subject("lenet", networks=8)
    monkeypatch.setattr(base, "free_memory", lambda _: 4 * 2**20)
    for panel in (tangent_kernel.panel, regime.panel):
        with pytest.raises(UnsupportedError, match="60,941 parameters need about"):
            panel(made)
    shown = "".join(map(str, anatomy.panel(made).blocks))
    assert "No table of layer rules" in shown
    assert "classifier.fc1" in shown  # the layers are there all the same


class Breaks(nn.Module):
    """w x, infinite once w has grown beyond a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.w, self.limit = nn.Parameter(torch.zeros(1)), limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x + torch.where(self.w > self.limit, math.inf, 0.0)


def test_a_descent_that_overflows_is_made_again_with_smaller_steps() -> None:
    x = torch.linspace(-1, 1, 16)[:, None]
    data = Examples("xy", x, (x[:, 0] > 0).long())

    def descend(limit: float) -> list[int]:
        made = Subject("breaks", lambda _: Breaks(limit), (1,), data=data)
        return [one.step for one in regime.train(made, x, data.y)[0]]

    assert descend(2.0) == [0, 1, 2, 4, 8, 16, 32]  # w is beyond 2 after the third or fourth of the largest steps
    assert descend(1e9) == [0, 1, 2, 4, 8, 16, 32]
    for limit in (0.1, 0.01):
        with pytest.raises(UnsupportedError, match=r"gradient descent diverged: .* was not finite, so nothing is"):
            descend(limit)


class Steep(nn.Module):
    """Two outputs, u x and scale v x: the kernel of the first one knows nothing of how steep the second is."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale, self.u, self.v = scale, nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.u * x, self.scale * self.v * x], 1)


def test_a_training_that_raises_the_loss_is_no_finding() -> None:
    """Its steps are made smaller; where that is not enough, nothing is concluded."""
    x = torch.linspace(-1, 1, 16)[:, None]
    y = torch.tensor([0, 0, 1] * 5 + [0])  # x does not tell the classes apart, so a step too long is paid for
    largest = len(x) / float(x.square().sum())
    made = Subject("steep", lambda _: Steep(7.0), (1,), data=Examples("xy", x, y))
    seen, through = regime.descend(made, x, y, largest)
    assert not through or seen[-1].loss > seen[0].loss
    seen, lr = regime.train(made, x, y)
    assert seen[-1].loss < seen[0].loss
    assert lr < 0.3 * largest
    with pytest.raises(UnsupportedError, match=r"diverged.*\(2\.6, 0\.66, 0\.17\) the loss rose above its 0\.693"):
        regime.train(Subject("steep", lambda _: Steep(500.0), (1,), data=Examples("xy", x, y)), x, y)


def test_a_slow_network_gets_fewer_inputs_and_no_trainings() -> None:
    made = make_subject("logreg", (1, 4, 4), networks=8)
    assert tangent_kernel.samples(made) == 64
    made._shared["pace"] = Pace(1.5, 1.5, 1.5)
    assert tangent_kernel.samples(made) == 8
    message = r"4 trainings on 128 examples would take about 77 minutes .*; give the card 5\.1 hours \(--minutes 308\)"
    with pytest.raises(UnsupportedError, match=message):
        directional.panel(made)
    assert labels.sizes(make_subject("logreg", (1, 4, 4))) == (128, 8)
    made._shared["pace"] = Pace(5.0, 5.0, 5.0)
    with pytest.raises(UnsupportedError, match="on this CPU"):
        labels.sizes(made)


def test_a_slower_network_is_trained_on_fewer_directions() -> None:
    """The first, the last and some between, where all would take too long: half the panel is better than none."""
    made, seven = make_subject("logreg", (1, 4, 4), networks=8), [1, 4, 16, 64, 256, 1024, 3072]
    made._shared["budget"] = Budget(120.0, lambda: 0.18 * 120.0)  # the panel before took its share
    per_direction = directional.SEEDS * (directional.EPOCHS * directional.EXAMPLES)
    for fit, kept in ((9.9, seven), (4.5, [1, 16, 256, 3072]), (2.5, [1, 3072])):
        made._shared["pace"] = Pace(0.0, 0.0, 30.0 / fit / per_direction)
        assert directional.affordable(made, seven) == (kept, directional.Effort())
    for slower in (3, 10, 25):  # smaller trainings of two directions, which fit, and no refusal
        made._shared["pace"] = Pace(0.0, 0.0, slower * 30.0 / 2.5 / per_direction)
        chosen, effort = directional.affordable(made, seven)
        assert (chosen[0], chosen[-1]) == (1, 3072)
        assert len(chosen) * effort.seconds(made.pace()) <= 30.0
        assert effort != directional.Effort()


def test_what_a_panel_leaves_goes_to_those_after_it_and_the_sum_is_kept() -> None:
    now = [0.0]
    budget = Budget(100.0, lambda: now[0])
    for title in SHARES:  # each takes all it may
        now[0] += budget.of(title)
    assert now[0] == pytest.approx(100.0)
    assert Budget(100.0, lambda: 0.0).of("Linear or not") == pytest.approx(100.0)
    assert Budget(100.0, lambda: 1000.0).of("Linear or not") == pytest.approx(17.0)  # never less than its share


def test_minutes_decide_how_much_a_card_does() -> None:
    made = make_subject("logreg", (1, 4, 4))
    made._shared["pace"] = Pace(0.004, 0.004, 0.004)
    some = {}
    for minutes in (0.5, 2.0, 20.0):
        one = replace(made, minutes=minutes, _shared=dict(made._shared))
        some[minutes] = (tangent_kernel.samples(one), directional.affordable(one, [1, 4, 16, 64])[1].examples)
    assert some[0.5] < some[2.0] < some[20.0]


def test_trainings_of_88_seconds_are_made_smaller_and_not_skipped() -> None:
    """The card of a ConvNet for 3 x 64 x 64 left its best panel out: 6 small trainings would have taken that long."""
    made = make_subject("logreg", (1, 4, 4))
    each = directional.EFFORTS[0].seconds(Pace(1.0, 1.0, 1.0))
    made._shared["pace"] = Pace(*[88 / (6 * each)] * 3)
    chosen, effort = directional.affordable(made, [1, 4, 9, 16, 32, 64])
    assert (chosen[0], chosen[-1], len(chosen) >= 2) == (1, 64, True)
    assert len(chosen) * effort.seconds(made.pace()) <= made.seconds(directional.TITLE) < 88


def test_directions_run_from_the_first_to_outside_the_sample() -> None:
    sample = torch.randn(6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spectrum = input_spectrum(sample)
    made = directional.directions(spectrum, subject(nn.Identity(), (3, 2, 2)))
    assert [index for _, index, _ in made] == [1, 4, 12]
    assert made[0][2].shape == (3, 2, 2)
    assert float((sample.float() @ made[-1][2].flatten()).abs().max()) < 1e-5
    assert all(float(v.norm()) == pytest.approx(1.0, abs=1e-5) for _, _, v in made)


def test_logistic_regression_learns_every_direction_alike() -> None:
    made = make_subject("logreg", (1, 4, 4), networks=64)
    panel = directional.panel(made)
    assert "no influence of the direction" in panel.meaning


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"1.weight": torch.ones(4, 12), "1.bias": torch.zeros(3)},
            r"1\.weight is \(4, 12\) in the weights and \(3, 12\)",
        ),
        ({"1.weight": torch.ones(3, 12)}, r"the weights have no 1\.bias"),
        ({"1.weigth": torch.ones(3, 12), "1.bias": torch.zeros(3)}, r"no 1\.weight; did you mean 1\.weigth"),
        (torch.ones(3), "holds a Tensor, not a state dict"),
    ],
)
def test_weights_that_do_not_fit_are_explained(script: str, tmp_path: Path, state: object, message: str) -> None:
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(InputError, match=message):
        make_subject(f"{script}:good", (3, 2, 2), weights=tmp_path / "w.pt")


def test_files_that_cannot_be_used_are_named(script: str, tmp_path: Path) -> None:
    (tmp_path / "w.safetensors").write_bytes(b"not this")
    (tmp_path / "w.pt").write_bytes(b"nor this")
    for name in ("w.safetensors", "w.pt"):
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            make_subject(f"{script}:good", (3, 2, 2), weights=tmp_path / name)
    with pytest.raises(InputError, match="there is no such file"):
        make_subject(f"{script}:good", (3, 2, 2), weights=tmp_path / "none.pt")
    torch.save({"x": torch.ones(20, 5)}, tmp_path / "d.pt")
    torch.save({"x": torch.ones(20, 5), "y": torch.zeros(20)}, tmp_path / "e.pt")
    torch.save({"x": torch.ones(20, 5), "y": torch.arange(20) % 2}, tmp_path / "f.pt")
    for name, message in (
        ("d.pt", "d.pt holds x: call inputs and labels x and y"),
        ("e.pt", "all labels are the same"),
        ("cifar11", "did you mean cifar10"),
        ("gone.npz", "there is no such file"),
    ):
        with pytest.raises(InputError, match=message):
            load_examples(name if "." not in name else str(tmp_path / name))
    with pytest.raises(InputError, match="does not take inputs of shape 5"):
        make_subject(f"{script}:good", data=str(tmp_path / "f.pt"))
    with pytest.raises(InputError, match="inputs of shape 5, the network takes 3,2,2"):
        make_subject(f"{script}:good", (3, 2, 2), data=str(tmp_path / "f.pt"))


def test_registry_networks_follow_the_data() -> None:
    made = make_subject("resnet18", data="digits", options={"width": 4})
    assert made.input_shape == (1, 8, 8)
    assert made.build(0)(made.inputs(3)).shape == (3, 10)
    assert float(made.data.x.mean()) == pytest.approx(0, abs=0.1)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("end", "residual", "said"),
    [(0.4, 0.05, "linear regime"), (0.4, 0.9, "not linear"), (0.6999, 0.05, "hardly changed"), (0.701, 0.9, "hardly")],
)
def test_the_regime_is_only_named_where_the_loss_has_moved(end: float, residual: float, said: str) -> None:
    seen = [regime.Seen(0, 0.7, 0.0, 1.0, 0.0), regime.Seen(32, end, residual, 0.9, 1.0)]
    assert said in regime._meaning(seen)
    assert ("linear" in regime._meaning(seen)) == ("hardly" not in said)


def test_torchs_notes_to_itself_are_not_shown_and_ours_are(recwarn: pytest.WarningsRecorder) -> None:
    def noisy(subject: Subject) -> Panel:
        warnings.warn("There is a performance drop because of a batching rule", stacklevel=1)
        raise RuntimeError("cannot")

    card_module._safely(noisy, subject(nn.Linear(2, 1), (2,)))
    assert ["cannot" in str(one.message) for one in recwarn] == [True]


@pytest.mark.parametrize(("whole", "a", "words"), [(0.5, 0.4, "towards"), (0.1, 0.05, "away from")])
def test_the_layer_that_turned_most_is_named(whole: float, a: float, words: str) -> None:
    """Not the one that is aligned best, which is b."""

    def spread(value: float) -> Spread:
        return Spread(value, 0.01, 8)

    def found(value: float, **layers: float) -> labels.Alignment:
        return labels.Alignment(value, 0.0, {name: labels.Alignment(part, 0.0) for name, part in layers.items()})

    layers = {"a": spread(0.2), "b": spread(0.6)}
    start = labels.Start(spread(0.3), spread(0.0), spread(0.3), layers, dict.fromkeys(layers, spread(0.0)), layers)
    text = labels._meaning(start, found(whole, a=a, b=0.61))
    assert f"turned {words} the labels of these examples, most in a (0.200 to {a:.3f})" in text
    wide = replace(start, score=Spread(0.3, 0.2, 8))
    assert "within the spread of initialisations" in labels._meaning(wide, found(whole, a=a, b=0.61))

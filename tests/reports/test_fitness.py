"""Networks that no card can be made of: each refusal says what to type or to change."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from biascope.reports import make_card
from biascope.reports.panels import directional, regime
from biascope.reports.panels.base import make_subject
from biascope.reports.panels.examples import load_examples
from biascope.reports.panels.fitness import check, one_tensor
from biascope.reports.panels.fitting import fit_of
from biascope.reports.panels.loading import load_state
from biascope.support.errors import InputError, UnsupportedError


def try_out(name: str, network: nn.Module, x: Tensor) -> None:
    """What `make_subject` asks of a network."""
    check(name, fit_of(name, network, tuple(x.shape[1:])).wrap(network), x)


class Ends(nn.Module):
    """A linear layer with something done to its outputs."""

    def __init__(self, end: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(4, 2), end

    def forward(self, x: Tensor) -> object:
        return self.end(self.linear(x.flatten(1)))


def frozen() -> nn.Module:
    return nn.Linear(4, 2).requires_grad_(False)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Ends(lambda y: torch.fft.fft(y)), r"complex numbers: return their \.real"),
        (Ends(lambda y: y.argmax(1)), "returns torch.int64, which has no derivative: return what it is computed from"),
        (Ends(lambda y: y.log() * float("nan")), "gives nan or infinity"),
        (Ends(lambda y: y.detach()), r"no derivative: take torch\.no_grad"),
        (nn.Flatten(), "has no parameters"),
        (frozen(), "every parameter of net is frozen"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(2)),
            r"lazy layers, and a trial with inputs of shape 4 .* failed",
        ),
        (nn.Linear(3, 2), "does not take inputs of shape 4 .* its first linear layer takes 3 numbers: type --input 3"),
    ],
)
def test_refusals_name_the_way_out(network: nn.Module, message: str) -> None:
    with pytest.raises(InputError, match=message):
        try_out("net", network, torch.ones(3, 4))


def test_a_convolution_says_which_shape_to_type() -> None:
    network = nn.Conv2d(3, 2, 3)
    for given in ((1, 16, 16), (16, 16)):
        with pytest.raises(InputError, match=r"takes 3 channels: type --input 3,16,(16|32) \(or"):
            try_out("net", network, torch.zeros(2, *given))
    with pytest.raises(InputError, match=r"type --input 3,16,24 \(or"):  # channels last
        try_out("net", network, torch.zeros(2, 16, 24, 3))
    with pytest.raises(InputError, match=r"takes 2 channels: type --input 2,16 \(or"):
        try_out("net", nn.Conv1d(2, 2, 3), torch.zeros(2, 3, 16))
    with pytest.raises(InputError, match="give the shape of one input"):  # the channels are right, the size is not
        try_out("net", nn.Conv2d(3, 2, 9), torch.zeros(2, 3, 4, 4))


def test_the_wrapper_that_is_proposed_works(tmp_path: Path) -> None:
    """What the message tells to write is written, and then the card's subject is made."""
    script = tmp_path / "own.py"
    text = (
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.l = nn.Linear(4, 2)\n"
        "    def forward(self, x): return {'scores': self.l(x), 'size': self.l(x)}\n"
    )
    script.write_text(text)
    with pytest.raises(InputError) as caught:
        make_subject(f"{script}:Two", (4,))
    lines = re.findall(r"^    (.*)$", str(caught.value), re.MULTILINE)
    script.write_text(text + "\n".join(lines) + "\n")
    spec = re.search(r"and type (.*)$", str(caught.value))
    assert spec is not None
    made = make_subject(spec.group(1), (4,))
    assert made.network(torch.zeros(3, 4)).shape == (3, 2)
    with pytest.raises(InputError, match=r"self\.net = build\(\)"):
        one_tensor("hf:bert", (1, 2), torch.zeros(2, 1))


def test_an_output_that_ignores_the_input_still_has_a_kernel(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import torch\nfrom torch import nn\n"
        "class Same(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.w = nn.Parameter(torch.randn(3))\n"
        "    def forward(self, x): return self.w.expand(len(x), 3)\n"
    )
    card = make_card(f"{script}:Same", (4,), tmp_path / "c.html", networks=4)
    found = {panel.title: panel for panel in card.panels}
    assert "does not depend on the input" in found["What it responds to"].meaning
    assert not found["Tangent kernel"].skipped


def test_data_and_weights_that_cannot_be_used(tmp_path: Path) -> None:
    x = np.ones((20, 4), dtype=np.float32)
    x[3, 2] = np.inf
    np.savez(tmp_path / "d.npz", x=x, y=np.arange(20) % 2)
    with pytest.raises(InputError, match="x holds nan or infinity"):
        load_examples(str(tmp_path / "d.npz"))
    torch.save(nn.Linear(2, 1), tmp_path / "whole.pt")
    with pytest.raises(InputError, match=r"Python objects such as a whole model.*state_dict\(\)") as caught:
        load_state(tmp_path / "whole.pt")
    assert "\x1b" not in str(caught.value)


def test_a_page_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a folder: give the page a name, e\.g\. out='.*card-logreg\.html"):
        make_card("logreg", out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="its folder cannot be made"):
        make_card("logreg", out=tmp_path / "file" / "card.html")


def test_a_network_of_two_inputs_gets_the_wrapper_to_paste(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    text = (
        "from torch import nn\n"
        "class Two(nn.Module):\n"
        "    def __init__(self): super().__init__(); self.a = nn.Linear(4, 2); self.b = nn.Bilinear(3, 3, 2)\n"
        "    def forward(self, x, z): return self.a(x) * self.b(z, z)\n"
    )
    script.write_text(text)
    with pytest.raises(InputError, match=r"takes 2 inputs \(x, z\) and a card is about one") as caught:
        make_subject(f"{script}:Two", (4,))
    assert "--input" not in str(caught.value)
    lines = re.findall(r"^    (.*)$", str(caught.value), re.MULTILINE)
    script.write_text(text + "\n".join(lines).replace("Z_SHAPE", "3") + "\n")
    spec = re.search(r"and type (.*)$", str(caught.value))
    assert spec is not None
    assert make_subject(spec.group(1), (4,)).network(torch.zeros(3, 4)).shape == (3, 2)


def test_torchscript_is_refused_by_name() -> None:
    traced = torch.jit.trace(nn.Linear(4, 2), torch.zeros(1, 4))  # type: ignore[no-untyped-call]
    with pytest.raises(InputError, match=r"^net is TorchScript \(.*\).*return the module it was made from"):
        try_out("net", traced, torch.ones(3, 4))


def test_a_compiled_network_is_taken_as_it_was(tmp_path: Path) -> None:
    """Its weights too, which carry another name."""
    net = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    torch.save(net.state_dict(), tmp_path / "w.pt")

    def build() -> nn.Module:
        return torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))  # type: ignore[return-value]

    made = make_subject(build, (4,), weights=tmp_path / "w.pt")
    assert made.factory is not None
    for one in (made.network, made.trained, made.factory()):
        assert type(one) is nn.Sequential
    card = make_card(build, (4,), tmp_path / "c.html", networks=8)
    assert [panel.title for panel in card.panels if panel.skipped] == ["Alignment with the labels"]


class Held(nn.Module):
    """Returns an object with logits, as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=None, logits=self.linear(x))


def test_outputs_that_hold_logits_are_taken(tmp_path: Path, check_page: Callable[[str], None]) -> None:
    x = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    np.savez(tmp_path / "d.npz", x=x.numpy(), y=(x[:, 0] > 0).long().numpy())
    torch.save({"linear.weight": torch.ones(2, 4), "linear.bias": torch.zeros(2)}, tmp_path / "w.pt")
    given = {"weights": tmp_path / "w.pt", "data": str(tmp_path / "d.npz")}
    made = make_subject(Held, (4,), **given)  # type: ignore[arg-type]
    assert made.trained is not None
    assert made.trained(torch.ones(1, 4)).tolist() == [[4.0, 4.0]]
    card = make_card(Held, (4,), tmp_path / "c.html", networks=8, **given)  # type: ignore[arg-type]
    assert not any(panel.skipped for panel in card.panels)
    check_page(card.path.read_text())


@pytest.mark.parametrize(
    ("network", "shape", "words"),
    [
        (lambda: nn.Conv2d(1, 1, 3, padding=1), (1, 6, 6), r"1 × 6 × 6 numbers .* self\.net\(x\)\.flatten\(2\)\.mean"),
        (lambda: nn.Linear(3, 2), (5, 3), r"5 × 2 numbers .* self\.net\(x\)\.mean\(1\), the mean over tokens"),
    ],
)
def test_dense_outputs_are_no_classes(
    network: Callable[[], nn.Module], shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    np.savez(tmp_path / "d.npz", x=np.ones((20, *shape), dtype=np.float32), y=np.arange(20) % 2)
    card = make_card(network, shape, tmp_path / "c.html", networks=8, data=str(tmp_path / "d.npz"))
    found = {panel.title: panel for panel in card.panels}
    for title in ("What it learns", "Linear or not", "Alignment with the labels"):
        assert found[title].skipped
        assert re.search(words, found[title].meaning), found[title].meaning
    assert not found["What it responds to"].skipped
    assert not found["Tangent kernel"].skipped


def test_classes_with_axes_of_one_say_how_to_lose_them() -> None:
    made = make_subject(lambda: nn.Conv2d(1, 2, 4), (1, 4, 4), networks=8)
    with pytest.raises(UnsupportedError, match=r"maps 2 inputs to \(2, 2, 1, 1\): let it end with \.flatten\(1\)"):
        directional.panel(made)
    assert not regime.panel(made).skipped

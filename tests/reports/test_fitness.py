"""Networks that no card can be made of: each refusal says what to type or to change."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from biascope.errors import InputError
from biascope.reports import make_card
from biascope.reports.panels import make_subject
from biascope.reports.panels.fitness import one_tensor, try_out
from biascope.reports.panels.loading import load_examples, load_state


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
        (nn.LazyLinear(2), r"lazy layers.*nn\.Linear\(64, 10\)"),
        (nn.Linear(4, 2).double(), r"weights are float64 .* with \.float\(\)"),
        (nn.Sequential(nn.Embedding(9, 5), nn.Flatten()), "its layer 0 looks up tokens .* --input TOKENS,5"),
        (nn.Linear(3, 2), "does not take inputs of shape 4 .* give the shape of one input with --input"),
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
        "    def forward(self, x): return {'loss': None, 'scores': self.l(x)}\n"
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
    assert "does not depend on the input" in found["What the input sees"].meaning
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
    with pytest.raises(InputError, match=r"is a folder: give the page a name, e\.g\. --out .*card-logreg\.html"):
        make_card("logreg", out=tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="its folder cannot be made"):
        make_card("logreg", out=tmp_path / "file" / "card.html")

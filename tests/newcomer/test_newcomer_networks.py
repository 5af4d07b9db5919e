"""Cards of ten networks that nobody tuned for: each has one, and what a panel leaves out it says in a line."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from biascope.reports import make_card
from biascope.reports.panels import anatomy, input_geometry, labels, tangent_kernel
from biascope.reports.panels.adapter import plain
from biascope.reports.panels.base import make_subject
from biascope.support.errors import InputError

FILE = Path(__file__).parent / "networks.py"
SPEC = importlib.util.spec_from_file_location("ten_networks", FILE)
assert SPEC is not None
ten: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ten)  # type: ignore[union-attr]

SHAPES = {
    "UNet": (1, 8, 8),
    "GraphNet": (6, 3),
    "Tagger": (7,),
    "TabularTransformer": (5,),
    "DiffusionUNet": (1, 4, 4),
    "DeepONet": (6,),
    "VAE": (8,),
    "Siamese": (4,),
    "Mixture": (4,),
    "PINN": (2,),
}
NOTES = {
    "Tagger": "Its inputs are tokens",
    "DiffusionUNet": "with t = zeros [n]",
    "DeepONet": "with y = zeros [n, 1]",
    "VAE": "Of what it returns, a tuple, the card shows [0]",
    "Siamese": "with b = zeros [n, 4]",
    "Mixture": "Of what it returns, a dict, the card shows ['logits']",
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_card_of_each(name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    panels = [anatomy.panel, input_geometry.panel, tangent_kernel.panel, labels.panel]
    card = make_card(getattr(ten, name), SHAPES[name], tmp_path / "c.html", networks=4, panels=panels)
    assert [panel.title for panel in card.panels if panel.skipped] == ["Alignment with the labels"]
    assert "--data" in card.panels[-1].meaning or "data=" in card.panels[-1].meaning
    page = card.path.read_text()
    assert NOTES.get(name, "").replace("'", "&#x27;") in page
    assert not [w for w in recwarn if "panel" in str(w.message)]  # what a panel raised and did not expect


def test_the_second_input_stands_still() -> None:
    made = make_subject(ten.DiffusionUNet, (1, 4, 4))
    x, net = made.inputs(3), made.network
    bare = plain(net)
    assert torch.equal(net(x), bare(x, torch.zeros(3)))
    names = [name for name, _ in net.named_parameters()]
    assert names == [name for name, _ in ten.DiffusionUNet().named_parameters()]


def test_an_input_of_no_guessable_shape_gets_a_wrapper() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 2), nn.Parameter(torch.ones(7, 2))

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return self.a(x) * (z @ self.b)  # type: ignore[no-any-return]

    with pytest.raises(InputError, match=r"Odd takes 2 inputs \(x, z\) and a card is about one: wrap it"):
        make_subject(Odd, (4,))


def test_lazy_and_half_precision_networks_are_made_ready() -> None:
    lazy = make_subject(lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2)), (4,))
    assert "lazy layers" in lazy.notes[0]
    assert lazy.network(lazy.inputs(2)).shape == (2, 2)
    assert lazy.initialiser().distribution("0.weight") == "uniform_(-0.5, 0.5)"
    half = make_subject(lambda: nn.Linear(4, 2).bfloat16(), (4,))
    assert half.notes == ("Its weights are bfloat16; they are computed in float32.",)
    assert half.network(half.inputs(2)).dtype == torch.float32

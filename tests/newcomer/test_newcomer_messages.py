"""Messages that mislead a newcomer no more: the fix comes first, in the words of the one who asked."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import biascope as bs
from biascope.reports import make_card
from biascope.support.errors import BiascopeError, InputError, UnsupportedError
from biascope.support.wording import on_the_command_line

MLP = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
CNN = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2))
GREY = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2))


def test_a_missing_axis_is_recognised() -> None:
    with pytest.raises(InputError, match=r"^the first axis counts examples: for one example pass x\[None\], "):
        bs.ntk(MLP, torch.zeros(6))
    with pytest.raises(InputError, match=r"^the first axis counts examples: for one example pass x\[None\], "):
        bs.ntk(CNN, torch.zeros(3, 8, 8))
    with pytest.raises(InputError, match=r"^the axis of the channel is missing: pass x\[:, None\]\. "):
        bs.ntk(GREY, torch.zeros(5, 8, 8))
    assert bs.ntk(GREY, torch.zeros(5, 8, 8)[:, None]).tensor.shape == (5, 2, 5, 2)


def test_the_number_of_examples_is_not_that_of_a_trial() -> None:
    """4 examples of 5 were reported as 3, and one of 6 as [3]."""
    with pytest.raises(InputError, match=r"cannot take inputs \[n, 5\].*got \[n, 5\] \(RuntimeError at n = 3: "):
        bs.ntk(MLP, torch.zeros(4, 5))
    with pytest.raises(InputError, match=r"cannot take inputs \[n\].*got \[n\] \(RuntimeError at n = 3: "):
        bs.ntk(MLP, torch.zeros(6))
    with pytest.raises(InputError, match=r"for a list of them torch\.stack\(x\)"):
        bs.ntk(MLP, list(torch.zeros(4, 6)))


def test_a_second_input_of_an_encoder_and_decoder_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4, "vocab_size": 9}
    net = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()
    ids = torch.ones(2, 3, dtype=torch.long)
    with pytest.raises(InputError, match=r"give a dict \{'input_ids': \.\.\., 'decoder_input_ids': \.\.\.\}"):
        bs.ntk(net, ids)
    assert bs.ntk(net, {"input_ids": ids, "decoder_input_ids": ids}, outputs="trace").tensor.shape == (2, 2)


def test_fisher_of_one_real_output_names_gaussian() -> None:
    with pytest.raises(InputError, match="of one real output say likelihood='gaussian'"):
        bs.fisher(nn.Linear(6, 1), torch.zeros(4, 6))


def test_python_is_answered_in_python(tmp_path: Path) -> None:
    page = tmp_path / "c.html"
    np.savez(tmp_path / "d.npz", x=np.zeros((20, 4), np.float32), y=np.arange(20) % 2)
    calls = [
        (lambda: make_card(lambda: CNN, (1, 8, 8), page), r"pass input_shape=\(3, 8, 8\)"),
        (
            lambda: make_card("lenet", data="imagenet", out=page),
            r"data='imagenet': no data set is called that; there is",
        ),
        (lambda: make_card(f"{__file__}:build", out=page), r"for example input_shape=\(3, 32, 32\)"),
        (lambda: make_card(lambda: nn.Linear(4, 2), (4,), page, weights="none.pt"), "weights='none.pt': there is no"),
        (lambda: make_card("logreg", (1, 4, 4), tmp_path), r"e\.g\. out='"),
        (lambda: make_card(lambda: nn.Linear(3, 2), data=tmp_path / "d.npz", out=page), r"input_shape=\(3,\)"),
        (lambda: make_card(nn.Linear, (3,), page), r"add options=\{'in_features': \.\.\.\} and options="),
    ]
    for call, words in calls:
        with pytest.raises(BiascopeError, match=words) as caught:
            call()
        assert "--" not in str(caught.value)
        with on_the_command_line(), pytest.raises(BiascopeError, match="--"):
            call()
    card = make_card(lambda: nn.Linear(4, 2), (4,), page, networks=4)
    assert not any("--" in panel.meaning for panel in card.panels)


def build() -> nn.Module:
    return nn.Linear(4, 2)


def test_names_of_other_places() -> None:
    with pytest.raises(InputError, match="'resnet50'; torchvision:resnet50 is one of torchvision's"):
        make_card("resnet50")
    with pytest.raises(InputError) as caught:
        make_card("lenet", data="imagenet")
    assert "mobilenet" not in str(caught.value)
    assert "cifar10" in str(caught.value)


def test_places_where_something_else_is(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        make_card("hf:./nothing", (4,))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"is a folder of save_pretrained: type hf:"):
        make_card(str(tmp_path), (4,))
    with pytest.raises(InputError, match=r"^weights='the Linear given' does not fit this network: the weights have no"):
        make_card(lambda: CNN, (3, 8, 8), tmp_path / "c.html", weights=nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"data=\(table\[\['a', 'b'\]\], table\['label'\]\)"):
        make_card(lambda: CNN, data=Table())


class Table:
    """Of pandas: to go over it gives the names of its columns."""

    columns = ("a", "kind")

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def test_old_spellings_of_centered_warn_and_work() -> None:
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2
    calls: dict[str, Callable[..., Any]] = {
        "fisher": lambda **o: bs.fisher(MLP, (x, y), "dense", estimator="empirical", **o).to_dense(),
        "linearize": lambda **o: bs.linearize(MLP, **o)(x).detach(),
        "label_alignment": lambda **o: torch.tensor(bs.label_alignment(MLP, x, y, **o).value),
        "alignment": lambda **o: torch.tensor(bs.ntk(MLP, x).alignment(y, **o)),
        "rank": lambda **o: torch.tensor(
            bs.Probe(MLP, x, y, [bs.probes.metric("effective_rank", **o)]).records[0]["effective_rank"]
        ),
        "nads": lambda **o: bs.nads(lambda: nn.Linear(3, 1), (3,), 8, "autograd", **o).eigenvalues,
    }
    for name, call in calls.items():
        now, other = call(centered=False), call(centered=True)
        assert not torch.allclose(now, other), name
        for old in ("centred", "center"):
            with pytest.warns(DeprecationWarning, match=f"{old} is now centered"):
                assert torch.equal(call(**{old: False}), now), name


def test_probability_rows_and_columns_say_what_they_are() -> None:
    with pytest.raises((InputError, UnsupportedError), match=r"rows of probabilities are no class indices"):
        bs.hessian(MLP, (torch.zeros(2, 6), torch.full((2, 2), 0.5)))


def test_names_of_rooms_are_known_by_their_room() -> None:
    for slip, place in {"make_card": "reports", "EKFAC": "optim", "train_ensemble": "ensembles"}.items():
        with pytest.raises(AttributeError, match=f"no attribute '{slip}'; it is bs.{place}.{slip}"):
            getattr(bs, slip)
    assert not hasattr(bs, "nothing")
    assert not hasattr(bs, "_repr_html_")


def test_a_slip_in_the_name_of_an_argument() -> None:
    net, x = nn.Linear(2, 2), torch.zeros(3, 2)
    calls: dict[str, Callable[[], Any]] = {
        r"fisher\(\) takes no 'batchsize'; did you mean batch_size\?": lambda: bs.fisher(net, x, batchsize=3),
        r"Probe\(\) takes no 'metric'; did you mean metrics\?": lambda: bs.Probe(net, x, metric="effective_rank"),
        r"momentun goes .* there is lr, momentum, weight_decay": lambda: bs.optim.EKFAC(net, momentun=0.9),
    }
    for words, call in calls.items():
        with pytest.raises(InputError, match=words):
            call()


@pytest.mark.parametrize("given", [lambda net: net.parameters(), lambda net: [{"params": net.parameters()}]])
def test_an_optimiser_of_parameters_asks_for_the_network(given: Callable[[nn.Module], Any]) -> None:
    with pytest.raises(InputError, match=r"got (generator|list); pass the network, not its parameters"):
        bs.optim.EKFAC(given(nn.Linear(2, 2)))


def test_results_say_what_they_hold() -> None:
    """These were printed as Energy(), Polygons() and Fit(seed=0)."""
    net, grid = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), bs.fields.coordinates((4, 4))
    atoms = bs.fields.dictionary(net, grid)
    picture = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
    assert re.fullmatch(r"Dictionary\(values=\[.* 16 in all\], atoms=tensor \[16, 16\], grid=\(4, 4\)\)", repr(atoms))
    assert re.fullmatch(r"Energy\(thresholds=\[1, .* in all\], shares=tensor \[1, \d+\]\)", repr(atoms.energy(picture)))
    fit = bs.fields.fit(net, grid, picture, steps=2)
    assert f"train_psnr=[{float(fit.train_psnr[0]):.4g}, {fit.psnr:.4g}]" in repr(fit)
    regions = bs.spectral.linear_regions_2d(net)
    assert f"weights=tensor [{len(regions)}, 1, 2]" in repr(regions)


@pytest.mark.parametrize("nothing", [(), [], [()], [[]]])
def test_nothing_at_all_is_named(nothing: Any) -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a + b

    for net in (nn.Linear(3, 2), Two()):
        with pytest.raises(InputError):
            bs.ntk(net, nothing)

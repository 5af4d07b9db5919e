"""Trained weights and networks as people hold them: every way gives the network they have in hand."""

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import biascope as bs
from biascope.reports.panels.base import make_subject
from biascope.support.errors import InputError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def trained() -> nn.Module:
    return build()


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def saved(content: object, folder: Path) -> Path:
    torch.save(content, folder / "w.pt")
    return folder / "w.pt"


WAYS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "state dict": lambda net, _: net.state_dict(),
    "module": lambda net, _: net,
    "parallel": lambda net, _: nn.DataParallel(net),
    "compiled": lambda net, _: torch.compile(net),
    "compiled state dict": lambda net, _: torch.compile(net).state_dict(),
    "distributed checkpoint": lambda net, _: {"state_dict": prefixed(net.state_dict(), "module."), "epoch": 3},
    "one level deeper": lambda net, _: prefixed(net.state_dict(), "backbone."),
    "with a teacher beside": lambda net, _: {**prefixed(net.state_dict(), "net."), "loss.weight": torch.ones(3)},
    "parts compiled": lambda net, _: {f"_orig_mod.{name}": value for name, value in net.state_dict().items()},
    "file": lambda net, folder: saved(net.state_dict(), folder),
    "path as a string": lambda net, folder: str(saved({"model": net.state_dict()}, folder)),
    "folder": lambda net, folder: saved(net.state_dict(), folder).parent,
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_of_any_kind(way: str, trained: nn.Module, tmp_path: Path) -> None:
    made = make_subject(build, (4,), weights=WAYS[way](trained, tmp_path))
    x = made.inputs(5)
    assert made.trained is not None
    assert torch.equal(made.trained(x), trained(x))
    assert not torch.equal(made.network(x), trained(x))


def test_a_prefix_that_the_network_has_and_the_file_not(trained: nn.Module) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)  # type: ignore[no-any-return]

    made = make_subject(Wrapped, (4,), weights=trained.state_dict())
    assert made.trained is not None
    assert torch.equal(made.trained(made.inputs(2)), trained(made.inputs(2)))


def test_two_networks_in_one_file_are_a_choice(trained: nn.Module) -> None:
    state = prefixed(trained.state_dict(), "student.") | prefixed(trained.state_dict(), "teacher.")
    with pytest.raises(InputError, match=r"several networks that fit \(student\. and teacher\.\)"):
        make_subject(build, (4,), weights=state)


def test_a_network_in_place_of_a_function(trained: nn.Module) -> None:
    before = copy.deepcopy(trained.state_dict())
    made = make_subject(trained, (4,))
    assert made.name == "Sequential"
    assert made.trained is not None
    x = made.inputs(3)
    assert torch.equal(made.trained(x), trained(x))
    assert len({float(made.build(i)(x).sum().detach()) for i in range(3)} | {float(trained(x).sum().detach())}) == 4
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())
    assert trained.training
    # the redrawn layers have torch's own initialisation
    assert made.initialiser().distribution("0.weight") == "uniform_(-0.5, 0.5)"


def test_a_network_where_a_function_is_expected(trained: nn.Module, tmp_path: Path) -> None:
    """Directions and ensembles of one network are those of its initialisers; the command takes its name too."""
    with pytest.warns(UserWarning, match=r"Sequential: Given as one network; .* by every layer's reset_parameters"):
        found = bs.nads(trained, (4,), 64, "autograd")
    torch.testing.assert_close(found.eigenvalues, bs.nads(build, (4,), 64, "autograd").eigenvalues, rtol=0.3, atol=0)
    assert len(found.eigenvalues) == 4
    script = tmp_path / "mine.py"
    script.write_text("from torch import nn\nnet = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))")
    made = make_subject(f"{script}:net", (4,))
    assert made.trained is not None
    assert made.name == f"{script}:net"
    assert "whose weights are the given ones" in made.notes[-1]
    assert not torch.equal(made.trained(made.inputs(2)), made.network(made.inputs(2)))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(
        InputError, match="no reset_parameters draws w again: pass a function that builds a new network"
    ):
        bs.average_geometry(Bare(), (4,), 8)


def test_initialisers_of_its_own_are_called_again() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.ones(1)), nn.Linear(4, 2)
            self.apply(self._init_weights)

        def _init_weights(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
            if isinstance(module, Own):
                nn.init.ones_(module.scale)

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.linear(x)  # type: ignore[no-any-return]

    made = make_subject(Own(), (4,))
    assert "_init_weights" in made.notes[-1]
    assert "normal_(0, 0.02)" in made.initialiser().distribution("linear.weight")
    assert not made.single


def test_models_of_transformers_with_their_weights(tmp_path: Path) -> None:
    """The names in the file are not those in memory, and a language model's file has no tied weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4, num_channels=1, num_labels=3)
    vit = transformers.ViTForImageClassification(config).eval()
    vit.save_pretrained(tmp_path / "vit")
    tied = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=20, bos_token_id=0, eos_token_id=0)
    ).eval()
    tied.save_pretrained(tmp_path / "gpt2")

    def fresh() -> nn.Module:
        return transformers.ViTForImageClassification(config)  # type: ignore[no-any-return]

    def loaded() -> nn.Module:
        return transformers.ViTForImageClassification.from_pretrained(tmp_path / "vit")  # type: ignore[no-any-return]

    ways: list[tuple[Any, Any]] = [(f"hf:{tmp_path / 'vit'}", None), (vit, None), (loaded, None)]
    ways += [(fresh, weights) for weights in (tmp_path / "vit", tmp_path / "vit" / "model.safetensors", vit)]
    for spec, weights in ways:
        made = make_subject(spec, (1, 8, 8), weights=weights)
        x = made.inputs(2)
        assert made.trained is not None
        assert torch.allclose(made.trained(x), vit(x).logits, atol=1e-6)
        assert not torch.allclose(made.network(x), vit(x).logits, atol=1e-6)
        assert set(dict(made.network.named_parameters())) == set(dict(vit.named_parameters()))

    made = make_subject(f"hf:{tmp_path / 'gpt2'}", (6,))
    tokens = made.examples(2)
    assert made.trained is not None
    assert tokens.shape == (2, 6)
    assert torch.allclose(made.trained(tokens), tied(tokens).logits[:, -1], atol=1e-6)


@pytest.mark.parametrize("package", ["torchvision", "timm"])
def test_pretrained_weights_that_are_on_disk(
    package: str, trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(input_size=(4,), fixed_input_size=False, url="https://host/small-12.pth", hf_hub_id=None)
    weights = SimpleNamespace(DEFAULT=config)
    vision = SimpleNamespace(
        list_models=lambda: ["small"], get_model=lambda *_, **__: build(), get_model_weights=lambda _: weights
    )
    timm = SimpleNamespace(
        list_models=lambda: ["small"], create_model=lambda *_, **__: build(), get_pretrained_cfg=lambda _: config
    )
    packages = {"torchvision": SimpleNamespace(models=vision), "timm": timm}
    monkeypatch.setattr("biascope.reports.panels.sources._package", packages.__getitem__)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(InputError, match=rf"{package}:small: its pretrained weights are not on this disk; fetch them"):
        make_subject(f"{package}:small", (4,), weights="pretrained")
    (tmp_path / "checkpoints").mkdir()
    torch.save(trained.state_dict(), tmp_path / "checkpoints" / "small-12.pth")
    made = make_subject(f"{package}:small", (4,), weights="pretrained")
    assert made.trained is not None
    assert torch.equal(made.trained(made.inputs(2)), trained(made.inputs(2)))
    with pytest.raises(InputError, match="pretrained is for torchvision: and timm: networks"):
        make_subject(build, (4,), weights="pretrained")


def test_a_folder_without_the_head_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(**SMALL, vocab_size=30)
    transformers.BertModel(config).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"has no .*classifier.*random, not trained"):
        make_subject(lambda: transformers.BertForSequenceClassification(config), (6,), weights=tmp_path)

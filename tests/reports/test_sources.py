"""Names people know: packages where they are installed, transformers models from small configurations."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from biascope.reports import make_card
from biascope.reports.panels.base import make_subject
from biascope.reports.panels.sources import resolve
from biascope.support.errors import InputError, UnsupportedError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.slow
def test_transformers_models_from_small_configurations(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = make_subject("hf:bert", options={**SMALL, "vocab_size": 30})
    assert text.input_shape == (16, 16)
    assert text.build(0)(text.inputs(2)).shape == (2, 16)
    sight = make_subject("hf:vit", options={**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1})
    assert sight.input_shape == (1, 8, 8)
    options = {**SMALL, "image_size": 8, "patch_size": 4, "num_channels": 1}
    card = make_card("hf:vit", out=tmp_path / "c.html", networks=8, options=options)
    assert not card.panels[0].skipped
    assert not card.panels[1].skipped
    assert not card.panels[3].skipped


def test_transformers_bad_names_and_options() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(InputError, match=r"did you mean .*bert"):
        resolve("hf:brt")
    with pytest.raises(InputError, match="hf has no model ''"):
        resolve("hf:")


def test_torchvision_and_timm_models_where_installed() -> None:
    for spec, package in (("torchvision:resnet18", "torchvision"), ("timm:resnet18", "timm")):
        try:
            __import__(package)
        except Exception as error:  # a build for another torch raises RuntimeError
            hint = f"pip install {package}" if isinstance(error, ModuleNotFoundError) else "install the build made for"
            with pytest.raises(UnsupportedError, match=hint):
                resolve(spec)
            continue
        factory, shape = resolve(spec)
        assert shape == (3, 224, 224)
        assert factory()(torch.zeros(2, 3, 64, 64)).shape == (2, 1000)
        with pytest.raises(InputError, match="did you mean"):
            resolve(f"{spec}x")


@pytest.mark.parametrize("error", [RuntimeError("operator torchvision::nms does not exist"), OSError("libx.so")])
def test_a_package_that_is_broken_is_said_to_be(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """CPU torch with a CUDA build of torchvision fails with RuntimeError at import."""

    def fail(name: str) -> object:
        raise error

    monkeypatch.setattr("importlib.import_module", fail)
    with pytest.raises(UnsupportedError, match=r"installed but cannot be imported .*install the build made for torch"):
        resolve("torchvision:resnet18")


class Fake(SimpleNamespace):
    """A package with one model that notes what it is built with."""

    def list_models(self) -> list[str]:
        return ["vit_tiny", "resnet"]

    def get_pretrained_cfg(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(input_size=(3, 224, 224), fixed_input_size=name.startswith("vit"))

    def create_model(self, name: str, pretrained: bool, **options: object) -> torch.nn.Module:
        assert pretrained is False
        self.options = options
        return torch.nn.Identity()

    def get_model(self, name: str, weights: object, **options: object) -> torch.nn.Module:
        assert weights is None
        self.options = options
        return torch.nn.Identity()


def test_channels_and_sizes_reach_timm_and_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    timm, vision = Fake(), Fake()
    packages = {"timm": timm, "torchvision": SimpleNamespace(models=vision)}
    monkeypatch.setattr("importlib.import_module", packages.__getitem__)
    built: list[tuple[str, tuple[int, ...] | None, dict[str, object], dict[str, object]]] = [
        ("timm:resnet", None, {}, {}),
        ("timm:resnet", (1, 32, 32), {}, {"in_chans": 1}),
        ("timm:vit_tiny", (1, 32, 32), {}, {"in_chans": 1, "img_size": (32, 32)}),
        ("timm:vit_tiny", (4, 32, 32), {"img_size": 64}, {"in_chans": 4, "img_size": 64}),
        ("torchvision:vit_tiny", (3, 32, 32), {}, {"image_size": 32}),
        ("torchvision:resnet", (3, 32, 32), {"num_classes": 2}, {"num_classes": 2}),
    ]
    for spec, shape, options, wanted in built:
        factory, got = resolve(spec, shape, **options)
        factory()
        assert (timm if spec.startswith("timm") else vision).options == wanted, spec
        assert got == (shape or (3, 224, 224))
    with pytest.raises(InputError, match=r"3 channels, not 1: use --input 3,32,32"):
        resolve("torchvision:resnet", (1, 32, 32))


SCRIPT = """
import sys
from torch import nn
def sized(width): return nn.Linear(width, 2)
def inside(): return sized()
def breaks():
    depth = 1 / 0
    return nn.Linear(depth, 2)
def leaves(): sys.exit(3)
"""


LAYERS_FIRST = """
class Norm(nn.LayerNorm): ...
class Block(nn.Module):
    def __init__(self, width): ...
class Net(nn.Module):
    def __init__(self, width=8, *, depth=2): ...
def build(width=8): return Net(width)
"""


def test_factories_that_fail_say_where_and_what_to_type(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(SCRIPT)

    def said(name: str, **options: object) -> str:
        with pytest.raises(InputError) as caught:
            resolve(f"{script}:{name}", (3,), **options)[0]()
        return str(caught.value)

    assert "add --set width=..., or write a function without arguments" in said("sized")
    assert "--set" not in said("inside")  # the argument is missing inside the factory, not on the command line
    assert "line 7 of own.py: depth = 1 / 0" in said("breaks")
    assert "ended the program (exit 3) instead of returning a network" in said("leaves")
    factory, _ = resolve(f"{script}:sized", (3,), width=3)
    assert factory()(torch.zeros(1, 3)).shape == (1, 2)


def test_a_script_without_a_function_is_completed(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    for text, hint in (
        (SCRIPT, "own.py:inside; it has inside, breaks, leaves, sized$"),  # what needs no arguments first
        (LAYERS_FIRST, "own.py:build; it has build, Net, Norm, Block$"),
        ("x = 1", "own.py:build; it has none yet"),
    ):
        script.write_text(text)
        with pytest.raises(InputError, match=hint):
            resolve(str(script), (3,))
    script.write_text("def build(: pass")
    with pytest.raises(InputError, match="cannot be read as Python"):
        resolve(str(script), (3,))
    with pytest.raises(InputError, match="there is no file"):
        resolve(str(tmp_path / "none.py"), (3,))
    with pytest.raises(InputError, match=r"here my\.models:build"):
        resolve("my.models.build", (3,))
    script.write_text("raise SystemExit(2)")
    with pytest.raises(InputError, match="if __name__ == '__main__'"):
        resolve(f"{script}:build", (3,))

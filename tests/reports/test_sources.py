"""Names people know: packages where they are installed, transformers models from small configurations."""

from pathlib import Path

import pytest
import torch

from biascope.errors import InputError, UnsupportedError
from biascope.reports import make_card
from biascope.reports.panels import make_subject
from biascope.reports.panels.sources import resolve

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
    found = 0
    for spec, package in (("torchvision:resnet18", "torchvision"), ("timm:resnet18", "timm")):
        try:
            __import__(package)
        except ImportError:
            with pytest.raises(UnsupportedError, match=f"pip install {package}"):
                resolve(spec)
            continue
        found += 1
        factory, shape = resolve(spec)
        assert shape == (3, 224, 224)
        assert factory()(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)
        with pytest.raises(InputError, match="did you mean"):
            resolve(f"{spec}x")
    assert found in {0, 1, 2}

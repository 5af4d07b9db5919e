"""Small random configurations of public architectures for `models.py`: transformers from their configurations, timm by name.

Nothing is downloaded. Every entry is a function that gives a module and its inputs; widths are as small as each
architecture allows, and its kind of attention, routing, recurrence or convolution is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WORDS, TOKENS, CLASSES, N = 11, 4, 3, 3
Batch = Tensor | dict[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """An architecture: where it comes from, what it is, and how to build it and its inputs."""

    source: str
    kind: str
    build: Callable[[], tuple[nn.Module, Batch]]


SIZES = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
GROUPED = {**SIZES, "num_key_value_heads": 1, "max_position_embeddings": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def words(*shape: int, least: int = 3) -> Tensor:
    """Token indices, none of them special."""
    return torch.randint(least, WORDS, shape)


def language_model(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A decoder: the next word at every position. The last token of one example is padding."""

    def build() -> tuple[nn.Module, Batch]:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(name, **{"vocab_size": WORDS, **SPECIAL, **sizes})
        config.use_cache, config._experts_implementation = False, "eager"  # torch's grouped product has no float64
        return AutoModelForCausalLM.from_config(config), {"input_ids": words(N, TOKENS)}

    return build


def encoder(name: str, head: str = "SequenceClassification", **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """An encoder with a head; the last token of one example is padding."""

    def build() -> tuple[nn.Module, Batch]:
        import transformers

        wanted = {"vocab_size": WORDS, **SPECIAL, "num_labels": CLASSES, **sizes}
        config = transformers.AutoConfig.for_model(name, **wanted)
        mask = torch.ones(N, TOKENS, dtype=torch.long)
        mask[0, -1] = 0
        ids = words(N, TOKENS).masked_fill(mask == 0, 0)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
        return model, {"input_ids": ids, "attention_mask": mask}

    return build


def translator(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """An encoder and a decoder: the next word of the second sentence."""

    def build() -> tuple[nn.Module, Batch]:
        from transformers import AutoConfig, AutoModelForSeq2SeqLM

        wanted = {"vocab_size": WORDS, **SPECIAL, "decoder_start_token_id": 1, **sizes}
        config = AutoConfig.for_model(name, **wanted)
        config.use_cache = False
        model = AutoModelForSeq2SeqLM.from_config(config)
        return model, {"input_ids": words(N, TOKENS), "decoder_input_ids": words(N, TOKENS - 1)}

    return build


def vision(name: str, size: int = 16, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A classifier of images [3, size, size]."""

    def build() -> tuple[nn.Module, Batch]:
        from transformers import AutoConfig, AutoModelForImageClassification

        config = AutoConfig.for_model(name, **{"num_labels": CLASSES, **sizes})
        return AutoModelForImageClassification.from_config(config), {"pixel_values": torch.randn(N, 3, size, size)}

    return build


def speech(name: str, inputs: Callable[[], Tensor], **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A classifier of sounds."""

    def build() -> tuple[nn.Module, Batch]:
        from transformers import AutoConfig, AutoModelForAudioClassification

        config = AutoConfig.for_model(name, **{"num_labels": CLASSES, **sizes})
        return AutoModelForAudioClassification.from_config(config), {"input_values": inputs()}

    return build


def timm(name: str, size: int = 32, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A classifier of images [3, size, size] by its name in timm."""

    def build() -> tuple[nn.Module, Batch]:
        import timm

        return timm.create_model(name, num_classes=CLASSES, **sizes), torch.randn(N, 3, size, size)

    return build


def lora() -> tuple[nn.Module, Batch]:
    """Llama with low-rank adapters of the attention, the only parameters that are trained."""
    import peft

    model, x = language_model("llama", **GROUPED)()
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, config), x  # type: ignore[arg-type]


ZOO: dict[str, Entry] = {}


def _add(source: str, kind: str, **entries: Callable[[], tuple[nn.Module, Batch]]) -> None:
    ZOO.update({name: Entry(source, kind, build) for name, build in entries.items()})


_HF = "transformers"
_add(
    _HF,
    "language model",
    gpt2=language_model("gpt2", n_embd=12, n_layer=2, n_head=2, n_positions=8),
    llama=language_model("llama", **GROUPED),
    qwen3=language_model("qwen3", **GROUPED, head_dim=6),
    gemma2=language_model("gemma2", **GROUPED, head_dim=6, sliding_window=3),
    gpt_neox=language_model("gpt_neox", **SIZES, max_position_embeddings=16),
    mixtral=language_model("mixtral", **GROUPED, num_local_experts=3, num_experts_per_tok=2),
    mamba=language_model("mamba", hidden_size=8, num_hidden_layers=2, state_size=3, time_step_rank=2),
)
_add(
    _HF,
    "text encoder",
    bert=encoder("bert", **SIZES, max_position_embeddings=16),
)
_add(_HF, "text to text", t5=translator("t5", d_model=12, d_ff=16, d_kv=6, num_layers=1, num_heads=2))
_add(_HF, "images", vit=vision("vit", **SIZES, image_size=16, patch_size=8))


def installed(entry: Entry) -> bool:
    """Can it be built here?"""
    import importlib.util

    needs = {"peft": ("peft", "transformers")}.get(entry.source, (entry.source,))
    return all(importlib.util.find_spec(name) is not None for name in needs)

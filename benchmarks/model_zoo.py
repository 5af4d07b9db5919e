"""Small random configurations of public architectures for `models.py`, of transformers and timm.

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


def listener() -> tuple[nn.Module, Batch]:
    """Whisper: sound in, the next word of a sentence out."""
    import transformers

    sizes = {f"{part}_{what}": v for part in ("encoder", "decoder") for what, v in _HALF.items()}
    places = {"max_source_positions": 8, "max_target_positions": 8, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=WORDS, num_mel_bins=4, d_model=12, **sizes, **places, **SPECIAL)
    config.use_cache = False
    inputs = {"input_features": torch.randn(N, 4, 16), "decoder_input_ids": words(N, TOKENS - 1)}
    return transformers.WhisperForConditionalGeneration(config), inputs


class Matches(nn.Module):
    """Features of an image times those of a text, from a model of both."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        """[n, features]."""
        image = self.model.get_image_features(pixel_values=pixel_values)
        text = self.model.get_text_features(input_ids=input_ids)
        found: Tensor = image.pooler_output * text.pooler_output
        return found


def two_towers(name: str, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """A model of images and texts."""

    def build() -> tuple[nn.Module, Batch]:
        import transformers

        tower = {**SIZES, "num_hidden_layers": 1}
        text = {**tower, "vocab_size": WORDS, "max_position_embeddings": 8, **SPECIAL}
        sight = {**tower, "image_size": 16, "patch_size": 8}
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=sight, **sizes)
        inputs = {"pixel_values": torch.randn(N, 3, 16, 16), "input_ids": words(N, TOKENS)}
        return Matches(getattr(transformers, f"{name}Model")(config)), inputs

    return build


def seeing() -> tuple[nn.Module, Batch]:
    """LLaVA: four places of the text hold an image."""
    import transformers as tf

    sight = tf.CLIPVisionConfig(**{**SIZES, "num_hidden_layers": 1}, image_size=16, patch_size=8)
    text = tf.LlamaConfig(**GROUPED, **SPECIAL, vocab_size=WORDS + 1, use_cache=False)
    config = tf.LlavaConfig(
        vision_config=sight, text_config=text, image_token_index=WORDS, image_seq_length=4, vision_feature_layer=-1
    )
    ids = words(N, 7)
    ids[:, 1:5] = WORDS
    return tf.LlavaForConditionalGeneration(config), {"input_ids": ids, "pixel_values": torch.randn(N, 3, 16, 16)}


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


def timm_class(file: str, name: str, size: int, **sizes: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """The same, of a class of timm whose names fix its sizes."""

    def build() -> tuple[nn.Module, Batch]:
        from importlib import import_module

        kind = getattr(import_module(f"timm.models.{file}"), name)
        return kind(num_classes=CLASSES, **sizes), torch.randn(N, 3, size, size)

    return build


def adapted(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, Batch]]:
    """Llama with adapters, the only parameters that are trained."""

    def build() -> tuple[nn.Module, Batch]:
        import peft

        model, x = language_model("llama", **GROUPED)()
        return peft.get_peft_model(model, getattr(peft, f"{kind}Config")(**options)), x  # type: ignore[arg-type]

    return build


ZOO: dict[str, Entry] = {}


def _add(source: str, kind: str, **entries: Callable[[], tuple[nn.Module, Batch]]) -> None:
    ZOO.update({name: Entry(source, kind, build) for name, build in entries.items()})


_HF = "transformers"
_HALF = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
_DELTA = {
    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4
}  # fmt: skip
_LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 3}
_WAVES = {"conv_dim": (6, 6), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
_SPEECH = {
    **SIZES,
    **_WAVES,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
}
_STAGES = {"hidden_sizes": [4, 6], "num_stages": 2}
_add(
    _HF,
    "language model",
    gpt2=language_model("gpt2", n_embd=12, n_layer=2, n_head=2, n_positions=8),
    opt=language_model(
        "opt", hidden_size=12, num_hidden_layers=2, num_attention_heads=2, ffn_dim=16, word_embed_proj_dim=12,
        max_position_embeddings=8,
    ),
    bloom=language_model("bloom", hidden_size=12, n_layer=2, n_head=2),
    mpt=language_model("mpt", d_model=12, n_layers=2, n_heads=2, max_seq_len=8, expansion_ratio=2),
    gptj=language_model("gptj", n_embd=12, n_layer=2, n_head=2, rotary_dim=4, n_positions=8),
    gpt_neox=language_model("gpt_neox", **SIZES, max_position_embeddings=16),
    falcon=language_model("falcon", hidden_size=12, num_hidden_layers=2, num_attention_heads=2),
    llama=language_model("llama", **GROUPED),
    mistral=language_model("mistral", **GROUPED, sliding_window=3, head_dim=6),
    qwen2=language_model("qwen2", **GROUPED),
    qwen3=language_model("qwen3", **GROUPED, head_dim=6),
    phi3=language_model("phi3", **GROUPED),
    gemma2=language_model("gemma2", **GROUPED, head_dim=6, sliding_window=3),
    olmo2=language_model("olmo2", **GROUPED),
    cohere=language_model("cohere", **GROUPED),
    stablelm=language_model("stablelm", **GROUPED),
    deepseek_v3=language_model(
        "deepseek_v3", **{**GROUPED, "num_key_value_heads": 2}, **EXPERTS, **_LATENT,
        n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=2,
    ),
    mixtral=language_model("mixtral", **GROUPED, num_local_experts=3, num_experts_per_tok=2),
    qwen3_moe=language_model("qwen3_moe", **GROUPED, **EXPERTS, head_dim=6, num_experts=3, decoder_sparse_step=1),
    gpt_oss=language_model(
        "gpt_oss", **GROUPED, head_dim=6, num_local_experts=3, num_experts_per_tok=2, sliding_window=3,
        layer_types=["sliding_attention", "full_attention"],
    ),
    mamba=language_model("mamba", hidden_size=8, num_hidden_layers=2, state_size=3, time_step_rank=2),
    mamba2=language_model(
        "mamba2", hidden_size=8, num_hidden_layers=2, state_size=3, num_heads=4, head_dim=4, n_groups=1, chunk_size=4
    ),
    rwkv=language_model("rwkv", hidden_size=8, num_hidden_layers=2, attention_hidden_size=8, intermediate_size=12),
    recurrent_gemma=language_model(
        "recurrent_gemma", **GROUPED, head_dim=6, lru_width=12, attention_window_size=3,
        block_types=["recurrent", "attention"],
    ),
)  # fmt: skip
_add(
    _HF,
    "language model",
    gemma3_text=language_model("gemma3_text", **GROUPED, head_dim=6, sliding_window=3),
    cohere2=language_model("cohere2", **GROUPED, head_dim=6, sliding_window=3),
    olmo3=language_model("olmo3", **GROUPED, sliding_window=3),
    glm4=language_model("glm4", **GROUPED, head_dim=6),
    granite=language_model("granite", **GROUPED),
    smollm3=language_model("smollm3", **GROUPED),
    starcoder2=language_model("starcoder2", **GROUPED, sliding_window=3),
    minicpm3=language_model("minicpm3", **{**GROUPED, "num_key_value_heads": 2}, **_LATENT),
    deepseek_v2=language_model(
        "deepseek_v2", **{**GROUPED, "num_key_value_heads": 2}, **EXPERTS, **_LATENT,
        n_routed_experts=4, n_shared_experts=1, n_group=2, topk_group=1, first_k_dense_replace=1, head_dim=2,
    ),
    llama4_text=language_model("llama4_text", **GROUPED, head_dim=6, num_local_experts=3, num_experts_per_tok=2),
    hunyuan_moe=language_model(
        "hunyuan_v1_moe", **GROUPED, head_dim=6, num_experts=3, moe_topk=2, num_shared_expert=1
    ),
    jetmoe=language_model(
        "jetmoe", **GROUPED, kv_channels=6, num_local_experts=3, num_experts_per_tok=2
    ),
    olmoe=language_model("olmoe", **GROUPED, num_experts=3, num_experts_per_tok=2),
    qwen3_next=language_model(
        "qwen3_next", **GROUPED, **EXPERTS, **_DELTA, head_dim=6, num_experts=3, shared_expert_intermediate_size=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    falcon_h1=language_model(
        "falcon_h1", **GROUPED, head_dim=6, mamba_d_state=3, mamba_d_head=6, mamba_n_heads=4, mamba_d_ssm=24,
        mamba_n_groups=1, mamba_chunk_size=4,
    ),
    lfm2=language_model("lfm2", **GROUPED, layer_types=["conv", "full_attention"], block_ff_dim=16),
)  # fmt: skip
_ADAPTED = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
_add(
    "peft",
    "language model",
    llama_lora=adapted("Lora", r=2, **_ADAPTED),
    llama_dora=adapted("Lora", r=2, use_dora=True, **_ADAPTED),
    llama_ia3=adapted("IA3", target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    llama_prompt=adapted("PromptTuning", num_virtual_tokens=2, task_type="CAUSAL_LM"),
)
_add(
    _HF,
    "text encoder",
    gpt2_classifier=encoder("gpt2", n_embd=12, n_layer=2, n_head=2, n_positions=8),
    llama_classifier=encoder("llama", **GROUPED),
)
_add(
    _HF,
    "text encoder",
    bert=encoder("bert", **SIZES, max_position_embeddings=16),
    roberta=encoder("roberta", **SIZES, max_position_embeddings=16),
    distilbert=encoder("distilbert", dim=12, n_layers=2, n_heads=2, hidden_dim=16, max_position_embeddings=16),
    albert=encoder("albert", **SIZES, embedding_size=6, max_position_embeddings=16),
    electra=encoder("electra", **SIZES, embedding_size=6, max_position_embeddings=16),
    deberta_v2=encoder(
        "deberta-v2", **SIZES, max_position_embeddings=16, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    xlnet=encoder("xlnet", d_model=12, n_layer=2, n_head=2, d_inner=16),
    modernbert=encoder("modernbert", **SIZES, max_position_embeddings=16, local_attention=2, reference_compile=False),
    mpnet=encoder("mpnet", **SIZES, max_position_embeddings=16),
    longformer=encoder("longformer", **SIZES, attention_window=4, max_position_embeddings=16),
    big_bird=encoder("big_bird", **SIZES, attention_type="original_full", max_position_embeddings=16),
    convbert=encoder(
        "convbert", **SIZES, embedding_size=6, head_ratio=1, conv_kernel_size=3, max_position_embeddings=16
    ),
    fnet=encoder("fnet", hidden_size=12, num_hidden_layers=2, intermediate_size=16, max_position_embeddings=16),
)
_add(
    _HF,
    "text to text",
    t5=translator("t5", d_model=12, d_ff=16, d_kv=6, num_layers=1, num_heads=2),
    longt5=translator(
        "longt5", d_model=12, d_ff=16, d_kv=6, num_layers=1, num_heads=2, local_radius=2, global_block_size=2,
        encoder_attention_type="transient-global",
    ),
    bart=translator(
        "bart", d_model=12, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16,
    ),
)  # fmt: skip
_add(
    _HF,
    "images",
    vit=vision("vit", **SIZES, image_size=16, patch_size=8),
    beit=vision("beit", **SIZES, image_size=16, patch_size=8, use_relative_position_bias=True),
    dinov2=vision("dinov2", **SIZES, mlp_ratio=2, image_size=16, patch_size=8),
    swin=vision("swin", image_size=16, patch_size=2, embed_dim=6, depths=[1, 1], num_heads=[2, 2], window_size=4),
    convnext=vision("convnext", **_STAGES, depths=[1, 1], patch_size=2),
    resnet=vision("resnet", **_STAGES, embedding_size=4, depths=[1, 1], layer_type="basic"),
    poolformer=vision(
        "poolformer", hidden_sizes=[4, 6], num_encoder_blocks=2, depths=[1, 1], patch_sizes=[3, 3], strides=[2, 2],
        padding=[1, 1],
    ),
    mobilenet_v2=vision("mobilenet_v2", depth_multiplier=0.1, min_depth=4, depth_divisible_by=4, image_size=16),
)  # fmt: skip
_add(_HF, "images and text", clip=two_towers("CLIP", projection_dim=6), siglip=two_towers("Siglip"), llava=seeing)
_add(
    _HF,
    "sound",
    whisper=listener,
    wav2vec2=speech("wav2vec2", lambda: torch.randn(N, 100), **_SPEECH),
    audio_spectrogram_transformer=speech(
        "audio-spectrogram-transformer", lambda: torch.randn(N, 16, 8), **SIZES, patch_size=4, frequency_stride=4,
        time_stride=4, max_length=16, num_mel_bins=8,
    ),
)  # fmt: skip
_VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
_add(
    "timm",
    "images",
    timm_vit=timm("vit_tiny_patch16_224", 16, **_VIT),
    timm_eva02=timm("eva02_tiny_patch14_224", 16, **{**_VIT, "embed_dim": 16}),
    mixer=timm_class("mlp_mixer", "MlpMixer", 16, img_size=16, patch_size=8, embed_dim=12, num_blocks=2),
    xcit=timm("xcit_nano_12_p8_224", 16, img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=2),
    swinv2=timm(
        "swinv2_tiny_window8_256",
        16,
        img_size=16,
        patch_size=2,
        embed_dim=6,
        depths=(1, 1),
        num_heads=(2, 2),
        window_size=4,
    ),
    convnextv2=timm_class(
        "convnext", "ConvNeXt", 32, depths=(1, 1, 1, 1), dims=(4, 4, 6, 6), patch_size=2, use_grn=True
    ),
)


def installed(entry: Entry) -> bool:
    """Can it be built here?"""
    import importlib.util

    needs = {"peft": ("peft", "transformers")}.get(entry.source, (entry.source,))
    return all(importlib.util.find_spec(name) is not None for name in needs)

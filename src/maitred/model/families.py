"""Hugging Face config -> DecoderSpec: one table row for each architecture.

Defaults for keys that a config.json leaves out are those of transformers' own config classes (version 5.23).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from maitred.core.errors import CheckpointError
from maitred.model.rope_config import Config, rope_from_config, ropes_by_type
from maitred.model.spec import (
    Activation,
    DecoderSpec,
    EncoderSpec,
    LatentSpec,
    LayerSpec,
    NormPlacement,
    QKNorm,
    RecurrentSpec,
    RopeType,
    RoutedSpec,
    Scoring,
)

LayersOf = Callable[[Config, int], tuple[LayerSpec, ...]]  # (config with the family's defaults, head_dim)
Slides = Callable[[Config, int], bool]  # (the same config, number of the layer)
RoutedOf = Callable[[Config, int], RoutedSpec | int | None]  # (the same); else it is dense

_KINDS = ("full_attention", "sliding_attention")


def same_window(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Every layer alike; `sliding_window`, when the family has it, holds for all (Llama, Mistral, Phi-3 ...)."""
    rope = rope_from_config(c, head_dim)
    return (LayerSpec(window=c.get("sliding_window"), rope=rope),) * int(c["num_hidden_layers"])


def no_window(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    return same_window({**c, "sliding_window": None}, head_dim)


def sliding_layers(
    c: Config, head_dim: int, slides: Slides, has_rope: Slides | None = None, unlike_ropes: bool = False
) -> tuple[LayerSpec, ...]:
    """Layers slide by `layer_types`, or by the older rule `slides`. The ropes of sliding and full layers may differ
    (`unlike_ropes`); `has_rope` says which layers rotate at all."""
    ropes = ropes_by_type(c, head_dim) if unlike_ropes else dict.fromkeys(_KINDS, rope_from_config(c, head_dim))
    return tuple(
        LayerSpec(window=_window(c["sliding_window"], t), rope=ropes[t] if has_rope is None or has_rope(c, i) else None)
        for i, t in enumerate(_layer_types(c, slides))
    )


def _has_window(c: Config) -> bool:
    return c["sliding_window"] is not None


def _has_rope(c: Config, layer: int) -> bool:
    """SmolLM3: each `no_rope_layer_interval`-th layer is without."""
    told = c["no_rope_layers"]
    return bool(told[layer] if told else (layer + 1) % c["no_rope_layer_interval"])


every_other = partial(sliding_layers, slides=lambda c, i: i % 2 == 0)
patterned = partial(sliding_layers, slides=lambda c, i: (i + 1) % c["sliding_window_pattern"] != 0, unlike_ropes=True)
qwen_layers = partial(sliding_layers, slides=lambda c, i: _has_window(c) and i >= c["max_window_layers"])
qwen2_moe_layers = partial(
    sliding_layers, slides=lambda c, i: _has_window(c) and i % 2 == 0 and i < c["max_window_layers"]
)
smollm3_layers = partial(sliding_layers, slides=lambda c, i: _has_window(c) and not _has_rope(c, i), has_rope=_has_rope)


def gemma4_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Sliding and full layers have unlike heads; the last layers have queries alone, over keys and values of the last
    layer before them that is of their type."""
    if c["hidden_size_per_layer_input"] and c["vocab_size_per_layer_input"] != c["vocab_size"]:
        raise CheckpointError(
            f"vocab_size_per_layer_input is {c['vocab_size_per_layer_input']}; it must be vocab_size, {c['vocab_size']}"
        )
    n, equal, by_layer = c["num_hidden_layers"], c["attention_k_eq_v"], c.get("per_layer_config") or {}
    types = [*_layer_types(c, lambda _, i: (i + 1) % 6 != 0)[:-1], "full_attention"]
    sliding = c["num_key_value_heads"], head_dim
    full = (equal and c["num_global_key_value_heads"]) or sliding[0], c["global_head_dim"]
    found, own = [], n - c["num_kv_shared_layers"]
    for i, kind in enumerate(types):
        heads = full if kind == "full_attention" and not by_layer else sliding
        if other := by_layer.get(str(i)):  # as transformers writes the same
            heads = other.get("num_key_value_heads", heads[0]), other.get("head_dim", heads[1])
        layer = LayerSpec(
            window=_window(c["sliding_window"], kind),
            rope=ropes_by_type(c, heads[1])[kind],
            heads=heads,
            keys_as_values=equal and kind == "full_attention",
            kv_of=None if i < own else max(j for j in range(own) if types[j] == kind),
        )
        found.append(layer)
    return tuple(found)


def gemma4_mlp(c: Config, layer: int) -> RoutedSpec | int | None:
    """Layers without keys of their own may be twice as wide; experts stand beside that."""
    is_wide = c["use_double_wide_mlp"] and layer >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
    width = int(c["intermediate_size"]) * (2 if is_wide else 1)
    if not c["enable_moe_block"]:
        return width if is_wide else None
    return RoutedSpec(
        num_experts=c["num_experts"],
        num_active=c["top_k_experts"],
        width=c["moe_intermediate_size"],
        normalized=True,
        shared_width=width,
        beside_dense=True,
    )


def recurrent_layers(c: Config, head_dim: int, *, grouped: bool = False) -> tuple[LayerSpec, ...]:
    """Each `full_attention_interval`-th layer has softmax attention, the others a gated delta rule."""
    n, interval = c["num_hidden_layers"], c["full_attention_interval"]
    rule = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(n)]
    types = _checked_types(c, c.get("layer_types") or rule, ("full_attention", "linear_attention"))
    rope = rope_from_config(c, head_dim)
    delta = RecurrentSpec(
        num_key_heads=c["linear_num_key_heads"],
        num_value_heads=c["linear_num_value_heads"],
        key_dim=c["linear_key_head_dim"],
        value_dim=c["linear_value_head_dim"],
        conv_width=c["linear_conv_kernel_dim"],
        grouped=grouped,
        tiled=bool(c.get("linear_heads_tiled")),  # of a GGUF file
    )
    if _activation(c["hidden_act"]) is not Activation.SILU:
        raise CheckpointError(f"hidden_act is {c['hidden_act']!r}; the convolution of recurrent layers needs silu")
    return tuple(LayerSpec(rope=rope) if t == "full_attention" else LayerSpec(attention=delta) for t in types)


def latent_layers(c: Config, head_dim: int) -> tuple[LayerSpec, ...]:
    """Latent attention; pairs of rope side by side, unless `rope_interleave` says otherwise."""
    latent = LatentSpec(
        rank=c["kv_lora_rank"],
        rope_dim=c["qk_rope_head_dim"],
        key_dim=c["qk_nope_head_dim"],
        value_dim=c["v_head_dim"],
        query_rank=c["q_lora_rank"] or 0,
    )
    rope = rope_from_config({**c, "rope_interleaved": c["rope_interleave"]}, latent.rope_dim)
    return (LayerSpec(attention=latent, rope=rope),) * int(c["num_hidden_layers"])


def no_experts(c: Config, layer: int) -> None:
    return None


def mixtral_experts(c: Config, layer: int) -> RoutedSpec:
    return RoutedSpec(
        num_experts=c["num_local_experts"],
        num_active=c["num_experts_per_tok"],
        width=c["intermediate_size"],
        normalized=True,
    )


def qwen_experts(c: Config, layer: int) -> RoutedSpec | None:
    """Every `decoder_sparse_step`-th layer but those of `mlp_only_layers`; Qwen2's has a shared expert with a gate."""
    experts = c.get("num_experts") or c.get("num_local_experts")
    if layer in (c["mlp_only_layers"] or ()) or not experts or (layer + 1) % c["decoder_sparse_step"]:
        return None
    shared = c.get("shared_expert_intermediate_size") or 0
    return RoutedSpec(
        num_experts=experts,
        num_active=c["num_experts_per_tok"],
        width=c["moe_intermediate_size"],
        normalized=bool(c["norm_topk_prob"]),
        shared_width=shared,
        shared_gate=shared > 0,
    )


def olmoe_experts(c: Config, layer: int) -> RoutedSpec:
    if c["clip_qkv"] is not None:
        raise CheckpointError(
            f"clip_qkv is {c['clip_qkv']}; queries, keys and values cannot be clipped, use a release without"
        )
    return RoutedSpec(
        num_experts=c["num_experts"],
        num_active=c["num_experts_per_tok"],
        width=c["intermediate_size"],
        normalized=bool(c["norm_topk_prob"]),
    )


def deepseek_experts(c: Config, layer: int) -> RoutedSpec | None:
    """DeepSeek's rules: V3's, which GLM-4.5 has (sigmoid, a correction bias, a group by its best two), and V2's
    (softmax, a group by its best one); shared experts; first layers are dense."""
    scoring, method = c.get("scoring_func", "sigmoid"), c.get("topk_method", "noaux_tc")
    is_v2, is_limited = scoring == "softmax", method != "greedy"
    known = {"sigmoid": ("noaux_tc",), "softmax": ("greedy", "group_limited_greedy")}
    if method not in known.get(scoring, ()) or (is_v2 and c["norm_topk_prob"]):
        raise CheckpointError(
            f"a router with scoring_func {scoring!r}, topk_method {method!r} and norm_topk_prob {c['norm_topk_prob']} "
            f"is not supported; supported are sigmoid with noaux_tc, and without norm_topk_prob softmax with greedy or "
            f"group_limited_greedy"
        )
    types = c.get("mlp_layer_types")
    if types[layer] == "dense" if types else layer < c["first_k_dense_replace"]:
        return None
    return RoutedSpec(
        num_experts=c.get("n_routed_experts") or c["num_local_experts"],
        num_active=c["num_experts_per_tok"],
        width=c["moe_intermediate_size"],
        scoring=Scoring.SOFTMAX if is_v2 else Scoring.SIGMOID,
        correction_bias=not is_v2,
        num_groups=c["n_group"] if is_limited else 1,
        num_active_groups=c["topk_group"] if is_limited else 1,
        best_of_group=1 if is_v2 else 2,
        normalized=bool(c["norm_topk_prob"]),
        scale=float(c["routed_scaling_factor"]),
        shared_width=c["moe_intermediate_size"] * (c["n_shared_experts"] or 0),
    )


def gpt_oss_experts(c: Config, layer: int) -> RoutedSpec:
    return RoutedSpec(
        num_experts=c.get("num_local_experts") or c["num_experts"],
        num_active=c["num_experts_per_tok"],
        width=c["intermediate_size"],
        scoring=Scoring.SOFTMAX_OF_CHOSEN,
        router_bias=True,
        expert_bias=True,
        interleaved=True,
    )


def _layer_types(c: Config, slides: Slides) -> list[str]:
    """`layer_types` of today's form, or the rule of the older one."""
    n = c["num_hidden_layers"]
    return _checked_types(c, c.get("layer_types") or [_KINDS[slides(c, i)] for i in range(n)], _KINDS)


def _checked_types(c: Config, types: Sequence[str], known: tuple[str, ...]) -> list[str]:
    unknown = sorted(set(types) - set(known))
    if unknown:
        raise CheckpointError(f"layer type {unknown[0]!r} is not supported; the supported ones are {', '.join(known)}")
    if len(types) != c["num_hidden_layers"]:
        raise CheckpointError(f"config.json has {len(types)} layer_types for {c['num_hidden_layers']} layers")
    return list(types)


def _window(window: int | None, layer_type: str) -> int | None:
    if layer_type == "full_attention":
        return None
    if window is None:
        raise CheckpointError("config.json has sliding_attention layers, but no sliding_window in use; set it")
    return window


_log = logging.getLogger(__name__)

ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "gelu_new": Activation.GELU_TANH,
}


class UnknownArchitecture(CheckpointError):
    """There is no row for the architecture of a config.json."""


def spec_from_config(config: Config) -> DecoderSpec:
    """Describe the decoder of a parsed config.json.

    Raises CheckpointError, with the names that would work, for an architecture, rope type or activation that is not
    supported, and for quantised weights.
    """
    architecture = _architecture(config)
    try:
        return _describe(architecture, FAMILIES[architecture], config)
    except (TypeError, ValueError, KeyError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"config.json does not describe a {architecture}: a value has the wrong type or is missing "
            f"({type(error).__name__}: {error})"
        ) from error


def _describe(architecture: str, family: Family, config: Config) -> DecoderSpec:
    c = _with_defaults(config, family)
    head_dim = _head_dim(c)
    if family.is_encoder:
        return _describe_encoder(architecture, family, c, head_dim)
    layers = tuple(replace(layer, mlp=family.experts(c, i)) for i, layer in enumerate(family.layers(c, head_dim)))
    if not family.partial_rotary and any(layer.rope and layer.rope.dim != head_dim for layer in layers):
        raise CheckpointError(f"{architecture} rotates whole heads; partial_rotary_factor must be absent or 1")
    return DecoderSpec(
        architecture=architecture,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=1 if "kv_lora_rank" in c else c["num_key_value_heads"] or c["num_attention_heads"],
        head_dim=head_dim,
        layers=layers,
        max_position_embeddings=_context(c, layers),
        norm_eps=float(c["rms_norm_eps"]),
        norm_placement=family.norm_placement,
        norm_offset=float(c.get("norm_offset", family.norm_offset)),  # 0 of a GGUF file
        qk_norm=QKNorm.NONE if c.get("use_qk_norm") is False else family.qk_norm,
        activation=family.activation or _activation(c[family.activation_key]),
        activation_limit=float(c.get("swiglu_limit") or 0),
        attention_sinks=family.attention_sinks,
        output_gate=family.output_gate,
        num_mtp_layers=c.get("num_nextn_predict_layers") or c.get("mtp_num_hidden_layers") or 0,
        qkv_bias=_switch(c, family.qkv_bias),
        output_bias=_switch(c, family.output_bias),
        mlp_bias=_switch(c, family.mlp_bias),
        tied_embeddings=bool(c["tie_word_embeddings"]),
        fused_weights=family.fused_weights,
        fused_gate_up=family.fused_gate_up,
        **{"attention_scale": head_dim**-0.5, **family.scales(c)},
    )


def _describe_encoder(architecture: str, family: Family, c: Config, head_dim: int) -> DecoderSpec:
    if c["position_embedding_type"] != "absolute" or c.get("is_decoder"):
        raise CheckpointError(
            f"{architecture} with position_embedding_type {c['position_embedding_type']!r} and is_decoder "
            f"{c.get('is_decoder', False)}; encoders have absolute positions, and see all of a text"
        )
    first, num_positions = c["pad_token_id"] + 1 if family.skips_padding else 0, int(c["max_position_embeddings"])
    return DecoderSpec(
        architecture=architecture,
        vocab_size=c["vocab_size"],
        hidden_size=c["hidden_size"],
        intermediate_size=c["intermediate_size"],
        num_heads=c["num_attention_heads"],
        num_kv_heads=c["num_attention_heads"],
        head_dim=head_dim,
        layers=(LayerSpec(),) * int(c["num_hidden_layers"]),
        max_position_embeddings=num_positions - first,
        norm_eps=float(c["layer_norm_eps"]),
        activation=_activation(c["hidden_act"]),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied_embeddings=True,
        attention_scale=head_dim**-0.5,
        encoder=EncoderSpec(num_positions=num_positions, first_position=first, num_types=int(c["type_vocab_size"])),
    )


def _no_scales(c: Config) -> dict[str, Any]:
    return {}


def _gemma2_scales(c: Config) -> dict[str, Any]:
    return {
        "attention_scale": c["query_pre_attn_scalar"] ** -0.5,
        "attention_softcap": c["attn_logit_softcapping"],
        "logit_softcap": c["final_logit_softcapping"],
        "embedding_scale": c["hidden_size"] ** 0.5,
    }


def _gemma3_scales(c: Config) -> dict[str, Any]:
    # attn_logit_softcapping stands in Gemma 3 configs, but the model has no such step.
    return _gemma2_scales(c) | {"attention_softcap": None}


def _gemma4_scales(c: Config) -> dict[str, Any]:
    return {
        "attention_scale": 1.0,
        "logit_softcap": c["final_logit_softcapping"],
        "embedding_scale": c["hidden_size"] ** 0.5,
        "per_layer_width": c["hidden_size_per_layer_input"] or 0,
        "value_norm": True,
        "layer_scales": True,
    }


def _granite_scales(c: Config) -> dict[str, Any]:
    return {
        "attention_scale": float(c["attention_multiplier"]),
        "embedding_scale": float(c["embedding_multiplier"]),
        "residual_scale": float(c["residual_multiplier"]),
        "logit_scale": 1.0 / c["logits_scaling"],
    }


def _deepseek_scales(c: Config) -> dict[str, Any]:
    """By the values of a query, and by yarn's `mscale_all_dim` twice: once for queries and once for keys."""
    scale = (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) ** -0.5
    rope = c.get("rope_scaling") or c.get("rope_parameters") or {}
    if (rope.get("rope_type") or rope.get("type") or "default") != "default" and rope.get("mscale_all_dim"):
        scale *= max(0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1.0, 1.0) ** 2
    return {"attention_scale": scale}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A row of the table: how an architecture differs from Llama. A bias is a constant or the config key that says."""

    model_types: tuple[str, ...]
    layers: LayersOf = no_window
    experts: RoutedOf = no_experts
    scales: Callable[[Config], dict[str, Any]] = _no_scales
    norm_placement: NormPlacement = NormPlacement.PRE
    norm_offset: float = 0.0
    qk_norm: QKNorm = QKNorm.NONE
    activation_key: str = "hidden_act"
    activation: Activation | None = None
    """Where the model has its own, whatever the config says."""
    attention_sinks: bool = False
    output_gate: bool = False
    qkv_bias: bool | str = False
    output_bias: bool | str = False
    mlp_bias: bool | str = False
    fused_weights: bool = False
    fused_gate_up: bool = False
    partial_rotary: bool = False
    is_encoder: bool = False
    """BERT's kind (`EncoderSpec`)."""
    skips_padding: bool = False
    """Positions of an encoder begin behind the padding's row (RoBERTa)."""


_LLAMA_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu", "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10_000.0,
}  # fmt: skip
_QWEN_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096,
    "max_window_layers": 28,
}  # fmt: skip
_QWEN_MOE_DEFAULTS = _QWEN_DEFAULTS | {"decoder_sparse_step": 1, "norm_topk_prob": False, "mlp_only_layers": None}
_QWEN_NEXT_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 2, "head_dim": 256, "intermediate_size": 5632, "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
}  # fmt: skip
_GEMMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_GEMMA4_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_BERT_DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu", "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    "pad_token_id": 0, "position_embedding_type": "absolute",
}  # fmt: skip
_DISTILBERT_NAMES = {
    "hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads", "hidden_act": "activation",
}  # fmt: skip

# First of a family's model types -> what it has beside `_LLAMA_DEFAULTS`. Of DeepSeek, all else stands in a hub's
# config.json.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "bert": _BERT_DEFAULTS,
    **dict.fromkeys(("camembert", "roberta", "xlm-roberta"), _BERT_DEFAULTS | {"pad_token_id": 1}),
    "distilbert": _BERT_DEFAULTS | {"type_vocab_size": 0},
    "deepseek_v2": {
        "rope_interleave": True, "scoring_func": "softmax", "topk_method": "greedy", "first_k_dense_replace": 0,
    },
    "deepseek_v3": {"rope_interleave": True},
    "gemma2": _GEMMA_DEFAULTS | {
        "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": _GEMMA_DEFAULTS | {
        "vocab_size": 262_208, "max_position_embeddings": 131_072, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "sliding_window_pattern": 6, "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "gemma4_text": _GEMMA_DEFAULTS | {
        "vocab_size": 262_144, "num_hidden_layers": 30, "max_position_embeddings": 131_072,
        "final_logit_softcapping": None, "sliding_window": 512, "layer_types": None, "global_head_dim": 512,
        "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False, "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
        "enable_moe_block": False, "rope_parameters": _GEMMA4_ROPES,
    },
    "glm4": {
        "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5, "num_key_value_heads": 2, "head_dim": 128,
        "attention_bias": True, "rms_norm_eps": 1.5625e-07, "rope_interleaved": True,
    },
    "glm4_moe": {
        "max_position_embeddings": 131_072, "partial_rotary_factor": 0.5, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5, "use_qk_norm": False, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "glm4_moe_lite": {"rope_interleave": True, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5},
    "gpt_oss": {
        "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "sliding_window": 128, "swiglu_limit": 7.0,
    },
    "granite": {
        "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0, "attention_multiplier": 1.0,
    },
    "ministral3": {
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0, "sliding_window": None,
    },
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096},
    "mixtral": {
        "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0,
        "sliding_window": None,
    },
    "olmo2": {"rms_norm_eps": 1e-5},
    "olmo3": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4},
    "olmoe": {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "clip_qkv": None, "norm_topk_prob": False},
    "phi3": {
        "max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
    "qwen2": _QWEN_DEFAULTS,
    "qwen2_moe": _QWEN_MOE_DEFAULTS | {
        "num_key_value_heads": 16, "qkv_bias": True, "shared_expert_intermediate_size": 5632,
    },
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128},
    "qwen3_moe": _QWEN_MOE_DEFAULTS | {"num_key_value_heads": 4},
    "qwen3_next": _QWEN_NEXT_DEFAULTS,
    "qwen3_5_text": _QWEN_NEXT_DEFAULTS | {"num_key_value_heads": 4},
    "qwen3_5_moe_text": _QWEN_NEXT_DEFAULTS | {"num_experts": 256, "num_experts_per_tok": 8},
    "smollm3": {
        "num_key_value_heads": 4, "max_position_embeddings": 32768, "tie_word_embeddings": True,
        "rope_theta": 2_000_000.0, "use_sliding_window": False, "sliding_window": None, "no_rope_layers": None,
        "no_rope_layer_interval": 4,
    },
}  # fmt: skip
_QWEN_NEXT = Family(
    model_types=("qwen3_next",),
    layers=partial(recurrent_layers, grouped=True),
    experts=qwen_experts,
    norm_offset=1.0,
    qk_norm=QKNorm.PER_HEAD,
    output_gate=True,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    partial_rotary=True,
)
_QWEN35_MOE = replace(_QWEN_NEXT, model_types=("qwen3_5_moe_text", "qwen3_5_moe"), layers=recurrent_layers)
_GEMMA2 = Family(
    model_types=("gemma2",),
    layers=every_other,
    scales=_gemma2_scales,
    norm_placement=NormPlacement.BOTH,
    norm_offset=1.0,
    activation_key="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
)
_GEMMA3 = replace(
    _GEMMA2, model_types=("gemma3_text", "gemma3"), layers=patterned, scales=_gemma3_scales, qk_norm=QKNorm.PER_HEAD
)
_DEEPSEEK = Family(
    model_types=("deepseek_v3",),
    layers=latent_layers,
    experts=deepseek_experts,
    scales=_deepseek_scales,
    partial_rotary=True,
)
_GEMMA4 = Family(
    model_types=("gemma4_text", "gemma4"),
    layers=gemma4_layers,
    experts=gemma4_mlp,
    scales=_gemma4_scales,
    norm_placement=NormPlacement.BOTH,
    qk_norm=QKNorm.PER_HEAD,
    activation_key="hidden_activation",
    qkv_bias="attention_bias",
    output_bias="attention_bias",
    partial_rotary=True,
)

_QWEN3 = Family(
    model_types=("qwen3",),
    layers=qwen_layers,
    qk_norm=QKNorm.PER_HEAD,
    qkv_bias="attention_bias",
    output_bias="attention_bias",
)
_BERT = Family(model_types=("bert",), is_encoder=True)
_ROBERTA = Family(model_types=("roberta",), is_encoder=True, skips_padding=True)
ENCODERS = {
    "Bert": _BERT,
    "Camembert": replace(_ROBERTA, model_types=("camembert",)),
    "DistilBert": Family(model_types=("distilbert",), is_encoder=True),
    "Roberta": _ROBERTA,
    "XLMRoberta": replace(_ROBERTA, model_types=("xlm-roberta",)),
}
_ENCODER_USES = ("Model", "ForSequenceClassification", "ForMaskedLM")  # what is trained for filling gaps, too

FAMILIES: dict[str, Family] = {
    **{f"{name}{use}": family for name, family in ENCODERS.items() for use in _ENCODER_USES},
    "DeepseekV2ForCausalLM": replace(_DEEPSEEK, model_types=("deepseek_v2",)),
    "DeepseekV3ForCausalLM": _DEEPSEEK,
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,  # its text model; pictures are not read
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Glm4ForCausalLM": Family(
        model_types=("glm4",),
        norm_placement=NormPlacement.GLM4,
        qkv_bias="attention_bias",
        fused_gate_up=True,
        partial_rotary=True,
    ),
    "Glm4MoeLiteForCausalLM": replace(_DEEPSEEK, model_types=("glm4_moe_lite",)),  # GLM-4.7-Flash
    "Glm4MoeForCausalLM": Family(  # GLM-4.5 and Air
        model_types=("glm4_moe",),
        experts=deepseek_experts,
        qk_norm=QKNorm.PER_HEAD,
        qkv_bias="attention_bias",
        partial_rotary=True,
    ),
    "GptOssForCausalLM": Family(
        model_types=("gpt_oss",),
        layers=every_other,
        experts=gpt_oss_experts,
        activation=Activation.CLAMPED_SWIGLU,
        attention_sinks=True,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "GraniteForCausalLM": Family(
        model_types=("granite",),
        scales=_granite_scales,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
    "LlamaForCausalLM": Family(
        model_types=("llama",), qkv_bias="attention_bias", output_bias="attention_bias", mlp_bias="mlp_bias"
    ),
    "Ministral3ForCausalLM": Family(model_types=("ministral3",), layers=same_window),
    "MistralForCausalLM": Family(model_types=("mistral",), layers=same_window),
    "MixtralForCausalLM": Family(model_types=("mixtral",), layers=same_window, experts=mixtral_experts),
    "Olmo2ForCausalLM": Family(
        model_types=("olmo2",),
        norm_placement=NormPlacement.POST,
        qk_norm=QKNorm.FULL_WIDTH,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "Olmo3ForCausalLM": Family(
        model_types=("olmo3",),
        layers=patterned,
        norm_placement=NormPlacement.POST,
        qk_norm=QKNorm.FULL_WIDTH,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "OlmoeForCausalLM": Family(
        model_types=("olmoe",),
        experts=olmoe_experts,
        qk_norm=QKNorm.FULL_WIDTH,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "Phi3ForCausalLM": Family(model_types=("phi3",), layers=same_window, fused_weights=True, partial_rotary=True),
    "Qwen2ForCausalLM": Family(model_types=("qwen2",), layers=qwen_layers, qkv_bias=True),  # Qwen2 and Qwen2.5
    "Qwen2MoeForCausalLM": Family(
        model_types=("qwen2_moe",), layers=qwen2_moe_layers, experts=qwen_experts, qkv_bias="qkv_bias"
    ),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3ForSequenceClassification": _QWEN3,  # rerankers with one row, yes less no, in place of the output matrix
    "Qwen3NextForCausalLM": _QWEN_NEXT,
    "Qwen3_5ForCausalLM": replace(_QWEN35_MOE, model_types=("qwen3_5_text", "qwen3_5"), experts=no_experts),
    "Qwen3_5MoeForCausalLM": _QWEN35_MOE,
    "Qwen3MoeForCausalLM": Family(
        model_types=("qwen3_moe",),
        layers=same_window,
        experts=qwen_experts,
        qk_norm=QKNorm.PER_HEAD,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
    ),
    "SmolLM3ForCausalLM": Family(
        model_types=("smollm3",),
        layers=smollm3_layers,
        qkv_bias="attention_bias",
        output_bias="attention_bias",
        mlp_bias="mlp_bias",
    ),
}


def _architecture(config: Config) -> str:
    """The supported name among `architectures`, or the family of `model_type` when the config names none."""
    names = list(config.get("architectures") or [])
    for name in (*names, *(f"{each.removesuffix('Model')}ForCausalLM" for each in names if each.endswith("Model"))):
        if name in FAMILIES:
            if config.get("auto_map"):
                _log.debug("config.json brings its own Python code (auto_map); it is not run, %s is built in", name)
            return str(name)
    text = config.get("text_config") or {}
    if not names or any(name.endswith("ForConditionalGeneration") for name in names):
        for name, family in FAMILIES.items():
            if (text.get("model_type") or config.get("model_type")) in family.model_types:
                return name
    unknown = names[0] if names else config.get("model_type")
    code = " It brings its own Python code (auto_map), which is never run." if config.get("auto_map") else ""
    raise UnknownArchitecture(
        f"architecture {unknown!r} is not supported; the supported ones are {', '.join(FAMILIES)}.{code}"
    )


def _with_defaults(config: Config, family: Family) -> dict[str, Any]:
    """The text model's settings, complete."""
    text = config.get("text_config") or {}
    defaults = _DEFAULTS.get(family.model_types[0], {})
    c = {**_LLAMA_DEFAULTS, **defaults, **config, **text}
    if "distilbert" in family.model_types:
        c |= {name: c[own] for name, own in _DISTILBERT_NAMES.items() if own in c}
    if text and "tie_word_embeddings" not in text:
        c["tie_word_embeddings"] = config.get("tie_word_embeddings", True)
    if any(name.endswith(("Model", "ForSequenceClassification")) for name in config.get("architectures") or ()):
        c["tie_word_embeddings"] = True  # saved without an output matrix
    for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if not isinstance(c.get(name), int):
            raise CheckpointError(f"config.json has no number {name!r} (it has {c.get(name)!r})")
    if not c.get("use_sliding_window", True) and "use_sliding_window" in defaults:  # Qwen and SmolLM3 alone heed it
        c["sliding_window"] = None
    if c.get("use_bidirectional_attention") not in (None, False, "vision"):  # of pictures' tokens alone
        raise CheckpointError("use_bidirectional_attention makes this an encoder; only causal decoders are served")
    return c


def _head_dim(c: Config) -> int:
    if "kv_lora_rank" in c:  # the key that latent attention keeps; head_dim, where it is told, is the rotated part's
        return int(c["kv_lora_rank"] + c["qk_rope_head_dim"])
    if c["head_dim"] is not None:
        return int(c["head_dim"])
    if c["hidden_size"] % c["num_attention_heads"]:
        raise CheckpointError(
            f"hidden_size ({c['hidden_size']}) is no multiple of num_attention_heads ({c['num_attention_heads']}) "
            f"and config.json has no head_dim"
        )
    return int(c["hidden_size"] // c["num_attention_heads"])


def _context(c: Config, layers: tuple[LayerSpec, ...]) -> int:
    """`max_position_embeddings`, or what yarn stretches the original context to where that is more (Qwen2.5)."""
    stretched = [
        int(layer.rope.original_max_position_embeddings * layer.rope.factor)
        for layer in layers
        if layer.rope is not None and layer.rope.rope_type is RopeType.YARN
    ]
    return max([int(c["max_position_embeddings"]), *stretched])


def _activation(name: str) -> Activation:
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise CheckpointError(
            f"activation {name!r} is not supported; the supported ones are {', '.join(ACTIVATIONS)}"
        ) from None


def _switch(c: Config, switch: bool | str) -> bool:
    return switch if isinstance(switch, bool) else bool(c.get(switch, False))

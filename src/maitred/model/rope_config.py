"""config.json -> RopeSpec, in today's form (`rope_parameters`) and the older one (`rope_theta`, `rope_scaling`).

Precedences are those of `modeling_rope_utils.py` of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from maitred.core.errors import CheckpointError
from maitred.model.spec import RopeSpec, RopeType

Config = Mapping[str, Any]


def rope_from_config(config: Config, head_dim: int) -> RopeSpec:
    """The one rope of all layers. `config` has the family's defaults; `rope_scaling`, if there, wins."""
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    _set_default(parameters, "rope_theta", config["rope_theta"])
    _set_default(parameters, "partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
    original = config.get("original_max_position_embeddings")
    if original is not None:  # beside the rope parameters, as Phi-3 has it: this one wins
        parameters["original_max_position_embeddings"] = original
    return rope_from_parameters(parameters, config, head_dim)


def ropes_by_type(config: Config, head_dim: int) -> dict[str, RopeSpec]:
    """The ropes of full and of sliding layers (Gemma 3, OLMo 3): full ones may be stretched, sliding ones may have
    their own theta."""
    nested = config.get("rope_parameters") or {}
    if nested and not {"full_attention", "sliding_attention"} & set(nested):
        raise CheckpointError(
            "rope_parameters must hold an entry for full_attention and one for sliding_attention where layers differ; "
            f"it holds {', '.join(sorted(nested))}"
        )
    full = dict(nested.get("full_attention") or {}) | dict(config.get("rope_scaling") or {})
    sliding = dict(nested.get("sliding_attention") or {})
    _set_default(full, "rope_theta", config["rope_theta"])
    _set_default(sliding, "rope_theta", config.get("rope_local_base_freq", config["rope_theta"]))
    return {
        "full_attention": rope_from_parameters(full, config, head_dim),
        "sliding_attention": rope_from_parameters(sliding, config, head_dim),
    }


def rope_from_parameters(parameters: Config, config: Config, head_dim: int) -> RopeSpec:
    """`parameters` is today's flat form, with `rope_theta`; `config` gives the context."""
    rope_type = _rope_type(parameters, config)
    original = parameters.get("original_max_position_embeddings") or config["max_position_embeddings"]
    if rope_type is RopeType.DYNAMIC:
        original = config["max_position_embeddings"]
    part = float(parameters.get("partial_rotary_factor") or 1.0)
    whole = rope_type is RopeType.PROPORTIONAL
    rope = RopeSpec(
        rope_type=rope_type,
        theta=float(parameters["rope_theta"]),
        dim=head_dim if whole else int(head_dim * part),
        num_moving=int(part * head_dim // 2) if whole else 0,
        interleaved=bool(config.get("rope_interleaved")),
        **_READERS[rope_type](parameters, config["max_position_embeddings"], original),
    )
    _check_factors(rope)
    return rope


def _rope_type(parameters: Config, config: Config) -> RopeType:
    name = parameters.get("rope_type") or parameters.get("type") or "default"
    if config.get("model_type") == "phi3" and name in ("su", "yarn"):  # the names its first releases had
        name = "longrope"
    try:
        return RopeType(name)
    except ValueError:
        raise CheckpointError(
            f"rope type {name!r} is not supported; the supported ones are {', '.join(each.value for each in RopeType)}"
        ) from None


def _default(parameters: Config, context: int, original: int) -> dict[str, Any]:
    return {}


def _linear(parameters: Config, context: int, original: int) -> dict[str, Any]:
    return {"factor": _number(parameters, "factor")}


def _dynamic(parameters: Config, context: int, original: int) -> dict[str, Any]:
    return {"factor": _number(parameters, "factor"), "original_max_position_embeddings": original}


def _yarn(parameters: Config, context: int, original: int) -> dict[str, Any]:
    factor = float(parameters.get("factor") or context / original)
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = _yarn_attention_factor(factor, parameters.get("mscale"), parameters.get("mscale_all_dim"))
    return {
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": float(attention_factor),
        "beta_fast": float(parameters.get("beta_fast") or 32),
        "beta_slow": float(parameters.get("beta_slow") or 1),
        "truncate": bool(parameters.get("truncate", True)),
        "query_beta": float(parameters.get("llama_4_scaling_beta") or 0),
    }


def _longrope(parameters: Config, context: int, original: int) -> dict[str, Any]:
    factor = parameters.get("factor")
    if factor is None:
        factor = context / original
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        attention_factor = _longrope_attention_factor(float(factor), original)
    return {
        "factor": float(factor),
        "original_max_position_embeddings": original,
        "attention_factor": float(attention_factor),
        "short_factor": tuple(float(f) for f in parameters.get("short_factor") or ()),
        "long_factor": tuple(float(f) for f in parameters.get("long_factor") or ()),
    }


def _llama3(parameters: Config, context: int, original: int) -> dict[str, Any]:
    return {
        "factor": _number(parameters, "factor"),
        "original_max_position_embeddings": original,
        "low_freq_factor": _number(parameters, "low_freq_factor"),
        "high_freq_factor": _number(parameters, "high_freq_factor"),
    }


def _proportional(parameters: Config, context: int, original: int) -> dict[str, Any]:
    return {"factor": float(parameters.get("factor") or 1)}


_READERS = {
    RopeType.DEFAULT: _default,
    RopeType.LINEAR: _linear,
    RopeType.DYNAMIC: _dynamic,
    RopeType.YARN: _yarn,
    RopeType.LONGROPE: _longrope,
    RopeType.LLAMA3: _llama3,
    RopeType.PROPORTIONAL: _proportional,
}


def _number(parameters: Config, name: str) -> float:
    value = parameters.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        rope_type = parameters.get("rope_type") or parameters.get("type")
        raise CheckpointError(f"rope type {rope_type!r} needs the number {name!r} in config.json; it has {value!r}")
    return float(value)


def _check_factors(rope: RopeSpec) -> None:
    if rope.rope_type is RopeType.LONGROPE:
        for name in ("short_factor", "long_factor"):
            if len(getattr(rope, name)) != rope.num_frequencies:
                raise CheckpointError(
                    f"rope type 'longrope': {name} has {len(getattr(rope, name))} numbers, "
                    f"{rope.num_frequencies} are needed for {rope.dim} rotated values"
                )
    if rope.rope_type is RopeType.DYNAMIC and rope.dim < 4:
        raise CheckpointError(f"rope type 'dynamic' needs at least 4 rotated values in a head; there are {rope.dim}")
    if rope.rope_type is RopeType.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise CheckpointError(
            f"rope type 'llama3': high_freq_factor ({rope.high_freq_factor:g}) must be over "
            f"low_freq_factor ({rope.low_freq_factor:g})"
        )


def _set_default(parameters: dict[str, Any], name: str, value: Any) -> None:
    if parameters.get(name) is None:
        parameters[name] = value


def _yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """The default temperature of YaRN (arXiv:2309.00071, section 3.4), with DeepSeek's two multipliers."""

    def scale(multiplier: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * multiplier * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def _longrope_attention_factor(factor: float, original_max_position_embeddings: int) -> float:
    """The default temperature of LongRoPE (arXiv:2402.13753): sqrt(1 + ln(factor) / ln(original context))."""
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_position_embeddings))

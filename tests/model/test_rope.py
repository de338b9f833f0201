"""Rotary frequencies equal those of transformers, type by type."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.model.families import spec_from_config
from maitred.model.rope import depends_on_context, inverse_frequencies
from maitred.model.spec import RopeSpec

HEAD_DIM = 16

_LONG = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 4.0 * i for i in range(8)],
    "original_max_position_embeddings": 64,
}

PARAMETERS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    "yarn, untruncated": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 8.0,
        "beta_slow": 2.0,
    },
    "yarn, mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 0.7,
        "mscale_all_dim": 1.1,
    },
    "yarn, attention factor": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "attention_factor": 1.25
    },
    "longrope": {"rope_type": "longrope", **_LONG},
    "longrope, factor": {"rope_type": "longrope", "factor": 32.0, **_LONG},
    "longrope, attention factor": {"rope_type": "longrope", "attention_factor": 1.19, **_LONG},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}  # fmt: skip


def config_with(parameters: dict[str, Any], theta: float = 10000.0) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 10, "hidden_size": 64,
        "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512,
        "rope_parameters": {"rope_theta": theta, **parameters},
    }  # fmt: skip


def rope_of(config: dict[str, Any]) -> RopeSpec:
    rope = spec_from_config(config).layers[0].rope
    assert rope is not None
    return rope


def theirs(config: dict[str, Any], seq_len: int) -> tuple[list[float], float]:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.utils.logging.set_verbosity_error()
    parsed = transformers.LlamaConfig(**config)
    rope_type = config["rope_parameters"]["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(rope_type, LlamaRotaryEmbedding.compute_default_rope_parameters)
    frequencies, factor = compute(parsed, device="cpu", seq_len=seq_len)
    return frequencies.tolist(), factor


@pytest.mark.parametrize("max_model_len", [32, 64, 65, 512, 513, 4096])
@pytest.mark.parametrize("name", PARAMETERS)
def test_frequencies_equal_transformers(name: str, max_model_len: int) -> None:
    config = config_with(PARAMETERS[name])
    frequencies, attention_factor = theirs(config, max_model_len)
    assert list(inverse_frequencies(rope_of(config), max_model_len)) == pytest.approx(frequencies, rel=2e-7)
    assert rope_of(config).attention_factor == pytest.approx(attention_factor)


@settings(max_examples=60, deadline=None)
@given(st.floats(1.0, 64.0), st.floats(0.5, 2.0), st.floats(2.5, 8.0), st.integers(16, 4096), st.floats(100.0, 1e7))
def test_llama3_and_yarn_equal_transformers_for_any_numbers(
    factor: float, low: float, high: float, original: int, theta: float
) -> None:
    shared = {"factor": factor, "original_max_position_embeddings": original}
    for parameters in (
        {"rope_type": "llama3", "low_freq_factor": low, "high_freq_factor": high, **shared},
        {"rope_type": "yarn", "beta_slow": low, "beta_fast": 8 * high, **shared},
    ):
        config = config_with(parameters, theta)
        frequencies, _ = theirs(config, 512)
        # Where the two ends of a blend nearly cancel, one float32 rounding in `turns` is magnified.
        assert list(inverse_frequencies(rope_of(config), 512)) == pytest.approx(frequencies, rel=1e-5)


def test_only_dynamic_and_longrope_look_at_the_served_context() -> None:
    for name, parameters in PARAMETERS.items():
        rope = rope_of(config_with(parameters))
        changes = inverse_frequencies(rope, 16) != inverse_frequencies(rope, 100_000)
        assert changes == depends_on_context(rope) == (name.split(",")[0] in ("dynamic", "longrope"))


def test_the_first_pair_turns_one_radian_per_token() -> None:
    assert inverse_frequencies(rope_of(config_with(PARAMETERS["default"])), 64)[0] == 1.0
    assert math.isclose(inverse_frequencies(rope_of(config_with(PARAMETERS["linear"])), 64)[0], 0.25)

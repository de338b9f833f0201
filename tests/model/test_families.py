"""config.json in the older form and in today's describe the same decoder; what we cannot serve is refused by name."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.model.families import FAMILIES, spec_from_config
from maitred.model.rope import depends_on_context, inverse_frequencies
from maitred.model.spec import Activation, DecoderSpec, NormPlacement, QKNorm, RopeSpec, RopeType

Config = dict[str, Any]

_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
}
_LONGROPE = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.5, 2.5, 8.0, 30.0]}


_DEEPSEEK_YARN = {
    "rope_type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
_DEEPSEEK = {
    "num_key_value_heads": 8, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12,
    "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "max_position_embeddings": 163_840,
}  # fmt: skip


def llama(**extra: Any) -> Config:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 500,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **extra,
    }


def family(architecture: str, model_type: str, **extra: Any) -> Config:
    return llama(architectures=[architecture], model_type=model_type, **extra)


def plain_forms(architecture: str, model_type: str, rope: Config | None = None, **extra: Any) -> tuple[Config, Config]:
    """Forms that differ only in where the rope stands."""
    stretched = {} if rope is None else {"rope_scaling": rope}
    today = {"rope_type": "default"} | (rope or {}) | {"rope_theta": 1e6}
    if "partial_rotary_factor" in extra:
        today["partial_rotary_factor"] = extra["partial_rotary_factor"]
    return (
        family(architecture, model_type, rope_theta=1e6, **stretched, **extra),
        family(architecture, model_type, rope_parameters=today, **extra),
    )


# name -> (older form, today's form)
FORMS: dict[str, tuple[Config, Config]] = {
    "llama 2": (
        llama(torch_dtype="float16", rope_scaling=None, pretraining_tp=1),
        llama(dtype="float16", rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
    ),
    "llama 3.1": (
        llama(torch_dtype="bfloat16", rope_theta=500000.0, rope_scaling=_LLAMA3, max_position_embeddings=131072),
        llama(
            dtype="bfloat16", rope_parameters={"rope_theta": 500000.0, **_LLAMA3}, max_position_embeddings=131072
        ),
    ),
    "llama linear": (
        llama(rope_theta=10000, rope_scaling={"type": "linear", "factor": 4.0}),
        llama(rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    ),
    "llama dynamic": (
        llama(rope_scaling={"type": "dynamic", "factor": 2.0}),
        llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    ),
    "llama yarn": (
        llama(rope_theta=1e6, rope_scaling={"type": "yarn", "factor": 4.0, "beta_fast": 16}),
        llama(
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 16,
                "original_max_position_embeddings": 4096,
            }
        ),
    ),
    "mistral": (
        family("MistralForCausalLM", "mistral", rope_theta=10000.0, sliding_window=1024, torch_dtype="bfloat16"),
        family(
            "MistralForCausalLM", "mistral", sliding_window=1024, head_dim=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
    ),
    "qwen2": (
        family(
            "Qwen2ForCausalLM", "qwen2", rope_theta=1e6, use_sliding_window=False, sliding_window=4096,
            max_window_layers=3,
        ),
        family(
            "Qwen2ForCausalLM", "qwen2", rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            use_sliding_window=False, sliding_window=None, layer_types=["full_attention"] * 6,
        ),
    ),
    "qwen2.5 yarn, sliding": (
        family(
            "Qwen2ForCausalLM", "qwen2", rope_theta=1e6, use_sliding_window=True, sliding_window=128,
            max_window_layers=4,
            rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        ),
        family(
            "Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=128,
            layer_types=["full_attention"] * 4 + ["sliding_attention"] * 2,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 4096
            },
        ),
    ),
    "qwen3": (
        family("Qwen3ForCausalLM", "qwen3", rope_theta=1e6, head_dim=16, attention_bias=False, rope_scaling=None),
        family(
            "Qwen3ForCausalLM", "qwen3", rope_parameters={"rope_type": "default", "rope_theta": 1e6}, head_dim=16,
            layer_types=["full_attention"] * 6,
        ),
    ),
    "gemma2": (
        family(
            "Gemma2ForCausalLM", "gemma2", rope_theta=10000.0, head_dim=16, hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=20, sliding_window=64, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
            tie_word_embeddings=True,
        ),
        family(
            "Gemma2ForCausalLM", "gemma2", rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            head_dim=16, query_pre_attn_scalar=20, sliding_window=64, tie_word_embeddings=True,
            layer_types=["sliding_attention", "full_attention"] * 3,
        ),
    ),
    "gemma3": (
        family(
            "Gemma3ForCausalLM", "gemma3_text", rope_theta=1e6, rope_local_base_freq=10000.0, head_dim=16,
            sliding_window=64, sliding_window_pattern=3, rope_scaling={"rope_type": "linear", "factor": 8.0},
            tie_word_embeddings=True, query_pre_attn_scalar=16,
        ),
        family(
            "Gemma3ForCausalLM", "gemma3_text", head_dim=16, sliding_window=64, query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2, tie_word_embeddings=True,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ),
    "phi3": (
        family("Phi3ForCausalLM", "phi3", rope_theta=10000.0, sliding_window=2047, rope_scaling=None),
        family(
            "Phi3ForCausalLM", "phi3", sliding_window=2047,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        ),
    ),
    "phi3 longrope": (
        family(
            "Phi3ForCausalLM", "phi3", rope_theta=10000.0, max_position_embeddings=131072,
            original_max_position_embeddings=4096, rope_scaling={"type": "longrope", **_LONGROPE},
        ),
        family(
            "Phi3ForCausalLM", "phi3", max_position_embeddings=131072, original_max_position_embeddings=4096,
            rope_parameters={
                "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096, **_LONGROPE
            },
        ),
    ),
    "phi4-mini": (
        family("Phi3ForCausalLM", "phi3", rope_theta=10000.0, partial_rotary_factor=0.75, tie_word_embeddings=True),
        family(
            "Phi3ForCausalLM", "phi3", tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        ),
    ),
    "smollm3": (
        family("SmolLM3ForCausalLM", "smollm3", rope_theta=5e6, no_rope_layers=[1, 1, 1, 0, 1, 1]),
        family(
            "SmolLM3ForCausalLM", "smollm3", rope_parameters={"rope_type": "default", "rope_theta": 5e6},
            no_rope_layer_interval=4, layer_types=["full_attention"] * 6,
        ),
    ),
    "olmo2": (
        family("Olmo2ForCausalLM", "olmo2", rope_theta=500000, rope_scaling=None),
        family("Olmo2ForCausalLM", "olmo2", rope_parameters={"rope_type": "default", "rope_theta": 500000}),
    ),
    "granite": (
        family(
            "GraniteForCausalLM", "granite", rope_theta=10000.0, embedding_multiplier=12.0, logits_scaling=8.0,
            residual_multiplier=0.22, attention_multiplier=0.015625, tie_word_embeddings=True,
        ),
        family(
            "GraniteForCausalLM", "granite", rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            embedding_multiplier=12, logits_scaling=8, residual_multiplier=0.22, attention_multiplier=0.015625,
            tie_word_embeddings=True,
        ),
    ),
    "olmo3": (
        family(
            "Olmo3ForCausalLM", "olmo3", rope_theta=500000.0, sliding_window=64,
            rope_scaling={
                "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2
            },
        ),
        family(
            "Olmo3ForCausalLM", "olmo3", sliding_window=64,
            layer_types=[*["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2],
            rope_parameters={
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "attention_factor": 1.2,
                    "original_max_position_embeddings": 512,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        ),
    ),
    "ministral3": plain_forms(
        "Ministral3ForCausalLM", "ministral3", rope={"rope_type": "yarn", "factor": 16.0, "llama_4_scaling_beta": 0.1,
        "original_max_position_embeddings": 512}, head_dim=16,
    ),
    "glm4": plain_forms("Glm4ForCausalLM", "glm4", head_dim=16, attention_bias=True, partial_rotary_factor=0.5),
    "glm4.5": plain_forms(
        "Glm4MoeForCausalLM", "glm4_moe", head_dim=16, attention_bias=True, use_qk_norm=True, n_routed_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=32, n_shared_experts=1, first_k_dense_replace=2, n_group=1,
        topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, partial_rotary_factor=0.5,
        num_nextn_predict_layers=1,
    ),
    "deepseek_v2": plain_forms(
        "DeepseekV2ForCausalLM", "deepseek_v2", rope=_DEEPSEEK_YARN, q_lora_rank=None, topk_method="greedy",
        n_group=1, topk_group=1, **_DEEPSEEK | {"norm_topk_prob": False},
    ),
    "deepseek_v3": plain_forms(
        "DeepseekV3ForCausalLM", "deepseek_v3", rope=_DEEPSEEK_YARN, q_lora_rank=24, n_group=4, topk_group=2,
        num_nextn_predict_layers=1, **_DEEPSEEK,
    ),
    "glm4.7 flash": plain_forms(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", q_lora_rank=24, n_group=1, topk_group=1, **_DEEPSEEK,
    ),
    "mixtral": plain_forms("MixtralForCausalLM", "mixtral", num_local_experts=8, num_experts_per_tok=2),
    "olmoe": plain_forms("OlmoeForCausalLM", "olmoe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=False),
    "qwen2_moe": plain_forms(
        "Qwen2MoeForCausalLM", "qwen2_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        shared_expert_intermediate_size=64, decoder_sparse_step=2, max_window_layers=21, use_sliding_window=False,
    ),
    "qwen3_next": plain_forms(
        "Qwen3NextForCausalLM", "qwen3_next", head_dim=16, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, shared_expert_intermediate_size=64, partial_rotary_factor=0.25,
        full_attention_interval=2, **_DELTA,
    ),
    "qwen3.5": plain_forms(
        "Qwen3_5ForCausalLM", "qwen3_5_text", head_dim=16, partial_rotary_factor=0.25, mtp_num_hidden_layers=1,
        full_attention_interval=4, **_DELTA,
    ),
    "qwen3.5 moe": plain_forms(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", head_dim=16, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=32, shared_expert_intermediate_size=64, partial_rotary_factor=0.25,
        full_attention_interval=2, **_DELTA,
    ),
    "qwen3_moe": plain_forms(
        "Qwen3MoeForCausalLM", "qwen3_moe", num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32,
        head_dim=16, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[1], max_window_layers=48,
    ),
    "gpt_oss": plain_forms(
        "GptOssForCausalLM", "gpt_oss", rope={"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 512}, head_dim=16, num_local_experts=8,
        num_experts_per_tok=3, sliding_window=64, attention_bias=True, swiglu_limit=7.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_the_older_form_and_todays_and_that_of_transformers_give_equal_specs(name: str) -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    older, today = FORMS[name]
    rewritten = transformers.AutoConfig.for_model(**copy.deepcopy(older)).to_dict()
    specs = [spec_from_config(form) for form in (older, today, rewritten | {"model_type": older["model_type"]})]
    assert specs[0] == specs[1] == specs[2]


@pytest.mark.parametrize("old_name", ["su", "yarn"])
def test_phi3s_first_releases_had_other_names_for_longrope(old_name: str) -> None:
    older = copy.deepcopy(FORMS["phi3 longrope"][0])
    older["rope_scaling"]["type"] = old_name
    assert spec_from_config(older) == spec("phi3 longrope")


def test_every_architecture_is_written_in_both_forms() -> None:
    written = {older["architectures"][0] for older, _ in FORMS.values()}
    others = {"Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration", "Gemma4ForCausalLM"}  # one form alone
    others |= {"Qwen3ForSequenceClassification"}  # as Qwen3ForCausalLM
    assert written | others == {name for name, family in FAMILIES.items() if not family.is_encoder}


def spec(name: str) -> DecoderSpec:
    return spec_from_config(FORMS[name][0])


def windows(name: str) -> list[int | None]:
    return [layer.window for layer in spec(name).layers]


def test_windows_follow_each_familys_pattern() -> None:
    assert windows("llama 2") == [None] * 6
    assert windows("mistral") == [1024] * 6
    assert windows("qwen2") == [None] * 6
    assert windows("qwen2.5 yarn, sliding") == [None, None, None, None, 128, 128]
    assert windows("gemma2") == [64, None] * 3
    assert windows("gemma3") == [64, 64, None] * 2
    assert windows("phi3") == [2047] * 6
    assert windows("olmo3") == [64, 64, 64, None, 64, 64]
    assert windows("gpt_oss") == [64, None] * 3


def test_layers_are_dense_or_routed_as_each_family_says() -> None:
    routed = {name: [layer.routed is not None for layer in spec(name).layers] for name in FORMS}
    assert routed["glm4.5"] == [False, False, True, True, True, True]
    assert routed["qwen2_moe"] == [False, True] * 3
    assert routed["qwen3_moe"] == [True, False, True, True, True, True]
    assert all(routed["mixtral"] + routed["olmoe"] + routed["gpt_oss"])
    assert not any(any(layers) for name, layers in routed.items() if "moe" not in name and name in ("glm4", "phi3"))
    assert spec("glm4.5").num_mtp_layers == 1


def test_families_differ_from_llama_where_they_should():
    assert spec("llama 2").norm_placement is NormPlacement.PRE
    assert spec("olmo2").norm_placement is NormPlacement.POST
    assert spec("olmo2").qk_norm is QKNorm.FULL_WIDTH
    assert spec("gemma3").norm_placement is NormPlacement.BOTH
    assert spec("gemma3").qk_norm is QKNorm.PER_HEAD
    assert (spec("gemma2").norm_offset, spec("gemma2").attention_softcap, spec("gemma2").logit_softcap) == (1, 50, 30)
    assert spec("gemma3").attention_softcap is None
    assert spec("gemma2").activation is Activation.GELU_TANH
    assert spec("gemma2").attention_scale == pytest.approx(20**-0.5)
    assert spec("granite").attention_scale == 0.015625
    assert spec("granite").logit_scale == 1 / 8
    assert spec("qwen2").qkv_bias
    assert not spec("qwen2").output_bias
    assert spec("phi3").fused_weights
    assert spec("smollm3").tied_embeddings is False

    ropes = [layer.rope for layer in spec("gemma3").layers]
    assert ropes[0] is not None
    assert ropes[2] is not None
    assert (ropes[0].rope_type, ropes[0].theta) == (RopeType.DEFAULT, 10000.0)
    assert (ropes[2].rope_type, ropes[2].theta, ropes[2].factor) == (RopeType.LINEAR, 1e6, 8.0)

    assert [layer.rope is not None for layer in spec("smollm3").layers] == [True, True, True, False, True, True]

    assert spec("llama 3.1").max_position_embeddings == 131072
    assert spec("qwen2.5 yarn, sliding").max_position_embeddings == 16384


def test_counts_of_a_known_size() -> None:
    llama_2 = spec("llama 2")
    layer = 64 * (64 + 2 * 16) + 64 * 64 + 3 * 64 * 176 + 2 * 64
    assert llama_2.num_parameters() == 6 * layer + 2 * 500 * 64 + 64
    assert llama_2.kv_values_per_token() == 2 * 6 * 2 * 8
    assert "LlamaForCausalLM" in llama_2.identity()


def test_latent_attention_keeps_576_values_a_token_and_layer_at_deepseeks_sizes() -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    made = spec_from_config(FORMS["deepseek_v3"][0] | sizes)
    assert made.kv_values_per_token() == 6 * 576
    yarn = 0.1 * 0.707 * math.log(40) + 1
    assert made.attention_scale == pytest.approx((128 + 64) ** -0.5 * yarn**2)
    assert (made.num_kv_heads, made.head_dim, made.latent_rank) == (1, 576, 512)
    assert spec("deepseek_v2").latent.query_rank == 0
    assert spec("deepseek_v2").layers[1].routed.best_of_group == 1
    assert [layer.routed is None for layer in spec("glm4.7 flash").layers] == [True] + [False] * 5


def test_missing_keys_take_the_familys_defaults() -> None:
    bare = {
        "model_type": "mistral", "vocab_size": 500, "hidden_size": 64, "intermediate_size": 176,
        "num_hidden_layers": 2, "num_attention_heads": 8,
    }  # fmt: skip
    made = spec_from_config(bare)
    assert made.architecture == "MistralForCausalLM"
    assert (made.num_kv_heads, made.head_dim, made.layers[0].window) == (8, 8, 4096)
    assert made.max_position_embeddings == 131072


def test_a_multimodal_gemma3_is_its_text_model() -> None:
    text = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 6, "sliding_window": 64,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0}}  # fmt: skip
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text,
             "vision_config": {"hidden_size": 1152}}  # fmt: skip
    made = spec_from_config(whole)
    assert (made.num_heads, made.head_dim, made.vocab_size, made.tied_embeddings) == (8, 256, 262208, True)
    assert [layer.window for layer in made.layers] == [64] * 5 + [None]


def refusal(config: Config) -> str:
    with pytest.raises(CheckpointError) as caught:
        spec_from_config(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_gemma_4_says_the_heads_of_full_layers_in_one_field_or_by_layer() -> None:
    more = {"hidden_size_per_layer_input": 0, "num_hidden_layers": 6, "attention_k_eq_v": True, "head_dim": 16}
    plain = family("Gemma4ForCausalLM", "gemma4_text", **more)
    hub = spec_from_config({**plain, "global_head_dim": 32, "num_global_key_value_heads": 1})
    by_layer = {"5": {"head_dim": 32, "num_key_value_heads": 1}}
    assert hub == spec_from_config({**plain, "per_layer_config": by_layer})
    assert hub.kv_heads == [(hub.num_kv_heads, 16)] * 5 + [(1, 32)]


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    message = refusal(llama(architectures=["MambaForCausalLM"]))
    assert "'MambaForCausalLM'" in message
    assert all(name in message for name in FAMILIES)
    assert "'gpt2'" in refusal({"model_type": "gpt2"})


def test_foreign_code_is_never_run(caplog: pytest.LogCaptureFixture) -> None:
    code = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    assert "auto_map" in refusal(llama(architectures=["OwnForCausalLM"], **code))
    with caplog.at_level(logging.DEBUG):
        assert spec_from_config(llama(**code)) == spec_from_config(llama())
    assert "not run" in caplog.text


def test_an_unknown_rope_type_is_refused_with_the_list() -> None:
    message = refusal(llama(rope_scaling={"type": "spiral", "factor": 2.0}))
    assert "'spiral'" in message
    assert "default, linear, dynamic, yarn, longrope, llama3" in message


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_act": "relu6"}, "'relu6'"),
        ({"rms_norm_eps": None}, "wrong type"),
        ({"rope_theta": "much", "head_dim": 8}, "wrong type"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "at least 4"),
        ({"head_dim": 15}, "15"),
        ({"num_attention_heads": 7}, "multiple"),
        ({"num_key_value_heads": 3}, "3 key/value heads"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "no layers"),
        ({"rope_scaling": {"type": "linear"}}, "'factor'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}}, "4 are needed"),
        ({"rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ],
)
def test_what_cannot_be_served_is_refused(change: Config, part: str) -> None:
    assert part in refusal(llama(**change))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"layer_types": ["full_attention"] * 5 + ["linear_attention"]}, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
        ({"layer_types": ["sliding_attention"] * 6, "use_sliding_window": False}, "no sliding_window in use"),
    ],
)
def test_layer_types_that_make_no_sense_are_refused(change: Config, part: str) -> None:
    assert part in refusal(family("Qwen2ForCausalLM", "qwen2", **change))


def test_gemma3_needs_nested_rope_parameters_and_a_causal_mask() -> None:
    flat = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert "full_attention" in refusal(family("Gemma3ForCausalLM", "gemma3_text", head_dim=16, **flat))
    encoder = family("Gemma3ForCausalLM", "gemma3_text", head_dim=16, use_bidirectional_attention=True)
    assert "encoder" in refusal(encoder)


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
def test_llama3_and_yarn_equal_transformers_for_any_numbers(factor, low, high, original, theta):
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

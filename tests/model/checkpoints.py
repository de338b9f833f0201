"""Small random checkpoints of every family, made by transformers' own classes, for any test that needs a model folder.

`make_checkpoint("qwen3", folder)` writes config.json, model.safetensors, generation_config.json, tokenizer.json and
tokenizer_config.json. Shapes are odd on purpose: hidden size 72, heads of 18 or 20. Token ids 0..255 are bytes.

Rope rules that look at the length of the text (see `maitred.model.rope`) agree with transformers when
`llama_dynamic` stays within its 128 positions, and `phi3_longrope` is over its original 16 (served with its own
context) or within them (served with max_model_len 16).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BOS, EOS, VOCAB_SIZE = 256, 257, 272

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 72,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_GEMMA = {"head_dim": 20, "query_pre_attn_scalar": 24, "sliding_window": 10, "num_hidden_layers": 4}
_GEMMA4 = {
    **{"head_dim": 20, "global_head_dim": 36, "num_global_key_value_heads": 1, "num_hidden_layers": 6},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "sliding_window": 10},
    **{"attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "final_logit_softcapping": 20.0},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.3, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
_STRETCHED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 16}
_EXPERTS = {"num_experts": 9, "num_experts_per_tok": 4, "moe_intermediate_size": 36, "norm_topk_prob": True}
_LATENT = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 22, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 14},
    **{"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2},
    **{"moe_intermediate_size": 36, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
_YARN_TWICE = {"rope_type": "yarn", **_STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.3}

_WITH_TEXT = ("Gemma3", "Gemma3n", "Gemma4", "Qwen3_5", "Qwen3_5Moe")  # whose text model's config is one of its own
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 14, "linear_value_head_dim": 11},
}

# name -> (transformers' class prefix, what its config says beside _COMMON)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 18}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20, "num_key_value_heads": 1}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}}),
    "llama_dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": {"rope_type": "yarn", **_STRETCHED}}),
    "llama_llama3": (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **_STRETCHED}},
    ),
    "mistral": ("Mistral", {"sliding_window": 12, "head_dim": 20}),
    "mistral_full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": {"rope_type": "yarn", "truncate": False, **_STRETCHED}}),
    "qwen3": ("Qwen3", {"head_dim": 20}),
    "qwen3_bias": ("Qwen3", {"head_dim": 20, "attention_bias": True, "use_sliding_window": True, "sliding_window": 7,
                             "max_window_layers": 2}),
    "gemma2": ("Gemma2", _GEMMA),
    "gemma3": ("Gemma3", {**_GEMMA, "sliding_window_pattern": 3}),
    "gemma3_linear": (
        "Gemma3",
        {
            **_GEMMA,
            "final_logit_softcapping": 20.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": ("Gemma4", _GEMMA4),
    "gemma4_shared": (
        "Gemma4",
        {
            **{"head_dim": 20, "global_head_dim": 36, "num_hidden_layers": 6, "sliding_window": 10},
            **{"layer_types": ["sliding_attention", "full_attention"] * 3},
            **{"num_kv_shared_layers": 3, "use_double_wide_mlp": True, "vocab_size_per_layer_input": VOCAB_SIZE},
            "hidden_size_per_layer_input": 18,
        },
    ),
    "gemma4_moe": (
        "Gemma4",
        {**_GEMMA4, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 3, "moe_intermediate_size": 36},
    ),
    "phi3": ("Phi3", {"sliding_window": 14}),
    "phi3_partial": ("Phi3", {"partial_rotary_factor": 0.75, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "phi3_longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0 + 0.05 * i for i in range(9)],
                "long_factor": [1.0 + 0.7 * i for i in range(9)],
            },
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "smollm3_window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 11, "tie_word_embeddings": False},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 10,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_STRETCHED},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 20, "rope_parameters": {"rope_type": "yarn", "llama_4_scaling_beta": 0.4, **_STRETCHED}},
    ),
    "glm4": ("Glm4", {"head_dim": 18, "attention_bias": True, "partial_rotary_factor": 0.5}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        {**_EXPERTS, "shared_expert_intermediate_size": 52, "norm_topk_prob": False, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 20, "mlp_only_layers": [1]}),
    "olmoe": ("Olmoe", {**_EXPERTS, "intermediate_size": 36}),
    "glm4_moe": (
        "Glm4Moe",
        {
            **{"head_dim": 20, "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5},
            **{"n_routed_experts": 12, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 36, "n_shared_experts": 2, "first_k_dense_replace": 1},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.5},
        },
    ),
    "deepseek_v2": (  # as Lite: one matrix for queries
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "norm_topk_prob": False,
         "rope_parameters": _YARN_TWICE},
    ),
    "deepseek_v2_groups": (
        "DeepseekV2",
        {**_LATENT, "q_lora_rank": 28, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "q_lora_rank": 28, "rope_parameters": _YARN_TWICE}),
    "glm4_moe_lite": ("Glm4MoeLite", {**_LATENT, "q_lora_rank": 20, "rms_norm_eps": 1e-2}),
    "gpt_oss": (
        "GptOss",
        {
            **{"head_dim": 20, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 10},
            **{"swiglu_limit": 0.5, "rope_parameters": {"rope_type": "yarn", "truncate": False, **_STRETCHED}},
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_EXPERTS, **_DELTA, "head_dim": 20, "shared_expert_intermediate_size": 52, "mlp_only_layers": [1],
            "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2, "attention_bias": True,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **{**_DELTA, "linear_num_value_heads": 2, "linear_value_head_dim": 40, "linear_conv_kernel_dim": 3},
            "head_dim": 20, "full_attention_interval": 2,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {**_EXPERTS, **_DELTA, "head_dim": 24, "shared_expert_intermediate_size": 52, "full_attention_interval": 3},
    ),
    "granite": (
        "Granite",
        {"embedding_multiplier": 6.0, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.3},
    ),
}  # fmt: skip

# The same of models without a native row, which run in transformers' own module.
MODULES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": (  # layers 3 and 4 read the keys of 2 and 1
        "Gemma3n",
        {
            **{"num_hidden_layers": 5, "num_kv_shared_layers": 2, "head_dim": 20, "sliding_window": 10},
            **{"layer_types": [("sliding_attention", "full_attention")[i in (1, 4)] for i in range(5)]},
            **{"vocab_size_per_layer_input": 258, "hidden_size_per_layer_input": 12, "laurel_rank": 6},
            **{"altup_num_inputs": 3, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0, 0.0]},
        },
    ),
    "opt": ("OPT", {"ffn_dim": 100, "word_embed_proj_dim": 72}),  # learned positions, a decoder inside a decoder
    "vaultgemma": ("VaultGemma", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),  # softcap
    "mimo": (  # keys wider than values, more of them in some layers, which alone have sinks; experts
        "MiMoV2Flash",
        {
            **{"head_dim": 20, "v_head_dim": 12, "sliding_window": 10},
            **{"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
            **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36},
        },
    ),
}


def make_checkpoint(family: str, folder: Path, *, seed: int = 0, max_shard_size: str = "5GB", **overrides: Any) -> Path:
    """Write a random float32 checkpoint of `family` (a key of FAMILIES or MODULES) to `folder` and return it.

    `overrides` go to the config class; `max_shard_size="20KB"` gives many shards and an index.
    """
    model = make_model(family, seed=seed, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return folder


def make_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """transformers' own model with weights large enough that norms, biases and positions all matter."""
    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    prefix, settings = {**FAMILIES, **MODULES}[family]
    config_class = getattr(transformers, f"{prefix}{'Text' if prefix in _WITH_TEXT else ''}Config")
    model_class = getattr(transformers, f"{prefix}ForCausalLM")
    model = model_class(config_class(**{**_COMMON, **settings, **overrides})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.copy_(0.6 + torch.rand(buffer.shape, generator=generator))
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.add_(0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            else:
                # Small embeddings, or a model whose output matrix is tied to them repeats the token it was given.
                embedding_std = 0.03 if prefix.startswith("Gemma") else 0.2
                parameter.copy_(noise * (embedding_std if "embed" in name else 1.5 * parameter.shape[1] ** -0.5))
    return model


def load_reference(folder: Path) -> Any:
    """transformers' model of the checkpoint in `folder`, float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: one token for each byte, id = byte, and two special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = _bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={alphabet[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|bos|>", special=True), AddedToken("<|eos|>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, as the ByteLevel pre-tokenizer uses it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

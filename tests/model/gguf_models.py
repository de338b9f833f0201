"""GGUF files of small random models, by gguf's own writer and as llama.cpp's converter stores them.

The rules that the package `gguf` does not hold (q and k in pairs, Gemma's norms with their 1, Llama 3's divisors) are
those of `conversion/*.py` in llama.cpp, as llama-cpp-python 0.3.36 carries it. Experts are stacked by `stacked`.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from maitred.model.families import spec_from_config
from maitred.model.weight_map import weight_map
from tests.executor.native_worlds import Everything
from tests.kernels.test_block_formats import stored_rows

Config = dict[str, Any]
Tensors = dict[str, NDArray[np.float32]]

PAIRED = ("llama", "granite", "smollm3", "mistral3")  # architectures whose rotated pairs lie side by side
QWEN_NEXT = ("qwen3next", "qwen35", "qwen35moe")
_MTP = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head.norm"}
_CORRECTION = "e_score_correction.bias"
TOKENS = ["<s>", "</s>", "<|eot_id|>", "a", "b", "<|im_end|>"]
TOKEN_TYPES = [3, 3, 3, 1, 1, 1]


def random_tensors(config: Config, seed: int = 0) -> Tensors:
    """Under Hugging Face names, as transformers would hold them."""
    generator = np.random.default_rng(seed)
    spec = spec_from_config(config)
    names = Everything()
    return stacked({s.tensor: generator.standard_normal(s.shape, dtype=np.float32) for s in weight_map(spec, names)})


_ON_THE_HUB = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked(tensors: Tensors) -> Tensors:
    """A checkpoint's tensors with those of all experts in one for each matrix, under the names that the converter maps:
    of Mixtral and gpt-oss those of the others."""
    found: Tensors = {}
    experts: dict[str, dict[int, NDArray[np.float32]]] = {}
    for hub_name, values in tensors.items():
        name = hub_name.replace("block_sparse_moe", "mlp").replace("mlp.router", "mlp.gate")
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)(\.\w+)", name):
            experts.setdefault(match[1] + _ON_THE_HUB.get(match[3], match[3]) + match[4], {})[int(match[2])] = values
        elif re.fullmatch(r"(.*\.\d+\.experts\.)(gate_up|down)_proj", name):  # Gemma 4's
            found[f"{name}.weight"] = values
        elif match := re.fullmatch(r"(.*\.experts\.)(gate_up|down)_proj(_bias)?", name):
            kind, rows = ".bias" if match[3] else ".weight", values if match[3] else values.swapaxes(1, 2)
            parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]}
            for part, each in (parts if match[2] == "gate_up" else {"down_proj": rows}).items():
                found[match[1] + part + kind] = np.ascontiguousarray(each)
        else:
            found[name] = values
    return found | {name: np.stack([by[number] for number in sorted(by)]) for name, by in experts.items()}


def write_gguf(
    path: Path,
    architecture: str,
    config: Config,
    tensors: Tensors,
    *,
    type_of: Any = None,
    whole: bool = False,
    **keys: Any,
) -> Path:
    """`type_of` gives a matrix's type by its Hugging Face name; `whole`: as files were until 2025, kv_b_proj in one,
    and in_proj_qkvz; `keys` are metadata that is added, or in the place of what the model has, by its full name with
    `__` for a dot."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, architecture, config)
    if "kv_lora_rank" in config:
        _add_latent(writer, config, whole)
    if architecture == "gemma4":
        _add_gemma4(writer, config)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TOKEN_TYPES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, value in keys.items():
        full = name.replace("__", ".")
        for held in writer.kv_data:
            held.pop(full, None)
        if isinstance(value, bool):
            writer.add_bool(full, value)
        elif isinstance(value, int):
            writer.add_uint32(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_key_value(full, value, gguf.GGUFValueType.get_type(value))
    arch = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"] + (config.get("num_nextn_predict_layers") or 0))
    if architecture in QWEN_NEXT:
        tensors = _of_qwen_next(tensors, architecture, config, whole)
    if not whole:
        tensors = _split_latent(tensors, config)
    for name, values in tensors.items():
        stored = as_stored(name, values, architecture, config)
        mapped = (
            f"{name}.weight"
            if name.endswith(("sinks", "layer_scalar"))
            else name.replace("e_score_correction_bias", _CORRECTION)
        )
        own = names.get_name(mapped, (".weight", ".bias")) or _unmapped(name)
        assert own is not None, name
        is_matrix = stored.ndim >= 2 and not name.endswith((".bias", ".gate.weight", "conv1d.weight"))
        dtype = type_of(name) if type_of is not None and is_matrix else gguf.GGMLQuantizationType.F32
        rows = stored_rows(dtype.name, stored.reshape(-1, stored.shape[-1]), seed=len(own))
        writer.add_tensor(own, rows.reshape(*stored.shape[:-1], -1), raw_dtype=dtype)
    for own, factors in _rope_tensors(config).items():
        writer.add_tensor(own, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _split_latent(tensors: Tensors, config: Config) -> Tensors:
    """The two parts of kv_b_proj, [heads, ..], that of the keys turned."""
    found: Tensors = {}
    for name, values in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            by_head = values.reshape(config["num_attention_heads"], -1, values.shape[1])
            keys, of_values = np.split(by_head, [config["qk_nope_head_dim"]], axis=1)
            found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(keys.swapaxes(1, 2))
            found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(of_values)
        else:
            found[name] = values
    return found


def _add_latent(writer: Any, config: Config, whole: bool) -> None:
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"]:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(config["num_attention_heads"] if whole else 1)
    writer.add_key_length(key if whole else rank + rotated)
    writer.add_value_length(value if whole else rank)
    if not whole:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rotated)
    if (multiplier := config["rope_parameters"].get("mscale_all_dim")) is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)
    is_v2 = config["model_type"] == "deepseek_v2"
    if not (is_v2 and whole):  # as those before 2024's end
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if is_v2 else kinds.SIGMOID)
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)


def _unmapped(name: str) -> str | None:
    """Of an MTP layer where gguf's tables have not caught up with the converter, and of Gemma 4's routers, whose
    vectors the converter names itself, and a reranker's labels."""
    if name.startswith("cls."):
        return name
    if scale := re.fullmatch(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)", name):
        return f"blk.{scale[1]}.{'ffn_gate_inp' if scale[2] == 'scale' else 'ffn_down_exps'}.scale"
    found = re.fullmatch(r"model\.layers\.(\d+)\.(eh_proj|[eh]norm|shared_head\.norm)\.weight", name)
    return f"blk.{found[1]}.nextn.{found[2].replace('.', '_')}.weight" if found else None


def _of_qwen_next(tensors: Tensors, architecture: str, config: Config, whole: bool) -> Tensors:
    """Rates in place of their logarithms, norms with their 1, channels and z apart from each other; of Qwen3.5, value
    heads in turn by key heads, and the MTP layer behind the others."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    key, value = config["linear_key_head_dim"], config["linear_value_head_dim"]

    def tile(values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        """The last rows, `size` of each value head."""
        by_key = values[-heads * size :].reshape(keys, heads // keys, size, *values.shape[1:])
        tiled = by_key.swapaxes(0, 1).reshape(heads * size, *values.shape[1:])
        return tiled if len(tiled) == len(values) else np.concatenate((values[: -heads * size], tiled))

    sizes = dict.fromkeys(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight"), value)
    sizes |= dict.fromkeys(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"), 1)
    found: Tensors = {}
    behind = f"model.layers.{config['num_hidden_layers']}."
    for hub_name, of_hub in tensors.items():
        values = of_hub
        name, _, part = hub_name.rpartition("linear_attn.")
        if part == "in_proj_qkvz.weight" and not whole:
            widths = np.cumsum([key, key, heads // keys * value])
            parts = np.split(values.reshape(keys, -1, values.shape[1]), widths, axis=1)
            q, k, v, z = (each.reshape(-1, values.shape[1]) for each in parts)
            found[f"{name}linear_attn.in_proj_qkv.weight"] = np.concatenate((q, k, v))
            found[f"{name}linear_attn.in_proj_z.weight"] = z
            continue
        if architecture != "qwen3next" and part in sizes:
            values = tile(values, sizes[part])
        elif architecture != "qwen3next" and part == "out_proj.weight":
            values = tile(values.T, value).T
        name = re.sub(r"^mtp\.layers\.0\.", behind, hub_name.replace("dt_bias", "dt_proj.bias"))
        name = re.sub(r"^mtp\.(\w+)", lambda part: behind + _MTP[part[1]], name)
        if part == "A_log":
            values = -np.exp(values.astype(np.float64)).astype(np.float32)
        elif name.endswith("norm.weight") and part != "norm.weight":
            values = values + np.float32(1)
        found[name] = np.ascontiguousarray(values.squeeze() if part == "conv1d.weight" else values)
    return found


def as_stored(name: str, values: NDArray[np.float32], architecture: str, config: Config) -> NDArray[np.float32]:
    if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return values + np.float32(1)
    if name.endswith("shared_expert_gate.weight"):
        return values.squeeze()
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if architecture in PAIRED and f".{part}." in name:
            rows = values.reshape(config[key], 2, values.shape[0] // config[key] // 2, *values.shape[1:])
            return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(values.shape)
    return values


def _add_metadata(writer: Any, architecture: str, config: Config) -> None:
    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    drafting = config.get("num_nextn_predict_layers") or 0
    writer.add_block_count(config["num_hidden_layers"] + drafting)
    if drafting:
        writer.add_nextn_predict_layers(drafting)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if "rope_theta" in full and architecture != "gemma2":
        writer.add_rope_freq_base(full["rope_theta"])
    if (local := rope.get("sliding_attention")) and architecture == "olmo2":
        writer.add_rope_freq_base_swa(local["rope_theta"])
    if architecture == "phi3":
        writer.add_rope_dimension_count(int(full.get("partial_rotary_factor", 1.0) * head_dim))
        original = config.get("original_max_position_embeddings", 4096)
        writer.add_rope_scaling_orig_ctx_len(original)
        if full.get("rope_type") == "longrope":
            stretch = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
    elif full.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(full["rope_type"]))
        writer.add_rope_scaling_factor(full["factor"])
        if full["rope_type"] == "yarn":
            writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
            if "beta_fast" in full:
                writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
    elif "partial_rotary_factor" in full:
        writer.add_rope_dimension_count(int(full["partial_rotary_factor"] * head_dim))
    _add_experts(writer, architecture, config)
    _add_by_architecture(writer, architecture, config, full)


def _add_by_architecture(writer: Any, architecture: str, config: Config, full: Config) -> None:
    if architecture in QWEN_NEXT:
        writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(config["linear_key_head_dim"])
        writer.add_ssm_group_count(config["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    if architecture in ("qwen35", "qwen35moe"):
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if architecture == "mistral3":
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if architecture == "olmo2" and config.get("layer_types"):
        writer.add_sliding_window(config["sliding_window"])
        writer.add_sliding_window_pattern([each == "sliding_attention" for each in config["layer_types"]])
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def _add_experts(writer: Any, architecture: str, config: Config) -> None:
    numbers = {
        "n_routed_experts": writer.add_expert_count,
        "num_local_experts": writer.add_expert_count,
        "num_experts": writer.add_expert_count,
        "num_experts_per_tok": writer.add_expert_used_count,
        "top_k_experts": writer.add_expert_used_count,
        "moe_intermediate_size": writer.add_expert_feed_forward_length,
        "shared_expert_intermediate_size": writer.add_expert_shared_feed_forward_length,
        "n_shared_experts": writer.add_expert_shared_count,
        "first_k_dense_replace": writer.add_leading_dense_block_count,
        "n_group": writer.add_expert_group_count,
        "topk_group": writer.add_expert_group_used_count,
        "routed_scaling_factor": writer.add_expert_weights_scale,
    }
    for name, add in numbers.items():
        if config.get(name) is not None and not (name == "num_experts" and "num_local_experts" in config):
            add(config[name])
    if architecture == "glm4moe":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if architecture == "gpt-oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _add_gemma4(writer: Any, config: Config) -> None:
    n, slides = config["num_hidden_layers"], [each == "sliding_attention" for each in config["layer_types"]]
    full, other = spec_from_config(config).layers[slides.index(False)].heads or (0, 0), config["head_dim"]
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_key_length(full[1])
    writer.add_value_length(full[1])
    writer.add_key_length_swa(other)
    writer.add_value_length_swa(other)
    writer.add_rope_dimension_count(full[1])
    writer.add_rope_dimension_count_swa(other)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if full[0] != config["num_key_value_heads"]:
        writer.add_head_count_kv([config["num_key_value_heads"] if each else full[0] for each in slides])
    if config["use_double_wide_mlp"]:
        first, width = n - config["num_kv_shared_layers"], config["intermediate_size"]
        writer.add_feed_forward_length([width * (1 + (i >= first)) for i in range(n)])
    if config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def _rope_tensors(config: Config) -> Tensors:
    rope = config.get("rope_parameters") or {}
    if rope.get("full_attention", {}).get("rope_type") == "proportional":
        whole = next(layer for layer in spec_from_config(config).layers if layer.window is None).rope
        assert whole is not None
        still = whole.dim // 2 - whole.num_moving
        return {"rope_freqs.weight": np.array([1.0] * whole.num_moving + [1e30] * still, np.float32)}
    if rope.get("rope_type") == "longrope":
        return {f"rope_factors_{k}.weight": np.array(rope[f"{k}_factor"], np.float32) for k in ("long", "short")}
    if rope.get("rope_type") != "llama3":
        return {}
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    original, factor = rope["original_max_position_embeddings"], rope["factor"]
    factors = []
    for frequency in rope["rope_theta"] ** -(np.arange(0, dim, 2, dtype=np.float32) / dim):
        turns = original / (2 * math.pi / frequency)
        if turns > rope["high_freq_factor"]:
            factors.append(1.0)
        elif turns < rope["low_freq_factor"]:
            factors.append(factor)
        else:
            smooth = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return {"rope_freqs.weight": np.array(factors, np.float32)}

"""A GGUF file's metadata -> the config.json that the model's family would have, and its tensors' Hugging Face names;
and a file's metadata of a model.

Keys, defaults and what a file leaves out (Gemma's local rope base, layer pattern) are those of llama.cpp's
`src/models/*.cpp` and of the converter that writes the files, as of llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from maitred.core.errors import CheckpointError
from maitred.model.gguf_file import HELD_AS, GgufFile
from maitred.model.safetensors_file import RawTensor
from maitred.model.spec import DecoderSpec, RopeSpec, RopeType

Config = dict[str, Any]
_NOT_A_WHOLE_MODEL = "the file is damaged or holds no whole model; download it again"
_LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Texts that end a turn, by which llama.cpp finds the tokens whose ids a file does not name.
_END_TEXTS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<eos>", "<end_of_utterance>", "<｜end▁of▁sentence｜>",
    "<turn|>", "<|tool_response>",
))  # fmt: skip
_OWN_TYPES = (3, 4)  # of tokens that no merge makes: control and user defined

_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class _Keys:
    """The metadata of a model's files, read with their architecture's prefix; every fault names file and key."""

    def __init__(self, files: Sequence[GgufFile]) -> None:
        self.metadata, self._files = files[0].metadata, files
        self.names = {name: file for file in files for name in file.tensor_names()}
        self.architecture = self.metadata.get("general.architecture")
        kind = self.metadata.get("general.type", "model")
        if kind != "model":
            self.refuse(f"the file holds no model (general.type is {kind!r})", "name the model's own file")
        if self.architecture not in ARCHITECTURES:
            self.refuse(
                f"architecture {self.architecture!r} is not supported", f"supported are {', '.join(ARCHITECTURES)}"
            )

    def refuse(self, what: str, remedy: str = _NOT_A_WHOLE_MODEL) -> NoReturn:
        raise CheckpointError(f"{self._files[0].path}: {what[:300]}; {remedy}")

    def value(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: float | None = None) -> Any:
        """Number under a key; of a list with a value for each layer, the one that all have, or the first one's."""
        value = self.value(key)
        by_layer = ARCHITECTURES[str(self.architecture)].by_layer
        if isinstance(value, list) and value and (by_layer or all(each == value[0] for each in value)):
            value = value[0]
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
            found = f"{len(value)} different values" if isinstance(value, list) else repr(value)
            self.refuse(f"key {self.architecture}.{key} is {found}, and has to be one number")
        return _shortest(value) if isinstance(value, float) else value

    def count(self, key: str, default: int | None = None) -> int:
        value, least = self.number(key, default), 0 if default == 0 else 1
        if not isinstance(value, int) or value < least:
            self.refuse(f"key {self.architecture}.{key} is {value!r}, and has to be a whole number from {least}")
        return int(value)

    def each(self, key: str, count: int) -> list[Any]:
        """A key's value of each layer."""
        value = self.value(key)
        if isinstance(value, list) and len(value) != count:
            self.refuse(f"key {self.architecture}.{key} has {len(value)} values for {count} layers")
        return value if isinstance(value, list) else [self.number(key)] * count

    def floats(self, name: str) -> list[float] | None:
        """Values of a small tensor; None where there is none."""
        if name not in self.names:
            return None
        raw = self.names[name].tensor(name)
        if raw.dtype != "F32" or len(raw.shape) != 1 or raw.shape[0] > 4096:
            self.refuse(f"tensor {name} is {raw.dtype} of shape {list(raw.shape)}, and has to be a short list of F32")
        values = [_shortest(value) for value in struct.unpack(f"<{raw.shape[0]}f", raw.data)]
        if not all(0 < value < math.inf for value in values):
            self.refuse(f"tensor {name} holds numbers that divide no frequency")
        return values


def config_of(files: Sequence[GgufFile]) -> Config:
    """The config.json of the model in these files, the parts of one. Raises CheckpointError naming key or tensor."""
    keys = _Keys(files)
    row = ARCHITECTURES[str(keys.architecture)]
    num_heads, hidden_size = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.count("attention.key_length", hidden_size // num_heads or 1)
    value_dim = keys.count("attention.value_length", head_dim)
    if value_dim != head_dim and row.more is not _deepseek2:
        keys.refuse(f"heads of {head_dim} values for keys and {value_dim} for values are not supported", _OTHER)
    if keys.value("attention.causal") is False and not row.is_encoder:
        keys.refuse("the model is an encoder (attention.causal is false)", "of encoders BERT's kind is served")
    config = {
        "architectures": [row.name],
        "model_type": row.model_type,
        "vocab_size": _vocab_size(keys),
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("feed_forward_length", keys.value("expert_feed_forward_length")),
        **_num_layers(keys),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number(f"attention.layer_norm_{'' if row.is_encoder else 'rms_'}epsilon"),
        "tie_word_embeddings": "output.weight" not in keys.names,
        "attention_bias": any(name.endswith(".attn_q.bias") for name in keys.names),
        "mlp_bias": "blk.0.ffn_gate.bias" in keys.names,
        "rope_parameters": _rope(keys, head_dim),
    }
    for name in ("bos", "eos"):
        if isinstance(token := keys.metadata.get(f"tokenizer.ggml.{name}_token_id"), int):
            config[f"{name}_token_id"] = token
    _check_types(keys)
    config |= _experts(keys, config) if keys.count("expert_count", 0) else {}
    return config | row.more(keys, config)


def generation_config_of(file: GgufFile) -> Config:
    """Sampling defaults, and every token that ends an answer: those named by id, and control tokens by their text."""
    metadata = file.metadata
    found = {ours: metadata[key] for key, ours in _SAMPLING.items() if isinstance(metadata.get(key), (int, float))}
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    types = metadata.get("tokenizer.ggml.token_type")
    if isinstance(types, list):
        by_text = metadata.indexes("tokenizer.ggml.tokens", _END_TEXTS)
        ends += [token for token in by_text if token < len(types) and types[token] in _OWN_TYPES]
    ids = list(dict.fromkeys(token for token in ends if isinstance(token, int)))
    return {name: _shortest(value) if isinstance(value, float) else value for name, value in found.items()} | (
        {"eos_token_id": ids} if ids else {}
    )


def hugging_face_names(architecture: str, names: Iterable[str]) -> dict[str, str]:
    """Hugging Face name -> the file's, of every tensor but those that `config_of` reads. What has none keeps its own,
    and is refused by it."""
    row, found = ARCHITECTURES[architecture], dict[str, str]()
    parts = {**_PARTS, **row.parts}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer is not None and layer[2] in parts:
            kind = "" if layer[3] is None or layer[2] in _BARE else f".{layer[3]}"
            found[f"{row.layers}{layer[1]}.{parts[layer[2]]}{kind}"] = name
        elif name not in _ROPE_TENSORS:
            found[row.outside.get(name, name)] = name
    return found


def metadata_of(spec: DecoderSpec, generation_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[float]]:
    """Keys for a file of this model, and what `rope_freqs.weight` has to hold. What is not like the other models of its
    architecture has no key: read the file back. Raises CheckpointError where there is no architecture."""
    names = {row.name: name for name, row in ARCHITECTURES.items()} | {"MistralForCausalLM": "llama"}
    if (architecture := names.get(spec.architecture)) is None or spec.encoder is not None:
        raise CheckpointError(f"{spec.architecture} has no GGUF file here; {', '.join(names)} have")
    rope = next((layer.rope for layer in spec.layers if layer.rope is not None), None)
    keys: dict[str, Any] = {
        "block_count": spec.num_layers,
        "context_length": spec.max_position_embeddings,
        "embedding_length": spec.hidden_size,
        "feed_forward_length": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
        "attention.head_count": spec.num_heads,
        "attention.head_count_kv": spec.num_kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
        "attention.sliding_window": spec.layers[0].window,
    }
    if rope is not None:
        keys |= {"rope.dimension_count": rope.dim, "rope.freq_base": rope.theta}
    found = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    for key, own in _SAMPLING.items():
        if generation_config.get(own) is not None:
            found[key] = (int if own == "top_k" else float)(generation_config[own])
    divisors = _llama3_divisors(rope) if rope is not None and rope.rope_type is RopeType.LLAMA3 else []
    return {"general.architecture": architecture, "general.quantization_version": 2, **found}, divisors


def own_names(architecture: str, num_layers: int) -> dict[str, str]:
    """Hugging Face name -> the file's, of every tensor that a model of this architecture may have."""
    parts = {**_PARTS, **ARCHITECTURES[architecture].parts}
    layers = (f"blk.{i}.{part}.{kind}" for i in range(num_layers) for part in parts for kind in ("weight", "bias"))
    return hugging_face_names(architecture, (*ARCHITECTURES[architecture].outside, *layers))


def permuted_heads(config: Config, architecture: str, name: str) -> int:
    """Heads in each of which the rows of a tensor, by its Hugging Face name, stand in pairs; 0 where none do."""
    if ARCHITECTURES[architecture].is_permuted:
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".self_attn.{part}." in name:
                return int(config[key])
    return 0


def shape_there(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape under its Hugging Face name; the converter leaves out axes of one."""
    at = 0 if name.endswith(".shared_expert_gate.weight") else 1 if name.endswith(".conv1d.weight") else None
    return shape if at is None else (*shape[:at], 1, *shape[at:])


def as_there(raw: RawTensor, config: Config, architecture: str, name: str) -> RawTensor:
    """A file's tensor as checkpoints in the family's own layout hold it, by its Hugging Face name."""
    if num_heads := permuted_heads(config, architecture, name):
        raw = in_rope_order(raw, num_heads)
    return RawTensor(raw.dtype, shape_there(name, raw.shape), raw.data)


def in_rope_order(raw: RawTensor, num_heads: int) -> RawTensor:
    """Rows as transformers rotates them, the first half of a head with the second: llama.cpp's files put each pair
    side by side. Rows move whole, so that no value changes."""
    half = raw.shape[0] // num_heads // 2
    return _moved(raw, num_heads, [2 * i + part for part in (0, 1) for i in range(half)])


def in_pair_order(raw: RawTensor, num_heads: int) -> RawTensor:
    """The rows of `in_rope_order` as llama.cpp's files hold them."""
    half = raw.shape[0] // num_heads // 2
    return _moved(raw, num_heads, [part * half + i for i in range(half) for part in (0, 1)])


def _moved(raw: RawTensor, num_heads: int, order: Sequence[int]) -> RawTensor:
    rows, width = raw.shape[0], len(order)
    if width * num_heads != rows:
        raise CheckpointError(f"a matrix of {rows} rows is no {num_heads} heads of an even size; {_NOT_A_WHOLE_MODEL}")
    size = len(raw.data) // rows
    lines = [raw.data[i * size : (i + 1) * size] for i in range(rows)]
    moved = (lines[head * width + i] for head in range(num_heads) for i in order)
    return RawTensor(raw.dtype, raw.shape, memoryview(b"".join(moved)))


# ---- the parts of a config


def _vocab_size(keys: _Keys) -> int:
    """Rows of the embedding, which metadata and tokenizer have to agree with."""
    if "token_embd.weight" not in keys.names:
        keys.refuse("the file has no tensor token_embd.weight")
    shape = keys.names["token_embd.weight"].tensor("token_embd.weight").shape
    rows, claimed = shape[0], keys.number("vocab_size", shape[0])
    if claimed != rows:
        keys.refuse(f"key {keys.architecture}.vocab_size is {claimed:,}, and the embedding has {rows:,} rows")
    num_tokens = keys.metadata.num_values("tokenizer.ggml.tokens")
    if num_tokens > rows:
        keys.refuse(f"the tokenizer has {num_tokens:,} tokens, and the embedding {rows:,} rows")
    return rows


def _num_layers(keys: _Keys) -> Config:
    """Layers of the decoder, and those behind them that only draft, which `block_count` counts too."""
    layers = {match[1] for name in keys.names if (match := _LAYER.fullmatch(name))}
    if (claimed := keys.count("block_count")) != len(layers):
        keys.refuse(
            f"key {keys.architecture}.block_count is {claimed:,}, and there are tensors of {len(layers)} layers"
        )
    if (drafting := keys.count("nextn_predict_layers", 0)) >= claimed:
        keys.refuse(f"key {keys.architecture}.nextn_predict_layers is {drafting:,} of {claimed:,} layers")
    return {"num_hidden_layers": claimed - drafting, "num_nextn_predict_layers": drafting}


def _experts(keys: _Keys, config: Config) -> Config:
    """Routed experts, under all names that families have for their number."""
    count, active = keys.count("expert_count"), keys.count("expert_used_count")
    width = keys.count("expert_feed_forward_length", 0) or max(config["intermediate_size"] // active, 1)
    numbers = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), count)
    return {**numbers, "num_experts_per_tok": active, "moe_intermediate_size": width}


def _check_types(keys: _Keys) -> None:
    for name, file in keys.names.items():
        if (dtype := file.dtype_of(name)) not in HELD_AS:
            keys.refuse(
                f"tensor {name} is of type {dtype}, which is not computed here",
                f"choose a file whose tensors are of {', '.join(HELD_AS)} (Q4_K_M, Q8_0 ...)",
            )


def _rope(keys: _Keys, head_dim: int) -> Config:
    if (dim := keys.count("rope.dimension_count", head_dim)) > head_dim:
        keys.refuse(f"key {keys.architecture}.rope.dimension_count is {dim:,}, and heads have {head_dim:,} values")
    share = dim / head_dim
    if int(head_dim * share) != dim:
        share = math.nextafter(share, math.inf)
    rope = {"rope_theta": float(keys.number("rope.freq_base", 10_000.0)), "partial_rotary_factor": share}
    if not rope["rope_theta"]:
        keys.refuse(f"key {keys.architecture}.rope.freq_base is 0, and has to be more")
    return rope | _stretched(keys, rope["rope_theta"], dim)


def _stretched(keys: _Keys, theta: float, dim: int) -> Config:
    context = keys.count("context_length")
    original = keys.count("rope.scaling.original_context_length", context)
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.value("rope.scaling.type") or "linear"
    if (long := keys.floats("rope_factors_long.weight")) is not None:
        short = keys.floats("rope_factors_short.weight") or long
        rope: Config = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
        rope["original_max_position_embeddings"] = original
        return rope | _attention_factor(keys, context / original, original)
    if (divisors := keys.floats("rope_freqs.weight")) is not None:
        return _llama3(divisors, theta, dim)
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return {"rope_type": "default"}
    if kind != "yarn":
        return {"rope_type": kind, "factor": factor}
    told = {
        "attention_factor": "rope.scaling.yarn_attn_factor",
        "beta_fast": "rope.scaling.yarn_beta_fast",
        "beta_slow": "rope.scaling.yarn_beta_slow",
    }
    yarn = {name: keys.number(key) for name, key in told.items() if keys.value(key) is not None}
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **yarn}


def _attention_factor(keys: _Keys, stretch: float, original: int) -> Config:
    """The file's, where it is another than the rule's, which is more exact than its 32 bits."""
    if keys.value("rope.scaling.attn_factor") is None:
        return {}
    told = keys.number("rope.scaling.attn_factor")
    rule = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 and original > 1 else 1.0
    return {} if math.isclose(told, rule, rel_tol=1e-5) else {"attention_factor": told}


def _llama3(divisors: list[float], theta: float, dim: int) -> Config:
    """A divisor for each frequency, which is how files store Llama 3.1's rule: the rule itself where its usual numbers
    make these divisors, as they do in Meta's models, else the divisors."""
    factor = max(divisors)
    ruled = _llama3_divisors(RopeSpec(rope_type=RopeType.LLAMA3, theta=theta, dim=dim, factor=factor, **_LLAMA3))
    if len(ruled) == len(divisors) and all(map(lambda a, b: math.isclose(a, b, rel_tol=1e-4), ruled, divisors)):
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    return {
        "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "factor": 1.0,
        "attention_factor": 1.0,
    }  # fmt: skip


def _llama3_divisors(rope: RopeSpec) -> list[float]:
    low, high = rope.low_freq_factor, rope.high_freq_factor
    found = []
    for i in range(0, rope.dim, 2):
        turns = rope.original_max_position_embeddings / (2 * math.pi * rope.theta ** (i / rope.dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        found.append(1 / ((1 - smooth) / rope.factor + smooth))
    return found


def _llama(keys: _Keys, config: Config) -> Config:
    """Mistral's files say llama, as Mixtral's do; those of its models with a window have it."""
    window = keys.count("attention.sliding_window", 0)
    name = "mixtral" if "num_experts" in config else "mistral" if window else ""
    if not name:
        return {}
    return {"architectures": [f"{name.title()}ForCausalLM"], "model_type": name, "sliding_window": window or None}


def _mistral3(keys: _Keys, config: Config) -> Config:
    """YaRN's attention factor as llama.cpp computes it, of an mscale of 1, and the queries' scale beside it."""
    told = {"mscale_all_dim": "rope.scaling.yarn_log_multiplier", "llama_4_scaling_beta": "attention.temperature_scale"}
    more = {name: number for name, key in told.items() if (number := keys.number(key, 0.0))}
    return {"rope_parameters": {**config["rope_parameters"], "mscale": 1.0, **more}}


def _qwen_moe(keys: _Keys, config: Config) -> Config:
    """Qwen2's shared expert has a gate; weights are normalised in Qwen3's."""
    shared = keys.count("expert_shared_feed_forward_length", config["intermediate_size"])
    return {
        "norm_topk_prob": keys.architecture == "qwen3moe",
        "shared_expert_intermediate_size": 0 if keys.architecture == "qwen3moe" else shared,
        "qkv_bias": config["attention_bias"],
    }


def _qwen_next(keys: _Keys, config: Config) -> Config:
    """Norms hold w + 1 in these files, and Qwen3.5's value heads take key heads in turn."""
    key_heads, value_heads = keys.count("ssm.group_count"), keys.count("ssm.time_step_rank")
    told, interval = keys.value("attention.recurrent_layers"), keys.count("full_attention_interval", 4)
    layers = range(config["num_hidden_layers"])
    is_recurrent = told[: len(layers)] if isinstance(told, list) else [(i + 1) % interval for i in layers]
    return {
        "norm_offset": 0.0,
        "norm_topk_prob": True,
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length", 0),
        "layer_types": ["linear_attention" if each else "full_attention" for each in is_recurrent],
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // value_heads,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "linear_heads_tiled": keys.architecture != "qwen3next" and key_heads != value_heads,
    }


def _olmoe(keys: _Keys, config: Config) -> Config:
    return {"clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None, "norm_topk_prob": False}


def _glm4(keys: _Keys, config: Config) -> Config:
    """Where pictures share the positions (`dimension_sections`), the rows of q and k are moved as Llama's."""
    return {"rope_interleaved": not any(keys.value("rope.dimension_sections") or ())}


def _glm4_moe(keys: _Keys, config: Config, scoring: int = 2) -> Config:
    number = keys.count("expert_gating_func", 0) or scoring
    return {
        "scoring_func": {1: "softmax", 2: "sigmoid"}.get(number, f"number {number}"),  # llama.cpp's numbers
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "n_shared_experts": keys.count("expert_shared_count", 0),
        "n_group": keys.count("expert_group_count", 0) or 1,
        "topk_group": keys.count("expert_group_used_count", 0) or 1,
        "norm_topk_prob": bool(keys.value("expert_weights_norm")),
        "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in keys.names,
    }


def _deepseek2(keys: _Keys, config: Config) -> Config:
    """Heads have sizes of their own where keys are split (`attn_k_b`), as since 2025; the two multipliers of YaRN are
    equal. V3 and GLM-4.7-Flash score by sigmoid, which files of the latter need not say."""
    is_flash = config["num_hidden_layers"] in (47, 48) and config["vocab_size"] == 154_880
    routed = _glm4_moe(keys, config, 2 if is_flash else 1)
    is_v2, rotated = routed["scoring_func"] == "softmax", keys.count("rope.dimension_count")
    key, value = (
        keys.count(f"attention.{part}_length_mla", keys.number(f"attention.{part}_length")) for part in ("key", "value")
    )
    rope = {**config["rope_parameters"], "partial_rotary_factor": 1.0}
    if multiplier := keys.number("rope.scaling.yarn_log_multiplier", 0.0):  # a tenth of it
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), _shortest(10 * multiplier))
    v2_method = "group_limited_greedy" if routed["n_group"] > 1 else "greedy"
    has_two = "blk.0.attn_q_a.weight" in keys.names  # matrices of queries
    return routed | {
        "architectures": [f"DeepseekV{2 if is_v2 else 3}ForCausalLM"],
        "model_type": f"deepseek_v{2 if is_v2 else 3}",
        "topk_method": v2_method if is_v2 else "noaux_tc",
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "q_lora_rank": keys.count("attention.q_lora_rank") if has_two else None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "rope_parameters": rope,
    }


def _gpt_oss(keys: _Keys, config: Config) -> Config:
    """The files do not say that the model's YaRN does not round its borders, nor where SwiGLU is clamped."""
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "sliding_window": keys.count("attention.sliding_window"),
        "rope_parameters": {**config["rope_parameters"], "truncate": False},
        "swiglu_limit": 7.0,
        **_layer_types(keys, config, 2),
    }


def _gemma(keys: _Keys, config: Config) -> Config:
    """Norms hold w + 1 in these files. The largest models scale by the width of a head as it would be without
    key_length."""
    largest = (keys.architecture, config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3", 62))
    width = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return {"norm_offset": 0.0, "query_pre_attn_scalar": width}


def _gemma2(keys: _Keys, config: Config) -> Config:
    return _gemma(keys, config) | {
        "sliding_window": keys.count("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0) or None,
        **_layer_types(keys, config, 2),
    }


def _gemma3(keys: _Keys, config: Config) -> Config:
    window = keys.count("attention.sliding_window", 0)
    return _gemma(keys, config) | {
        "sliding_window": window or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        **_ropes(keys, config, 10_000.0),
        **(_layer_types(keys, config, 6) if window else {"layer_types": _types([False] * config["num_hidden_layers"])}),
    }


def _gemma4(keys: _Keys, config: Config) -> Config:
    """Sizes that the file tells are those of full layers, and those of sliding ones have names of their own; rope's
    pairs that stand still have enormous divisors. What only tensors tell: that values are keys."""
    n = config["num_hidden_layers"]
    shared, types = keys.count("attention.shared_kv_layers", 0), _layer_types(keys, config, 6)["layer_types"]
    heads, widths = keys.each("attention.head_count_kv", n), keys.each("feed_forward_length", n)
    kinds = {kind: i for i, kind in reversed([*enumerate(types)])}  # the first of each
    full = kinds.get("full_attention", n - 1)
    divisors, width = keys.floats("rope_freqs.weight") or [], config["head_dim"]
    moving = sum(each < 2 for each in divisors) or width // 2
    ropes = _ropes(keys, config, 10_000.0)["rope_parameters"]
    ropes["full_attention"] = {
        "rope_type": "proportional",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "partial_rotary_factor": (2 * moving + 0.5) / width,  # rounded down to that
    }
    per_layer = keys.count("embedding_length_per_layer_input", 0)
    return {
        "head_dim": keys.count("attention.key_length_swa", width),
        "global_head_dim": width,
        "num_key_value_heads": heads[kinds.get("sliding_attention", 0)],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in keys.names,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": widths[-1] != widths[0],
        "hidden_size_per_layer_input": per_layer,
        "enable_moe_block": "num_experts" in config,
        "top_k_experts": config.get("num_experts_per_tok"),
        "vocab_size_per_layer_input": config["vocab_size"],
        "sliding_window": keys.count("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "layer_types": types,
        "rope_parameters": ropes,
    }


def _ropes(keys: _Keys, config: Config, theta: float) -> Config:
    """Full layers have the file's rope; sliding ones are not stretched, and have `theta` if the file tells no other."""
    sliding = {"rope_type": "default", "rope_theta": float(keys.number("rope.freq_base_swa", theta))}
    return {"rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": sliding}}


def _layer_types(keys: _Keys, config: Config, pattern: int) -> Config:
    """Return which layers slide: a list in the file, or each but every n-th."""
    told = keys.value("attention.sliding_window_pattern")
    if isinstance(told, list):
        return {"layer_types": _types(told)}
    pattern = keys.count("attention.sliding_window_pattern", pattern)
    return {"layer_types": _types([i % pattern != pattern - 1 for i in range(config["num_hidden_layers"])])}


def _types(slides: Sequence[Any]) -> list[str]:
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _phi3(keys: _Keys, config: Config) -> Config:
    original = keys.count("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = keys.count("attention.sliding_window", 0) or None
    return {"sliding_window": window, "original_max_position_embeddings": original}


def _granite(keys: _Keys, config: Config) -> Config:
    if keys.value("rope.scaling.finetuned") is False:
        keys.refuse("a granite model without rope is not supported (rope.scaling.finetuned is false)", _OTHER)
    return {
        "attention_multiplier": keys.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": keys.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": keys.number("logit_scale", 0.0) or 1.0,
    }


def _olmo2(keys: _Keys, config: Config) -> Config:
    """OLMo 3's files say olmo2, and have a window."""
    if not (window := keys.count("attention.sliding_window", 0)):
        return {}
    olmo3 = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "sliding_window": window}
    return olmo3 | _ropes(keys, config, config["rope_parameters"]["rope_theta"]) | _layer_types(keys, config, 4)


def _bert(keys: _Keys, config: Config) -> Config:
    """RoBERTa's and XLM-R's files say bert too, and their positions begin at the first token."""
    types = keys.names.get("token_types.weight")  # none: DistilBERT's
    num_types = 0 if types is None else types.tensor("token_types.weight").shape[0]
    return {"layer_norm_eps": config["rms_norm_eps"], "type_vocab_size": num_types, "hidden_act": "gelu"}


def _nothing_more(keys: _Keys, config: Config) -> Config:
    return {}


_OTHER = "choose another model"
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}


@dataclass(frozen=True, slots=True)
class _Architecture:
    name: str
    model_type: str
    more: Callable[[_Keys, Config], Config] = _nothing_more
    by_layer: bool = False  # numbers may differ by layer
    is_permuted: bool = False  # rows of q and k, whose rotated pairs llama.cpp has side by side
    parts: Mapping[str, str] = field(default_factory=dict)  # of its own, before those that all have
    layers: str = "model.layers."  # before the number of a layer
    outside: Mapping[str, str] = field(default_factory=lambda: _OUTSIDE)
    is_encoder: bool = False


_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
_BARE = (
    "exp_probs_b",
    "attn_sinks",
    "ssm_dt",
    "layer_output_scale",
)  # parts whose Hugging Face names end without a kind
_MLP_NORM = {"post_attention_norm": "post_attention_layernorm"}  # before the MLP, where it is called so
_SHARED_EXPERT = {
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_LATENT_PARTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    **{f"attn_{part}_b": f"self_attn.{part}_b_proj" for part in ("kv", "k", "v")},
}
_RECURRENT = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # older files of Qwen3-Next, in place of the two
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.rate",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_QWEN_NEXT_PARTS = _RECURRENT | _SHARED_EXPERT | _MLP_NORM
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA_PARTS = _POST_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GEMMA4_PARTS = _GEMMA_PARTS | {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
    **{f"ffn_{part}_exps": f"experts.{part}_proj" for part in ("gate", "up", "gate_up", "down")},
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    **{f"post_ffw_norm_{i}": f"post_feedforward_layernorm_{i}" for i in (1, 2)},
}

_GLM4_PARTS = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}

_BERT_PARTS = {
    **{f"attn_{part[0]}": f"attention.self.{part}" for part in ("query", "key", "value")},
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}
_BERT_OUTSIDE = {
    "token_embd.weight": "embeddings.word_embeddings.weight",
    "token_types.weight": "embeddings.token_type_embeddings.weight",
    "position_embd.weight": "embeddings.position_embeddings.weight",
    **{f"token_embd_norm.{kind}": f"embeddings.LayerNorm.{kind}" for kind in ("weight", "bias")},
    **{f"cls.{kind}": f"pooler.dense.{kind}" for kind in ("weight", "bias")},
    **{f"cls.output.{kind}": f"classifier.{kind}" for kind in ("weight", "bias")},
}

ARCHITECTURES = {
    "bert": _Architecture(
        "BertModel", "bert", _bert, parts=_BERT_PARTS, layers="encoder.layer.", outside=_BERT_OUTSIDE, is_encoder=True
    ),
    "deepseek2": _Architecture("DeepseekV3ForCausalLM", "deepseek_v3", _deepseek2, parts=_LATENT_PARTS),
    "gemma2": _Architecture("Gemma2ForCausalLM", "gemma2", _gemma2, parts=_GEMMA_PARTS),
    "gemma3": _Architecture("Gemma3ForCausalLM", "gemma3_text", _gemma3, parts=_GEMMA_PARTS),
    "gemma4": _Architecture("Gemma4ForCausalLM", "gemma4_text", _gemma4, by_layer=True, parts=_GEMMA4_PARTS),
    "glm4": _Architecture("Glm4ForCausalLM", "glm4", _glm4, parts=_GLM4_PARTS),
    "glm4moe": _Architecture("Glm4MoeForCausalLM", "glm4_moe", _glm4_moe, parts=_MLP_NORM),
    "gpt-oss": _Architecture(
        "GptOssForCausalLM", "gpt_oss", _gpt_oss, parts=_MLP_NORM | {"attn_sinks": "self_attn.sinks"}
    ),
    "granite": _Architecture("GraniteForCausalLM", "granite", _granite, is_permuted=True),
    "llama": _Architecture("LlamaForCausalLM", "llama", _llama, is_permuted=True),
    "mistral3": _Architecture("Ministral3ForCausalLM", "ministral3", _mistral3, is_permuted=True),
    "olmo2": _Architecture("Olmo2ForCausalLM", "olmo2", _olmo2, parts=_POST_NORMS),
    "olmoe": _Architecture("OlmoeForCausalLM", "olmoe", _olmoe),
    "phi3": _Architecture(
        "Phi3ForCausalLM", "phi3", _phi3, parts={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
    ),
    "qwen2": _Architecture("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", "qwen2_moe", _qwen_moe, parts=_SHARED_EXPERT),
    "qwen3": _Architecture("Qwen3ForCausalLM", "qwen3"),
    "qwen35": _Architecture("Qwen3_5ForCausalLM", "qwen3_5_text", _qwen_next, parts=_QWEN_NEXT_PARTS),
    "qwen35moe": _Architecture("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", _qwen_next, parts=_QWEN_NEXT_PARTS),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", "qwen3_moe", _qwen_moe),
    "qwen3next": _Architecture("Qwen3NextForCausalLM", "qwen3_next", _qwen_next, parts=_QWEN_NEXT_PARTS),
    "smollm3": _Architecture("SmolLM3ForCausalLM", "smollm3", is_permuted=True),
}


def _shortest(value: float) -> float:
    """The shortest decimal that is this number in 32 bits: 1e-05 in a config.json, and not 9.999999747378752e-06."""
    shorter = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    try:
        return next((each for each in shorter if struct.pack("<f", each) == struct.pack("<f", value)), value)
    except OverflowError:  # more than 32 bits can be
        return value

"""Checkpoints of real models' shapes, weights random, with a tokenizer of their size; and GGUF files (needs gguf)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

REPOSITORY = Path(__file__).resolve().parents[2]
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>")
LEARNED_TOKENS = 8000

# The published config.json of each model, as far as it decides about work.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    **{"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **{"model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        **{"model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192},
        **{"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
        **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
        **{"rope_scaling": LLAMA3_ROPE, "tie_word_embeddings": True},
    },
    "qwen3-30b-a3b-4-layers": {  # GGUF alone
        **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144},
        **{"num_hidden_layers": 4, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
        **{"max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0},
        "tie_word_embeddings": True,
    },
}


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write `folder`/`name` in Hugging Face layout, bfloat16, weights from a fixed seed, unless it is there."""
    target = folder / name
    if (target / "model.safetensors").exists() and (target / "tokenizer.json").exists():
        return target
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    config.eos_token_id, config.bos_token_id, config.pad_token_id = (fields["vocab_size"] - 3 + i for i in (2, 1, 0))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    _write_older_names(target / "config.json", fields)
    _write_tokenizer(target, fields["vocab_size"])
    return target


GGUF_SHAPES = ("qwen3-0.6b-q4_k_m", "qwen3-0.6b-q8_0", "qwen3-30b-a3b-4-layers-q4_k_m", "qwen3-30b-a3b-4-layers-q8_0")
# Where a block type has its float16 scales, by byte, and values that make weights of about 0.02.
SCALES: dict[str, dict[int, float]] = {"Q4_K": {0: 1e-4, 2: 7.5e-4}, "Q6_K": {208: 2e-5}, "Q8_0": {0: 2.7e-4}}


def make_gguf(name: str, folder: Path) -> Path:
    """Write `folder`/`name`.gguf of random codes unless it is there: Q8_0 throughout, or llama.cpp's mix Q4_K_M."""
    target = folder / f"{name}.gguf"
    if target.exists():
        return target
    import gguf
    from tokenizers import pre_tokenizers

    shape = SHAPES[name.rsplit("-", 1)[0]]
    num_experts = shape.get("num_experts", 0)
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    queries, keys = (shape[f"num_{kind}_heads"] * shape["head_dim"] for kind in ("attention", "key_value"))
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(
        target.with_suffix(".partial"), "qwen3moe" if num_experts else "qwen3", use_temp_file=False
    )
    _add_keys(writer, shape)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    pieces = [
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        "th",
        *(f"<|unused-{number}|>" for number in range(shape["vocab_size"] - 257)),
    ]
    writer.add_token_list(pieces)
    writer.add_token_types([1] * (len(pieces) - 1) + [3])
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(len(pieces) - 1)

    def add(tensor: str, rows: int, width: int, more: bool = False, experts: int = 0) -> None:
        kind = "Q8_0" if name.endswith("q8_0") else "Q6_K" if more else "Q4_K"
        dtype = gguf.GGMLQuantizationType[kind]
        values, size = gguf.GGML_QUANT_SIZES[dtype]
        blocks = _random_blocks(rng, kind, (experts or 1) * rows, width // values, size)
        writer.add_tensor(f"{tensor}.weight", blocks.reshape(experts, rows, -1) if experts else blocks, raw_dtype=dtype)

    add("token_embd", shape["vocab_size"], hidden, more=True)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for layer in range(layers):
        block, eighth = f"blk.{layer}.", layers // 8
        more = layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2  # llama.cpp's use_more_bits
        for norm, width in (("attn", hidden), ("ffn", hidden), ("attn_q", shape["head_dim"])):
            writer.add_tensor(f"{block}{norm}_norm.weight", np.ones(width, np.float32))
        writer.add_tensor(f"{block}attn_k_norm.weight", np.ones(shape["head_dim"], np.float32))
        add(f"{block}attn_q", queries, hidden)
        add(f"{block}attn_k", keys, hidden)
        add(f"{block}attn_v", keys, hidden, more)
        add(f"{block}attn_output", hidden, queries)
        if num_experts:
            router = rng.standard_normal((num_experts, hidden), dtype=np.float32) * np.float32(0.05)
            writer.add_tensor(f"{block}ffn_gate_inp.weight", router)
            inner = shape["moe_intermediate_size"]
        end = "_exps" if num_experts else ""
        add(f"{block}ffn_gate{end}", inner, hidden, experts=num_experts)
        add(f"{block}ffn_up{end}", inner, hidden, experts=num_experts)
        add(f"{block}ffn_down{end}", hidden, inner, more, experts=num_experts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target.with_suffix(".partial").rename(target)


def _add_keys(writer: Any, shape: dict[str, Any]) -> None:
    if num_experts := shape.get("num_experts"):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(shape["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(shape["moe_intermediate_size"])
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_key_length(shape["head_dim"])
    writer.add_value_length(shape["head_dim"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_rope_freq_base(shape["rope_theta"])


def _random_blocks(rng: np.random.Generator, kind: str, rows: int, blocks: int, size: int) -> NDArray[np.uint8]:
    found = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at, scale in SCALES[kind].items():
        found[:, :, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return found.reshape(rows, blocks * size)


def _write_older_names(file: Path, fields: dict[str, Any]) -> None:
    """Converters of older packages read rope_theta, rope_scaling and torch_dtype beside today's names."""
    config = json.loads(file.read_text())
    config |= {
        "rope_theta": fields["rope_theta"],
        "rope_scaling": fields.get("rope_scaling"),
        "torch_dtype": "bfloat16",
    }
    file.write_text(json.dumps(config, indent=1))


def _write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Byte-level BPE learned on this repository's documents, filled up with unreachable pieces to `vocab_size`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_TOKENS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train([str(file) for file in sorted(REPOSITORY.glob("docs/**/*.md"))], trainer)
    state = json.loads(learner.to_str())
    pieces = state["model"]["vocab"]
    for token_id in range(len(pieces), vocab_size - len(SPECIALS)):
        pieces[f"<|unused-{token_id}|>"] = token_id
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)),
        pad_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "
    )
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=1))

"""Write and read a model directory in the layout of Hugging Face: configs, bf16 safetensors, tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.model import Decoder, DecoderShape
from training.tokenizer import BOS, END, EOS, PAD, SPECIAL, save_tokenizer


def export(model: Decoder, tokenizer: Tokenizer, directory: Path) -> None:
    """Write everything a server needs; the weights are rounded to bf16, and the tied output is not stored."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().to(torch.bfloat16).contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, str(directory / "model.safetensors"), metadata={"format": "pt"})
    write_json(directory / "config.json", llama_config(model.shape))
    write_json(directory / "generation_config.json", _generation_config())
    save_tokenizer(tokenizer, directory, model.shape.max_positions)


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Decoder, Tokenizer]:
    """Read what `export` wrote."""
    config = json.loads((directory / "config.json").read_text())
    shape = DecoderShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = Decoder(shape)
    weights: dict[str, Tensor] = load_file(str(directory / "model.safetensors"))
    model.load_state_dict(weights)
    return model.to(dtype).eval(), Tokenizer.from_file(str(directory / "tokenizer.json"))


def llama_config(shape: DecoderShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": SPECIAL.index(BOS),
        "dtype": "bfloat16",
        "eos_token_id": [SPECIAL.index(END), SPECIAL.index(EOS)],
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.num_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": shape.num_kv_heads,
        "pad_token_id": SPECIAL.index(PAD),
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": shape.vocab_size,
    }


def _generation_config() -> dict[str, object]:
    return {
        "bos_token_id": SPECIAL.index(BOS),
        "do_sample": True,
        "eos_token_id": [SPECIAL.index(END), SPECIAL.index(EOS)],
        "pad_token_id": SPECIAL.index(PAD),
        "temperature": 0.7,
        "top_p": 0.95,
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

"""Random-weight checkpoints of real models' shapes, with a tokenizer of their vocabulary size; needs transformers.

python -m peers.shapes FOLDER qwen3-0.6b      (from benchmarks/)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>")
LEARNED_TOKENS = 8000

# The published config.json of each model, as far as it decides about work.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
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


if __name__ == "__main__":
    for shape in sys.argv[2:]:
        print(make_checkpoint(shape, Path(sys.argv[1])))

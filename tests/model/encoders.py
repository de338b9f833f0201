"""Random float32 checkpoints of encoders, folders as sentence-transformers write them, and their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{at}" for at in range(60)), "no", "yes", "##s", "bread", "sky"]
ODD = {
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "max_position_embeddings": 75,
}


def write_encoder_tokenizer(folder: Path) -> None:
    """WordPiece, which joins pairs as BERT's does."""
    inner = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    inner.save(str(folder / "tokenizer.json"))
    named = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 512, **named}))


def make_encoder(kind: str, folder: Path, use: str = "Model", **overrides: Any) -> Any:
    """transformers' own model of `kind` (Bert, Roberta, XLMRoberta), saved to `folder` with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**ODD | overrides)
    model = getattr(transformers, f"{kind}{use}")(config).eval()
    for name, weights in model.named_parameters():
        spread = torch.randn_like(weights)
        weights.data = 0.3 * spread + (1.0 if "LayerNorm.weight" in name else 0.0)
    model.save_pretrained(folder)
    write_encoder_tokenizer(folder)
    return model


def write_modules(folder: Path, pooling: str, *, normalize: bool = True, dense: Any = None, **more: Any) -> None:
    """What sentence-transformers write beside a model; `more` goes to its own config."""
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense is not None else []), *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": f"{at}_{kind}" if at else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules[1:]:
        (folder / module["path"]).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    if dense is not None:
        from safetensors.numpy import save_file

        weight, bias = dense
        save_file({"linear.weight": weight, "linear.bias": bias}, folder / "2_Dense" / "model.safetensors")
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
        told = sizes | {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(told))
    if more:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(more))


def states_of(model: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> np.ndarray:
    """transformers' last states [tokens, hidden size] of one prompt alone."""
    import torch

    given = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    with torch.no_grad():
        return getattr(model, "model", model)(torch.tensor([list(ids)]), **given).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)

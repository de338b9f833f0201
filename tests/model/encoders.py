"""Random float32 checkpoints of encoders, folders as sentence-transformers write them, and their oracle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    *(f"w{at}" for at in range(60)),
    "no",
    "yes",
    "##s",
    "bread",
    "sky",
    "<|im_start|>",
]
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
    """transformers' own model of `kind` (as Bert, Roberta, DistilBert), saved to `folder` with a tokenizer."""
    import torch
    import transformers

    torch.manual_seed(len(kind))
    config = getattr(transformers, f"{kind}Config")(**ODD | overrides)
    model = getattr(transformers, f"{kind}{use}")(config).eval()
    for name, weights in model.named_parameters():
        spread = torch.randn_like(weights)
        weights.data = 0.3 * spread + (1.0 if name.lower().endswith("norm.weight") else 0.0)
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


def write_encoder_gguf(path: Path, folder: Path, model: Any, pooling: int, kind: str = "F32") -> Path:
    """The model of `folder` as llama.cpp's converter stores BERT's kind (llama-cpp-python 0.3.36, conversion/bert.py):
    positions from a text's first token on, pieces of words without marks, and beginnings with one."""
    import gguf

    writer, config, size = gguf.GGUFWriter(path, "bert"), model.config, model.config.hidden_size
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(size)
    writer.add_feed_forward_length(getattr(config, "hidden_dim", config.intermediate_size))
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(getattr(config, "layer_norm_eps", 1e-12))
    writer.add_causal_attention(False)
    writer.add_pooling_type(gguf.PoolingType(pooling))
    writer.add_tokenizer_model("bert")
    tokens = [*WORDS, *(f"[unused{at}]" for at in range(config.vocab_size - len(WORDS)))]
    written = [t if t[0] == "[" else t.removeprefix("##") if t.startswith("##") else f"▁{t}" for t in tokens]
    writer.add_token_list(written)
    writer.add_token_types([3 if token[0] == "[" else 1 for token in tokens])
    for name, number in (("unknown", 1), ("cls", 2), ("seperator", 3), ("padding", 0)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", number)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, config.num_hidden_layers)
    for name, values in model.state_dict().items():
        is_label, plain = name.startswith("classifier."), name.removeprefix("bert.")
        plain = plain.replace("classifier", "classifier.out_proj") if is_label else plain
        plain = plain.replace("pooler.dense", "classifier.dense") if pooling == 4 else plain
        if (own := names.get_name(plain, (".weight", ".bias"))) is not None and "pooler" not in plain:
            array = values.numpy()
            is_matrix = array.ndim == 2 and kind != "F32" and array.shape[1] % 32 == 0
            stored = gguf.quants.quantize(array, gguf.GGMLQuantizationType[kind]) if is_matrix else array
            writer.add_tensor(own, stored, raw_dtype=gguf.GGMLQuantizationType[kind] if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

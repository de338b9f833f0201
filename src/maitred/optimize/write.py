"""Writing models: an ordinary folder in Hugging Face layout, with the parent's tokenizer and its config, changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import TorchDecoder, tensor_from_raw
from maitred.model.weight_map import HARMLESS, decoder_sources
from maitred.text.folder import gguf_metadata, read_chat_template
from maitred.text.gguf_tokenizer import tokenizer_of

_COPIED = (
    *("tokenizer*", "*.jinja", "additional_chat_templates", "chat_template.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*processor_config.json"),
)
_NOT_OF_A_CHILD = ("quantization_config", "compression_config", "norm_offset", "torch_dtype", "_name_or_path")
_FLOATS = ("float32", "float16", "bfloat16")


def child_config(parent: Checkpoint, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The parent's config.json with `changes` (hidden_size, num_attention_heads ...), of unquantised weights."""
    config = {key: value for key, value in deepcopy(parent.config).items() if key not in _NOT_OF_A_CHILD}
    text = config.get("text_config") or config
    text |= {"head_dim": spec_from_config(config).head_dim, **changes}
    config["dtype"] = text["dtype"] = parent.dtype if parent.dtype in _FLOATS else "bfloat16"
    return config


def layer_changes(parent: Checkpoint, kept: Sequence[int]) -> dict[str, Any]:
    """Changes of a config that keeps these layers of the parent's, each with its window and its rope."""
    config = child_config(parent, {})
    text, layers = config.get("text_config") or config, spec_from_config(config).layers
    changes: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if text.get("layer_types") or len({layer.window for layer in layers}) > 1:
        changes["layer_types"] = [_ATTENTION[layers[index].window is not None] for index in kept]
    if any(layer.rope is None for layer in layers):
        changes["no_rope_layers"] = [int(layers[index].rope is not None) for index in kept]
    return changes


_ATTENTION = {True: "sliding_attention", False: "full_attention"}


def save_decoder(
    decoder: TorchDecoder, parent: Checkpoint, folder: Path, changes: Mapping[str, Any] | None = None
) -> None:
    """Write `decoder`, a child of `parent`, as a folder that transformers loads: config with `changes`, weights in the
    parent's dtype (bfloat16 where that is quantised), tokenizer, chat template and sampling of the parent.

    Raises CheckpointError where the changed config describes another decoder than this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = child_config(parent, changes or {})
    spec = spec_from_config(config)
    if replace(spec, norm_offset=decoder.spec.norm_offset) != decoder.spec:
        raise CheckpointError(
            f"config.json would describe {spec.identity()}, and the weights are of {decoder.spec.identity()}"
        )
    dtype, names = getattr(torch, config["dtype"]), parent.tensor_names()
    parameters = dict(decoder.named_parameters())
    weights = {  # what the decoder does not read is kept, as a multimodal model's eyes
        name: tensor_from_raw(parent.tensor(name), name).clone() for name in names if HARMLESS.search(name)
    }
    for source in decoder_sources(spec, names):
        rows = parameters[source.parameter].detach()[source.row : source.row + source.shape[0]]
        weights[source.tensor] = (rows - source.offset if source.offset else rows.clone()).to(dtype)
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", config)
    save_tokenizer(parent, folder)


def save_tokenizer(parent: Checkpoint, folder: Path) -> None:
    """Tokenizer, chat template and recommended sampling of the parent, copied or made of a GGUF file."""
    if parent.gguf is None:
        for path in (path for pattern in _COPIED for path in parent.folder.glob(pattern)):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / path.name)
        return
    with gguf_metadata(parent.path) as metadata:
        tokenizer, named, _ = tokenizer_of(metadata)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = read_chat_template(parent.path)
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]  # type: ignore[assignment]
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", **named} | ({"chat_template": template} if template else {}),
    )
    if parent.generation_config:
        write_json(folder / "generation_config.json", parent.generation_config)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")

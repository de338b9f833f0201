"""Writing models: an ordinary folder in Hugging Face layout, with the parent's tokenizer and its config, changed; a
quantised one of compressed-tensors; a GGUF file (ggml/docs/gguf.md, version 3) with its parent's metadata.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from maitred.core.errors import CheckpointError, ConfigError
from maitred.model.checkpoint import Checkpoint
from maitred.model.compressed_tensors import BLOCKS
from maitred.model.families import spec_from_config
from maitred.model.gguf_config import in_pair_order, permuted_heads
from maitred.model.gguf_file import GGML_TYPES, MAGIC, Metadata
from maitred.model.packed import float32_values
from maitred.model.safetensors_file import RawTensor
from maitred.model.torch_decoder import TorchDecoder, tensor_from_raw
from maitred.model.weight_map import HARMLESS, WeightSource, decoder_sources
from maitred.optimize.rounding import Form, Rounded
from maitred.storage.files import replace_file
from maitred.text.folder import gguf_metadata, read_chat_template
from maitred.text.gguf_tokenizer import tokenizer_of

_COPIED = (
    *("tokenizer*", "*.jinja", "additional_chat_templates", "chat_template.json", "generation_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "*processor_config.json"),
)
_NOT_OF_A_CHILD = ("quantization_config", "compression_config", "norm_offset", "torch_dtype", "_name_or_path")
_FLOATS = ("float32", "float16", "bfloat16")
_GGML_NUMBERS = {name: number for number, (name, _, _) in GGML_TYPES.items()}
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q8_0": 7}  # llama.h, enum llama_ftype
_ALIGNMENT = 32
_LEFT_OUT = ("general.file_type", "general.alignment", "split.")


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


def save_compressed(
    parent: Checkpoint, folder: Path, layer_of: Callable[[int], Mapping[str, Tensor | Rounded]]
) -> None:
    """Write a child of `parent` whose layers' parameters `layer_of` gives, as a compressed-tensors folder: rounded
    matrices packed (`pack-quantized`), the rest in the parent's dtype."""
    folder.mkdir(parents=True, exist_ok=True)
    config = child_config(parent, {})
    spec, dtype, names = spec_from_config(config), getattr(torch, config["dtype"]), parent.tensor_names()
    weights = {name: tensor_from_raw(parent.tensor(name), name).clone() for name in names if HARMLESS.search(name)}
    forms: dict[Form, list[str]] = {}
    sources: dict[int, list[WeightSource]] = {}
    for source in decoder_sources(spec, names):
        layer = re.match(r"layers\.(\d+)\.", source.parameter)
        sources.setdefault(int(layer[1]) if layer else -1, []).append(source)
    for index, found in sources.items():
        given = layer_of(index) if index >= 0 else {}
        for source in found:
            value = given.get(source.parameter.removeprefix(f"layers.{index}."))
            if isinstance(value, Rounded):
                linear = source.tensor.removesuffix(".weight")
                weights |= {f"{linear}.{part}": tensor for part, tensor in packed(value, source).items()}
                forms.setdefault(value.form, []).append(linear)
            elif value is not None:
                weights[source.tensor] = (value[source.row : source.row + source.shape[0]] - source.offset).to(dtype)
            else:
                weights[source.tensor] = tensor_from_raw(parent.tensor(source.tensor), source.tensor).to(dtype)
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", {**config, "quantization_config": _quantization_config(forms)})
    save_tokenizer(parent, folder)


def packed(rounded: Rounded, source: WeightSource) -> dict[str, Tensor]:
    """Parts of the rows of one linear, as `compressors/pack_quantized` of compressed-tensors 0.20 stores them."""
    rows = slice(source.row, source.row + source.shape[0])
    bits, zero = rounded.form.bits, rounded.zero[rows]
    parts = {"weight_packed": _words(rounded.codes[rows], bits), "weight_scale": rounded.scale[rows].clone()}
    if not rounded.form.symmetric:
        parts["weight_zero_point"] = _words(zero.T, bits).T.contiguous()
    return parts | {"weight_shape": torch.tensor(source.shape)}


def _words(codes: Tensor, bits: int) -> Tensor:
    """Rows of signed codes as 32-bit words, counted from the least one, the first in the lowest bits."""
    per_word = 32 // bits
    values = nn.functional.pad(codes.short() + (1 << (bits - 1)), (0, -codes.shape[1] % per_word)).to(torch.uint8)
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    return values.flatten().view(torch.int32).view(len(codes), -1)


def _quantization_config(forms: Mapping[Form, Sequence[str]]) -> dict[str, Any]:
    """As compressed-tensors 0.20 describes these linears in config.json."""
    groups = {}
    for number, (form, linears) in enumerate(forms.items()):
        strategy = {"strategy": "channel", "group_size": None} if form.group is None else {
            "strategy": "group", "group_size": form.group,
        }  # fmt: skip
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(forms) == 1 else list(linears),
            "weights": {
                "num_bits": form.bits, "type": "int", "symmetric": form.symmetric, **strategy, "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def check_gguf_parent(parent: Checkpoint) -> None:
    """Raises ConfigError for a parent whose metadata a GGUF file could not take over."""
    if parent.gguf is None:
        raise ConfigError(
            f"--to gguf takes over the metadata of a GGUF parent, and {parent.path} is a folder; leave --to out, and "
            f"let llama.cpp's convert_hf_to_gguf.py convert what needs a GGUF file"
        )


def save_gguf(child: Checkpoint, parent: Checkpoint, file: Path) -> None:
    """Write `child`, a compressed folder, as one GGUF file. Embedding and output matrix are the parent's own blocks
    where it has some, else Q8_0."""
    check_gguf_parent(parent)
    assert parent.gguf is not None
    metadata, tensors = parent.gguf.metadata, dict[str, RawTensor]()
    for name in parent.tensor_names():
        raw = child.tensor(name)
        if len(raw.shape) == 1:
            raw = RawTensor("F32", raw.shape, memoryview(float32_values(raw, name).tobytes()))
        elif raw.dtype in _FLOAT_TYPES:
            kept = parent.tensor(name)
            raw = _q8_0(float32_values(kept, name)) if kept.dtype in _FLOAT_TYPES else kept
        num_heads = permuted_heads(parent.config, metadata["general.architecture"], name)
        tensors[parent.own_name(name)] = in_pair_order(raw, num_heads) if num_heads else raw
    for part in parent.files:  # tensors that its config was read from: divisors of rope
        tensors |= {name: part.tensor(name) for name in part.tensor_names() if name not in tensors}
    _write_gguf(file, metadata, tensors)


def _q8_0(values: NDArray[np.float32]) -> RawTensor:
    """Blocks of 32 as ggml rounds them: their largest value becomes 127."""
    blocks = np.empty((len(values), values.shape[1] // 32), BLOCKS["Q8_0"])
    grouped = values.reshape(*blocks.shape, 32)
    scale = np.abs(grouped).max(-1) / 127
    blocks["d"] = scale
    blocks["q"] = np.rint(grouped / np.where(scale == 0, 1, scale)[:, :, None])
    return RawTensor("Q8_0", values.shape, memoryview(blocks.tobytes()))


def _write_gguf(file: Path, metadata: Metadata, tensors: Mapping[str, RawTensor]) -> None:
    most = max(_FILE_TYPES, key=lambda dtype: sum(len(raw.data) for raw in tensors.values() if raw.dtype == dtype))
    keys = {key: metadata.raw(key) for key in metadata if not key.startswith(_LEFT_OUT)}
    keys["general.file_type"] = struct.pack("<II", 4, _FILE_TYPES[most])
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(keys))]
    header += [_text(key) + value for key, value in keys.items()]
    offset = 0
    for name, raw in tensors.items():
        dims = struct.pack(f"<I{len(raw.shape)}Q", len(raw.shape), *raw.shape[::-1])
        header.append(_text(name) + dims + struct.pack("<IQ", _GGML_NUMBERS[raw.dtype], offset))
        offset += _padded(len(raw.data))
    with file.open("wb") as out:
        out.write(b"".join(header))
        for raw in tensors.values():
            out.write(bytes(_padded(out.tell()) - out.tell()))
            out.write(raw.data)
        out.write(bytes(_padded(out.tell()) - out.tell()))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _padded(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT


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
    replace_file(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())

"""Writing models: an ordinary folder in Hugging Face layout, with the parent's tokenizer and its config, changed; a
quantised one of compressed-tensors; a GGUF file (ggml/docs/gguf.md, version 3).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.gguf_config import in_pair_order, metadata_of, own_names, permuted_heads
from maitred.model.gguf_file import GGML_TYPES, MAGIC
from maitred.model.packed import float32_values
from maitred.model.quantised import ggml_blocks
from maitred.model.safetensors_file import RawTensor
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import TorchDecoder, tensor_from_raw
from maitred.model.weight_map import HARMLESS, WeightSource, decoder_sources
from maitred.optimize.rounding import Form, Rounded, round_to_nearest
from maitred.storage.files import replace_file
from maitred.text.folder import gguf_metadata, read_chat_template
from maitred.text.gguf_tokenizer import PROBE, metadata_of_tokenizer, tokenizer_of
from maitred.text.tokenizer import Tokenizer, whole_json

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
_FLOAT = re.compile(r"\d+\.\d+(e-?\d+)?|\d+e-\d+")
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


LayerOf = Callable[[int], Mapping[str, Tensor | Rounded]]  # number of a layer -> what takes the place of its parameters


def _given(
    spec: DecoderSpec, parent: Checkpoint, layer_of: LayerOf
) -> Iterator[tuple[WeightSource, Tensor | Rounded | None]]:
    """Each tensor of the parent, with the rows that take its place."""
    sources: dict[int, list[WeightSource]] = {}
    for source in decoder_sources(spec, parent.tensor_names()):
        layer = re.match(r"layers\.(\d+)\.", source.parameter)
        sources.setdefault(int(layer[1]) if layer else -1, []).append(source)
    for index, found in sources.items():
        given = layer_of(index) if index >= 0 else {}
        for source in found:
            value = given.get(source.parameter.removeprefix(f"layers.{index}."))
            rows = slice(source.row, source.row + source.shape[0])
            if isinstance(value, Rounded):
                yield source, Rounded(value.form, value.codes[rows], value.scale[rows], value.minimum[rows])
            else:
                yield source, None if value is None else value[rows] - source.offset


def save_compressed(parent: Checkpoint, folder: Path, layer_of: LayerOf) -> None:
    """Write a child of `parent` whose layers' parameters `layer_of` gives, as a compressed-tensors folder: rounded
    matrices packed (`pack-quantized`), the rest in the parent's dtype."""
    config = child_config(parent, {})
    spec, dtype, names = spec_from_config(config), getattr(torch, config["dtype"]), parent.tensor_names()
    weights = {name: tensor_from_raw(parent.tensor(name), name).clone() for name in names if HARMLESS.search(name)}
    forms: dict[Form, list[str]] = {}
    for source, value in _given(spec, parent, layer_of):
        if isinstance(value, Rounded):
            linear = source.tensor.removesuffix(".weight")
            weights |= {f"{linear}.{part}": tensor for part, tensor in packed(value).items()}
            forms.setdefault(value.form, []).append(linear)
        else:
            kept = tensor_from_raw(parent.tensor(source.tensor), source.tensor) if value is None else value
            weights[source.tensor] = kept.to(dtype)
    save_file({n: w.contiguous() for n, w in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", {**config, "quantization_config": _quantization_config(forms)})
    save_tokenizer(parent, folder)


def packed(rounded: Rounded) -> dict[str, Tensor]:
    """Parts of one linear, as `compressors/pack_quantized` of compressed-tensors 0.20 stores them."""
    bits = rounded.form.bits
    values = nn.functional.pad(rounded.codes, (0, -rounded.codes.shape[1] % (32 // bits)), value=1 << (bits - 1))
    if bits == 4:
        values = values[:, ::2] | values[:, 1::2] << 4
    words = values.flatten().view(torch.int32).view(len(values), -1)  # the first code in the lowest bits
    shape = torch.tensor(rounded.codes.shape)
    return {"weight_packed": words, "weight_scale": rounded.scale.clone(), "weight_shape": shape}


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
                "num_bits": form.bits, "type": "int", "symmetric": True, **strategy, "dynamic": False,
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


def describe_gguf(parent: Checkpoint, file: Path) -> None:
    """Write a GGUF file that describes the parent, a folder, with holes for its weights. Raises CheckpointError where
    that file would be of another model, or read texts otherwise."""
    spec = spec_from_config(parent.config)
    told, divisors = metadata_of(spec, parent.generation_config)
    told["general.name"] = parent.name
    told |= metadata_of_tokenizer(parent.path, whole_json(parent.path), spec.vocab_size)
    own = own_names(told["general.architecture"], spec.num_layers)
    tensors = {own[each.tensor]: RawTensor("F32", each.shape, memoryview(b"")) for each in decoder_sources(spec, ())}
    if divisors:
        tensors["rope_freqs.weight"] = _vector(np.array(divisors, np.float32))
    _write_gguf(file, {key: _encoded(value) for key, value in told.items()}, tensors)
    with open_checkpoint(str(file)) as read:
        found = replace(spec_from_config(read.config), architecture=spec.architecture)
    specs = [_FLOAT.sub(lambda number: f"{float(number[0]):.6g}", repr(each)).split(", ") for each in (spec, found)]
    tokenizers = [Tokenizer.from_folder(path) for path in (parent.path, file)]
    ids = [each.encode(PROBE + " and ".join(tokenizers[0].added_tokens)) for each in tokenizers]
    if specs[0] != specs[1] or ids[0] != ids[1]:
        differing = next((ours for ours, theirs in zip_longest(*specs) if ours != theirs), "how texts are read")
        raise CheckpointError(f"{parent.path}: a GGUF file cannot say {differing}; leave out --to gguf")


def save_gguf(parent: Checkpoint, described: Checkpoint, file: Path, layer_of: LayerOf) -> None:
    """Write the child of `parent` that `save_compressed` writes as one GGUF file, with the metadata of `described`.
    Embedding and output matrix are the parent's own blocks where it has some, else Q8_0."""
    assert described.gguf is not None
    metadata, spec, tensors = described.gguf.metadata, spec_from_config(parent.config), dict[str, RawTensor]()
    theirs, ours = (decoder_sources(spec, each.tensor_names()) for each in (parent, described))
    names = {each.tensor: source.tensor for each, source in zip(theirs, ours, strict=True)}
    for source, value in _given(spec, parent, layer_of):
        name, kept = names[source.tensor], parent.tensor(source.tensor)
        if isinstance(value, Rounded):
            raw = _blocks(value)
        elif len(source.shape) == 1:
            raw = _vector(float32_values(kept, name) if value is None else value.float().numpy())
        elif kept.dtype in _FLOAT_TYPES:
            values = torch.from_numpy(float32_values(kept, name))
            raw = _blocks(round_to_nearest(Form(8, 32, True), values, shrinks=(1.0,)))
        else:
            raw = kept
        num_heads = permuted_heads(described.config, metadata["general.architecture"], name)
        tensors[described.own_name(name)] = in_pair_order(raw, num_heads) if num_heads else raw
    for part in described.files:  # tensors that its config was read from: divisors of rope
        tensors |= {name: part.tensor(name) for name in part.tensor_names() if name not in tensors}
    _write_gguf(file, {key: metadata.raw(key) for key in metadata if not key.startswith(_LEFT_OUT)}, tensors)


def _vector(values: NDArray[np.float32]) -> RawTensor:
    return RawTensor("F32", values.shape, memoryview(values.tobytes()))


def _blocks(rounded: Rounded) -> RawTensor:
    """Q4_0, Q4_1 or Q8_0 of a rounded matrix; blocks of 32 share what a wider group has."""
    dtype = "Q8_0" if rounded.form.bits == 8 else "Q4_0" if rounded.form.symmetric else "Q4_1"
    codes = rounded.codes.numpy()
    return ggml_blocks(
        dtype, codes.view(np.int8) ^ -128 if dtype == "Q8_0" else codes, rounded.scale.numpy(), rounded.minimum.numpy()
    )


def _write_gguf(file: Path, keys: dict[str, bytes], tensors: Mapping[str, RawTensor]) -> None:
    """Tensors without bytes become holes."""
    most = max(_FILE_TYPES, key=lambda dtype: sum(len(raw.data) for raw in tensors.values() if raw.dtype == dtype))
    keys["general.file_type"] = _encoded(_FILE_TYPES[most])
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(keys))]
    header += [_text(key) + value for key, value in keys.items()]
    offset, offsets = 0, list[int]()
    for name, raw in tensors.items():
        kind = _GGML_NUMBERS[raw.dtype]
        dims = struct.pack(f"<I{len(raw.shape)}Q", len(raw.shape), *raw.shape[::-1])
        header.append(_text(name) + dims + struct.pack("<IQ", kind, offset))
        offsets.append(offset)
        offset += _padded(math.prod(raw.shape) // GGML_TYPES[kind][1] * GGML_TYPES[kind][2])
    with file.open("wb") as out:
        out.write(b"".join(header))
        begin = _padded(out.tell())
        for at, raw in zip(offsets, tensors.values(), strict=True):
            out.seek(begin + at)
            out.write(raw.data)
        out.truncate(begin + offset)


def _encoded(value: Any) -> bytes:
    """A metadata value behind the number of its kind: flag, number or text, or a list of numbers or texts."""
    if isinstance(value, list):
        kind = 8 if isinstance(value[0], str) else 5
        each = b"".join(map(_text, value)) if kind == 8 else struct.pack(f"<{len(value)}i", *value)
        return struct.pack("<IIQ", 9, kind, len(value)) + each
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind, form = (7, "?") if isinstance(value, bool) else (4, "I") if isinstance(value, int) else (6, "f")
    return struct.pack(f"<I{form}", kind, value)


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

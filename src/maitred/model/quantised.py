"""Quantised folders as the hub has them: codes stay what the file says, in a block form of equal values.

A format's reader gives a linear's shape and, when they are asked for, its codes, scales, zeros and order of columns;
a value is (code - zero) * scale. `QuantisedLinear` chooses the form: GGML's Q4_0, Q4_1, Q8_0 where scales are float16
and zeros in the middle; Q4_Z and Q8_Z, which have zeros beside float16 scales; Q8_W, whose scales are float32; F8_128,
FP8 with a float32 scale for each 128 values; MXFP4. What has no form is expanded, and `Checkpoint.expanded` tells.

Layouts: compressed-tensors 0.20 (`compressors/`), GPTQModel (`utils/model.py`: zeros of both conventions), AutoAWQ
(`modules/linear/gemm.py`), transformers 5.23 (`integrations/finegrained_fp8.py`, `mxfp4.py`), bitsandbytes
0.48 (`functional.py`, QuantState).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError
from maitred.model.safetensors_file import RawTensor, TensorFile

BLOCKS: dict[str, Any] = {  # scale, minimum or zero, codes: ggml-common.h, and kernels/csrc/gguf_blocks.h
    "Q4_0": [("d", "<f2"), ("q", "u1", 16)],
    "Q4_1": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
    "Q4_Z": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
    "Q8_0": [("d", "<f2"), ("q", "i1", 32)],
    "Q8_Z": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 32)],
    "Q8_W": [("d", "<f4"), ("q", "i1", 32)],
    "F8_128": [("d", "<f4"), ("q", "u1", 128)],
    "MXFP4": [("d", "u1"), ("q", "u1", 16)],
}
_NUMPY: dict[str, Any] = {
    "I32": "<i4", "I64": "<i8", "I8": "i1", "U8": "u1", "F16": "<f2", "BF16": "<u2", "F32": "<f4", "F8_E4M3": "u1",
    "F8_E8M0": "u1",
}  # fmt: skip
_FLOATS = ("F16", "BF16", "F32")
_EXPANDED = ("F32", "BF16")
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word that holds each of eight columns

Config = Mapping[str, Any]


class ScaleGrid(NamedTuple):
    """What a linear [N, K] has beside its codes, in G groups of K / G stored columns."""

    scale: NDArray[Any]  # [N, G]
    zero: NDArray[Any] | int = 0  # [N, G], or one for all
    order: NDArray[np.int32] | None = None  # [K]: stored column i is column order[i]; None: as they stand


class StoredLinear(NamedTuple):
    """A linear as its reader finds it. Nothing is read from the file before it is asked for."""

    kind: str  # int, f8, MXFP4; BF16: values, which `codes` gives
    bits: int
    shape: tuple[int, ...]
    grid: Callable[[], ScaleGrid]
    codes: Callable[[], NDArray[Any]]  # [N, K], integers counted from 0


@dataclass(frozen=True)
class LinearParts:
    """A linear's parts by the ends of their names."""

    name: str
    parts: Mapping[str, tuple[TensorFile, str]]

    def shape(self, *ends: str) -> tuple[int, ...]:
        """Shape of the first of these parts that is there. Raises CheckpointError where none is."""
        for end in ends:
            if end in self.parts:
                file, name = self.parts[end]
                return file.shape_of(name)
        file = next(iter(self.parts.values()))[0]
        raise CheckpointError(
            f"{file.path}: {self.name}{ends[0]} is missing beside {', '.join(self._found())}; download the files again"
        )

    def dtype(self, end: str) -> str:
        file, name = self.parts[end]
        return file.dtype_of(name)

    def array(self, end: str) -> NDArray[Any]:
        """Values of a part, copied out of the file; floats in float32. Raises CheckpointError."""
        self.shape(end)
        file, name = self.parts[end]
        raw = file.read(name)
        if raw.dtype not in _NUMPY:
            self.refuse(f"{end[1:]} of type {raw.dtype}")
        values = np.frombuffer(raw.data, _NUMPY[raw.dtype]).reshape(raw.shape)
        if raw.dtype == "BF16":
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float32) if raw.dtype == "F16" else values

    def refuse(self, what: str) -> NoReturn:
        file = next(iter(self.parts.values()))[0]
        raise CheckpointError(
            f"{file.path}: {self.name} has {what[:300]}, which is not computed here; choose another quantisation of "
            f"the model, or the unquantised one"
        )

    def refuse_shapes(self) -> NoReturn:
        self.refuse(
            f"the parts {', '.join(self._found())}, of other shapes than the format's or groups that do not divide"
        )

    def _found(self) -> list[str]:
        return [f"{end[1:]} {list(file.shape_of(name))}" for end, (file, name) in sorted(self.parts.items())]


class QuantisedLinear:
    """Shows a linear's codes as a tensor of the type whose blocks have exactly its values."""

    def __init__(self, linear: LinearParts, stored: StoredLinear) -> None:
        self.shape, self._linear, self._stored = stored.shape, linear, stored

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes_of(name) for file, name in self._linear.parts.values())

    @property
    def expanded_bytes(self) -> int:
        """Bytes of the values where there is no block form for them, else 0."""
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2) if self.dtype in _EXPANDED else 0

    @property
    def dtype(self) -> str:
        return self._form[0]

    @property
    def order(self) -> str:
        """A name of the order of columns in the blocks, the same for the same order; empty for their own."""
        return self._form[1]

    @cached_property
    def _form(self) -> tuple[str, str]:
        """Type and order, by one look at the grid in the file."""
        if self._stored.kind not in ("int", "f8"):
            return self._stored.kind, ""
        grid = self._stored.grid()
        dtype = self._type_of(grid)
        order = grid.order if dtype not in _EXPANDED else None
        return dtype, "" if order is None else hashlib.sha256(order.tobytes()).hexdigest()[:16]

    def _type_of(self, grid: ScaleGrid) -> str:
        kind, bits = self._stored.kind, self._stored.bits
        group, rest = divmod(self.shape[-1], grid.scale.shape[1])
        if kind == "f8":
            powers = bool((np.frexp(grid.scale)[0] == 0.5).all())
            return "F8_128" if not rest and group % 128 == 0 else "BF16" if powers else "F32"
        centred = bool(np.all(grid.zero == 1 << (bits - 1)))
        if rest or group % 32:
            return "F32"
        if not _is_float16(grid.scale):
            return "Q8_W" if centred or bits == 4 else "F32"
        if centred or bits == 8:
            return f"Q{bits}_0" if centred else "Q8_Z"
        return "Q4_1" if _is_float16(grid.scale * grid.zero) else "Q4_Z"

    def tensor(self) -> RawTensor:
        codes = self._stored.codes()
        if self._stored.kind == "BF16":
            return RawTensor("BF16", self.shape, memoryview(_bfloat16(codes).tobytes()))
        scale, zero, order = self._stored.grid()
        zero = np.broadcast_to(np.asarray(zero, np.int16), scale.shape)
        if self.dtype in _EXPANDED:
            group = np.empty(codes.shape[1], np.int64)
            group[slice(None) if order is None else order] = np.arange(len(group)) // -(-len(group) // scale.shape[1])
            wide = _e4m3(codes) if self._stored.kind == "f8" else codes.astype(np.float32) - zero[:, group]
            wide *= scale[:, group]
            return RawTensor(
                self.dtype, self.shape, memoryview((wide if self.dtype == "F32" else _bfloat16(wide)).tobytes())
            )
        if order is not None:
            codes = codes[:, order]
        if self.dtype in ("Q8_0", "Q8_W"):
            codes = codes - zero.repeat(codes.shape[1] // zero.shape[1], 1)
        return ggml_blocks(self.dtype, codes, scale, scale * -zero if self.dtype == "Q4_1" else zero, order)


def ggml_blocks(
    dtype: str, codes: NDArray[Any], scale: NDArray[Any], minimum: NDArray[Any], order: NDArray[Any] | None = None
) -> RawTensor:
    """A matrix's codes as they are stored in blocks of `BLOCKS`, which share what a wider group [..., G] has."""
    blocks = np.empty((*codes.shape[:-1], codes.shape[-1] // (128 if dtype == "F8_128" else 32)), BLOCKS[dtype])
    share, code_BV = blocks.shape[-1] // scale.shape[-1], codes.reshape(*blocks.shape, -1)
    blocks["d"] = scale.repeat(share, -1)
    if "m" in BLOCKS[dtype][1]:
        blocks["m"] = minimum.repeat(share, -1)
    blocks["q"] = code_BV if blocks["q"].shape[-1] >= 32 else code_BV[..., :16] | code_BV[..., 16:] << 4
    return RawTensor(dtype, codes.shape, memoryview(blocks.tobytes()), order)


# ---- formats


class FolderFormat(NamedTuple):
    """Names of a format's parts, and how a linear is read. `marks` are of parts that nothing else has."""

    parts: tuple[str, ...]
    marks: tuple[str, ...]
    read: Callable[[LinearParts, Config], StoredLinear]
    skipped: tuple[str, ...] = ()  # scales of activations, which are rounded here as they come
    shown_as: str = ".weight"


def _gptq(linear: LinearParts, config: Config) -> StoredLinear:
    (num_words, rows), (groups, scaled) = linear.shape(".qweight"), linear.shape(".scales")
    width = linear.shape(".g_idx")[0] if ".g_idx" in linear.parts else num_words * 32 // int(config.get("bits", 4))
    bits = num_words * 32 // width
    if bits not in (4, 8):
        linear.refuse(f"codes of {bits} bits (4 and 8 are read)")
    if (num_words * 32, scaled) != (width * bits, rows) or width % groups:
        linear.refuse_shapes()
    if linear.shape(".qzeros") != (groups, -(-rows * bits // 32)):
        linear.refuse_shapes()
    is_v2 = (config.get("checkpoint_format") or config.get("format")) == "gptq_v2"

    def grid() -> ScaleGrid:
        words = linear.array(".qzeros").view(np.uint32)
        if not is_v2:  # one less is stored; a word's carry undoes the borrow of those that wrote it
            words = words + np.uint32(0x11111111 if bits == 4 else 0x01010101)
        zero = _unpacked(words, bits, rows).T.astype(np.int16)
        return ScaleGrid(linear.array(".scales").T, zero, _order(linear, ".g_idx", width, groups))

    return StoredLinear(
        "int", bits, (rows, width), grid,
        lambda: _unpacked(np.ascontiguousarray(linear.array(".qweight").T), bits, width),
    )  # fmt: skip


def _awq(linear: LinearParts, config: Config) -> StoredLinear:
    told = int(config.get("bits", config.get("w_bit", 4))), str(config.get("version", "gemm")).lower()
    if told != (4, "gemm"):
        linear.refuse(f"codes of {told[0]} bits in the layout {told[1]} (4 bits in gemm's are read)")
    weights, scales, zeros = (linear.shape(end) for end in (".qweight", ".scales", ".qzeros"))
    rows, width, groups = weights[1] * 8, weights[0], scales[0]
    if scales[1:] != (rows,) or zeros != (groups, weights[1]) or width % groups:
        linear.refuse_shapes()
    return StoredLinear(
        "int", 4, (rows, width),
        lambda: ScaleGrid(linear.array(".scales").T, _awq_codes(linear.array(".qzeros")).astype(np.int16)),
        lambda: _awq_codes(linear.array(".qweight")),
    )  # fmt: skip


def _awq_codes(words_KW: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, K] of words that hold eight of N each, interleaved."""
    found = np.stack([(words_KW >> 4 * nibble & 15).astype(np.uint8).T for nibble in _AWQ_ORDER], axis=1)
    return found.reshape(-1, len(words_KW))


def _compressed(linear: LinearParts, config: Config) -> StoredLinear:
    scale = linear.shape(".weight_scale")
    codes: Callable[[], NDArray[Any]]
    if ".weight_packed" not in linear.parts:
        if linear.shape(".weight") and linear.dtype(".weight") == "F8_E4M3":
            return _fp8(linear, config)
        if linear.dtype(".weight") != "I8":
            linear.refuse(f"a weight of type {linear.dtype('.weight')}")
        rows, width = linear.shape(".weight")
        bits, codes = 8, lambda: linear.array(".weight").view(np.uint8) ^ 0x80
    elif linear.dtype(".weight_packed") == "U8":
        return _mxfp4(linear, (".weight_packed", ".weight_scale"))
    else:
        linear.shape(".weight_shape")
        rows, width = (int(size) for size in linear.array(".weight_shape"))
        words = linear.shape(".weight_packed")
        bits = next((b for b in (4, 8) if words == (rows, -(-width * b // 32))), 0)
        codes = lambda: _unpacked(linear.array(".weight_packed"), bits, width)  # noqa: E731
    if not bits or linear.dtype(".weight_scale") not in _FLOATS or width % (scale[-1] if len(scale) == 2 else 1):
        linear.refuse_shapes()
    if scale not in ((), (1,), (rows,)) and scale[0] != rows:
        linear.refuse_shapes()

    def grid() -> ScaleGrid:
        found = _rows_of(linear.array(".weight_scale"), rows)
        zero: NDArray[Any] | int = 1 << (bits - 1)
        if ".weight_zero_point" in linear.parts:
            zeros = linear.array(".weight_zero_point")
            if linear.dtype(".weight_zero_point") == "I32":
                zero = _unpacked(np.ascontiguousarray(zeros.T), bits, rows).T.astype(np.int16)
            else:
                zero = zero + _rows_of(zeros, rows).astype(np.int16)
        return ScaleGrid(found, zero, _order(linear, ".weight_g_idx", width, found.shape[1]))

    return StoredLinear("int", bits, (rows, width), grid, codes)


def _fp8(linear: LinearParts, config: Config) -> StoredLinear:
    """FP8 with a scale for the tensor, a row or a block; "inv" only says that the scale is one to multiply with."""
    rows, width = linear.shape(".weight")
    scale = linear.shape(".weight_scale_inv", ".weight_scale")
    end = ".weight_scale_inv" if ".weight_scale_inv" in linear.parts else ".weight_scale"
    if linear.dtype(".weight") != "F8_E4M3" or linear.dtype(end) not in (*_FLOATS, "F8_E8M0"):
        linear.refuse(f"a weight of type {linear.dtype('.weight')} with scales of type {linear.dtype(end)}")
    block = _block_of(config)
    in_blocks = len(scale) == 2 and scale not in ((1, 1), (rows, 1)) and block is not None
    if in_blocks and block and scale != (-(-rows // block[0]), -(-width // block[1])):
        linear.refuse_shapes()
    if not in_blocks and scale not in ((), (1,), (1, 1), (rows,), (rows, 1)):
        linear.refuse_shapes()

    def grid() -> ScaleGrid:
        found = linear.array(end)
        if linear.dtype(end) == "F8_E8M0":
            found = np.ldexp(np.float32(1), found.astype(np.int32) - 127)
        if not in_blocks or block is None:
            return ScaleGrid(_rows_of(found, rows))
        found = found.repeat(block[0], 0)[:rows]
        if width % block[1]:  # the last block is cut short: a group for each of its columns' common divisor
            size = math.gcd(width, block[1])
            found = found.repeat(block[1] // size, 1)[:, : width // size]
        return ScaleGrid(found)

    return StoredLinear("f8", 8, (rows, width), grid, lambda: linear.array(".weight"))


def _block_of(config: Config) -> tuple[int, int] | None:
    found = config.get("weight_block_size")
    for group in (config.get("config_groups") or {}).values():
        found = found or (group.get("weights") or {}).get("block_structure")
    return (int(found[0]), int(found[1])) if found else None


def _mxfp4(linear: LinearParts, ends: tuple[str, str]) -> StoredLinear:
    """E2M1 codes, the first of two in the low nibble, and an exponent for each 32."""
    codes, scales = linear.shape(ends[0]), linear.shape(ends[1])
    rows, width = codes[:-1], codes[-1] * 2
    if len(codes) == len(scales) + 1:  # blocks of 16 bytes apart
        rows, width = codes[:-2], codes[-2] * codes[-1] * 2
    if scales != (*rows, width // 32) or width % 32 or {linear.dtype(end) for end in ends} - {"U8", "F8_E8M0"}:
        linear.refuse_shapes()
    return StoredLinear(
        "MXFP4", 4, (*rows, width),
        lambda: ScaleGrid(linear.array(ends[1])),
        lambda: _unpacked(linear.array(ends[0]).reshape(*rows, -1), 4, width),
    )  # fmt: skip


def _bitsandbytes(linear: LinearParts, config: Config) -> StoredLinear:
    if ".SCB" in linear.parts:
        rows, width = linear.shape(".weight")
        if linear.shape(".SCB") != (rows,) or linear.dtype(".weight") != "I8":
            linear.refuse_shapes()
        return StoredLinear(
            "int", 8, (rows, width),
            lambda: ScaleGrid((linear.array(".SCB") / np.float32(127))[:, None], 128),
            lambda: linear.array(".weight").view(np.uint8) ^ 0x80,
        )  # fmt: skip
    end = next((end for end in linear.parts if end.startswith(".weight.quant_state.")), ".weight.quant_state")
    linear.shape(end)
    try:
        state = json.loads(bytes(linear.array(end)))
        rows, width = (int(size) for size in state["shape"])
        size = int(state["blocksize"])
    except (ValueError, KeyError, TypeError) as error:
        linear.refuse(f"a quant_state that cannot be read ({error})")
    if math.prod(linear.shape(".weight")) * 2 != rows * width or rows * width % size:
        linear.refuse_shapes()
    return StoredLinear("BF16", 4, (rows, width), lambda: ScaleGrid(np.ones((1, 1))), partial(_nf4, linear, state))


def _nf4(linear: LinearParts, state: Mapping[str, Any]) -> NDArray[np.float32]:
    codes = linear.array(".weight").reshape(-1)
    table, absmax = linear.array(".weight.quant_map"), linear.array(".weight.absmax").reshape(-1)
    if ".weight.nested_absmax" in linear.parts:
        nested = linear.array(".weight.nested_absmax").repeat(int(state["nested_blocksize"]))[: len(absmax)]
        absmax = linear.array(".weight.nested_quant_map")[absmax] * nested + np.float32(state["nested_offset"])
    values: NDArray[np.float32] = table[np.stack((codes >> 4, codes & 15), axis=-1)].reshape(
        -1, int(state["blocksize"])
    )
    values *= absmax[:, None]
    return values.reshape(state["shape"])


_INPUT_SCALES = (".input_scale", ".input_zero_point", ".input_global_scale", ".output_scale", ".activation_scale")
FORMATS: dict[str, FolderFormat] = {
    "compressed-tensors": FolderFormat(
        (".weight_packed", ".weight", ".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx"),
        (".weight_packed", ".weight_scale"), _compressed, _INPUT_SCALES,
    ),
    "gptq": FolderFormat((".qweight", ".qzeros", ".scales", ".g_idx"), (".qweight", ".scales"), _gptq),
    "awq": FolderFormat((".qweight", ".qzeros", ".scales"), (".qweight", ".scales"), _awq),
    "fp8": FolderFormat(
        (".weight", ".weight_scale_inv", ".weight_scale"), (".weight_scale_inv", ".weight_scale"), _fp8, _INPUT_SCALES
    ),
    "mxfp4": FolderFormat(
        ("_blocks", "_scales"), ("_blocks",), lambda linear, _: _mxfp4(linear, ("_blocks", "_scales")),
        shown_as="_blocks",
    ),
    "bitsandbytes": FolderFormat(
        (".weight", ".SCB", ".weight.absmax", ".weight.quant_map", ".weight.nested_absmax", ".weight.nested_quant_map",
         ".weight.quant_state.bitsandbytes__nf4", ".weight.quant_state.bitsandbytes__fp4"),
        (".SCB", ".weight.absmax"), _bitsandbytes, (".weight_format",),
    ),
}  # fmt: skip
"""Readers by config.json's quant_method."""


def quantised_linears(
    config: Config, files: Mapping[str, TensorFile], path: Path
) -> tuple[dict[str, QuantisedLinear], dict[str, TensorFile]]:
    """The quantised linears by the name of their weight, and every tensor under the name that it is shown by.

    `config` is the quantization_config of the config.json at `path`, `files` has the file of each tensor. Modules of an
    `ignore` list have no codes: their weights are shown as they are.
    Raises CheckpointError, naming file and tensor, for what is not computed here, and where config and tensors are of
    different formats.
    """
    method = str(config.get("quant_method"))
    _check_config(method, config, path)
    form, found, shown = FORMATS[method], dict[str, QuantisedLinear](), dict[str, str]()
    for name in dict.fromkeys(_linears(form, files)):
        parts = {end: (files[name + end], name + end) for end in form.parts if name + end in files}
        linear = LinearParts(name, parts)
        try:
            found[name + form.shown_as] = QuantisedLinear(linear, form.read(linear, config))
        except (ValueError, TypeError, IndexError, ArithmeticError, KeyError, AttributeError):
            linear.refuse_shapes()
        if (
            method == "gptq"
            and (bias := name + ".bias") in files
            and not bytes(files[bias].read(bias).data).strip(b"\0")
        ):
            shown[bias] = name + form.shown_as  # which AutoGPTQ gives every linear
        shown |= dict.fromkeys((name + end for end in (*form.parts, *form.skipped)), name + form.shown_as)
    if not found:
        raise CheckpointError(
            f"{path} says that the weights are quantised by {method}, and no tensor is named as there "
            f"({', '.join(form.marks)}); it is of another model, or remove quantization_config from it"
        )
    return found, {shown.get(name, name): file for name, file in files.items() if not name.endswith(_OF_KV)}


def _linears(form: FolderFormat, files: Mapping[str, TensorFile]) -> Iterator[str]:
    for name, file in files.items():
        for mark in form.marks:
            if name.endswith(mark):
                yield name.removesuffix(mark)
        if name.endswith(".weight") and file.dtype_of(name).startswith("F8"):  # its scale may be missing
            yield name.removesuffix(".weight")


def _check_config(method: str, config: Config, path: Path) -> None:
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    refused = [] if method in FORMATS else [method]
    for key in ("sparsity_config", "transform_config"):
        if config.get(key) and config[key].get("format") != "dense":
            refused.append(f"{method} with {key} {config[key]}")
    if method == "compressed-tensors":
        refused += [f"format {each.get('format')!r}" for each in (config, *groups) if each.get("format") not in _OF_CT]
        refused += ["quantised outputs" for each in groups if each.get("output_activations")]
    if refused:
        raise CheckpointError(
            f"{path}: the weights are quantised by {refused[0][:300]}, which is not computed here; choose a model in "
            f"int4, int8, fp8 or mxfp4 by one of {', '.join(FORMATS)}, or the unquantised one"
        )


_OF_KV = (".q_scale", ".k_scale", ".v_scale")  # of a cache in FP8, which is none here
_OF_CT = (
    None, "pack-quantized", "int-quantized", "naive-quantized", "float-quantized", "mxfp4-pack-quantized",
    "mixed-precision",
)  # fmt: skip


# ---- numbers


def _unpacked(words: NDArray[Any], bits: int, width: int) -> NDArray[np.uint8]:
    """Codes of rows of words or bytes, whose lowest bits are the first code's."""
    found = words.view(np.uint8)
    if bits == 4:
        found = np.stack((found & 15, found >> 4), axis=-1).reshape(*words.shape[:-1], -1)
    return found[..., :width]


def _order(linear: LinearParts, end: str, width: int, groups: int) -> NDArray[np.int32] | None:
    """Order in which columns of one group stand side by side; None where they do."""
    if end not in linear.parts:
        return None
    group = linear.array(end)
    if group.min() < 0 or (np.bincount(group, minlength=groups) != width // groups).any():
        linear.refuse(f"a {end[1:]} of {groups} groups that are not of {width // groups} columns each")
    if (np.diff(group) >= 0).all():
        return None
    return np.argsort(group, kind="stable").astype(np.int32)


def _rows_of(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """[rows, G] of one value, one for each row, or G."""
    values = values.reshape(-1, values.shape[1] if values.ndim > 1 else 1)
    return values if len(values) == rows else values.repeat(rows, 0)


def _is_float16(values: NDArray[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool((values == values.astype(np.float16)).all())


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def _e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Values of FP8: as float16, whose exponent has one bit more, they are 256 times smaller."""
    wide = codes.astype(np.uint16)
    return ((wide & 0x80) << 8 | (wide & 0x7F) << 7).view(np.float16).astype(np.float32) * 256

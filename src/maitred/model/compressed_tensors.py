"""Quantised folders of the compressed-tensors library (llm-compressor's, vLLM's): their integers as GGML's blocks.

A linear X lies there as `X.weight_packed` (4 or 8 bits in 32-bit words), `X.weight_scale` for each group of a row or
each row, and perhaps `X.weight_zero_point`; or with int8 in `X.weight`. What comes of it has equal values: Q4_0, Q4_1,
Q8_0, whose scales are float16; float32 where a scale is no float16 or a group no multiple of 32.
Layout: compressed-tensors 0.20, `compressors/pack_quantized`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError
from maitred.model.safetensors_file import RawTensor

PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
_FORMATS = (None, "pack-quantized", "int-quantized", "mixed-precision")
_SCALES: dict[str, Any] = {"F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<f4")}
BLOCKS: dict[str, Any] = {  # scale, minimum, codes: ggml-common.h
    "Q4_0": [("d", "<f2"), ("q", "u1", 16)],
    "Q4_1": [("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)],
    "Q8_0": [("d", "<f2"), ("q", "i1", 32)],
}


@dataclass(frozen=True)
class CompressedLinear:
    """A linear's parts in the files, by the end of their names."""

    name: str
    parts: Mapping[str, RawTensor]

    @cached_property
    def shape(self) -> tuple[int, int]:
        raw = self.parts.get("weight_shape")
        rows, width = self.parts["weight"].shape if raw is None else np.frombuffer(raw.data, f"<i{len(raw.data) // 2}")
        return int(rows), int(width)

    @cached_property
    def bits(self) -> int:
        """Raises CheckpointError where the parts' shapes are of another layout than those that are computed here."""
        (rows, width), scale = self.shape, self.parts["weight_scale"].shape
        packed = self.parts["weight_packed"].shape if "weight_packed" in self.parts else (rows, -(-width // 4))
        for bits in (4, 8):
            if packed == (rows, -(-width * bits // 32)) and scale[:-1] == (rows,) and not width % scale[-1]:
                return bits
        found = ", ".join(f"{name} {list(part.shape)}" for name, part in sorted(self.parts.items()))
        return _refuse(f"linear {self.name} of shape {[rows, width]} as {found}")

    @property
    def num_bytes(self) -> int:
        return sum(part.data.nbytes for part in self.parts.values())

    @cached_property
    def dtype(self) -> str:
        """The type whose blocks have exactly these values."""
        scale_NG, zero_NG = self._scale_and_zero()
        if self.shape[1] // scale_NG.shape[1] % 32 or not _is_float16(scale_NG):
            return "F32"
        if not zero_NG.any():
            return "Q4_0" if self.bits == 4 else "Q8_0"
        if self.bits == 8:
            return "F32"
        return "Q4_1" if _is_float16(scale_NG * (zero_NG + 8)) else "Q8_0"

    def tensor(self) -> RawTensor:
        scale_NG, zero_NG = self._scale_and_zero()
        code_NGV = self._codes().reshape(*scale_NG.shape, -1)
        if self.dtype == "F32":
            values = (code_NGV - zero_NG[:, :, None]) * scale_NG[:, :, None]
            return RawTensor("F32", self.shape, memoryview(values.astype(np.float32).tobytes()))
        stored_NGV = code_NGV - zero_NG[:, :, None] if self.dtype == "Q8_0" else (code_NGV + 8).astype(np.uint8)
        return ggml_blocks(self.dtype, stored_NGV.reshape(self.shape), scale_NG, scale_NG * -(zero_NG + 8))

    def _scale_and_zero(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """[N, G] of each group, float32 and int16; a value is (code - zero) * scale."""
        raw, zero = self.parts["weight_scale"], self.parts.get("weight_zero_point")
        scale = np.frombuffer(raw.data, _SCALES[raw.dtype]).reshape(raw.shape)
        scale = (scale.astype(np.uint32) << 16).view(np.float32) if raw.dtype == "BF16" else scale.astype(np.float32)
        if zero is None or zero.dtype != "I32":
            codes = np.frombuffer(zero.data, np.int8) if zero is not None else np.zeros(scale.size)
            return scale, codes.reshape(raw.shape).astype(np.int16)
        words = np.frombuffer(zero.data, "<i4").reshape(zero.shape).T
        return scale, _unpacked(np.ascontiguousarray(words), self.bits, len(scale)).T

    def _codes(self) -> NDArray[Any]:
        if (raw := self.parts.get("weight_packed")) is None:
            return np.frombuffer(self.parts["weight"].data, np.int8).astype(np.int16)
        return _unpacked(np.frombuffer(raw.data, "<i4").reshape(raw.shape), self.bits, self.shape[1])


def ggml_blocks(dtype: str, codes: NDArray[Any], scale_NG: NDArray[Any], minimum_NG: NDArray[Any]) -> RawTensor:
    """Q4_0, Q4_1 or Q8_0 of a matrix's codes as they are stored; blocks of 32 share what a wider group has."""
    blocks = np.empty((len(codes), codes.shape[1] // 32), BLOCKS[dtype])
    share, code_NBV = blocks.shape[1] // scale_NG.shape[1], codes.reshape(*blocks.shape, 32)
    blocks["d"] = scale_NG.repeat(share, 1)
    if dtype == "Q4_1":
        blocks["m"] = minimum_NG.repeat(share, 1)
    blocks["q"] = code_NBV if dtype == "Q8_0" else code_NBV[:, :, :16] | code_NBV[:, :, 16:] << 4
    return RawTensor(dtype, codes.shape, memoryview(blocks.tobytes()))


def _is_float16(values: NDArray[Any]) -> bool:
    return bool((values == values.astype(np.float16)).all())


def _unpacked(words: NDArray[Any], bits: int, width: int) -> NDArray[Any]:
    """Signed codes, stored from 0 on; a word's lowest bits are its first value's."""
    found = words.view(np.uint8)
    if bits == 4:
        found = np.stack((found & 15, found >> 4), axis=-1).reshape(len(words), -1)
    return found[:, :width].astype(np.int16) - (1 << (bits - 1))


def compressed_linears(
    config: Mapping[str, Any], names: Collection[str], tensor: Callable[[str], RawTensor]
) -> dict[str, CompressedLinear]:
    """The quantised linears by the name of their weight; `config` is config.json's quantization_config.

    Raises CheckpointError, naming it, for what is not computed here.
    """
    _check_config(config)
    found: dict[str, CompressedLinear] = {}
    for linear in (name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")):
        parts = {part: tensor(f"{linear}.{part}") for part in (*PARTS, "weight") if f"{linear}.{part}" in names}
        types = {part: raw.dtype for part, raw in parts.items()}
        if types.get("weight_packed", "I32") != "I32" or types.get("weight", "I8") != "I8" or len(types) < 2:
            _refuse(f"linear {linear} as {types}")
        if types["weight_scale"] not in _SCALES:
            _refuse(f"scales of type {types['weight_scale']} ({linear})")
        found[f"{linear}.weight"] = each = CompressedLinear(linear, parts)
        assert each.bits
    return found


def _check_config(config: Mapping[str, Any]) -> None:
    for key in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        if config.get(key) and config[key].get("format") != "dense":
            _refuse(f"{key} {config[key]}")
    groups = (config.get("config_groups") or {}).values()
    for form in (each.get("format") for each in (config, *groups)):
        if form not in _FORMATS:
            _refuse(f"format {form!r}")
    for group in groups:
        inputs = group.get("input_activations")
        if inputs and (inputs.get("type") != "int" or not inputs.get("dynamic")):
            _refuse(
                f"activations {inputs.get('num_bits')}-bit {inputs.get('type')}, of scales that were measured before"
            )
        if group.get("output_activations"):
            _refuse("quantised outputs")


def _refuse(what: str) -> NoReturn:
    raise CheckpointError(
        f"the weights are quantised by compressed-tensors with {what[:300]}, which is not computed here; choose a "
        f"model in int4 or int8 (pack-quantized, int-quantized), or the unquantised one"
    )

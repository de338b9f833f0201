"""Linears of the native library: weights packed from a checkpoint's matrices, and single products for tests and tools.

A step of the executor does not come through here: its program calls the C++ with the same packed bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.kernels import _native

DTYPES = (
    "float32", "bfloat16", "int8", "float16", "fp8", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_z", "q8_z", "q8_w",
    "q4_k", "q5_k", "q6_k",
)  # fmt: skip
SOURCE_DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}
PACK_VERSION: int = _native.PACK_VERSION
"""Version of the packed layout; part of any cache's key. The layout is the same for every instruction set."""

_HUGE_PAGE = 2 * 1024 * 1024


class SourceMatrix(NamedTuple):
    """Rows to pack. `values` is [N, K]; numpy has no bfloat16, so its bits come as uint16. Rows of GGML's block types
    ("Q4_K") come as bytes, [N, bytes of a row]."""

    values: NDArray[Any]
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """One linear's weights as the kernels read them: `data` is flat bytes, aligned to 64, with no addresses inside."""

    shape: Any
    """_native.LinearShape"""
    data: NDArray[np.uint8]

    @property
    def out_width(self) -> int:
        return int(self.shape.out_width)


def linear_shape(dtype: str, num_rows: int, row_length: int, *, gated: bool = False, bias: bool = False) -> Any:
    """Raises KernelError for what cannot be packed. `gated`: rows are gate over up; outputs are half as many."""
    if dtype not in DTYPES:
        raise KernelError(f"linear weights in {dtype!r}; choose one of {', '.join(DTYPES)}")
    try:
        return _native.LinearShape(dtype, num_rows, row_length, gated, bias)
    except ValueError as error:
        raise KernelError(f"a {num_rows} x {row_length} matrix cannot be packed as {dtype}: {error}") from None


def allocate(num_bytes: int) -> NDArray[np.uint8]:
    """Zeroed memory aligned to a page, in huge pages where the system has them, for streaming misses the TLB less."""
    size = max(num_bytes, 1)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)


def pack(
    pool: Any,
    sources: Sequence[SourceMatrix],
    dtype: str,
    *,
    gated: bool = False,
    bias: NDArray[np.float32] | None = None,
    out: NDArray[np.uint8] | None = None,
) -> PackedWeights:
    """Stacks the sources ([N_i, K] each) and packs them; `out` receives the bytes where it is given."""
    row_length = _checked_row_length(sources)
    num_rows = sum(len(source.values) for source in sources)
    shape = linear_shape(dtype, num_rows, row_length, gated=gated, bias=bias is not None)
    if bias is not None:
        bias = np.ascontiguousarray(bias, dtype=np.float32)
        if bias.shape != (num_rows,):
            raise KernelError(f"a bias of shape {bias.shape} for {num_rows} rows; it must be [{num_rows}]")
    data = allocate(shape.packed_bytes) if out is None else out
    if data.dtype != np.uint8 or data.ndim != 1 or data.size < shape.packed_bytes or data.ctypes.data % 64 != 0:
        raise KernelError(f"out must be {shape.packed_bytes} bytes or more, flat and aligned to 64")
    runs = [(s.values.ctypes.data, len(s.values), s.values.strides[0], s.dtype) for s in sources]
    try:
        _native.pack_linear(pool, shape, runs, bias, data)
    except ValueError as error:
        raise KernelError(f"as {dtype}: {error}") from None
    return PackedWeights(shape, data)


def expand(dtype: str, data: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A tensor of one of GGML's types in float32, value for value as GGML computes it. `data` are its bytes."""
    out = np.empty((int(np.prod(shape[:-1])), shape[-1]), dtype=np.float32)
    try:
        _native.expand_rows(dtype, data, out)
    except ValueError as error:
        raise KernelError(str(error)) from None
    return out.reshape(shape)


def unpack_rows(weights: PackedWeights, rows: Sequence[int]) -> NDArray[np.float32]:
    """Rows of the stacked matrix as the kernels see them, [len(rows), K]: rounded, or quantised and scaled back."""
    for row in rows:
        if not 0 <= row < weights.shape.n:
            raise KernelError(f"row {row} of a matrix of {weights.shape.n} rows")
    out = np.empty((len(rows), weights.shape.k), dtype=np.float32)
    _native.unpack_rows(weights.shape, weights.data, np.asarray(rows, dtype=np.int32), out)
    return out


def linear(
    pool: Any,
    weights: PackedWeights,
    x_MK: NDArray[np.float32],
    *,
    isa: str | None = None,
    rows: Sequence[int] | None = None,
    norm_weight: NDArray[np.float32] | None = None,
    norm_eps: float = 1e-6,
    add_to: NDArray[np.float32] | None = None,
    act: str = "silu",
    alpha: float = 1.0,
    softcap: float = 0.0,
) -> NDArray[np.float32]:
    """Prepares rows of x (all, or those named; RMS-normed with `norm_weight` [K]) and multiplies them. Returns [M, N].

    Plain weights: softcap * tanh(alpha * (x W' + b) / softcap), or add_to += alpha * (x W' + b), which is returned.
    Gated weights: act(gate) * up; alpha and softcap do not apply.
    """
    _check_input(weights, x_MK, rows, norm_weight)
    count = len(x_MK) if rows is None else len(rows)
    width = weights.out_width
    if add_to is not None and (add_to.shape != (count, width) or add_to.dtype != np.float32):
        raise KernelError(f"add_to is {add_to.dtype} of shape {add_to.shape}; it must be float32 [{count}, {width}]")
    if weights.shape.gated and add_to is not None:
        raise KernelError("gated weights write act(gate) * up; they do not add to anything")
    out = np.empty((count, width), dtype=np.float32) if add_to is None else add_to
    ending = "gate" if weights.shape.gated else "store" if add_to is None else "add"
    index = None if rows is None else np.asarray(rows, dtype=np.int32)
    isa = _native.default_isa() if isa is None else isa
    arguments = (weights.shape, weights.data, x_MK, index, norm_weight, norm_eps, out, ending, act, alpha, softcap)
    try:
        _native.linear(isa, pool, *arguments)
    except ValueError as error:
        raise KernelError(str(error)) from None
    return out


def _checked_row_length(sources: Sequence[SourceMatrix]) -> int:
    if not sources:
        raise KernelError("nothing to pack: no source matrix was given")
    lengths = {_row_length(source) for source in sources}
    if len(lengths) != 1 or None in lengths:
        shapes = ", ".join(str(source.values.shape) for source in sources)
        raise KernelError(f"matrices of shapes {shapes} do not stack; all must be [rows, K] with one K")
    for source in sources:
        expected = SOURCE_DTYPES.get(source.dtype, np.dtype(np.uint8))
        if source.values.dtype != expected or _scattered(source.values):
            raise KernelError(
                f"a {source.dtype} source comes as rows of contiguous {expected}, not {source.values.dtype} with "
                f"strides {source.values.strides}"
            )
    return int(next(iter(lengths)) or 0)


def _row_length(source: SourceMatrix) -> int | None:
    """Values of a row; None for what is no matrix."""
    if source.values.ndim != 2:
        return None
    if source.dtype in SOURCE_DTYPES:
        return int(source.values.shape[1])
    try:
        values, num_bytes = _native.source_block(source.dtype)
    except ValueError as error:
        raise KernelError(f"a source in {source.dtype!r}: {error}") from None
    whole, rest = divmod(source.values.shape[1], num_bytes)
    return int(whole * values) if not rest else None


def _scattered(matrix: NDArray[Any]) -> bool:
    return matrix.shape[1] > 1 and matrix.strides[1] != matrix.itemsize


def _check_input(
    weights: PackedWeights,
    x_MK: NDArray[np.float32],
    rows: Sequence[int] | None,
    norm_weight: NDArray[np.float32] | None,
) -> None:
    k = weights.shape.k
    if x_MK.ndim != 2 or x_MK.shape[1] != k or x_MK.dtype != np.float32:
        raise KernelError(f"x is {x_MK.dtype} of shape {x_MK.shape}; these weights take float32 [M, {k}]")
    if norm_weight is not None and (norm_weight.shape != (k,) or norm_weight.dtype != np.float32):
        raise KernelError(f"a norm weight of shape {norm_weight.shape} ({norm_weight.dtype}); it must be float32 [{k}]")
    if rows is not None and not all(0 <= row < len(x_MK) for row in rows):
        raise KernelError(f"rows {list(rows)} of an x of {len(x_MK)} rows")

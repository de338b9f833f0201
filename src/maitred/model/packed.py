"""Packed weights: a program's matrices in the form that the native kernels read, made from a checkpoint.

`plan_weights` knows every size before a byte is read; `pack_weights` then fills one buffer after the other, so that the
peak is the packed weights and the pages of one tensor. A caller that wants them in a mapped cache file brings the
buffers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError
from maitred.kernels.linear import SourceMatrix, allocate, expand, linear_shape, pack
from maitred.model.checkpoint import Checkpoint, RawTensor
from maitred.model.gguf_file import HELD_AS
from maitred.model.program import ORDER, Part, Program, Weight, cut
from maitred.model.weight_map import RowSpan, WeightSource, check_shape, weight_map

ALIGNMENT = 4096  # of a tensor in a flat file: a page
Buffer = NDArray[np.uint8]
OnPacked = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A weight's bytes, at an address divisible by 64. Matrices lie as `LinearShape` says, vectors are float32."""

    weight: Weight
    buffer: Buffer

    @property
    def shape(self) -> Any:
        """`_native.LinearShape` of a matrix."""
        return shape_of(self.weight)

    @property
    def vector(self) -> NDArray[np.float32]:
        """A vector's values, offset included."""
        values: NDArray[np.float32] = self.buffer[: 4 * self.weight.rows].view(np.float32)
        return values


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Name -> tensor, in the program's order."""

    tensors: Mapping[str, PackedTensor]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.buffer.nbytes for tensor in self.tensors.values())

    def __getitem__(self, name: str) -> PackedTensor:
        return self.tensors[name]


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """Place of a weight in a flat file of all of them."""

    weight: Weight
    offset: int
    num_bytes: int


def is_matrix(weight: Weight) -> bool:
    return weight.width > 1 or bool(weight.bias) or weight.gated


def shape_of(weight: Weight) -> Any:
    """The shape of each of its matrices. Raises KernelError for one that no kernel takes."""
    rows, width = weight.matrix_rows, weight.width
    return linear_shape(weight.format.dtype, rows, width, gated=weight.gated, bias=bool(weight.bias))


def packed_bytes(weight: Weight) -> int:
    return int(shape_of(weight).packed_bytes) * (weight.experts or 1) if is_matrix(weight) else 4 * weight.rows


def plan_weights(program: Program) -> tuple[WeightPlan, ...]:
    plans, offset = [], 0
    for weight in program.weights:
        size = packed_bytes(weight)
        plans.append(WeightPlan(weight, offset, size))
        offset += -(-size // ALIGNMENT) * ALIGNMENT
    return tuple(plans)


def total_bytes(plans: tuple[WeightPlan, ...]) -> int:
    """Bytes of the flat file, the last tensor's padding included."""
    last = plans[-1]
    return last.offset + -(-last.num_bytes // ALIGNMENT) * ALIGNMENT


def pack_weights(
    program: Program,
    checkpoint: Checkpoint,
    threads: Any,
    buffer_for: Callable[[WeightPlan], Buffer] | None = None,
    on_packed: OnPacked | None = None,
) -> PackedWeights:
    """Read, convert and pack all of them, on `threads` (`_native.ThreadPool`).

    `buffer_for` gives each tensor its memory: `num_bytes`, 64-byte aligned, zeroed. None takes new memory for all.
    `on_packed` is told after each tensor how many bytes are packed, and of how many.
    Raises CheckpointError naming tensor, shapes and file when something is missing, surplus or of the wrong shape, and
    for a file that changed meanwhile.
    """
    sources = _Sources(program, checkpoint)
    plans = plan_weights(program)
    memory = allocate(total_bytes(plans)) if buffer_for is None else None
    tensors: dict[str, PackedTensor] = {}
    for plan in plans:
        if memory is not None:
            buffer = memory[plan.offset : plan.offset + plan.num_bytes]
        else:
            assert buffer_for is not None
            buffer = buffer_for(plan)
        _fill(plan.weight, buffer, sources, threads)
        tensors[plan.weight.name] = PackedTensor(plan.weight, buffer)
        if on_packed is not None:
            on_packed(plan.offset + plan.num_bytes, plans[-1].offset + plans[-1].num_bytes)
    checkpoint.check_unchanged()
    return PackedWeights(tensors)


def _fill(weight: Weight, buffer: Buffer, sources: _Sources, threads: Any) -> None:
    if weight.format == ORDER:
        buffer[: 4 * weight.rows].view(np.int32)[:] = sources.order(weight.parts[0])
        return
    if not is_matrix(weight):
        buffer[: 4 * weight.rows].view(np.float32)[:] = sources.vector(weight.parts)
        return
    count = weight.experts or 1
    rows, num_bytes = weight.matrix_rows, int(shape_of(weight).packed_bytes)
    is_sorted = bool(weight.format.order)
    bias = sources.vector(weight.bias) if weight.bias else None  # of all, since a file may have one tensor for all
    for number in range(count):
        first = number * rows
        parts = tuple(cut(weight.parts, first, first + rows))
        pack(
            threads,
            [matrix for part in parts for matrix in sources.matrices(part, sorted=is_sorted)],
            weight.format.dtype,
            gated=weight.gated,
            bias=bias[first : first + rows] if bias is not None else None,
            out=buffer[number * num_bytes : (number + 1) * num_bytes],
        )


class _Sources:
    """The checkpoint's tensors by the parameter that they fill."""

    def __init__(self, program: Program, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._last: tuple[str, RawTensor] | None = None  # that was read
        self._by_parameter: dict[str, list[tuple[RowSpan, WeightSource]]] = {}
        names = checkpoint.tensor_names()
        for source in weight_map(program.head or program.spec, names):
            pieces = self._by_parameter.setdefault(source.parameter, [])
            pieces.extend((piece, source) for piece in source.pieces())
            _check_shape(source, checkpoint)
        for pieces in self._by_parameter.values():
            pieces.sort(key=_row_of)

    def order(self, part: Part) -> NDArray[np.int32]:
        """Order of the columns of the matrix that begins with the part."""
        return next(raw.order for _, _, raw in self._of(part))

    def matrices(self, part: Part, *, sorted: bool) -> Iterator[SourceMatrix]:
        """The part's rows as the files hold them, from top to bottom; columns in their own order unless `sorted`."""
        for piece, source, raw in self._of(part):
            as_stored = (sorted or raw.order is None) and not (source.is_turned and raw.dtype not in _NUMPY_DTYPES)
            values, dtype = _matrix(raw) if as_stored else (float32_values(raw, source.tensor), "float32")
            assert source.offset == 0.0, source  # only norms have one
            rows = source.take(values, piece)[_rows_within(part, piece)]
            yield SourceMatrix(np.ascontiguousarray(rows) if source.stack is not None else rows, dtype)

    def vector(self, parts: tuple[Part, ...]) -> NDArray[np.float32]:
        found = []
        for part in parts:
            for piece, source, raw in self._of(part):
                values, dtype = _values(raw)
                rows = source.take(values, piece)[_rows_within(part, piece)]
                vector = _float32(rows, dtype) + np.float32(source.offset)
                found.append(-np.exp(vector.astype(np.float64)).astype(np.float32) if source.is_log else vector)
        return np.concatenate(found)

    def _of(self, part: Part) -> Iterator[tuple[RowSpan, WeightSource, RawTensor]]:
        pieces = self._by_parameter[part.parameter]
        first = max(bisect_right(pieces, part.first, key=_row_of) - 1, 0)
        for piece, source in pieces[first:]:
            if piece.row >= part.first + part.rows:
                return
            if self._last is None or self._last[0] != source.tensor:  # one for all experts is asked for by each
                self._last = source.tensor, self._checkpoint.tensor(source.tensor)
            yield piece, source, self._last[1]


def _row_of(found: tuple[RowSpan, WeightSource]) -> int:
    return found[0].row


def _check_shape(source: WeightSource, checkpoint: Checkpoint) -> None:
    check_shape(source, checkpoint.shape_of(source.tensor), checkpoint.file_of(source.tensor))
    _check_dtype(checkpoint.dtype_of(source.tensor), source.tensor, matrix=source.is_matrix)


def _check_dtype(dtype: str, name: str, *, matrix: bool = False) -> None:
    known = tuple(dict.fromkeys((*_NUMPY_DTYPES, *HELD_AS))) if matrix else tuple(_NUMPY_DTYPES)
    if dtype not in known:
        raise CheckpointError(
            f"tensor {name} is of type {dtype}; {'matrices' if matrix else 'vectors'} must be one of {', '.join(known)}"
        )


def _rows_within(part: Part, piece: RowSpan) -> slice:
    """Rows of the piece that belong to the part."""
    return slice(max(part.first - piece.row, 0), min(part.first + part.rows - piece.row, piece.num_rows))


# safetensors' name -> (how numpy reads it, the packer's name); numpy has no bfloat16, so its bits come as uint16
_NUMPY_DTYPES: dict[str, tuple[Any, str]] = {
    "F64": (np.float64, "float64"),
    "F32": (np.float32, "float32"),
    "F16": (np.float16, "float16"),
    "BF16": (np.uint16, "bfloat16"),
}


def _matrix(raw: RawTensor) -> tuple[NDArray[Any], str]:
    """Rows as `SourceMatrix` takes them: those of block types stay bytes."""
    if raw.dtype not in _NUMPY_DTYPES:
        return np.frombuffer(raw.data, dtype=np.uint8).reshape(*raw.shape[:-1], -1), raw.dtype
    return _values(raw)


def _values(raw: RawTensor) -> tuple[NDArray[Any], str]:
    kind, dtype = _NUMPY_DTYPES[raw.dtype]
    values = np.frombuffer(raw.data, dtype=kind).reshape(raw.shape)
    if dtype == "float64":
        return values.astype(np.float32), "float32"
    if values.ctypes.data % values.itemsize:  # a file may put a tensor at any byte
        return values.copy(), dtype
    return values, dtype


def float32_values(raw: RawTensor, name: str) -> NDArray[np.float32]:
    """A tensor in float32, block types expanded. Raises CheckpointError, naming it, for one of an unknown type."""
    _check_dtype(raw.dtype, name, matrix=True)
    if raw.dtype not in _NUMPY_DTYPES:
        values = expand(raw.dtype, np.frombuffer(raw.data, dtype=np.uint8), raw.shape)
        if raw.order is not None:
            values[..., raw.order] = values.copy()
        return values
    return _float32(*_values(raw))


def _float32(values: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        widened: NDArray[np.float32] = (values.astype(np.uint32) << 16).view(np.float32)
        return widened
    return values.astype(np.float32)

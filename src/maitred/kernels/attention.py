"""The native KV pool and attention for Python: allocation with clear errors, copies of blocks, one layer by itself.

A model's program runs the same functions inside the native library. `LayerAttention` is for tests and benchmarks.

Names: T tokens of a step, R rows (requests), N query heads, K key/value heads (K divides N), H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from maitred.errors import KernelError, OutOfMemory
from maitred.kernels import _native

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Bytes = NDArray[np.uint8]

KV_DTYPES = ("float32", "bfloat16", "int8")
LARGEST_HEAD = 1024


class HeadNorm(Enum):
    """How queries and keys are normalised (RMS norm) before rope."""

    NONE = 0
    PER_HEAD = 1  # over each head, one weight for all heads
    FULL_WIDTH = 2  # over all heads at once


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One kind of attention layer. Norm weights are the factors themselves (a family's offset already added)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k."""
    window: int | None = None
    """Position p attends to (p - window, p]."""
    softcap: float | None = None
    """c: a score becomes c * tanh(score / c)."""
    sinks: tuple[float, ...] = ()
    """A logit for each query head that only adds to the softmax's denominator; empty for none."""
    norm: HeadNorm = HeadNorm.NONE
    q_norm: tuple[float, ...] = ()
    k_norm: tuple[float, ...] = ()
    norm_eps: float = 1e-6
    inverse_frequencies: tuple[float, ...] = ()
    """Radians per position of each rotated pair (i, i + len); empty leaves positions out."""
    attention_factor: float = 1.0
    """Multiplies cos and sin."""

    def __post_init__(self) -> None:
        _check_shape(self)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class StepRow:
    """A request's part of a step: tokens at positions start .. start + num_tokens - 1, its blocks from position 0."""

    start: int
    num_tokens: int
    blocks: Sequence[int]


def make_kv_pool(
    *, dtype: str, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
) -> _native.KVPool:
    """Memory for K and V, zero, given by the operating system when first touched.

    Raises KernelError for a dtype or size that the kernels cannot take, OutOfMemory when the memory is refused.
    """
    try:
        return _native.KVPool(
            dtype=dtype,
            num_layers=num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
    except ValueError as error:
        raise KernelError(str(error)) from None
    except MemoryError:
        raise OutOfMemory(
            f"a KV cache of {num_blocks} blocks of {block_size} tokens in {dtype} could not be had; "
            f"lower --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"
        ) from None


class HostBlocks:
    """Blocks of `pool` in host memory, row by row, for requests that were preempted."""

    def __init__(self, pool: _native.KVPool, num_blocks: int, threads: _native.ThreadPool) -> None:
        self.num_blocks = num_blocks
        self.bytes_per_block: int = pool.bytes_per_block
        self._pool, self._threads = pool, threads
        try:
            self._rows: Bytes = np.zeros((num_blocks, self.bytes_per_block), dtype=np.uint8)
        except MemoryError:
            raise OutOfMemory(
                f"{num_blocks * self.bytes_per_block} bytes of host memory for swapped blocks could not be had; "
                f"lower --swap-memory-bytes"
            ) from None

    def copy_out(self, blocks: Sequence[int], rows: Sequence[int]) -> None:
        """The pool's blocks[i] to row rows[i]. Raises KernelError for one that is not there."""
        try:
            self._pool.read_blocks(list(blocks), self._rows, list(rows), self._threads)
        except (IndexError, ValueError) as error:
            raise KernelError(str(error)) from None

    def copy_in(self, rows: Sequence[int], blocks: Sequence[int]) -> None:
        """Row rows[i] to the pool's blocks[i]. Raises KernelError for one that is not there."""
        try:
            self._pool.write_blocks(list(blocks), self._rows, list(rows), self._threads)
        except (IndexError, ValueError) as error:
            raise KernelError(str(error)) from None


class LayerAttention:
    """Attention of one kind of layer over a pool: `begin` a step, then `write` and `attend` for each layer."""

    def __init__(
        self,
        shape: AttentionShape,
        pool: _native.KVPool,
        threads: _native.ThreadPool,
        *,
        block_size: int,
        isa: str = "auto",
    ) -> None:
        self.shape = shape
        self._pool, self._block_size = pool, block_size
        self._num_tokens = 0
        try:
            self._layer = _native.AttentionLayer(
                pool,
                threads,
                isa=isa,
                num_heads=shape.num_heads,
                scale=shape.scale,
                window=shape.window or 0,
                softcap=shape.softcap or 0.0,
                sinks=_floats(shape.sinks),
                norm=shape.norm.value,
                q_norm=_floats(shape.q_norm),
                k_norm=_floats(shape.k_norm),
                eps=shape.norm_eps,
                inverse_frequencies=_floats(shape.inverse_frequencies),
                attention_factor=shape.attention_factor,
            )
        except ValueError as error:
            raise KernelError(str(error)) from None

    def begin(self, rows: Sequence[StepRow]) -> None:
        """Divide a step's work; raises KernelError for rows without tokens or without the blocks they need."""
        for row in rows:
            _check_row(row, self._block_size, self._pool.num_blocks)
        self._num_tokens = sum(row.num_tokens for row in rows)
        ranges = [np.arange(row.start, row.start + row.num_tokens, dtype=np.int32) for row in rows]
        self._layer.begin(
            _joined(ranges),
            _ends([row.num_tokens for row in rows]),
            _joined([np.asarray(row.blocks, dtype=np.int32) for row in rows]),
            _ends([len(row.blocks) for row in rows]),
        )

    def write(self, layer: int, qkv: Floats) -> None:
        """Make queries ready and write K and V of qkv [T, (N + 2K) * H] (q heads, k heads, v heads) into the pool."""
        wanted = (self._num_tokens, self.shape.qkv_width)
        if qkv.dtype != np.float32 or qkv.shape != wanted:
            raise KernelError(f"q, k and v are {qkv.dtype} {list(qkv.shape)}; the step needs float32 {list(wanted)}")
        self._layer.qkv(layer, np.ascontiguousarray(qkv))

    def attend(self, layer: int, num_layers: int = 1, out: Floats | None = None) -> Floats:
        """[T, N * H] of the last queries over what `layer` of the pool holds; more layers only take more time."""
        if out is None:
            out = np.empty((self._num_tokens, self.shape.num_heads * self.shape.head_dim), dtype=np.float32)
        self._layer.attend(layer, num_layers, out)
        return out

    @property
    def num_units(self) -> int:
        """Pieces of work that the step was divided into."""
        count: int = self._layer.num_units
        return count


def _floats(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float32)


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])


def _ends(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _check_row(row: StepRow, block_size: int, num_blocks: int) -> None:
    if row.start < 0 or row.num_tokens < 1:
        raise KernelError(f"a row of {row.num_tokens} tokens from position {row.start}; it needs at least 1, from 0 on")
    needed = -(-(row.start + row.num_tokens) // block_size)
    if len(row.blocks) < needed:
        raise KernelError(
            f"a row up to position {row.start + row.num_tokens - 1} has {len(row.blocks)} blocks of {block_size}; "
            f"it needs {needed}"
        )
    for block in row.blocks:
        if not 0 <= block < num_blocks:
            raise KernelError(f"block {block} of a KV pool of {num_blocks}")


def _check_shape(shape: AttentionShape) -> None:
    if min(shape.num_heads, shape.num_kv_heads) < 1 or shape.num_heads % shape.num_kv_heads:
        raise KernelError(
            f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} key/value heads; "
            f"the second must divide the first"
        )
    if shape.head_dim % 2 or not 2 <= shape.head_dim <= LARGEST_HEAD:
        raise KernelError(f"a head size of {shape.head_dim}; it must be even, 2 to {LARGEST_HEAD}")
    if shape.window is not None and shape.window < 1:
        raise KernelError(f"a window of {shape.window} tokens; it must be at least 1")
    if 2 * len(shape.inverse_frequencies) > shape.head_dim:
        raise KernelError(f"{len(shape.inverse_frequencies)} rotated pairs do not fit a head of {shape.head_dim}")
    if shape.sinks and len(shape.sinks) != shape.num_heads:
        raise KernelError(f"{len(shape.sinks)} sinks for {shape.num_heads} heads")
    _check_norm("q_norm", shape.q_norm, shape.norm, shape.head_dim, shape.num_heads)
    _check_norm("k_norm", shape.k_norm, shape.norm, shape.head_dim, shape.num_kv_heads)


def _check_norm(name: str, weights: tuple[float, ...], norm: HeadNorm, head_dim: int, num_heads: int) -> None:
    wanted = {HeadNorm.NONE: 0, HeadNorm.PER_HEAD: head_dim, HeadNorm.FULL_WIDTH: head_dim * num_heads}[norm]
    if len(weights) != wanted:
        raise KernelError(f"{name} has {len(weights)} weights; {norm.name} needs {wanted}")

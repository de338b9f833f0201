"""One attention layer by itself, as a program of the native library: q, k and v are written, then attended to.

Names: T tokens of a step, N query heads, K key/value heads (K divides N), H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from maitred.kernels import _native

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

MAX_POSITIONS = 1 << 20


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
    latent_dim: int = 0
    """Values of a key, its last ones, that are the value too; 0: values stand beside keys."""

    @property
    def out_width(self) -> int:
        return self.num_heads * (self.latent_dim or self.head_dim)

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + (1 if self.latent_dim else 2) * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True)
class StepRow:
    """A request's part of a step: tokens at positions start .. start + num_tokens - 1, its blocks from position 0."""

    start: int
    num_tokens: int
    blocks: Sequence[int]


class AttentionLayer:
    """Layer `layer` of a pool: steps of up to `max_tokens` tokens. Raises ValueError for shapes that cannot be."""

    def __init__(
        self,
        shape: AttentionShape,
        pool: _native.KVPool,
        threads: _native.ThreadPool,
        *,
        max_tokens: int,
        isa: str,
        layer: int = 0,
    ) -> None:
        vectors = {name: _floats(getattr(shape, name)) for name in ("q_norm", "k_norm", "sinks", "inverse_frequencies")}
        self._vectors = vectors  # the program reads them where they are
        self._program = program = _native.Program(threads, pool, isa, max_tokens, 1, 1, MAX_POSITIONS)
        self._qkv, self._out = program.rows(shape.qkv_width), program.rows(shape.out_width)
        frequencies, full_width = vectors["inverse_frequencies"], shape.norm is HeadNorm.FULL_WIDTH
        rope = None if frequencies is None else program.rope_table(frequencies, shape.attention_factor)
        norms = vectors["q_norm"], vectors["k_norm"], full_width, shape.norm_eps
        program.qkv(layer, shape.num_heads, self._qkv, rope, *norms)
        reader = _native.LinearShape("float32", 1, shape.out_width)
        changes = shape.window or 0, shape.scale, shape.softcap or 0.0
        program.attention(layer, shape.num_heads, *changes, self._out, reader, sinks=vectors["sinks"])
        program.begin_logits()

    def run(self, rows: Sequence[StepRow], qkv: Floats) -> Floats:
        """A step's attention [T, N * H], from its rows of q, k and v heads [T, (N + 2K) * H]."""
        self._qkv.view(len(qkv))[:] = qkv
        self._program.run(
            np.zeros(len(qkv), dtype=np.int32),
            _joined([np.arange(row.start, row.start + row.num_tokens, dtype=np.int32) for row in rows]),
            _ends([row.num_tokens for row in rows]),
            _joined([np.asarray(row.blocks, dtype=np.int32) for row in rows]),
            _ends([len(row.blocks) for row in rows]),
            np.empty(0, dtype=np.int32),
        )
        out: Floats = self._out.view(len(qkv)).copy()
        return out

    @property
    def num_units(self) -> int:
        """Pieces of work that the last step was divided into."""
        return int(self._program.num_attention_units)


def _floats(values: Sequence[float]) -> Floats | None:
    return np.array(values, dtype=np.float32) if values else None


def _joined(parts: Sequence[Ints]) -> Ints:
    return np.concatenate([np.empty(0, dtype=np.int32), *parts])


def _ends(counts: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)

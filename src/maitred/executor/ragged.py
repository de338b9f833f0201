"""Ragged batch for the native program: a plan's rows as flat arrays, cut to what its buffers hold.

The program's buffers never grow. A step with more tokens than they hold, as when the token budget was raised at run
time, is carried out in passes over slices of its rows; no token's result depends on the rows that share its pass.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.executor.state import RowWork

Int32s = NDArray[np.int32]


class Slice(NamedTuple):
    """Tokens [start, start + num_tokens) of a row; `samples` when the row does, with its last token and drafts in
    it.
    """

    row: int  # its place in the plan
    work: RowWork
    start: int
    num_tokens: int
    samples: bool

    @property
    def num_sampled(self) -> int:
        """Positions that are sampled: its last ones."""
        return 1 + len(self.work.drafts) if self.samples else 0


@dataclass(slots=True)
class RaggedStep:
    """Rows as `StepRows` of the native library points to them; T tokens of R slices."""

    token_ids: Int32s  # [T]
    positions: Int32s  # [T]
    first_tokens: Int32s  # [R + 1]
    block_tables: Int32s  # block ids of slice 0, then of slice 1, ...
    first_blocks: Int32s  # [R + 1]
    adapters: Int32s | None = None  # [R] slots, -1 for none; None where no row has one


def cut(works: Sequence[RowWork], max_tokens: int, skipped: Container[int] = ()) -> list[list[Slice]]:
    """Passes of at most `max_tokens` tokens each, in the rows' order, without the rows that are `skipped`.

    A last known token and its drafts share one.
    """
    passes: list[list[Slice]] = [[]]
    room = max_tokens
    for index, work in enumerate(works):
        if index in skipped:
            continue
        start, end = work.row.start, work.row.start + work.row.num_tokens
        while start < end:
            if room == 0:
                passes.append([])
                room = max_tokens
            count = min(room, end - start)
            together = end - 1 - work.row.num_drafts
            if together < start + count < end:
                count = together - start
                if count == 0:
                    passes.append([])
                    room = max_tokens
                    continue
            passes[-1].append(Slice(index, work, start, count, work.row.samples and start + count == end))
            start += count
            room -= count
    return passes if passes[0] else []


def ragged_step(slices: Sequence[Slice], block_size: int) -> RaggedStep:
    """Block tables already hold this step's blocks."""
    num_tokens = [piece.num_tokens for piece in slices]
    tables = [piece.work.state.blocks.array[: -(-(piece.start + piece.num_tokens) // block_size)] for piece in slices]
    first_tokens = running_sums(num_tokens)
    total = int(first_tokens[-1])
    starts = [piece.start for piece in slices]
    if total == len(slices):  # one token each
        tokens = [piece.work.state.tokens.array[piece.start] for piece in slices]
        token_ids, positions = np.array(tokens, dtype=np.int32), np.array(starts, dtype=np.int32)
    else:
        token_ids = np.empty(total, dtype=np.int32)
        positions = np.arange(total, dtype=np.int32)
        for piece, first in zip(slices, first_tokens.tolist(), strict=False):
            end = first + piece.num_tokens
            known = piece.work.state.tokens.array[piece.start : piece.start + piece.num_tokens]
            token_ids[first : first + len(known)] = known
            if piece.samples and piece.work.drafts:
                token_ids[first + len(known) : end] = piece.work.drafts
            positions[first:end] += piece.start - first
    return RaggedStep(
        token_ids=token_ids,
        positions=positions,
        first_tokens=first_tokens,
        block_tables=np.concatenate(tables, dtype=np.int32, casting="unsafe"),
        first_blocks=running_sums([len(table) for table in tables]),
    )


def running_sums(counts: Sequence[int]) -> Int32s:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums

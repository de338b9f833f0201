"""Ragged batch of a plan's rows: which tokens, where their K/V go, which rows attend together.

Plain numpy, no tensor library. Names: T tokens of the step, R rows, B blocks of a row, L key positions of a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from maitred.executor.state import Ints, PageTables, RowWork

# Rows with more tokens than this attend alone; shorter ones share a padded call with rows of like length.
LONGEST_SHARED_QUERY = 32
# Most keys (rows x padded context) of one shared call: keeps the gathered K and V near the caches.
MOST_SHARED_KEYS = 8192
# Contexts up to this many blocks count as alike; above, padding at most doubles the work.
ALIKE_BLOCKS = 4


class RowGroup(NamedTuple):
    """Rows that attend in one call. Their tokens stand together in the batch."""

    first_row: int
    num_rows: int
    first_token: int
    num_tokens: int
    query_len: int  # most tokens of a row; the others are padded to it

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.num_tokens)

    @property
    def padded(self) -> bool:
        return self.num_rows * self.query_len != self.num_tokens


class KeySpan(NamedTuple):
    """Blocks with the keys that a group's rows may see. Short rows repeat their last block, to be masked."""

    block_ids: Ints  # [R, B]
    first_positions: Ints  # [R] position of the first slot of each row's first block


@dataclass(slots=True)
class TorchBatch:
    """One step's work. Rows are in batch order: sorted so that alike rows are neighbours."""

    works: list[RowWork]
    order: list[int]  # plan index of each batch row
    likeness: Ints  # [R] equal where rows may share a call
    token_ids: Ints  # [T]
    positions: Ints  # [T]
    blocks: Ints  # [T] block id
    starts: Ints  # [R] first position to compute
    num_tokens: Ints  # [R]
    first_tokens: Ints  # [R] index of the row's first token in the batch
    block_size: int

    def slots(self, pages: PageTables | None = None, group: int = 0) -> Ints:
        """[T] slot in the pool: block id, or its page of a group of layers, * block_size + offset."""
        blocks_T = self.blocks if pages is None else pages.of_group(group, self.blocks)
        return blocks_T * self.block_size + self.positions % self.block_size

    @property
    def contexts(self) -> Ints:
        """[R] keys a row's last token sees, itself included."""
        return self.starts + self.num_tokens

    def groups(self) -> list[RowGroup]:
        """Neighbours that may share a padded call, cut at MOST_SHARED_KEYS; a long row stands alone."""
        likeness, contexts = self.likeness.tolist(), self.contexts.tolist()  # contexts ascend within a likeness
        num_tokens = self.num_tokens.tolist()
        cuts = [0]
        for row in range(1, len(likeness)):
            alone = num_tokens[row] > LONGEST_SHARED_QUERY
            full = (row + 1 - cuts[-1]) * contexts[row] > MOST_SHARED_KEYS
            if alone or full or likeness[row] != likeness[row - 1]:
                cuts.append(row)
        ends = [*cuts[1:], len(likeness)]
        return [self._group(first, end) for first, end in zip(cuts, ends, strict=True)]

    def _group(self, first: int, end: int) -> RowGroup:
        num_tokens_R = self.num_tokens[first:end]
        return RowGroup(
            first_row=first,
            num_rows=end - first,
            first_token=int(self.first_tokens[first]),
            num_tokens=int(num_tokens_R.sum()),
            query_len=int(num_tokens_R.max()),
        )

    def block_ranges(self, rows: slice, window: int | None) -> tuple[Ints, Ints]:
        """Return for each row the table index of the first block that its tokens see, and how many to the last."""
        num_blocks_R = -(-self.contexts[rows] // self.block_size)
        if window is None:
            return np.zeros_like(num_blocks_R), num_blocks_R
        first_R = np.maximum(self.starts[rows] - window + 1, 0) // self.block_size
        return first_R, num_blocks_R - first_R

    def key_span(self, group: RowGroup, window: int | None) -> KeySpan:
        """The blocks that a group's rows may see, as a rectangle."""
        first_R, counts_R = self.block_ranges(group.rows, window)
        block_ids_RB = np.empty((group.num_rows, int(counts_R.max())), dtype=np.int64)
        ranges = zip(self.works[group.rows], first_R.tolist(), counts_R.tolist(), strict=True)
        for ids_B, (work, first, count) in zip(block_ids_RB, ranges, strict=True):
            table = work.state.blocks.array[first : first + count]
            ids_B[:count] = table
            ids_B[count:] = table[-1]
        return KeySpan(block_ids_RB, first_R * self.block_size)

    def query_index(self, group: RowGroup) -> Ints:
        """Return for a padded group the batch's token at each [row, query], the row's last one where there is none."""
        offsets = np.minimum(np.arange(group.query_len)[None, :], self.num_tokens[group.rows, None] - 1)
        return self.first_tokens[group.rows, None] + offsets

    def query_keep(self, group: RowGroup) -> Ints:
        """Return for a padded group the flat index [row * query_len + query] of each real token, in batch order."""
        real = np.arange(group.query_len)[None, :] < self.num_tokens[group.rows, None]
        return np.flatnonzero(real)


def build_batch(works: Sequence[RowWork], block_size: int) -> TorchBatch:
    """`works` in the plan's order, at least one; block tables already hold this step's blocks."""
    starts_R = np.array([work.row.start for work in works], dtype=np.int64)
    num_tokens_R = np.array([work.row.num_tokens for work in works], dtype=np.int64)
    likeness_R = _likeness(starts_R, num_tokens_R, block_size)
    order_R = np.lexsort((starts_R + num_tokens_R, likeness_R))
    starts_R, num_tokens_R, likeness_R = starts_R[order_R], num_tokens_R[order_R], likeness_R[order_R]
    order = order_R.tolist()
    sorted_works = [works[i] for i in order]
    first_token_R = np.cumsum(num_tokens_R) - num_tokens_R
    # Position of token t: start of its row, plus its distance from the row's first token.
    positions_T = np.arange(int(num_tokens_R.sum())) + np.repeat(starts_R - first_token_R, num_tokens_R)
    token_ids_T = np.empty_like(positions_T)
    blocks_T = positions_T // block_size  # index in the table, and then the block's id
    for (row, state, _), first in zip(sorted_works, first_token_R.tolist(), strict=True):
        tokens = slice(first, first + row.num_tokens)
        token_ids_T[tokens] = state.tokens.array[row.start : row.start + row.num_tokens]
        blocks_T[tokens] = state.blocks.array[blocks_T[tokens]]
    return TorchBatch(
        works=sorted_works,
        order=order,
        likeness=likeness_R,
        token_ids=token_ids_T,
        positions=positions_T,
        blocks=blocks_T,
        starts=starts_R,
        num_tokens=num_tokens_R,
        first_tokens=first_token_R,
        block_size=block_size,
    )


def unwritten_slots(works: Iterable[RowWork], block_size: int) -> Ints:
    """Slots of these rows' tables past the last token of the step: what another request may have left there.

    A masked key still meets the arithmetic (0 x NaN is NaN), so a block that changes hands is cleared where it is
    not written at once; else one request's NaN would end a later one.
    """
    slots = [np.empty(0, dtype=np.int64)]
    for row, state, _ in works:
        positions = np.arange(row.start + row.num_tokens, state.blocks.size * block_size)
        slots.append(state.blocks.array[positions // block_size] * block_size + positions % block_size)
    return np.concatenate(slots)


def stale_slots(works: Iterable[RowWork], block_size: int, pages: PageTables) -> Ints:
    """Slots that may hold what others left, where blocks consist of pages and those of a window come chunk by chunk.

    They are the rest of each row's last block, in all groups, when the row begins it.
    """
    slots = [np.empty(0, dtype=np.int64)]
    for row, state, _ in works:
        end = row.start + row.num_tokens
        if end % block_size and row.start <= end // block_size * block_size:
            pages_G = pages.of([int(state.blocks.array[end // block_size])]).astype(np.int64)
            slots.append((pages_G * block_size + np.arange(end % block_size, block_size)).ravel())
    return np.concatenate(slots)


def _likeness(starts_R: Ints, num_tokens_R: Ints, block_size: int) -> Ints:
    """Rows of one likeness differ at most twofold in tokens and (over ALIKE_BLOCKS) in context; decode rows first."""
    num_blocks_R = -(-(starts_R + num_tokens_R) // block_size)
    return _bit_length(num_tokens_R - 1) * 64 + _bit_length((num_blocks_R - 1) // ALIKE_BLOCKS)


def _bit_length(n_R: Ints) -> Ints:
    return np.frexp(n_R.astype(np.float64))[1].astype(np.int64)

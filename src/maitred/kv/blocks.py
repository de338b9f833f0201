"""Blocks that are copied beside the engine's steps, and can be taken back at any moment."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from maitred.kv.layout import LayerIO
from maitred.kv.leases import Refusal


class HeldBlocks:
    """Blocks [first, first + len(block_ids)) of a sequence, in an executor's pool.

    `give_up`, by the engine's thread, waits for one piece at most; from then on `read` and `write` raise Refusal.
    """

    def __init__(self, io: LayerIO, block_ids: Sequence[int], *, first: int = 0) -> None:
        self.io, self._block_ids, self._first = io, list(block_ids), first
        self._lock = threading.Lock()
        self._is_given_up = False

    def extend(self, block_ids: Sequence[int]) -> None:
        """The next ones of the sequence, by the engine's thread."""
        self._block_ids += block_ids

    def give_up(self) -> None:
        with self._lock:
            self._is_given_up = True

    def read(self, layers: range, blocks: range, into: memoryview) -> None:
        """[layers][blocks][bytes of a layer]; `blocks` are numbers in the sequence, all of them held."""
        with self._lock:
            self._check()
            self.io.read(layers, self._block_ids[blocks.start - self._first : blocks.stop - self._first], into)

    def write(self, layers: range, blocks: range, rows: memoryview) -> None:
        """The same the other way; blocks of the sequence that are not held are passed over."""
        kept = range(max(blocks.start, self._first), min(blocks.stop, self._first + len(self._block_ids)))
        if not kept:
            return
        cell, skipped = self.io.layout.layer_bytes, kept.start - blocks.start
        block_ids = self._block_ids[kept.start - self._first : kept.stop - self._first]
        with self._lock:
            self._check()
            if len(kept) == len(blocks):
                self.io.write(layers, block_ids, rows)
                return
            for index, layer in enumerate(layers):
                begin = (index * len(blocks) + skipped) * cell
                self.io.write(range(layer, layer + 1), block_ids, rows[begin : begin + len(kept) * cell])

    def _check(self) -> None:
        if self._is_given_up:
            raise Refusal("given_up", "the blocks were taken back while they were copied")

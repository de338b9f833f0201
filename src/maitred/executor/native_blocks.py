"""Whole KV blocks of the native pool as bytes, for threads of their own beside a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from maitred.errors import KernelError
from maitred.kernels import _native


class NativeBlocks:
    """A block is a row of `bytes_per_block`. Only for blocks that no step writes meanwhile; the GIL is released."""

    def __init__(self, pool: _native.KVPool) -> None:
        self.bytes_per_block: int = pool.bytes_per_block
        self._pool = pool
        self._caller = _native.ThreadPool(1)  # copies are made in the thread that asks for them

    def read(self, blocks: Sequence[int], into: memoryview) -> None:
        """Raises KernelError for a block that is not there, or another number of bytes."""
        self._copy(self._pool.read_blocks, blocks, into)

    def write(self, blocks: Sequence[int], rows: memoryview) -> None:
        """Raises KernelError for a block that is not there, or another number of bytes."""
        self._copy(self._pool.write_blocks, blocks, rows)

    def _copy(self, copy: Any, blocks: Sequence[int], rows: memoryview) -> None:
        if len(rows) != len(blocks) * self.bytes_per_block:
            raise KernelError(f"{len(rows)} bytes for {len(blocks)} blocks of {self.bytes_per_block}")
        if blocks:
            array = np.frombuffer(rows, np.uint8).reshape(len(blocks), self.bytes_per_block)
            try:
                copy(list(blocks), array, list(range(len(blocks))), self._caller)
            except (IndexError, ValueError) as error:
                raise KernelError(str(error)) from None

"""KV swap of the native pool: host memory for blocks of preempted requests, and how fast copies are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from maitred.core.step import BlockCopy
from maitred.executor.state import SwapBandwidth
from maitred.kernels.kv_pool import HostBlocks

_MEASURED_BLOCKS = 64
_REPEATS = 3


class NativeHostPool:
    """`num_blocks` whole blocks of `pool` (a `_native.KVPool`), copied by `threads` (a `_native.ThreadPool`)."""

    def __init__(self, pool: Any, num_blocks: int, threads: Any) -> None:
        self._blocks = HostBlocks(pool, num_blocks, threads)
        self._most = min(_MEASURED_BLOCKS, num_blocks, pool.num_blocks)

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the pool to the host."""
        if copies:
            self._blocks.copy_out([copy.source for copy in copies], [copy.target for copy in copies])

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the host to the pool."""
        if copies:
            self._blocks.copy_in([copy.source for copy in copies], [copy.target for copy in copies])

    def measure(self) -> SwapBandwidth:
        """Times copies of some blocks, out and in; the best of a few. The pool must hold nothing of worth."""
        copies = [BlockCopy(i, i) for i in range(self._most)]
        num_bytes = self._most * self._blocks.bytes_per_block
        out_s = min(_timed(lambda: self.copy_out(copies)) for _ in range(_REPEATS))
        in_s = min(_timed(lambda: self.copy_in(copies)) for _ in range(_REPEATS))
        return SwapBandwidth(num_bytes / out_s, num_bytes / in_s)


def _timed(copy: Callable[[], None]) -> float:
    started = time.perf_counter()
    copy()
    return max(time.perf_counter() - started, 1e-9)

"""KV swap of the PyTorch pool: host memory for blocks of preempted requests, and how fast copies are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from maitred.errors import OutOfMemory
from maitred.executor.state import SwapBandwidth
from maitred.executor.torch_kv import TorchKVPool
from maitred.step import BlockCopy

_MEASURED_BLOCKS = 64
_REPEATS = 3


class TorchHostPool:
    """Blocks of `pool`, each contiguous, in host memory; pinned where the pool is on a GPU.

    A GPU's copies are queued on its stream, in order with everything else that touches the pool, without a wait.
    """

    def __init__(self, pool: TorchKVPool, num_blocks: int) -> None:
        self._pool = pool
        self.num_blocks = num_blocks
        self._on_gpu = pool.device.type == "cuda"
        shape = pool.shape
        sizes = (num_blocks, shape.num_layers, 2, shape.block_size, shape.num_kv_heads, shape.head_dim)
        try:
            self._blocks = torch.empty(sizes, dtype=pool.dtype, pin_memory=self._on_gpu)
        except RuntimeError as error:
            wanted = pool.dtype.itemsize * torch.Size(sizes).numel()
            raise OutOfMemory(
                f"{wanted} bytes of host memory for swapped blocks could not be had; "
                f"lower --swap-memory-bytes ({error})"
            ) from error

    @property
    def bytes_per_block(self) -> int:
        return self._blocks[0].numel() * self._blocks.element_size()

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the pool to the host."""
        if not copies:
            return
        gathered = self._pool.gather([copy.source for copy in copies])
        if not self._on_gpu:
            self._blocks.index_copy_(0, torch.tensor([copy.target for copy in copies]), gathered)
            return
        for block, copy in zip(gathered, copies, strict=True):
            self._blocks[copy.target].copy_(block, non_blocking=True)

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the host to the pool."""
        if not copies:
            return
        if self._on_gpu:
            blocks = torch.stack([self._blocks[c.source].to(self._pool.device, non_blocking=True) for c in copies])
        else:
            blocks = self._blocks.index_select(0, torch.tensor([copy.source for copy in copies]))
        self._pool.scatter([copy.target for copy in copies], blocks)

    def measure(self) -> SwapBandwidth:
        """Times copies of some blocks, out and in; the best of a few. The pool must hold nothing of worth."""
        count = min(_MEASURED_BLOCKS, self.num_blocks, self._pool.shape.num_blocks)
        copies = [BlockCopy(i, i) for i in range(count)]
        num_bytes = count * self.bytes_per_block
        out_s = min(self._timed(lambda: self.copy_out(copies)) for _ in range(_REPEATS))
        in_s = min(self._timed(lambda: self.copy_in(copies)) for _ in range(_REPEATS))
        return SwapBandwidth(num_bytes / out_s, num_bytes / in_s)

    def _timed(self, copy: Callable[[], None]) -> float:
        self._wait()
        started = time.perf_counter()
        copy()
        self._wait()
        return max(time.perf_counter() - started, 1e-9)

    def _wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._pool.device)

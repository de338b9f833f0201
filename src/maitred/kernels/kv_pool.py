"""The native KV pool for Python: allocation with clear errors, copies of blocks in host memory, checksums of blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError, OutOfMemory
from maitred.kernels import _native

Bytes = NDArray[np.uint8]

LARGEST_HEAD = 1024


def make_kv_pool(
    *,
    dtype: str,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    latent_dim: int = 0,
    page_bytes: int = 0,
    places: Sequence[tuple[int, int, int]] = (),
    team: _native.Team | None = None,
) -> _native.KVPool:
    """Memory for K and V, zero, given by the operating system when first touched; with a `team`, what its ranks share.
    `latent_dim` are the values of a key that are its value too; 0: V stands beside K. `places` of layers with unlike
    heads have each its heads, their size and its first byte in a page.

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
            latent_dim=latent_dim,
            page_bytes=page_bytes,
            places=list(places),
            team=team,
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


_alone = threading.local()


def checksum(rows: bytes | memoryview) -> int:
    """64 bits that change with any word of the bytes, by the calling thread alone."""
    return int(_native.checksum(_one_thread(), np.frombuffer(rows, np.uint8)))


def checksums(rows: memoryview, count: int) -> NDArray[np.uint64]:
    """Checksum of each of `count` equal rows; the GIL is released once for all."""
    sums = np.empty(count, np.uint64)
    if count:
        _native.checksum_rows(_one_thread(), np.frombuffer(rows, np.uint8).reshape(count, -1), sums)
    return sums


def _one_thread() -> _native.ThreadPool:
    if not hasattr(_alone, "threads"):
        _alone.threads = _native.ThreadPool(1)
    threads: _native.ThreadPool = _alone.threads
    return threads

"""The native KV pool: size, copies of blocks, the host's copies."""

from __future__ import annotations

import numpy as np
import pytest

from maitred.config import KV_DTYPES
from maitred.core.errors import KernelError
from maitred.kernels import _native
from maitred.kernels.kv_pool import HostBlocks, make_kv_pool

pytestmark = pytest.mark.parametrize("dtype", KV_DTYPES[1:])  # the first leaves the choice to the server


def make_pool(dtype: str, *, num_blocks: int = 6, block_size: int = 16, head_dim: int = 24) -> _native.KVPool:
    return make_kv_pool(
        dtype=dtype, num_layers=3, num_blocks=num_blocks, block_size=block_size, num_kv_heads=2, head_dim=head_dim
    )


def fill(pool: _native.KVPool) -> None:
    rng = np.random.default_rng(0)
    for layer in range(pool.num_layers):
        for block in range(pool.num_blocks):
            view = pool.block_view(layer, block)
            view[:] = rng.integers(0, 256, view.shape)


def contents(pool: _native.KVPool, block: int) -> bytes:
    return b"".join(pool.block_view(layer, block).tobytes() for layer in range(pool.num_layers))


def bytes_per_block(dtype: str, block_size: int, head_dim: int) -> int:
    """Blocks of a multiple of 16 tokens hold heads padded to 16 values; int8 has a scale for each head of K and V. int4
    has no such blocks, and 4 bytes of scale and minimum for each 32 values."""
    if dtype == "int4":
        cell = round_up(head_dim + 2 * 4 * round_up(head_dim, 32) // 32, 4)
        return 3 * round_up(2 * block_size * cell, 64)
    value_bytes, scale_bytes = {"float32": (4, 0), "bfloat16": (2, 0), "int8": (1, 8)}[dtype]
    padded = (
        2 * round_up(head_dim, 16) * value_bytes if block_size % 16 == 0 else round_up(2 * head_dim * value_bytes, 4)
    )
    return 3 * round_up(2 * block_size * (padded + scale_bytes), 64)


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@pytest.mark.parametrize("block_size", [1, 5, 16, 24, 32, 256])
@pytest.mark.parametrize("head_dim", [2, 16, 24, 26, 80, 128])
def test_a_block_takes_what_its_layout_says(dtype: str, block_size: int, head_dim: int) -> None:
    pool = make_pool(dtype, block_size=block_size, head_dim=head_dim)
    assert pool.bytes_per_block == bytes_per_block(dtype, block_size, head_dim)
    assert pool.num_bytes == pool.num_blocks * pool.bytes_per_block
    assert pool.block_view(2, 5).nbytes * 3 == pool.bytes_per_block


def test_new_memory_is_zero_and_stays_so_when_touched(dtype: str) -> None:
    pool = make_pool(dtype, num_blocks=300, block_size=64)
    pool.block_view(1, 7)[:] = 9
    pool.touch(_native.ThreadPool(2))
    assert set(contents(pool, 299)) == {0}
    assert set(pool.block_view(1, 7).tobytes()) == {9}


def test_a_copied_block_is_equal_in_every_layer_and_no_other_changes(dtype: str) -> None:
    pool = make_pool(dtype)
    fill(pool)
    before = [contents(pool, block) for block in range(6)]
    pool.copy_blocks([(1, 4), (4, 5), (2, 2)])
    assert [contents(pool, block) for block in range(6)] == [*before[:4], before[1], before[1]]


def test_blocks_come_back_from_the_host_as_they_went(dtype: str) -> None:
    pool = make_pool(dtype)
    fill(pool)
    before = [contents(pool, block) for block in range(6)]
    host = HostBlocks(pool, 4, _native.ThreadPool(2))
    host.copy_out([5, 0, 3], [1, 0, 3])
    for block in (0, 3, 5):
        pool.block_view(1, block)[:] = 0
    host.copy_in([1, 0, 3], [2, 0, 3])
    assert contents(pool, 2) == before[5]
    assert contents(pool, 0) == before[0]
    assert contents(pool, 3) == before[3]
    assert contents(pool, 1) == before[1]


def test_blocks_and_rows_that_are_not_there_are_refused(dtype: str) -> None:
    pool = make_pool(dtype)
    host = HostBlocks(pool, 2, _native.ThreadPool(1))
    with pytest.raises(KernelError, match="block 6 of a KV pool of 6"):
        host.copy_out([6], [0])
    with pytest.raises(KernelError, match="row 2 of 2"):
        host.copy_in([2], [0])
    with pytest.raises(IndexError, match="block -1"):
        pool.copy_blocks([(-1, 0)])
    with pytest.raises(IndexError, match="layer 3"):
        pool.block_view(3, 0)


def test_pools_that_cannot_be_are_refused(dtype: str) -> None:
    with pytest.raises(KernelError, match="both must be at least 1"):
        make_pool(dtype, num_blocks=0)
    with pytest.raises(KernelError, match="both must be at least 1"):
        make_pool(dtype, block_size=0)
    with pytest.raises(KernelError, match="must be even"):
        make_pool(dtype, head_dim=7)
    with pytest.raises(KernelError, match="choose one of float32, bfloat16, int8, int4"):
        make_kv_pool(dtype="int5", num_layers=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=16)
    with pytest.raises(KernelError, match="latent keys is float32 or bf16"):
        make_kv_pool(dtype="int8", num_layers=1, num_blocks=1, block_size=16, num_kv_heads=1, head_dim=16, latent_dim=8)

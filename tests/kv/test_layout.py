"""KV layouts: exact conversion between block sizes, in the pools of both executors."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.executor.torch_kv import PoolShape, TorchBlocks, TorchKVPool, TorchLayers
from maitred.kernels.kv_pool import make_kv_pool
from maitred.kv.layout import (
    NATIVE,
    TORCH,
    CellLayout,
    HeldBlocks,
    HostLayers,
    LayerIO,
    NativeLayers,
    convert,
    layers_of_next_run,
)
from maitred.kv.leases import Readable
from maitred.kv.source import KVSource, Offers
from maitred.kv.wire import Layout
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import Hand, make_decoder, make_executor, make_spec
from tests.kv.worlds import STAGING, dial, identity, make_layout
from tests.waiting import joined, until

# -- layout


Rows = NDArray[np.uint8]
NUM_LAYERS, HEADS = 3, 2


def native_pool(dtype: str, block_size: int, head_dim: int, num_blocks: int = 6) -> Any:
    return make_kv_pool(
        dtype=dtype,
        num_layers=NUM_LAYERS,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=HEADS,
        head_dim=head_dim,
    )


def read_all(io: LayerIO, blocks: list[int]) -> Rows:
    rows = np.zeros((io.num_layers, len(blocks), io.layout.layer_bytes), np.uint8)
    io.read(range(io.num_layers), blocks, memoryview(rows.reshape(-1)))
    return rows


def write_all(io: LayerIO, blocks: list[int], rows: Rows) -> None:
    io.write(range(io.num_layers), blocks, memoryview(np.ascontiguousarray(rows).reshape(-1)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_of_latent_keys_have_nothing_else_and_become_others_exactly(dtype: str) -> None:
    pools, size = {}, 2 if dtype == "bfloat16" else 4
    for block_size in (4, 16, 48):
        layout = CellLayout(NATIVE, dtype, block_size, 1, 576, is_latent=True)
        assert layout.layer_bytes == block_size * 576 * size
        pool = make_kv_pool(
            dtype=dtype,
            num_layers=1,
            num_blocks=12,
            block_size=block_size,
            num_kv_heads=1,
            head_dim=576,
            latent_dim=512,
        )
        pools[block_size] = NativeLayers(pool, layout)
    rows = np.random.default_rng(0).integers(0, 256, (1, 12, pools[4].layout.layer_bytes), dtype=np.uint8)
    write_all(pools[4], list(range(12)), rows)
    small, middle, large = (pools[block_size].layout for block_size in (4, 16, 48))
    in_tiles = convert(read_all(pools[4], list(range(12))), small, middle)
    np.testing.assert_array_equal(convert(convert(in_tiles, middle, large), large, small), rows)
    first, by_slot = (found[0, 0].view(f"u{size}") for found in (rows, in_tiles))  # a line: 16 slots
    np.testing.assert_array_equal(by_slot.reshape(-1, 16, 4 // size)[:, 0].reshape(-1), first[:576])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("block_size", [1, 5, 16, 48])
@pytest.mark.parametrize("head_dim", [2, 26, 64])
def test_a_layer_of_a_block_is_as_large_as_in_the_native_pool(dtype: str, block_size: int, head_dim: int) -> None:
    layout = CellLayout(NATIVE, dtype, block_size, HEADS, head_dim)
    NativeLayers(native_pool(dtype, block_size, head_dim), layout)  # it refuses another size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("head_dim", [26, 64])
@pytest.mark.parametrize(("there", "here"), [(16, 32), (48, 16), (5, 15), (12, 48), (16, 8)])
def test_blocks_of_another_size_come_back_as_they_were(dtype: str, head_dim: int, there: int, here: int) -> None:
    source, target = (CellLayout(NATIVE, dtype, size, HEADS, head_dim) for size in (there, here))
    num_blocks = np.lcm(there, here) // there * 2
    numbers = np.random.default_rng(0).integers(0, 256, (NUM_LAYERS, num_blocks, source.layer_bytes), np.uint8)
    clean = convert(convert(numbers, source, target), target, source)  # without what lay in the padding
    assert clean.any()
    again = convert(convert(clean, source, target), target, source)
    assert np.array_equal(again, clean)
    padding = source.layer_bytes * num_blocks * NUM_LAYERS - np.count_nonzero(clean == numbers)
    assert padding <= 0.45 * numbers.size  # heads of 26 are padded to 32; K's words and V's rows


def test_what_cannot_be_exact_is_refused() -> None:
    layout = CellLayout(NATIVE, "bfloat16", 16, HEADS, 64)
    rows = np.zeros((1, 3, layout.layer_bytes), np.uint8)
    with pytest.raises(KernelError, match="48 tokens"):
        convert(rows, layout, CellLayout(NATIVE, "bfloat16", 32, HEADS, 64))
    with pytest.raises(KernelError, match="exactly"):
        convert(rows, layout, CellLayout(NATIVE, "float32", 16, HEADS, 64))
    with pytest.raises(KernelError, match="exactly"):
        convert(rows, layout, CellLayout(TORCH, "bfloat16", 16, HEADS, 64))
    with pytest.raises(KernelError, match="no executor"):
        CellLayout(TORCH, "int8", 16, HEADS, 64)


PROMPT = [(7 * i + 3) % 97 for i in range(41)]
MOVED = 32  # tokens: whole blocks of every size here


def hand_of(cells: str, block_size: int) -> tuple[Hand, LayerIO]:
    decoder = make_decoder(make_spec())
    layout = CellLayout(cells, "float32", block_size, 2, 8)
    if cells == NATIVE:
        native = make_native(decoder, block_size=block_size, num_blocks=32)
        return Hand(native, block_size=block_size, num_blocks=32), NativeLayers(native.pool, layout)
    reference = make_executor(decoder, block_size=block_size, num_blocks=32)
    io = HostLayers(reference.pool.as_bytes(), layout, lambda: reference.pool.progress)
    return Hand(reference, block_size=block_size, num_blocks=32), io


def generate(hand: Hand, num_steps: int = 6) -> list[int]:
    for _ in range(num_steps):
        hand.step()
    return hand.outputs["r"]


@pytest.mark.parametrize(("there", "here"), [(4, 16), (16, 4), (32, 16), (4, 32)])
@pytest.mark.parametrize("cells", [NATIVE, TORCH])
def test_a_prompt_goes_on_in_blocks_of_another_size(cells: str, there: int, here: int) -> None:
    giver, source = hand_of(cells, there)
    taker, target = hand_of(cells, here)
    giver.add("r", PROMPT)
    giver.step()
    rows = read_all(source, giver.tables["r"][: MOVED // there])
    blocks = [taker.free.pop(0) for _ in range(MOVED // here)]
    write_all(target, blocks, convert(rows, source.layout, target.layout))
    taker.add("r", PROMPT, shared_blocks=blocks)
    assert generate(taker, 7) == generate(giver)
    back = convert(read_all(target, blocks), target.layout, source.layout)
    assert np.array_equal(back, convert(convert(rows, source.layout, target.layout), target.layout, source.layout))


@pytest.mark.parametrize("cells", [NATIVE, TORCH])
def test_a_pool_tells_how_many_layers_a_step_has_written(cells: str) -> None:
    hand, io = hand_of(cells, 16)
    assert io.progress == (0, 0)
    hand.add("r", PROMPT)
    hand.step()
    assert io.progress == (1, 2)
    hand.step()
    assert io.progress == (2, 2)


@pytest.mark.parametrize("cells", [NATIVE, TORCH])
def test_layers_and_blocks_that_are_not_there_are_refused(cells: str) -> None:
    _, io = hand_of(cells, 16)
    room = memoryview(bytearray(io.layout.layer_bytes))
    for layers, blocks in ((range(2, 3), [0]), (range(-1, 0), [0]), (range(1), [32]), (range(1), [-1]), (range(1), [])):
        with pytest.raises(KernelError):
            io.read(layers, blocks, room)
        with pytest.raises(KernelError):
            io.write(layers, blocks, room)


def test_layers_of_torch_are_the_same_by_its_own_operations() -> None:
    """As on a GPU, whose pool is no memory of the host."""
    hand, io = hand_of(TORCH, 16)
    hand.add("r", PROMPT)
    hand.step()
    blocks = hand.tables["r"][:2]
    other = TorchLayers(hand.executor.pool, io.layout)
    rows = read_all(io, blocks)
    assert np.array_equal(read_all(other, blocks), rows)
    write_all(other, blocks[::-1], rows)
    assert np.array_equal(read_all(io, blocks[::-1]), rows)
    for layers, wrong, num_bytes in ((range(9), blocks, rows.nbytes), (range(1), [99], 1), (range(1), blocks, 1)):
        with pytest.raises(KernelError):
            other.read(layers, wrong, memoryview(bytearray(num_bytes)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_of_a_gpu_wait_for_what_steps_were_told_to_write() -> None:
    cuda = torch.device("cuda")
    pool = TorchKVPool(PoolShape(2, 2, 4, 16, 2, 8), device=cuda, dtype=torch.float32)
    io = TorchLayers(pool, CellLayout(TORCH, "float32", 16, 2, 8))
    others = np.full((2, 1, io.layout.layer_bytes // 4), 3.0, np.float32).view(np.uint8)

    def write_late(value: float) -> None:
        cells, slots = torch.full((16, 2, 8), value, device=cuda), torch.arange(16, device=cuda)
        torch.cuda._sleep(10**8)  # type: ignore[no-untyped-call]
        for layer in range(2):
            pool.write(layer, slots, cells, cells)

    write_late(1.0)
    assert (read_all(io, [0]).view(np.float32) == 1.0).all()
    write_late(2.0)
    write_all(io, [0], others)  # of who has the block after it
    torch.cuda.synchronize()
    assert (read_all(io, [0]).view(np.float32) == 3.0).all()
    assert io.progress == (2, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_whole_blocks_of_a_gpu_leave_and_come_back() -> None:
    pool = TorchKVPool(PoolShape(3, 2, 4, 16, 2, 8), device=torch.device("cuda"), dtype=torch.bfloat16)
    io, cells = TorchBlocks(pool), torch.rand(32, 2, 8, device="cuda")
    for layer in range(3):
        pool.write(layer, torch.arange(32, device="cuda"), cells, -cells)
    rows, again = (memoryview(bytearray(2 * io.bytes_per_block)) for _ in range(2))
    io.read([0, 1], rows)
    io.write([3, 2], rows)
    io.read([3, 2], again)
    assert rows == again
    assert any(rows)


# -- prefill


CHUNKED = [(11 * i + 5) % 97 for i in range(203)]
NUM_LAYERS, CHUNK = 4, 48


def engine(cells: str, block_size: int) -> tuple[Hand, LayerIO, Layout]:
    decoder = make_decoder(make_spec(windows=(None,) * NUM_LAYERS))
    layout = CellLayout(cells, "float32", block_size, 2, 8)
    io: LayerIO
    if cells == NATIVE:
        native = make_native(decoder, block_size=block_size, max_tokens=256)
        executor, io = native, NativeLayers(native.pool, layout)
    else:
        reference = make_executor(decoder, block_size=block_size)
        executor, io = reference, HostLayers(reference.pool.as_bytes(), layout, lambda: reference.pool.progress)
    told = make_layout(kv_dtype="float32", head_dim=8, block_size=block_size, executor=cells)
    return Hand(executor, block_size=block_size), io, told


def prefill(hand: Hand, io: LayerIO, offers: Offers, num_blocks: int) -> None:
    """In chunks, as an engine's thread would: what a step will write is told before it, and that it has after it."""
    offers.offer("prompt", num_blocks, (), Readable(0))
    done = 0
    while done < len(CHUNKED):
        hand_over = min(CHUNK, len(CHUNKED) - done)
        before, end = done // hand.block_size, (done + hand_over) // hand.block_size
        table = hand.tables["r"] + hand.free  # which the step will take in this order
        offers.grow("prompt", Readable(before, end), table[before:end], layers_of_next_run(io))
        hand.step({"r": hand_over})
        done += hand_over
        assert hand.tables["r"][before:end] == table[before:end]
        offers.grow("prompt", Readable(end))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize(("cells", "there", "here"), [(NATIVE, 16, 16), (NATIVE, 16, 8), (TORCH, 4, 16)])
def test_a_prompt_that_is_pulled_while_it_is_computed_goes_on_with_the_same_tokens(
    cells: str, there: int, here: int, transport: str
) -> None:
    giver, source_io, source_layout = engine(cells, there)
    taker, target_io, target_layout = engine(cells, here)
    giver.add("r", CHUNKED)
    offers = Offers(source_io)
    source = KVSource(identity(source_layout), offers, staging_bytes=STAGING)
    address = source.listen_shm() if transport == "shm" else source.listen_tcp("127.0.0.1", 0)
    puller = dial(address, identity(target_layout))
    thread = threading.Thread(target=prefill, args=(giver, source_io, offers, len(CHUNKED) // giver.block_size))
    thread.start()
    count = 192 // taker.block_size  # whole blocks of both
    blocks = [taker.free.pop(0) for _ in range(count)]
    until(lambda: len(offers._book))
    pulled = puller.pull("prompt", range(NUM_LAYERS), range(count), HeldBlocks(target_io, blocks))
    joined(thread)
    assert pulled.num_blocks == count
    taker.add("r", CHUNKED, shared_blocks=blocks)
    for _ in range(6):
        giver.step()
        taker.step()
    taker.step()
    assert taker.outputs["r"] == giver.outputs["r"]
    puller.close()
    source.close()

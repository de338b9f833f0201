"""A prompt whose KV leaves layer by layer while it is computed, and goes on in another engine's pool."""

from __future__ import annotations

import threading

import pytest

from maitred.kv.blocks import HeldBlocks
from maitred.kv.layout import NATIVE, TORCH, CellLayout, HostLayers, LayerIO, NativeLayers, layers_of_next_run
from maitred.kv.leases import Readable
from maitred.kv.source import KVSource, Offers
from maitred.kv.wire import Layout
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import Hand, make_decoder, make_executor, make_spec
from tests.kv.worlds import STAGING, dial, identity, make_layout
from tests.waiting import joined, until

PROMPT = [(11 * i + 5) % 97 for i in range(203)]
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
    while done < len(PROMPT):
        hand_over = min(CHUNK, len(PROMPT) - done)
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
    giver.add("r", PROMPT)
    offers = Offers(source_io)
    source = KVSource(identity(source_layout), offers, staging_bytes=STAGING)
    address = source.listen_shm() if transport == "shm" else source.listen_tcp("127.0.0.1", 0)
    puller = dial(address, identity(target_layout))
    thread = threading.Thread(target=prefill, args=(giver, source_io, offers, len(PROMPT) // giver.block_size))
    thread.start()
    count = 192 // taker.block_size  # whole blocks of both
    blocks = [taker.free.pop(0) for _ in range(count)]
    until(lambda: len(offers._book))
    pulled = puller.pull("prompt", range(NUM_LAYERS), range(count), HeldBlocks(target_io, blocks))
    joined(thread)
    assert pulled.num_blocks == count
    taker.add("r", PROMPT, shared_blocks=blocks)
    for _ in range(6):
        giver.step()
        taker.step()
    taker.step()
    assert taker.outputs["r"] == giver.outputs["r"]
    puller.close()
    source.close()

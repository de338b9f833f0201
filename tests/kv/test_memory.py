"""Memory that a transfer takes at both ends, counted exactly: rings and slots, however long the prompt is."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from maitred.kv.blocks import HeldBlocks
from maitred.kv.leases import Readable, Refusal
from maitred.kv.source import KVSource
from maitred.kv.transports import NUM_SLOTS, SLOT_BYTES
from tests.kv.worlds import LAYERS, Pool, address_of, dial, identity, make_layout, make_source

NUM_BLOCKS = 256  # 4,096 tokens
STAGING = 8 * 2**20
SMALL = 2**18  # messages, threads, books
RING = {"shm": NUM_SLOTS * SLOT_BYTES, "tcp": SLOT_BYTES}  # of the source, for each receiver
SLOTS = {"shm": 0, "tcp": SLOT_BYTES}  # of a receiver beside it

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])


def layout_of(block_size: int = 16):
    return make_layout(block_size=block_size, num_kv_heads=8, head_dim=128)


@pytest.fixture
def source() -> Iterator[KVSource]:
    made = make_source(Pool(layout_of(), num_blocks=NUM_BLOCKS, seed=1), identity(layout_of()), staging_bytes=STAGING)
    made.offers.offer("prompt", NUM_BLOCKS, range(NUM_BLOCKS), Readable(NUM_BLOCKS))
    with closing(made):
        yield made


@pytest.fixture
def traced() -> Iterator[None]:
    """What this process allocates."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def shared_bytes() -> int:
    """Of rings that are mapped, each once: no allocator knows of them."""
    sizes: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:maitred-kv" in line:
            addresses, _, _, _, inode = line.split()[:5]
            begin, end = (int(address, 16) for address in addresses.split("-"))
            sizes[inode] = end - begin
    return sum(sizes.values())


@pytest.mark.parametrize(("block_size", "num_copies"), [(16, 0), (32, 5)])
def test_a_prompt_of_thousands_of_tokens_takes_a_ring_and_a_slot(source, traced, transport, block_size, num_copies):
    num_blocks = NUM_BLOCKS * 16 // block_size
    here = Pool(layout_of(block_size), num_blocks=num_blocks)
    address, rings = address_of(source, transport), shared_bytes()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with closing(dial(address, identity(layout_of(block_size)))) as puller:
        into = HeldBlocks(here, list(range(num_blocks)))
        pulled = puller.pull("prompt", LAYERS, range(num_blocks), into)
        _, peak = tracemalloc.get_traced_memory()
        taken = peak - before + shared_bytes() - rings
    assert pulled.num_blocks == num_blocks
    assert pulled.num_bytes == here.array.nbytes > 7 * STAGING
    at_least = RING[transport] + SLOTS[transport]
    assert at_least <= taken <= at_least + num_copies * SLOT_BYTES + SMALL  # copies: a piece that is converted
    assert block_size != 16 or np.array_equal(here.array, source.offers.io.array)


def test_all_receivers_together_take_what_the_option_says_and_one_more_is_refused(source, traced, transport):
    address, rings = address_of(source, transport), shared_bytes()
    before, _ = tracemalloc.get_traced_memory()
    with ExitStack() as pullers:
        num = STAGING // RING[transport]
        for _ in range(num):
            pullers.enter_context(closing(dial(address, identity(layout_of()))))
        with pytest.raises(Refusal, match="kv-staging-bytes"):
            dial(address, identity(layout_of()))
        now, _ = tracemalloc.get_traced_memory()
        of_source = now - before + shared_bytes() - rings - num * SLOTS[transport]
    assert STAGING <= of_source <= STAGING + RING[transport] + num * 2**16

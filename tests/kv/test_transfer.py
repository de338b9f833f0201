"""Pulling KV out of another worker, and everything that can go wrong with it; both transports."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError
from maitred.kv.layout import HeldBlocks, convert
from maitred.kv.leases import Readable, Refusal, Span
from maitred.kv.puller import Pulled, Puller
from maitred.kv.source import KVSource
from maitred.kv.transports import NUM_SLOTS, SLOT_BYTES
from maitred.kv.wire import (
    MAGIC,
    MAX_FIRST_BYTES,
    PREFIX,
    VERSION,
    Challenge,
    Channel,
    Offered,
    Progress,
    Pull,
    ReceiverHello,
    RefusedPull,
    Renew,
    expect,
    frame,
)
from tests.kv.worlds import (
    EPOCH,
    LAYERS,
    NUM_BLOCKS,
    Pool,
    address_of,
    dial,
    hold,
    identity,
    make_layout,
    make_source,
    offer_all,
    scripted_source,
    send_piece,
)
from tests.waiting import joined, until

# -- transfer


pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])


@dataclass
class World:
    """A source of random blocks, an empty pool, and whoever pulls."""

    there: Pool
    here: Pool
    source: KVSource
    puller: Puller
    ended: list[tuple[str, str]]
    clock: ManualClock

    def pull(self, lease: str = "prompt", *, layers: range = LAYERS, blocks: range = range(12)) -> Pulled:
        return self.puller.pull(lease, layers, blocks, hold(self.here, len(blocks), first=blocks.start))


@pytest.fixture
def world(transport: str) -> Iterator[World]:
    there, here, ended, clock = Pool(make_layout(), seed=1), Pool(make_layout()), [], ManualClock()
    source = make_source(there, on_end=lambda lease, why: ended.append((lease, why)), clock=clock)
    puller = dial(address_of(source, transport))
    yield World(there, here, source, puller, ended, clock)
    puller.close()
    source.close()


def in_thread(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    return thread, results


# ---- what goes well


def test_blocks_arrive_as_they_were(world: World) -> None:
    blocks = offer_all(world.source)
    pulled = world.pull()
    assert pulled == Pulled(12, 12 * len(LAYERS) * world.there.layout.layer_bytes)
    assert np.array_equal(world.here.rows(range(4, 16)), world.there.rows(blocks))
    assert not world.here.rows([*range(4), *range(16, NUM_BLOCKS)]).any()
    until(lambda: world.source.offers.counts["bytes"] == pulled.num_bytes)


def test_a_part_of_the_layers_and_blocks_can_be_pulled_and_one_connection_serves_many(world: World) -> None:
    blocks = offer_all(world.source)
    for number in range(20):
        layers, first = range(number % 3, 4), number % 5
        assert world.pull(layers=layers, blocks=range(first, 12)).num_blocks == 12 - first
        got = world.here.rows(range(4, 16 - first))[layers.start :]
        assert np.array_equal(got, world.there.rows(blocks[first:])[layers.start :])


@pytest.mark.parametrize(("there", "here"), [(16, 32), (32, 16), (48, 32), (8, 16)])
def test_blocks_of_another_size_are_converted_on_the_way(transport: str, there: int, here: int) -> None:
    source_pool = Pool(make_layout(block_size=there), seed=2)
    pool = Pool(make_layout(block_size=here), num_blocks=48)
    source = make_source(source_pool, identity(make_layout(block_size=there)))
    blocks, count = offer_all(source), 12 * there // here
    puller = dial(address_of(source, transport), identity(make_layout(block_size=here)))
    pulled = puller.pull("prompt", LAYERS, range(1, count), hold(pool, count - 1, first=1))
    assert pulled[0::2] == (count - 1, "")
    wanted = convert(source_pool.rows(blocks), source_pool.layout, pool.layout)
    assert np.array_equal(pool.rows(range(4, 3 + count)), wanted[:, 1:])
    puller.close()
    source.close()


def test_layers_are_pulled_while_the_prefill_goes_on(world: World) -> None:
    blocks, layers_written = list(range(20, 8, -1)), [0]
    world.source.offers.offer("prompt", 12, blocks[:8], Readable(2))
    thread, results = in_thread(world.pull)
    until(lambda: world.here.writes == [(LAYERS, [4, 5])])  # a cached prefix, at once
    world.source.offers.grow("prompt", Readable(2, end_block=8), (), lambda: layers_written[0])
    layers_written[0] = 2
    until(lambda: len(world.here.writes) > 1 and world.here.writes[-1][0].stop == 2)
    layers_written[0] = 3
    until(lambda: world.here.writes[-1] == (range(2, 3), list(range(6, 12))))
    assert not results
    assert not world.here.rows([6])[3].any()
    world.source.offers.grow("prompt", Readable(8))
    until(lambda: world.here.writes[-1] == (range(3, 4), list(range(6, 12))))
    world.source.offers.grow("prompt", Readable(12), blocks[8:])
    joined(thread)
    assert results[0].num_blocks == 12
    assert np.array_equal(world.here.rows(range(4, 16)), world.there.rows(blocks))


def test_who_knows_a_chain_of_hashes_gets_a_lease_on_it(transport: str) -> None:
    pool = Pool(make_layout(), seed=1)
    asked: list[Any] = []
    source = make_source(pool, find=lambda hashes: asked.append(hashes) or Offered("found", 3))
    puller = dial(address_of(source, transport))
    hashes = [bytes([number]) * 32 for number in range(250)]
    assert puller.ask(hashes) == Offered("found", 3)
    assert asked == [tuple(hashes)]
    puller.close()
    source.close()


def test_a_lease_ends_when_the_receiver_says_so(world: World) -> None:
    offer_all(world.source)
    world.pull()
    world.puller.release("prompt")
    until(lambda: world.ended)
    assert world.ended == [("prompt", "released")]
    assert world.pull().failure == "no_lease"


# ---- leases that end, blocks that are taken back


def test_a_lease_that_expires_while_it_is_read_is_told_before_the_bytes_count(world: World) -> None:
    world.source.offers.offer("prompt", 12, range(20, 8, -1), Readable(5))
    thread, results = in_thread(world.pull)
    until(lambda: world.here.writes)
    world.clock.advance(30.0)
    joined(thread)
    world.source.offers.expire()
    assert results[0][0] == 5
    assert results[0].failure == "no_lease"
    until(lambda: world.ended)
    assert world.ended == [("prompt", "expired")]
    offer_all(world.source, "other")
    assert world.pull("other").num_blocks == 12  # the connection goes on


def test_a_receiver_that_waits_keeps_its_lease(transport: str) -> None:
    clock = ManualClock()
    source = make_source(Pool(make_layout(), seed=1), clock=clock)
    source.offers.offer("prompt", 12, range(12), Readable(0))
    puller = dial(address_of(source, transport), timeout_s=0.06)  # quiet thrice as often
    renewed = Counter[str]()
    receive = puller._channel.receive

    def counting() -> Any:
        message = receive()
        if isinstance(message, Progress):
            clock.advance(20.0)
            renewed["progress"] += 1
            if renewed["progress"] == 4:
                source.offers.grow("prompt", Readable(12))
        return message

    puller._channel.receive = counting  # type: ignore[method-assign]
    assert puller.pull("prompt", LAYERS, range(12), hold(Pool(make_layout()))).num_blocks == 12
    assert clock.now() >= 80.0
    puller.close()
    source.close()


class WatchedClock(ManualClock):
    num_reads = 0

    def now(self) -> float:
        self.num_reads += 1
        return super().now()


def test_a_receiver_that_stands_still_loses_its_lease(transport: str) -> None:
    """It is looked at all the time for what else can be read, and that renews nothing."""
    clock = WatchedClock()
    source = make_source(Pool(make_layout(), seed=1), clock=clock)
    source.offers.offer("prompt", 12, range(12), Readable(0))
    puller = dial(address_of(source, transport), timeout_s=90.0)  # quiet every half a minute
    thread, results = in_thread(lambda: puller.pull("prompt", LAYERS, range(12), hold(Pool(make_layout()))))
    for _ in range(6):
        seen = clock.num_reads
        until(lambda: clock.num_reads >= seen + 3)  # noqa: B023
        clock.advance(5.0)
    joined(thread)
    assert results[0].failure == "no_lease"
    puller.close()
    source.close()


def test_blocks_that_the_source_takes_back_are_read_no_more(world: World) -> None:
    world.source.offers.offer("prompt", 12, range(12), Readable(5))
    thread, results = in_thread(world.pull)
    until(lambda: world.here.writes)
    world.source.offers.revoke("prompt")
    world.there.array[:] = 0  # somebody else writes there now
    joined(thread)
    assert results[0].num_blocks == 5
    assert results[0].failure == "no_lease"
    assert world.ended == []


def test_taking_blocks_back_waits_for_the_piece_under_copy(world: World) -> None:
    reading, goes_on = threading.Event(), threading.Event()

    def stand() -> None:
        reading.set()
        goes_on.wait()

    offer_all(world.source)
    world.there.before_read = stand
    puller, results = in_thread(world.pull)
    reading.wait()
    revoker, revoked = in_thread(lambda: world.source.offers.revoke("prompt"))
    assert not revoked
    goes_on.set()
    joined(puller, revoker)
    assert results[0].num_blocks in (0, 12)  # the one piece, if it was on its way


def test_blocks_that_the_receiver_takes_back_are_written_no_more(world: World) -> None:
    world.source.offers.offer("prompt", 12, range(12), Readable(5))
    held = hold(world.here)
    thread, results = in_thread(lambda: world.puller.pull("prompt", LAYERS, range(12), held))
    until(lambda: world.here.writes)
    held.give_up()
    written = len(world.here.writes)
    world.source.offers.grow("prompt", Readable(12))
    joined(thread)
    assert results[0].failure == "given_up"
    assert world.puller.is_closed
    assert len(world.here.writes) == written


def test_a_pull_can_be_aborted_while_it_waits(world: World) -> None:
    world.source.offers.offer("prompt", 12, range(12), Readable(1))
    thread, results = in_thread(world.pull)
    until(lambda: world.here.writes)
    world.puller.abort()
    joined(thread)
    assert results[0].num_blocks == 1
    assert results[0].failure == "aborted"
    assert world.pull().failure == "aborted"
    until(lambda: not world.source._channels)
    offer_all(world.source)


def test_a_source_that_closes_leaves_no_thread_and_no_lease(world: World, transport: str) -> None:
    world.source.offers.offer("prompt", 12, range(12), Readable(1))
    thread, results = in_thread(world.pull)
    until(lambda: world.here.writes)
    world.source.close()
    joined(thread)
    assert results[0].failure in ("cut", "no_lease")
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("maitred-kv")])


# ---- peers that are not what they should be


def test_a_pull_of_what_the_lease_has_not_is_refused(world: World) -> None:
    offer_all(world.source, count=6)
    assert world.pull(blocks=range(7)).failure == "no_lease"
    assert world.pull(blocks=range(6)).num_blocks == 6


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"flip": True}, "damaged"),
        ({"checksum": 1}, "damaged"),
        ({"epoch": EPOCH - 1}, "old_epoch"),
        ({"number": 0}, "old_epoch"),
        ({"version": VERSION + 1}, "old_epoch"),
        ({"num_bytes": 2**31}, "oversized"),
        ({"num_bytes": 0}, "oversized"),
        ({"first_block": 1}, "garbage"),
        ({"end_layer": 9}, "garbage"),
    ],
)
def test_a_piece_that_is_not_as_it_should_be_ends_the_pull(
    transport: str, changes: dict[str, Any], reason: str
) -> None:
    pool = Pool(make_layout())
    size = pool.layout.layer_bytes
    good, bad = Span(0, 4, 0, 2), Span(0, 4, 2, 4)

    def script(channel: Channel, outbox: Any, pull: Pull) -> None:
        send_piece(channel, outbox, pull, good, b"\1" * (8 * size))
        send_piece(channel, outbox, pull, bad, b"\2" * (8 * size), **changes)

    with scripted_source(transport, script) as address:
        puller = dial(address)
        pulled = puller.pull("prompt", LAYERS, range(12), hold(pool))
        assert (pulled.num_blocks, pulled.failure) == (2, reason)
        assert puller.is_closed
    assert (pool.rows([4, 5]) == 1).all()
    assert not pool.rows(range(6, NUM_BLOCKS)).any()


def test_a_slot_that_the_ring_has_not_is_refused(transport: str) -> None:
    pool = Pool(make_layout())
    rows = bytes(48 * pool.layout.layer_bytes)
    with scripted_source(
        transport, lambda channel, outbox, pull: send_piece(channel, outbox, pull, Span(0, 4, 0, 12), rows, slot=999)
    ) as address:
        puller = dial(address)
        pulled = puller.pull("prompt", LAYERS, range(12), hold(pool))
        puller.close()
    assert pulled.failure == ("garbage" if transport == "shm" else "")  # sockets have no slots


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (pickle.dumps({"a": print}), "garbage"),
        (PREFIX.pack(MAGIC, MAX_FIRST_BYTES + 1), "oversized"),
        (PREFIX.pack(MAGIC, 2**32 - 1), "oversized"),
        (PREFIX.pack(MAGIC, 40) + pickle.dumps(os.system).ljust(40, b"."), "garbage"),
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "garbage"),
        (frame(Renew(1)), "garbage"),
        (frame(ReceiverHello(VERSION, b"n" * 32, b"p" * 32, b"")), "stranger"),
        (frame(ReceiverHello(VERSION, b"", b"", b"")), "stranger"),
        (frame(ReceiverHello(VERSION + 1, b"n" * 32, b"p" * 32, b"")), "unlike"),
    ],
)
def test_strangers_are_refused_and_counted(world: World, transport: str, sent: bytes, reason: str) -> None:
    with raw(world.source, transport) as sock:
        sock.sendall(sent)
        until(lambda: world.source.offers.counts[reason])
    offer_all(world.source)
    assert world.pull().num_blocks == 12  # nobody else notices


def test_who_has_another_token_or_none_is_a_stranger_to_both_sides(world: World, transport: str) -> None:
    address = address_of(world.source, transport)
    for token in (b"another token of 16", None):
        with pytest.raises(Refusal) as refused:
            dial(address, identity(token=token))
        assert refused.value.reason == "stranger"
    until(lambda: world.source.offers.counts["stranger"] == 2)
    naive = make_source(world.there, identity(token=None))
    with pytest.raises(Refusal):
        dial(address_of(naive, transport))
    dial(address_of(naive, transport), identity(token=None)).close()
    naive.close()


def test_a_proof_that_was_heard_before_opens_nothing(world: World, transport: str) -> None:
    """Nor does one's own, sent back."""
    heard: list[ReceiverHello] = []

    def listen(channel: Channel) -> None:
        channel.send(Challenge(VERSION, b"x" * 32))
        heard.append(expect(channel.receive(), ReceiverHello))

    with scripted_source(transport, lambda *_: None, before=listen) as address, pytest.raises(Refusal):
        dial(address)
    with raw(world.source, transport) as sock:
        sock.sendall(frame(heard[0]))
        until(lambda: world.source.offers.counts["stranger"])


def test_an_unlike_peer_is_refused_at_first_contact_on_both_sides(world: World, transport: str) -> None:
    address = address_of(world.source, transport)
    with pytest.raises(Refusal, match="kv_dtype is 'bfloat16' here, 'float32' there"):  # as the source says it
        dial(address, identity(make_layout(kv_dtype="float32")))
    with pytest.raises(Refusal, match="isa"):
        dial(address, identity(make_layout(isa="amx")))
    until(lambda: world.source.offers.counts["unlike"] == 2)


def test_a_source_gives_no_more_memory_than_it_was_told(transport: str) -> None:
    source = make_source(Pool(make_layout()), staging_bytes=8 * SLOT_BYTES)
    address = address_of(source, transport)
    room = 8 if transport == "tcp" else 1
    pullers = [dial(address) for _ in range(room)]
    with pytest.raises(Refusal) as refused:
        dial(address)
    assert refused.value.reason == "busy"
    pullers.pop().close()
    until(lambda: source._num_staged < 8 * SLOT_BYTES)
    pullers.append(dial(address))
    for puller in pullers:
        puller.close()
    source.close()


def test_a_bound_below_one_layer_of_a_block_is_refused(transport: str) -> None:
    with pytest.raises(ConfigError, match=r"--kv-staging-bytes 100 is below .* give"):
        make_source(Pool(make_layout()), staging_bytes=100)


def test_a_peer_that_says_nothing_is_left(transport: str) -> None:
    def hear_all(channel: Channel, outbox: Any, pull: Pull) -> None:
        while True:
            channel.receive()

    with scripted_source(transport, hear_all) as address:
        puller = dial(address, timeout_s=0.06)
        pulled = puller.pull("prompt", LAYERS, range(12), hold(Pool(make_layout())))
        assert pulled.num_blocks == 0
        assert pulled.failure == "silent"


def test_refusals_of_a_peer_are_taken_for_what_they_are(transport: str) -> None:
    with scripted_source(
        transport, lambda channel, outbox, pull: channel.send(RefusedPull(pull.number, "because", "I say so"))
    ) as address:
        puller = dial(address)
        pulled = puller.pull("prompt", LAYERS, range(12), hold(Pool(make_layout())))
        assert (pulled.failure, pulled.text, puller.is_closed) == ("garbage", "I say so", False)
        puller.close()


def raw(source: KVSource, transport: str) -> socket.socket:
    """A connection that has said nothing yet."""
    address = address_of(source, transport).partition(":")[2]
    if transport == "shm":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"\0{address}")
        return sock
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def test_garbage_of_a_peer_that_is_known_ends_its_connection_alone(world: World, transport: str) -> None:
    offer_all(world.source)
    rng = np.random.default_rng(3)
    for size in (1, 7, 8, 9, 64, 4000):
        puller = dial(address_of(world.source, transport))
        puller._channel._socket.sendall(PREFIX.pack(MAGIC, size) + rng.bytes(size))
        puller._channel._socket.shutdown(socket.SHUT_WR)
        until(lambda: len(world.source._channels) == 1)
        puller.close()
    assert world.source.offers.counts["garbage"] >= 5
    assert world.pull().num_blocks == 12


# -- memory


NUM_LONG = 256  # 4,096 tokens
SHARED = 8 * 2**20
SMALL = 2**18  # messages, threads, books
RING = {"shm": NUM_SLOTS * SLOT_BYTES, "tcp": SLOT_BYTES}  # of the source, for each receiver
SLOTS = {"shm": 0, "tcp": SLOT_BYTES}  # of a receiver beside it


def large_layout(block_size: int = 16):
    return make_layout(block_size=block_size, num_kv_heads=8, head_dim=128)


@pytest.fixture
def source() -> Iterator[KVSource]:
    made = make_source(
        Pool(large_layout(), num_blocks=NUM_LONG, seed=1), identity(large_layout()), staging_bytes=SHARED
    )
    made.offers.offer("prompt", NUM_LONG, range(NUM_LONG), Readable(NUM_LONG))
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
    num_blocks = NUM_LONG * 16 // block_size
    here = Pool(large_layout(block_size), num_blocks=num_blocks)
    address, rings = address_of(source, transport), shared_bytes()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    with closing(dial(address, identity(large_layout(block_size)))) as puller:
        into = HeldBlocks(here, list(range(num_blocks)))
        pulled = puller.pull("prompt", LAYERS, range(num_blocks), into)
        _, peak = tracemalloc.get_traced_memory()
        taken = peak - before + shared_bytes() - rings
    assert pulled.num_blocks == num_blocks
    assert pulled.num_bytes == here.array.nbytes > 7 * SHARED
    at_least = RING[transport] + SLOTS[transport]
    assert at_least <= taken <= at_least + num_copies * SLOT_BYTES + SMALL  # copies: a piece that is converted
    assert block_size != 16 or np.array_equal(here.array, source.offers.io.array)


def test_all_receivers_together_take_what_the_option_says_and_one_more_is_refused(source, traced, transport):
    address, rings = address_of(source, transport), shared_bytes()
    before, _ = tracemalloc.get_traced_memory()
    with ExitStack() as pullers:
        num = SHARED // RING[transport]
        for _ in range(num):
            pullers.enter_context(closing(dial(address, identity(large_layout()))))
        with pytest.raises(Refusal, match="kv-staging-bytes"):
            dial(address, identity(large_layout()))
        now, _ = tracemalloc.get_traced_memory()
        of_source = now - before + shared_bytes() - rings - num * SLOTS[transport]
    assert SHARED <= of_source <= SHARED + RING[transport] + num * 2**16

"""Worlds for transfers: pools of random bytes, and sources that somebody has written by hand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from maitred.kernels.kv_pool import checksum
from maitred.kv.layout import HeldBlocks, HostLayers
from maitred.kv.leases import Readable, Refusal, Span
from maitred.kv.puller import Puller, connect
from maitred.kv.source import KVSource, Offers
from maitred.kv.transports import SLOT_BYTES, ShmOutbox, TcpOutbox, listen_shm, listen_tcp, shm_address, tcp_address
from maitred.kv.wire import VERSION, Agreed, Channel, Identity, Layout, PieceHeader, Pull, expect, greet

TOKEN = b"a token of 16 or more"
NUM_LAYERS, NUM_BLOCKS, STAGING = 4, 24, 64 * 2**20
TIMEOUT_S = 5.0
LAYERS = range(NUM_LAYERS)
EPOCH = 77


def make_layout(*, block_size: int = 16, **changes: Any) -> Layout:
    """`changes` are fields of Agreed."""
    agreed: dict[str, Any] = {
        "revision": "abc",
        "positions": "rope",
        "kv_dtype": "bfloat16",
        "num_layers": NUM_LAYERS,
        "num_kv_heads": 2,
        "head_dim": 16,
        "weight_dtype": "bfloat16",
        "executor": "native",
        "isa": "avx2",
    }
    return Layout(agreed=Agreed(**agreed | changes), block_size=block_size)


def identity(layout: Layout | None = None, *, token: bytes | None = TOKEN) -> Identity:
    return Identity(layout or make_layout(), token)


class Pool(HostLayers):
    """Host memory as a pool: zero, or of random bytes. Tells of each write, before it happens."""

    def __init__(self, layout: Layout, *, num_blocks: int = NUM_BLOCKS, seed: int | None = None) -> None:
        cell = layout.of_layer()
        self.array = np.zeros((NUM_LAYERS, 1, num_blocks, cell.layer_bytes), np.uint8)
        if seed is not None:
            self.array[:] = np.random.default_rng(seed).integers(0, 256, self.array.shape)
        super().__init__(self.array, cell)
        self.writes: list[tuple[range, list[int]]] = []
        self.before_write: Callable[[], None] = lambda: None
        self.before_read: Callable[[], None] = lambda: None

    def read(self, layers: range, blocks: Any, into: memoryview) -> None:
        self.before_read()
        super().read(layers, blocks, into)

    def write(self, layers: range, blocks: Any, rows: memoryview) -> None:
        self.before_write()
        super().write(layers, blocks, rows)
        self.writes.append((layers, list(blocks)))

    def rows(self, blocks: Any) -> NDArray[np.uint8]:
        return self.array[:, 0, list(blocks)]


def make_source(pool: Pool, who: Identity | None = None, *, staging_bytes: int = STAGING, **offered: Any) -> KVSource:
    """`offered` are fields of Offers."""
    return KVSource(who or identity(), Offers(pool, **offered), staging_bytes=staging_bytes, timeout_s=TIMEOUT_S)


def address_of(source: KVSource, transport: str) -> str:
    return source.listen_shm() if transport == "shm" else source.listen_tcp("127.0.0.1", 0)


def dial(address: str, who: Identity | None = None, *, timeout_s: float = TIMEOUT_S) -> Puller:
    return connect(address, who or identity(), staging_bytes=STAGING, timeout_s=timeout_s)


def hold(pool: Pool, count: int = 12, *, first: int = 0) -> HeldBlocks:
    """The pool's blocks from the fourth on."""
    return HeldBlocks(pool, list(range(4, 4 + count)), first=first)


def offer_all(source: KVSource, name: str = "prompt", count: int = 12) -> list[int]:
    """Blocks of the source's pool under a lease, backwards."""
    blocks = list(range(20, 20 - count, -1))
    source.offers.offer(name, count, blocks, Readable(count))
    return blocks


Script = Callable[[Channel, Any, Pull], None]


@contextmanager
def scripted_source(
    transport: str, script: Script, *, before: Callable[[Channel], None] | None = None
) -> Iterator[str]:
    """A peer that knows the token and answers its first pull as `script` says, or does `before` and no more."""
    listener = listen_shm() if transport == "shm" else listen_tcp("127.0.0.1", 0, has_token=True)

    def run() -> None:
        sock, _ = listener.accept()
        channel = Channel(sock, timeout_s=TIMEOUT_S)
        outbox: Any = None
        try:
            if before is not None:
                before(channel)
                return
            size = SLOT_BYTES
            outbox = ShmOutbox(channel, size) if transport == "shm" else TcpOutbox(channel, size)
            greet(channel, identity(), EPOCH, lambda terms: outbox.ring)
            script(channel, outbox, expect(channel.receive(), Pull))
            channel.has_input(None)
        except Refusal:
            pass  # the receiver has gone
        finally:
            if outbox is not None:
                outbox.close()
            channel.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield (shm_address if transport == "shm" else tcp_address)(listener)
    finally:
        thread.join()
        listener.close()


def send_piece(
    channel: Channel, outbox: Any, pull: Pull, span: Span, rows: bytes, *, flip: bool = False, **changes: Any
) -> None:
    """`flip`: a bit of the bytes, after their checksum. `changes` are fields of the header."""
    slot, room = outbox.slot(len(rows))
    room[:] = rows
    header = PieceHeader(VERSION, pull.number, EPOCH, *span, len(rows), checksum(room), slot)
    if flip:
        room[len(rows) // 2] ^= 4
    outbox.send(msgspec.structs.replace(header, **changes), room)

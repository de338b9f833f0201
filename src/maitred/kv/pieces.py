"""Wire format of KV transfers: control messages (msgspec), pieces and their headers, limits and checksums.

A frame is a prefix (magic, length) and a msgpack array that begins with the name of its message; behind a `Piece` over
TCP come its bytes. A piece is some layers of some blocks of a lease, [layers][blocks][bytes of a layer], and counts
for nothing before its checksum was right. Nothing is ever unpickled.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from maitred.kernels import _native

VERSION = 2
"""Of messages and of the layouts that `kv/layout.py` knows."""
PREFIX = struct.Struct("<4sI")  # magic, bytes of the message
MAGIC = b"mtKV"
MAX_FIRST_BYTES = 2**16
"""Of a message before its sender is known."""
MAX_MESSAGE_BYTES = 2**20  # the hashes of a prompt of 500,000 tokens in blocks of 16


class Refusal(Exception):
    """A transfer that ends, and why: `reason` is a word of REASONS, for counting."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason


REASONS = (
    "unlike",  # another model, dtype, executor, instruction set, rope or context setting
    "stranger",  # no proof of the fleet token, or another user of this machine
    "garbage",  # what is no message, or not the one that belongs here
    "oversized",
    "old_epoch",  # of a life of the peer, or of a pull, that is over
    "no_lease",  # unknown, expired or taken back
    "given_up",  # the blocks, on either side
    "damaged",  # another checksum
    "silent",
    "cut",
    "aborted",
    "busy",
)


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message: on the wire an array that begins with the name of its class."""


# -- first contact; a source speaks first, so that strangers learn a number


class Challenge(Message, frozen=True, tag=True):
    version: int
    nonce: bytes


class Hello(Message, frozen=True, tag=True):
    """A receiver that wants to pull; `proof` is over both nonces and `layout`, a `compat.Layout` as msgpack."""

    version: int
    nonce: bytes
    proof: bytes
    layout: bytes


class Welcome(Message, frozen=True, tag=True):
    """The source's proof, and its ring; shared memory's descriptor comes along, NIXL's is described."""

    proof: bytes
    layout: bytes
    epoch: int
    slot_bytes: int
    num_slots: int = 0
    agent: bytes = b""
    base: int = 0


# -- of the receiver


class Ask(Message, frozen=True, tag=True):
    """Asks for the longest prefix of a chain of blocks, by their hashes."""

    hashes: tuple[bytes, ...]


class Pull(Message, frozen=True, tag=True):
    """Layers and blocks of a lease, the end of each excluded; pieces are whole multiples of `unit` blocks."""

    number: int
    epoch: int
    lease: str
    first_layer: int
    end_layer: int
    first_block: int
    end_block: int
    unit: int = 1


class Renew(Message, frozen=True, tag=True):
    """Still waiting."""

    number: int


class Ack(Message, frozen=True, tag=True):
    """The slot of shared memory is free again."""

    slot: int


class Release(Message, frozen=True, tag=True):
    epoch: int
    lease: str


# -- of the source


class Offered(Message, frozen=True, tag=True):
    """Offers so many blocks of the chain that was asked for; with none, no lease."""

    lease: str
    num_blocks: int


class Progress(Message, frozen=True, tag=True):
    """Blocks with all layers, and the layers of the next ones up to `end_block`, that can be read so far."""

    number: int
    num_blocks: int
    end_block: int
    num_layers: int


class Piece(Message, frozen=True, tag=True):
    """Header; `slot` is where in the ring it lies."""

    version: int
    number: int
    epoch: int
    first_layer: int
    end_layer: int
    first_block: int
    end_block: int
    num_bytes: int
    checksum: int
    slot: int = 0


class Refused(Message, frozen=True, tag=True):
    """The pull of that number, or with 0 the peer itself."""

    number: int
    reason: str
    text: str


AnyMessage = (
    Challenge | Hello | Welcome | Ask | Pull | Renew | Ack | Release | Offered | Progress | Piece | Refused
)  # fmt: skip
_decode: Callable[[bytes | memoryview], AnyMessage] = msgspec.msgpack.Decoder(AnyMessage).decode
_encode = msgspec.msgpack.Encoder().encode


def frame(message: Message) -> bytes:
    body = _encode(message)
    return PREFIX.pack(MAGIC, len(body)) + body


def body_bytes(prefix: bytes | memoryview, limit: int) -> int:
    """Raises Refusal for what is no frame, or a larger one than `limit`."""
    magic, length = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise Refusal("garbage", "the peer sent what is no frame of a KV transfer")
    if length > limit:
        raise Refusal("oversized", f"the peer sent a message of {length} bytes; the limit is {limit}")
    return int(length)


def message_of(body: bytes | memoryview) -> AnyMessage:
    """Raises Refusal for bytes that are no message."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal("garbage", f"the peer sent what is no message: {error}") from None


class Span(NamedTuple):
    """Some layers of some blocks, the end of each excluded."""

    first_layer: int
    end_layer: int
    first_block: int
    end_block: int

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.end_layer)

    @property
    def blocks(self) -> range:
        return range(self.first_block, self.end_block)

    @property
    def num_cells(self) -> int:
        """A layer of a block each."""
        return len(self.layers) * len(self.blocks)


_alone = threading.local()


def checksum(rows: memoryview) -> int:
    """64 bits that change with any word of the bytes, by the calling thread alone."""
    if not hasattr(_alone, "threads"):
        _alone.threads = _native.ThreadPool(1)
    return int(_native.checksum(_alone.threads, np.frombuffer(rows, np.uint8)))

"""Protocol of KV transfers: messages (msgspec), the connection that carries them, and first contact.

A frame is a prefix (magic, length) and a msgpack array that begins with the name of its message; behind a `Piece` over
TCP come its bytes. A piece is some layers of some blocks of a lease, [layers][blocks][bytes of a layer], and counts
for nothing before its checksum was right. Nothing is ever unpickled.

At first contact each side proves the fleet token to the other (HMAC over fresh nonces), and they compare layouts. The
token itself is never sent. What follows is neither encrypted nor signed: a fleet's network is its own, as for its HTTP.
"""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from math import lcm
from typing import NamedTuple, TypeVar

import msgspec

from maitred.core.errors import KernelError
from maitred.kv.layout import CellLayout
from maitred.kv.leases import REASONS, Refusal

VERSION = 2
"""Version of messages and of the layouts that `kv/layout.py` knows."""
PREFIX = struct.Struct("<4sI")  # magic, bytes of the message
MAGIC = b"mtKV"
MAX_FIRST_BYTES = 2**16
"""Largest message of a sender that is not known yet."""
MAX_MESSAGE_BYTES = 2**20  # the hashes of a prompt of 500,000 tokens in blocks of 16


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A message: on the wire an array that begins with its tag."""


# -- first contact; a source speaks first, so that strangers learn a number


class Challenge(Message, frozen=True, tag=True):
    version: int
    nonce: bytes


class ReceiverHello(Message, frozen=True, tag="Hello"):
    """A receiver that wants to pull; `proof` is over both nonces and `layout`, a `Layout` as msgpack."""

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


class AskForBlocks(Message, frozen=True, tag="Ask"):
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


class PieceHeader(Message, frozen=True, tag="Piece"):
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


class RefusedPull(Message, frozen=True, tag="Refused"):
    """The pull of that number, or with 0 the peer itself."""

    number: int
    reason: str
    text: str


AnyMessage = (
    Challenge | ReceiverHello | Welcome | AskForBlocks | Pull | Renew | Ack | Release | Offered | Progress
    | PieceHeader | RefusedPull
)  # fmt: skip
_message: Callable[[bytes | memoryview], AnyMessage] = msgspec.msgpack.Decoder(AnyMessage).decode
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
        return _message(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Refusal("garbage", f"the peer sent what is no message: {error}") from None


# -- compatibility of two workers' KV


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """Two workers that differ in a field have KV that means nothing to the other, or differs in its last bits."""

    revision: str
    positions: str  # rope and context setting, in one line
    kv_dtype: str
    num_layers: int  # the model's own
    num_kv_heads: int
    head_dim: int
    weight_dtype: str
    executor: str
    isa: str  # of PyTorch the device
    is_latent: bool = False  # values are a part of their keys


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that decide the bytes of a worker's KV, as peers tell each other. Block sizes are converted."""

    agreed: Agreed
    block_size: int
    num_head_layers: int = 0  # behind the model's, of a head that drafts; a head without its KV only guesses worse

    def of_layer(self) -> CellLayout:
        """Raises KernelError for cells that no executor has."""
        agreed = self.agreed
        heads = agreed.num_kv_heads, agreed.head_dim
        return CellLayout(agreed.executor, agreed.kv_dtype, self.block_size, *heads, agreed.is_latent)


class TransferTerms(NamedTuple):
    """TransferTerms that two peers agreed on."""

    source: CellLayout
    target: CellLayout
    num_layers: int  # the first of both

    @property
    def unit(self) -> int:
        """Blocks of the source that are whole blocks of the receiver."""
        return lcm(self.source.block_size, self.target.block_size) // self.source.block_size

    def pulled(self, blocks: range) -> range:
        """Blocks of the source, in whole units, that hold the receiver's `blocks`, or as many of the first as fit."""
        tokens = self.unit * self.source.block_size
        first, end = blocks.start * self.target.block_size // tokens, blocks.stop * self.target.block_size // tokens
        return range(first * self.unit, end * self.unit)


def agree(own: Layout, peer: Layout, *, receives: bool) -> TransferTerms:
    """TransferTerms for KV that we receive from, or else give to, the peer. Raises Refusal naming both sides."""
    ours, theirs = msgspec.structs.asdict(own.agreed), msgspec.structs.asdict(peer.agreed)
    unlike = [f"{name} is {ours[name]!r} here, {theirs[name]!r} there" for name in ours if ours[name] != theirs[name]]
    if unlike:
        raise Refusal("unlike", f"KV cannot be shared: {'; '.join(unlike)}")
    source, target = (peer, own) if receives else (own, peer)
    num_layers = own.agreed.num_layers + min(own.num_head_layers, peer.num_head_layers)
    return TransferTerms(source.of_layer(), target.of_layer(), num_layers)


# made here, once: two threads that each have msgspec look at the type for the first time crash the process
_layout = msgspec.msgpack.Decoder(Layout).decode


def layout_of(encoded: bytes) -> Layout:
    """Layout from its msgpack. Raises Refusal."""
    try:
        layout = _layout(encoded)
        layout.of_layer()
    except (msgspec.DecodeError, ValueError, RecursionError, KernelError) as error:
        raise Refusal("garbage", f"the peer told no layout: {error}") from None
    return layout


# -- one end of a connection


_FD_BYTES = array("i").itemsize
_PEER = struct.Struct("3i")  # pid, user, group


class Channel:
    """A connection for one thread at a time; `abort` for any. Every failure is a Refusal, and the connection's end.

    `timeout_s` without a byte either way is silence. `on_quiet`, if set, is called after each third of it, so that the
    waiting end says so.
    """

    def __init__(self, sock: socket.socket, *, timeout_s: float) -> None:
        self._socket, self.timeout_s = sock, timeout_s
        sock.settimeout(timeout_s / 3)
        self.is_unix = sock.family == getattr(socket, "AF_UNIX", None)
        if not self.is_unix:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.limit = MAX_FIRST_BYTES
        """Bytes of a message; `trust` raises it."""
        self.on_quiet: Callable[[], None] | None = None
        self.deadline: float | None = timeout_s + time.monotonic()
        """End of first contact, however many bytes come; lifted when the peer is known."""
        self._is_aborted = False
        self._fds: list[int] = []

    def send(self, message: Message, rows: memoryview | None = None, *, fd: int | None = None) -> None:
        """One message, with the rows of a piece behind it or a descriptor beside it."""
        parts = [memoryview(frame(message))]
        if rows is not None:
            parts.append(rows)
        ancillary = [] if fd is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))]
        while parts:
            sent = self._patiently(lambda: self._socket.sendmsg(parts, ancillary), is_quiet=False)  # noqa: B023
            ancillary = []
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if parts:
                parts[0] = parts[0][sent:]

    def receive(self) -> AnyMessage:
        prefix = memoryview(bytearray(PREFIX.size))
        self.read_into(prefix)
        body = memoryview(bytearray(body_bytes(prefix, self.limit)))
        self.read_into(body)
        return message_of(body)

    def read_into(self, view: memoryview) -> None:
        """Fills it, from the socket straight."""
        while view:
            count = self._patiently(lambda: self._read(view), is_quiet=True)  # noqa: B023
            if count == 0:
                raise Refusal("cut", "the peer closed the connection")
            view = view[count:]

    def has_input(self, wait_s: float | None) -> bool:
        """Whether something came within that time; None waits for ever."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def trust(self) -> None:
        """The peer is known: larger messages, and any time between them."""
        self.limit, self.deadline = MAX_MESSAGE_BYTES, None

    def take_fd(self) -> int | None:
        """The descriptor that came last; the caller's to close."""
        return self._fds.pop() if self._fds else None

    def peer_user(self) -> int:
        """User id of the other end of a unix socket, from the kernel."""
        _, uid, _ = _PEER.unpack(self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return int(uid)

    def check(self, until: float) -> None:
        """Check a wait for something else than bytes of the socket. Raises Refusal when aborted, or at `until`."""
        if self._is_aborted:
            raise Refusal("aborted", "the transfer was aborted")
        if time.monotonic() >= until:
            raise Refusal("silent", f"nothing came of the peer for {self.timeout_s:g} s")

    def abort(self) -> None:
        """End every wait in this channel; idempotent."""
        self._is_aborted = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def _patiently(self, step: Callable[[], int], *, is_quiet: bool) -> int:
        """`step` until it moves bytes, or nothing moved for `timeout_s`."""
        until = time.monotonic() + self.timeout_s
        while True:
            try:
                count = step()
            except TimeoutError:
                if time.monotonic() >= until:
                    raise Refusal("silent", f"nothing came of the peer for {self.timeout_s:g} s") from None
                if is_quiet and self.on_quiet is not None:
                    self.on_quiet()
                count = -1
            except OSError as error:
                count, why = 0, error.strerror or str(error)
                if not self._is_aborted:
                    raise Refusal("cut", f"the connection to the peer broke: {why}") from None
            if self._is_aborted:
                raise Refusal("aborted", "the transfer was aborted")
            if self.deadline is not None and time.monotonic() >= self.deadline:
                raise Refusal("silent", f"the peer did not say who it is within {self.timeout_s:g} s")
            if count >= 0:
                return count

    def _read(self, view: memoryview) -> int:
        if not self.is_unix:
            return self._socket.recv_into(view)
        count, ancillary, _, _ = self._socket.recvmsg_into(
            [view], socket.CMSG_SPACE(_FD_BYTES), socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array("i")
                fds.frombytes(data[: len(data) - len(data) % _FD_BYTES])
                self._fds += fds
        return count


# -- first contact


NONCE_BYTES = 32
_SOURCE, _RECEIVER = b"maitred kv source", b"maitred kv receiver"
M = TypeVar("M", bound=Message)


class Identity(NamedTuple):
    """Claims of one end about itself. Without a token nothing is proved: for peers on this machine alone."""

    layout: Layout
    token: bytes | None


class Ring(NamedTuple):
    """Slots for the pieces of a connection, none where bytes are sent; how the peer maps them (`fd`) or reads them."""

    slot_bytes: int
    num_slots: int = 0
    fd: int | None = None
    agent: bytes = b""  # NIXL's description of the source, and where in it the ring lies
    base: int = 0


def greet(channel: Channel, own: Identity, epoch: int, ring_for: Callable[[TransferTerms], Ring]) -> TransferTerms:
    """The source's part. Raises Refusal, which the peer was told."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(Challenge(VERSION, nonce))
    hello = expect(channel.receive(), ReceiverHello)
    try:
        _check_version(hello.version)
        if not _is_proof(hello.proof, own.token, _RECEIVER, nonce + hello.nonce, hello.layout):
            raise Refusal("stranger", "the receiver does not know this fleet's token; give both --fleet-token-file")
        terms = agree(own.layout, layout_of(hello.layout), receives=False)
        ring = ring_for(terms)
    except Refusal as refusal:
        channel.send(RefusedPull(0, refusal.reason, str(refusal)))
        raise
    layout = msgspec.msgpack.encode(own.layout)
    proof = _proof(own.token, _SOURCE, hello.nonce + nonce, layout)
    fd, told = ring.fd, (ring.slot_bytes, ring.num_slots, ring.agent, ring.base)
    channel.send(Welcome(proof, layout, epoch, *told), fd=fd)
    channel.trust()
    return terms


def introduce(channel: Channel, own: Identity) -> tuple[TransferTerms, Welcome]:
    """The receiver's part. Raises Refusal."""
    challenge = expect(channel.receive(), Challenge)
    _check_version(challenge.version)
    nonce, layout = secrets.token_bytes(NONCE_BYTES), msgspec.msgpack.encode(own.layout)
    channel.send(ReceiverHello(VERSION, nonce, _proof(own.token, _RECEIVER, challenge.nonce + nonce, layout), layout))
    welcome = expect(channel.receive(), Welcome)
    if not _is_proof(welcome.proof, own.token, _SOURCE, nonce + challenge.nonce, welcome.layout):
        raise Refusal("stranger", "the source does not know this fleet's token; give both --fleet-token-file")
    terms = agree(own.layout, layout_of(welcome.layout), receives=True)
    channel.trust()
    return terms, welcome


def expect(message: AnyMessage, kind: type[M]) -> M:
    """The message, if it is of that kind. Raises Refusal for others; the peer's own, if it refused."""
    if isinstance(message, RefusedPull):
        raise refusal_of(message)
    if not isinstance(message, kind):
        raise Refusal("garbage", f"the peer sent {type(message).__name__} where {kind.__name__} belongs")
    return message


def refusal_of(message: RefusedPull) -> Refusal:
    """The peer's refusal; its reason counts as ours if we have it too."""
    return Refusal(message.reason if message.reason in REASONS else "garbage", message.text)


def _check_version(version: int) -> None:
    if version != VERSION:
        raise Refusal("unlike", f"KV transfers have version {VERSION} here, {version} there; serve the same maitred")


def _proof(token: bytes | None, role: bytes, nonces: bytes, layout: bytes) -> bytes:
    """Empty without a token. The role keeps one's proof from being sent back as the other's."""
    return b"" if token is None else hmac.digest(token, b"\0".join((role, nonces, layout)), "sha256")


def _is_proof(proof: bytes, token: bytes | None, role: bytes, nonces: bytes, layout: bytes) -> bool:
    fresh = len(nonces) == 2 * NONCE_BYTES
    return fresh and hmac.compare_digest(proof, _proof(token, role, nonces, layout))

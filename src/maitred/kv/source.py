"""Source of KV: leases on blocks of its pool, and connections of receivers, each served by a thread.

What a receiver asks for is answered, and what it pulls is sent piece by piece.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from maitred.core.clock import Clock, WallClock
from maitred.core.errors import ConfigError
from maitred.kernels.kv_pool import checksum
from maitred.kv import transports, wire
from maitred.kv.layout import HeldBlocks, LayerIO
from maitred.kv.leases import BlockLease, Front, LeaseBook, Readable, Refusal, Span

logger = logging.getLogger(__name__)
LEASE_S = 30.0
_WRITTEN_S = 0.001  # whether a step that is under way has written more
_OF_A_PULL = ("no_lease", "old_epoch", "given_up")  # the connection goes on
MAX_CONNECTIONS = 256
TIMEOUT_S = 5.0
_EXPIRED_S = 1.0  # for leases that are over

MakeOutbox = Callable[[wire.Channel, int], transports.Outbox]


class Offers:
    """Leases on blocks of a pool. `offer`, `grow`, `revoke` are the engine thread's: microseconds, but for one piece
    under copy.

    `find` answers a chain of hashes with a lease that it has offered; `on_end(lease, why)` is told when no thread reads
    one any more: released, expired. Both are called by threads of connections. A name is used once.
    """

    def __init__(
        self,
        io: LayerIO,
        *,
        lease_s: float = LEASE_S,
        clock: Clock | None = None,
        find: Callable[[Sequence[bytes]], wire.Offered] = lambda hashes: wire.Offered("", 0),
        on_end: Callable[[str, str], None] = lambda lease, why: None,
    ) -> None:
        self.epoch = secrets.randbits(63)
        """Number of this life of the process; leases of another life are refused."""
        self.io, self.find = io, find
        self.counts: Counter[str] = Counter()
        """Refusals by reason, and `bytes` and `pieces` that were sent; any thread may read it."""
        self._clock, self._on_end = clock or WallClock(), on_end
        self._lock = threading.Lock()
        self._book = LeaseBook(lease_s)
        self._blocks: dict[str, HeldBlocks] = {}

    def offer(self, lease: str, num_blocks: int, block_ids: Sequence[Any], readable: Readable) -> None:
        """The first of `num_blocks` that there will be, in the pool, where they stay until `revoke` or `on_end`."""
        with self._lock:
            self._blocks[lease] = HeldBlocks(self.io, block_ids)
            self._book.offer(lease, num_blocks, readable, self._clock.now())

    def grow(
        self,
        lease: str,
        readable: Readable,
        more_block_ids: Sequence[Any] = (),
        num_layers_written: Callable[[], int] | None = None,
    ) -> None:
        """No effect for one that is gone. Any thread asks `num_layers_written`, which while a step is under way tells
        more than `readable.num_layers`.
        """
        with self._lock:
            if (held := self._blocks.get(lease)) is not None:
                held.extend(more_block_ids)
                self._book.grow(lease, readable, self._clock.now(), num_layers_written)

    def revoke(self, lease: str) -> bool:
        """Revoke a lease, waiting for one piece at most; no thread reads its blocks then. Whether it was there."""
        with self._lock:
            self._book.end(lease)
            held = self._blocks.pop(lease, None)
        if held is not None:
            held.give_up()
        return held is not None

    def end(self, lease: str, why: str) -> None:
        """Revoke a lease and tell `on_end`; no effect for one that is gone."""
        if self.revoke(lease):
            self._on_end(lease, why)

    def has(self, lease: str) -> bool:
        """Whether the lease may be in force."""
        return lease in self._blocks

    def expire(self) -> None:
        """End what is over."""
        with self._lock:
            names = self._book.expired(self._clock.now())
        for name in names:
            self.end(name, "expired")

    def close(self) -> None:
        """Revoke everything."""
        for lease in list(self._blocks):
            self.revoke(lease)

    def renew(self, lease: str) -> BlockLease:
        """Raises Refusal for one that is not in force."""
        with self._lock:
            return self._book.renew(lease, self._clock.now())

    def in_force(self, lease: str) -> BlockLease:
        """Raises Refusal for one that is not."""
        with self._lock:
            return self._book.in_force(lease, self._clock.now())

    def held(self, lease: str) -> HeldBlocks:
        """Raises Refusal for one that is not in force."""
        with self._lock:
            self._book.in_force(lease, self._clock.now())
            return self._blocks[lease]

    def count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self.counts[name] += number


class KVSource:
    """Serves `offers` where it was told to listen, until `close`."""

    def __init__(
        self, identity: wire.Identity, offers: Offers, *, staging_bytes: int, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Raises ConfigError for memory that does not hold one layer of a block."""
        least = offers.io.layout.layer_bytes
        if staging_bytes < least:
            raise ConfigError(f"--kv-staging-bytes {staging_bytes} is below one layer of a block; give {least} or more")
        self.offers = offers
        self._identity, self._timeout_s = identity, timeout_s
        self._staging_bytes, self._num_staged = staging_bytes, 0
        self._lock = threading.Lock()  # of what is staged, and of the open connections
        self._channels: set[wire.Channel] = set()
        self._threads: list[threading.Thread] = []
        self.agent: transports.Agent | None = None  # once it listens for NIXL; all pulls in this process may share it
        self._stopped, self._stop = os.pipe()

    def listen_tcp(self, host: str, port: int) -> str:
        """The address for `puller.connect`. Raises ConfigError."""
        listener = transports.listen_tcp(host, port, has_token=self._identity.token is not None)
        self._listen(listener, transports.TcpOutbox)
        return transports.tcp_address(listener)

    def listen_shm(self) -> str:
        """The same, for processes of this host and user."""
        listener = transports.listen_shm()
        self._listen(listener, transports.ShmOutbox)
        return transports.shm_address(listener)

    def listen_nixl(self, host: str, port: int) -> str:
        """The same, for bytes over NIXL; its control is over TCP. Raises ConfigError."""
        agent = self.agent = transports.Agent()
        listener = transports.listen_tcp(host, port, has_token=self._identity.token is not None)
        self._listen(listener, lambda channel, slot_bytes: transports.NixlOutbox(channel, slot_bytes, agent))
        return transports.tcp_address(listener, "nixl")

    def close(self) -> None:
        """End every connection and lease; idempotent."""
        if self._stop < 0:
            return
        os.write(self._stop, b"x")
        with self._lock:
            channels, threads = list(self._channels), list(self._threads)
        for channel in channels:
            channel.abort()
        for thread in threads:
            thread.join()
        self.offers.close()
        os.close(self._stopped)
        os.close(self._stop)
        self._stop = -1

    def _listen(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        self._start(lambda: self._accept(listener, make_outbox), "maitred-kv-listen")

    def _start(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [known for known in self._threads if known.is_alive()] + [thread]
            thread.start()

    def _accept(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        poll = select.poll()
        for fd in (listener.fileno(), self._stopped):
            poll.register(fd, select.POLLIN)
        with listener:
            while True:
                ready = [fd for fd, _ in poll.poll(_EXPIRED_S * 1000)]
                if self._stopped in ready:
                    return
                self.offers.expire()
                if ready:
                    self._welcome(listener, make_outbox)

    def _welcome(self, listener: socket.socket, make_outbox: MakeOutbox) -> None:
        try:
            sock, _ = listener.accept()
        except OSError as error:  # no descriptor left, or it has gone again
            logger.warning("a peer that pulls KV could not be accepted: %s", error.strerror)
            return
        if len(self._channels) >= MAX_CONNECTIONS:
            self.offers.count("busy")
            sock.close()
            return
        channel = wire.Channel(sock, timeout_s=self._timeout_s)
        with self._lock:
            self._channels.add(channel)
        self._start(lambda: self._meet(channel, make_outbox), "maitred-kv-send")

    def _meet(self, channel: wire.Channel, make_outbox: MakeOutbox) -> None:
        """One connection, from first contact to its end."""
        outboxes: list[transports.Outbox] = []

        def ring_for(terms: wire.TransferTerms) -> wire.Ring:
            outbox = make_outbox(channel, max(transports.SLOT_BYTES, terms.unit * terms.source.layer_bytes))
            outboxes.append(outbox)
            self._stage(outbox.num_bytes)
            return outbox.ring

        try:
            if channel.is_unix:
                transports.check_user(channel.peer_user())
            wire.greet(channel, self._identity, self.offers.epoch, ring_for)
            serve(self.offers, channel, outboxes[0])
        except Refusal as refusal:
            if refusal.reason not in ("cut", "aborted"):
                self.offers.count(refusal.reason)
                logger.warning("a peer that pulls KV: %s", refusal)
        finally:
            for outbox in outboxes:
                outbox.close()
            with self._lock:
                self._num_staged -= sum(outbox.num_bytes for outbox in outboxes)
                self._channels.discard(channel)
            channel.close()

    def _stage(self, num_bytes: int) -> None:
        """Raises Refusal when others have taken what there is; given back with the connection."""
        with self._lock:
            self._num_staged += num_bytes
            taken = self._num_staged
        if taken > self._staging_bytes:
            raise Refusal("busy", f"all of --kv-staging-bytes {self._staging_bytes} is in use by other receivers")


def serve(offers: Offers, channel: wire.Channel, outbox: transports.Outbox) -> None:
    """Serve until the connection ends, which is a Refusal; with it end the leases that were found for it."""
    found: list[str] = []
    try:
        _serve(offers, channel, outbox, found)
    finally:
        for lease in found:
            offers.end(lease, "cut")


def _serve(offers: Offers, channel: wire.Channel, outbox: transports.Outbox, found: list[str]) -> None:
    while True:
        channel.has_input(None)
        message = channel.receive()
        match message:
            case wire.Pull():
                _pull(offers, channel, outbox, message)
            case wire.AskForBlocks():
                offered = offers.find(message.hashes)
                found[:] = [lease for lease in found if offers.has(lease)] + [offered.lease]
                channel.send(offered)
            case wire.Release():
                if message.epoch == offers.epoch:
                    offers.end(message.lease, "released")
            case _:
                outbox.take(message)


def _pull(offers: Offers, channel: wire.Channel, outbox: transports.Outbox, pull: wire.Pull) -> None:
    """Send what was asked for, as it becomes readable; the receiver is told why if it cannot have it."""
    try:
        if pull.epoch != offers.epoch:
            raise Refusal("old_epoch", "the lease is of an earlier life of this worker")
        held = offers.held(pull.lease)
        front = _front(offers, pull, outbox, held)
        while not front.is_done:
            readable = offers.in_force(pull.lease).readable_now()
            span = front.due(readable, outbox.slot_bytes // offers.io.layout.layer_bytes)
            if span is not None:
                _send(offers, outbox, pull, held, span)
                front.take(span)
            elif channel.has_input(_WRITTEN_S):
                _hear(offers, channel, outbox, pull)
    except Refusal as refusal:
        if refusal.reason not in _OF_A_PULL:
            raise
        offers.count(refusal.reason)
        channel.send(wire.RefusedPull(pull.number, refusal.reason, str(refusal)))


def _front(offers: Offers, pull: wire.Pull, outbox: transports.Outbox, held: HeldBlocks) -> Front:
    """Raises Refusal for layers and blocks that the lease has not, and for units that no slot takes."""
    whole = Span(pull.first_layer, pull.end_layer, pull.first_block, pull.end_block)
    inside = 0 <= whole.first_layer < whole.end_layer <= offers.io.num_layers and whole.first_block >= 0
    num_blocks = offers.renew(pull.lease).num_blocks
    if not inside or not whole.first_block < whole.end_block <= num_blocks:
        raise Refusal("no_lease", f"a pull of {whole} from {offers.io.num_layers} layers of {num_blocks} blocks")
    if not 0 < pull.unit <= outbox.slot_bytes // offers.io.layout.layer_bytes or len(whole.blocks) % pull.unit:
        raise Refusal("no_lease", f"a pull of {len(whole.blocks)} blocks in units of {pull.unit}")
    if offers.io.windows and whole.end_block != num_blocks:
        raise Refusal("no_lease", f"a pull of {whole} from a lease that has the windows before block {num_blocks}")
    return held.front(whole, pull.unit, offers.io.layout.block_size)


def _send(offers: Offers, outbox: transports.Outbox, pull: wire.Pull, held: HeldBlocks, span: Span) -> None:
    """Send one piece; taking its blocks back waits for the copy, and not for the receiver."""
    num_bytes = span.num_cells * offers.io.layout.layer_bytes
    number, rows = outbox.slot(num_bytes)
    held.read(span.layers, span.blocks, rows)
    piece = wire.PieceHeader(wire.VERSION, pull.number, offers.epoch, *span, num_bytes, checksum(rows), number)
    outbox.send(piece, rows)
    offers.renew(pull.lease)
    offers.count("pieces")
    offers.count("bytes", num_bytes)


def _hear(offers: Offers, channel: wire.Channel, outbox: transports.Outbox, pull: wire.Pull) -> None:
    """Hear a receiver that waits for its next piece; one that says nothing loses its lease."""
    message = channel.receive()
    if isinstance(message, wire.Renew):
        channel.send(wire.Progress(pull.number, *offers.renew(pull.lease).readable_now()))
    else:
        outbox.take(message)

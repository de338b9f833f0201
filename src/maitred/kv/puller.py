"""Receiver of KV: pulls blocks out of another worker, and counts only those whose every byte it has verified."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maitred.kernels.kv_pool import checksum
from maitred.kv import wire
from maitred.kv.layout import HeldBlocks, convert
from maitred.kv.leases import Front, Refusal, Span
from maitred.kv.transports import Agent, Inbox, NixlInbox, ShmInbox, TcpInbox, check_user, dial_shm, dial_tcp


class Pulled(NamedTuple):
    """Blocks of ours that are there from the first asked for on, all layers verified; `failure` is why not all."""

    num_blocks: int
    num_bytes: int
    failure: str = ""  # a word of leases.REASONS; empty where nothing went wrong
    text: str = ""


class Puller:
    """A connection to one source, used by one thread at a time. After a failure that is the peer's it is closed; a new
    one may be tried, and everything not verified is computed.
    """

    def __init__(
        self,
        channel: wire.Channel,
        inbox: Inbox,
        terms: wire.TransferTerms,
        epoch: int,
        slot_bytes: int,
        transport: str,
    ) -> None:
        self.terms, self.epoch, self.transport = terms, epoch, transport
        self._channel, self._inbox, self._slot_bytes = channel, inbox, slot_bytes
        self._number = 0
        self._lock = threading.Lock()
        self.is_closed = False
        self.busy_s = 0.0  # that pieces took, from the first byte on

    def ask(self, hashes: Sequence[bytes]) -> wire.Offered:
        """A lease on the longest prefix that the peer has of a chain of hashes. Raises Refusal."""
        try:
            self._channel.send(wire.AskForBlocks(tuple(hashes)))
            return wire.expect(self._channel.receive(), wire.Offered)
        except Refusal:
            self.close()
            raise

    def pull(self, lease: str, layers: range, blocks: range, into: HeldBlocks) -> Pulled:
        """Our blocks of the sequence, of these layers; waits for what a prefill has still to write.

        Never raises for what the peer does. Blocks at the end that are part of a larger one of the peer's are left out.
        """
        wanted = self.terms.pulled(blocks)
        if not wanted or not layers:
            return Pulled(0, 0)
        self._number += 1
        whole = Span(layers.start, layers.stop, wanted.start, wanted.stop)
        front = into.front(whole, self.terms.unit, self.terms.source.block_size)
        failure = text = ""
        num_bytes = 0
        try:
            self._channel.on_quiet = lambda: self._channel.send(wire.Renew(self._number))
            self._channel.send(wire.Pull(self._number, self.epoch, lease, *front.whole, self.terms.unit))
            while not front.is_done:
                num_bytes += self._receive(front, into)
        except Refusal as refusal:
            failure, text = refusal.reason, str(refusal)
            if not isinstance(refusal, _PullRefused):
                self.close()
        finally:
            self._channel.on_quiet = None
        return Pulled(self._num_verified(front, blocks), num_bytes, failure, text)

    def release(self, lease: str) -> None:
        """We need it no longer; its blocks may go."""
        try:
            self._channel.send(wire.Release(self.epoch, lease))
        except Refusal:
            self.close()

    def abort(self) -> None:
        """End a pull under way at once, and the connection with it; for any thread."""
        self._channel.abort()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        self._channel.abort()
        self._inbox.close()
        self._channel.close()

    def _receive(self, front: Front, into: HeldBlocks) -> int:
        """Bytes of a piece that was verified and written; none of another message."""
        message = self._channel.receive()
        if isinstance(message, wire.Progress):
            return 0
        if isinstance(message, wire.RefusedPull) and message.number == self._number:
            raise _PullRefused(message)
        began_at = time.monotonic()
        piece = wire.expect(message, wire.PieceHeader)
        span = self._checked(piece, front)
        rows = self._inbox.rows_of(piece)
        try:
            if checksum(rows) != piece.checksum:
                raise Refusal("damaged", f"a piece of {piece.num_bytes} bytes came with another checksum")
            self._write(span, rows, into)
        finally:
            rows.release()
        front.take(span)
        self._inbox.done_with(piece)
        self.busy_s += time.monotonic() - began_at
        return piece.num_bytes

    def _checked(self, piece: wire.PieceHeader, front: Front) -> Span:
        """Span of a piece by its header, before a byte of it is read. Raises Refusal."""
        if piece.version != wire.VERSION or piece.epoch != self.epoch or piece.number != self._number:
            raise Refusal("old_epoch", "a piece of an earlier life of the peer, or of an earlier pull")
        span = Span(piece.first_layer, piece.end_layer, piece.first_block, piece.end_block)
        front.check(span)
        if piece.num_bytes != span.num_cells * self.terms.source.layer_bytes or piece.num_bytes > self._slot_bytes:
            raise Refusal("oversized", f"a piece of {piece.num_bytes} bytes for {span}")
        return span

    def _write(self, span: Span, rows: memoryview, into: HeldBlocks) -> None:
        source, target = self.terms.source, self.terms.target
        if source == target:
            into.write(span.layers, span.blocks, rows)
            return
        array = np.frombuffer(rows, np.uint8).reshape(len(span.layers), len(span.blocks), source.layer_bytes)
        converted = np.ascontiguousarray(convert(array, source, target))
        first = span.first_block * source.block_size // target.block_size
        into.write(span.layers, range(first, first + converted.shape[1]), converted.data.cast("B"))

    def _num_verified(self, front: Front, blocks: range) -> int:
        source, target = self.terms.source, self.terms.target
        end = (front.whole.first_block + front.num_blocks) * source.block_size // target.block_size
        return max(0, end - blocks.start)


class _PullRefused(Refusal):
    """Refusal by the source, which goes on with other pulls."""

    def __init__(self, message: wire.RefusedPull) -> None:
        refusal = wire.refusal_of(message)
        super().__init__(refusal.reason, str(refusal))


def connect(
    address: str, identity: wire.Identity, *, staging_bytes: int, timeout_s: float, agent: Agent | None = None
) -> Puller:
    """Connect to a source at `shm:NAME`, `tcp:HOST:PORT`, or with an `agent` `nixl:HOST:PORT`, known to each other.

    Raises Refusal.
    """
    transport, _, place = address.partition(":")
    host, _, port = place.rpartition(":")
    if transport == "shm":
        sock = dial_shm(place, timeout_s=timeout_s)
    elif port.isdecimal() and (transport == "tcp" or (transport == "nixl" and agent is not None)):
        sock = dial_tcp(host, int(port), timeout_s=timeout_s)
    else:
        raise Refusal("garbage", f"{address[:80]!r} is no address of KV transfers that this worker takes")
    channel = wire.Channel(sock, timeout_s=timeout_s)
    try:
        if channel.is_unix:
            check_user(channel.peer_user())
        terms, welcome = wire.introduce(channel, identity)
        num_bytes = welcome.slot_bytes * max(1, welcome.num_slots)
        if welcome.slot_bytes < 1 or welcome.num_slots < 0 or num_bytes > staging_bytes:
            raise Refusal("oversized", f"the source's ring takes {num_bytes} bytes; --kv-staging-bytes {staging_bytes}")
        inbox: Inbox
        if channel.is_unix:
            inbox = ShmInbox(channel, welcome)
        elif transport == "nixl" and agent is not None:
            inbox = NixlInbox(channel, welcome, agent)
        else:
            inbox = TcpInbox(channel, welcome)
    except Refusal:
        channel.close()
        raise
    return Puller(channel, inbox, terms, welcome.epoch, welcome.slot_bytes, transport)


def connect_any(
    addresses: Sequence[str],
    identity: wire.Identity,
    *,
    transport: str = "auto",
    staging_bytes: int,
    timeout_s: float,
    agent: Agent | None = None,
) -> Puller:
    """Connect to the first of a source's addresses that is reached: shared memory, then NIXL with an `agent`, then
    sockets; one of them alone unless `transport` is auto. Raises the last one's Refusal.
    """
    wanted = [name for name in ("shm", "nixl", "tcp") if transport in ("auto", name) and (name != "nixl" or agent)]
    refusal = Refusal("cut", f"the source offers {', '.join(addresses) or 'no address'}; --kv-transport {transport}")
    for address in (a for name in wanted for a in addresses if a.startswith(f"{name}:")):
        try:
            return connect(address, identity, staging_bytes=staging_bytes, timeout_s=timeout_s, agent=agent)
        except Refusal as error:
            refusal = error
            if error.reason != "cut":  # reached, and it will say the same on every way
                break
    raise refusal

"""One connection of a source: what a receiver asks for is answered, and what it pulls is sent piece by piece."""

from __future__ import annotations

from typing import Protocol

from maitred.kv.blocks import HeldBlocks
from maitred.kv.channel import Channel
from maitred.kv.handshake import Ring
from maitred.kv.leases import Front
from maitred.kv.offers import Offers
from maitred.kv.pieces import (
    VERSION,
    AnyMessage,
    Ask,
    Piece,
    Progress,
    Pull,
    Refusal,
    Refused,
    Release,
    Renew,
    Span,
    checksum,
)

_LOOK_S = 0.001  # whether a step that is under way has written more
_OF_A_PULL = ("no_lease", "old_epoch", "given_up")  # the connection goes on


class Outbox(Protocol):
    """Memory that pieces are sent from, in slots; `ring` is what first contact tells of it."""

    slot_bytes: int
    num_bytes: int
    ring: Ring

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        """Number and memory of a slot that is free; waits for one."""

    def take(self, message: AnyMessage) -> None:
        """Take the receiver's news of slots. Raises Refusal for what it cannot have said."""

    def send(self, piece: Piece, rows: memoryview) -> None: ...

    def close(self) -> None: ...


def serve(offers: Offers, channel: Channel, outbox: Outbox) -> None:
    """Serve until the connection ends, which is a Refusal; with it end the leases that were found for it."""
    found: list[str] = []
    try:
        _serve(offers, channel, outbox, found)
    finally:
        for lease in found:
            offers.end(lease, "cut")


def _serve(offers: Offers, channel: Channel, outbox: Outbox, found: list[str]) -> None:
    while True:
        channel.has_input(None)
        message = channel.receive()
        match message:
            case Pull():
                _pull(offers, channel, outbox, message)
            case Ask():
                offered = offers.find(message.hashes)
                found[:] = [lease for lease in found if offers.has(lease)] + [offered.lease]
                channel.send(offered)
            case Release():
                if message.epoch == offers.epoch:
                    offers.end(message.lease, "released")
            case _:
                outbox.take(message)


def _pull(offers: Offers, channel: Channel, outbox: Outbox, pull: Pull) -> None:
    """Send what was asked for, as it becomes readable; the receiver is told why if it cannot have it."""
    try:
        if pull.epoch != offers.epoch:
            raise Refusal("old_epoch", "the lease is of an earlier life of this worker")
        held, front = offers.held(pull.lease), _front(offers, pull, outbox)
        while not front.is_done:
            readable = offers.in_force(pull.lease).readable_now()
            span = front.due(readable, outbox.slot_bytes // offers.io.layout.layer_bytes)
            if span is not None:
                _send(offers, outbox, pull, held, span)
                front.take(span)
            elif channel.has_input(_LOOK_S):
                _hear(offers, channel, outbox, pull)
    except Refusal as refusal:
        if refusal.reason not in _OF_A_PULL:
            raise
        offers.count(refusal.reason)
        channel.send(Refused(pull.number, refusal.reason, str(refusal)))


def _front(offers: Offers, pull: Pull, outbox: Outbox) -> Front:
    """Raises Refusal for layers and blocks that the lease has not, and for units that no slot takes."""
    whole = Span(pull.first_layer, pull.end_layer, pull.first_block, pull.end_block)
    inside = 0 <= whole.first_layer < whole.end_layer <= offers.io.num_layers and whole.first_block >= 0
    num_blocks = offers.renew(pull.lease).num_blocks
    if not inside or not whole.first_block < whole.end_block <= num_blocks:
        raise Refusal("no_lease", f"a pull of {whole} from {offers.io.num_layers} layers of {num_blocks} blocks")
    if not 0 < pull.unit <= outbox.slot_bytes // offers.io.layout.layer_bytes or len(whole.blocks) % pull.unit:
        raise Refusal("no_lease", f"a pull of {len(whole.blocks)} blocks in units of {pull.unit}")
    return Front(whole, pull.unit)


def _send(offers: Offers, outbox: Outbox, pull: Pull, held: HeldBlocks, span: Span) -> None:
    """Send one piece; taking its blocks back waits for the copy, and not for the receiver."""
    num_bytes = span.num_cells * offers.io.layout.layer_bytes
    number, rows = outbox.slot(num_bytes)
    held.read(span.layers, span.blocks, rows)
    piece = Piece(VERSION, pull.number, offers.epoch, *span, num_bytes, checksum(rows), number)
    outbox.send(piece, rows)
    offers.renew(pull.lease)
    offers.count("pieces")
    offers.count("bytes", num_bytes)


def _hear(offers: Offers, channel: Channel, outbox: Outbox, pull: Pull) -> None:
    """Hear a receiver that waits for its next piece; one that says nothing loses its lease."""
    message = channel.receive()
    if isinstance(message, Renew):
        channel.send(Progress(pull.number, *offers.renew(pull.lease).readable_now()))
    else:
        outbox.take(message)

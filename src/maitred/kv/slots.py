"""A ring of slots that pieces are shown in: which are out, and free again when the receiver says so."""

from __future__ import annotations

from maitred.kv.channel import Channel
from maitred.kv.handshake import expect
from maitred.kv.pieces import Ack, AnyMessage, Piece, Refusal, Renew, Welcome

NUM_SLOTS = 8


class RingOutbox:
    """A slot is used again only when the receiver is done with it, so what a slow one reads never changes under it."""

    def __init__(self, channel: Channel, slot_bytes: int, memory: memoryview) -> None:
        self._channel, self.slot_bytes, self._memory = channel, slot_bytes, memory
        self.num_bytes = NUM_SLOTS * slot_bytes
        self._free = list(range(NUM_SLOTS))

    def slot(self, num_bytes: int) -> tuple[int, memoryview]:
        """One that is free, once there is one."""
        while not self._free:
            self.take(self._channel.receive())
        number = self._free.pop(0)
        return number, self._memory[number * self.slot_bytes :][:num_bytes]

    def take(self, message: AnyMessage) -> None:
        """An Ack, or news that the receiver waits. Raises Refusal for anything else."""
        if isinstance(message, Renew):
            return
        number = expect(message, Ack).slot
        if not 0 <= number < NUM_SLOTS or number in self._free:
            raise Refusal("garbage", f"slot {number} of the ring came back, which was not out")
        self._free.append(number)


class RingInbox:
    """A receiver's side of a ring: where in the source's ring a piece lies, and that it was read."""

    def __init__(self, channel: Channel, welcome: Welcome) -> None:
        self._channel, self._welcome = channel, welcome

    def offset_of(self, piece: Piece) -> int:
        """(bytes) Raises Refusal for a slot that is none."""
        if not 0 <= piece.slot < self._welcome.num_slots:
            raise Refusal("garbage", f"slot {piece.slot} of a ring of {self._welcome.num_slots}")
        return piece.slot * self._welcome.slot_bytes

    def done_with(self, piece: Piece) -> None:
        self._channel.send(Ack(piece.slot))

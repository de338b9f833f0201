"""Slots of a ring that pieces are shown in: which are out, and free again when the receiver says so."""

from __future__ import annotations

from maitred.transfer.channel import Channel
from maitred.transfer.handshake import expect
from maitred.transfer.pieces import Ack, AnyMessage, Refusal, Renew

NUM_SLOTS = 8


class Slots:
    """Each is used again only when the receiver is done with it, so what a slow one reads never changes under it."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._free = list(range(NUM_SLOTS))

    def next(self) -> int:
        """One that is free, once there is one."""
        while not self._free:
            self.take(self._channel.receive())
        return self._free.pop(0)

    def take(self, message: AnyMessage) -> None:
        """An Ack, or news that the receiver waits. Raises Refusal for anything else."""
        if isinstance(message, Renew):
            return
        number = expect(message, Ack).slot
        if not 0 <= number < NUM_SLOTS or number in self._free:
            raise Refusal("garbage", f"slot {number} of the ring came back, which was not out")
        self._free.append(number)

"""Reads what a replica tells on `GET /fleet/events`."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from maitred.cluster.replica_events import FleetEvent
from maitred.cluster.upstream import Broken, UpstreamFailed

MAX_EVENT_BYTES = 1024 * 1024
_decoder: msgspec.json.Decoder[FleetEvent] = msgspec.json.Decoder(FleetEvent)


class EventReader:
    """Takes pieces as they come."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[FleetEvent]:
        """The events that are whole now. Raises UpstreamFailed for what is none."""
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise UpstreamFailed(Broken.WRONG, f"an event of a replica has over {MAX_EVENT_BYTES} bytes")
        for event in events:
            if event.startswith(b"data: {"):  # not a comment, nor the end
                yield _event(event[6:])


def _event(told: bytes) -> FleetEvent:
    try:
        return _decoder.decode(told)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UpstreamFailed(Broken.WRONG, f"an event of a replica cannot be read: {error}") from None

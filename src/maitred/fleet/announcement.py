"""A launched server's reports to its launcher: where it listens, and that its engine has loaded. JSON lines on a socket
that the server inherits (`serve --announce-fd`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

import msgspec

MAX_LINE_BYTES = 64 * 1024
TOKEN_VARIABLE = "MAITRED_FLEET_TOKEN"  # gives it the fleet's token; no other process sees its environment


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Clients may come; until the engine has loaded they are told so."""

    url: str
    pid: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Requests are welcome; what the start took, in seconds by phase."""

    start_phases: Mapping[str, float]


Announcement = Listening | Loaded
_decode = msgspec.json.Decoder(Announcement).decode
_encode = msgspec.json.Encoder().encode


def announce(fd: int, news: Announcement) -> None:
    """A launcher that is gone needs no news."""
    with suppress(OSError):
        os.write(fd, _encode(news) + b"\n")


class AnnouncementReader:
    """Announcements out of pieces of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Announcement]:
        """Announcements that are whole now. Raises ValueError for what is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        try:
            return [_decode(line) for line in lines]
        except msgspec.DecodeError as error:
            raise ValueError(f"no announcement: {error}") from None

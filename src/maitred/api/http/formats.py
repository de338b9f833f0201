"""Common to all answers of an API, whichever route gives them: error bodies, event streams and their end."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from maitred.api.http.errors import HttpError

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect events
)


class StreamFormat(NamedTuple):
    """Format of answers sent piece by piece: server-sent events (WHATWG HTML, 9.2) by default."""

    end: bytes = b""  # after the last event
    headers: tuple[tuple[bytes, bytes], ...] = SSE_HEADERS
    keep_alive: bytes = b": keep-alive\n\n"  # what readers skip, for silent times; empty where there is no such thing


class DialectFormat(Protocol):
    """How the clients of a dialect are told of errors, and how their streams end. A route names its own."""

    @property
    def stream(self) -> StreamFormat: ...

    @property
    def error_schema(self) -> type[msgspec.Struct]:
        """Schema of error bodies, for the OpenAPI document."""

    def error_body(self, error: HttpError) -> bytes:
        """JSON, with the error's status."""

    def error_event(self, error: HttpError) -> bytes:
        """The error as an event of a stream that has begun, before its end: the status can't change any more."""

"""Bodies as they come: compressed or not, and how much of one is JSON. Needs no extra, for `generate` does not."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from maitred.api.http.errors import UnsupportedMediaType
from maitred.api.http.exchange import Exchange
from maitred.core.errors import InvalidRequest, RequestTooLarge

HEADER_LENGTH = b"inference-header-content-length"
MEDIA_TYPES = (b"application/json", b"application/octet-stream", b"application/x-www-form-urlencoded")
_WINDOWS: Mapping[bytes, int] = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_LEVEL = 1  # of compression: on loopback and in a rack time is dearer than bytes


async def body_of(exchange: Exchange) -> bytes:
    """The body as sent. Only pages of other origins must name its type, so that browsers send a preflight first."""
    media_type = exchange.headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if b"origin" in exchange.headers and media_type not in MEDIA_TYPES[:2]:
        raise UnsupportedMediaType("send the body as application/json or application/octet-stream")
    return await exchange.body()


def inflated(body: bytes, encoding: bytes, limit: int) -> bytes:
    """Raises RequestTooLarge where more than `limit` bytes come out, before they do."""
    if encoding in (b"", b"identity"):
        return body
    if encoding not in _WINDOWS:
        told = encoding[:40].decode("latin-1")
        raise UnsupportedMediaType(f"Content-Encoding {told!r} is not supported; send gzip, deflate or identity")
    stream = zlib.decompressobj(_WINDOWS[encoding])
    try:
        found = stream.decompress(body, limit + 1)
    except zlib.error as error:
        raise InvalidRequest(f"the body is no {encoding.decode()}: {error}") from None
    if len(found) > limit:
        raise RequestTooLarge(f"the body is over the limit of {limit} bytes once it is decompressed")
    if not stream.eof or stream.unused_data:
        raise InvalidRequest(f"the body is not one whole {encoding.decode()} stream")
    return found


def accepted(header: bytes) -> bytes:
    """The coding that Accept-Encoding prefers, if that is gzip or deflate, else empty (RFC 9110, 12.5.3)."""
    best, weight = b"", 0.0
    for each in header.lower().split(b","):
        name, _, parameter = each.partition(b";")
        name, liked = name.strip(), _weight(parameter)
        if (name in _WINDOWS or name == b"identity") and liked > weight:
            best, weight = name, liked
    return best if best in _WINDOWS else b""


def _weight(parameter: bytes) -> float:
    name, _, value = parameter.partition(b"=")
    try:
        return float(value) if name.strip() == b"q" else 1.0
    except ValueError:
        return 0.0


def deflated(body: bytes, encoding: bytes) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOWS[encoding])
    return stream.compress(body) + stream.flush()


def header_length(value: bytes | None, num_bytes: int) -> int:
    """Length of the JSON in a body of `num_bytes`: all of it without the header. Raises InvalidRequest."""
    if value is None:
        return num_bytes
    if not value.isdigit() or len(value) > 18 or int(value) > num_bytes:
        told = value[:40].decode("latin-1")
        raise InvalidRequest(f"Inference-Header-Content-Length must be a number from 0 to {num_bytes}, not {told!r}")
    return int(value)

"""Bodies of requests: memory for all of them, large ones decoded one at a time, by a call whose work is bounded."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import msgspec
from msgspec import Raw

from maitred.core.errors import InvalidRequest, Overloaded, RequestTooLarge

T = TypeVar("T")
# A body up to this is decoded in one call at once: 11 ms, all of it numbers such as 1e300, and 0.1 ms of what is sent
SMALL_BYTES = 16 * 1024
MAX_HELD_BYTES = 256 * 1024 * 1024  # decoded they are up to nine times as much, and mostly twice
MAX_TEXTS = 256 * 1024  # keys are texts too: 65,536 messages of role and content

# "... - at `$.messages[0].content`", and for keys of an object "- at `key` in `$.logit_bias`"
_PATH = re.compile(r" - at (?:`?key`? in )?`\$\.?([^`]*)`$")
_NO_INTEGER = re.compile(r"Expected `int[^`]*`, got `float`")
# a text, which is left alone, or a number that is whole though it is written with a point
_TEXT_OR_WHOLE = re.compile(rb'"(?:[^"\\]|\\.)*"|(?<![\d.eE+-])(-?\d{1,15})\.0{1,15}(?![\deE])')
MAX_WHOLE = 64 * 1024  # of them in a body: so many take 30 ms
_MISSING = re.compile(r"missing required field `([^`]+)`")


class LargeBodies:
    """The bodies over SMALL_BYTES of all connections. Past `max_bytes` the one coming for longest is refused."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_bytes = max(MAX_HELD_BYTES, 2 * max_body_bytes)
        self.num_bytes = 0  # held, until they are tokenised or refused
        self._held: dict[object, int] = {}
        self._coming: dict[object, asyncio.Timeout] = {}  # oldest first
        self._decoding = asyncio.Lock()  # had in order of arrival

    @asynccontextmanager
    async def coming(self, owner: object) -> AsyncIterator[None]:
        """Held while the body of `owner` comes. Raises Overloaded when it is refused for others."""
        try:
            async with asyncio.timeout(None) as self._coming[owner]:
                yield
            if owner not in self._coming:  # it was all there, so nothing was waited for
                raise TimeoutError
        except TimeoutError:
            text = "bodies of requests fill the memory there is for them, and this one has been coming for longest"
            raise Overloaded(f"{text}; send it again", retry_after_s=1.0) from None
        finally:
            self._coming.pop(owner, None)

    def hold(self, owner: object, num_bytes: int) -> None:
        """Note `num_bytes` received of the body of `owner`. Past the limit, refuse the oldest: its wait expires."""
        if owner not in self._coming:  # it is refused, and does not know it yet
            return
        self.num_bytes += num_bytes - self._held.get(owner, 0)
        self._held[owner] = num_bytes
        while self.num_bytes > self.max_bytes and self._coming:
            longest = next(iter(self._coming))
            self._coming.pop(longest).reschedule(0.0)
            self.release(longest)

    def release(self, owner: object) -> None:
        """Give back what `owner` holds, if anything."""
        self.num_bytes -= self._held.pop(owner, 0)

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Around decoding one of them. A decoder has the event loop to itself until it is done, in whatever thread."""
        async with self._decoding:
            for _ in range(2):  # what came during the one before is read, then answered
                await asyncio.sleep(0)
            yield


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Pause garbage collection: decoding makes no garbage, and scanning the whole process takes four times as long."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def check_num_texts(body: bytes) -> None:
    """Raises InvalidRequest for a body that has more texts and keys than can be decoded in a turn."""
    # all that open a text, and those that close one unless a backslash ends it; none that stands within
    if body.count(b'"') - body.count(b'\\"') > 2 * MAX_TEXTS:
        raise InvalidRequest(f"the body has over {MAX_TEXTS} texts and keys in JSON; send fewer", code="too_many_items")


def decode_small(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` decoded and checked; none is long where it may hold anything. Raises InvalidRequest, RequestTooLarge."""
    if len(body) > SMALL_BYTES:
        raise RequestTooLarge(f"the body has {len(body)} bytes; this path takes at most {SMALL_BYTES}")
    return decode_json(body, decoder)


def decode_json(sent: bytes | Raw, decoder: msgspec.json.Decoder[T], *, at: str = "") -> T:
    """`sent` decoded and checked; `at` is where it stood in the body. Every way of being wrong is an InvalidRequest."""
    try:
        return decoder.decode(sent)
    except msgspec.ValidationError as error:
        message = str(error)
        if _NO_INTEGER.match(message):
            whole = _with_integers(bytes(sent))
            if whole != sent:
                return decode_json(whole, decoder, at=at)
        param = _param(message, at)
        where = "" if "missing required" in message else f" at {param}" if param else " as the whole body"
        raise InvalidRequest(_PATH.sub("", message) + where, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _with_integers(sent: bytes) -> bytes:
    """`20.0` as `20`, which some languages cannot write."""
    if sent.count(b".0") > MAX_WHOLE:
        return sent
    return _TEXT_OR_WHOLE.sub(lambda found: found[1] or found[0], sent)


def _param(message: str, at: str) -> str | None:
    """The path of the field that a ValidationError is about."""
    found = _PATH.search(message)
    path = found.group(1).replace("[...]", "") if found else ""  # msgspec does not name the keys of an object
    missing = _MISSING.search(message)
    steps = [step for step in (at, path, missing.group(1) if missing else "") if step]
    return ".".join(steps).replace(".[", "[") or None

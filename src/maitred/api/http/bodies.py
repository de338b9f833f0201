"""Bodies of requests: bounded in memory and decoding time, decoded to structs, unknown fields named."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, UnsetType

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
        text = f"{_PATH.sub('', message)} at {param}" if param else f"{message} as the whole body"
        raise InvalidRequest(f"{param} is missing" if _MISSING.search(message) else text, param=param) from None
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


S = TypeVar("S", bound=msgspec.Struct)
Fields = Mapping[str, Raw]

MAX_NAMED = 4096  # texts in unknown fields of a large body; where there are more, one of these fields is named
_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at |$)", re.DOTALL)
_NONE: Fields = {}
_ABSENT = (NoneType, UnsetType)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


class Sent(NamedTuple, Generic[S]):
    """A body as it was sent."""

    body: S
    refused: Fields = _NONE  # those that the decoder was told of
    unknown: tuple[str, ...] = ()  # unknown fields, nested ones by their path; null is as good as absent


class BodyDecoder(Generic[S]):
    """Decodes JSON objects to `kind`. Fields that `kind` does not have are listed in `refused`, or unknown.

    A struct that takes no other fields is tried first, so a body without any is read once (msgspec stops at the first
    unknown field); a second look at 1 KB takes 5 us. A large body is made of bounded work: 8 MiB of any content take 3
    to 120 ms.
    """

    def __init__(self, kind: type[S], refused: Collection[str] = ()) -> None:
        self.kind, self._refused = kind, frozenset(refused)
        self._names = tuple(field.encode_name for field in msgspec.structs.fields(kind))
        self._expected = self._refused.union(self._names)
        self._nested = {name: frozenset(inner.__struct_encode_fields__) for name, inner in _nested(kind).items()}
        self.known = (*self._names, *(f"{name}.{inner}" for name, of in self._nested.items() for inner in of))
        self._decoder = msgspec.json.Decoder(kind)
        self._exact = msgspec.json.Decoder(_exact(kind))
        raw = [(name, Raw | UnsetType, UNSET) for name in (*self._names, *self._refused)]
        self._raw = msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Raw", raw))
        self._exact_raw = msgspec.json.Decoder(
            msgspec.defstruct(f"{kind.__name__}ExactRaw", raw, forbid_unknown_fields=True)
        )

    def decode(self, body: bytes) -> Sent[S]:
        """Decode in one call. Raises InvalidRequest, whose `param` is the path of the wrong field."""
        if len(body) > SMALL_BYTES:
            with nothing_collected():
                return self._decode_large(body)
        try:
            return Sent(self._exact.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = decode_json(body, self._decoder)
        return self._told(decoded, _fields_of(body))

    def _told(self, decoded: S, fields: Fields) -> Sent[S]:
        refused = self._refused_of(fields)
        unknown = [name for name, value in fields.items() if name not in self._expected and not _is_null(value)]
        return Sent(decoded, refused, (*unknown, *self._unknown_nested(fields)))

    def _refused_of(self, fields: Fields) -> Fields:
        return {name: value for name, value in fields.items() if name in self._refused}

    def _unknown_nested(self, fields: Fields) -> list[str]:
        """Unknown fields of nested settings objects; values with many items, such as messages, are not searched."""
        sent = {name: fields[name] for name in self._nested if name in fields and not _is_null(fields[name])}
        return [
            f"{name}.{inner}"
            for name, value in sent.items()
            if len(memoryview(value)) <= SMALL_BYTES
            for inner, nested in _fields_of(value, at=name).items()
            if inner not in self._nested[name] and not _is_null(nested)
        ]

    def _decode_large(self, body: bytes) -> Sent[S]:
        """Find the fields first, then decode each once: of a repeated field the decoder would keep the last but read
        all, and a number such as 1e300 takes it 9 us. The fields' content is made of texts; a list of anything else
        is short, or its items are cheap.
        """
        check_num_texts(body)
        stranger, found = self._find(body)
        own = {name: found[name] for name in self._names if name in found}
        kept = msgspec.json.encode(own)
        decoded = decode_json(kept, self._decoder)
        _let_go(decoded)
        if stranger is None:
            return Sent(decoded, self._refused_of(found), tuple(self._unknown_nested(own)))
        if body.count(b'"') - msgspec.json.encode(found).count(b'"') > 2 * MAX_NAMED:
            return self._told(decoded, {**found, stranger: Raw()})
        return self._told(decoded, _fields_of(body))

    def _find(self, body: bytes) -> tuple[str | None, Fields]:
        """One unknown field, if there is any, and the fields that are known or refused."""
        stranger = None
        try:
            found = self._exact_raw.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            named = _UNKNOWN.search(str(error))
            stranger = named.group(1) if named else ""
            found = decode_json(body, self._raw)
        values = ((name, getattr(found, name)) for name in found.__struct_fields__)
        return stranger, {name: value for name, value in values if value is not UNSET}


def _fields_of(sent: bytes | Raw, *, at: str = "") -> dict[str, Raw]:
    return decode_json(sent, _FIELDS, at=at)


def _let_go(decoded: msgspec.Struct) -> None:
    """A field that stays undecoded would keep the whole body for as long as it is there."""
    for name in decoded.__struct_fields__:
        value = getattr(decoded, name)
        if isinstance(value, Raw):
            setattr(decoded, name, value.copy())


def _is_null(sent: Raw) -> bool:
    return bytes(sent) == b"null"


def _nested(kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """The fields whose value is one object with fields of its own, or absent."""
    found: dict[str, type[msgspec.Struct]] = {}
    for field in msgspec.structs.fields(kind):
        inner = [one for one in get_args(field.type) or (field.type,) if one not in _ABSENT]
        is_plain = get_origin(field.type) in (None, Union, UnionType) and len(inner) == 1
        if is_plain and isinstance(inner[0], type) and issubclass(inner[0], msgspec.Struct):
            found[field.encode_name] = inner[0]
    return found


def _default(field: msgspec.structs.FieldInfo) -> Any:
    return msgspec.field(default=field.default, default_factory=field.default_factory)  # type: ignore[call-overload]


def _exact(kind: type[S]) -> type[S]:
    """`kind`, with no room for other fields in it or in what is nested in it."""
    nested = _nested(kind)
    fields: list[tuple[str, Any, Any]] = [
        (field.name, _exact(nested[field.encode_name]) | NoneType | UnsetType, _default(field))
        for field in msgspec.structs.fields(kind)
        if field.encode_name in nested
    ]
    return msgspec.defstruct(  # type: ignore[return-value]
        kind.__name__, fields, bases=(kind,), forbid_unknown_fields=True, kw_only=True
    )

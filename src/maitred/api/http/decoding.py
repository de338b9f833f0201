"""JSON to what a route reads: every way of being wrong is an InvalidRequest, and what is long is decoded in pieces."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.errors import InvalidRequest

T = TypeVar("T")
Pieces = Generator[None, None, T]
"""Work in pieces of some milliseconds: it yields where others may have the event loop, and returns what it made."""
PIECE_BYTES = 1024 * 1024  # takes 1 to 15 ms, whatever is in it; finding the parts of 32 MiB takes 28
PIECE_ITEMS = 64 * 1024
ESCAPE_CHARS = 6  # \uXXXX

# "... - at `$.messages[0].content`", and for keys of an object "- at `key` in `$.logit_bias`"
_PATH = re.compile(r" - at (?:`?key`? in )?`\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_FIRST_INDEX = re.compile(r"^\[(\d+)\]")
_COMMA, _QUOTE = re.compile(rb","), re.compile(rb'"')
_LOW_SURROGATE = re.compile(rb"\\u[dD][c-fC-F]")
_STUBS = {b'"': b'""', b"[": b"[]", b"{": b"{}"}  # of the type that begins so


def decode_json(sent: bytes | memoryview, decoder: msgspec.json.Decoder[T], *, at: str = "", first: int = 0) -> T:
    """`sent` decoded and checked. `at` is where it stood, and `first` the index there of its item 0, if it is a list;
    an error's `param` is the path of the wrong field.
    """
    try:
        return decoder.decode(sent)
    except msgspec.ValidationError as error:
        message = str(error)
        param = _param(message, at, first)
        where = "" if "missing required" in message else f" at {param}" if param else " as the whole body"
        raise InvalidRequest(_PATH.sub("", message) + where, param=param) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None


def _param(message: str, at: str, first: int) -> str | None:
    """The path of the field that a ValidationError is about."""
    found = _PATH.search(message)
    path = found.group(1).replace("[...]", "") if found else ""  # msgspec does not name the keys of an object
    path = _FIRST_INDEX.sub(lambda index: f"[{int(index[1]) + first}]", path)
    missing = _MISSING.search(message)
    steps = [step for step in (at, path, missing.group(1) if missing else "") if step]
    return ".".join(steps).replace(".[", "[") or None


def decode(sent: bytes | memoryview, kind: Any, *, at: str = "") -> Pieces[Any]:
    """`sent`, one JSON value, as `kind`: what decode_json gives, in pieces where it is long.

    An object or a list is opened with its parts undecoded, and those that are long are decoded each for itself.
    """
    if len(sent) > PIECE_BYTES:
        sent, opening = memoryview(sent), bytes(sent[:1])
        for option in _options(kind):
            in_pieces = _IN_PIECES.get((opening, _shape(option)))
            if in_pieces is not None:
                return (yield from in_pieces(sent, option, at))
    return decode_json(sent, _decoder(kind), at=at)


def _options(kind: Any) -> tuple[Any, ...]:
    """What a value of `kind` may be."""
    if get_origin(kind) is Annotated:
        return _options(get_args(kind)[0])
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _shape(kind: Any) -> Any:
    """What of a type says how it is decoded in pieces."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return msgspec.Struct
    return kind if kind == list[int] else get_origin(kind) or kind


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _undecoded(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    """Finds the fields of a struct."""
    fields: list[tuple[str, Any, Any]] = [
        (field.name, Raw | UnsetType, UNSET) for field in msgspec.structs.fields(kind)
    ]
    return msgspec.json.Decoder(msgspec.defstruct(f"{kind.__name__}Undecoded", fields))


def _struct(sent: memoryview, kind: type[msgspec.Struct], at: str) -> Pieces[msgspec.Struct]:
    """Decoded with an empty text, list or object for each long field, which is put there afterwards."""
    found = decode_json(sent, _undecoded(kind), at=at)
    yield
    short, long = [], {}
    for field in msgspec.structs.fields(kind):
        raw = getattr(found, field.name)
        if raw is UNSET:
            continue
        value = memoryview(raw)
        if len(value) > PIECE_BYTES:
            path = f"{at}.{field.name}" if at else field.name
            stub = _STUBS.get(bytes(value[:1]))
            if stub is None:
                raise InvalidRequest(f"{path} is a number of {len(value)} characters", param=path)
            long[field.name], value = (value, field.type, path), memoryview(stub)
        short.append(b"".join((b'"', field.encode_name.encode(), b'":', value)))
    struct: msgspec.Struct = decode_json(b"{%b}" % b",".join(short), _decoder(kind), at=at)
    for name, (value, field_kind, path) in long.items():
        yield
        is_raw = Raw in _options(field_kind)
        setattr(struct, name, Raw(value) if is_raw else (yield from decode(value, field_kind, at=path)))
    return struct


def _list(sent: memoryview, kind: Any, at: str) -> Pieces[list[Any]]:
    """As many short items at once as are no longer than a piece, long ones for themselves."""
    items = decode_json(sent, _decoder(list[Raw]), at=at)
    (item_kind,) = get_args(kind)
    whole: list[Any] = []
    waiting: list[Raw] = []
    num_bytes = 0

    def decode_waiting() -> list[Any]:
        batch: list[Any] = decode_json(b"[%b]" % b",".join(waiting), _decoder(kind), at=at, first=len(whole))
        waiting.clear()
        return batch

    for item in items:
        size = len(memoryview(item))
        if num_bytes + size > PIECE_BYTES or len(waiting) == PIECE_ITEMS:
            yield
            whole += decode_waiting()
            num_bytes = 0
        if size > PIECE_BYTES:
            whole.append((yield from decode(memoryview(item), item_kind, at=f"{at}[{len(whole)}]")))
        else:
            waiting.append(item)
            num_bytes += size
    yield
    return whole + decode_waiting()


def _integers(sent: memoryview, kind: Any, at: str) -> Pieces[list[int]]:
    """Cut at commas, which are nothing else in a list of integers."""
    whole: list[int] = []
    start = 0
    while start < len(sent):
        comma = _COMMA.search(sent, start + PIECE_BYTES)
        stop = comma.start() if comma else len(sent)
        text = _QUOTE.search(sent, start, stop)  # wrong, and its commas are not the list's
        end = b'""]' if text else b"]" if comma else b""
        piece = b"".join((b"[0" if start else b"", sent[start : text.start() if text else stop], end))
        numbers: list[int] = decode_json(piece, _decoder(kind), at=at, first=len(whole) - bool(start))
        if start:
            del numbers[0]
        whole += numbers
        start = stop
        yield
    return whole


def _text(sent: memoryview, kind: Any, at: str) -> Pieces[str]:
    """Cut between characters."""
    texts: list[str] = []
    start, end = 1, len(sent) - 1
    while start < end:
        stop = _between_characters(sent, start, start + PIECE_BYTES) if start + PIECE_BYTES < end else end
        texts.append(decode_json(b"".join((b'"', sent[start:stop], b'"')), _decoder(kind), at=at))
        start = stop
        yield
    return "".join(texts)


def _between_characters(sent: memoryview, start: int, stop: int) -> int:
    """At `stop` or just before it, where neither an escape, a surrogate pair nor a character's bytes are cut. `start`
    is such a place, too.
    """
    escape = bytes(sent[stop - ESCAPE_CHARS : stop]).rfind(b"\\")
    if escape >= 0:
        escape += stop - ESCAPE_CHARS
        before = bytes(sent[start:escape])
        if (len(before) - len(before.rstrip(b"\\"))) % 2 == 0:  # it is not itself what is escaped
            return escape - ESCAPE_CHARS if _LOW_SURROGATE.match(sent, escape) else escape
    for _ in range(3):
        if sent[stop] & 0xC0 == 0x80:  # not the first byte of a character in UTF-8
            stop -= 1
    return stop


# what a value begins with, and what it is to be
_IN_PIECES: dict[tuple[bytes, Any], Callable[[memoryview, Any, str], Pieces[Any]]] = {
    (b'"', str): _text,
    (b"[", list[int]): _integers,
    (b"[", list): _list,
    (b"{", msgspec.Struct): _struct,
}

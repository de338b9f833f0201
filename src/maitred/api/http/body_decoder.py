"""Bodies decoded to structs, and the fields that a struct does not have: looked for only where there are some."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import NoneType, UnionType
from typing import Any, Generic, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.http.bodies import SMALL_BYTES, check_num_texts, decode_json, nothing_collected

T = TypeVar("T", bound=msgspec.Struct)
Fields = Mapping[str, Raw]

MAX_NAMED = 4096  # texts in unknown fields of a large body; where there are more, one of these fields is named
_UNKNOWN = re.compile(r"unknown field `(.*?)`(?: - at |$)", re.DOTALL)
_NONE: Fields = {}
_ABSENT = (NoneType, UnsetType)
_FIELDS = msgspec.json.Decoder(dict[str, Raw])


class Sent(NamedTuple, Generic[T]):
    """A body as it was sent."""

    body: T
    refused: Fields = _NONE  # those that the decoder was told of
    unknown: tuple[str, ...] = ()  # unknown fields, nested ones by their path; null is as good as absent


class BodyDecoder(Generic[T]):
    """Decodes JSON objects to `kind`. Fields that `kind` does not have are listed in `refused`, or unknown.

    A struct that takes no other fields is tried first, so a body without any is read once (msgspec stops at the first
    unknown field); a second look at 1 KB takes 5 us. A large body is made of bounded work: 8 MiB of any content take 3
    to 120 ms.
    """

    def __init__(self, kind: type[T], refused: Collection[str] = ()) -> None:
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

    def decode(self, body: bytes) -> Sent[T]:
        """Decode in one call. Raises InvalidRequest, whose `param` is the path of the wrong field."""
        if len(body) > SMALL_BYTES:
            with nothing_collected():
                return self._decode_large(body)
        try:
            return Sent(self._exact.decode(body))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            decoded = decode_json(body, self._decoder)
        return self._told(decoded, _fields_of(body))

    def _told(self, decoded: T, fields: Fields) -> Sent[T]:
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

    def _decode_large(self, body: bytes) -> Sent[T]:
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


def _exact(kind: type[T]) -> type[T]:
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

"""Raw contents of a protobuf message: large fields of bytes are looked at where they lie, and written in one piece.

Protobuf's own parser copies them twice, into its memory and out of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from maitred.core.tensor_request import Buffer

_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


class Split(NamedTuple):
    """A message's bytes without one field, and the contents of that field, which are views."""

    message: bytes
    contents: list[memoryview]


def split(content: bytes, number: int) -> Split:
    """Takes the field of bytes `number` out of a message. Raises ValueError where bytes end early or fit no field."""
    view, contents, kept, kept_from = memoryview(content), [], [], 0
    for start, found, body, end in _fields(content):
        if found == number:
            contents.append(view[body:end])
            kept.append(view[kept_from:start])
            kept_from = end
    return Split(b"".join([*kept, view[kept_from:]]) if contents else content, contents)


def joined(message: bytes, number: int, contents: Iterable[Buffer]) -> bytes:
    """A message with a repeated field of bytes after its other fields: each content is copied once."""
    parts: list[Buffer] = [message]
    for content in contents:
        flat = memoryview(content).cast("B") if memoryview(content).nbytes else b""
        parts += (_varint(number << 3 | _BYTES) + _varint(len(flat)), flat)
    return b"".join(parts)


def _fields(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield for each field its start, number, and where its value starts and ends."""
    at, size = 0, len(content)
    while at < size:
        start = at
        key, at = _read_varint(content, at)
        kind = key & 7
        if kind == _VARINT:
            length = _read_varint(content, at)[1] - at
        elif kind == _BYTES:
            length, at = _read_varint(content, at)
        elif kind in _FIXED:
            length = _FIXED[kind]
        else:
            raise ValueError(f"at byte {start} no field begins")
        if length > size - at:
            raise ValueError(f"at byte {start} a field has {length} bytes, and {size - at} are left")
        yield start, key >> 3, at, at + length
        at += length


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    """The number, and where it ends."""
    value = 0
    for index, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value, at + index + 1
    raise ValueError(f"at byte {at} a number does not end")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))

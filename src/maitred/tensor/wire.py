"""Protobuf's wire format in a file, walked by offsets: what is not asked for is stepped over, however large it is.

A model of 2 GB without a look at its weights costs the pages that hold the heads of its fields. The file is read
and not mapped: one that is cut short meanwhile gives an error, not a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

WINDOW_BYTES = 64 << 10
_VARINT, _BYTES = 0, 2
_FIXED = {1: 8, 5: 4}


class Span(NamedTuple):
    """Bytes of the file from `start` up to `end`."""

    start: int
    end: int


class WireField(NamedTuple):
    """One field: the number of a varint, or where its bytes stand."""

    number: int
    value: int | Span


class WireFile:
    """An open file of one message. Methods raise ValueError, with the offset, where bytes end early or fit no field."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._window, self._start = b"", 0

    def fields(self, span: Span) -> Iterator[WireField]:
        """The fields of the message that stands there."""
        at, end = span
        while at < end:
            start = at
            key, at = self._varint(at, end)
            number, kind = key >> 3, key & 7
            if kind == _VARINT and number:
                value, at = self._varint(at, end)
                yield WireField(number, value)
                continue
            if not number or (kind != _BYTES and kind not in _FIXED):
                raise ValueError(f"at byte {start} no field begins")
            size, at = self._varint(at, end) if kind == _BYTES else (_FIXED[kind], at)
            if size > end - at:
                raise ValueError(f"at byte {start} a field has {size} bytes, and {end - at} are left")
            yield WireField(number, Span(at, at + size))
            at += size

    def read(self, span: Span, most_bytes: int = 1 << 20) -> bytes:
        if span.end - span.start > most_bytes:
            raise ValueError(f"at byte {span.start} a name or a type has {span.end - span.start} bytes")
        content = os.pread(self._descriptor, span.end - span.start, span.start)
        if len(content) < span.end - span.start:
            raise ValueError(f"the file ends at byte {span.start + len(content)}")
        return content

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        """The unsigned number at an offset, and the offset after it."""
        if not self._start <= at <= self._start + len(self._window) - 10:
            self._window, self._start = os.pread(self._descriptor, WINDOW_BYTES, at), at
        value, window, first = 0, self._window, at - self._start
        for index in range(first, min(first + 10, len(window), end - self._start)):
            value |= (window[index] & 0x7F) << 7 * (index - first)
            if window[index] < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, self._start + index + 1
        raise ValueError(f"at byte {at} a number does not end")

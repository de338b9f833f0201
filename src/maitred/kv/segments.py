"""Segment files of the KV disk tier: rows of equal size in one file (`.kv`), and an entry for each in another (`.kvi`).

Both are only ever appended to, rows before their entries, by the process that made them: after a restart a new segment
is begun. A row counts if its entry does: the entry holds the key and the row's checksum, and has one of its own, over
the segment's id and the row's number too. So a torn or flipped file, or half of another one, is never taken for a row.
An entry of zeros was deleted. Names are random.
"""

from __future__ import annotations

import os
import re
import secrets
import struct
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.kernels import _native
from maitred.kv.tiers import DropReason

FILE_VERSION = 1
ROWS, INDEX = ".kv", ".kvi"

_NAME = re.compile(r"([0-9a-f]{32})\.kvi?")
_MAGIC = b"maitreKV"
_HEADER = struct.Struct("<8sIIQ16s16x32sQ")  # magic, version, 0, bytes of a row, id, zeros, fingerprint, checksum
_ENTRY = np.dtype([("key", "V32"), ("row_sum", "<u8"), ("entry_sum", "<u8")])
HEADER_BYTES, ENTRY_BYTES = _HEADER.size, _ENTRY.itemsize
Sums = NDArray[np.uint64]


class SegmentLayout(NamedTuple):
    """Properties that the segments of a folder have in common; others are not ours to read."""

    row_bytes: int
    fingerprint: bytes  # 32


class Unusable(Exception):
    """Why a segment's blocks are none."""

    def __init__(self, reason: DropReason, num_blocks: int) -> None:
        super().__init__(reason)
        self.reason, self.num_blocks = reason, num_blocks


@dataclass(slots=True, eq=False)
class Segment:
    """One segment that is there. `keys[row]` is None for a row that does not count."""

    folder: Path
    segment_id: bytes
    row_bytes: int
    base: int  # the place of row 0 among all places
    keys: list[bytes | None]
    sums: Sums  # of the rows; at least as many as keys
    num_bytes: int  # of both files
    used: int = 0  # when it was of use, in uses; the least goes first
    fds: list[int] = field(default_factory=list)  # rows and index, while it is appended to

    def path(self, suffix: str) -> Path:
        return self.folder / (self.segment_id.hex() + suffix)

    def read(self, first: int, into: memoryview) -> int:
        """Rows from `first` on into `into`; how many whole ones there were. Raises OSError."""
        fd = os.open(self.path(ROWS), os.O_RDONLY | os.O_NOFOLLOW)
        try:
            return _read(fd, first * self.row_bytes, into) // self.row_bytes
        finally:
            os.close(fd)

    def append(self, keys: Sequence[bytes], rows: memoryview) -> None:
        """Raises OSError, with nothing appended that counts; then it must be sealed."""
        first, (rows_fd, index_fd) = len(self.keys), self.fds
        entries = np.zeros(len(keys), _ENTRY)
        entries["key"] = np.frombuffer(b"".join(keys), "V32")
        entries["row_sum"] = sums = checksums(rows, len(keys))
        entries["entry_sum"] = _entry_sums(entries, self.segment_id, first)
        try:
            _write(rows_fd, first * self.row_bytes, rows)
            _write(index_fd, HEADER_BYTES + first * ENTRY_BYTES, memoryview(entries.tobytes()))
        except OSError:
            with suppress(OSError):
                os.ftruncate(index_fd, HEADER_BYTES + first * ENTRY_BYTES)
                os.ftruncate(rows_fd, first * self.row_bytes)
            raise
        self.sums[first : first + len(keys)] = sums
        self.num_bytes += len(rows) + entries.nbytes
        self.keys += keys

    def seal(self) -> None:
        """No more rows; the files are closed."""
        while self.fds:
            os.close(self.fds.pop())

    def erase(self, rows: Sequence[int]) -> None:
        """Write zeros over these rows' entries. Raises OSError."""
        fd = os.open(self.path(INDEX), os.O_WRONLY | os.O_NOFOLLOW)
        try:
            for row in rows:
                _write(fd, HEADER_BYTES + row * ENTRY_BYTES, memoryview(bytes(ENTRY_BYTES)))
        finally:
            os.close(fd)

    def mark_used(self) -> None:
        """Note a use, for the order after a restart."""
        with suppress(OSError):
            os.utime(self.path(INDEX))

    def delete(self) -> None:
        self.seal()
        delete_files(self.folder, self.segment_id.hex())


def delete_files(folder: Path, name: str) -> None:
    """The index first: rows alone are nothing."""
    for suffix in (INDEX, ROWS):
        with suppress(OSError):
            os.unlink(folder / (name + suffix))


def create(folder: Path, layout: SegmentLayout, base: int, most_rows: int) -> Segment:
    """An empty segment to append to. Raises OSError, with no files left."""
    segment_id = secrets.token_bytes(16)
    segment = Segment(folder, segment_id, layout.row_bytes, base, [], np.zeros(most_rows, np.uint64), HEADER_BYTES)
    try:
        for suffix in (ROWS, INDEX):
            segment.fds.append(os.open(segment.path(suffix), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        _write(segment.fds[1], 0, memoryview(_header(layout, segment_id)))
    except OSError:
        segment.delete()
        raise
    return segment


def names_by_use(folder: Path) -> list[str]:
    """Names of the segments that are there, those of use longest ago first."""
    matches = [match for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]
    return sorted({match[1] for match in matches}, key=lambda name: _used_at(folder / (name + INDEX)))


def _used_at(index: Path) -> float:
    with suppress(OSError):
        return os.stat(index).st_mtime
    return 0.0


def load(folder: Path, name: str, layout: SegmentLayout, base: int) -> tuple[Segment, Counter[DropReason]]:
    """The segment of that name (32 hex digits), and which of its blocks do not count any more.

    Raises Unusable where none does.
    """
    index = _content(folder / (name + INDEX))
    entries = np.frombuffer(index[HEADER_BYTES : len(index) - (len(index) - HEADER_BYTES) % ENTRY_BYTES], _ENTRY)
    segment_id = _check_header(index, layout, len(entries))
    if segment_id.hex() != name or not len(entries):  # killed before its first block
        raise Unusable(DropReason.FOREIGN, len(entries))
    try:
        num_bytes = os.stat(folder / (name + ROWS)).st_size
    except OSError:
        raise Unusable(DropReason.TORN, len(entries)) from None
    segment = Segment(folder, segment_id, layout.row_bytes, base, [], entries["row_sum"].copy(), num_bytes + len(index))
    return segment, _take_entries(segment, entries, num_bytes // layout.row_bytes, index)


def _take_entries(segment: Segment, entries: NDArray[Any], num_rows: int, index: bytes) -> Counter[DropReason]:
    """Fills the keys of those that count; the others are erased, so that they are counted once."""
    count = len(entries)
    is_deleted = entries["entry_sum"] == 0
    is_good = _entry_sums(entries, segment.segment_id, 0) == entries["entry_sum"]
    is_whole = np.arange(count) < num_rows
    segment.keys = entries["key"].tolist()
    bad = np.flatnonzero(~(is_good & is_whole)).tolist()
    for row in bad:
        segment.keys[row] = None
    part = (len(index) - HEADER_BYTES) % ENTRY_BYTES
    drops = Counter({DropReason.DAMAGED: int((~is_good & ~is_deleted).sum())})
    drops[DropReason.TORN] = int((is_good & ~is_whole).sum()) + (part > 0)
    with suppress(OSError):  # read-only
        if drops.total():
            segment.erase(bad)
        if part:
            os.truncate(segment.path(INDEX), len(index) - part)
        if num_rows > count:  # their writer was killed before it wrote the entries
            os.truncate(segment.path(ROWS), count * segment.row_bytes)
    return drops


def _check_header(index: bytes, layout: SegmentLayout, num_blocks: int) -> bytes:
    """The segment's id. Raises Unusable."""
    segment_id: bytes
    if len(index) < HEADER_BYTES:
        raise Unusable(DropReason.TORN, 1)
    magic, version, _, row_bytes, segment_id, fingerprint, checksum = _HEADER.unpack_from(index)
    if magic != _MAGIC:
        raise Unusable(DropReason.FOREIGN, num_blocks)
    if version != FILE_VERSION:
        raise Unusable(DropReason.OLDER, num_blocks)
    if _checksum(index[: HEADER_BYTES - 8]) != checksum:
        raise Unusable(DropReason.DAMAGED, num_blocks)
    if fingerprint != layout.fingerprint or row_bytes != layout.row_bytes:
        raise Unusable(DropReason.FOREIGN, num_blocks)
    return segment_id


def _header(layout: SegmentLayout, segment_id: bytes) -> bytes:
    fields = (_MAGIC, FILE_VERSION, 0, layout.row_bytes, segment_id, layout.fingerprint)
    return _HEADER.pack(*fields, _checksum(_HEADER.pack(*fields, 0)[:-8]))


def checksums(rows: memoryview, count: int) -> Sums:
    """Checksum of each of `count` equal rows; the GIL is released once for all."""
    sums = np.empty(count, np.uint64)
    if count:
        _native.checksum_rows(_native.ThreadPool(1), np.frombuffer(rows, np.uint8).reshape(count, -1), sums)
    return sums


def _entry_sums(entries: NDArray[Any], segment_id: bytes, first_row: int) -> Sums:
    """Sums, with the segment's id and row's number where the sum will stand. Never 0: that is a deleted one."""
    bound = entries.copy()
    numbers = np.arange(first_row, first_row + len(entries), dtype=np.uint64)
    bound["entry_sum"] = numbers + np.frombuffer(segment_id, np.uint64)[0]
    sums = checksums(memoryview(bound.tobytes()), len(bound))
    return np.maximum(sums, np.uint64(1))


def _checksum(content: bytes) -> int:
    return int(_native.checksum(_native.ThreadPool(1), np.frombuffer(content, np.uint8)))


def _content(path: Path) -> bytes:
    """Raises Unusable where there is nothing to read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            return file.read()
    except FileNotFoundError:
        raise Unusable(DropReason.TORN, 1) from None
    except OSError:
        raise Unusable(DropReason.FAILED, 1) from None


def _read(fd: int, begin: int, into: memoryview) -> int:
    done = 0
    while done < len(into) and (count := os.preadv(fd, [into[done:]], begin + done)):
        done += count
    return done


def _write(fd: int, begin: int, content: memoryview) -> None:
    while content:
        count = os.pwrite(fd, content, begin)
        begin, content = begin + count, content[count:]

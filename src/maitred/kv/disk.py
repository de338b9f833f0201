"""KV disk tier: blocks in segment files of a private folder, found by an index in memory, evicted by segment (LRU).

Reading and writing are done by the caller's threads; no method waits for another one's I/O but a write for a write.
Writes are left to the page cache: what a kill leaves is whole, and what a power cut leaves is checked when it is read.
A folder has one owner. On a full disk the tier goes on without storing, and tries again after a while; one that cannot
be written is still read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import logging
import os
import re
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import ConfigError
from maitred.kernels.kv_pool import checksum, checksums
from maitred.kv.prefix_cache import Changes
from maitred.kv.tiers import MAX_HELD, DropReason, KVTier, TierStats
from maitred.storage.files import private_folder

logger = logging.getLogger(__name__)

# -- the folder: private, of one server at a time, with the secret that salts its prefix hashes

SALT_BYTES = 32
_LOCK, _SALT = "lock", "salt"


class OwnedFolder(NamedTuple):
    """A folder that no other server uses while `fd` is open."""

    fd: int
    why_not: OSError | None
    """Why nothing can be written in it."""


def own_folder(folder: Path) -> OwnedFolder:
    """Lock the folder; raises ConfigError naming the server that holds it. The lock dies with the process."""
    fd, why_not = _open_lock(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        who = _content(folder / _LOCK).decode(errors="replace").strip() or "another server"
        os.close(fd)
        raise ConfigError(f"--kv-disk {folder} is in use by {who}; give each server a folder of its own") from None
    if why_not is None:
        with suppress(OSError):  # full: the holder stays unnamed, and the folder is owned still
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return OwnedFolder(fd, why_not)


def _open_lock(folder: Path) -> tuple[int, OSError | None]:
    """Something to lock: the file, or the folder itself where the file cannot be made."""
    try:
        return os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), None
    except OSError as error:
        why_not = error
    for path in (folder / _LOCK, folder):
        with suppress(OSError):
            return os.open(path, os.O_RDONLY | os.O_NOFOLLOW), why_not
    raise ConfigError(f"--kv-disk {folder} cannot be used: {why_not.strerror}; name a folder of your own")


def salt_secret(path: str | Path) -> bytes:
    """The 32 bytes that salt the hashes of what lies in the folder, drawn once. Raises ConfigError as `private_folder`.

    Where they cannot be kept they are drawn for this start alone, and nothing of earlier starts is found.
    """
    file = private_folder(Path(path), "--kv-disk") / _SALT
    if len(kept := _content(file)) == SALT_BYTES:
        return kept
    secret = secrets.token_bytes(SALT_BYTES)
    draft = file.with_name(f"{_SALT}.{secrets.token_hex(8)}")
    try:
        if kept:
            logger.warning(
                "%s holds %d bytes and not %d; it is drawn anew, as for an empty folder", file, len(kept), 32
            )
            file.unlink()
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(fd, secret)
            os.fsync(fd)
        finally:
            os.close(fd)
        with suppress(FileExistsError):  # of two that start at once, the first one's stays
            os.link(draft, file)
        return _content(file)
    except OSError as error:
        logger.warning("%s cannot be kept (%s); what is in the folder will not be found", file, error.strerror)
        return secret
    finally:
        draft.unlink(missing_ok=True)


def _content(file: Path) -> bytes:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    try:
        return os.read(fd, 256)
    except OSError:
        return b""
    finally:
        os.close(fd)


# -- segments: rows of equal size in one file (`.kv`), and an entry for each in another (`.kvi`)
#
# Both are only ever appended to, rows before their entries, by the process that made them: after a restart a new
# segment is begun. A row counts if its entry does: the entry holds the key and the row's checksum, and has one of its
# own, over the segment's id and the row's number too. So a torn or flipped file, or half of another one, is never taken
# for a row. An entry of zeros was deleted. Names are random.

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


def create_segment(folder: Path, layout: SegmentLayout, base: int, most_rows: int) -> Segment:
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


def load_segment(folder: Path, name: str, layout: SegmentLayout, base: int) -> tuple[Segment, Counter[DropReason]]:
    """The segment of that name (32 hex digits), and which of its blocks do not count any more.

    Raises Unusable where none does.
    """
    index = _index_of(folder / (name + INDEX))
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
    magic, version, _, row_bytes, segment_id, fingerprint, total = _HEADER.unpack_from(index)
    if magic != _MAGIC:
        raise Unusable(DropReason.FOREIGN, num_blocks)
    if version != FILE_VERSION:
        raise Unusable(DropReason.OLDER, num_blocks)
    if checksum(index[: HEADER_BYTES - 8]) != total:
        raise Unusable(DropReason.DAMAGED, num_blocks)
    if fingerprint != layout.fingerprint or row_bytes != layout.row_bytes:
        raise Unusable(DropReason.FOREIGN, num_blocks)
    return segment_id


def _header(layout: SegmentLayout, segment_id: bytes) -> bytes:
    fields = (_MAGIC, FILE_VERSION, 0, layout.row_bytes, segment_id, layout.fingerprint)
    return _HEADER.pack(*fields, checksum(_HEADER.pack(*fields, 0)[:-8]))


def _entry_sums(entries: NDArray[Any], segment_id: bytes, first_row: int) -> Sums:
    """Sums, with the segment's id and row's number where the sum will stand. Never 0: that is a deleted one."""
    bound = entries.copy()
    numbers = np.arange(first_row, first_row + len(entries), dtype=np.uint64)
    bound["entry_sum"] = numbers + np.frombuffer(segment_id, np.uint64)[0]
    sums = checksums(memoryview(bound.tobytes()), len(bound))
    return np.maximum(sums, np.uint64(1))


def _index_of(path: Path) -> bytes:
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


# -- the tier

SEGMENT_BYTES = 64 * 2**20
RETRY_S = 10.0  # after a write failed
_MOST_ROWS = 2**32
_READ_BYTES = 8 * 2**20  # read and verified while they are in the processor's cache
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def open_kv_disk(
    path: str | Path, *, max_bytes: int, bytes_per_block: int, fingerprint: str, retry_s: float = RETRY_S
) -> KVDisk:
    """The tier of a folder, which is made if it is not there.

    Raises ConfigError, one line with the remedy: the folder is another server's or open to others, the bound is below
    one block.
    """
    least = bytes_per_block + ENTRY_BYTES + HEADER_BYTES
    if max_bytes < least:
        raise ConfigError(f"--kv-disk-max-bytes is {max_bytes}, and one block takes {least}; give that or more")
    layout = SegmentLayout(bytes_per_block, hashlib.sha256(fingerprint.encode()).digest())
    folder = private_folder(Path(path), "--kv-disk")
    disk = KVDisk(folder, own_folder(folder), layout, max_bytes=max_bytes, retry_s=retry_s)
    disk.load()
    return disk


class _Span(NamedTuple):
    """Consecutive rows of a segment."""

    segment: Segment
    first: int
    num_rows: int


class KVDisk(KVTier):
    """Made by `open_kv_disk`."""

    name = "disk"

    def __init__(
        self, folder: Path, owned: OwnedFolder, layout: SegmentLayout, *, max_bytes: int, retry_s: float
    ) -> None:
        self.bytes_per_block, self.max_bytes, self.stats = layout.row_bytes, max_bytes, TierStats()
        self._folder, self._owned, self._layout = folder, owned, layout
        self._retry_s, self._is_closed = retry_s, False
        per_segment = min(SEGMENT_BYTES, max_bytes // 8)  # eviction takes a small part
        self._rows_per_segment = max(1, per_segment // (layout.row_bytes + ENTRY_BYTES))
        self._lock = threading.Lock()  # of the books and changes, never held over I/O
        self._places: dict[bytes, int] = {}  # key -> segment's base + row
        self._segments: dict[int, Segment] = {}  # by base
        self._bases = itertools.count(0, _MOST_ROWS)
        self._num_uses = 1
        self._writing = threading.Lock()  # held by the thread that writes files
        self._active: Segment | None = None
        self._not_storing: DropReason | None = None  # why, and until when
        self._again_at = 0.0

    # ---- KVTier

    def tell_changes(self, wanted: bool) -> None:
        with self._lock:
            self.changes = Changes(itertools.islice(reversed(self._places), MAX_HELD)) if wanted else None

    def take_changes(self, most: int) -> tuple[list[bytes], list[bytes]]:
        with self._lock:
            return super().take_changes(most)

    def num_known(self, keys: Sequence[bytes]) -> int:
        places = self._places
        for i, key in enumerate(keys):
            if key not in places:
                return i
        return len(keys)

    def read(self, keys: Sequence[bytes], into: memoryview) -> int:
        into, num_read = into.cast("B"), 0
        for span in self._spans(keys):
            rows = into[num_read * self.bytes_per_block :][: span.num_rows * self.bytes_per_block]
            count = self._read_span(span, rows)
            num_read += count
            if count < span.num_rows:
                break
        with self._lock:
            self.stats.num_hits += num_read
            self.stats.num_misses += len(keys) - num_read
        return num_read

    def write(self, keys: Sequence[bytes], rows: memoryview) -> int:
        rows, size = rows.cast("B"), self.bytes_per_block
        with self._writing:
            if self._is_closed:
                return 0
            fresh = [i for i, key in enumerate(keys) if key not in self._places]
            for run in _runs(fresh, len(fresh)):
                begin, end = fresh[run.start], fresh[run.stop - 1] + 1
                self._store(keys[begin:end], rows[begin * size : end * size])
        return self.num_known(keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for base in {_base_of(place) for key in keys if (place := self._places.get(key)) is not None}:
                self._use(self._segments[base])

    def clear(self) -> int:
        with self._writing:
            count = len(self._places)
            self._remove(list(self._segments.values()))
        return count

    def close(self) -> None:
        with self._writing:
            if self._is_closed:
                return
            self._is_closed = True
            self._retire_active()
            with self._lock:
                self._places = {}
            os.close(self._owned.fd)

    # ---- reading

    def _spans(self, keys: Sequence[bytes]) -> list[_Span]:
        """Spans of the longest known prefix; the segments that are read count as used now."""
        most = max(1, _READ_BYTES // self._layout.row_bytes)
        with self._lock:
            places = list(itertools.takewhile(lambda place: place >= 0, (self._places.get(key, -1) for key in keys)))
            spans = [
                _Span(self._segments[_base_of(places[run.start])], places[run.start] % _MOST_ROWS, len(run))
                for run in _runs(places, most)
            ]
            fresh = [span.segment for span in spans if self._use(span.segment)]
        for segment in fresh:
            segment.mark_used()
        return spans

    def _read_span(self, span: _Span, into: memoryview) -> int:
        """Verified rows; how many from the front. Those that are bad are deleted."""
        segment, first, count = span
        try:
            num_whole = segment.read(first, into)
        except FileNotFoundError:
            num_whole = 0
        except OSError:
            self._forget(segment, range(first, first + count), DropReason.FAILED)
            return 0
        sums = checksums(into[: num_whole * segment.row_bytes], num_whole)
        bad = np.flatnonzero(sums != segment.sums[first : first + num_whole]).tolist()
        self._forget(segment, range(first + num_whole, first + count), DropReason.TORN)
        self._forget(segment, [first + row for row in bad], DropReason.DAMAGED)
        return bad[0] if bad else num_whole

    def _forget(self, segment: Segment, rows: Sequence[int], reason: DropReason) -> None:
        """Blocks that are none. Those of an evicted segment are not there to be forgotten."""
        if not rows:
            return
        with self._lock:
            gone = [row for row in rows if self._drop_place(segment, row)]
            self.stats.dropped[reason] += len(gone)
            self.stats.num_blocks = len(self._places)
        if gone and not self._is_closed:
            with suppress(OSError):
                segment.erase(gone)

    # ---- writing; only while `_writing` is held

    def _store(self, keys: Sequence[bytes], rows: memoryview) -> None:
        size = self.bytes_per_block
        while keys:
            if self._not_storing is not None and time.monotonic() < self._again_at:
                self._count_drops({self._not_storing: len(keys)})
                return
            try:
                count = self._append(keys, rows)
            except OSError as error:
                self._stop_storing(error)
                self._count_drops({_reason(error): len(keys)})
                return
            if self._not_storing is not None:
                self._not_storing = None
                logger.warning("KV disk %s: blocks are stored again", self._folder)
            keys, rows = keys[count:], rows[count * size :]

    def _append(self, keys: Sequence[bytes], rows: memoryview) -> int:
        """Append as many blocks as the active segment takes. Raises OSError."""
        segment = self._writable_segment()
        first = len(segment.keys)
        count = min(len(keys), self._rows_per_segment - first)
        keys, rows = keys[:count], rows[: count * self.bytes_per_block]
        self._make_room(count * (segment.row_bytes + ENTRY_BYTES))
        segment.append(keys, rows)
        with self._lock:
            self._places.update(zip(keys, range(segment.base + first, segment.base + first + count), strict=True))
            if self.changes is not None:
                for key in keys:
                    self.changes.stored(key)
            self.stats.num_written += count
            self._use(segment)
            self._sum_up()
        return count

    def _writable_segment(self) -> Segment:
        if self._active is not None and len(self._active.keys) == self._rows_per_segment:
            self._retire_active()
        if self._active is None:
            self._make_room(HEADER_BYTES + self._layout.row_bytes + ENTRY_BYTES)
            self._active = create_segment(self._folder, self._layout, next(self._bases), self._rows_per_segment)
            with self._lock:
                self._segments[self._active.base] = self._active
        return self._active

    def _stop_storing(self, error: OSError) -> None:
        """Stop for a while. The segment is sealed: what may lie behind its last row is never written over."""
        self._retire_active()
        reason = _reason(error)
        if reason is not self._not_storing:
            logger.warning("KV disk %s: %s; what is there is used, nothing is stored", self._folder, error.strerror)
        self._not_storing, self._again_at = reason, time.monotonic() + self._retry_s

    def _retire_active(self) -> None:
        if self._active is not None:
            self._active.seal()
            if not self._active.keys:
                self._remove([self._active])
        self._active = None

    def _make_room(self, num_bytes: int) -> None:
        """Evicts what was of use longest ago, whole segments, until so many bytes more are within the bound."""
        oldest_first = sorted(self._segments.values(), key=lambda segment: segment.used)
        for segment in oldest_first:
            if self.stats.num_bytes + num_bytes <= self.max_bytes:
                return
            if segment is not self._active:
                num_before = len(self._places)
                self._remove([segment])
                self.stats.num_evicted += num_before - len(self._places)

    def _remove(self, segments: Iterable[Segment]) -> None:
        """Out of the books, then off the disk."""
        for segment in segments:
            with self._lock:
                for row in range(len(segment.keys)):
                    self._drop_place(segment, row)
                self._segments.pop(segment.base, None)
                self._sum_up()
            if segment is self._active:
                self._active = None
            segment.delete()

    # ---- opening

    def load(self) -> None:
        """Load what earlier servers left."""
        if self._owned.why_not is not None:
            self._stop_storing(self._owned.why_not)
        for name in names_by_use(self._folder):
            try:
                segment, drops = load_segment(self._folder, name, self._layout, next(self._bases))
            except Unusable as error:
                self._count_drops({error.reason: error.num_blocks})
                if error.reason is not DropReason.FAILED:
                    delete_files(self._folder, name)
                continue
            self._count_drops(drops)
            self._add(segment)
        self._make_room(0)

    def _add(self, segment: Segment) -> None:
        self._segments[segment.base] = segment
        self._use(segment)
        self._places.update((key, place) for place, key in enumerate(segment.keys, segment.base) if key is not None)
        self._sum_up()

    # ---- books

    def _use(self, segment: Segment) -> bool:
        """Mark the segment as used last; whether it was not so before."""
        if segment.used == self._num_uses:
            return False
        self._num_uses += 1
        segment.used = self._num_uses
        return True

    def _drop_place(self, segment: Segment, row: int) -> bool:
        """Forget the row's block; whether it was there, and not in another row by now."""
        key = segment.keys[row]
        if key is None or self._places.get(key) != segment.base + row:
            return False
        del self._places[key]
        if self.changes is not None:
            self.changes.removed(key)
        return True

    def _sum_up(self) -> None:
        self.stats.num_blocks = len(self._places)
        self.stats.num_bytes = sum(segment.num_bytes for segment in self._segments.values())

    def _count_drops(self, drops: Mapping[DropReason, int]) -> None:
        with self._lock:
            self.stats.dropped.update({reason: count for reason, count in drops.items() if count})


def _base_of(place: int) -> int:
    return place - place % _MOST_ROWS


def _reason(error: OSError) -> DropReason:
    if error.errno in _FULL:
        return DropReason.NO_SPACE
    return DropReason.READ_ONLY if error.errno in _READ_ONLY else DropReason.FAILED


def _runs(numbers: Sequence[int], most: int) -> Iterator[range]:
    """Positions of consecutive numbers, at most so many together."""
    begin = 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1 or end - begin == most:
            yield range(begin, end)
            begin = end

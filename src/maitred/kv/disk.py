"""KV disk tier: blocks in segment files of a private folder, found by an index in memory, evicted by segment (LRU).

Reading and writing are done by the caller's threads; no method waits for another one's I/O but a write for a write.
Writes are left to the page cache: what a kill leaves is whole, and what a power cut leaves is checked when it is read.
A folder has one owner. On a full disk the tier goes on without storing, and tries again after a while; one that cannot
be written is still read.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from maitred.core.errors import ConfigError
from maitred.kv import segments as kv_segments
from maitred.kv.folder import OwnedFolder, own_folder, private_folder
from maitred.kv.segments import ENTRY_BYTES, HEADER_BYTES, Segment, SegmentLayout, Unusable, checksums
from maitred.kv.tiers import DropReason, TierStats
from maitred.kv.told import MAX_HELD, SharedChanges

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
RETRY_S = 10.0  # after a write failed
_MOST_ROWS = 2**32
_READ_BYTES = 8 * 2**20  # read and verified while they are in the processor's cache
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


def open_kv_disk(
    path: str | Path,
    *,
    max_bytes: int,
    bytes_per_block: int,
    fingerprint: str,
    retry_s: float = RETRY_S,
) -> KVDisk:
    """The tier of a folder, which is made if it is not there.

    Raises ConfigError, one line with the remedy: the folder is another server's or open to others, the bound is below
    one block.
    """
    least = bytes_per_block + ENTRY_BYTES + HEADER_BYTES
    if max_bytes < least:
        raise ConfigError(f"--kv-disk-max-bytes is {max_bytes}, and one block takes {least}; give that or more")
    layout = SegmentLayout(bytes_per_block, hashlib.sha256(fingerprint.encode()).digest())
    folder = private_folder(path)
    disk = KVDisk(folder, own_folder(folder), layout, max_bytes=max_bytes, retry_s=retry_s)
    disk.load()
    return disk


class _Span(NamedTuple):
    """Consecutive rows of a segment."""

    segment: Segment
    first: int
    num_rows: int


class KVDisk:
    """A `KVTier`. Made by `open_kv_disk`."""

    name, has_index, hindrance = "disk", True, None

    def __init__(
        self, folder: Path, owned: OwnedFolder, layout: SegmentLayout, *, max_bytes: int, retry_s: float
    ) -> None:
        self.bytes_per_block, self.max_bytes = layout.row_bytes, max_bytes
        self.stats = TierStats()
        self._folder, self._owned, self._layout = folder, owned, layout
        self._retry_s, self._is_closed = retry_s, False
        per_segment = min(SEGMENT_BYTES, max_bytes // 8)  # eviction takes a small part
        self._rows_per_segment = max(1, per_segment // (layout.row_bytes + ENTRY_BYTES))
        self._lock = threading.Lock()  # of the books, never held over I/O
        self._places: dict[bytes, int] = {}  # key -> segment's base + row
        self._segments: dict[int, Segment] = {}  # by base
        self._bases = itertools.count(0, _MOST_ROWS)
        self._num_uses = 1
        self.changes: SharedChanges | None = None
        self._writing = threading.Lock()  # held by the thread that writes files
        self._active: Segment | None = None
        self._not_storing: DropReason | None = None  # why, and until when
        self._again_at = 0.0

    # ---- KVTier

    def tell_changes(self, wanted: bool) -> None:
        with self._lock:
            newest = [*itertools.islice(reversed(self._places), MAX_HELD)]
            self.changes = SharedChanges(newest) if wanted else None

    def num_known(self, keys: Sequence[bytes]) -> int:
        places = self._places
        for i, key in enumerate(keys):
            if key not in places:
                return i
        return len(keys)

    def look_up(self, keys: Sequence[bytes], tell: Callable[[int], None]) -> None:
        tell(self.num_known(keys))

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
                self.changes.all_stored(keys)
            self.stats.num_written += count
            self._use(segment)
            self._sum_up()
        return count

    def _writable_segment(self) -> Segment:
        if self._active is not None and len(self._active.keys) == self._rows_per_segment:
            self._retire_active()
        if self._active is None:
            self._make_room(HEADER_BYTES + self._layout.row_bytes + ENTRY_BYTES)
            self._active = kv_segments.create(self._folder, self._layout, next(self._bases), self._rows_per_segment)
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
        for name in kv_segments.names_by_use(self._folder):
            try:
                segment, drops = kv_segments.load(self._folder, name, self._layout, next(self._bases))
            except Unusable as error:
                self._count_drops({error.reason: error.num_blocks})
                if error.reason is not DropReason.FAILED:
                    kv_segments.delete_files(self._folder, name)
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

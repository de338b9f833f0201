"""Packed weights on disk: packed once, checked and mapped by every later start.

A file is a header (magic, length, checksum, JSON) and, from a multiple of 2 MiB on, the flat layout of
`packed.plan_weights`. Its name is a key of everything that decides its bytes: the checkpoint's headers, samples of its
bytes, sizes and times, the program's weights and number formats, instruction set and packer's version.

- Files are checked before they are served: mapping checks every segment's checksum first, at the speed of memory, which
  also brings in the pages. A file that fails is deleted and packed again, and the log says so.
- A packer writes a file of its own, renames it when it is whole, so that readers never see half of one, and maps it. Of
  two concurrent packers the first one's file stays, with equal bytes, and both map it.
- The mapping is private and read-only; processes that serve the same model share its pages. Still a change of the file
  would be one of the weights, so the file is read-only too, and its user's alone: one that others own or may write is
  packed anew. A file that is removed while it is mapped lives on for its users.
- The folder is bounded: the files used longest ago go first. Weights that cannot be kept are served from memory, with a
  reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import stat
import struct
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maitred.kernels import _native
from maitred.kernels.linear import PACK_VERSION, allocate
from maitred.model import packed
from maitred.model.checkpoint import Checkpoint
from maitred.model.program import Program

FILE_VERSION = 1
MIN_BYTES = 64 * 2**20
"""Smaller weights are packed faster than a file is worth."""
SPARE_BYTES = 2**30
"""Bytes of the disk that stay free."""

_MAGIC = b"maitredW"
_PREFIX = struct.Struct("<8sQQ")  # magic, bytes of the JSON, their checksum
_DATA_ALIGNMENT = 2 * 2**20  # a huge page
_WRITE_BYTES = 64 * 2**20
_SUFFIX, _DRAFT_SUFFIX = ".packed", ".draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCache:
    """Folder of packed weights."""

    folder: Path
    max_bytes: int
    min_bytes: int = MIN_BYTES
    spare_bytes: int = SPARE_BYTES


class LoadedWeights(NamedTuple):
    weights: packed.PackedWeights
    origin: str
    """mapped, kept (packed, and a file for the next start) or packed"""
    summary: str
    """The same for people, with the reason if there is no file."""


class _Unusable(Exception):
    """Why a file cannot be used, or not be written."""


def load_weights(
    program: Program,
    checkpoint: Checkpoint,
    threads: Any,
    *,
    isa: str,
    cache: WeightCache | None,
    on_packed: packed.OnPacked | None = None,
) -> LoadedWeights:
    """The program's weights, out of the cache where it has them.

    `threads` is a `_native.ThreadPool`, `on_packed` as for `packed.pack_weights`. No fault of the cache is an error:
    the weights are then packed into memory. Raises CheckpointError as `packed.pack_weights` does.
    """
    size = packed.total_bytes(packed.plan_weights(program))
    if cache is None or size < cache.min_bytes:
        why = "there is no cache" if cache is None else "too small to keep"
        weights, _ = _pack(program, checkpoint, threads, on_packed)
        return LoadedWeights(weights, "packed", _packed_summary(weights, why))
    path = cache.folder / (cache_key(program, checkpoint, isa) + _SUFFIX)
    damage = ""
    try:
        return _mapped(path, program, threads)
    except FileNotFoundError:
        pass
    except (OSError, _Unusable) as error:
        damage = f"; {path.name[:12]} was {_reason(error)} and is replaced"
    weights, memory = _pack(program, checkpoint, threads, on_packed)
    try:
        _keep(cache, path, memory, program, threads, is_replaced=bool(damage))
        weights = _mapped(path, program, threads).weights  # which others share; what was packed is given back
    except (OSError, _Unusable) as error:
        return LoadedWeights(weights, "packed", _packed_summary(weights, _reason(error) + damage))
    return LoadedWeights(weights, "kept", f"packed {_size(weights.num_bytes)}, kept in {cache.folder}{damage}")


def cache_key(program: Program, checkpoint: Checkpoint, isa: str) -> str:
    """Return the key of everything that decides the packed bytes."""
    parts = [FILE_VERSION, PACK_VERSION, isa, checkpoint.identity, [repr(weight) for weight in program.weights]]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=20).hexdigest()


def _pack(
    program: Program, checkpoint: Checkpoint, threads: Any, on_packed: packed.OnPacked | None
) -> tuple[packed.PackedWeights, packed.Buffer]:
    """The weights, and the flat memory that they all lie in."""
    memory = allocate(packed.total_bytes(packed.plan_weights(program)))

    def buffer_for(plan: packed.WeightPlan) -> packed.Buffer:
        return memory[plan.offset : plan.offset + plan.num_bytes]

    return packed.pack_weights(program, checkpoint, threads, buffer_for, on_packed), memory


def _packed_summary(weights: packed.PackedWeights, why: str) -> str:
    return f"packed {_size(weights.num_bytes)} into memory ({why})"


# ---- a file that is there


def _mapped(path: Path, program: Program, threads: Any) -> LoadedWeights:
    """Raises FileNotFoundError, and _Unusable for one that is not whole, or not ours, which is then deleted."""
    with open(path, "rb", opener=_at_once) as file:
        try:
            _make_private(file.fileno())
            weights = _map(file.fileno(), program, threads)
        except _Unusable:
            path.unlink(missing_ok=True)
            raise
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return LoadedWeights(weights, "mapped", f"mapped {_size(weights.num_bytes)} from {path.parent}")


def _at_once(path: str, flags: int) -> int:
    """Open without waiting: a pipe without a writer would block."""
    return os.open(path, flags | os.O_NONBLOCK)


def _make_private(fd: int) -> None:
    """Make the file read-only, for its owner alone. Raises _Unusable if another owns it, or others could write."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise _Unusable("no file")
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise _Unusable("open to changes by others")
    os.fchmod(fd, 0o400)


def _map(fd: int, program: Program, threads: Any) -> packed.PackedWeights:
    """Views of the file's segments, once every checksum was right."""
    size = os.fstat(fd).st_size
    segments = _read_header(fd, size, program, threads)
    mapping = mmap.mmap(fd, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    _advise(mapping)
    memory = np.frombuffer(mapping, dtype=np.uint8)
    views = [memory[segment.begin : segment.begin + segment.plan.num_bytes] for segment in segments]
    for segment, checksum in zip(segments, _checksums(views, threads.num_threads), strict=True):
        if checksum != segment.checksum:
            raise _Unusable(f"damaged in {segment.plan.weight.name}")
    return packed.PackedWeights(
        {
            segment.plan.weight.name: packed.PackedTensor(segment.plan.weight, view)
            for segment, view in zip(segments, views, strict=True)
        }
    )


def _checksums(views: list[packed.Buffer], num_threads: int) -> list[int]:
    """Return the checksum of each. Every thread takes the next one, and they meet once: on a busy machine two that
    share each of 200 tensors wait for one another up to ten times as long as they work.
    """
    sums = [0] * len(views)
    numbers = iter(range(len(views)))

    def work() -> None:
        alone = _native.ThreadPool(1)
        for number in numbers:
            sums[number] = int(_native.checksum(alone, views[number]))

    helpers = [threading.Thread(target=work, name="maitred-checksum") for _ in range(num_threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()
    return sums


class _Segment(NamedTuple):
    plan: packed.WeightPlan
    begin: int  # in the file
    checksum: int


def _read_header(fd: int, size: int, program: Program, threads: Any) -> list[_Segment]:
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size:
        raise _Unusable(f"cut short ({size} bytes)")
    magic, length, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC or length > size:
        raise _Unusable("no file of packed weights")
    header = os.pread(fd, length, _PREFIX.size)
    if len(header) < length or _checksum_of(header, threads) != checksum:
        raise _Unusable("damaged in its header")
    plans = packed.plan_weights(program)
    sums = [int(value, 16) for value in json.loads(header)["checksums"]]
    begin = _data_begin(length)
    needed = begin + packed.total_bytes(plans)
    if len(sums) != len(plans) or size != needed:
        raise _Unusable(f"cut short ({size} bytes of {needed})")
    return [_Segment(plan, begin + plan.offset, value) for plan, value in zip(plans, sums, strict=True)]


# ---- a file for the next start


def _keep(
    cache: WeightCache, path: Path, memory: packed.Buffer, program: Program, threads: Any, *, is_replaced: bool
) -> None:
    """Write the packed memory to a new file. Raises OSError or _Unusable when it cannot be kept.

    The file is written and not mapped for writing: a mapping would leave it in small pages in memory, which cost the
    next start and every step after it.
    """
    plans = packed.plan_weights(program)
    sums = [_native.checksum(threads, memory[plan.offset : plan.offset + plan.num_bytes]) for plan in plans]
    header = _header_of(path, sums)
    begin = _data_begin(len(header))
    cache.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_room(cache, begin + memory.nbytes)
    with _draft(cache.folder) as (fd, draft):
        _allocate(fd, begin + memory.nbytes)
        _write(fd, begin, memory.data)
        _write(fd, 0, memoryview(_PREFIX.pack(_MAGIC, len(header), _checksum_of(header, threads)) + header))
        os.fchmod(fd, 0o400)
        if is_replaced or not path.exists():  # the first writer's bytes are the same, and one file serves all mappings
            draft.rename(path)


def _write(fd: int, place: int, data: memoryview) -> None:
    while data:
        written = os.pwrite(fd, data[:_WRITE_BYTES], place)
        place, data = place + written, data[written:]


def _allocate(fd: int, size: int) -> None:
    """A full disk says so now, and not after half of it was written."""
    os.posix_fallocate(fd, 0, size)


def _advise(mapping: mmap.mmap) -> None:
    """Huge pages, before the first touch: file systems that can (ext4, xfs) then read and map 2 MiB at a time."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_HUGEPAGE)


def _header_of(path: Path, checksums: list[int]) -> bytes:
    """Return the header; its length does not depend on the checksums."""
    return json.dumps({"key": path.stem, "checksums": [f"{value:016x}" for value in checksums]}).encode()


def _data_begin(header_bytes: int) -> int:
    return -(-(_PREFIX.size + header_bytes) // _DATA_ALIGNMENT) * _DATA_ALIGNMENT


@contextlib.contextmanager
def _draft(folder: Path) -> Iterator[tuple[int, Path]]:
    """Make a new file, locked while it is written, and gone afterwards unless it was renamed."""
    fd, name = tempfile.mkstemp(suffix=_DRAFT_SUFFIX, dir=folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd, Path(name)
    finally:
        Path(name).unlink(missing_ok=True)
        os.close(fd)


def _make_room(cache: WeightCache, needed: int) -> None:
    """Delete the files used longest ago, and drafts of dead writers. Raises _Unusable when that is not enough."""
    if needed > cache.max_bytes:
        raise _Unusable(f"{_size(needed)} are more than the cache may hold, {_size(cache.max_bytes)}")
    for draft in cache.folder.glob(f"*{_DRAFT_SUFFIX}"):
        _delete_if_abandoned(draft)
    for path in _least_recent_first(cache.folder, cache.max_bytes - needed):
        path.unlink(missing_ok=True)
    free = shutil.disk_usage(cache.folder).free
    if free < needed + cache.spare_bytes:
        raise _Unusable(f"{cache.folder} has {_size(free)} free, and {_size(needed + cache.spare_bytes)} are needed")


def _least_recent_first(folder: Path, room: int) -> Iterator[Path]:
    """The files to delete so that the others take at most `room` bytes."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            found.append((status.st_mtime_ns, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= room:
            return
        total -= size
        yield path


def _delete_if_abandoned(draft: Path) -> None:
    with contextlib.suppress(OSError):  # another process holds the lock, or was faster
        fd = os.open(draft, os.O_RDWR)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()
        finally:
            os.close(fd)


def _checksum_of(data: bytes, threads: Any) -> int:
    return int(_native.checksum(threads, np.frombuffer(data, dtype=np.uint8)))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, _Unusable) else f"unusable: {error}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"

"""One safetensors file, mapped into memory: a JSON header, then the tensors' bytes.

Format: 8 bytes little-endian header length, header {name: {dtype, shape, data_offsets}}, data. The header is checked
whole, so that a file cut short is found when it is opened and not in the middle of loading.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from maitred.core.errors import CheckpointError

# bits of one value
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor of a file, row-major. `dtype` is the format's name: F32, F16, BF16 ..., of GGUF also Q4_K."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    """Read-only bytes over the mapping; valid until the file is closed."""
    order: Any = None
    """Where the bytes have columns in another order: for each of theirs, the number of the tensor's (int32 [K])."""


@dataclass(frozen=True, slots=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


class Header(NamedTuple):
    """Header before the tensors' bytes: the part that tells files apart, where the bytes begin, and each place."""

    header_bytes: bytes
    begin: int
    entries: dict[str, Entry]


class TensorFile:
    """A file of tensors, mapped into memory. Raises CheckpointError, naming the file, when it is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is a pipe or a device, not a file of weights; download it again")
        self.modified_ns = status.st_mtime_ns
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if status.st_size else None
        self._mapping = mapping
        self._view = memoryview(mapping if mapping is not None else b"")
        self.size_bytes = len(self._view)
        try:
            self.header_bytes, self._begin, self._entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> Header:
        raise NotImplementedError

    def tensor_names(self) -> tuple[str, ...]:
        """Return the names in the order of their bytes."""
        return tuple(self._entries)

    def tensor(self, name: str) -> RawTensor:
        entry = self._entries[name]
        return RawTensor(entry.dtype, entry.shape, self._view[entry.begin : entry.end])

    def read(self, name: str) -> RawTensor:
        """A copy of the tensor. Raises CheckpointError where another process shortened the file: its mapping would
        end the process by SIGBUS."""
        entry = self._entries[name]
        with self.path.open("rb") as file:
            data = os.pread(file.fileno(), entry.end - entry.begin, entry.begin)
            while 0 < len(data) < entry.end - entry.begin and (
                more := os.pread(file.fileno(), entry.end - entry.begin - len(data), entry.begin + len(data))
            ):
                data += more
        if len(data) < entry.end - entry.begin:
            self.check_unchanged()
        return RawTensor(entry.dtype, entry.shape, memoryview(data))

    def dtype_of(self, name: str) -> str:
        return self._entries[name].dtype

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def num_bytes_of(self, name: str) -> int:
        return self._entries[name].end - self._entries[name].begin

    def sample(self, num_samples: int, sample_bytes: int) -> bytes:
        """Bytes from places spread evenly over the tensors, to tell files of one layout apart without reading them."""
        start, room = self._begin, self.size_bytes - self._begin
        places = [start + i * room // num_samples for i in range(num_samples)] if room else []
        self._expect(places, sample_bytes)
        return b"".join(bytes(self._view[p : p + sample_bytes]) for p in places)

    def _expect(self, places: Sequence[int], num_bytes: int) -> None:
        """Ask for the pages of these samples, all at once and no others. Touching a page that is not in memory would
        have the system read megabytes around it: with 64 samples half of a checkpoint."""
        for place in places:
            page = place // mmap.PAGESIZE * mmap.PAGESIZE
            with contextlib.suppress(OSError):  # advice
                assert self._mapping is not None
                self._mapping.madvise(mmap.MADV_WILLNEED, page, min(place + num_bytes, self.size_bytes) - page)

    def check_unchanged(self) -> None:
        """Raise CheckpointError where another process wrote or replaced the file since it was opened."""
        now = self.path.stat() if self.path.exists() else None
        if now is None or (now.st_size, now.st_mtime_ns) != (self.size_bytes, self.modified_ns):
            found = "it is gone" if now is None else f"{now.st_size:,} bytes"
            raise CheckpointError(
                f"{self.path} changed while it was read ({self.size_bytes:,} bytes then, {found} now); start "
                f"again when it is whole"
            )

    def close(self) -> None:
        """Unmap, unless a tensor's bytes are still in use: then the mapping ends with them."""
        self._view.release()
        with contextlib.suppress(BufferError):
            if self._mapping is not None:
                self._mapping.close()


class SafetensorsFile(TensorFile):
    """Raises CheckpointError, naming the file, when it is no whole safetensors file."""

    def _read_header(self) -> Header:
        view = self._view
        header = _read_header(self.path, bytes(view[:8]), self.size_bytes, lambda length: bytes(view[8 : 8 + length]))
        return Header(header, 8 + len(header), _parse_header(self.path, header, self.size_bytes))


def parse_safetensors(path: Path, data: bytes) -> dict[str, RawTensor]:
    """Tensors of a file that was read whole; `path` is for messages. Raises CheckpointError as SafetensorsFile does."""
    header_bytes = _read_header(path, data[:8], len(data), lambda length: data[8 : 8 + length])
    entries, view = _parse_header(path, header_bytes, len(data)), memoryview(data)
    return {name: RawTensor(e.dtype, e.shape, view[e.begin : e.end]) for name, e in entries.items()}


def _read_header(path: Path, length_bytes: bytes, size_bytes: int, read: Any) -> bytes:
    length = int.from_bytes(length_bytes, "little")
    if len(length_bytes) < 8 or not 2 <= length <= min(size_bytes - 8, _MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{path} is no safetensors file, or was cut short ({size_bytes} bytes, header of {length}); "
            f"download it again"
        )
    header: bytes = read(length)
    return header


def _naturals(values: list[int]) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(values)
    return tuple(values)


def _parse_header(path: Path, header_bytes: bytes, size_bytes: int) -> dict[str, Entry]:
    start = 8 + len(header_bytes)
    try:
        header = json.loads(header_bytes)
        header.pop("__metadata__", None)
        entries = {
            name: Entry(str(e["dtype"]), _naturals(e["shape"]), *(start + n for n in _naturals(e["data_offsets"])))
            for name, e in header.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"{path}: the header is no valid safetensors header; download the file again") from None
    needed = max((entry.end for entry in entries.values()), default=start)
    if needed > size_bytes:
        raise CheckpointError(f"{path} was cut short: {size_bytes} bytes of {needed}; download it again")
    for name, entry in entries.items():
        bits = _BITS.get(entry.dtype)
        if bits is not None and math.prod(entry.shape) * bits != 8 * (entry.end - entry.begin):
            raise CheckpointError(
                f"{path}: tensor {name} ({entry.dtype}, {list(entry.shape)}) has {entry.end - entry.begin} bytes; "
                f"the file is damaged, download it again"
            )
    return dict(sorted(entries.items(), key=lambda item: item[1].begin))

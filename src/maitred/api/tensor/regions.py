"""Shared memory of the system that clients registered. Inputs are copied out of it and outputs into it by pread and
pwrite: a client that makes its file shorter in the middle of that gets an error, where a mapping would end the process
with SIGBUS.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from maitred.core.errors import InvalidRequest, Overloaded, RegionNotFound
from maitred.core.tensor_request import Buffer

FOLDER = "/dev/shm"  # where shm_open's names are, on Linux
MOST_REGIONS = 1024
MOST_HELD_BYTES = 1 << 30  # copied out of regions for requests that have not ended
_KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class SystemRegion:
    """Region of shared memory. The file stays open while a request uses it, also when it is unregistered meanwhile."""

    key: str
    offset: int
    byte_size: int
    file: int


@dataclass(slots=True)
class _Held:
    """Bytes that were copied out of regions; blocks may be let go in any thread."""

    num_bytes: int = 0
    returned: deque[int] = field(default_factory=deque)
    lock: Lock = field(default_factory=Lock)

    def block(self, num_bytes: int) -> np.ndarray:
        """Memory that counts until its last view is gone. Raises Overloaded."""
        with self.lock:
            while self.returned:
                self.num_bytes -= self.returned.popleft()
            if self.num_bytes and self.num_bytes + num_bytes > MOST_HELD_BYTES:
                told = f"{self.num_bytes} bytes of shared memory are held for requests, and {num_bytes} more are asked"
                raise Overloaded(f"{told}; at most {MOST_HELD_BYTES} are")
            self.num_bytes += num_bytes
        block = np.empty(num_bytes, np.uint8)
        weakref.finalize(block, self.returned.append, num_bytes).atexit = False
        return block


@dataclass(frozen=True, slots=True)
class RegionPart:
    """The part of a region that a request names."""

    region: SystemRegion
    offset: int  # in the region's file
    byte_size: int
    held: _Held

    def read(self) -> memoryview:
        """A copy. Raises InvalidRequest where the file has become shorter, and Overloaded."""
        view, at = self.held.block(self.byte_size).data, 0
        while at < self.byte_size:
            num_read = os.preadv(self.region.file, [view[at:]], self.offset + at)
            if not num_read:
                raise self._too_short(self.offset + at)
            at += num_read
        return view

    def write(self, data: Buffer) -> None:
        """Write from the region's beginning. Raises InvalidRequest where the file has become shorter."""
        view, at = memoryview(data).cast("B"), 0
        size = os.fstat(self.region.file).st_size
        if size < self.offset + view.nbytes:
            raise self._too_short(size)
        while at < view.nbytes:
            at += os.pwrite(self.region.file, view[at:], self.offset + at)

    def _too_short(self, size: int) -> InvalidRequest:
        end = self.offset + self.byte_size
        return InvalidRequest(f"the shared memory {self.region.key!r} has {size} bytes by now, and {end} are needed")


class SystemRegions:
    """Regions by owner and name; another owner finds none. Every method raises InvalidRequest, and RegionNotFound
    for a name that is not registered.
    """

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder, self._held = folder, _Held()
        self._regions: dict[str, dict[str, SystemRegion]] = {}  # by owner, the tenant whose key registered them

    def register(self, owner: str, name: str, key: str, offset: int, byte_size: int) -> None:
        own = self._regions.get(owner, {})
        if name in own:
            raise InvalidRequest(f"the shared memory region {name[:80]!r} is registered already")
        if not name or sum(map(len, self._regions.values())) >= MOST_REGIONS:
            raise InvalidRequest(f"a region needs a name, and at most {MOST_REGIONS} are registered")
        file = self._opened(key, byte_size and offset + byte_size)
        region = SystemRegion(key, offset, byte_size, file)
        weakref.finalize(region, os.close, file).atexit = False
        self._regions[owner] = {**own, name: region}

    def unregister(self, owner: str, name: str = "") -> None:
        """Remove one region, or without a name all of the owner's; unknown names are no error."""
        own = self._regions.pop(owner, {})
        if name and (left := {other: region for other, region in own.items() if other != name}):
            self._regions[owner] = left

    def status(self, owner: str, name: str = "") -> Mapping[str, SystemRegion]:
        return {name: self._found(owner, name)} if name else self._regions.get(owner, {})

    def num_bytes(self, owner: str) -> int:
        return sum(region.byte_size for region in self._regions.get(owner, {}).values())

    def view(self, owner: str, name: str, offset: int, byte_size: int) -> RegionPart:
        """A part of a region, checked against its size."""
        region = self._found(owner, name)
        if offset + byte_size > region.byte_size:
            end = offset + byte_size
            raise InvalidRequest(f"byte {end} is asked of the region {name[:80]!r}, which has {region.byte_size}")
        return RegionPart(region, region.offset + offset, byte_size, self._held)

    def _found(self, owner: str, name: str) -> SystemRegion:
        region = self._regions.get(owner, {}).get(name)
        if region is None:
            raise RegionNotFound(f"no shared memory region {name[:80]!r} is registered")
        return region

    def _opened(self, key: str, size: int) -> int:
        """A descriptor."""
        if not _KEY.fullmatch(key) or not size:
            raise InvalidRequest("a region needs a byte_size, and a key as shm_open takes it: a name after a slash")
        try:
            file = os.open(os.path.join(self._folder, key.lstrip("/")), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(f"the shared memory {key!r} cannot be opened: {error.strerror}") from None
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_size < size:
            os.close(file)
            raise InvalidRequest(f"the shared memory {key!r} has {found.st_size} bytes, and {size} are registered")
        return file

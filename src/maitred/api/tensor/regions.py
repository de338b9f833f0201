"""Shared memory of the system that clients registered. The engine looks at inputs there, and writes outputs there."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass

from maitred.errors import InvalidRequest, RegionNotFound
from maitred.tensor.shared import SharedMap

FOLDER = "/dev/shm"  # where shm_open's names are, on Linux
MOST_REGIONS = 1024
_KEY = re.compile(r"/?[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")


@dataclass(frozen=True, slots=True)
class SystemRegion:
    key: str
    offset: int
    byte_size: int
    memory: memoryview  # of the region alone; the mapping goes with its last view, so that a batch ends in peace


class SystemRegions:
    """Regions by name. All of it raises InvalidRequest, and RegionNotFound for a name that is not registered."""

    def __init__(self, folder: str = FOLDER) -> None:
        self._folder = folder
        self._regions: dict[str, SystemRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        if name in self._regions:
            raise InvalidRequest(f"the shared memory region {name[:80]!r} is registered already")
        if not name or len(self._regions) >= MOST_REGIONS:
            raise InvalidRequest(f"a region needs a name, and at most {MOST_REGIONS} are registered")
        memory = memoryview(self._mapped(key, byte_size and offset + byte_size))[offset : offset + byte_size]
        self._regions[name] = SystemRegion(key, offset, byte_size, memory)

    def unregister(self, name: str = "") -> None:
        """What is in use stays mapped until its batch ends; unknown names are nobody's fault."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> Mapping[str, SystemRegion]:
        return {name: self._found(name)} if name else self._regions

    def view(self, name: str, offset: int, byte_size: int) -> memoryview:
        """A part of a region, checked against its size."""
        region = self._found(name)
        if offset + byte_size > region.byte_size:
            end = offset + byte_size
            raise InvalidRequest(f"byte {end} is asked of the region {name[:80]!r}, which has {region.byte_size}")
        return region.memory[offset : offset + byte_size]

    def _found(self, name: str) -> SystemRegion:
        if name not in self._regions:
            raise RegionNotFound(f"no shared memory region {name[:80]!r} is registered")
        return self._regions[name]

    def _mapped(self, key: str, size: int) -> SharedMap:
        if not _KEY.fullmatch(key) or not size:
            raise InvalidRequest("a region needs a byte_size, and a key as shm_open takes it: a name after a slash")
        try:
            file = os.open(os.path.join(self._folder, key.lstrip("/")), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise InvalidRequest(f"the shared memory {key!r} cannot be opened: {error.strerror}") from None
        try:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode) or found.st_size < size:
                raise InvalidRequest(f"the shared memory {key!r} has {found.st_size} bytes, and {size} are registered")
            return SharedMap.of(file, size)
        except BaseException:
            os.close(file)
            raise

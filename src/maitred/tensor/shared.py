"""Shared memory that the server has mapped: its own, which has no name, and regions that clients registered."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import msgspec
import numpy as np

from maitred.tensor.service import Buffer


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of shared memory, as processes tell each other of them."""

    offset: int
    num_bytes: int
    path: str = ""  # where another process of this user opens a region, also one whose name is gone; ours has none
    inode: int = 0  # of the region's file


class SharedMap(mmap.mmap):
    """A file in memory. It goes with the last view of it, and its descriptor with it: a batch ends in peace."""

    file: int
    inode: int
    address: int

    @classmethod
    def of(cls, file: int, num_bytes: int) -> SharedMap:
        """Takes over the descriptor. Raises OSError or ValueError, and does not take it over then."""
        made = cls(file, num_bytes)
        made.file, made.inode, made.address = file, os.fstat(file).st_ino, _address(memoryview(made))
        weakref.finalize(made, os.close, file).atexit = False
        return made

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.file}"


def unnamed_memory(num_bytes: int) -> SharedMap | None:
    """Memory of that size, of which none is taken before it is touched; None where the system gives none.

    No path leads to it, so that no client can register it (CVE-2025-23319), and nobody can make it shorter.
    """
    try:
        file = os.memfd_create("maitred-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return SharedMap.of(file, num_bytes)
    except (OSError, ValueError):
        os.close(file)
        return None


def map_of(data: Buffer) -> SharedMap | None:
    """What a view looks at; None for bytes of this process alone."""
    whole = data.obj if isinstance(data, memoryview) else None
    return whole if isinstance(whole, SharedMap) else None


def place_of(data: Buffer) -> Place | None:
    """Where a view of a region lies; None for bytes of this process alone."""
    shared = map_of(data)
    if shared is None or not memoryview(data).nbytes:
        return None
    view = memoryview(data)
    return Place(_address(view) - shared.address, view.nbytes, shared.path, shared.inode)


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address

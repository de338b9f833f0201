"""Shared memory of the server and its engine, which has no name."""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

import msgspec


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of shared memory, as processes tell each other of them."""

    offset: int
    num_bytes: int


class SharedMap(mmap.mmap):
    """A file in memory. It goes with the last view of it, and its descriptor with it: a batch ends in peace."""

    file: int


def unnamed_memory(num_bytes: int) -> SharedMap | None:
    """Return memory of that size, taken as it is touched; None where the system gives none.

    No path leads to it, so no client can register it (CVE-2025-23319) or make it shorter.
    """
    try:
        file = os.memfd_create("maitred-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):
        return None
    try:
        os.ftruncate(file, num_bytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        made = SharedMap(file, num_bytes)
    except (OSError, ValueError):
        os.close(file)
        return None
    made.file = file
    weakref.finalize(made, os.close, file).atexit = False
    return made

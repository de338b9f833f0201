"""A process that ends with the one that began it, however that one ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(fd: int) -> None:
    """End this process with its parent: by the kernel on Linux, which needs no thread of ours; everywhere, when `fd` (a
    pipe or socket with its other end in the parent alone) comes to its end. For a process that the parent's main thread
    began.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    end_with(fd)


def end_with(fd: int, *, grace_s: float = 0.0) -> None:
    """End this process when `fd` comes to its end, after at most `grace_s`: also if not the main thread began it."""

    def wait_for_the_end() -> None:
        while os.read(fd, 4096):
            pass
        time.sleep(grace_s)
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="maitred-parent", daemon=True).start()

"""How a test waits: for a condition, never for a duration. The limits only end a test that would hang for ever."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable

import psutil

# Far more than anything here takes, and under the limit of a test. Without vectors a model takes ten times as
# long, and `make soak` gives tests more time.
HANGS_S = 600.0 if os.environ.get("MAITRED_ISA") == "plain" else 90.0


def until(condition: Callable[[], object], limit_s: float = HANGS_S) -> None:
    """Return as soon as `condition` holds."""
    asked_at, pause_s = time.monotonic(), 0.002
    ends_at = asked_at + limit_s
    while not condition():
        took_s = time.monotonic() - asked_at
        assert asked_at < ends_at, f"it did not come in {limit_s:g} s"
        time.sleep(max(pause_s, min(5 * took_s, 0.1)))  # many ask a server, which has other things to do
        asked_at, pause_s = time.monotonic(), min(1.2 * pause_s, 0.02)


async def until_async(condition: Callable[[], object], limit_s: float = HANGS_S) -> None:
    """As `until`, beside other tasks of the loop."""
    ends_at, pause_s = time.monotonic() + limit_s, 0.002
    while not condition():
        assert time.monotonic() < ends_at, f"it did not come in {limit_s:g} s"
        await asyncio.sleep(pause_s)
        pause_s = min(1.2 * pause_s, 0.02)


def joined(*threads: threading.Thread) -> None:
    """Wait for threads to end."""
    for thread in threads:
        thread.join(HANGS_S)
        assert not thread.is_alive(), f"{thread.name} did not end in {HANGS_S:g} s"


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended; one that nobody waited for yet counts too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

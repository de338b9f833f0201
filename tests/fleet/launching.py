"""A launcher whose events a test waits for; run as a process, a router that can be killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from maitred.fleet.launch import IsReady, LaunchEvent, LocalLauncher
from tests.waiting import HANGS_S, until_async

E = TypeVar("E")


@dataclass
class Told:
    """What a launcher told, and what its replicas wrote."""

    events: list[LaunchEvent] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def of(self, kind: type[E], name: str) -> list[E]:
        return [event for event in self.events if isinstance(event, kind) and event.name == name]  # type: ignore[attr-defined]

    async def wait_for(self, kind: type[E], name: str = "a", count: int = 1) -> E:
        """The `count`-th of them."""
        await until_async(lambda: len(self.of(kind, name)) >= count)
        return self.of(kind, name)[count - 1]


@asynccontextmanager
async def launching(words: Sequence[str] = (), **fields: Any) -> AsyncIterator[tuple[LocalLauncher, Told]]:
    told = Told()
    launcher = LocalLauncher(words, token="secret", on_event=told.events.append, write_line=told.lines.append, **fields)
    try:
        yield launcher, told
    finally:
        async with asyncio.timeout(HANGS_S):
            await launcher.close()


async def launch_and_tell() -> None:
    """Two replicas; the process of each goes to standard output once it is ready."""

    def tell(event: LaunchEvent) -> None:
        if isinstance(event, IsReady):
            sys.stdout.write(f"{launcher.pid(event.name)}\n")
            sys.stdout.flush()

    launcher = LocalLauncher((), token="secret", on_event=tell)
    launcher.start("a")
    launcher.start("b")
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(launch_and_tell()))

"""A replica on another node: what an actor there does for `RayLauncher`."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from maitred.fleet.launch import LaunchEvent, LocalLauncher

MAX_LINES = 10_000  # of its log that wait to be fetched; the oldest are dropped


class HostedReplica:
    """One `maitred serve`, started again when it dies; what becomes of it is asked for. Its calls share an event loop,
    whose thread lives as long as its process.
    """

    def __init__(
        self, name: str, words: Sequence[str], token: str, stop_s: float, find_host: Callable[[], str]
    ) -> None:
        """`find_host` is called here, and tells by which address routers reach this node; else see LocalLauncher."""
        self._name = name
        self._news: list[LaunchEvent] = []
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._something = asyncio.Event()
        self._launcher = LocalLauncher(
            words, token=token, on_event=self._tell, write_line=self._write, host=find_host(), stop_s=stop_s
        )

    async def begin(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._launcher.start(self._name)

    async def heard(self) -> tuple[list[LaunchEvent], list[str]]:
        """Events since the last call, and the log's new lines; waits until there is something."""
        await self._something.wait()
        self._something.clear()
        news, self._news = self._news, []
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        return news, lines

    async def stop(self) -> None:
        self._launcher.stop(self._name)

    def _tell(self, event: LaunchEvent) -> None:
        self._news.append(event)
        self._something.set()

    def _write(self, line: str) -> None:
        """Keep a log line; called from a thread of the launcher's."""
        self._lines.append(line)
        self._loop.call_soon_threadsafe(self._something.set)

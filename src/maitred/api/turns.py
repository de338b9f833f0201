"""What takes long on the event loop itself: one piece in each turn of the loop, however many wait to do theirs."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Hands out turns of the loop, first come first served, so that everybody else waits for one piece and not for all.

    Cancelled before its turn, a caller takes none.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # this turn or the next

    async def mine(self) -> None:
        """Returns when no other caller has this turn of the loop; what is done until the next `await` is done alone."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            loop.call_soon(self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._pass_on, loop)
                return
        self._taken = False

"""What takes long on the event loop itself: one piece in every other turn of it, however many wait to do theirs."""

from __future__ import annotations

import asyncio
from collections import deque


class Turns:
    """Hands out turns of the loop, first come first served, so that everybody else waits for one piece and not for all.

    What came during a piece is read after it, and answered in the turn after that, which is therefore nobody's.
    Cancelled before its turn, a caller takes none.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._taken = False  # this turn or the next two

    async def mine(self) -> None:
        """Returns when no other caller has this turn of the loop; what is done until the next `await` is done alone."""
        loop = asyncio.get_running_loop()
        if self._taken:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append(turn)
            await turn
        else:
            self._taken = True
            self._pass_on_later(loop)

    def _pass_on_later(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(loop.call_soon, self._pass_on, loop)

    def _pass_on(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._pass_on_later(loop)
                return
        self._taken = False

"""Notices of routers to each other in Redis: where a session went, and which prefixes a foreign server was sent.

One stream, bounded, that each router writes behind and reads on its own; no request waits for it. What is lost costs
a session its place, or a prefix a hit, and no request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from maitred.storage.redis import PREFIX, PROBE_S, RedisStore

STREAM = PREFIX + b"notices"
MAX_KEPT = 16_384  # in the stream; about
READ_S = 0.2  # between two looks
MAX_READ = 4096


class Bound(msgspec.Struct, frozen=True, array_like=True):
    """A request went to the replica at `url`."""

    url: str
    hash_key: int | None  # 64 bits; its session stays there
    keys: tuple[int, ...]  # of its prompt, where the replica does not tell what it has


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Bound).decode


@dataclass(slots=True, eq=False)
class Notices:
    """One router's side. `on_notice` is told what the others say, oldest first; at the start all the stream has."""

    store: RedisStore
    on_notice: Callable[[Bound], None]
    num_unreadable: int = 0
    _router: bytes = field(default_factory=lambda: secrets.token_hex(8).encode())
    _last: bytes = b"0-0"
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task; in the event loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def tell(self, notice: Bound) -> None:
        payload = _encode(notice)
        added = ("XADD", STREAM, "MAXLEN", "~", MAX_KEPT, "*", "router", self._router, "notice", payload)
        self.store.write(added, len(payload))

    async def look(self) -> int:
        """Read what came since the last look; how much."""
        answers = await self.store.ask([("XRANGE", STREAM, b"(" + self._last, "+", "COUNT", MAX_READ)])
        if answers is None or not isinstance(answers[0], list):
            return 0
        for entry in answers[0]:
            self._last, fields = entry[0], _fields(entry[1])
            if fields.get(b"router") != self._router:
                self._note(fields.get(b"notice", b""))
        return len(answers[0])

    def _note(self, payload: bytes) -> None:
        try:
            notice: Bound = _decode(payload)
        except (msgspec.DecodeError, ValueError):
            self.num_unreadable += 1
            return
        self.on_notice(notice)

    async def _run(self) -> None:
        while True:
            num_read = await self.look()
            if num_read < MAX_READ:
                await asyncio.sleep(READ_S if self.store.is_up else PROBE_S)


def _fields(sent: Any) -> dict[bytes, bytes]:
    """Fields from a list of names and values, or from the client's own dict of them."""
    return sent if isinstance(sent, dict) else dict(zip(sent[::2], sent[1::2], strict=False))

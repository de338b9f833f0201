"""What routers share through Redis: leases of quotas, and notices to each other.

A lease is of one bucket for each limit, exchanged with ten times a second while it is asked for. Notices tell where a
session went, and which prefixes a foreign server was sent: one stream, bounded, that each router writes behind and
reads on its own; no request waits for it. What is lost costs a session its place, or a prefix a hit, and no request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from maitred.core.clock import Clock
from maitred.storage.redis import PREFIX, PROBE_S, RedisStore
from maitred.tenancy.shared import EXCHANGE_S, Order, SharedQuotas, SharedWindow

# A bucket is a hash: second (of Redis's own clock) -> amount. It counts for a minute, and for the seconds that a lease
# may be spent after it was taken. What is given back is taken off the newest seconds, as it was leased lately.
_EXCHANGE = """
local now = tonumber(redis.call('TIME')[1])
local owed, wanted, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local entries, total, amounts, seconds = redis.call('HGETALL', KEYS[1]), 0, {}, {}
for i = 1, #entries, 2 do
    local second, amount = tonumber(entries[i]), tonumber(entries[i + 1])
    if second + 62 <= now then
        redis.call('HDEL', KEYS[1], entries[i])
    else
        total = total + amount
        amounts[second] = amount
        seconds[#seconds + 1] = second
    end
end
local granted = math.max(0, math.min(wanted, limit - total - owed))
local added = owed + granted
if added > 0 then redis.call('HINCRBY', KEYS[1], now, added) end
local back = math.max(0, -wanted)
table.sort(seconds, function(a, b) return a > b end)
for _, second in ipairs(seconds) do
    local part = math.min(back, amounts[second])
    if part > 0 then
        redis.call('HINCRBY', KEYS[1], second, -part)
        back, total = back - part, total - part
    end
end
redis.call('EXPIRE', KEYS[1], 64)
return {granted, math.max(0, limit - total - added)}
"""


class QuotaExchange:
    """Keeps the leases of all tenants that ask. `start` and `close` in one event loop."""

    def __init__(self, store: RedisStore, quotas: SharedQuotas, clock: Clock) -> None:
        """`clock` is the one that quotas are asked with."""
        self._store, self._quotas, self._clock = store, quotas, clock
        self._task: asyncio.Task[None] | None = None
        store.on_lost.append(quotas.lost)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def close(self) -> None:
        """Give back what was leased, as far as Redis answers."""
        self.stop()
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
            await self.exchange()

    async def exchange(self) -> None:
        """Exchange once with all buckets that want it."""
        due = self._quotas.due(self._clock.now())
        orders = [window.order() for _, window in due]
        commands = [_command(name, order) for (name, _), order in zip(due, orders, strict=True)]
        answers = await self._store.ask(commands)
        told: Sequence[Any] = answers if answers is not None else [None] * len(due)
        for (_, window), answer in zip(due, told, strict=True):
            self._note(window, answer)

    def _note(self, window: SharedWindow, answer: Any) -> None:
        if isinstance(answer, list) and len(answer) == 2:
            window.told(int(answer[0]), int(answer[1]), self._clock.now())
        else:  # gone, refused, or a key of another type
            window.lost()

    async def _run(self) -> None:
        while True:
            await self.exchange()
            await asyncio.sleep(EXCHANGE_S)


def _command(name: str, order: Order) -> tuple[Any, ...]:
    return ("EVAL", _EXCHANGE, 1, PREFIX + b"quota:" + name.encode(), *order)


# ---- notices


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

"""Leases of quotas from Redis: one bucket for each limit, exchanged with ten times a second while it is asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from maitred.core.clock import Clock
from maitred.storage.redis import PREFIX, RedisStore
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

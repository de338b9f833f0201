"""Redis, one server or a cluster, that routers share. Only a look-up waits for it, and that for 30 ms.

After three failures in a row a breaker opens: look-ups find nothing and writes are dropped, at once, until a write of
its own, tried every two seconds, works again. Each change is one line of the log.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from maitred.core.errors import ConfigError

logger = logging.getLogger(__name__)

LOOK_UP_S = 0.03
COMMAND_S = 1.0  # of a command that no request waits for
PROBE_S = 2.0
MAX_FAILURES = 3
MAX_QUEUED = 4096
MAX_QUEUED_BYTES = 32 * 1024 * 1024
BATCH = 64
MAX_CONNECTIONS = 32
PREFIX = b"maitred:"
CLUSTER = "+cluster"
Command = tuple[Any, ...]


@dataclass(slots=True)
class Breaker:
    """Circuit breaker: open after MAX_FAILURES in a row."""

    is_open: bool = False
    num_failures: int = 0

    def failed(self) -> bool:
        """Count a failure; whether the breaker opened with it."""
        self.num_failures += 1
        opened = not self.is_open and self.num_failures >= MAX_FAILURES
        self.is_open = self.is_open or opened
        return opened

    def worked(self) -> bool:
        """Note a success; whether the breaker closed with it."""
        self.num_failures = 0
        closed, self.is_open = self.is_open, False
        return closed


class RedisStore:
    """Values that several routers share, and the connection of all else that they do. Belongs to one event loop."""

    def __init__(self, url: str, *, probe_s: float = PROBE_S, user: str = "the router") -> None:
        """Connects with `start`. Raises ConfigError for a wrong URL, or where redis-py is not installed."""
        self._name, self._user = shown(url), user
        self._client = _client(url)
        self._breaker, self._probe_s = Breaker(), probe_s
        self._queue: deque[tuple[Command, int]] = deque()
        self._num_queued_bytes = 0
        self._is_filled = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_dropped = 0
        self.error: str | None = None  # of the last that it was asked, where that failed
        self.on_lost: list[Callable[[], None]] = []  # told when it is gone

    @property
    def is_up(self) -> bool:
        return not self._breaker.is_open

    def start(self) -> None:
        """Start the tasks; in the event loop."""
        self._tasks = [asyncio.create_task(self._write_behind()), asyncio.create_task(self._probe_while_open())]

    def stop(self) -> None:
        """Stop the tasks; what is not written yet is lost."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """The connections too; one that hangs is left to the process's end."""
        self.stop()
        with suppress(Exception):
            async with asyncio.timeout(COMMAND_S):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._client.aclose()

    # ---- values

    async def get(self, key: bytes) -> bytes | None:
        """None too where it takes longer than LOOK_UP_S, or the breaker is open."""
        if not self.is_up:
            return None
        try:
            async with asyncio.timeout(LOOK_UP_S):
                value: bytes | None = await self._client.get(PREFIX + key)
        except Exception as error:  # a server that is none may say anything
            if _is_other_type(error):
                self.drop(key)
            else:
                self._failed(error)
            return None
        self._worked()
        return value

    def put(self, key: bytes, value: bytes, ttl_s: float) -> None:
        self.write(("SET", PREFIX + key, value, "PX", max(1, round(ttl_s * 1000))), len(value))

    def drop(self, key: bytes) -> None:
        self.write(("DEL", PREFIX + key))

    def write(self, command: Command, num_bytes: int = 0) -> None:
        """Written behind; dropped while the breaker is open, or where too much waits."""
        if not self.is_up or len(self._queue) >= MAX_QUEUED or self._num_queued_bytes + num_bytes > MAX_QUEUED_BYTES:
            self.num_dropped += 1
            return
        self._queue.append((command, num_bytes))
        self._num_queued_bytes += num_bytes
        self._is_filled.set()

    async def ask(self, commands: Sequence[Command], timeout_s: float = COMMAND_S) -> list[Any] | None:
        """The answers to several commands, an exception where one was refused; None where Redis is gone.

        For tasks of their own that no request waits for.
        """
        if not self.is_up or not commands:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                answers = await self._execute(commands)
        except Exception as error:
            self._failed(error)
            return None
        refused = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if refused is None or _is_other_type(refused):
            self._worked()
        else:
            self._failed(refused)
        return answers

    async def drop_all(self, beginning: bytes) -> int:
        """Deletes what has a key that begins so, without signs of a pattern; how many there were."""
        count, batch = 0, []
        try:
            async for key in self._client.scan_iter(match=PREFIX + beginning + b"*", count=1000):
                batch.append(("UNLINK", key))
                if len(batch) == BATCH:
                    count += _num_deleted(await self.ask(batch))
                    batch = []
        except Exception as error:
            self._failed(error)
        return count + _num_deleted(await self.ask(batch))

    # ---- its tasks

    async def _write_behind(self) -> None:
        while True:
            await self._is_filled.wait()
            self._is_filled.clear()
            while self._queue:
                commands = [self._next() for _ in range(min(BATCH, len(self._queue)))]
                answers = await self.ask(commands)
                failed = len(commands) if answers is None else sum(isinstance(a, Exception) for a in answers)
                self.num_dropped += failed

    def _next(self) -> Command:
        command, num_bytes = self._queue.popleft()
        self._num_queued_bytes -= num_bytes
        return command

    async def _probe_while_open(self) -> None:
        """Probe while the breaker is open; once at the start too, to tell of a wrong password early."""
        while True:
            if self._breaker.is_open or not self._breaker.num_failures:
                await self.probe()
            await asyncio.sleep(self._probe_s)

    async def probe(self) -> None:
        """A write: a server that is full is of no use."""
        try:
            async with asyncio.timeout(COMMAND_S):
                await self._client.set(PREFIX + b"probe", b"1", px=10_000)
        except Exception as error:
            self._failed(error)
        else:
            self._worked()

    async def _execute(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    # ---- the breaker

    def _failed(self, error: Exception) -> None:
        self.error = (str(error) or type(error).__name__)[:200]
        if not self._breaker.failed():
            return
        logger.warning("Redis at %s is of no use (%s); %s goes on without it", self._name, self.error, self._user)
        self.num_dropped += len(self._queue)
        self._queue.clear()
        self._num_queued_bytes = 0
        for tell in self.on_lost:
            tell()

    def _worked(self) -> None:
        self.error = None
        if self._breaker.worked():
            logger.warning("Redis at %s is used again", self._name)


def shown(url: str) -> str:
    """Without its password."""
    return re.sub(r"//[^@/]*@", "//", url)


def _is_other_type(error: Exception) -> bool:
    """Whether the key holds another kind of value."""
    return "WRONGTYPE" in str(error)


def _num_deleted(answers: list[Any] | None) -> int:
    return sum(answer for answer in answers or () if isinstance(answer, int))


def _client(url: str) -> Any:
    try:
        from redis.asyncio import BlockingConnectionPool, Redis
        from redis.asyncio.cluster import RedisCluster
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff
    except ImportError:
        raise ConfigError("Redis needs the package redis; install it with: pip install 'maitred[redis]'") from None
    scheme, separator, rest = url.partition("://")
    settings: dict[str, Any] = {
        "socket_timeout": COMMAND_S,
        "socket_connect_timeout": COMMAND_S,
        "retry": Retry(NoBackoff(), 0),  # the breaker decides when it is tried again
        "protocol": 2,
    }
    try:
        if scheme.endswith(CLUSTER):
            plain = scheme.removesuffix(CLUSTER) + separator + rest
            settings["retry"] = Retry(NoBackoff(), 3)  # a slot that moved is asked for where it went
            return RedisCluster.from_url(plain, max_connections=MAX_CONNECTIONS, **settings)
        pool = BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=COMMAND_S, **settings)
        return Redis(connection_pool=pool)
    except ValueError as error:
        raise ConfigError(f"redis is {shown(url)!r}: {error}") from None

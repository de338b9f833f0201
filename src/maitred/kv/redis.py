"""KV Redis tier: blocks that servers share through Redis, over its one connection with its breaker.

An event loop of its own talks to Redis; `read` and `write` wait for it in the caller's thread. A value is a block and a
checksum bound to its name. How long values stay is Redis's own matter (`maxmemory-policy`) within TTL_S; what is there
is remembered for a moment only, as it may go.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from maitred.core.errors import ConfigError
from maitred.kernels.kv_pool import checksums
from maitred.kv.tiers import DropReason, KVTier, TierStats
from maitred.storage.redis import PREFIX, Command, RedisStore

TTL_S = 7 * 24 * 3600.0
KNOWN_S = 60.0
MAX_KNOWN = 65_536
_SUM_BYTES = 8
_Answer = TypeVar("_Answer")
_PIECE_BYTES = 4 * 2**20  # asked for together; each piece has a second


def open_kv_redis(url: str, *, max_block_bytes: int, bytes_per_block: int, fingerprint: str) -> KVRedis:
    """Raises ConfigError for a wrong URL, without the package redis, and where a block is over the bound."""
    if bytes_per_block > max_block_bytes:
        raise ConfigError(
            f"--kv-redis-max-block-bytes is {max_block_bytes}, and a block takes {bytes_per_block}; "
            f"give that or more, or leave --kv-redis out"
        )
    return KVRedis(url, bytes_per_block, fingerprint)


class KVRedis(KVTier):
    """Made by `open_kv_redis`. Tells no changes: every engine finds what is there."""

    name, has_index = "redis", False

    def __init__(self, url: str, bytes_per_block: int, fingerprint: str) -> None:
        self.bytes_per_block, self.stats = bytes_per_block, TierStats()
        self._names = b"kv:" + hashlib.sha256(fingerprint.encode()).hexdigest()[:32].encode() + b":"
        self._piece = max(1, _PIECE_BYTES // bytes_per_block)  # blocks
        self._lock = threading.Lock()
        self._is_closed = False
        self._known: OrderedDict[bytes, float] = OrderedDict()  # key -> until when; the newest last
        self._store = RedisStore(url, user="the KV tier")
        self._store.on_lost.append(self._forget_all)
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="maitred-kv-redis", daemon=True)
        self._thread.start()

    # ---- KVTier

    @property
    def hindrance(self) -> str | None:
        self._wait_for(self._store.probe)
        return self._store.error

    def num_known(self, keys: Sequence[bytes]) -> int:
        now, known = time.monotonic(), self._known
        return next((i for i, key in enumerate(keys) if known.get(key, 0.0) < now), len(keys))

    def read(self, keys: Sequence[bytes], into: memoryview) -> int:
        into, num_read = into.cast("B"), 0
        while num_read < len(keys):
            piece = keys[num_read : num_read + self._piece]
            count = self._take(piece, into[num_read * self.bytes_per_block :])
            num_read += count
            if count < len(piece):
                break
        with self._lock:
            self.stats.num_hits += num_read
            self.stats.num_misses += len(keys) - num_read
        return num_read

    def write(self, keys: Sequence[bytes], rows: memoryview) -> int:
        rows, size = rows.cast("B"), self.bytes_per_block
        sums = checksums(rows, len(keys)).tolist()
        fresh = [i for i, key in enumerate(keys) if not self.num_known([key])]
        for begin in range(0, len(fresh), self._piece):
            piece = fresh[begin : begin + self._piece]
            values = [rows[i * size : (i + 1) * size] for i in piece]
            if not self._put([keys[i] for i in piece], values, [sums[i] for i in piece]):
                self._count_drops(DropReason.UNREACHABLE, len(fresh) - begin - len(piece))
                break
        return self.num_known(keys)

    def clear(self) -> int:
        """Drop all blocks of this fingerprint, whichever server wrote them."""
        self._forget_all()
        return self._wait_for(lambda: self._store.drop_all(self._names)) or 0

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()
        self._forget_all()

    # ---- in the event loop

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # its end cancels what still waits
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._store.start()
        await self._closing.wait()
        await self._store.close()

    # ---- in the caller's thread

    def _start(self, work: Callable[[], Coroutine[Any, Any, _Answer]]) -> Future[_Answer] | None:
        """None when it is closed."""
        with self._lock:  # what is started before the end is cancelled by it
            return None if self._is_closed else asyncio.run_coroutine_threadsafe(work(), self._loop)

    def _wait_for(self, work: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer | None:
        future = self._start(work)
        try:
            return future.result() if future is not None else None
        except CancelledError:
            return None

    def _take(self, keys: Sequence[bytes], into: memoryview) -> int:
        """Verified blocks; how many from the front. Those that are bad are deleted."""
        names, size = [self._name(key) for key in keys], self.bytes_per_block
        answers = self._wait_for(lambda: self._store.ask([("GET", PREFIX + name) for name in names])) or []
        num_whole = next((i for i, answer in enumerate(answers) if not self._is_whole(answer)), len(answers))
        for i, answer in enumerate(answers[:num_whole]):
            into[i * size : (i + 1) * size] = memoryview(answer)[:size]
        sums = checksums(into[: num_whole * size], num_whole).tolist()
        ends = [_bound(total, name) for total, name in zip(sums, names, strict=False)]
        num_good = next((i for i, end in enumerate(ends) if answers[i][size:] != end), num_whole)
        if num_good < len(answers) and answers[num_good] is not None:
            self._drop_bad(names[num_good], DropReason.DAMAGED if num_good < num_whole else DropReason.TORN)
        self._remember(keys[:num_good])
        self._forget(keys[num_good:])
        return num_good

    def _is_whole(self, answer: Any) -> bool:
        return isinstance(answer, bytes) and len(answer) == self.bytes_per_block + _SUM_BYTES

    def _drop_bad(self, name: bytes, reason: DropReason) -> None:
        self._count_drops(reason, 1)
        self._wait_for(lambda: self._store.ask([("DEL", PREFIX + name)]))

    def _put(self, keys: Sequence[bytes], rows: Sequence[memoryview], sums: Sequence[int]) -> bool:
        """Whether Redis answered."""
        commands: list[Command] = []
        for key, row, total in zip(keys, rows, sums, strict=True):
            name = self._name(key)
            commands.append(("SET", PREFIX + name, b"".join((row, _bound(total, name))), "PX", round(TTL_S * 1000)))
        answers = self._wait_for(lambda: self._store.ask(commands))
        if answers is None:
            self._count_drops(DropReason.UNREACHABLE, len(keys))
            return False
        kept = [key for key, answer in zip(keys, answers, strict=True) if not isinstance(answer, Exception)]
        self._count_drops(DropReason.NO_SPACE, len(keys) - len(kept))
        self._remember(kept)
        self.stats.num_written += len(kept)
        return True

    # ---- books

    def _name(self, key: bytes) -> bytes:
        return self._names + hashlib.blake2b(key, digest_size=24).digest()

    def _remember(self, keys: Sequence[bytes]) -> None:
        until = time.monotonic() + KNOWN_S
        with self._lock:
            for key in keys:
                self._known[key] = until
                self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
            self._sum_up()

    def _forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in keys:
                self._known.pop(key, None)
            self._sum_up()

    def _forget_all(self) -> None:
        with self._lock:
            self._known.clear()
            self._sum_up()

    def _sum_up(self) -> None:
        """Count what this server knows: not what others stored, nor what Redis let go since."""
        self.stats.num_blocks = len(self._known)
        self.stats.num_bytes = len(self._known) * (self.bytes_per_block + _SUM_BYTES)

    def _count_drops(self, reason: DropReason, count: int) -> None:
        with self._lock:
            self.stats.dropped[reason] += count


def _bound(total: int, name: bytes) -> bytes:
    """A row's checksum, of this name: the value of another key is none."""
    tag = hashlib.blake2b(name, digest_size=_SUM_BYTES).digest()
    return (total ^ int.from_bytes(tag, "little")).to_bytes(_SUM_BYTES, "little")

"""LoRA adapters of an engine: the known ones, and an LRU cache of those in memory, within a bound of bytes.

An adapter is read and packed in a thread; requests that need it are held outside the scheduler's queue until then
(`loop`). Room is made before anything is read, so that resident adapters and those being read never exceed the bound
together; it goes to waiting requests in policy order. An adapter is known by a key of its name and its bytes: a load
under the same name makes another adapter, for new requests, and files that have changed since are refused when they
are read again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import heapify, heappop
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from maitred.config import LoraConfig
from maitred.core.errors import CheckpointError, ConfigError, MaitredError
from maitred.engine.limits import STEP_SWITCH_INTERVAL_S, hand_over_quickly
from maitred.engine.memory import format_bytes
from maitred.engine.model_facts import AdapterFacts
from maitred.model.adapters import Adapter, read_adapter
from maitred.model.spec import DecoderSpec
from maitred.scheduler.engine_core import EngineCore, StepListener

Done = Callable[[str], None]
"""Told what is wrong, or nothing; in any thread."""
if TYPE_CHECKING:
    from maitred.executor.native_lora import NativeAdapters

Read = Callable[[Path, Path | None], Adapter]
"""(folder, where its files must lie); in any thread. Raises CheckpointError."""
Place = Callable[[], tuple[Any, ...]]
"""Of a request in the policy's order as it is now; smaller is served first."""


class _Ask(NamedTuple):
    key: str
    done: Done
    place: Place


class AdapterCache(StepListener):
    """The adapters of one engine. `introduce` is for any thread, the rest for the engine's, between steps."""

    follows_steps = False
    has_figures = False  # until a request has an adapter

    def __init__(self, store: NativeAdapters, read: Read, max_bytes: int) -> None:
        self._store, self._read, self._max_bytes = store, read, max_bytes
        self._known: dict[str, AdapterFacts] = {}
        self._resident: OrderedDict[str, int] = OrderedDict()  # key -> bytes; with those that are being read; LRU first
        self._reading: dict[str, list[_Ask]] = {}
        self._asks: dict[str, _Ask] = {}  # by request, in order of arrival: those that wait for room
        self._first: _Ask | None = None  # of them, when room was last looked for
        self._may_fit = False  # something has changed since
        self._will_settle = False
        self._holders: dict[str, str] = {}  # request -> key
        self._users: Counter[str] = Counter()
        self._read_now: deque[tuple[str, Any, str]] = deque()  # key, packed, what is wrong
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="maitred-adapters")
        self.num_loads = self.num_evictions = 0

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def ended(self, request_id: str) -> None:
        self.release(request_id)

    def figures(self) -> Mapping[str, Any]:
        return {
            "adapter_bytes": self.num_bytes,
            "adapter_loads": self.num_loads,
            "adapter_evictions": self.num_evictions,
        }

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters that are resident or being read."""
        return sum(self._resident.values())

    def introduce(self, name: str, path: str, inside: str | None = None) -> AdapterFacts:
        """Read and check a folder, keeping nothing. Raises CheckpointError, or ConfigError for one that never fits."""
        adapter = self._read(Path(path), None if inside is None else Path(inside))
        num_bytes = self._store.num_bytes(adapter)
        if num_bytes > self._max_bytes:
            raise ConfigError(
                f"adapter {name} takes {format_bytes(num_bytes)}, over --lora-memory-bytes "
                f"({format_bytes(self._max_bytes)}); raise that"
            )
        return AdapterFacts(name, path, adapter.digest, adapter.rank, num_bytes, inside)

    def begin_introducing(self, introduce: Callable[[], None]) -> None:
        """Have `introduce` called in the thread that reads."""
        self._thread.submit(introduce)

    def know(self, facts: Iterable[AdapterFacts]) -> None:
        """Let requests name these adapters from now on."""
        self._known.update((one.key, one) for one in facts)

    def forget(self, key: str) -> None:
        """Take no new requests for the adapter; free its memory at once, or when its last request has ended."""
        self._known.pop(key, None)
        self._drop_if_forgotten(key)
        self._room_came()

    def acquire(self, request_id: str, key: str, done: Done, place: Place = tuple) -> None:
        """`done` is told when it is resident, or waited for no more; it stays so until `release`. Those of equal place
        wait in the order of these calls.
        """
        if key not in self._known:
            done(f"adapter {key.partition('@')[0]} is not loaded any more")
            return
        self._asks[request_id] = _Ask(key, done, place)
        self.has_figures = True
        self._core.follow(self, True)
        if self._first is None or place() < self._first.place():
            self._give_out()

    def release(self, request_id: str) -> None:
        """The request has ended, or waits no more; for requests without adapters this does nothing."""
        waited, key = self._asks.pop(request_id, None), self._holders.pop(request_id, None)
        if waited is not None:
            waited.done("")
        if key is not None:
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
                self._drop_if_forgotten(key)
        if waited is not None or key is not None:
            self._room_came()

    def _room_came(self) -> None:
        self._may_fit = True
        self._core.follow(self, bool(self._asks or self._holders))
        if self._asks and not self._will_settle:
            self._will_settle = True
            self._core.call_soon(self.settle)

    def settle(self) -> None:
        """Take in what was read, and give away room that has come free."""
        self._will_settle = False
        while self._read_now:
            self._came(*self._read_now.popleft())
        if self._may_fit:
            self._give_out()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _give_out(self) -> None:
        """Give adapter memory to waiting requests in policy order; never skip one, so a large adapter cannot starve."""
        self._may_fit, self._first = False, None
        waiting = [(ask.place(), number, one) for number, (one, ask) in enumerate(self._asks.items())]
        heapify(waiting)
        while waiting:
            request_id = heappop(waiting)[-1]
            ask = self._asks[request_id]
            if not self._give(request_id, ask):
                self._first = ask
                return

    def _give(self, request_id: str, ask: _Ask) -> bool:
        """False where there is no room."""
        facts = self._known.get(ask.key)
        if ask.key not in self._resident and facts is not None and not self._make_room(facts.num_bytes):
            return False
        del self._asks[request_id]
        if ask.key not in self._resident and facts is None:
            ask.done(f"adapter {ask.key.partition('@')[0]} is not loaded any more")
        else:
            self._hold(request_id, ask, facts)
        return True

    def _hold(self, request_id: str, ask: _Ask, facts: AdapterFacts | None) -> None:
        self._holders[request_id] = ask.key
        self._users[ask.key] += 1
        if ask.key not in self._resident:
            assert facts is not None
            self._resident[ask.key] = facts.num_bytes
            self._reading[ask.key] = []
            self._thread.submit(self._read_again, facts)
        self._resident.move_to_end(ask.key)
        if ask.key in self._reading:
            self._reading[ask.key].append(ask)
        else:
            ask.done("")

    def _make_room(self, num_bytes: int) -> bool:
        """Evict those unused for longest; none, if that would not do."""
        room = self._max_bytes - self.num_bytes
        victims: list[str] = []
        for key, size in self._resident.items():
            if room >= num_bytes:
                break
            if not self._users[key] and key not in self._reading:
                victims.append(key)
                room += size
        if room < num_bytes:
            return False
        for key in victims:
            self._unload(key)
            self.num_evictions += 1
        return True

    def _read_again(self, facts: AdapterFacts) -> None:
        """Read and pack an adapter; runs in the cache's thread."""
        packed, error = None, ""
        try:
            adapter = self._read(Path(facts.path), None if facts.inside is None else Path(facts.inside))
            if adapter.digest != facts.digest:
                raise CheckpointError(f"the files in {facts.path} have changed since it was loaded; load it again")
            packed = self._store.pack(adapter)
        except MaitredError as problem:
            error = f"adapter {facts.name}: {problem}"
        except (OSError, MemoryError, ValueError) as problem:
            error = f"adapter {facts.name}: {type(problem).__name__}: {problem}"
        self._read_now.append((facts.key, packed, error))
        self._core.call_soon(self.settle)

    def _came(self, key: str, packed: Any, error: str) -> None:
        waiting = self._reading.pop(key)
        self._may_fit = True
        if not error:
            try:
                self._store.load(key, packed)
                self.num_loads += 1
            except MaitredError as problem:
                error = str(problem)
        if error:
            del self._resident[key]
        for ask in waiting:
            ask.done(error)
        self._drop_if_forgotten(key)

    def _unload(self, key: str) -> None:
        del self._resident[key]
        self._store.unload(key)

    def _drop_if_forgotten(self, key: str) -> None:
        if key in self._resident and key not in self._known and not self._users[key] and key not in self._reading:
            self._unload(key)


def adapter_cache(store: NativeAdapters | None, spec: DecoderSpec, config: LoraConfig) -> AdapterCache | None:
    """None where the executor has none. Raises ConfigError where adapters are wanted nevertheless."""
    if store is None:
        if config.lora or config.lora_dir is not None:
            raise ConfigError("LoRA adapters need the native executor; leave out --lora and --lora-dir, or PyTorch")
        return None
    hand_over_quickly(STEP_SWITCH_INTERVAL_S)  # adapters are read while steps run
    return AdapterCache(store, partial(_read, spec, config.max_lora_rank), config.lora_memory_bytes)


def _read(spec: DecoderSpec, max_rank: int, folder: Path, inside: Path | None) -> Adapter:
    return read_adapter(folder, spec, max_rank=max_rank, inside=inside)


def introduced(cache: AdapterCache, named: Mapping[str, str]) -> Iterator[AdapterFacts]:
    """Adapters named at the start, known once yielded. Raises CheckpointError or ConfigError, with the name."""
    for name, path in named.items():
        try:
            facts = cache.introduce(name, path)
        except CheckpointError as error:
            raise CheckpointError(f"--lora {name}={path}: {error}") from None
        cache.know([facts])
        yield facts

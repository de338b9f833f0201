"""The prefixes and the load of this replica, as one stream of events for each router that listens."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from operator import add

import msgspec

import maitred
from maitred.api.http.fleet_headers import SALT
from maitred.api.http.in_flight import InFlight
from maitred.core.errors import Overloaded
from maitred.core.replica import ReplicaState
from maitred.core.request import NO_CHARGES, Charges, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.client import EngineClient
from maitred.engine.frames import BlockChanges
from maitred.engine.intake import ServedModel
from maitred.engine.replica import Replica
from maitred.fleet import told
from maitred.fleet.disagg import facts_of
from maitred.fleet.prefix_keys import prefix_keys, read_asked
from maitred.fleet.stored_keys import KeyBlock, StoredKeys, TokenLengths, ends_of_tokens, tokens_of_keys

MAX_LISTENERS = 16
MAX_UNTOLD_ENDS = 4096  # to a router that is slow
PAUSE_S = 0.02  # what changes meanwhile is told at once
LINGER_S = 60.0  # after the last listener: a router whose stream broke comes back within it
NoteTokens = Callable[[str | Sequence[int], RequestSpec], None]
_encode = msgspec.json.Encoder().encode
FORGOTTEN_S = 10.0  # after an answer broke off the engine has told of its samples, or never will


class FleetFeed:
    """At work while a router listens, and LINGER_S more. Belongs to the event loop, but for what `noting` returns."""

    def __init__(self, replica: Replica, model: ServedModel, in_flight: InFlight) -> None:
        self._replica, self._model, self._in_flight = replica, model, in_flight
        self.keys = StoredKeys()
        self.unfinished = Unfinished(self._ended)
        self.is_replaced = False  # another version is in service
        self._ends: list[deque[told.Ended]] = []  # to be told, by listener
        self._computed: list[Counter[str]] = []  # likewise
        self._num_listeners = 0
        self._lingering: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._lengths = TokenLengths(self._token_bytes)
        self.is_on = False
        """Whether bodies are kept until their keys are known."""

    def noting(self, path: str, sent: bytes, headers: Mapping[bytes, bytes]) -> NoteTokens:
        """The function to call with a request's prompt and spec, in any thread. `sent` is the body as `path` takes it,
        `headers` are a router's.
        """
        return _Noting(self, path, sent, headers.get(SALT, b"").decode("latin-1")).note

    def note(self, chain: Sequence[KeyBlock]) -> None:
        """Keys of a request, and the block that each ends in."""
        if self.is_on:
            self.keys.note(chain)
            self._wake()

    def computed(self, tenant: str, compute_us: int) -> None:
        """A request of this tenant's ended; told with the next beat."""
        for computed in self._computed:
            computed[tenant] += compute_us

    def _token_bytes(self, token: int) -> bytes:
        return self._model.tokenizer.token_bytes(token)  # which is read when it is first asked for

    def take_over(self, before: FleetFeed) -> None:
        """Take the place of another version's feed: what is unfinished there is told here, to routers that come again,
        for its listeners' streams end.
        """
        self.unfinished = before.unfinished
        self.unfinished.tell = self._ended
        before.is_replaced = True
        before._wake()

    @property
    def block_size(self) -> int:
        return self._model.block_size

    def ends_of(self, prompt: str, token_ids: Sequence[int]) -> Sequence[int]:
        """Where each token ends in the prompt's bytes. From any thread."""
        return ends_of_tokens(prompt, token_ids, self._lengths)

    def _blocks_changed(self, changes: BlockChanges | None) -> None:
        if changes is None:
            self.keys.forgot()
        else:
            self.keys.blocks_changed(changes.stored, changes.removed)
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Server-sent events: this server's identity, all keys, then what changes, and a beat. Raises Overloaded."""
        if self._num_listeners >= MAX_LISTENERS:
            raise Overloaded(f"{MAX_LISTENERS} routers listen already; close one of them", retry_after_s=5.0)
        self._enter()
        changes, loop = self.keys.listen(), asyncio.get_running_loop()
        ends: deque[told.Ended] = deque(maxlen=MAX_UNTOLD_ENDS)
        computed: Counter[str] = Counter()
        self._ends.append(ends)
        self._computed.append(computed)
        try:
            yield _event(told.Began(identity(self._model)))
            beat_at = loop.time()
            while True:
                changed = self._changed
                while changes:
                    yield _event(told.KeysChanged(*changes.take(told.MAX_KEYS_AN_EVENT)))
                while ends:
                    yield _event(ends.popleft())
                if loop.time() >= beat_at:
                    beat_at = max(beat_at + told.BEAT_S, loop.time())
                    if computed:
                        yield _event(told.Computed(dict(computed)))
                        computed.clear()
                    yield _event(self._load())
                if self._is_over:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout_at(beat_at):
                        await changed.wait()
                        await asyncio.sleep(PAUSE_S)
        finally:
            self.keys.leave(changes)
            self._ends = [others for others in self._ends if others is not ends]
            self._computed = [others for others in self._computed if others is not computed]
            self._left()

    @property
    def _is_over(self) -> bool:
        """Another version is in service; or the server is going, and there is no more to say of what was asked."""
        flight = self._in_flight
        return self.is_replaced or (flight.draining and flight.is_empty and not self.unfinished.is_awaited)

    def _ended(self, ended: told.Ended) -> None:
        for ends in self._ends:
            ends.append(ended)
        self._wake()

    def _load(self) -> told.Load:
        state = self._replica.state()
        return told.Load(
            state=self._phase(state),
            error=state.error,
            drain_s=self._in_flight.drain_left_s,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            num_blocks=state.num_blocks,
            num_free_blocks=state.num_blocks - state.num_blocks_used,
            prefill_tokens_per_s=state.prefill_tokens_per_s,
            decode_tokens_per_s=state.decode_tokens_per_s,
            worker=self._kv_worker(),
        )

    def _kv_worker(self) -> told.KVWorker | None:
        """This server as a KV worker; None if others cannot pull its KV."""
        engine = self._replica
        if not isinstance(engine, EngineClient):
            return None
        facts, numbers = facts_of(engine, engine.role, is_beside=False), identity(self._model).fingerprint
        if facts is None:
            return None
        return told.KVWorker(replace(facts, numbers=str(numbers or "")), engine.kv_addresses)

    def _phase(self, state: ReplicaState) -> told.Phase:
        if not state.alive:
            return "loading" if state.loading else "dead"
        if self._in_flight.draining:
            return "draining"
        return "asleep" if state.asleep else "ready"

    # -- listeners

    def _enter(self) -> None:
        self._num_listeners += 1
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        if not self.is_on:
            self.is_on = True
            self._replica.tell_router(self._blocks_changed)

    def _left(self) -> None:
        self._num_listeners -= 1
        if not self._num_listeners:
            self._lingering = asyncio.get_running_loop().call_later(LINGER_S, self._end)

    def _end(self) -> None:
        self._lingering = None
        if self.is_on:
            self.is_on = False
            self._replica.tell_router(None)
            self.keys = StoredKeys()


class _Noting:
    """A body, from its arrival until it is known which blocks its keys end in."""

    def __init__(self, feed: FleetFeed, path: str, sent: bytes, salt: str) -> None:
        self._feed, self._path, self._sent, self._salt = feed, path, sent, salt
        self._loop = asyncio.get_running_loop()

    def note(self, prompt: str | Sequence[int], spec: RequestSpec) -> None:
        """Note the prompt's prefix keys, in a thread; the body is let go."""
        body, self._sent = read_asked(self._path, self._sent), b""
        found, hashes, feed = prefix_keys(body, self._salt), spec.block_hashes, self._feed
        counts = tokens_of_keys(body, found, prompt, lambda: feed.ends_of(str(prompt), spec.prompt_token_ids))
        nums = [min(count // feed.block_size, len(hashes)) for count in counts]
        chain = [KeyBlock(key, hashes[num - 1] if num else None) for key, num in zip(found.keys, nums, strict=False)]
        with suppress(RuntimeError):  # the loop is closed: no router listens any more
            self._loop.call_soon_threadsafe(feed.note, chain)


@dataclass(slots=True, eq=False)
class _Answer:
    request_id: str  # the router's
    running: set[str]  # ids of its samples that the engine has
    usage: told.ToldUsage = told.NOTHING
    broke_off: bool = False

    def add(self, charges: Charges) -> None:
        prompt, _, output = charges[:3]
        more = told.ToldUsage(prompt, charges.num_cached_tokens if prompt else 0, output, charges.compute_us)
        self.usage = told.ToldUsage(*map(add, self.usage, more))


class Unfinished:
    """Follows the answers for routers to the engine's last word on them. Belongs to the event loop."""

    def __init__(self, tell: Callable[[told.Ended], None]) -> None:
        self.tell = tell
        self.answers: dict[str, _Answer] = {}  # by id of each sample that the engine has
        self._num_broken = 0

    @property
    def is_awaited(self) -> bool:
        """Whether a request that broke off is still to be told of."""
        return self._num_broken > 0

    @contextmanager
    def following(self, request_id: str, specs: Iterable[RequestSpec], ended: frozenset[str]) -> Iterator[None]:
        """While the samples are answered; leaving it by an exception says that they came to no end. Those `ended` had
        done so elsewhere.
        """
        answer = _Answer(request_id, set())
        for spec in specs:
            if spec.request_id in ended and spec.resumed is not None:
                answer.add(spec.resumed.charges)
            else:
                answer.running.add(spec.request_id)
                self.answers[spec.request_id] = answer
        try:
            yield
        except BaseException:
            self._broke_off(answer)
            raise
        finally:
            if not answer.broke_off:
                self._forget(answer)

    def progressed(self, progress: Sequence[RequestProgress]) -> None:
        """Take what the engine told of all requests at once."""
        for item in progress:
            if item.finish_reason is not None and (answer := self.answers.pop(item.request_id, None)) is not None:
                answer.running.discard(item.request_id)
                answer.add(item.charges or NO_CHARGES)
                self._tell_if_over(answer)

    def _broke_off(self, answer: _Answer) -> None:
        answer.broke_off = True
        self._num_broken += 1
        self._tell_if_over(answer)
        if answer.running:
            asyncio.get_running_loop().call_later(FORGOTTEN_S, self._give_up, answer)

    def _tell_if_over(self, answer: _Answer) -> None:
        if answer.broke_off and not answer.running:
            self._num_broken -= 1
            self.tell(told.Ended(answer.request_id, answer.usage))

    def _give_up(self, answer: _Answer) -> None:
        if answer.running:
            self._num_broken -= 1
            self._forget(answer)

    def _forget(self, answer: _Answer) -> None:
        for name in answer.running:
            self.answers.pop(name, None)
        answer.running.clear()


def identity(model: ServedModel | None) -> told.VersionResponse:
    """This server's identity; as it loads it has no model."""
    if model is None:
        return told.VersionResponse(version=maitred.__version__)
    held = model.footprint
    return told.VersionResponse(
        version=maitred.__version__,
        models=model.names,
        slots=model.max_num_seqs or None,
        max_model_len=model.max_model_len,
        block_size=model.block_size,
        fingerprint=None
        if held is None
        else told.Fingerprint(model.revision, held.executor, held.dtype, held.kv_dtype, held.isa),
    )


def _event(event: told.FleetEvent) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"

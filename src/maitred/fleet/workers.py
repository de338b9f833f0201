"""Several engines as one replica: each in a process of its own, and a cluster core that says which gets a request.

Every worker has a client of its own, with its supervisor, restarts and crash isolation. When its engine ends, requests
that may go on do so with another worker, as resumed requests (docs/design/0011-engine-process.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import msgspec

from maitred.config import MachineShare, SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead
from maitred.core.objectives import promised
from maitred.core.replica import ReplicaState, TierView, WorkerView
from maitred.core.request import FinishReason, RequestSpec
from maitred.engine.adapter_book import AdapterBook, adapters_at_work
from maitred.engine.client import EngineClient
from maitred.engine.frames import BlockChanges, Command, Ready
from maitred.engine.installed import installed_policies
from maitred.engine.kv_storage import with_own_tiers
from maitred.engine.live_requests import LiveRequest
from maitred.engine.live_view import LiveView
from maitred.engine.memory import available_memory_bytes
from maitred.engine.model_facts import AdapterFacts, ModelFacts
from maitred.engine.progress_streams import ProgressStream
from maitred.engine.queries import AdapterFolder
from maitred.engine.replica import OnBlocks, OnComputed, OnProgress, Replica
from maitred.engine.sleep import SleepPhase
from maitred.engine.supervisor import Start
from maitred.fleet.choices import ChoicesMade
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import HandoverConfig
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.replicas import Report
from maitred.fleet.worker import Worker, key_of
from maitred.fleet.worker_requests import WorkerRequests
from maitred.fleet.worker_views import live_view_of_all, queue_of_all, queued_request, state_of_all, waiting_request
from maitred.scheduler.queue_view import MAX_PAGE, QueueView

NOTHING_KNOWN = Report(is_broken=True)

logger = logging.getLogger(__name__)
TICK_S = 0.05  # how late what falls due may be noticed
NEVER_S = 1e9
T = TypeVar("T")


class Workers(Replica):
    """The engines of a server. Everything runs on one event loop, but for `begin`, `wait` and `stop`.

    The first engine loads alone: it settles the context, and packs the weights that the others map.
    """

    def __init__(
        self,
        start: Start,
        clock: Clock,
        *,
        on_admitted: Callable[[LiveRequest], None] | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        slo: Sequence[str] = (),  # as ServerConfig's: hand-overs are chosen so that they are kept
    ) -> None:
        roles, scheduler = start.process.roles, start.config.scheduler
        share = MachineShare(
            num_engines=len(roles),
            available_bytes=available_memory_bytes(),
            exchanges_kv=start.process.handover != "never" and set(roles) != {"mixed"},
        )
        start = replace(start, config=replace(start.config, share=share))
        self._clock, self._on_admitted = clock, on_admitted
        self._exchange_kv = share.exchanges_kv
        self.adapters = AdapterBook(
            self._send_all,
            self._introduce,
            start.config.lora.lora_dir,
            wake_up=self.wake_up,
            at_work=lambda: adapters_at_work(self._requests.living()),
        )
        self._workers = [self._make(n, start, on_event if n == 0 else logger.debug) for n in range(len(roles))]
        config = FleetConfig(slots=scheduler.max_num_seqs, hold_timeout_s=NEVER_S)
        rules = HandoverConfig(handover=start.process.handover, **promised(slo))
        self._core = ClusterCore(config, scheduler, policies=installed_policies(), handover=rules)
        self._requests = WorkerRequests(self._core, self._workers, clock, self._wake_one)
        self._blocks = WorkerBlocks(self._core.index, self._workers, self._report)
        self._streams: WeakSet[ProgressStream] = WeakSet()
        self._facts: ModelFacts | None = None
        self.on_computed: OnComputed = lambda tenant, compute_us: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_closing = False

    def _make(self, number: int, start: Start, on_event: Callable[[str], None]) -> Worker:
        def changed() -> None:
            self._changed(worker)

        start = replace(start, config=with_own_tiers(start.config, number, len(start.process.roles)))
        client = EngineClient(start, self._clock, on_event=on_event, adapters=self.adapters, on_change=changed)
        worker = Worker(number, client, start.process.roles[number])
        client.on_progress = lambda progress, num_queued, now: self._requests.hear(worker, progress, num_queued, now)
        client.on_computed = self._computed
        return worker

    def _computed(self, tenant: str, compute_us: int) -> None:
        self.on_computed(tenant, compute_us)

    # -- beginning and end

    def begin(self) -> None:
        """Start the first engine. In the main thread, as `attach`: a process ends with the thread that began it."""
        self._workers[0].client.begin()

    def wait(self) -> Ready:
        """Wait until the first has loaded; returns facts of all workers together. Raises what keeps it from loading."""
        ready = self._workers[0].client.wait()
        self._facts = ready.facts
        num_slots, held = len(self._workers) * ready.facts.max_num_seqs, ready.facts.footprint
        if held is not None:
            held = replace(held, kv_bytes=len(self._workers) * held.kv_bytes)
        facts = msgspec.structs.replace(ready.facts, max_num_seqs=num_slots, footprint=held)
        return msgspec.structs.replace(ready, facts=facts)

    def give_up(self) -> None:
        """Give up from another thread: `wait` raises soon."""
        self._workers[0].client.give_up()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop`, which runs; the other engines begin. Idempotent."""
        if self._loop is not None or self._is_closing:
            return
        self._loop = loop
        for worker in self._workers:
            self._core.joined(worker.facts, self._clock.now())
            worker.client.attach(loop)
            self._changed(worker)
        self._blocks.learn(self._workers)
        for worker in self._workers[1:]:
            worker.client.begin(self._facts)
        self._tick()

    async def close(self) -> None:
        """Stop the engines after their current steps; unfinished requests end with EngineDead."""
        self._is_closing = self._requests.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.gather(*(worker.client.close() for worker in self._workers))
        self._requests.end_held(self._death())

    def stop(self) -> None:
        """The same from any thread once the loop has ended; idempotent."""
        self._is_closing = True
        with ThreadPoolExecutor(len(self._workers)) as threads:
            list(threads.map(lambda worker: worker.client.stop(), self._workers))

    # -- Replica

    @property
    def on_progress(self) -> OnProgress:
        """Callback that is told of all progress at once, before the streams that wait for it are woken."""
        return self._requests.on_progress

    @on_progress.setter
    def on_progress(self, listener: OnProgress) -> None:
        self._requests.on_progress = listener

    def submit(self, request: RequestSpec) -> ProgressStream:
        """Submit as `EngineClient.submit`: progress comes out of the stream, whichever worker makes it."""
        loop = asyncio.get_running_loop()
        self.attach(loop)
        stream = ProgressStream(self, request.request_id, loop, self._streams)
        if self._is_closing or not self._left:
            stream.fail(self._death())
            return stream
        if request.request_id in self._requests.prompts:
            raise ValueError(f"request id {request.request_id!r} is already running")
        live = LiveRequest(request, stream)
        if self._on_admitted is not None:
            self._on_admitted(live)
        self._requests.enter(live)
        return stream

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self._requests.abort(request_id, reason)

    def state(self) -> ReplicaState:
        """Sums over the workers, and over requests that wait for one."""
        states = [worker.client.state() for worker in self._workers]
        total = state_of_all(states, self._requests.num_held, self._requests.ended)
        return replace(total, lacking=self._lacking())

    def _lacking(self) -> str | None:
        """Role that no worker can serve now, where prompts are handed over, unless all its workers were given up."""
        can = {worker: worker.is_up or worker.client.supervisor.sleep.asleep for worker in self._left}
        for role, other in (("prefill", "decode"), ("decode", "prefill")) if self._exchange_kv else ():
            able = [is_able for worker, is_able in can.items() if worker.role != other]
            if able and not any(able):
                return f"no {role} worker is there yet"
        return None

    def workers(self) -> tuple[WorkerView, ...]:
        return tuple(worker.view for worker in self._workers)

    def foretold_ttft_s(self, num_tokens: int) -> float | None:
        """Foretold TTFT as `ClusterCore.foretold_ttft_s`, for admission."""
        return self._core.foretold_ttft_s(num_tokens, self._clock.now())

    def choices_of(self, words: str) -> ChoicesMade | None:
        """Choices for one of the last requests, and why; None for one that is not known."""
        return self._requests.choices.of(words)

    def why_not_resumed(self, *, same_numbers: bool) -> str | None:
        """None where a stream may go on that another server began; `same_numbers` is whether their fingerprints are."""
        return self._any.client.why_not_resumed(same_numbers=same_numbers)

    # -- sleep

    async def sleep(self, *, abort: bool = False) -> None:
        """Sleep as `EngineClient.sleep`, all of them."""
        for request_id in list(self._requests.prompts) if abort else ():
            self.abort(request_id)
        await asyncio.gather(*(worker.client.sleep() for worker in self._left))

    async def wake_up(self) -> None:
        """Returns when there is every engine. Raises EngineDead."""
        await asyncio.gather(*(worker.client.wake_up() for worker in self._left or self._workers))

    def _wake_one(self) -> None:
        """Wake one of the sleeping engines: a request is held, and no engine is on its way."""
        sleeps = [worker.client.supervisor.sleep for worker in self._left if not worker.is_there]
        resting = [sleep for sleep in sleeps if sleep.phase in (SleepPhase.ENDING, SleepPhase.ASLEEP)]
        if resting and len(resting) == len(sleeps):
            resting[0].wake()

    # -- questions to the engines

    async def queue_view(self, *, offset: int, limit: int) -> QueueView:
        views = await self._ask_up(lambda client: client.queue_view(offset=0, limit=MAX_PAGE))
        now, policy, why = self._clock.now(), self._core.policy, self._why_held()
        held = [
            waiting_request(live, now, why, request.expected_outputs, policy.terms(request))
            for request, live in self._requests.held()
        ]
        return queue_of_all(views, held, offset, limit)

    async def live_view(self) -> LiveView:
        views = await self._ask_up(lambda client: client.live_view())
        held = [queued_request(live, self._why_held()) for _, live in self._requests.held()]
        return live_view_of_all(views, held)

    async def kv_tiers(self) -> tuple[TierView, ...]:
        """KV tiers of all engines that are heard of; each has its own."""
        found = await self._ask_up(lambda client: client.kv_tiers())
        return tuple(tier for tiers in found for tier in tiers)

    async def clear_kv(self) -> int:
        return sum(await self._ask_up(lambda client: client.clear_kv()))

    async def scheduler_config(self) -> SchedulerConfig:
        return (await self._ask_up(lambda client: client.scheduler_config()))[0]

    async def policy_names(self) -> tuple[str, ...]:
        return (await self._ask_up(lambda client: client.policy_names()))[0]

    async def configure(self, config: SchedulerConfig) -> None:
        """Configure as `EngineClient.configure`; engines that are not there now begin with it."""
        await self._ask(lambda client: client.configure(config), [w for w in self._workers if w.is_there])
        for worker in self._workers:
            worker.client.supervisor.scheduler = config
        self._requests.do(self._core.configured(config, self._clock.now()))

    async def _ask_up(self, ask: Callable[[EngineClient], Awaitable[T]]) -> list[T]:
        """Ask the engines that are heard of: a silent one would delay all answers."""
        return await self._ask(ask, [worker for worker in self._workers if worker.is_up])

    async def _ask(self, ask: Callable[[EngineClient], Awaitable[T]], workers: Iterable[Worker]) -> list[T]:
        """Their answers. Raises EngineDead for none, and what any of them refuses."""
        outcomes = await asyncio.gather(*(ask(worker.client) for worker in workers), return_exceptions=True)
        answers = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not (answers and isinstance(outcome, EngineDead)):
                raise outcome
        if not answers:
            raise self._death()
        return answers

    def _send_all(self, command: Command) -> bool:
        return max(worker.client.supervisor.send(command) for worker in self._workers)  # to all, not to the first

    async def _introduce(self, folder: AdapterFolder) -> AdapterFacts:
        return await self._any.client.introduce_adapter(folder)

    def tell_router(self, on_blocks: OnBlocks | None) -> None:
        """Tell the router as `EngineClient.tell_router`: what any worker has can be found here."""
        self._blocks.tell_router(on_blocks)

    def _report(self, worker: Worker, report: Report) -> None:
        self._requests.do(self._core.reported(worker.name, report, self._clock.now()))

    # -- workers come and go

    @property
    def _any(self) -> Worker:
        """A worker that is up, if there is one."""
        return next((worker for worker in self._workers if worker.is_up), self._workers[0])

    @property
    def _left(self) -> list[Worker]:
        """Workers that were not given up."""
        return [worker for worker in self._workers if not worker.is_over]

    def _changed(self, worker: Worker) -> None:
        """An engine has come or gone, fell silent or is heard again. One that is only silent keeps what it has: it
        would still make tokens of it.
        """
        if self._is_closing:
            return
        if worker.is_up != worker.seems_up:
            worker.is_up = worker.seems_up
            self._requests.do(self._core.joined(worker.facts, self._clock.now()))
        if not worker.is_there:
            worker.num_queued = 0
            self._requests.put_back(worker)
        if not self._left:
            self._requests.end_held(self._death())
        elif self._core.num_held:
            self._wake_one()

    def _tick(self) -> None:
        assert self._loop is not None
        self._timer = self._loop.call_later(TICK_S, self._tick)  # first, so that nothing can end the row
        for worker in self._workers:
            if worker.is_up != worker.seems_up:
                self._changed(worker)
            elif worker.is_up and worker.told != worker.own:
                self._requests.do(self._core.joined(worker.facts, self._clock.now()))
            elif worker.is_over and self._core.is_idle(worker.name):  # no request waits for it any more
                self._requests.do(self._core.left(worker.name, self._clock.now()))
        now, due = self._clock.now(), self._core.next_tick()
        if due is not None and due <= now:
            self._requests.do(self._core.tick(now))

    def _why_held(self) -> str:
        num_up = sum(worker.is_up for worker in self._workers)
        return f"all slots of the {num_up} workers that are there are taken" if num_up else "no worker is there yet"

    def _death(self) -> EngineDead:
        return self._workers[0].client.supervisor.death()


class WorkerBlocks:
    """KV blocks of several workers, told to the core, and to a router in front as if they were one engine's.

    On the event loop.
    """

    def __init__(self, index: PrefixIndex, workers: Sequence[Worker], report: Callable[[Worker, Report], None]) -> None:
        """`index` is the core's; `report` tells the core."""
        self._index, self._workers, self._report = index, workers, report
        self._on_blocks: OnBlocks | None = None

    def tell_router(self, on_blocks: OnBlocks | None) -> None:
        """Tell of blocks that any worker has, all that is there first; None tells no more."""
        self._on_blocks = on_blocks
        if on_blocks is not None:
            self.learn(self._workers)

    def learn(self, workers: Iterable[Worker]) -> None:
        """Have workers tell what they have, and what changes from now on."""
        for worker in workers:
            self._report(worker, NOTHING_KNOWN)
            worker.client.tell_router(partial(self._changed, worker))

    def _changed(self, worker: Worker, changes: BlockChanges | None) -> None:
        on_blocks = self._on_blocks
        if changes is None:
            self._report(worker, NOTHING_KNOWN)
            if on_blocks is not None:
                on_blocks(None)
                self.learn(other for other in self._workers if other is not worker)
            return
        stored = self._unheld(changes.stored) if on_blocks is not None else []
        told = Report(stored=tuple(map(key_of, changes.stored)), removed=tuple(map(key_of, changes.removed)))
        self._report(worker, told)
        if on_blocks is not None:
            on_blocks(BlockChanges(stored, self._unheld(changes.removed)))

    def _unheld(self, blocks: Sequence[bytes]) -> list[bytes]:
        return [block for block in blocks if not self._index.holders(key_of(block))]

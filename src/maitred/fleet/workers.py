"""Several engines as one replica: each in a process of its own, and a cluster core that says which gets a request.

Every worker has a client of its own, with its supervisor, restarts and crash isolation. When its engine ends, requests
that may go on do so with another worker, as resumed requests (docs/design/0011-engine-process.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar
from weakref import WeakSet

import msgspec

from maitred.config import MachineShare, SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, MaitredError, QueueTimeout, RequestTimeout
from maitred.core.objectives import promised
from maitred.core.replica import ReplicaState, TierView, WorkerView, state_of_all
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.adapter_book import AdapterBook, adapters_at_work
from maitred.engine.client import EngineClient
from maitred.engine.frames import BlockChanges, Command, Ready
from maitred.engine.installed import installed_policies
from maitred.engine.live_requests import LiveRequest, ProgressStream, may_enter, streams_of
from maitred.engine.live_view import LiveView, live_view_of_all, queued_request
from maitred.engine.memory import available_memory_bytes
from maitred.engine.model_facts import AdapterFacts, ModelFacts
from maitred.engine.queries import AdapterFolder
from maitred.engine.replica import OnBlocks, OnComputed, OnProgress, Replica
from maitred.engine.supervisor import SleepPhase, Start
from maitred.fleet.actions import Action, Bind, ChoicesMade, Move, Refuse
from maitred.fleet.config import FleetConfig
from maitred.fleet.core import ClusterCore
from maitred.fleet.disagg import HandoverConfig, WorkerFacts, facts_of
from maitred.fleet.driver import Driver
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest, request_of
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.replicas import ReplicaFacts, Report, State
from maitred.scheduler.queue_view import MAX_PAGE, QueueView, queue_of_all, waiting_request

KEY_BYTES = 8  # of a block's hash


@dataclass(slots=True, eq=False)
class Worker:
    """One engine of several."""

    number: int
    client: EngineClient
    role: str = "mixed"  # what it is sent: prompts, answers, or both
    told: WorkerFacts | None = None  # to the core
    is_up: bool = False  # as the core knows it
    num_queued: int = 0  # requests that have no place in its engine

    @property
    def name(self) -> str:
        """The core's."""
        return str(self.number)

    @property
    def is_there(self) -> bool:
        """Whether the worker has an engine, silent or not."""
        return self.client.supervisor.ready

    @property
    def seems_up(self) -> bool:
        """Whether the worker has an engine that is heard of."""
        return self.is_there and self.client.supervisor.why_not_alive is None

    @property
    def view(self) -> WorkerView:
        """The worker's view for people."""
        return WorkerView.of(self.number, self.client.supervisor.pid, self.client.state(), self.role)

    @property
    def is_over(self) -> bool:
        """Whether the worker was given up."""
        return self.client.supervisor.over

    @property
    def facts(self) -> ReplicaFacts:
        """Facts as the core is told of them next."""
        self.told = self.own
        state = State.READY if self.is_up else State.STARTING
        is_silent = self.is_there and not self.is_up
        return ReplicaFacts(name=self.name, state=state, worker=self.told, is_silent=is_silent)

    @property
    def own(self) -> WorkerFacts | None:
        """Facts that foretelling its times takes; None where workers hand nothing over."""
        return facts_of(self.client, self.role, is_beside=True) or self.told


@dataclass(slots=True, eq=False)
class Prompt:
    """The samples of one prompt, which go to one worker, where they share its blocks."""

    request: FleetRequest
    spec: RequestSpec  # its first sample's
    samples: dict[str, LiveRequest] = field(default_factory=dict)  # that have not ended, in order
    worker: Worker | None = None  # None while it is held
    goes_to: Worker | None = None  # once its first tokens are there, which `worker` computes

    @property
    def has_begun(self) -> bool:
        """Whether each sample has a token."""
        return all(live.output_token_ids for live in self.samples.values())


def key_of(block: bytes) -> int:
    """Prefix key of a KV block, by its hash, which all blocks before it are part of."""
    return int.from_bytes(block[:KEY_BYTES], "little")


def prompt_of(samples: Sequence[LiveRequest]) -> Prompt:
    spec = samples[0].spec
    request = request_of(spec, tuple(map(key_of, spec.block_hashes)))
    request.request_id, request.num_samples, request.features = spec.prompt_id, len(samples), spec.features
    return Prompt(request, spec, {live.request_id: live for live in samples})


NOBODYS_FAULT = Failure(FailureKind.FULL, retry_after_s=0.0)  # it is bound again as if it had come now
REASONS = {QueueTimeout: FinishReason.QUEUE_TIMEOUT, RequestTimeout: FinishReason.TIMEOUT}


class WorkerRequests(Driver[Prompt]):
    """Requests from their arrival to their end: held by the core, or with a worker. On one event loop."""

    def __init__(
        self,
        core: ClusterCore,
        clock: Clock,
        workers: Sequence[Worker],
        *,
        on_held: Callable[[], None],
        on_turn: Callable[[], None],
    ) -> None:
        """`on_held` is told that a request waits for a worker; `on_turn` looks after the workers from time to time."""
        super().__init__(core, clock)
        self._workers, self._on_held, self._on_turn = workers, on_held, on_turn
        self.on_progress: OnProgress = lambda progress, num_queued, now: None
        self.prompts: dict[str, Prompt] = {}  # by the id of each sample, in order of arrival
        self.ended: Counter[FinishReason] = Counter()  # of those that no worker had
        self.is_closed = False  # no request is bound any more

    @property
    def num_held(self) -> int:
        """Samples that wait for a worker."""
        return sum(len(prompt.samples) for prompt in self.requests.values() if prompt.worker is None)

    def held(self) -> Iterator[tuple[FleetRequest, LiveRequest]]:
        """Samples that wait for a worker, with their requests, the next first; sorts."""
        for request in self.core.held():
            for live in self.requests[request.request_id].samples.values():
                yield request, live

    def living(self) -> Iterator[LiveRequest]:
        """All living samples, in order of arrival."""
        return (prompt.samples[request_id] for request_id, prompt in self.prompts.items())

    def submit(self, samples: Sequence[LiveRequest]) -> None:
        """Have the core place a prompt."""
        prompt = prompt_of(samples)
        self.prompts |= dict.fromkeys(prompt.samples, prompt)
        self.enter(prompt.request, prompt)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Abort a request as `Replica.abort`."""
        prompt = self.prompts.get(request_id)
        if prompt is None:
            return
        live = prompt.samples[request_id]
        if prompt.worker is not None:
            prompt.worker.client.abort(request_id, reason)
        elif reason is not FinishReason.SHED or live.charges.first_scheduled_at is None:
            self._end_here(live, reason)

    def put_back(self, worker: Worker) -> None:
        """Put back requests of a worker whose engine is gone; those that may, go on with another when there is room."""
        movable = worker.client.movable()
        for prompt in dict.fromkeys(self.prompts[request_id] for request_id in movable):
            if prompt.samples.keys() <= movable.keys():
                for live in prompt.samples.values():
                    worker.client.let_go(live.request_id)
                    if live.charges.first_scheduled_at is not None:
                        prompt.request.terms = msgspec.structs.replace(
                            prompt.request.terms, start_by=None
                        )  # it was in a step in time
                prompt.worker = None
                self.hear(self.core.failed, prompt.request.request_id, NOBODYS_FAULT)

    # -- what the core decides

    def do(self, actions: Sequence[Action]) -> None:
        if self.is_closed:
            return
        super().do(actions)
        if self.core.num_held:
            self._on_held()

    def bound(self, prompt: Prompt, bind: Bind) -> None:
        self.choices.bound(bind, prompt.request.held_s)
        choice = bind.choice
        worker = self._named(choice.replica)
        computes = worker if choice.prefill is None else self._named(choice.prefill)
        if not computes.is_up:
            computes = worker
        self._expect_no_kv(prompt)
        prompt.worker, prompt.goes_to = computes, worker if computes is not worker else None
        finds = () if choice.fetch_from is None else self._named(choice.fetch_from).client.kv_addresses
        _enter(computes, prompt.samples.values(), finds)
        if prompt.goes_to is not None:
            prompt.goes_to.client.expect_kv(prompt.spec, computes.client.kv_addresses)

    def look(self, now: float) -> None:
        self._on_turn()

    def _named(self, name: str) -> Worker:
        return self._workers[int(name)]

    def moved(self, prompt: Prompt, move: Move) -> None:
        """Take a prompt from a worker that is to end: it goes on with the next that it is bound to."""
        self._expect_no_kv(prompt)
        worker, prompt.worker = prompt.worker, None
        if worker is not None:
            _taken_from(worker, prompt)

    def _expect_no_kv(self, prompt: Prompt) -> None:
        """Tell the receiver that the KV will not come: the request ends, or is placed anew, before the hand-over."""
        if prompt.goes_to is not None:
            prompt.goes_to.client.expect_no_kv(prompt.spec)
            prompt.goes_to = None

    def _hand_over(self, prompt: Prompt) -> None:
        """Hand over a request whose prompt is computed: the worker that is to answer goes on, with the KV it pulls. A
        request stays where that worker is not up; so do samples that are being aborted.
        """
        sender, receiver, prompt.goes_to = prompt.worker, prompt.goes_to, None
        if sender is None or receiver is None or not prompt.samples:
            return  # it was done already, or has ended
        if receiver.is_up:
            prompt.worker = receiver
            _enter(receiver, _taken_from(sender, prompt), sender.client.kv_addresses)
        else:
            receiver.client.expect_no_kv(prompt.spec)
        self.hear(self.core.handed_over, prompt.request.request_id)

    def refused(self, prompt: Prompt, refuse: Refuse) -> None:
        """End a prompt whose time is up. A worker that has it ends it, with what it had come to."""
        error = refuse.error
        for live in list(prompt.samples.values()):
            reason = REASONS.get(type(error), FinishReason.ERROR)
            if prompt.worker is not None:
                prompt.worker.client.abort(live.request_id, reason)
            else:
                self._end_here(live, reason, error if reason is FinishReason.ERROR else None)

    # -- what the workers tell

    def progressed(self, worker: Worker, progress: list[RequestProgress], num_queued: int, now: float) -> None:
        worker.num_queued = num_queued
        self._account(progress, now)
        for item in progress:
            prompt = self.prompts.get(item.request_id)
            if prompt is not None and prompt.goes_to is not None and prompt.has_begun:
                asyncio.get_running_loop().call_soon(self._hand_over, prompt)  # once its stream has what came

    def _account(self, progress: list[RequestProgress], now: float) -> None:
        """Report progress to the core, and to the listener of all of it; ended prompts make room for others."""
        done: list[tuple[Prompt, FinishReason]] = []
        for item in progress:
            prompt = self.prompts.get(item.request_id)
            if prompt is None:
                continue
            if item.new_token_ids:
                self.core.progressed(prompt.request.request_id, len(item.new_token_ids), now)
            if item.finish_reason is not None:
                del self.prompts[item.request_id], prompt.samples[item.request_id]
                if not prompt.samples:
                    done.append((prompt, item.finish_reason))
        self.on_progress(progress, self.core.num_queued + sum(worker.num_queued for worker in self._workers), now)
        for prompt, reason in done:
            self._let_go(prompt, reason, now)

    def _let_go(self, prompt: Prompt, reason: FinishReason, now: float) -> None:
        prompt_id = prompt.request.request_id
        self._expect_no_kv(prompt)
        del self.requests[prompt_id]
        is_complete = reason in (FinishReason.STOP, FinishReason.LENGTH)
        if prompt.worker is None:
            self.do(self.core.aborted(prompt_id, now))
        else:
            self.do(self.core.ended(prompt_id, AnswerUsage(complete=is_complete), now))

    def _end_here(self, live: LiveRequest, reason: FinishReason, error: MaitredError | None = None) -> None:
        """No worker has it."""
        now = self.clock.now()
        ended = live.ended(reason, now, None if error is None else str(error))
        self.ended[reason] += 1
        self._account([ended], now)
        if error is None:
            live.stream.put(ended)
        else:
            live.stream.fail(error)

    def end_held(self, error: EngineDead) -> None:
        """No worker will come."""
        for name, prompt in list(self.prompts.items()):
            if prompt.worker is None:
                self._end_here(prompt.samples[name], FinishReason.ERROR, error)


def _enter(worker: Worker, samples: Iterable[LiveRequest], kv_from: tuple[str, ...]) -> None:
    entering = list(samples)
    for live in entering:
        live.kv_from = kv_from
    worker.client.enter(entering)


def _taken_from(worker: Worker, prompt: Prompt) -> list[LiveRequest]:
    """Take a prompt's samples to go on elsewhere; those that are being aborted end where they are."""
    going_on = [request_id for request_id, live in prompt.samples.items() if live.ending is None]
    return [worker.client.hand_over(request_id) for request_id in going_on]


NOTHING_KNOWN = Report(is_broken=True)

logger = logging.getLogger(__name__)
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
        roles, scheduler, free_bytes = start.process.roles, start.config.scheduler, start.config.share.available_bytes
        share = MachineShare(
            num_engines=len(roles),
            available_bytes=available_memory_bytes() if free_bytes is None else free_bytes,
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
        self._requests = WorkerRequests(self._core, clock, self._workers, on_held=self._wake_one, on_turn=self._look)
        self._blocks = WorkerBlocks(self._core.index, self._workers, self._report)
        self._streams: WeakSet[ProgressStream] = WeakSet()
        self._facts: ModelFacts | None = None
        self.on_computed: OnComputed = lambda tenant, compute_us: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closing = False

    def _make(self, number: int, start: Start, on_event: Callable[[str], None]) -> Worker:
        def changed() -> None:
            self._changed(worker)

        tiers = start.config.tiers.of_engine(number, len(start.process.roles))
        start = replace(start, config=replace(start.config, tiers=tiers))
        client = EngineClient(start, self._clock, on_event=on_event, adapters=self.adapters, on_change=changed)
        worker = Worker(number, client, start.process.roles[number])
        client.on_progress = lambda progress, num_queued, now: self._requests.progressed(
            worker, progress, num_queued, now
        )
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
        self._requests.start_turns()

    async def close(self) -> None:
        """Stop the engines after their current steps; unfinished requests end with EngineDead."""
        self._is_closing = self._requests.is_closed = True
        self._requests.end_turns()
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

    def submit(self, *samples: RequestSpec) -> list[ProgressStream]:
        """Submit as `EngineClient.submit`: progress comes out of the streams, whichever worker makes it."""
        self.attach(asyncio.get_running_loop())
        streams = streams_of(self, samples, self._streams)
        living = list(map(LiveRequest, samples, streams))
        death = self._death() if self._is_closing or not self._left else None
        if may_enter(living, self._requests.prompts, death, self._on_admitted):
            self._requests.submit(living)
        return streams

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
            waiting_request(live.as_it_waits(request.expected_outputs), now, reason=why, terms=policy.terms(request))
            for request, live in self._requests.held()
        ]
        return queue_of_all(views, held, offset, limit)

    async def live_view(self) -> LiveView:
        views = await self._ask_up(lambda client: client.live_view())
        held = [queued_request(live.as_it_waits(), self._why_held()) for _, live in self._requests.held()]
        return live_view_of_all(views, held)

    async def recordings(self) -> list[bytes]:
        return [each for one in await self._ask_up(lambda client: client.recordings()) for each in one]

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
        self._requests.hear(self._core.configured, config)

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
        self._requests.hear(self._core.reported, worker.name, report)

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
            self._requests.hear(self._core.joined, worker.facts)
        if not worker.is_there:
            worker.num_queued = 0
            self._requests.put_back(worker)
        if not self._left:
            self._requests.end_held(self._death())
        elif self._core.num_held:
            self._wake_one()

    def _look(self) -> None:
        """Notice engines that are heard again, and what was measured of them anew."""
        for worker in self._workers:
            if worker.is_up != worker.seems_up:
                self._changed(worker)
            elif worker.is_up and worker.told != worker.own:
                self._requests.hear(self._core.joined, worker.facts)
            elif worker.is_over and self._core.is_idle(worker.name):  # no request waits for it any more
                self._requests.hear(self._core.left, worker.name)

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

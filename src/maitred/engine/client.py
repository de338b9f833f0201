"""The engine's client: a Replica over a transport. When its engine dies, its requests go on with the next one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

import msgspec
from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.cost_model import CostModel
from maitred.core.errors import (
    EngineDead,
    InvalidRequest,
    MaitredError,
    RequestTooLarge,
    Unavailable,
    UnsupportedParameter,
)
from maitred.core.replica import ReplicaState, TierView, WorkerView
from maitred.core.request import Charges, FinishReason, RequestSpec, prompt_told_once
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import InferRequest, InferResponse, ModelChange
from maitred.engine import frames, live_requests, queries
from maitred.engine.adapter_book import AdapterBook, adapters_at_work
from maitred.engine.live_view import LiveView
from maitred.engine.model_facts import AdapterFacts, ModelFacts
from maitred.engine.replica import OnBlocks, OnComputed, OnProgress, Replica
from maitred.engine.supervisor import Loss, Owner, Start, Supervisor
from maitred.engine.tensors import TensorModels
from maitred.scheduler.queue_view import QueueView

if TYPE_CHECKING:
    from maitred.engine.tensor_memory import ServerMemory

A = TypeVar("A")
R = TypeVar("R")


class EngineClient(Replica, Owner):
    """Requests, queries and counters of an engine; `supervisor` starts it, over the transport that `start` names.

    Everything runs on one event loop, but for `start` before there is one, and `stop` after.
    """

    def __init__(
        self,
        start: Start,
        clock: Clock,
        *,
        on_admitted: Callable[[live_requests.Live], None] | None = None,  # told on the event loop, so it must not wait
        on_event: Callable[[str], None] = lambda line: None,
        adapters: AdapterBook | None = None,  # that engines share; None is its own
        on_change: Callable[[], None] = lambda: (
            None
        ),  # told on the event loop: an engine has come, gone or fallen silent
    ) -> None:
        self._memory: ServerMemory | None = None  # where there are tensor models
        if start.config.tensors.serves:
            start = self._serve_tensors(start)
        self.supervisor = Supervisor(start, clock, self, on_event=on_event)
        self.role = start.process.role  # of a server that is one worker of several hosts
        self._rule, self._in_process = start.process.resume, start.process.in_process
        self._clock = clock
        self._on_admitted = on_admitted
        self.on_progress: OnProgress = lambda progress, num_queued, now: None
        self.on_computed: OnComputed = lambda tenant, compute_us: None
        self._streams: WeakSet[live_requests.ProgressStream] = WeakSet()
        self._live: dict[str, live_requests.Live] = {}  # in order of arrival
        self._leaving: set[str] = set()  # handed over, whose last progress has not come
        self._questions = Questions(self._send_question, self.supervisor.death)
        self._on_change = on_change
        self.counters = Counters()
        self._isolation = live_requests.CrashIsolation(self._send)
        self.adapters: AdapterBook = adapters or AdapterBook(
            self.supervisor.send,
            self.introduce_adapter,
            start.config.lora.lora_dir,
            wake_up=self.supervisor.sleep.wake_up,
            at_work=lambda: adapters_at_work(
                live for live in self._live.values() if isinstance(live, live_requests.LiveRequest)
            ),
        )
        self._news_at = self._busy_at = clock.now()
        self._on_blocks: OnBlocks | None = None

    def _serve_tensors(self, start: Start) -> Start:
        """What the engine begins with: memory for tensors is shared with it."""
        from maitred.engine.tensor_memory import ServerMemory  # noqa: PLC0415  numpy, of no use to a language model

        self.tensors = TensorModels(self.infer, self.change_model, self._unanswered, start.read_config)
        self._memory = ServerMemory(start.config.tensors.tensor_arena_bytes)
        share = changed(start.config.share, tensor_memory=self._memory.file)
        return changed(start, config=changed(start.config, share=share))

    def start(self) -> frames.Ready:
        """Load, and wait for it. Raises what keeps the engine from loading."""
        self.begin()
        return self.wait()

    def begin(self, facts: ModelFacts | None = None) -> None:
        """Start the engine; `facts` are those of another that loads the same. In the main thread."""
        self.supervisor.begin(facts)

    def give_up(self) -> None:
        """Make `wait` raise soon; for another thread."""
        self.supervisor.give_up()

    def wait(self) -> frames.Ready:
        """Wait for the first engine, which was begun. Raises what keeps it from loading."""
        ready = self.supervisor.wait()
        self.adapters.begin(ready.facts.adapters)
        return ready

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop` from now on, with or without requests; `submit` sees to it too."""
        self.supervisor.attach(loop)

    # -- Replica

    def submit(self, *samples: RequestSpec) -> list[live_requests.ProgressStream]:
        """Queue the samples of a prompt; their progress comes out of the streams, whatever engines die meanwhile.

        The first item raises EngineDead when there will be no engine any more. Raises ValueError for an id in use.
        """
        streams = live_requests.streams_of(self, samples, self._streams)
        self._admit(list(map(live_requests.LiveRequest, samples, streams)))
        return streams

    async def infer(self, request: InferRequest) -> InferResponse:
        """Answer of a tensor model, whatever engines die meanwhile. Cancelling gives up the request's place at once."""
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        live = live_requests.LiveTensor(request, asyncio.get_running_loop().create_future())
        self._admit([live])
        try:
            return await live.answer
        except asyncio.CancelledError:
            self.abort(request.request_id)
            raise

    def _admit(self, living: Sequence[live_requests.Live]) -> None:
        self.attach(asyncio.get_running_loop())
        death = self.supervisor.death() if self.supervisor.over or self.supervisor.stopping else None
        if live_requests.may_enter(living, self._live, death, self._on_admitted):
            self.enter(living)

    def enter(self, living: Sequence[live_requests.Live]) -> None:
        """Requests, new or from another engine; if there is no engine here now, the next one gets them."""
        for live in living:
            self._live[live.request_id] = live
        self._busy_at = self._clock.now()
        self._isolation.enter(living)
        if not self.supervisor.ready:
            self.supervisor.sleep.wake()

    def hand_over(self, request_id: str) -> live_requests.LiveRequest:
        """Take a request for another engine, to resume from its tokens so far; later ones are dropped."""
        live = self._live.pop(request_id)
        assert isinstance(live, live_requests.LiveRequest)
        if live.sent and self.supervisor.send(frames.Abort(request_id, FinishReason.ABORT)):
            self._leaving.add(request_id)
        live.moved(self._clock.now())
        return live

    def expect_kv(self, request: RequestSpec, kv_from: tuple[str, ...]) -> None:
        """Pull the KV of a prompt that is computed elsewhere, at `kv_from`; the request will go on with this engine."""
        with suppress(RequestTooLarge):  # then it will not go on here either
            self.supervisor.send(frames.Submit((expecting(request, kv_from),)))

    def expect_no_kv(self, request: RequestSpec) -> None:
        """Give up an expected request, which goes on elsewhere; no effect where nothing was expected."""
        self.supervisor.send(frames.Abort(expecting_id(request), FinishReason.ABORT))

    @property
    def kv_addresses(self) -> tuple[str, ...]:
        """Addresses that the present engine's KV is pulled from."""
        ready = self.supervisor.loaded
        return ready.kv_addresses if ready is not None else ()

    @property
    def loaded(self) -> frames.Ready | None:
        """The present engine's own report of itself."""
        return self.supervisor.loaded

    def movable(self) -> dict[str, live_requests.LiveRequest]:
        """Requests that may move while there is no engine here. Suspects are tried here, if one will come."""
        is_suspect = (lambda live: False) if self.supervisor.over else self._isolation.is_suspect
        return {
            request_id: live
            for request_id, live in self._live.items()
            if isinstance(live, live_requests.LiveRequest) and not is_suspect(live)
        }

    def let_go(self, request_id: str) -> None:
        """Forget a request that moved; only while there is no engine here, or its tokens would still come."""
        del self._live[request_id]

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        live = self._live.get(request_id)
        if live is None or live.ending is not None:
            return
        if reason is not FinishReason.SHED:  # which may find it in a step, and then it goes on
            live.ending = reason
        if not (live.sent and self.supervisor.send(frames.Abort(request_id, reason))):
            self._end(live, reason, self._clock.now())

    def why_not_resumed(self, *, same_numbers: bool) -> str | None:
        """None where a stream may go on that another server began; `same_numbers` is whether their fingerprints are."""
        deterministic = self.supervisor.is_deterministic
        return live_requests.refusal_of_foreign(self._rule, deterministic=deterministic, same_numbers=same_numbers)

    def state(self) -> ReplicaState:
        """Counters of all engines so far; gauges of the present one."""
        news_age_s = max(0.0, self._clock.now() - self._news_at)
        return self.counters.state(self.supervisor, num_live=len(self._live), news_age_s=news_age_s)

    def workers(self) -> tuple[WorkerView, ...]:
        """The one worker of this client."""
        return (WorkerView.of(0, self.supervisor.pid, self.state(), self.role),)

    # -- sleep

    async def sleep(self, *, abort: bool = False) -> None:
        """End the engine's process once there is no request, and return when it is gone; the next request starts it
        again. `abort` ends those that there are. Raises EngineDead, UnsupportedParameter where it has no process.
        """
        if self._in_process:
            raise UnsupportedParameter(
                "an engine in the server's own process cannot sleep, for its memory would stay; "
                "serve without --in-process"
            )
        self.attach(asyncio.get_running_loop())
        for request_id in list(self._live) if abort else ():
            self.abort(request_id)
        await self.supervisor.sleep.fall_asleep()

    async def wake_up(self) -> None:
        """Returns when there is an engine. Raises EngineDead."""
        self.attach(asyncio.get_running_loop())
        await self.supervisor.sleep.wake_up()
        error = self.supervisor.why_not_alive
        if error is not None:
            raise EngineDead(error)

    # -- questions to the engine, which are answered between two steps

    async def queue_view(self, *, offset: int, limit: int) -> QueueView:
        """Waiting requests, as the queue stands between two steps. Raises EngineDead."""
        return await self._questions.ask(queries.QUEUE_VIEW, queries.QueuePage(offset, limit))

    async def live_view(self) -> LiveView:
        """Slots, queue and blocks, as they stand between two steps. Raises EngineDead."""
        return await self._questions.ask(queries.LIVE_VIEW, queries.Nothing())

    async def recordings(self) -> list[bytes]:
        return [await self._questions.ask(queries.RECORDING, queries.Nothing())]

    async def scheduler_config(self) -> SchedulerConfig:
        return await self._questions.ask(queries.SCHEDULER_CONFIG, queries.Nothing())

    async def policy_names(self) -> tuple[str, ...]:
        return await self._questions.ask(queries.POLICY_NAMES, queries.Nothing())

    async def kv_tiers(self) -> tuple[TierView, ...]:
        """KV tiers, which outlive requests and restarts; none where there is no tier. Raises EngineDead."""
        return await self._questions.ask(queries.KV_TIERS, queries.Nothing())

    async def clear_kv(self) -> int:
        """Empties the tiers; returns when it is done, with how many blocks there were. Raises EngineDead."""
        return await self._questions.ask(queries.CLEAR_KV, queries.Nothing())

    async def introduce_adapter(self, folder: queries.AdapterFolder) -> AdapterFacts:
        """Facts of a folder's adapter, read by the engine. Raises CheckpointError, ConfigError or EngineDead."""
        return await self._questions.ask(queries.INTRODUCE_ADAPTER, folder)

    async def configure(self, config: SchedulerConfig) -> None:
        """Changes policy and limits, losing no request; returns when it is done. Raises ConfigError, or EngineDead."""
        await self._questions.ask(queries.CONFIGURE, config)
        self.supervisor.scheduler = config

    async def change_model(self, change: ModelChange) -> None:
        """Load or unload a tensor model, in later engines too. Raises ModelNotFound, InvalidRequest, EngineDead."""
        await self._questions.ask(queries.CHANGE_MODEL, change)
        self.supervisor.models[change.model] = change

    def tell_router(self, on_blocks: OnBlocks | None) -> None:
        """Measure speed, and tell which blocks can be found by prefix, all that are there first; None tells no more."""
        self._on_blocks = on_blocks
        self._ask_for_blocks()

    def _ask_for_blocks(self) -> None:
        """The answer says nothing: what is wanted comes with the steps. Without an engine, the next one is asked."""
        self._questions.tell(queries.TELL_ROUTER, queries.Wanted(self._on_blocks is not None))

    def _send_question(self, ask: frames.Ask) -> bool:
        self.attach(asyncio.get_running_loop())
        return self.supervisor.send(ask)

    # -- the end

    async def close(self) -> None:
        """Stop the engine after its current step; unfinished requests end with EngineDead."""
        self.supervisor.detach()
        await asyncio.to_thread(self.supervisor.stop)
        self._end_all(self.supervisor.death())

    def stop(self) -> None:
        """The same from any thread once the loop has ended; idempotent."""
        self.supervisor.stop()

    # -- what the supervisor tells

    def heard(self, report: frames.Report) -> None:
        match report:
            case frames.Stepped():
                self._stepped(report)
            case frames.Answer(number, result):
                self._questions.answered(number, result)
            case frames.Refused(number, kind, message):
                self._questions.settle(number, frames.error_of(kind, message))
            case frames.TensorsTold():
                self._tensors_told(report)

    def lost(self, cause: str, *, deterministic: bool, own_fault: bool) -> Loss:
        """Keep the dead engine's requests that may run again, and end the others."""
        now, before = self._clock.now(), len(self._live)
        self._engine_is_gone()
        culprit = self._isolation.died(self._live.values(), own_fault=own_fault)
        for live in list(self._live.values()):
            if live.ending is not None:
                self._end(live, live.ending, now)
                continue
            why = live_requests.refusal(live, self._rule, deterministic=deterministic, is_cause=live is culprit)
            if why is None:
                live.left(now)
            else:
                self._end_with_error(live, EngineDead(f"{cause}, and {why}"), now)
        found_cause = culprit is not None and self._isolation.others_live()
        self._on_change()
        return Loss(len(self._live), before - len(self._live), found_cause)

    def regained(self) -> int:
        self._news_at = self._clock.now()
        if self._on_blocks is not None:
            self._ask_for_blocks()
        self.adapters.tell()
        if self._memory is not None and (kept := self._memory.kept()) is not None:
            self.supervisor.send(kept)
        self._isolation.begin(list(self._live.values()))
        self._on_change()
        return len(self._live)

    def idle_s(self) -> float:
        return 0.0 if self._live or self._questions else self._clock.now() - self._busy_at

    def silenced(self) -> None:
        self._on_change()

    def slept(self) -> None:
        self._engine_is_gone()
        self._on_change()

    def bereft(self, cause: str) -> None:
        self.slept()
        self._end_all(self.supervisor.death())

    def _engine_is_gone(self) -> None:
        """The next one has nothing cached, and knows of no question."""
        self._leaving.clear()
        if self._on_blocks is not None:
            self._on_blocks(None)
        self.counters.keep()
        self._questions.end_all()

    def _end_all(self, error: EngineDead) -> None:
        now = self._clock.now()
        self._questions.end_all()
        for live in list(self._live.values()):
            self._end_with_error(live, error, now)

    def _end(self, live: live_requests.Live, reason: FinishReason, now: float) -> None:
        """End a request that no engine ends."""
        ended = live.ended(reason, now)
        if isinstance(live, live_requests.LiveRequest):
            self._deliver([ended])
        else:
            live.fail(Unavailable(f"model {live.spec.model!r}: the request was given up"))
            self._ended(live, ended)

    def _end_with_error(self, live: live_requests.Live, error: MaitredError, now: float) -> None:
        live.fail(error)
        ended = live.ended(FinishReason.ERROR, now, str(error))
        if isinstance(live, live_requests.LiveRequest):
            self._account([ended], self.counters.figures.num_waiting)
        self._ended(live, ended)

    def _stepped(self, report: frames.Stepped) -> None:
        now = self._news_at = self._clock.now()
        if report.figures is not None:
            self.counters.figures = report.figures
        if report.blocks is not None and self._on_blocks is not None:
            self._on_blocks(report.blocks)
        if report.progress:
            self._busy_at = now
            news = []
            for item in report.progress:
                live = self._live.get(item.request_id)
                if item.request_id in self._leaving:  # until its end here; it may have come back since
                    if item.finish_reason is not None:
                        self._leaving.discard(item.request_id)
                elif isinstance(live, live_requests.LiveRequest):
                    self.counters.totals.charge(live.charges, item.charges)
                    news.append(live.take(item, now))
            self._deliver(news, report.num_queued)
            self._isolation.stepped(item.request_id for item in report.progress)

    def _deliver(self, progress: list[RequestProgress], num_queued: int | None = None) -> None:
        """Put progress into the requests' streams; `num_queued` is None for progress of no step."""
        self._account(progress, self.counters.figures.num_waiting if num_queued is None else num_queued)
        for item in progress:
            live = self._live[item.request_id]
            assert isinstance(live, live_requests.LiveRequest)
            live.stream.put(item)
            if item.finish_reason is not None:
                self._ended(live, item)

    def _tensors_told(self, report: frames.TensorsTold) -> None:
        assert self.tensors is not None
        self._news_at = self._busy_at = self._clock.now()
        for news in report.news:
            if isinstance(news, frames.Ended):
                self._answered(news)
            else:
                self.tensors.hear(news)
        self._send_freed()

    def _answered(self, ended: frames.Ended) -> None:
        assert self._memory is not None
        live = self._live.get(ended.request_id)
        if not isinstance(live, live_requests.LiveTensor):
            self._memory.answered(replace(ended, result=None))
            return
        ended = self._memory.answered(ended)
        live.charges = ended.charges
        if self.tensors is not None:
            self.tensors.ended(live.spec, ended)
        last = live.ended(ended.finish_reason, self._clock.now(), ended.message or None)
        if ended.result is None:
            live.fail(frames.error_of(ended.kind, ended.message))
        elif not live.answer.done():
            live.answer.set_result(ended.result)
        self._ended(live, last)
        self._isolation.stepped([live.request_id])

    def _unanswered(self) -> list[InferRequest]:
        return [live.spec for live in self._live.values() if isinstance(live, live_requests.LiveTensor)]

    def _send_freed(self) -> None:
        if self._memory is not None and (freed := self._memory.freed()) is not None:
            self.supervisor.send(freed)

    def _ended(self, live: live_requests.Live, last: RequestProgress) -> None:
        del self._live[live.request_id]
        if self._memory is not None and isinstance(live, live_requests.LiveTensor) and live.frame is not None:
            self._memory.end(live.frame)
        if last.charges is not None:
            self.on_computed(live.spec.terms.tenant, last.charges.compute_us)

    def _account(self, progress: list[RequestProgress], num_queued: int) -> None:
        """Count progress, and pass it to the listener of all requests."""
        self.counters.totals.count(progress)
        self.on_progress(progress, num_queued, self._clock.now())

    def _send(self, living: Sequence[live_requests.Live]) -> None:
        """Send requests, the samples of a prompt in one frame."""
        now = self._clock.now()
        for _, alike in itertools.groupby(living, _prompt_id):
            prompt = list(alike)
            try:
                sent = self.supervisor.send(self._frame_of(prompt, now))
            except (RequestTooLarge, OverflowError) as error:  # limits were set so high that it is let in
                told = error if isinstance(error, MaitredError) else InvalidRequest("a number is too large")
                for live in prompt:
                    self._end_with_error(live, told, now)
                continue
            for live in prompt:
                live.sent = sent
                if isinstance(live, live_requests.LiveRequest):
                    self.counters.totals.num_resumed += sent and live.num_resumes > 0

    def _frame_of(self, prompt: Sequence[live_requests.Live], now: float) -> frames.Submit | frames.Infer:
        samples = [live.resume(now) for live in prompt if isinstance(live, live_requests.LiveRequest)]
        if samples:
            return frames.Submit(prompt_told_once(samples))
        (live,) = prompt
        assert isinstance(live, live_requests.LiveTensor)
        assert self._memory is not None
        live.frame = live.frame or self._memory.sent(live.spec)
        self._send_freed()
        return live.frame


def _prompt_id(live: live_requests.Live) -> str:
    return live.spec.prompt_id if isinstance(live, live_requests.LiveRequest) else live.request_id


def expecting_id(request: RequestSpec) -> str:
    """Id of the request that brings a prompt's KV, for all of its samples; no client has such an id."""
    return f"{request.prompt_id}~kv"


def expecting(request: RequestSpec, kv_from: tuple[str, ...]) -> RequestSpec:
    """A request that waits for the KV of that prompt, in its place in the queue, and computes nothing."""
    return replace(
        request,
        request_id=expecting_id(request),
        parent_id=None,
        sample_index=0,
        grammar="",
        thinking=None,
        prediction_token_ids=(),
        adapter="",
        kv_from=kv_from,
        kv_only=True,
    )


class Questions:
    """Questions to the engine that wait for an answer. On one event loop."""

    def __init__(self, send: Callable[[frames.Ask], bool], death: Callable[[], EngineDead]) -> None:
        """`send` gives False when there is no engine, `death` why there is none."""
        self._send, self._death = send, death
        self._open: dict[int, tuple[queries.Query[Any, Any], asyncio.Future[Any]]] = {}
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._open)

    async def ask(self, query: queries.Query[A, R], argument: A) -> R:
        """Raises EngineDead, and what the engine answers with."""
        number = next(self._numbers)
        answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._open[number] = (query, answer)  # first: an engine on this very loop may answer at once
        try:
            if not self._send(frames.Ask(number, query.name, msgspec.Raw(frames.encode(argument)))):
                raise self._death()
            return await answer
        finally:
            self._open.pop(number, None)

    def tell(self, query: queries.Query[A, R], argument: A) -> None:
        """Ask without waiting for an answer; without an engine nothing happens."""
        self._send(frames.Ask(next(self._numbers), query.name, msgspec.Raw(frames.encode(argument))))

    def answered(self, number: int, result: msgspec.Raw) -> None:
        if number not in self._open:
            return  # no longer waited for
        query, _ = self._open[number]
        try:
            self.settle(number, msgspec.msgpack.decode(result, type=query.result))
        except (msgspec.DecodeError, MaitredError) as error:
            self.settle(number, EngineDead(f"the engine's answer to {query.name} cannot be read: {error}"))

    def settle(self, number: int, outcome: object) -> None:
        """An error is raised where the answer is waited for."""
        _, answer = self._open.get(number, (None, None))
        if answer is None or answer.done():
            return
        if isinstance(outcome, MaitredError):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    def end_all(self) -> None:
        """End all questions: no engine can answer them any more."""
        for number in list(self._open):
            self.settle(number, self._death())


@dataclass(slots=True)
class Totals:
    """Counters that must equal the ledger's sums, counted from the same frames over all engines."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_resumed: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count(self, progress: Iterable[RequestProgress]) -> None:
        for item in progress:
            self.num_generated_tokens += len(item.new_token_ids)
            if item.finish_reason is not None:
                self.num_finished[item.finish_reason] += 1

    def charge(self, before: Charges, now: Charges | None) -> None:
        """A request's prompt counts once, when its first charges come."""
        if now is not None and now.num_prompt_tokens and not before.num_prompt_tokens:
            self.num_prompt_tokens += now.num_prompt_tokens
            self.num_prefix_hit_tokens += now.num_cached_tokens


@dataclass(slots=True)
class Counters:
    """Figures told by engines, and the client's counts of their progress."""

    totals: Totals = field(default_factory=Totals)
    figures: frames.Figures = field(default_factory=frames.Figures)  # of the present engine
    past: frames.Figures = field(default_factory=frames.Figures)  # counters of those before it

    def keep(self) -> None:
        """Add the ended engine's counters to `past`, as the next counts from zero; the gauges are empty meanwhile."""
        self.past = frames.Figures(**frames.counted(self.figures, self.past))
        self.figures = frames.Figures(num_blocks=self.figures.num_blocks)

    @property
    def pull_bytes_per_s(self) -> float | None:
        """Rate at which the present engine pulled KV of others; None before it pulled any."""
        pulled = self.figures.handovers
        return sum(pulled.num_bytes.values()) / pulled.seconds if pulled.seconds else None

    @property
    def step_costs(self) -> CostModel | None:
        """Step costs as the present engine has measured them."""
        return self.figures.step_costs

    def state(self, supervisor: Supervisor, *, num_live: int, news_age_s: float) -> ReplicaState:
        """`num_live` requests are with the client, which last heard of a step `news_age_s` ago."""
        figures, totals = self.figures, self.totals
        error = supervisor.why_not_alive
        return ReplicaState(
            alive=error is None,
            error=error,
            loading=not (supervisor.ready or supervisor.sleep.asleep or supervisor.over or supervisor.stopping),
            asleep=not supervisor.ready and supervisor.sleep.asleep,
            num_running=figures.num_running,
            num_waiting=figures.num_waiting if supervisor.ready else num_live,
            num_background_running=figures.num_background_running,
            num_background_waiting=figures.num_background_waiting,
            num_blocks=figures.num_blocks,
            num_blocks_used=figures.num_blocks_used,
            num_blocks_cached=figures.num_blocks_cached,
            num_state_snapshots=figures.num_state_snapshots,
            expert_load_ratio=figures.expert_load_ratio,
            prefill_tokens_per_s=figures.prefill_tokens_per_s,
            decode_tokens_per_s=figures.decode_tokens_per_s,
            adapter_bytes=figures.adapter_bytes,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_prefix_queried_tokens=totals.num_prompt_tokens,
            num_prefix_hit_tokens=totals.num_prefix_hit_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            num_finished=dict(totals.num_finished),
            last_step_age_s=news_age_s if num_live else 0.0,
            heartbeat_age_s=supervisor.silent_s,
            num_restarts=supervisor.num_restarts,
            num_sleeps=supervisor.sleep.num_sleeps,
            wake_s=supervisor.sleep.wake_s,
            num_resumed=totals.num_resumed,
            num_wrong_frames=supervisor.num_wrong_frames,
            **frames.counted(figures, self.past),
        )

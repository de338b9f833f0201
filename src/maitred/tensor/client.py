"""The server's side of tensor models: a TensorService over an engine. When its engine dies, requests run again."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, InvalidRequest, MaitredError, RequestTooLarge
from maitred.core.request import NO_CHARGES, Charges, FinishReason
from maitred.core.tensor_request import IndexEntry, InferRequest, InferResponse, ModelStatistics, unknown_model
from maitred.engine.client import EngineClient
from maitred.engine.crash_isolation import CrashIsolation
from maitred.engine.frames import Command, ToTensors, encode, error_of
from maitred.engine.live_requests import LiveRequest
from maitred.engine.owner import Loss
from maitred.engine.supervisor import Start
from maitred.engine.tensor_counts import TensorCounts
from maitred.tensor.config import ANY_MESSAGE
from maitred.tensor.config_fields import ModelConfig
from maitred.tensor.crossing import ServerMemory
from maitred.tensor.frames import (
    Cancel,
    Changed,
    Ended,
    Infer,
    Load,
    Looked,
    Models,
    Problem,
    Ran,
    StepEnded,
    Unload,
    decode_news,
)
from maitred.tensor.frames import Command as TensorCommand
from maitred.tensor.statistics import Statistics


@dataclass(slots=True, eq=False)
class LiveTensor:
    """Request without an answer yet: for the ledger, and to run again when its engine dies."""

    request: InferRequest
    answer: asyncio.Future[Ended]
    charges: Charges = NO_CHARGES
    finish_reason: FinishReason | None = None  # written last
    crossing: Infer | None = None  # once it was sent to any
    sent: bool = False  # to the present engine
    num_deaths: int = 0  # of engines that had it, and may have died of it
    cancelled: bool = False  # its end is on its way, with what its batch took

    sample_index = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_output_tokens(self) -> int:
        return 0

    # -- whose it is

    @property
    def spec(self) -> LiveTensor:
        return self

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def key_id(self) -> str:
        return self.request.key_id

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def adapter(self) -> str:
        """The model, as the ledger names it."""
        return self.request.model


@dataclass(slots=True)
class _Served:
    configs: dict[int, ANY_MESSAGE] = field(default_factory=dict)  # by version
    labels: dict[str, int] = field(default_factory=dict)


def client_with_tensors(
    start: Start,
    clock: Clock,
    *,
    on_admitted: Callable[[LiveRequest], None] | None = None,
    on_event: Callable[[str], None] = lambda line: None,
) -> EngineClient:
    """Return a client of an engine that serves tensor models too."""
    memory = ServerMemory(start.config.tensors.tensor_arena_bytes)
    share = replace(start.config.share, tensor_memory=memory.file)
    start = replace(start, config=replace(start.config, share=share))
    client = EngineClient(start, clock, on_admitted=on_admitted, on_event=on_event)
    supervisor = client.supervisor
    client.tensors = TensorClient(
        supervisor.send,
        supervisor.death,
        lambda: None if supervisor.ready else supervisor.sleep.wake(),
        start.process.resume,
        memory,
        on_admitted,
    )
    client.tensors.on_ended = lambda request, ended: client.on_computed(request.tenant, ended.charges.compute_us)
    return client


class TensorClient:
    """Client of an engine's tensor models, on one event loop, except for calls before there is one."""

    def __init__(
        self,
        send: Callable[[Command], bool],
        death: Callable[[], EngineDead],
        wake: Callable[[], None],
        resume: str,
        memory: ServerMemory,
        on_admitted: Callable[[Any], None] | None = None,
    ) -> None:
        """`send` gives False when there is no engine, `death` why there is none; `wake` has one come that sleeps.
        `resume` is the server's rule for requests whose engine died; `memory` is shared with engines; `on_admitted`
        is told of each `LiveTensor`.
        """
        self._send_frame, self._death, self._wake, self._resume = send, death, wake, resume
        self._on_admitted = on_admitted
        self.memory = memory
        self._live: dict[str, LiveTensor] = {}
        self._isolation: CrashIsolation[LiveTensor] = CrashIsolation(self._begin)
        self._asked: dict[str, Load | Unload] = {}  # by model, what was done last, which the next engine does again
        self._restoring: set[int] = set()  # of them, those that the present engine has not done yet
        self._changes: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count()
        self._index: tuple[IndexEntry, ...] = ()
        self._served: dict[str, _Served] = {}
        self._statistics = Statistics()
        self.counts = TensorCounts()
        self._over: EngineDead | None = None
        self.on_ended: Callable[[InferRequest, Ended], None] = lambda request, ended: None  # for ledger and metrics
        self.on_batch: Callable[[Ran], None] = lambda ran: None

    # -- TensorService

    async def infer(self, request: InferRequest) -> InferResponse:
        if self._over is not None:
            raise self._over
        if request.request_id in self._live:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        live = LiveTensor(request, asyncio.get_running_loop().create_future())
        self._live[request.request_id] = live
        if self._on_admitted is not None:
            self._on_admitted(live)
        if not self._restoring:  # else it is begun with all others
            self._isolation.enter(live)
        self._wake()
        try:
            ended = await live.answer
        except asyncio.CancelledError:
            self._cancel(live)
            raise
        if ended.result is None:
            raise _error(ended.problem)
        return ended.result

    def index(self, *, ready_only: bool = False) -> Sequence[IndexEntry]:
        ready = {(name, version) for name, served in self._served.items() for version in served.configs}
        return [entry for entry in self._index if not ready_only or (entry.name, entry.version) in ready]

    def config(self, model: str, version: int = 0, label: str = "") -> ANY_MESSAGE:
        served = self._served.get(model)
        if served is None:
            raise unknown_model(model)
        if label and label not in served.labels:
            raise unknown_model(model, label=label, served=tuple(served.configs))
        number = served.labels[label] if label else version or max(served.configs)
        if number not in served.configs:
            raise unknown_model(model, number, served=tuple(served.configs))
        return served.configs[number]

    def versions(self, model: str) -> Sequence[int]:
        return sorted(self._served[model].configs) if model in self._served else ()

    def statistics(self, model: str = "", version: int = 0) -> Sequence[ModelStatistics]:
        return self._statistics.of(model, version)

    def num_unanswered(self) -> Counter[tuple[str, int]]:
        """Requests that wait or run, by model and version."""
        asked = (live.request for live in self._live.values())
        return Counter((each.model, each.version or max(self.versions(each.model), default=0)) for each in asked)

    async def load(self, model: str, config: str | None = None) -> None:
        await self._change(Load(next(self._numbers), model, config))

    async def unload(self, model: str) -> None:
        await self._change(Unload(next(self._numbers), model))

    async def _change(self, command: Load | Unload) -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._send(command):
            raise self._death()
        self._changes[command.number] = done
        try:
            await done
            self._asked[command.model] = command
        finally:
            self._changes.pop(command.number, None)

    # -- what the engine's client tells

    def heard(self, message: msgspec.Raw) -> None:
        for news in decode_news(message):
            match news:
                case Ended():
                    self._ended(news)
                case Ran(times):
                    self._statistics.ran(times)
                    self.counts.ran(times.model, times.num_rows, times.num_padded, times.num_elements)
                    self.on_batch(news)
                case Looked(model, version, hit, ns):
                    self._statistics.cached(model, version, hit=hit, ns=ns)
                case StepEnded(model, version, succeeded, total_ns, queue_ns):
                    self._statistics.ended(model, version, succeeded=succeeded, total_ns=total_ns, queue_ns=queue_ns)
                case Models():
                    self._models_changed(news)
                case Changed(number) if number in self._restoring:
                    self._restored(number)
                case Changed(number, problem) if number in self._changes:
                    _settle(self._changes[number], _error(problem) if problem is not None else None)
        self._send_freed()

    @property
    def busy(self) -> bool:
        return bool(self._live or self._changes)

    def lost(self, cause: str, *, own_fault: bool) -> Loss:
        """End or keep requests of an engine that died: those that may, run again."""
        before = len(self._live)
        self._restoring.clear()
        culprit = self._isolation.died(self._live.values(), own_fault=own_fault)
        self._end_changes(EngineDead(cause))
        for live in list(self._live.values()):
            if live.cancelled:
                self._end(live, FinishReason.ABORT)
            elif self._resume == "never" or live is culprit:
                why = "requests are not resumed here (--resume never)"
                if live is culprit:
                    why = f"{live.num_deaths} engines died while they had this request, the last of them nothing else"
                self._fail(live, EngineDead(f"{cause}, and {why}"))
            live.sent = False
        found_cause = culprit is not None and self._isolation.others_live()
        return Loss(len(self._live), before - len(self._live), found_cause)

    def regained(self) -> int:
        """Send requests to a new engine; return how many run again."""
        if (kept := self.memory.kept()) is not None:
            self._send(kept)
        self._restoring = {next(self._numbers) for _ in self._asked}
        for number, command in zip(sorted(self._restoring), self._asked.values(), strict=True):
            self._send(msgspec.structs.replace(command, number=number))
        self._restored()
        return len(self._live)

    def _restored(self, number: int = -1) -> None:
        """Models are as they were asked to be; one that cannot be loaded any more has its reason in the index."""
        self._restoring.discard(number)
        if not self._restoring:
            self._isolation.begin(list(self._live.values()))

    def ended(self, error: EngineDead) -> None:
        """Fail all requests: there will be no engine any more."""
        self._over = error
        self._end_changes(error)
        for live in list(self._live.values()):
            self._fail(live, error)

    # -- small things

    def _begin(self, live: LiveTensor) -> None:
        live.crossing = live.crossing or self.memory.sent(live.request)
        self._send_freed()
        try:
            live.sent = self._send(live.crossing)
        except (RequestTooLarge, OverflowError) as error:
            self._fail(live, error if isinstance(error, MaitredError) else InvalidRequest("a number is too large"))

    def _send_freed(self) -> None:
        if (freed := self.memory.freed()) is not None:
            self._send(freed)

    def _send(self, command: TensorCommand) -> bool:
        return self._send_frame(ToTensors(msgspec.Raw(encode(command))))

    def _cancel(self, live: LiveTensor) -> None:
        live.cancelled = True
        if live.finish_reason is None and not (live.sent and self._send(Cancel(live.request_id, FinishReason.ABORT))):
            self._end(live, FinishReason.ABORT)

    def _fail(self, live: LiveTensor, error: MaitredError) -> None:
        self._end(live, FinishReason.ERROR)
        ended = Ended(live.request_id, None, FinishReason.ERROR, Problem(type(error).__name__, str(error)))
        self.on_ended(live.request, ended)
        _settle(live.answer, ended)

    def _ended(self, ended: Ended) -> None:
        live = self._live.get(ended.request_id)
        if live is None:
            self.memory.answered(msgspec.structs.replace(ended, result=None))
            return
        ended = self.memory.answered(ended)
        live.charges = ended.charges
        self._end(live, ended.finish_reason)
        self._count(live.request, ended)
        self.on_ended(live.request, ended)
        _settle(live.answer, ended)

    def _end(self, live: LiveTensor, reason: FinishReason) -> None:
        del self._live[live.request_id]
        if live.crossing is not None:
            self.memory.end(live.crossing)
        live.finish_reason = reason
        self._isolation.stepped([live.request_id])

    def _count(self, request: InferRequest, ended: Ended) -> None:
        timing = ended.timing
        if timing is not None:
            self.counts.ended(request.model, ended.finish_reason, ended.charges)
            version = request.version if ended.result is None else ended.result.version
            queue_ns, total_ns = round(timing.queue_s * 1e9), round(timing.total_s * 1e9)
            succeeded = ended.result is not None
            self._statistics.ended(request.model, version, succeeded=succeeded, total_ns=total_ns, queue_ns=queue_ns)

    def _models_changed(self, models: Models) -> None:
        self._index, self._served = models.index, {}
        for each in models.served:
            served = self._served.setdefault(each.model, _Served())
            served.configs[each.number] = ModelConfig.FromString(each.config)
            served.labels |= dict.fromkeys(each.labels, each.number)
        self._statistics.serve([(each.model, each.number) for each in models.served])

    def _end_changes(self, error: EngineDead) -> None:
        for change in self._changes.values():
            _settle(change, error)


def _error(problem: Problem | None) -> MaitredError:
    assert problem is not None
    return error_of(problem.kind, problem.message)


def _settle(future: asyncio.Future, outcome: object) -> None:  # type: ignore[type-arg]
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)

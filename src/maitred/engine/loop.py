"""The engine loop: takes commands between two steps, steps, and reports; in a process of its own, or in a thread."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgspec

from maitred.config import EngineConfig
from maitred.core.clock import Clock, WallClock
from maitred.core.errors import MaitredError, RequestError
from maitred.core.request import FinishReason, RequestSpec, prompt_of_each
from maitred.core.step import RequestProgress
from maitred.engine import frames
from maitred.engine.adapters import AdapterCache
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.engine.queries import INTRODUCE_ADAPTER, QUERIES, AdapterFolder, Later
from maitred.scheduler.engine_core import EngineCore

Prepare = Callable[[str, Callable[[str, bool], None]], None]
"""Compiles a grammar, then tells what is wrong with it, or nothing, and whether that is the request's own fault."""


class _Done(Protocol):
    def __call__(self, error: str, is_requests_fault: bool = False) -> None: ...


Need = Callable[[_Done], None]
"""Begins to make something, such as a compiled grammar; returns at once."""


class Resolved(NamedTuple):
    """A request that waits no more, and what is wrong with what it needs; empty when nothing is."""

    spec: RequestSpec
    error: str
    is_requests_fault: bool


@dataclass(slots=True, eq=False)
class _Held:
    samples: Sequence[RequestSpec]  # of one prompt
    num_needs: int  # that are not there yet


class HeldRequests:
    """Used by the engine loop's thread; `wake` is called in another one when something is there."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self.waiting: dict[str, RequestSpec] = {}
        self.done: deque[tuple[_Held, str, bool]] = deque()

    def __len__(self) -> int:
        return len(self.waiting)

    def hold(self, samples: Sequence[RequestSpec], needs: Sequence[Need]) -> None:
        """Hold a prompt's samples until all needs are met."""
        held = _Held(samples, len(needs))
        self.waiting |= {spec.request_id: spec for spec in samples}

        def done(error: str, is_requests_fault: bool = False) -> None:
            self.done.append((held, error, is_requests_fault))
            self._wake()

        for need in needs:
            need(done)

    def drop(self, request_id: str) -> bool:
        """Ended from outside; whether it was here."""
        return self.waiting.pop(request_id, None) is not None

    def ready(self) -> Iterator[Resolved]:
        """Requests whose needs are met, or failed, in that order."""
        while self.done:
            held, error, is_requests_fault = self.done.popleft()
            held.num_needs -= 1
            for spec in held.samples if error or not held.num_needs else ():
                if self.waiting.get(spec.request_id) is spec:
                    del self.waiting[spec.request_id]
                    yield Resolved(spec, error, is_requests_fault)

    def expired(self, now: float) -> list[tuple[str, FinishReason]]:
        """Drop the requests whose time is over; their ids, and why."""
        over = [(request_id, reason) for request_id, spec in self.waiting.items() if (reason := _over(spec, now))]
        for request_id, _ in over:
            del self.waiting[request_id]
        return over


def _over(spec: RequestSpec, now: float) -> FinishReason | None:
    terms = spec.terms
    if terms.finish_by is not None and now >= terms.finish_by:
        return FinishReason.TIMEOUT
    if terms.start_by is not None and spec.resumed is None and now >= terms.start_by:
        return FinishReason.QUEUE_TIMEOUT
    return None


logger = logging.getLogger(__name__)
FIGURES_S = 0.1  # at most so often while there is work
MAX_WAIT_S = 3600.0  # for a deadline, at once; what waits for it takes no time that is much longer
MAX_CHANGES = 16 * 1024  # blocks in one report; half a megabyte
OUT_OF_MEMORY = "out of memory; give less with --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A builder's result: an engine, and what its client must know of it."""

    core: EngineCore
    facts: ModelFacts
    memory_plan: MemoryPlan
    deterministic: bool
    close: Callable[[], None]
    prepare: Prepare | None = None  # compiles a grammar; None where no request has one
    adapters: AdapterCache | None = None  # None where no request has one
    start_phases: Mapping[str, float] = field(default_factory=dict)
    kv_addresses: tuple[str, ...] = ()
    num_kv_layers: int = 1  # that leave one by one while a prompt is computed
    tensors: TensorSide | None = None  # None where no tensor models are served


Builder = Callable[[EngineConfig, tuple[str, ...], Callable[[str], None], Callable[[], None]], LoadedEngine]
"""(config, served model names, told a line per phase, ends the loop's wait); raises MaitredError when it cannot be."""


def run_engine(begin: frames.Begin, link: Link, build: Builder, on_loaded: Callable[[], None] = lambda: None) -> int:
    """Loads and serves until told to stop; 0 then, and 1 for an engine that could not load or broke, which was told."""
    loaded = _load(begin, link, build)
    if loaded is None:
        return 1
    on_loaded()
    try:
        phases = dict(loaded.start_phases)
        budget = loaded.core.scheduler.config.token_budget
        if loaded.tensors is not None:
            loaded.tensors.begin(loaded.core, link.send, link.wake)
        told = (loaded.kv_addresses, budget, loaded.num_kv_layers, loaded.core.figures().get("step_costs"))
        link.send(frames.Ready(loaded.facts, loaded.memory_plan, loaded.deterministic, phases, *told))
        EngineLoop(loaded.core, link, WallClock(), loaded.prepare, loaded.adapters, loaded.tensors).run()
    except Exception as error:
        logger.debug("where the engine stopped", exc_info=error)
        link.send(frames.Died(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        link.rest()
        if loaded.tensors is not None:
            loaded.tensors.close()
        loaded.close()
    return 0


def _load(begin: frames.Begin, link: Link, build: Builder) -> LoadedEngine | None:
    """None when the client was told why it cannot be."""
    try:
        return build(begin.config, begin.served_model_names, lambda line: link.send(frames.Told(line)), link.wake)
    except MaitredError as error:
        link.send(frames.Failed(type(error).__name__, str(error)))
    except MemoryError:
        link.send(frames.Failed("OutOfMemory", OUT_OF_MEMORY))
    except Exception as error:
        logger.debug("where loading failed", exc_info=error)
        link.send(frames.Failed("", f"unexpected {type(error).__name__}: {error}"))
    return None


class EngineLoop:
    """One engine behind its link. `run` returns when it was told to stop."""

    def __init__(
        self,
        core: EngineCore,
        link: Link,
        clock: Clock,
        prepare: Prepare | None = None,
        adapters: AdapterCache | None = None,
        tensors: TensorSide | None = None,
    ) -> None:
        self._core, self._link, self._clock = core, link, clock
        self._prepare, self._adapters, self._tensors = prepare, adapters, tensors
        self._held = HeldRequests(link.wake)
        self._kept: deque[frames.Command] = deque()  # came during a step, and are taken after it
        if tensors is not None:
            self._step_thread = ThreadPoolExecutor(1, thread_name_prefix="maitred-step")
        self._ended: list[RequestProgress] = []  # between two steps
        self._told = frames.Figures()
        self._told_at = -FIGURES_S
        self._stopping = False
        self._has_changed = True  # what `Figures` tell; tensor requests do not

    def run(self) -> None:
        core, link = self._core, self._link
        while not self._stopping:
            # For commands, or KV from elsewhere, whose coming wakes it; what was called before it can be woken is run.
            wait = not core.can_step and not core.is_called
            if wait and self._has_changed:
                self._tell([])  # the figures of an idle engine, before it falls silent
                self._has_changed = self._tensors is None
            for command in self._commands(wait):
                if self._tensors is None or not self._tensors.obey(command):
                    self._obey(command)
                    self._has_changed = True
            self._has_changed |= core.run_called()
            if self._tensors is not None:
                self._tensors.turn()
            self._add_held()
            progress, self._ended = self._ended, []
            if core.has_work and not self._stopping:
                progress += core.step() if self._tensors is None else self._step_beside(self._tensors)
            if progress or core.has_work:
                self._tell(progress)
                self._has_changed = True
            link.round_number += 1

    def _commands(self, wait: bool) -> Iterator[frames.Command]:
        wait = wait and not self._kept
        while self._kept:
            yield self._kept.popleft()
        yield from self._link.commands(wait=wait, at_most_s=self._until_deadline_s() if wait else None)

    def _until_deadline_s(self) -> float | None:
        deadline = self._core.next_deadline
        times = [] if deadline is None else [max(0.0, deadline - self._clock.now())]
        if self._tensors is not None and (wake_in_s := self._tensors.wake_in_s) is not None:
            times.append(wake_in_s)
        return min(*times, MAX_WAIT_S) if times else None

    def _step_beside(self, tensors: TensorSide) -> list[RequestProgress]:
        """Step, executing in a thread of its own; meanwhile batches of tensor models begin and end in this one, and the
        language model's commands are kept for when the step is over.
        """
        plan = self._core.schedule()
        executing = self._step_thread.submit(self._core.execute, plan)
        executing.add_done_callback(lambda done: self._link.wake())
        while not executing.done():
            commands = self._link.commands(wait=True, at_most_s=tensors.wake_in_s, beside=True)
            self._kept += [command for command in commands if not tensors.obey(command)]
            tensors.turn()
        return self._core.update(plan, executing.result())

    def _obey(self, command: frames.Command) -> None:
        match command:
            case frames.Submit(specs):
                samples = prompt_of_each(specs)
                if needs := self._needs(samples):
                    self._held.hold(samples, needs)
                else:
                    for spec in samples:
                        self._add(spec)
            case frames.Abort(request_id, reason) if self._held.drop(request_id):
                self._drop(request_id, reason)
            case frames.Abort(request_id, FinishReason.SHED):
                self._note_end(self._core.shed(request_id))
            case frames.Abort(request_id, reason):
                self._note_end(self._core.finish(request_id, reason))
            case frames.Ask():
                self._answer(command)
            case frames.KnowAdapters(adapters) if self._adapters is not None:
                self._adapters.know(adapters)
            case frames.ForgetAdapter(key) if self._adapters is not None:
                self._adapters.forget(key)
            case frames.Stop():
                self._stopping = True
            case (
                frames.Begin()
                | frames.Infer()
                | frames.Free()
                | frames.Keep()
                | frames.KnowAdapters()
                | frames.ForgetAdapter()
            ):
                logger.warning("dropped a command that is not for this engine: %s", type(command).__name__)

    def _add(self, spec: RequestSpec) -> None:
        try:
            self._core.add(spec)
        except MaitredError as error:  # cannot ever fit: this request's fault, not the engine's
            self._fail(spec, str(error), isinstance(error, RequestError))

    def _fail(self, spec: RequestSpec, error: str, is_requests_fault: bool) -> None:
        self._drop(spec.request_id, FinishReason.ERROR, error=error, is_requests_fault=is_requests_fault)

    def _drop(self, request_id: str, reason: FinishReason, **why: Any) -> None:
        """Note the end of a request that the core does not have."""
        if self._adapters is not None:
            self._adapters.release(request_id)
        self._note_end(RequestProgress(request_id, finish_reason=reason, **why))

    def _needs(self, samples: Sequence[RequestSpec]) -> list[Need]:
        """Things to be made before a prompt's samples are the scheduler's."""
        needs: list[Need] = []
        if samples[0].grammar and self._prepare is not None:
            needs.append(partial(self._prepare, samples[0].grammar))
        if samples[0].adapter and self._adapters is not None:
            for spec in samples:
                place = self._core.place_of_newcomer(spec)
                needs.append(partial(self._adapters.acquire, spec.request_id, spec.adapter, place=place))
        return needs

    def _add_held(self) -> None:
        if not self._held.waiting:
            return
        for request_id, reason in self._held.expired(self._clock.now()):
            self._drop(request_id, reason)
        for spec, error, is_requests_fault in self._held.ready():
            if error:
                self._fail(spec, error, is_requests_fault)
            else:
                self._add(spec)

    def _note_end(self, ended: RequestProgress | None) -> None:
        if ended is not None:
            self._ended.append(ended)

    def _introduce(self, adapters: AdapterCache, ask: frames.Ask) -> None:
        """Facts of an adapter, or what is wrong with it; runs in the thread that reads adapters."""
        try:
            folder = msgspec.msgpack.decode(ask.argument, type=AdapterFolder)
            facts = adapters.introduce(folder.name, folder.path, folder.inside)
            answer: frames.Report = frames.Answer(ask.number, msgspec.Raw(frames.encode(facts)))
        except Exception as error:
            answer = frames.Refused(ask.number, type(error).__name__, str(error))
        self._core.call_soon(partial(self._link.send, answer))

    def _answer(self, ask: frames.Ask) -> None:
        if ask.query == INTRODUCE_ADAPTER.name and self._adapters is not None:
            self._adapters.begin_introducing(partial(self._introduce, self._adapters, ask))
            return
        try:
            query = QUERIES[ask.query]
            result = query.answer(self._core, self._clock, msgspec.msgpack.decode(ask.argument, type=query.argument))
            tell = partial(self._tell_result, ask)
            result.begin(tell) if isinstance(result, Later) else tell(result)
        except (MaitredError, KeyError, msgspec.DecodeError) as error:
            self._link.send(frames.Refused(ask.number, type(error).__name__, str(error)))

    def _tell_result(self, ask: frames.Ask, result: object) -> None:
        self._link.send(frames.Answer(ask.number, msgspec.Raw(frames.encode(result))))

    def _tell(self, progress: list[RequestProgress]) -> None:
        now = self._clock.now()
        figures = None
        if now - self._told_at >= FIGURES_S or not self._core.can_step:
            figures, self._told_at = self._figures(), now
            if figures == self._told and not progress and not self._core.block_changes:
                return
            self._told = figures
        blocks = self._block_changes()
        if progress or figures is not None or blocks is not None:
            self._link.send(frames.Stepped(progress, self._core.num_queued + len(self._held.waiting), figures, blocks))
        while blocks is not None and (blocks := self._block_changes()) is not None:
            self._link.send(frames.Stepped([], self._core.num_queued + len(self._held.waiting), None, blocks))

    def _block_changes(self) -> frames.BlockChanges | None:
        changes = self._core.block_changes
        return frames.BlockChanges(*changes.take(MAX_CHANGES)) if changes else None

    def _figures(self) -> frames.Figures:
        core, stats = self._core, self._core.stats
        named = {name: getattr(stats, name) for name in frames.Figures.__struct_fields__ if hasattr(stats, name)}
        return frames.Figures(**named, **core.figures(), execute_s=core.execute_s, host_s=core.host_s)


class Link(Protocol):
    """The engine's end of a transport."""

    round_number: int
    """Changes with every round of the loop, so that the other end sees a step that does not end."""

    def commands(self, *, wait: bool, at_most_s: float | None = None, beside: bool = False) -> Iterator[frames.Command]:
        """Commands that have come; with `wait`, at least one, unless `wake` was called or so many seconds went by.
        `beside` says that a step is under way meanwhile.
        """

    def wake(self) -> None:
        """End the wait for commands, the present one or the next; callable from any thread."""

    def send(self, report: frames.Report) -> None:
        """Raises RequestTooLarge."""

    def rest(self) -> None:
        """No step is under way any more."""


class TensorSide:
    """Tensor models that an engine serves beside its language model, also while a step is under way; none here."""

    def begin(self, core: EngineCore, send: Callable[[frames.Report], None], wake: Callable[[], None]) -> None:
        """Called before the engine says that it is ready."""

    def obey(self, command: frames.Command) -> bool:
        """Take a command; False for one that is not for tensor models."""
        return False

    def turn(self) -> None:
        """Called after whatever happened, and when `wake_in_s` is over."""

    @property
    def wake_in_s(self) -> float | None:
        return None

    def close(self) -> None:
        """Give everything back."""

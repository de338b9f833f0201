"""What all routes of one app share: model, replica, limits, counts; who is admitted, and work off the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os.path
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar, runtime_checkable

import maitred
from maitred.api.generate.kept_logprobs import KeptLogprobs
from maitred.api.generate.text_threads import TextThreads
from maitred.api.http.auth import Authenticator
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.fleet_token import read_fleet_token
from maitred.api.http.loading import LOADING, LoadingReplica
from maitred.api.http.sse import EventStream
from maitred.api.http.watch import Watch
from maitred.api.ops.decode_probe import DecodeProbe
from maitred.api.ops.fleet_feed import FleetFeed, NoteTokens
from maitred.api.ops.latencies import Latencies
from maitred.api.ops.live_feed import LiveFeed
from maitred.api.ops.metrics_page import EdgeMetrics
from maitred.clock import Clock
from maitred.config import SchedulerConfig, ServerConfig
from maitred.engine.installed import policy_of
from maitred.engine.intake import ServedModel, make_requests
from maitred.errors import ConfigError, InvalidRequest, ModelNotFound, RequestError, Unavailable
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Gate
from maitred.gate.terms import NO_LIMITS, TimeLimits
from maitred.replica import Replica
from maitred.request import RequestSpec, SamplingParams
from maitred.step import RequestProgress
from maitred.storage.ledger import Ledger

if TYPE_CHECKING:
    from maitred.api.ops.tracing import Tracing

P = ParamSpec("P")
T = TypeVar("T")
# in one answer; all are kept until it ends, some 300 bytes each, and writing so many takes 0.2 s
MAX_PROMPT_LOGPROBS = 256 * 1024
MANY_LOGPROBS = 4096  # 3 ms to write


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """What every sample of one HTTP request has in common besides its sampling."""

    cache_salt: str = ""
    limits: TimeLimits = NO_LIMITS
    note_tokens: NoteTokens | None = None  # told the prompt and the first spec, where there is one prompt


def _without_priorities(policy: str) -> str | None:
    """`policy`, if it says of itself that it heeds none."""
    return None if policy_of(SchedulerConfig(policy=policy)).heeds_priority else policy


@runtime_checkable
class TellsProgress(Protocol):
    """A replica that tells of all progress at once, before those who wait for it are woken."""

    on_progress: Callable[[list[RequestProgress], int, float], None]


class Edge:
    """One server's view of one replica."""

    # from `open` on; no route that needs them is asked before
    live: LiveFeed
    decode_probe: DecodeProbe
    fleet: FleetFeed

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock,
        is_ready: Callable[[], bool],
        policy: str | None = None,  # the scheduler's; None heeds priorities
        authenticator: Authenticator | None = None,
        ledger: Ledger | None = None,
        start_phases: Mapping[str, float] | None = None,
    ) -> None:
        self.config = config
        self.replica: Replica = LoadingReplica()
        self._model: ServedModel | None = None
        self._paths: set[str] = set()  # where it lies, which is a name too
        self.gate = Gate()
        self.policy_without_priorities = None if policy is None else _without_priorities(policy)
        self.authenticator = authenticator if authenticator is not None else Authenticator(config.api_keys)
        self.metrics = EdgeMetrics(
            self.replica,
            version=maitred.__version__,
            compat=config.metrics_compat,
            start_phases=start_phases,
            num_tenants_file_failures=self.authenticator.num_file_failures,
        )
        self.fingerprint = f"maitred-{maitred.__version__}"
        self.draining = False
        self.fleet_token = read_fleet_token(config.fleet_token_file)
        self.tracing = _tracing(config.otlp_endpoint) if config.otlp_endpoint else None
        self.clock = clock
        self.ledger = ledger
        self.salt_secret = secrets.token_bytes(32)  # the cache it protects does not outlive this process either
        self.latencies = Latencies()
        self._is_ready = is_ready
        self.kept_logprobs = KeptLogprobs()
        self.large_bodies = LargeBodies(config.max_body_bytes)
        self._text_threads = TextThreads()
        self._ids = itertools.count()
        self._num_answering = 0
        self._empty = asyncio.Event()  # nobody is being answered
        self._empty.set()
        self._watches: set[Watch] = set()

    def open(self, replica: Replica, model: ServedModel, admission: AdmissionController | None = None) -> None:
        """The engine is there. `admission` knows its slots, and turns away more than it can serve in time."""
        self.replica, self._model = replica, model
        self.gate = Gate(admission, max_concurrent_requests=self.config.max_concurrent_requests)
        if isinstance(replica, TellsProgress):
            replica.on_progress = self.gate.progressed
        if model.root:
            self._paths.add(os.path.normpath(model.root))
            with suppress(FileNotFoundError):  # of a folder that is gone
                self._paths.add(os.path.abspath(model.root))
        name = model.names[0]
        self.metrics.engine_came(replica, name, model.block_size, admission)
        self.live = LiveFeed(replica, self.latencies, name, is_over=lambda: self.draining)
        self.fleet = FleetFeed(
            replica,
            model,
            self.fleet_token,
            is_draining=lambda: self.draining,
            is_over=lambda: self.draining and self._empty.is_set(),
        )
        self.decode_probe = DecodeProbe(replica, model, self.clock, self.gate, timeout_s=self.config.decode_timeout_s)

    @property
    def model(self) -> ServedModel:
        """Raises Unavailable before there is one."""
        if self._model is None:
            raise Unavailable(LOADING)
        return self._model

    @property
    def loaded_model(self) -> ServedModel | None:
        """None before there is one."""
        return self._model

    @property
    def fleet_listens(self) -> bool:
        return self._model is not None and self.fleet.is_on

    def reconfigured(self, scheduler: SchedulerConfig) -> None:
        """Once priorities were heeded they stay welcome: no client's request becomes an error while the server runs."""
        self.gate.reconfigure(scheduler)
        if self.policy_without_priorities is not None:
            self.policy_without_priorities = _without_priorities(scheduler.policy)

    def check_loaded(self) -> None:
        """Raises Unavailable before the engine is there."""
        if self._model is None:
            raise Unavailable(LOADING)

    @property
    def ready(self) -> bool:
        return not self.draining and self._is_ready() and self.replica.state().alive

    def check_model(self, name: str | None) -> str:
        """`name`, which may be the model's path, or the canonical one when none was given; raises ModelNotFound."""
        if name is None:
            return self.model.names[0]
        if name not in self.model.names and os.path.normpath(name) not in self._paths:
            raise ModelNotFound(
                f"the model {shortened(repr(name))} is not served here; choose one of {', '.join(self.model.names)}",
                param="model",
            )
        return name

    @contextmanager
    def answering(self) -> Iterator[None]:
        """The server's end waits for what runs inside. Raises Unavailable when requests are not welcome."""
        if self.draining or not self._is_ready():
            state = "shutting down" if self.draining else "not ready yet"
            raise Unavailable(f"the server is {state}; try again", retry_after_s=1.0)
        self._num_answering += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_answering -= 1
            if not self._num_answering:
                self._empty.set()

    @asynccontextmanager
    async def watch(self, exchange: Exchange, events: EventStream | None = None) -> AsyncIterator[None]:
        """End what runs inside when the client goes away or drain() says so."""
        silence_s = self.config.sse_keep_alive_s
        watch = Watch(exchange, silence_s=silence_s, on_silence=events.keep_alive if events is not None else None)
        self._watches.add(watch)
        try:
            async with watch:
                yield
        finally:
            self._watches.discard(watch)

    async def emptied(self) -> None:
        """Returns when every request has its answer."""
        await self._empty.wait()

    def cut_all(self) -> None:
        """End every request in flight with an error; for the end of a graceful shutdown."""
        for watch in list(self._watches):
            watch.cut(Unavailable("the server is shutting down; send the request again", retry_after_s=1.0))

    async def in_thread(self, exchange: Exchange, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a request's text work (templates, tokenising) beside the event loop."""
        return await self._text_threads.run(exchange.num_body_bytes, partial(function, *args, **kwargs))

    async def written(self, num_logprobs: int, write: Callable[[], T]) -> T:
        """What `write` makes of an answer, beside the event loop where it would hold that up: 0.8 us for each
        log-probability.
        """
        return await self._text_threads.run_long(write) if num_logprobs > MANY_LOGPROBS else write()

    def make_batches(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams,
        options: RequestOptions,
        completion_id: str,
        *,
        add_special_tokens: bool = True,
    ) -> list[list[RequestSpec]]:
        """The samples of each prompt; call it in a thread. Ids are unique even when clients repeat theirs."""
        now = self.clock.now()
        batches, num_tokens = [], 0
        for position, prompt in enumerate(prompts):
            try:
                batch = make_requests(
                    self.model,
                    prompt,
                    sampling,
                    request_id=f"{next(self._ids):x}.{completion_id}",
                    now=now,
                    cache_salt=options.cache_salt,
                    ttft_slo_s=options.limits.ttft_slo_s,
                    start_by=_after(now, options.limits.queue_timeout_s),
                    finish_by=_after(now, options.limits.timeout_s),
                    add_special_tokens=add_special_tokens,
                )
            except RequestError as error:
                if error.param == "prompt" and len(prompts) > 1:
                    error.param = f"prompt[{position}]"
                raise
            batches.append(batch)
            if options.note_tokens is not None and len(prompts) == 1:
                options.note_tokens(prompt, batch[0])
            num_tokens += batch[0].num_prompt_tokens * len(batch)
            _check_prompt_logprobs(num_tokens, sampling.prompt_logprobs)
        return batches

    def close(self) -> None:
        """Give back the threads, send the last traces; the app answers no more."""
        if self.tracing is not None:
            self.tracing.close()
        self._text_threads.close()


def _check_prompt_logprobs(num_tokens: int, num_top: int | None) -> None:
    """Raise InvalidRequest once `num_tokens` of prompts have more log-probabilities than one answer may hold."""
    if num_top is not None and num_tokens * (num_top + 1) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"{num_tokens} tokens of prompts (for every sample anew) with {num_top + 1} log-probabilities each are "
            f"{num_tokens * (num_top + 1)}; at most {MAX_PROMPT_LOGPROBS} in one answer: ask for fewer of each token, "
            "or send fewer tokens at a time",
            param="prompt_logprobs",
        )


def _tracing(endpoint: str) -> Tracing:
    try:
        from maitred.api.ops.tracing import make_tracing  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError:
        raise ConfigError("traces need OpenTelemetry; install it with: pip install 'maitred[otel]'") from None
    return make_tracing(endpoint, version=maitred.__version__)


def _after(now: float, seconds: float | None) -> float | None:
    return now + seconds if seconds is not None else None

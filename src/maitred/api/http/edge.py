"""What all routes of one app share: model, replica, limits, counts; who is admitted, and work off the event loop."""

from __future__ import annotations

import asyncio
import itertools
import os.path
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

import maitred
from maitred.api.generate.kept_logprobs import KeptLogprobs
from maitred.api.generate.text_threads import TextThreads
from maitred.api.http.auth import Authenticator
from maitred.api.http.bodies import LargeBodies
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.loading import LOADING, LoadingReplica
from maitred.api.http.sse import EventStream
from maitred.api.http.watch import Watch
from maitred.api.ops.decode_probe import DecodeProbe
from maitred.api.ops.latencies import Latencies
from maitred.api.ops.live_feed import LiveFeed
from maitred.api.ops.metrics_page import EdgeMetrics
from maitred.clock import Clock
from maitred.config import SchedulerConfig, ServerConfig
from maitred.engine.installed import policy_of
from maitred.engine.intake import ServedModel
from maitred.errors import ConfigError, ModelNotFound, Unavailable
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Gate
from maitred.replica import Replica
from maitred.step import RequestProgress
from maitred.storage.ledger import Ledger

if TYPE_CHECKING:
    from maitred.api.ops.tracing import Tracing

T = TypeVar("T")
MANY_LOGPROBS = 4096  # 3 ms to write


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
        self.draining = False
        self.tracing = _tracing(config.otlp_endpoint) if config.otlp_endpoint else None
        self.clock = clock
        self.ledger = ledger
        self.salt_secret = secrets.token_bytes(32)  # the cache it protects does not outlive this process either
        self.latencies = Latencies()
        self._is_ready = is_ready
        self.kept_logprobs = KeptLogprobs()
        self.large_bodies = LargeBodies(config.max_body_bytes)
        self._text_threads = TextThreads()
        self.ids = itertools.count()
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
        self.decode_probe = DecodeProbe(replica, model, self.clock, self.gate, timeout_s=self.config.decode_timeout_s)

    @property
    def model(self) -> ServedModel:
        """Raises Unavailable before there is one."""
        if self._model is None:
            raise Unavailable(LOADING)
        return self._model

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

    async def text_work(self, exchange: Exchange, work: Callable[[], T], *, may_take_long: bool = False) -> T:
        """Do a request's text work (templates, tokenising), beside the event loop but for the least of it."""
        return await self._text_threads.run(exchange.num_body_bytes, work, may_take_long=may_take_long)

    async def written(self, num_logprobs: int, write: Callable[[], T]) -> T:
        """What `write` makes of an answer, beside the event loop where it would hold that up: 0.8 us for each
        log-probability.
        """
        return await self._text_threads.run_long(write) if num_logprobs > MANY_LOGPROBS else write()

    def close(self) -> None:
        """Give back the threads, send the last traces; the app answers no more."""
        if self.tracing is not None:
            self.tracing.close()
        self._text_threads.close()


def _tracing(endpoint: str) -> Tracing:
    try:
        from maitred.api.ops.tracing import make_tracing  # noqa: PLC0415 (an extra, and slow to import)
    except ImportError:
        raise ConfigError("traces need OpenTelemetry; install it with: pip install 'maitred[otel]'") from None
    return make_tracing(endpoint, version=maitred.__version__)

"""Dependencies of all routes: the replica and its model, gate, clock and config, and memory that requests share."""

from __future__ import annotations

import asyncio
import copy
import itertools
import os
import os.path
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from maitred.api.http.auth import Authenticator
from maitred.api.http.errors import shortened, told_names
from maitred.api.http.exchange import IgnoredFields
from maitred.api.http.fleet_headers import read_fleet_token
from maitred.api.http.in_flight import InFlight
from maitred.api.http.service import Service
from maitred.api.ops.fleet_feed import FleetFeed
from maitred.api.ops.observer import Observer
from maitred.config import SchedulerConfig, ServerConfig
from maitred.core.clock import Clock
from maitred.core.errors import InvalidRequest, ModelNotFound, Overloaded, Unavailable
from maitred.core.request import RequestSpec
from maitred.core.step import RequestProgress, TokenLogprobs
from maitred.engine.adapter_book import AdapterBook
from maitred.engine.grammar_check import GrammarChecker
from maitred.engine.installed import policy_of
from maitred.engine.intake import ServedModel
from maitred.engine.live_requests import MAX_UNREAD_BYTES, logprob_bytes
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.replica import LOADING, LoadingReplica, Replica
from maitred.gate.admission import AdmissionController
from maitred.gate.gate import Gate
from maitred.storage.capture import Capture
from maitred.storage.ledger import Ledger
from maitred.tenancy.caller import Caller

if TYPE_CHECKING:
    from maitred.engine.tensors import TensorModels  # which needs the extra

T = TypeVar("T")
LONG_BYTES = 16 * 1024  # of a body; tokenising so much takes some milliseconds
TINY_BYTES = 1024  # 0.1 to 0.8 ms, where handing it over and back takes 0.1
TINY_S = 0.001  # one that took longer sends the next to a thread, and so does the first
SHORT_THREADS = max(1, min(3, (os.cpu_count() or 1) - 1))  # more would crowd out the event loop


class TextThreads:
    """Threads for templates, tokenising, and long answers. Long work waits for other long work only."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock  # this thread's processor time: by the wall, quick work is slow on a busy machine
        self._short = ThreadPoolExecutor(SHORT_THREADS, thread_name_prefix="maitred-text")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="maitred-long-text")
        self._shaped = ThreadPoolExecutor(1, thread_name_prefix="maitred-shapes")
        self._is_quick = False  # so the last tiny work was; the first reads the tokenizer

    async def run(self, num_bytes: int, function: Callable[[], T], *, may_take_long: bool = False) -> T:
        """Run `function` for a body of `num_bytes`, which predict its time unless it `may_take_long`. If cancelled
        before its turn, it is not called.
        """
        if num_bytes > LONG_BYTES:
            return await self.run_long(function)
        if num_bytes <= TINY_BYTES and not may_take_long:
            function = partial(self._timed, function)
            if self._is_quick:
                return function()
        return await asyncio.get_running_loop().run_in_executor(self._short, function)

    def _timed(self, function: Callable[[], T]) -> T:
        began_s = self._clock()
        try:
            return function()
        finally:
            self._is_quick = self._clock() - began_s < TINY_S

    async def run_long(self, function: Callable[[], T]) -> T:
        """Run in the lane of long work."""
        return await asyncio.get_running_loop().run_in_executor(self._long, function)

    async def run_shaped(self, function: Callable[[], T]) -> T:
        """Run in the lane of work that may have to check a grammar: an unknown one may take seconds."""
        return await asyncio.get_running_loop().run_in_executor(self._shaped, function)

    def close(self) -> None:
        for lane in (self._short, self._long, self._shaped):
            lane.shutdown(wait=False, cancel_futures=True)


MAX_KEPT_BYTES = 64 * 2**20  # of one answer: 35,000 tokens with 20 of each, some 40 MiB of JSON; 200,000 with one
MAX_KEPT_BYTES_IN_ALL = 512 * 2**20  # from there on, an answer ends that keeps more than a stream may leave unread
Keep = Callable[[Sequence[TokenLogprobs]], None]


class KeptLogprobs:
    """Counts what is kept, in bytes of memory."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def answer(self) -> Iterator[Keep]:
        """Account for one answer while it is made. The function given is called with what the answer keeps, and raises
        InvalidRequest or Overloaded once that is too much.
        """
        own = 0

        def keep(positions: Sequence[TokenLogprobs]) -> None:
            nonlocal own
            num_bytes = logprob_bytes(positions)
            own += num_bytes
            self.num_bytes += num_bytes
            if own > MAX_KEPT_BYTES:
                raise InvalidRequest(
                    f"the answer's log-probabilities take over {MAX_KEPT_BYTES} bytes of memory, the most that is kept "
                    "until an answer ends; send stream: true, or ask for fewer of each token, fewer tokens or samples",
                    param="logprobs",
                    code="answer_too_large",
                )
            if self.num_bytes > MAX_KEPT_BYTES_IN_ALL and own > MAX_UNREAD_BYTES:
                raise Overloaded(
                    f"log-probabilities of answers that are not streamed take over {MAX_KEPT_BYTES_IN_ALL} bytes of "
                    f"memory, {own} of them for this one; send stream: true, or try again later",
                    retry_after_s=1.0,
                )

        try:
            yield keep
        finally:
            self.num_bytes -= own


class App(Service):
    """One server's view of one replica. A route that alone uses something owns it."""

    observer: Observer
    fleet: FleetFeed  # from `open` on

    def __init__(
        self,
        config: ServerConfig,
        *,
        clock: Clock,
        observer: Observer,
        authenticator: Authenticator,
        is_ready: Callable[[], bool] | None = None,
        policy: str | None = None,
        ledger: Ledger | None = None,
        capture: Capture | None = None,
        salt_secret: bytes | None = None,
    ) -> None:
        """`policy` is the scheduler's; None heeds priorities. `salt_secret` None is the fleet's token, or is drawn."""
        super().__init__(
            config,
            clock=clock,
            authenticator=authenticator,
            observer=observer,
            gate=Gate(),
            fleet_token=read_fleet_token(config.fleet_token_file),
            ledger=ledger,
            salt_secret=salt_secret,
        )
        self.replica: Replica = LoadingReplica()
        self.loaded_model: ServedModel | None = None
        self._paths: set[str] = set()  # where it lies, which is a name too
        self.policy_without_priorities = None if policy is None else _without_priorities(policy)
        self.in_flight: InFlight = InFlight(is_ready=is_ready, silence_s=config.sse_keep_alive_s)
        self.ignored_fields = IgnoredFields(strict=config.strict_fields)
        self.capture = observer.metrics.tenants.capture = capture
        self.kept_logprobs = KeptLogprobs()
        self.text = TextThreads()
        self.grammars = GrammarChecker()
        self.request_numbers = itertools.count()

    def open(self, replica: Replica, model: ServedModel, admission: AdmissionController | None = None) -> None:
        """The engine is there. `admission` knows its slots, and turns away more than it can serve in time."""
        self.gate = Gate(admission, max_concurrent_requests=self.config.max_concurrent_requests)
        self._serve(replica, model)

    def beside(self, replica: Replica, model: ServedModel) -> App:
        """The view of another version, under the same gate, for requests from now on; those that have this view keep
        it.
        """
        _ = self.stored  # both have the same
        view = copy.copy(self)
        if self.gate.admission is not None:
            self.gate.admission.foretell = replica.foretold_ttft_s
        view._serve(replica, model)
        view.fleet.take_over(self.fleet)
        return view

    def _serve(self, replica: Replica, model: ServedModel) -> None:
        self.replica, self.loaded_model, self._paths = replica, model, set()
        replica.on_progress, replica.on_computed = self._progressed, self._computed
        if model.root:
            self._paths.add(os.path.normpath(model.root))
            with suppress(FileNotFoundError):  # of a folder that is gone
                self._paths.add(os.path.abspath(model.root))
        self.fleet = FleetFeed(replica, model, self.in_flight)
        self.observer.metrics.engine_came(replica, model, self.gate.admission)

    def on_replayed(self, spec: RequestSpec) -> None:
        """Told of each answer from the result cache; without tokens."""
        if self.ledger is not None:
            self.ledger.replayed(spec)

    def _progressed(self, progress: list[RequestProgress], num_queued: int, now: float) -> None:
        self.gate.progressed(progress, num_queued, now)
        if self.fleet.unfinished.answers:
            self.fleet.unfinished.progressed(progress)

    def _computed(self, tenant: str, compute_us: int) -> None:
        if tenant:
            self.authenticator.quotas.computed(tenant, compute_us, self.clock.now())
        if self.fleet.is_on:
            self.fleet.computed(tenant, compute_us)

    @property
    def adapters(self) -> AdapterBook | None:
        """The replica's adapters; None where it has none."""
        return self.replica.adapters

    def adapter(self, name: str | None, caller: Caller) -> AdapterFacts | None:
        """The adapter named `name`; None if there is none, or not for this caller."""
        if name is None or self.adapters is None or not caller.tenant.may_use(name):
            return None
        return self.adapters.named.get(name)

    def adapters_of(self, caller: Caller) -> list[AdapterFacts]:
        """All that the caller may ask for."""
        named = self.adapters.named.values() if self.adapters is not None else ()
        return [facts for facts in named if caller.tenant.may_use(facts.name)]

    @property
    def tensors(self) -> TensorModels | None:
        """The service of tensor models; None where none are served."""
        return self.replica.tensors

    @property
    def model(self) -> ServedModel:
        """Raises Unavailable before there is one."""
        self.check_loaded()
        assert self.loaded_model is not None
        return self.loaded_model

    def check_loaded(self) -> None:
        """Raises Unavailable before the engine is there."""
        if self.loaded_model is None:
            raise Unavailable(LOADING)

    @property
    def ready(self) -> bool:
        return self.in_flight.welcome and self.replica.state().alive

    def is_model(self, name: str) -> bool:
        """Whether `name` is one of the model's own names, or its path."""
        return name in self.model.names or os.path.normpath(name) in self._paths

    def check_model(self, name: str | None, caller: Caller) -> str:
        """`name`, which may be the model's path or an adapter of the caller's, or the canonical one when none was
        given; raises ModelNotFound, for others' adapters as for what is not there.
        """
        if not self.model.names:
            raise ModelNotFound("no language model is served here", param="model")
        if name is None:
            return self.model.names[0]
        if not self.is_model(name) and self.adapter(name, caller) is None:
            choices = told_names([*self.model.names, *(facts.name for facts in self.adapters_of(caller))])
            text = f"the model {shortened(repr(name))} is not served here; choose one of {choices}"
            raise ModelNotFound(text, param="model")
        return name

    def reconfigured(self, scheduler: SchedulerConfig) -> None:
        """Priorities once heeded stay welcome: no client's request becomes an error while the server runs."""
        self.gate.reconfigure(scheduler)
        if self.policy_without_priorities is not None:
            self.policy_without_priorities = _without_priorities(scheduler.policy)

    def close(self) -> None:
        """Give back the threads, send the last traces; the app answers no more."""
        super().close()
        self.text.close()
        self.grammars.close()


def _without_priorities(policy: str) -> str | None:
    """`policy`, if it says of itself that it heeds none."""
    return None if policy_of(SchedulerConfig(policy=policy)).heeds_priority else policy

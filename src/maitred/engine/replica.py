"""Replica: one engine, or several as one, as everything above it sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import NoReturn

import msgspec

from maitred.config import SchedulerConfig
from maitred.core.errors import EngineDead, UnsupportedParameter
from maitred.core.replica import ReplicaState, TierView, WorkerView
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.adapter_book import AdapterBook
from maitred.engine.frames import BlockChanges, Ready
from maitred.engine.live_view import LiveView
from maitred.engine.tensors import TensorModels
from maitred.scheduler.queue_view import QueueView

OnProgress = Callable[[list[RequestProgress], int, float], None]
"""(what came at once, how many requests have no place in the engine, now); on the event loop, so it must not wait."""
OnComputed = Callable[[str, int], None]
"""(tenant, us) of each request that ends, however it does; on the event loop, so it must not wait."""
OnBlocks = Callable[[BlockChanges | None], None]
"""(what changed; None when an engine and all that it cached are gone); on the event loop, so it must not wait."""
LOADING = "the engine is loading; try again"


class Replica:
    """Takes requests and streams their progress. A method that an implementation lacks raises UnsupportedParameter.

    Everything runs on one event loop, but for `begin`, `wait` and `give_up` before there is one, and `stop` after.
    """

    adapters: AdapterBook | None = None
    tensors: TensorModels | None = None
    """The service of tensor models ; None where none are served."""
    on_progress: OnProgress
    """Called with all progress that comes at once, before the streams' readers are woken; an attribute to be set."""
    on_computed: OnComputed

    def submit(self, *samples: RequestSpec) -> Sequence[AsyncIterator[RequestProgress]]:
        """Progress of each sample of one prompt, until the item with a finish_reason. Closing an iterator early aborts
        its sample.

        Raises EngineDead, on the first item, when the replica cannot take it, and ValueError for an id in use.
        """
        self._refuse("requests")

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request and free its blocks within one step; unknown ids are ignored (it may just have ended).

        `reason` is STOP when the text side found a stop string, so that the counters tell the truth. SHED ends only a
        request that is in no step yet.
        """

    def state(self) -> ReplicaState:
        """Counters of all engines so far; gauges of the present ones."""
        self._refuse("a state")

    # -- beginning and end

    def begin(self) -> None:
        """Start the first engine. In the main thread: a process ends with the thread that began it."""

    def wait(self) -> Ready:
        """Returns when the first engine has loaded. Raises what keeps it from loading."""
        self._refuse("an engine that loads")

    def give_up(self) -> None:
        """Make `wait` raise soon; for another thread."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop`, which runs, from now on, with or without requests. Idempotent."""

    async def close(self) -> None:
        """Stop the engines after their current step; unfinished requests end with EngineDead."""

    def stop(self) -> None:
        """The same as `close`, from any thread once the loop has ended; idempotent."""

    # -- sleep

    async def sleep(self, *, abort: bool = False) -> None:
        """End the engines' processes once there is no request, and return when they are gone; the next request starts
        them again. `abort` ends the requests that there are. Raises EngineDead.
        """
        self._refuse("an engine that could sleep")

    async def wake_up(self) -> None:
        """Returns when there is an engine. Raises EngineDead."""
        self._refuse("an engine that could sleep")

    # -- views, which raise EngineDead

    def workers(self) -> tuple[WorkerView, ...]:
        """The engines one by one."""
        return ()

    async def queue_view(self, *, offset: int, limit: int) -> QueueView:
        """Requests that wait, as they stand between two steps."""
        self._refuse("a queue")

    async def live_view(self) -> LiveView:
        """Slots, queue and blocks, as they stand between two steps."""
        self._refuse("slots")

    async def recordings(self) -> list[bytes]:
        """The last requests and steps of each engine, as `traffic.Traffic` encodes them."""
        self._refuse("requests to replay")

    async def kv_tiers(self) -> tuple[TierView, ...]:
        """Tiers of KV that outlives requests; none where nothing does."""
        self._refuse("KV tiers")

    async def clear_kv(self) -> int:
        """Empty the tiers; returns when that is done, with the number of blocks that they held."""
        self._refuse("KV tiers")

    # -- the scheduler

    async def scheduler_config(self) -> SchedulerConfig:
        self._refuse("a scheduler")

    async def policy_names(self) -> tuple[str, ...]:
        self._refuse("a scheduler")

    async def configure(self, config: SchedulerConfig) -> None:
        """Change policy and limits, losing no request; returns when that took effect. Raises ConfigError."""
        self._refuse("a scheduler")

    # -- fleets

    def foretold_ttft_s(self, num_tokens: int) -> float | None:
        """Time to first token (s) of a prompt that came now, where placing requests foretells it."""
        return None

    def choices_of(self, words: str) -> msgspec.Struct | None:
        """Route of one of the last requests, and why, as a `fleet.choices.ChoicesMade`; None for an unknown one."""
        return None

    def tell_router(self, on_blocks: OnBlocks | None) -> None:
        """Measure speed, and tell which blocks can be found by prefix, all that are there first; None tells no more."""

    def expect_kv(self, request: RequestSpec, kv_from: tuple[str, ...]) -> None:
        """The prompt is computed elsewhere now: pull its KV, for the request will go on here. Does not wait."""

    def why_not_resumed(self, *, same_numbers: bool) -> str | None:
        """None where a stream may go on that another server began; `same_numbers` is whether their fingerprints are."""
        return None if same_numbers else "another model, or other numerics, made its first tokens"

    def _refuse(self, thing: str) -> NoReturn:
        raise UnsupportedParameter(f"this server has no {thing} of its own; ask the servers behind it")


class LoadingReplica(Replica):
    """Stands where the engine will be. Not alive, and nothing is wrong with that."""

    def state(self) -> ReplicaState:
        return ReplicaState(alive=False, loading=True)

    def _refuse(self, thing: str) -> NoReturn:
        raise EngineDead(LOADING)

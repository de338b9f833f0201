"""Questions to the engine's thread, answered between two steps: a name, two types, and a function of the core.

To add one: an entry here, and a method of one line in `EngineClient` beside those that ask the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from maitred.config import SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.errors import ConfigError
from maitred.core.replica import TierView
from maitred.core.tensor_request import ModelChange
from maitred.engine.live_view import LiveView, look_at
from maitred.engine.model_facts import AdapterFacts
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.queue_view import QueueView, queue_view

A = TypeVar("A")
R = TypeVar("R")


class Later(NamedTuple, Generic[R]):
    """A result that comes between two later steps: `begin` is given what takes it."""

    begin: Callable[[Callable[[R], None]], None]


class Query(NamedTuple, Generic[A, R]):
    """One question. Argument and result are of types that msgspec encodes."""

    name: str
    argument: type[A]
    result: Any  # the type R; not always one that `type[R]` can write
    answer: Callable[[EngineCore, Clock, A], R | Later[R]]


class Nothing(msgspec.Struct, frozen=True):
    """No argument, or no result."""


class QueuePage(msgspec.Struct, frozen=True):
    offset: int
    limit: int


class AdapterFolder(msgspec.Struct, frozen=True):
    """A LoRA adapter's folder, under the name that requests give."""

    name: str
    path: str
    inside: str | None  # the folder that its files must not lead out of


class Wanted(msgspec.Struct, frozen=True):
    is_wanted: bool


def _queue_view(core: EngineCore, clock: Clock, page: QueuePage) -> QueueView:
    return queue_view(core.scheduler, clock.now(), offset=page.offset, limit=page.limit)


def _configure(core: EngineCore, clock: Clock, config: SchedulerConfig) -> Nothing:
    core.configure(config)
    return Nothing()


def _tell_router(core: EngineCore, clock: Clock, wanted: Wanted) -> Nothing:
    core.tell_router(wanted.is_wanted)
    return Nothing()


def _kv_tiers(core: EngineCore, clock: Clock, nothing: Nothing) -> tuple[TierView, ...]:
    return tuple(sorted(core.tier_views(), key=lambda view: view.name == "peer"))


def _clear_kv(core: EngineCore, clock: Clock, nothing: Nothing) -> Later[int]:
    return Later(core.clear_tiers)


def _no_models(core: EngineCore, clock: Clock, change: ModelChange) -> Nothing:
    raise ConfigError("this engine has no tensor models")


def _no_adapters(core: EngineCore, clock: Clock, folder: AdapterFolder) -> AdapterFacts:
    raise ConfigError("this engine has no adapters; they need the native executor")


INTRODUCE_ADAPTER: Query[AdapterFolder, AdapterFacts] = Query(
    "introduce_adapter", AdapterFolder, AdapterFacts, _no_adapters
)
"""Where there are adapters the loop itself answers, when the folder was read."""
CHANGE_MODEL: Query[ModelChange, Nothing] = Query("change_model", ModelChange, Nothing, _no_models)
"""Where there are tensor models `engine.loop.TensorSide` answers, when the model was loaded or unloaded."""
QUEUE_VIEW: Query[QueuePage, QueueView] = Query("queue_view", QueuePage, QueueView, _queue_view)
LIVE_VIEW: Query[Nothing, LiveView] = Query(
    "live_view", Nothing, LiveView, lambda core, clock, nothing: look_at(core, clock)
)
SCHEDULER_CONFIG: Query[Nothing, SchedulerConfig] = Query(
    "scheduler_config", Nothing, SchedulerConfig, lambda core, clock, nothing: core.scheduler.config
)
POLICY_NAMES: Query[Nothing, tuple[str, ...]] = Query(
    "policy_names", Nothing, tuple[str, ...], lambda core, clock, nothing: core.scheduler.policy_names
)
CONFIGURE: Query[SchedulerConfig, Nothing] = Query("configure", SchedulerConfig, Nothing, _configure)
KV_TIERS: Query[Nothing, tuple[TierView, ...]] = Query("kv_tiers", Nothing, tuple[TierView, ...], _kv_tiers)
CLEAR_KV: Query[Nothing, int] = Query("clear_kv", Nothing, int, _clear_kv)
RECORDING: Query[Nothing, bytes] = Query("recording", Nothing, bytes, lambda core, clock, nothing: core.recording())
TELL_ROUTER: Query[Wanted, Nothing] = Query("tell_router", Wanted, Nothing, _tell_router)

QUERIES: Mapping[str, Query[Any, Any]] = {
    call.name: call
    for call in (
        QUEUE_VIEW,
        LIVE_VIEW,
        SCHEDULER_CONFIG,
        POLICY_NAMES,
        CONFIGURE,
        TELL_ROUTER,
        KV_TIERS,
        CLEAR_KV,
        RECORDING,
        INTRODUCE_ADAPTER,
        CHANGE_MODEL,
    )
}

"""An engine in this process, stepped by a thread of its own, as the edge takes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from maitred.clock import WallClock
from maitred.config import EngineConfig
from maitred.engine.async_engine import AsyncEngine
from maitred.engine.build import OnEvent, build_parts
from maitred.engine.local_replica import Engine
from maitred.engine.progress_streams import admission_of
from maitred.errors import CheckpointError
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.request import Request


def build_engine(
    config: EngineConfig,
    *,
    served_model_names: Sequence[str] = (),
    on_event: OnEvent | None = None,
    on_admitted: Callable[[Request], None] | None = None,
    policies: Mapping[str, PolicyFactory] = POLICIES,
    step_timeout_s: float = math.inf,
) -> Engine:
    """Load everything and start the engine's thread; `on_event` gets a line per phase, the memory plan among them.

    `on_admitted` is told of every request, in the engine's thread: `Ledger.opened` is one such. `policies` is what
    `config.scheduler.policy` may name, now and when it is changed. A step over `step_timeout_s` is told as the engine's
    end while it lasts. Raises as `build_parts` does.
    """
    clock = WallClock()
    parts = build_parts(
        config, served_model_names=served_model_names, on_event=on_event, clock=clock, policies=policies
    )
    try:
        parts.model.text.read()
    except CheckpointError:
        parts.close()
        raise
    admission = admission_of(config)
    replica = AsyncEngine(
        parts.core,
        clock,
        on_close=parts.close,
        on_admitted=on_admitted,
        admission=admission,
        step_timeout_s=step_timeout_s,
    )
    return Engine(replica, parts.model, parts.memory_plan, admission, start_phases=parts.start_phases)


class StartingHere:
    """An engine that `wait` loads, in the thread that calls it; giving up takes as long as the loading."""

    def __init__(self, build: Callable[[], Engine]) -> None:
        self._build = build
        self._engine: Engine | None = None  # once it has loaded

    def wait(self) -> Engine:
        self._engine = self._build()
        return self._engine

    def give_up(self) -> None:
        """Nothing can be done from here."""

    def stop(self) -> None:
        """End the engine, once nobody waits; idempotent."""
        if self._engine is not None:
            self._engine.replica.stop()

"""An engine on its way, in a process or a thread, and what its owner holds once it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from maitred.clock import Clock, WallClock
from maitred.engine.client import EngineClient
from maitred.engine.frames import Ready
from maitred.engine.intake import ServedModel
from maitred.engine.live_requests import LiveRequest
from maitred.engine.memory import MemoryPlan
from maitred.engine.served_model import TextAhead, served_model, warning_of
from maitred.engine.supervisor import Start
from maitred.errors import MaitredError
from maitred.gate.admission import AdmissionController, admission_of
from maitred.replica import Replica


class OwnReplica(Replica, Protocol):
    """A replica of this server's own, from its start to its end: an engine, or several as one."""

    def begin(self) -> None:
        """Start the first engine. In the main thread."""

    def wait(self) -> Ready:
        """Returns when it has loaded. Raises what keeps it from loading."""

    def give_up(self) -> None:
        """From another thread: `wait` raises soon."""

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop` from now on."""

    async def close(self) -> None: ...

    def stop(self) -> None:
        """The same from any thread once the loop has ended; idempotent."""


class MakeReplica(Protocol):
    """Of what it is started with."""

    def __call__(
        self,
        start: Start,
        clock: Clock,
        *,
        on_admitted: Callable[[LiveRequest], None] | None = ...,
        on_event: Callable[[str], None] = ...,
    ) -> OwnReplica: ...


@dataclass(slots=True)
class Engine:
    """A running engine and what a server must know of it."""

    replica: OwnReplica
    model: ServedModel
    memory_plan: MemoryPlan
    admission: AdmissionController
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of its start, in order; with a process of its own, those inside it."""


@runtime_checkable
class Foretells(Protocol):
    """A replica that foretells first tokens where it places requests: who is admitted is judged by the same."""

    def foretold_ttft_s(self, num_tokens: int) -> float | None:
        """(s) of a prompt that came now; None where it cannot."""


class StartingEngine:
    """It begins when this is made; meanwhile its model's text is read here.

    Make it in the main thread: a process ends with the thread that began it.
    """

    def __init__(
        self,
        start: Start,
        *,
        clock: Clock | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        on_admitted: Callable[[LiveRequest], None] | None = None,
        make: MakeReplica = EngineClient,
    ) -> None:
        """`on_event` gets a line per phase, `on_admitted` every request, on the event loop."""
        clock, self._tell = clock or WallClock(), on_event
        config, num_engines = start.config, len(start.process.roles)
        self._admission = admission_of(config.admission, config.scheduler, num_engines)
        self._replica = make(start, clock, on_admitted=on_admitted, on_event=on_event)
        if isinstance(self._replica, Foretells):
            self._admission.foretell = self._replica.foretold_ttft_s
        self._replica.begin()
        self._text = TextAhead(start.config.model.model)

    def wait(self) -> Engine:
        """Raises CheckpointError, ConfigError or OutOfMemory as the engine does, EngineDead when it ended without a
        word.
        """
        ready = self._replica.wait()
        model = served_model(ready.facts, self._text.tokenizer)
        try:
            if model.names:
                model.text.read()
                if warning := warning_of(model):
                    self._tell(f"text    {warning}")
        except MaitredError:
            self._replica.stop()
            raise
        return Engine(self._replica, model, ready.memory_plan, self._admission, start_phases=ready.start_phases)

    def give_up(self) -> None:
        """From any thread: `wait` raises soon, and the engine ends."""
        self._replica.give_up()

    def stop(self) -> None:
        """End the engine, once nobody waits; idempotent."""
        self._replica.stop()

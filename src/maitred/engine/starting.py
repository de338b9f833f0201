"""An engine on its way, in a process or a thread, and what its owner holds once it is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from maitred.core.clock import Clock, WallClock
from maitred.core.errors import MaitredError
from maitred.engine.client import EngineClient
from maitred.engine.intake import ServedModel
from maitred.engine.live_requests import LiveRequest
from maitred.engine.memory import MemoryPlan
from maitred.engine.replica import Replica
from maitred.engine.supervisor import Start
from maitred.gate.admission import AdmissionController, admission_of
from maitred.model.checkpoint import local_path
from maitred.model.packaged import default_model
from maitred.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Engine:
    """A running engine and what a server must know of it."""

    replica: Replica
    model: ServedModel
    memory_plan: MemoryPlan
    admission: AdmissionController
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of its start, in order; with a process of its own, those inside it."""


class StartingEngine:
    """An engine that begins when this is made; meanwhile its model's text is read here.

    Make it in the main thread: a process ends with the thread that began it.
    """

    def __init__(
        self,
        start: Start,
        *,
        clock: Clock | None = None,
        on_event: Callable[[str], None] = lambda line: None,
        on_admitted: Callable[[LiveRequest], None] | None = None,
        make: Callable[..., Replica] = EngineClient,
    ) -> None:
        """`on_event` gets a line per phase, `on_admitted` every request, on the event loop."""
        clock, self._tell = clock or WallClock(), on_event
        config, num_engines = start.config, len(start.process.roles)
        self._admission = admission_of(config.admission, config.scheduler, num_engines)
        self._replica = make(start, clock, on_admitted=on_admitted, on_event=on_event)
        self._admission.foretell = self._replica.foretold_ttft_s
        self._replica.begin()
        self._text = TextAhead(start.config.model.model)

    def wait(self) -> Engine:
        """Raises CheckpointError, ConfigError or OutOfMemory as the engine does, EngineDead when it ended without a
        word.
        """
        ready = self._replica.wait()
        model = ServedModel.of(ready.facts, self._text.tokenizer)
        try:
            if model.names:
                model.text.read()
                if warning := model.warning:
                    self._tell(f"text    {warning}")
        except MaitredError:
            self._replica.stop()
            raise
        return Engine(self._replica, model, ready.memory_plan, self._admission, start_phases=ready.start_phases)

    async def checked(self, engine: Engine) -> None:
        """Look at the engine before its first request, on the event loop that it lives on. Raises what is wrong."""

    def give_up(self) -> None:
        """Make `wait` raise soon, and end the engine; for any thread."""
        self._replica.give_up()

    def stop(self) -> None:
        """End the engine, once no call of `wait` is under way; idempotent."""
        self._replica.stop()


class TextAhead:
    """Reads the tokenizer in a thread of its own while the engine's process loads the weights."""

    def __init__(self, model: str | None) -> None:
        """`model` as in ModelConfig; a hub id is not read ahead, for it may have to be downloaded first."""
        self._model = model
        self._place: Path | None = None
        self._tokenizer: Tokenizer | None = None
        self._thread = threading.Thread(target=self._read, name="maitred-text", daemon=True)
        self._thread.start()

    def tokenizer(self, folder: Path) -> Tokenizer:
        """Tokenizer of this folder or GGUF file, read ahead or now."""
        self._thread.join()
        if self._tokenizer is None or folder != self._place:
            return Tokenizer.from_folder(folder)
        return self._tokenizer

    def _read(self) -> None:
        with suppress(MaitredError, OSError):  # told by the code that needs it
            self._place = local_path(self._model or default_model())
            if self._place is not None:
                self._tokenizer = Tokenizer.from_folder(self._place)

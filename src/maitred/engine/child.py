"""The engine's own process: `python -m maitred.engine.child FOLDER`. Loads, steps, and listens between two steps.

One thread owns the engine and both of its sockets; another beats, so that a long step is not taken for a dead process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import zmq

from maitred.clock import Clock, WallClock
from maitred.config import EngineConfig
from maitred.engine.core import EngineCore
from maitred.engine.frames import (
    Abort,
    Answer,
    Ask,
    Beat,
    Begin,
    Command,
    Died,
    Failed,
    Figures,
    Hello,
    Mark,
    Ready,
    Refused,
    Report,
    Shed,
    Stepped,
    Stop,
    Submit,
    Told,
    decode_command,
    encode,
    mark_of,
    request_of,
)
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.engine.queries import QUERIES
from maitred.engine.sockets import COMMANDS, REPORTS, Receiver, Sender, address_of
from maitred.engine.spawn import HIGH_WATER_MARK, LogLine
from maitred.engine.timeline import process_age_s
from maitred.errors import MaitredError
from maitred.kvcache.prefix_cache import TokenHasher
from maitred.request import FinishReason, Request
from maitred.step import RequestProgress

logger = logging.getLogger(__name__)
BEAT_S = 0.25
FIGURES_S = 0.1  # at most so often while there is work
LAST_WORDS_MS = 2000
OUT_OF_MEMORY = "out of memory; give less with --kv-cache-memory-bytes, --max-num-seqs or --max-model-len"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """What a builder makes: an engine, and what the parent must know of it."""

    core: EngineCore
    facts: ModelFacts
    memory_plan: MemoryPlan
    deterministic: bool
    close: Callable[[], None]
    start_phases: Mapping[str, float] = field(default_factory=dict)


Builder = Callable[[EngineConfig, tuple[str, ...], Callable[[str], None]], LoadedEngine]
"""(config, served model names, told a line per phase); raises MaitredError when it cannot be."""


class EngineServer:
    """The engine behind its sockets. `run` returns when it was told to stop."""

    def __init__(self, loaded: LoadedEngine, link: Link, clock: Clock) -> None:
        self._core, self._link, self._clock = loaded.core, link, clock
        self._block_size = loaded.facts.block_size
        self._hasher = TokenHasher(loaded.facts.block_size, loaded.facts.revision)
        self._requests: dict[str, Request] = {}  # until their last progress
        self._unmarked: set[str] = set()  # those of whom the parent has no mark
        self._ended: list[RequestProgress] = []  # between two steps
        self._told = Figures()
        self._told_at = -FIGURES_S
        self._stopping = False

    def run(self) -> None:
        core, link = self._core, self._link
        while not self._stopping:
            if not core.has_work:
                self._tell([])  # the figures of an idle engine, before it falls silent
            for command in link.commands(wait=not core.has_work):
                self._obey(command)
            progress, self._ended = self._ended, []
            if core.has_work and not self._stopping:
                progress += core.step()
            if progress or core.has_work:
                self._tell(progress)
            link.round_number += 1

    def _obey(self, command: Command) -> None:
        match command:
            case Submit():
                self._add(request_of(command))
            case Abort(request_id, reason):
                self._note_end(self._core.finish(request_id, reason))
            case Shed(request_id):
                self._note_end(self._core.shed(request_id))
            case Ask():
                self._answer(command)
            case Stop():
                self._stopping = True
            case Begin():
                logger.warning("this engine has begun already")

    def _add(self, request: Request) -> None:
        if request.output_token_ids:  # resumed: it comes as one that was preempted, with the hashes of its output too
            request.block_hashes.extend(self._hasher(request, request.num_tokens // self._block_size))
        try:
            self._core.add(request)
        except MaitredError as error:  # cannot ever fit: this request's fault, not the engine's
            self._ended.append(RequestProgress(request.request_id, finish_reason=FinishReason.ERROR, error=str(error)))
            return
        self._requests[request.request_id] = request
        self._unmarked.add(request.request_id)

    def _note_end(self, ended: RequestProgress | None) -> None:
        if ended is not None:
            self._ended.append(ended)

    def _answer(self, ask: Ask) -> None:
        try:
            call = QUERIES[ask.call]
            result = call.answer(self._core, self._clock, msgspec.msgpack.decode(ask.argument, type=call.argument))
            self._link.send(Answer(ask.number, msgspec.Raw(encode(result))))
        except (MaitredError, KeyError, msgspec.DecodeError) as error:
            self._link.send(Refused(ask.number, type(error).__name__, str(error)))

    def _tell(self, progress: list[RequestProgress]) -> None:
        now = self._clock.now()
        figures = None
        if now - self._told_at >= FIGURES_S or not self._core.has_work:
            figures, self._told_at = self._figures(), now
            if figures == self._told and not progress:
                return
            self._told = figures
        if progress or figures is not None:
            self._link.send(Stepped(progress, self._core.num_queued, list(self._marks(progress)), figures))

    def _marks(self, progress: list[RequestProgress]) -> Iterator[Mark]:
        """Of requests that appear for the first time, and for the last."""
        for item in progress:
            request_id = item.request_id
            if item.finish_reason is not None:
                request = self._requests.pop(request_id, None)
                self._unmarked.discard(request_id)
                if request is not None:
                    yield mark_of(request)
            elif request_id in self._unmarked:
                self._unmarked.discard(request_id)
                yield mark_of(self._requests[request_id])

    def _figures(self) -> Figures:
        core, stats = self._core, self._core.stats
        named = {name: getattr(stats, name) for name in Figures.__struct_fields__ if name.startswith("num_")}
        return Figures(**named, execute_s=core.execute_s, host_s=core.host_s)


class Link:
    """The child's end of the two sockets."""

    def __init__(self, folder: Path) -> None:
        self._reporting = zmq.Context(io_threads=1)
        self._folder = folder
        self._commands = Receiver(
            zmq.Context(io_threads=1),
            address_of(folder, COMMANDS),
            decode_command,
            sender="the server",
            num_connections=1,
            high_water_mark=0,
        )
        self._reports = self._sender()
        self.round_number = 0
        self._busy = False  # read by the beating thread
        self._beating: threading.Thread | None = None
        self._closing = threading.Event()

    def commands(self, *, wait: bool) -> Iterator[Command]:
        """What has come; with `wait`, at least one."""
        self._busy = not wait
        if wait:
            self._commands.wait()
            self._busy = True
        return self._commands.receive()

    def send(self, report: Report) -> None:
        """Raises RequestTooLarge."""
        self._reports.send(report)

    def beat(self) -> None:
        """From now on a thread says four times a second that the process is there."""
        self._beating = threading.Thread(target=self._beat, name="maitred-beat", daemon=True)
        self._beating.start()

    def rest(self) -> None:
        """No step is under way."""
        self._busy = False

    def close(self) -> None:
        """Returns when what was sent has left, or after LAST_WORDS_MS. What is received ends with the process: closed
        before, it would look to the parent as if we had cut it off.
        """
        self._closing.set()
        if self._beating is not None:
            self._beating.join(LAST_WORDS_MS / 1000)
            if self._beating.is_alive():  # it waits for a parent that does not read
                return
        self._reports.close()
        self._reporting.term()

    def _sender(self) -> Sender:
        sender = Sender(self._reporting, linger_ms=LAST_WORDS_MS, high_water_mark=HIGH_WATER_MARK)
        sender.connect(address_of(self._folder, REPORTS))
        return sender

    def _beat(self) -> None:
        sender = self._sender()  # sockets are for one thread each
        while not self._closing.is_set():
            self._commands.look()
            sender.send(Beat(self.round_number, self._busy, self._commands.num_wrong))
            if sender.was_cut_off() or self._reports.was_cut_off():
                _end_unheard()
            self._closing.wait(BEAT_S)
        sender.close()


def _end_unheard() -> None:
    """The parent hears nothing any more, or is gone. If it is there, it reads why, and begins another engine."""
    with suppress(OSError):
        os.write(2, b"the server had closed its connection\n")
    os._exit(1)


def main(arguments: Sequence[str], build: Builder, prepare: Callable[[], None] = lambda: None) -> int:
    """The exit code: 0 when told to stop. `prepare` is called while the parent says what to build."""
    gc.disable()  # nothing that loading makes is garbage, and looking for some takes a tenth of the time
    _die_with_the_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # who stops the group stops the parent, and it stops us
        signal.signal(number, signal.SIG_IGN)
    link = Link(Path(arguments[0]))
    link.send(Hello(os.getpid()))
    prepare()
    begin = next(command for command in link.commands(wait=True) if isinstance(command, Begin))
    _log_to_parent(begin.log_level)
    link.beat()
    age_s = process_age_s()
    loaded = _load(begin, link, build)
    if loaded is None:
        link.close()
        return 1
    phases = {"engine_process": age_s, **loaded.start_phases}
    link.send(Ready(loaded.facts, loaded.memory_plan, loaded.deterministic, phases))
    try:
        EngineServer(loaded, link, WallClock()).run()
    except Exception as error:
        logger.debug("where the engine stopped", exc_info=error)
        link.send(Died(f"{type(error).__name__}: {error}"))
        return 1
    finally:
        link.rest()
        loaded.close()
        link.close()
    return 0


def _load(begin: Begin, link: Link, build: Builder) -> LoadedEngine | None:
    """None when the parent was told why it cannot be."""
    try:
        loaded = build(begin.config, begin.served_model_names, lambda line: link.send(Told(line)))
    except MaitredError as error:
        link.send(Failed(type(error).__name__, str(error)))
        return None
    except MemoryError:
        link.send(Failed("OutOfMemory", OUT_OF_MEMORY))
        return None
    except Exception as error:
        logger.debug("where loading failed", exc_info=error)
        link.send(Failed("", f"unexpected {type(error).__name__}: {error}"))
        return None
    gc.freeze()  # what was loaded stays for good: no collection need walk it between two steps
    gc.enable()
    return loaded


def _die_with_the_parent() -> None:
    """By the kernel on Linux, which needs no thread of ours; everywhere, when standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def wait_for_the_end() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_the_end, name="maitred-parent", daemon=True).start()


class _ParentHandler(logging.Handler):
    """Log records as lines that the parent knows and logs in its own format."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        line = LogLine((record.levelno, record.name, message))
        sys.stderr.buffer.write(msgspec.json.encode(line) + b"\n")
        sys.stderr.buffer.flush()


def _log_to_parent(level: int) -> None:
    logging.basicConfig(level=level, handlers=[_ParentHandler()], force=True)


def import_engine() -> None:
    """What `build_from_config` will need."""
    for name in ("maitred.engine.build", "maitred.engine.installed"):
        importlib.import_module(name)
    with suppress(ImportError):  # the library was not built; the engine says so, if it is needed
        importlib.import_module("maitred.executor.native_plan")


def build_from_config(
    config: EngineConfig, served_model_names: tuple[str, ...], tell: Callable[[str], None]
) -> LoadedEngine:
    """The engine that `config` describes, as in one process."""
    from maitred.engine.build import build_parts  # noqa: PLC0415  (the parent's imports must not come here)
    from maitred.engine.installed import installed_policies  # noqa: PLC0415

    if config.model.bind_threads == "auto":  # nothing else runs here that would be bound with them
        config = replace(config, model=replace(config.model, bind_threads="on"))
    parts = build_parts(config, served_model_names=served_model_names, on_event=tell, policies=installed_policies())
    return LoadedEngine(
        core=parts.core,
        facts=parts.facts,
        memory_plan=parts.memory_plan,
        deterministic=parts.deterministic,
        close=parts.close,
        start_phases=parts.start_phases,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_from_config, import_engine))

"""The engine's own process, `python -m maitred.engine.child FOLDER`: `run_engine` over two sockets.

One thread owns the engine and both of its sockets; another beats, so that a long step is not taken for a dead process.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from maitred.config import EngineConfig
from maitred.engine.child_process import COMMANDS, HIGH_WATER_MARK, REPORTS, LogLine, Receiver, Sender, address_of
from maitred.engine.frames import Beat, Begin, Command, Hello, Report, decode_command
from maitred.engine.loop import Builder, LoadedEngine, run_engine
from maitred.engine.timeline import process_age_s
from maitred.executor.parent import end_with_parent

logger = logging.getLogger(__name__)
BEAT_S = 0.25
LAST_WORDS_MS = 2000
SIGNAL_S = 1.0  # that we sent to ourselves may take to come; one that we ignore does not


class SocketLink:
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
        self._woken, self._bell = os.pipe()
        os.set_blocking(self._bell, False)
        self.round_number = 0
        self._busy = False  # read by the beating thread
        self._beating: threading.Thread | None = None
        self._closing = threading.Event()

    def commands(self, *, wait: bool, at_most_s: float | None = None, beside: bool = False) -> Iterator[Command]:
        """Commands that have come; with `wait`, at least one, unless `wake` was called or so many seconds went by."""
        self._busy = beside or not wait
        if wait:
            self._commands.wait_or(self._woken, at_most_s)
            self._busy = True
        return self._commands.receive()

    def wake(self) -> None:
        """End the wait for commands, the present one or the next; callable from any thread."""
        with suppress(
            BlockingIOError
        ):  # full, so it will be heard; an engine that is busy for long reads nothing of it
            os.write(self._bell, b"\0")

    def send(self, report: Report) -> None:
        """Raises RequestTooLarge."""
        self._reports.send(report)

    def beat(self) -> None:
        """Start a thread that says four times a second that the process is there."""
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
    end_with_parent(0)
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal to the group stops the parent, and the parent stops us
        signal.signal(number, signal.SIG_IGN)
    link = SocketLink(Path(arguments[0]))
    link.send(Hello(os.getpid()))
    prepare()
    begin = next(command for command in link.commands(wait=True) if isinstance(command, Begin))
    _log_to_parent(begin.log_level)
    link.beat()
    age_s = process_age_s()

    def build_here(*words: Any) -> LoadedEngine:
        loaded = build(*words)
        return replace(loaded, start_phases={"engine_process": age_s, **loaded.start_phases})

    try:
        return run_engine(begin, link, build_here, _spare_the_collector)
    finally:
        link.close()


def _spare_the_collector() -> None:
    gc.freeze()  # what was loaded stays for good: no collection need walk it between two steps
    gc.enable()


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
    """Import the modules that `build_from_config` will need."""
    for name in ("maitred.engine.build", "maitred.engine.installed"):
        importlib.import_module(name)
    with suppress(ImportError):  # the library was not built; the engine says so, if it is needed
        importlib.import_module("maitred.executor.native_plan")


def build_from_config(
    config: EngineConfig, served_model_names: tuple[str, ...], tell: Callable[[str], None], wake: Callable[[], None]
) -> LoadedEngine:
    """The engine that `config` describes, as in one process."""
    from maitred.engine.build import load_engine  # noqa: PLC0415  (the parent's imports must not come here)

    # nothing else runs here that would be bound with them, as tensor models would be; engines that share processors
    # would be bound to the same
    is_alone = config.share.num_engines == 1 and not config.tensors.serves
    if config.model.bind_threads == "auto" and is_alone:
        config = replace(config, model=replace(config.model, bind_threads="on"))
    return load_engine(config, served_model_names, tell, wake, on_lost=end_alike)


def end_alike(why: str, returncode: int) -> None:
    """End this process as a process that computed with it ended: no step can go on without that one, and the parent,
    which reads `why`, judges our end as it would that one's.
    """
    with suppress(OSError):
        os.write(2, f"{why}\n".encode())
    if returncode < 0:
        os.kill(os.getpid(), -returncode)
        time.sleep(SIGNAL_S)
    os._exit(returncode if returncode > 0 else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], build_from_config, import_engine))

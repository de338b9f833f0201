"""Launches replicas on this machine: `maitred serve` as child processes, started again when they die."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from maitred.core.clock import Clock, WallClock
from maitred.engine.restarts import BackOff, cause_of_death, is_own_fault

MAX_LINE_BYTES = 64 * 1024
TOKEN_VARIABLE = "MAITRED_FLEET_TOKEN"  # gives it the fleet's token; no other process sees its environment


class Listening(msgspec.Struct, frozen=True, tag=True):
    """Clients may come; until the engine has loaded they are told so."""

    url: str
    pid: int


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """Requests are welcome; what the start took, in seconds by phase."""

    start_phases: Mapping[str, float]
    memory_bytes: int = 0  # weights and KV; 0 is not known


Announcement = Listening | Loaded
_decode = msgspec.json.Decoder(Announcement).decode
_encode = msgspec.json.Encoder().encode


def announce(fd: int, news: Announcement) -> None:
    """A launcher that is gone needs no news."""
    with suppress(OSError):
        os.write(fd, _encode(news) + b"\n")


class AnnouncementReader:
    """Announcements out of pieces of a stream."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Announcement]:
        """Announcements that are whole now. Raises ValueError for what is none."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of more than {MAX_LINE_BYTES} bytes")
        try:
            return [_decode(line) for line in lines]
        except msgspec.DecodeError as error:
            raise ValueError(f"no announcement: {error}") from None


MAX_RESTART_DELAY_S = 8.0  # so that one that can start is there within ten seconds


@dataclass(slots=True, eq=False)
class Supervised:
    """Supervision state of one replica, on the launcher's event loop."""

    clock: Clock
    backoff: BackOff = field(default_factory=lambda: BackOff(sys.maxsize, max_delay_s=MAX_RESTART_DELAY_S))
    ready_at: float | None = None  # s; None while it starts
    is_stopping: bool = False
    _timer: asyncio.TimerHandle | None = None

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Schedule an action in place of the one scheduled before."""
        self.cancel()
        self._timer = asyncio.get_running_loop().call_later(delay_s, action)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def died(self, begin: Callable[[], None], *, own_fault: bool) -> float:
        """The process ended of itself: call `begin` after the delay returned (s), longer with each death in a row."""
        lived_s = self.clock.now() - self.ready_at if self.ready_at is not None else 0.0
        delay_s = self.backoff.died(lived_s, own_fault=own_fault)
        assert delay_s is not None, "replicas are not given up"
        self.later(delay_s, begin)
        return delay_s


SERVE = (sys.executable, "-P", "-m", "maitred", "serve")
NOT_HANDED_ON = ("MAITRED_API_KEY",)  # clients' keys are the router's affair: replicas believe its token
SILENT_START_S = 60.0  # without a word about where it listens, a server is killed
STOP_S = 45.0  # after SIGTERM; `serve` drains for 30 s unless told otherwise
LAST_LINE_S = 0.5  # a grandchild could hold the output open for ever
_NEWS = re.compile(r'\d\d:\d\d:\d\d\.\d+ (INFO|DEBUG) |\{"time":"[^"]*","level":"(info|debug)"')  # as `logs` writes it
FAILURE, USAGE = 1, 2  # exit codes of the command line for what another try will not mend


@dataclass(frozen=True, slots=True)
class Listens:
    """The replica has an address; its model is still loading."""

    name: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class IsReady:
    """Requests are welcome, `start_s` after its process began."""

    name: str
    start_s: float
    start_phases: Mapping[str, float]
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Exited:
    """The replica's process is gone. `again_in_s` tells when the next one starts; None is never: it was told to `stop`
    (`as_told`), or it cannot start with these flags.
    """

    name: str
    cause: str
    as_told: bool
    again_in_s: float | None


LaunchEvent = Listens | IsReady | Exited


class Launcher(Protocol):
    """Starts replicas: here, or on the nodes of a cluster. Names are the caller's; every call returns at
    once, and what becomes of it is told by events, on the event loop.
    """

    def start(self, name: str) -> None: ...

    def stop(self, name: str) -> None:
        """Let it finish what it has, then end it. Unknown names are ignored."""

    def restart(self, name: str) -> None:
        """End it at once and start it again: for one that hangs."""

    def pid(self, name: str) -> int | None:
        """Pid of the replica's process, where it has one on this machine."""

    async def close(self) -> None:
        """Stop all, and return when they are gone."""

    def end(self) -> None:
        """The same without a loop, when there is no more to hear of them; idempotent."""


@dataclass(slots=True, eq=False)
class _Replica:
    """One name, and its present process."""

    name: str
    life: Supervised
    words: Sequence[str] = ()  # its own, after the launcher's
    kind: int = 0  # of the launcher's words
    process: subprocess.Popen[bytes] | None = None
    news: socket.socket | None = None  # our end; when it closes, the server ends
    reader: AnnouncementReader = field(default_factory=AnnouncementReader)
    began_at: float = 0.0
    killed_for: str | None = None  # why we did
    last_words: str | None = None


class LocalLauncher:
    """Launcher of processes on this machine. Everything runs on one event loop, in the main thread: the system ends
    replicas with the thread that began them, also when that is killed.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        token: str,
        on_event: Callable[[LaunchEvent], None],
        write_line: Callable[[str], None] | None = None,
        command: Sequence[str] = SERVE,
        host: str = "127.0.0.1",
        clock: Clock | None = None,
        stop_s: float = STOP_S,
        kinds: Sequence[Sequence[str]] = ((),),
        named: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        """`words` are for `maitred serve`: model and flags, but for address and port. `token` is the fleet's secret.
        `write_line` gets what replicas write, from threads. `kinds` are more words, each for one replica,
        and `named` those of each name; where there are such, one that ends before it is ready is not started again.
        """
        self._command = [*command, *words, "--host", host, "--port", "0"]
        self._kinds, self._named = kinds, named
        self._token, self._on_event, self._stop_s = token, on_event, stop_s
        self._write_line = write_line or write_to_stderr
        self._clock = clock or WallClock()
        self._replicas: dict[str, _Replica] = {}
        self._any_was_ready = False
        self._gone = asyncio.Event()

    def start(self, name: str) -> None:
        """Raises ValueError for a name that is taken."""
        if name in self._replicas:
            raise ValueError(f"replica {name!r} is there already")
        running = [replica.kind for replica in self._replicas.values()]
        kind = min(range(len(self._kinds)), key=running.count)  # beside an old one that drains, the first again
        words = self._kinds[kind] if self._named is None else self._named[name]
        self._replicas[name] = replica = _Replica(name, Supervised(self._clock), words, kind)
        self._begin(replica)

    def stop(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is None or replica.life.is_stopping:
            return
        replica.life.is_stopping = True
        if replica.process is None:  # it had died, and waits to be started again
            self._forget(replica, "stopped before it was started again")
            return
        _tell_to_end(replica.process)
        words = f"it had not ended after {self._stop_s:g} s"
        replica.life.later(self._stop_s, lambda: self._kill(replica, words))

    def restart(self, name: str) -> None:
        replica = self._replicas.get(name)
        if replica is not None and not replica.life.is_stopping:
            self._kill(replica, "it is started anew")

    def pid(self, name: str) -> int | None:
        replica = self._replicas.get(name)
        return replica.process.pid if replica is not None and replica.process is not None else None

    async def close(self) -> None:
        for name in list(self._replicas):
            self.stop(name)
        while self._replicas:
            self._gone.clear()
            await self._gone.wait()

    def end(self) -> None:
        running = [replica.process for replica in self._replicas.values() if replica.process is not None]
        for replica in self._replicas.values():
            replica.life.cancel()
        self._replicas.clear()
        for process in running:
            _tell_to_end(process)
        deadline = self._clock.now() + self._stop_s
        for process in running:
            try:
                process.wait(max(0.0, deadline - self._clock.now()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # -- a process

    def _begin(self, replica: _Replica) -> None:
        replica.reader, replica.life.ready_at = AnnouncementReader(), None
        replica.killed_for = replica.last_words = None
        replica.began_at = self._clock.now()
        try:
            self._spawn(replica)
        except OSError as error:  # no memory or descriptor for it: another try may find some
            self._lost(replica, f"cannot be started: {error}", own_fault=True, is_hopeless=False)

    def _spawn(self, replica: _Replica) -> None:
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = subprocess.Popen(
                    [*self._command, *replica.words, "--announce-fd", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=self._environment(),
                    start_new_session=True,  # Ctrl-C is for the router, which drains and then stops them
                )
        except BaseException:
            ours.close()
            raise
        ours.setblocking(False)
        replica.process, replica.news = process, ours
        loop = asyncio.get_running_loop()
        loop.add_reader(ours, self._hear, replica, ours)
        threading.Thread(
            target=self._follow, args=(replica, process, loop), name=f"maitred-{replica.name}", daemon=True
        ).start()
        words = f"it did not say where it listens within {SILENT_START_S:g} s"
        replica.life.later(SILENT_START_S, lambda: self._kill(replica, words))

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name not in NOT_HANDED_ON}
        return kept | {TOKEN_VARIABLE: self._token, "PYTHONUNBUFFERED": "1"}

    def _kill(self, replica: _Replica, why: str) -> None:
        if replica.process is not None:
            replica.killed_for = why
            replica.process.kill()

    # -- what it says

    def _hear(self, replica: _Replica, news: socket.socket) -> None:
        try:
            piece = news.recv(MAX_LINE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        if not piece:
            asyncio.get_running_loop().remove_reader(news)
            return
        try:
            for announcement in replica.reader.feed(piece):
                self._announced(replica, announcement)
        except ValueError as error:
            self._kill(replica, f"what it announced is {error}")

    def _announced(self, replica: _Replica, announcement: Announcement) -> None:
        match announcement:
            case Listening(url, pid):
                if not replica.life.is_stopping:
                    replica.life.cancel()
                self._on_event(Listens(replica.name, url, pid))
            case Loaded(phases, memory_bytes):
                self._any_was_ready = True
                replica.life.ready_at = now = self._clock.now()
                self._on_event(IsReady(replica.name, now - replica.began_at, phases, memory_bytes))

    def _follow(self, replica: _Replica, process: subprocess.Popen[bytes], loop: asyncio.AbstractEventLoop) -> None:
        """Pass on what the process writes, and wait for its end; runs in a thread."""
        reading = threading.Thread(target=self._pass_on, args=(replica, process), daemon=True)
        reading.start()
        process.wait()
        reading.join(LAST_LINE_S)
        with suppress(RuntimeError):  # the loop was closed under us
            loop.call_soon_threadsafe(self._exited, replica, process)

    def _pass_on(self, replica: _Replica, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            while line := output.readline(MAX_LINE_BYTES):
                text = line.decode("utf-8", "replace").rstrip()
                if text:
                    replica.last_words = replica.last_words if _NEWS.match(text) else text
                    self._write_line(prefixed(replica.name, text))

    # -- its end

    def _exited(self, replica: _Replica, process: subprocess.Popen[bytes]) -> None:
        if replica.process is not process or replica.name not in self._replicas:
            return
        if replica.news is not None:
            self._hear_the_rest(replica, replica.news)
        replica.life.cancel()
        replica.process = replica.news = None
        code = process.returncode
        own_fault = is_own_fault(code, stuck=False, out_of_memory=False)
        words = replica.killed_for or (replica.last_words if code and own_fault else None)  # else they are no cause
        cause = f"process {process.pid} {cause_of_death(code, words)}"
        if replica.life.is_stopping:
            self._forget(replica, cause)
            return
        never_ready = replica.life.ready_at is None and not self._any_was_ready
        is_second = replica.life.backoff.num_restarts > 0  # the first may have been unlucky: a port, a file
        is_hopeless = code == USAGE or (code == FAILURE and never_ready and is_second)
        is_hopeless |= self._named is not None and replica.life.ready_at is None
        self._lost(replica, cause, own_fault=own_fault, is_hopeless=is_hopeless)

    def _hear_the_rest(self, replica: _Replica, news: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(news)
        self._hear(replica, news)
        news.close()

    def _lost(self, replica: _Replica, cause: str, *, own_fault: bool, is_hopeless: bool) -> None:
        """Start a replica again that died of itself, unless it would end alike."""
        if is_hopeless:
            del self._replicas[replica.name]
            self._told(Exited(replica.name, cause, as_told=False, again_in_s=None))
            return
        delay_s = replica.life.died(lambda: self._begin(replica), own_fault=own_fault)
        self._told(Exited(replica.name, cause, as_told=False, again_in_s=delay_s))

    def _forget(self, replica: _Replica, cause: str) -> None:
        replica.life.cancel()
        del self._replicas[replica.name]
        self._told(Exited(replica.name, cause, as_told=True, again_in_s=None))

    def _told(self, event: LaunchEvent) -> None:
        self._gone.set()
        self._on_event(event)


def _tell_to_end(process: subprocess.Popen[bytes]) -> None:
    """A process that stands still hears it too."""
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)


def prefixed(name: str, line: str) -> str:
    """A replica's log line with its name before it; where the log is JSON, as its first field."""
    if line.startswith('{"'):
        return f'{{"replica":"{name}",{line[1:]}'
    return f"[{name}] {line}"


def write_to_stderr(line: str) -> None:
    with suppress(OSError, ValueError):  # no reader any more
        sys.stderr.write(line + "\n")
        sys.stderr.flush()

"""Supervises an engine: starts it, hears it, sees it die or hang, starts the next one, and ends one that sleeps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from maitred.config import EngineConfig, ProcessConfig, SchedulerConfig
from maitred.core.clock import Clock
from maitred.core.errors import EngineDead, MaitredError
from maitred.core.tensor_request import ModelChange
from maitred.engine import frames
from maitred.engine.child_process import in_child_process
from maitred.engine.memory import give_memory_back
from maitred.engine.model_facts import ModelFacts
from maitred.engine.restarts import BackOff, Watchdog, is_own_fault

logger = logging.getLogger(__name__)
TICK_S = 0.25
SILENT_S = 2.25  # without a heartbeat for so long, the engine is not healthy; told within three seconds of the last one
START_POLL_S = 0.05
LAST_REPORT_S = 0.5  # what an ended engine said is waited for so long: the sockets' own thread may not have read it yet
STOP_S = 3.0  # an engine that was told to end, and has not by then, is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Everything for an engine's start, the first time and again."""

    config: EngineConfig
    process: ProcessConfig
    served_model_names: tuple[str, ...] = ()
    log_level: int = logging.INFO
    open: frames.OpenTransport = field(default_factory=in_child_process)
    read_config: Callable[[bytes], Any] = bytes  # makes a tensor model's ModelConfig of protobuf's wire format


class Loss(NamedTuple):
    """Outcome for the requests of an engine that died."""

    num_kept: int  # wait for the next one
    num_ended: int
    found_cause: bool = False  # one of those that ended had killed the engines; the others may hope


class Owner:
    """Owner of a supervised engine without any requests; told everything on the event loop, once there is one."""

    def heard(self, report: frames.Report) -> None:
        """Take a report that is not about the process itself."""

    def lost(self, cause: str, *, deterministic: bool, own_fault: bool) -> Loss:
        """The engine died, by its own fault or not; if there will be none any more, `bereft` comes next."""
        return Loss(0, 0)

    def regained(self) -> int:
        """Send the requests to a new engine; how many go on."""
        return 0

    def bereft(self, cause: str) -> None:
        """The engine died, and none will come."""

    def idle_s(self) -> float:
        """Time without any request (s); 0 while there is one."""
        return 0.0

    def silenced(self) -> None:
        """The engine is there, and from now on counts as not heard of: it is sent no new request from the moment on
        at which its state says so.
        """

    def slept(self) -> None:
        """The engine was ended on purpose, without a request; `regained` follows when there is one again."""


class Supervisor:
    """One engine after the other, over whatever transport. After `wait` everything runs on one event loop."""

    def __init__(
        self, start: Start, clock: Clock, owner: Owner, *, on_event: Callable[[str], None] = lambda line: None
    ) -> None:
        self._start, self._clock, self._owner, self._on_event = start, clock, owner, on_event
        self.scheduler: SchedulerConfig = start.config.scheduler  # what the next engine begins with
        self.models: dict[str, ModelChange] = {}  # by name; and with these loads and unloads
        self.error: str | None = None  # why there is no engine now
        self.over = False  # and will be none any more
        self.stopping = False
        self._num_wrong_frames = 0  # of the children before this one
        self._backoff = BackOff(start.process.max_restarts)
        self._watchdog = Watchdog(TICK_S)
        self._stuck = False  # the present child was, and we ended it
        self._oom_kills = 0  # on this system, before the present child
        self._loop: asyncio.AbstractEventLoop | None = None
        self._child: frames.Transport | None = None
        self._ready: frames.Ready | None = None  # of the present child, once it is
        self._ready_at = 0.0
        self._facts: ModelFacts | None = None  # of the first one
        self._failed: MaitredError | None = None  # why it could not load
        self._given_up = False
        self._timers: set[asyncio.TimerHandle] = set()
        self.sleep = SleepState(
            start.process.sleep_after_s,
            clock,
            end=self._end_on_purpose,
            start=self._respawn,
            hindrance=lambda: self.death() if self.over or self.stopping else None,
        )

    # -- what the owner asks

    @property
    def ready(self) -> bool:
        return self._ready is not None and not self.stopping

    @property
    def loaded(self) -> frames.Ready | None:
        """The present engine's own report, from when it was ready."""
        return self._ready

    @property
    def is_deterministic(self) -> bool:
        """Whether the engine's tokens do not depend on the batch; of the one that loads nothing else is known."""
        return self._ready is None or self._ready.deterministic

    @property
    def pid(self) -> int | None:
        """Pid of the process that the engine is in; None while there is none."""
        return self._child.pid if self._child is not None else None

    @property
    def num_restarts(self) -> int:
        return self._backoff.num_restarts

    @property
    def num_wrong_frames(self) -> int:
        """Messages on the engine's sockets that were none of ours, and were dropped; connections that were not, too."""
        return self._num_wrong_frames + (self._child.num_wrong_frames if self._child is not None else 0)

    @property
    def silent_s(self) -> float:
        """Since the last heartbeat."""
        return self._watchdog.silent_s

    @property
    def why_not_alive(self) -> str | None:
        """Reason in words; None while the engine is there and heard of."""
        if self.stopping or self.over:
            return str(self.death())
        if self.error is not None:
            return f"{self.error}; it is being started again"
        if self._ready is None:
            return None if self.sleep.asleep else "the engine is loading"  # the next request wakes one that sleeps
        if self._stuck:  # and a thread cannot be ended before its step does
            return (
                f"the engine has been in one step for {self._start.process.step_timeout_s:g} s; it ends with that step"
            )
        limit_s = min(SILENT_S, self._start.process.step_timeout_s)
        return f"the engine's process has been silent for over {limit_s:g} s" if self.silent_s >= limit_s else None

    def death(self) -> EngineDead:
        if self.error is not None:
            return EngineDead(f"the engine stopped: {self.error}")
        if self.sleep.asleep and not self.stopping:
            return EngineDead("the engine is asleep; the next request wakes it, and so does POST /wake_up")
        return EngineDead("the engine was shut down")

    def send(self, command: frames.Command) -> bool:
        """False when there is no engine now. Raises RequestTooLarge."""
        if self._child is None or not self.ready:
            return False
        self._child.send(command)
        return True

    # -- beginning and end

    def begin(self, facts: ModelFacts | None = None) -> None:
        """Start the first child; `facts` are those of another engine that loads the same, and must be this one's too.
        In the main thread, for the system ends a child with the thread that began it. Once it is attached, what keeps
        the child from starting is no error here: it is tried again.
        """
        self._facts = facts
        if self._loop is None:
            self._spawn()
        else:
            self._respawn()

    def give_up(self) -> None:
        """Make `wait` raise soon; for another thread."""
        self._given_up = True

    def wait(self) -> frames.Ready:
        """Wait until the first child has loaded; before `attach`, in any one thread. Raises what hinders it."""
        assert self._child is not None
        try:
            while self._ready is None:
                if self._given_up:
                    raise EngineDead("the engine was given up while it loaded")
                over = self._child.over  # asked first: what it said last can be read then
                readable = self._child.wait_readable(START_POLL_S)
                self._read()
                if self._failed is not None:
                    raise self._failed
                if over and not readable:
                    raise EngineDead(f"the engine's {self._child.name} {self._child.cause()}, before it was ready")
        except BaseException:
            self._child.kill()
            self.stop()
            raise
        return self._ready

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Live on `loop` from now on: hear the child, and see it die. Idempotent."""
        if self._loop is loop or self.stopping:
            return
        assert self._loop is None, "an engine is kept by one event loop"
        self._loop = loop
        self._listen()
        if self._child is not None and self._child.ended:
            self._exited(self._child)
        self._later(TICK_S, self._tick)

    def detach(self) -> None:
        """The loop hears nothing more; `stop` comes next."""
        self.stopping = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self._deafen()
        self.sleep.changed()

    def stop(self) -> None:
        """Stop the child and give everything back; idempotent, from any thread once the loop does nothing more here."""
        self.stopping = True
        if self._child is not None:
            self._child.stop()

    # -- a child's life

    def _spawn(self) -> None:
        share = replace(self._start.config.share, models=tuple(self.models.values()))
        config = replace(self._start.config, scheduler=self.scheduler, share=share)
        if self._facts is not None:  # what the edge promises of the context must hold for this one too
            config = replace(
                config,
                model=replace(config.model, max_model_len=self._facts.max_model_len),
                lora=replace(config.lora, lora={}),  # its owner tells it of adapters: files may have changed since
            )
        begin = frames.Begin(config, tuple(self._start.served_model_names), self._start.log_level)
        self._watchdog, self._stuck, self._oom_kills = Watchdog(TICK_S), False, num_oom_kills()
        self._child = self._start.open(begin, self._on_exit)
        self._listen()

    def _respawn(self) -> None:
        if self.stopping:
            return
        try:
            self._spawn()
        except Exception as error:  # no memory, descriptor or thread for it: another try may find some
            self._deafen()
            child, self._child = self._child, None
            if child is not None:
                child.kill()
                child.close()
            self._lost(f"the engine cannot be started: {error}", own_fault=True)

    def _listen(self) -> None:
        if self._loop is not None and self._child is not None:
            self._loop.add_reader(self._child.fd, self._read)
            self._loop.call_soon(self._read)  # what came before is not signalled again

    def _deafen(self) -> None:
        if self._loop is not None and self._child is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._child.fd)

    def _on_exit(self, child: frames.Transport) -> None:
        """Pass on an exit; runs in the thread that waited."""
        loop = self._loop
        if loop is not None and not self.stopping:
            with contextlib.suppress(RuntimeError):  # the loop was closed under us
                loop.call_soon_threadsafe(self._exited, child)

    def _exited(self, child: frames.Transport) -> None:
        if child is not self._child or self.stopping:
            return
        self._read()  # what it said before counts
        while child.returncode == 1 and child.last_words is None and child.wait_readable(LAST_REPORT_S):
            self._read()
        self._deafen()
        self._child = None
        self._num_wrong_frames += child.num_wrong_frames
        if self.sleep.phase is SleepPhase.ENDING:
            self._ended_on_purpose(child)
            return
        cause = f"the engine's {child.name} {child.cause()}"
        out_of_memory = num_oom_kills() > self._oom_kills
        if out_of_memory:
            cause += "; the system had run out of memory"
        self._lost(cause, own_fault=is_own_fault(child.returncode, stuck=self._stuck, out_of_memory=out_of_memory))
        child.close()  # the next one is on its way, whatever becomes of this

    def _lost(self, cause: str, *, own_fault: bool) -> None:
        """Tell the owner, and start the next engine when it is time."""
        ready, self._ready, self.error = self._ready, None, cause
        lived_s = self._clock.now() - self._ready_at if ready is not None else 0.0
        loss: Loss | None = None
        if ready is not None:
            loss = self._owner.lost(cause, deterministic=ready.deterministic, own_fault=own_fault)
            if loss.found_cause:
                self._backoff.found_cause()
        delay_s = None if self.over else self._backoff.died(lived_s, own_fault=own_fault)
        if delay_s is None:
            self.over = True
            logger.error("%s; it is given up after %d restarts", cause, self.num_restarts)
            self._owner.bereft(cause)
        elif loss is None:
            logger.error("%s; trying again in %.1f s", cause, delay_s)
        else:
            kept, ended = loss.num_kept, loss.num_ended
            logger.error("%s; %d requests wait for the next one, %d end with an error", cause, kept, ended)
        if delay_s is not None:
            self._later(delay_s, self._respawn)
        self.sleep.lost()

    def _end_on_purpose(self) -> None:
        """The engine is to sleep."""
        child = self._child
        assert child is not None
        self._ready = None
        child.send(frames.Stop())
        self._later(STOP_S, lambda: child.kill() if child is self._child and not child.ended else None)

    def _ended_on_purpose(self, child: frames.Transport) -> None:
        self._watchdog = Watchdog(TICK_S)
        child.close()
        self._owner.slept()
        give_memory_back()
        logger.info("the engine sleeps: its process has ended, and the next request starts another")
        self.sleep.ended()

    # -- what it says

    def _read(self) -> None:
        child = self._child
        if child is None:
            return
        for report in child.receive():
            self._hear(report, child)

    def _hear(self, report: frames.Report, child: frames.Transport) -> None:
        match report:
            case frames.Beat(round_number, busy, num_wrong_frames):
                self._watchdog.beat(round_number, busy)
                child.heard_beat(num_wrong_frames)
            case frames.Ready():
                self._became_ready(report, child)
            case frames.Told(line):
                self._on_event(line)
            case frames.Failed(kind, message):
                self._failed, child.last_words = frames.error_of(kind, message), message
            case frames.Died(message):
                child.last_words = message
            case _:
                if isinstance(report, frames.Stepped):
                    self._watchdog.stepped()
                self._owner.heard(report)

    def _became_ready(self, ready: frames.Ready, child: frames.Transport) -> None:
        if self._facts is None:
            self._facts = ready.facts
        elif ready.facts.revision != self._facts.revision:
            child.last_words = "the model's files changed while the server ran; restart the server to serve them"
            self.over = True
            child.kill()
            return
        is_late = self._loop is not None  # no call waits for it: it is another one, or another's
        woken = self.sleep.phase is SleepPhase.WAKING
        self._ready, self._ready_at, self.error = ready, self._clock.now(), None
        self._on_event = logger.debug  # the start-up lines are for the first time
        self.sleep.ready()
        if woken:
            logger.info(
                "the engine is awake after %.2f s; %d requests begin", self.sleep.wake_s, self._owner.regained()
            )
        elif is_late and self.num_restarts > 0:
            logger.warning("the engine is back, %s; %d requests go on", child.name, self._owner.regained())
        elif is_late:
            logger.info("another engine is there, %s; %d requests begin", child.name, self._owner.regained())

    # -- time

    def _tick(self) -> None:
        """Ends a child that is stuck or silent; its death is then as any other."""
        self._later(TICK_S, self._tick)  # first, so that nothing can end the row
        self._read()
        watchdog, limit_s = self._watchdog, self._start.process.step_timeout_s
        was_alive = self.why_not_alive is None
        watchdog.tick(self._clock.now())
        if was_alive and self.why_not_alive is not None:
            self._owner.silenced()
        if self.ready:
            self.sleep.idle(min(self._owner.idle_s(), self._clock.now() - self._ready_at))
        if self._child is not None and max(watchdog.stuck_s, watchdog.silent_s) >= limit_s:
            self._stuck = watchdog.stuck_s >= limit_s
            what = "in one step" if self._stuck else "silent"
            self._child.last_words = f"it was {what} for {limit_s:g} s"
            self._child.kill()
            self._watchdog = Watchdog(TICK_S)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        assert self._loop is not None

        def run() -> None:
            self._timers.discard(timer)
            action()

        timer = self._loop.call_later(delay_s, run)
        self._timers.add(timer)


def num_oom_kills(root: Path = Path("/")) -> int:
    """OOM kills so far, in our control group, else on this machine; 0 if not counted. `root` holds proc and sys.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (memory.events), mm/vmstat.c (oom_kill).
    """
    group = next((line[4:] for line in _lines(root / "proc/self/cgroup") if line.startswith("0::/")), None)
    own = _lines(root / "sys/fs/cgroup" / group / "memory.events") if group is not None else []
    for line in own or _lines(root / "proc/vmstat"):
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.isdigit():
            return int(count)
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        return []


# ---- sleep


class SleepPhase(Enum):
    AWAKE = "awake"
    ENDING = "ending"  # the engine was told to
    ASLEEP = "asleep"
    WAKING = "waking"  # the next one loads


class SleepState:
    """Whether there is no engine on purpose, and the calls that wait for that to change. On one event loop."""

    def __init__(
        self,
        after_s: float | None,  # without a request; None is never by itself
        clock: Clock,
        *,
        end: Callable[[], None],  # tells the engine to end
        start: Callable[[], None],  # begins another
        hindrance: Callable[[], EngineDead | None],  # why there will be no engine any more
    ) -> None:
        self._after_s, self._clock = after_s, clock
        self._end, self._start, self._hindrance = end, start, hindrance
        self._num_asking = 0
        self._wake_asked = False  # while the engine was still ending
        self._woken_at = 0.0
        self._waiting: list[asyncio.Future[None]] = []
        self.phase = SleepPhase.AWAKE
        self.num_sleeps = 0
        self.wake_s = 0.0  # what the last start out of sleep took

    @property
    def asleep(self) -> bool:
        """True from the engine's order to end until the next one is ready."""
        return self.phase is not SleepPhase.AWAKE

    async def fall_asleep(self) -> None:
        """Returns when the engine's process has ended, which it does once there is no request. Raises EngineDead."""
        self._num_asking += 1
        before = self.num_sleeps  # another call may wake it at once
        try:
            while self.phase is not SleepPhase.ASLEEP and self.num_sleeps == before:
                await self._change()
        finally:
            self._num_asking -= 1

    async def wake_up(self) -> None:
        """Returns when there is an engine. Raises EngineDead."""
        self.wake()
        while self.asleep:
            await self._change()

    def wake(self) -> None:
        """The same without waiting."""
        if self.phase is SleepPhase.ENDING:
            self._wake_asked = True
        elif self.phase is SleepPhase.ASLEEP:
            self.phase, self._woken_at, self._wake_asked = SleepPhase.WAKING, self._clock.now(), False
            self._start()

    # -- what the supervisor tells

    def idle(self, idle_s: float) -> None:
        """The engine is ready, and has had no request for so long."""
        limit_s = 0.0 if self._num_asking else self._after_s
        if limit_s is not None and idle_s > limit_s:
            self.phase = SleepPhase.ENDING
            self._end()

    def ended(self) -> None:
        """The engine did as it was told."""
        self.phase = SleepPhase.ASLEEP
        self.num_sleeps += 1
        self.changed()
        if self._wake_asked:
            self.wake()

    def ready(self) -> None:
        """Note that there is an engine."""
        if self.phase is SleepPhase.WAKING:
            self.wake_s = self._clock.now() - self._woken_at
        self.phase = SleepPhase.AWAKE
        self.changed()

    def lost(self) -> None:
        """Note that there is no engine, and not on purpose."""
        self.phase = SleepPhase.AWAKE
        self.changed()

    def changed(self) -> None:
        """Have all waiting calls look again."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def _change(self) -> None:
        error = self._hindrance()
        if error is not None:
            raise error
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

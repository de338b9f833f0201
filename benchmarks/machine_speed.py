"""How fast this machine is right now: fixed work of the engine's own kind, timed again and again beside a live run.

A shared machine serves the same step in other times from one second to the next. A `Probe` is a second, small engine
that always serves the same two things, a long prompt and a few short answers, because what slows a machine slows the
arithmetic of prompts less than steps that wait for memory. How long each takes, over what it took in all, is the
machine's slowness at that moment. The probe is asked between two steps of the engine that is measured, on a clock that
does not count it, so the two never meet, and nothing of what is measured is in the figure.

`Quiet` tells whether others used the cores meanwhile, from /proc/stat.
"""

from __future__ import annotations

import os
import statistics
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from maitred.cli.profiling import LiveClock, LiveEngine
from maitred.config import EngineConfig
from maitred.core.cost_model import Slowness
from maitred.engine.build import build_parts
from maitred.sim.workload import Arrival

PROMPT = [Arrival(at=0.0, request_id="probe", prompt_tokens=256, output_tokens=1, max_tokens=1)]
ANSWERS = [Arrival(at=0.0, request_id="probe", prompt_tokens=8, output_tokens=12, max_tokens=12)] * 4
EVERY_S = 0.2  # of the measured engine's time
SMOOTHED = 5  # readings, about one second
NUM_AROUND = 8  # readings before a run and after it


class Times(NamedTuple):
    """What the probe took, in seconds."""

    prompt_s: float
    answers_s: float


class Reading(NamedTuple):
    at: float  # s
    took: Times


class Probe:
    """An engine of its own, without prefix cache, so that the same prompts are computed each time."""

    def __init__(self, live: LiveEngine) -> None:
        self._live = live
        self.readings()  # warm up

    def take(self) -> Times:
        """The times of the fixed work now, by the clock it was made with."""
        return Times(self._serve(PROMPT), self._serve(ANSWERS))

    def readings(self, number: int = NUM_AROUND) -> list[Times]:
        return [self.take() for _ in range(number)]

    def _serve(self, work: Sequence[Arrival]) -> float:
        clock = self._live.clock
        began = clock.now()
        self._live.serve(work)
        return clock.now() - began


def median_of(times: Sequence[Times]) -> Times:
    return Times(*(statistics.median(values) for values in zip(*times, strict=True)))


def slowness_of(took: Times, usual: Times) -> Slowness:
    return Slowness(prompts=took.prompt_s / usual.prompt_s, rest=took.answers_s / usual.answers_s)


@contextmanager
def probe_engine(config: EngineConfig, clock: LiveClock) -> Iterator[Probe]:
    """`config` is the measured engine's; `clock` one of its own, of the same kind."""
    config = replace(
        config,
        cache=replace(config.cache, enable_prefix_caching=False),
        scheduler=replace(config.scheduler, policy="fcfs", max_num_seqs=len(ANSWERS)),
        decision_log=None,
    )
    parts = build_parts(config, clock=clock)
    try:
        yield Probe(LiveEngine(parts, clock, Path()))
    finally:
        parts.close()


@dataclass(slots=True)
class Watch:
    """The `aside` of a live run: a reading now and then."""

    probe: Probe
    readings: list[Reading] = field(default_factory=list)

    def __call__(self, now: float) -> bool:
        if self.readings and now < self.readings[-1].at + EVERY_S:
            return False
        self.readings.append(Reading(now, self.probe.take()))
        return True


class Trace:
    """Slowness over time: a running median of readings over `usual`, and straight lines between.

    The median, because a reading that met somebody's time slice tells of a moment, not of a second; such moments
    are in the jitter of the fitted steps.
    """

    def __init__(self, readings: Sequence[Reading], usual: Times) -> None:
        half = SMOOTHED // 2
        self._times = [reading.at for reading in readings]
        self._values = [
            slowness_of(median_of([r.took for r in readings[max(0, i - half) : i + half + 1]]), usual)
            for i in range(len(readings))
        ]

    def at(self, now: float) -> Slowness:
        times, values = self._times, self._values
        right = bisect_left(times, now)
        if right == 0 or right == len(times):
            return values[min(right, len(times) - 1)]
        share = (now - times[right - 1]) / (times[right] - times[right - 1])
        return Slowness(*(a + share * (b - a) for a, b in zip(values[right - 1], values[right], strict=True)))

    @property
    def mean(self) -> Slowness:
        return Slowness(*(statistics.fmean(values) for values in zip(*self._values, strict=True)))

    @property
    def spread(self) -> float:
        """Of what is not prompts: most over least, less 1."""
        rest = [value.rest for value in self._values]
        return max(rest) / min(rest) - 1


# ---- a clock that runs as fast as the machine


class SteadyClock:
    """Another clock, in seconds of a machine on which the probe always takes `usual`.

    Live runs one after the other can so be compared although the machine does not stay the same. It is its own `aside`.
    """

    def __init__(self, clock: LiveClock, probe: Probe, usual: Times, prompt_share: float) -> None:
        """`prompt_share` of the measured engine's time goes into prompts."""
        self._clock, self._probe, self._usual, self._prompt_share = clock, probe, usual, prompt_share
        self._recent = probe.readings(SMOOTHED)
        self._at, self._read_at = 0.0, clock.now()
        self.slowness = self._overall()
        self.history = [self.slowness]

    def now(self) -> float:
        return self._at + (self._clock.now() - self._read_at) / self.slowness

    def wait_until(self, at: float) -> None:
        self._clock.wait_until(self._read_at + (at - self._at) * self.slowness)

    def take_back(self, seconds: float) -> None:
        self._clock.take_back(seconds * self.slowness)

    def __call__(self, now: float) -> bool:
        if now < self._at + EVERY_S:
            return False
        began = self._clock.now()
        self._recent = [*self._recent[1:], self._probe.take()]
        self._clock.take_back(self._clock.now() - began)
        self._at, self._read_at = self.now(), self._clock.now()
        self.slowness = self._overall()
        self.history.append(self.slowness)
        return False  # it took its time back itself, at the rate of before

    def _overall(self) -> float:
        slowness, share = slowness_of(median_of(self._recent), self._usual), self._prompt_share
        return share * slowness.prompts + (1 - share) * slowness.rest


# ---- others on the machine


class Quiet:
    """How much of the cores went to others since it was made."""

    def __init__(self) -> None:
        self._busy, self._steal = _machine_ticks()
        self._own = _own_ticks()
        self._began = os.times().elapsed

    def others(self) -> float:
        """Cores, such as 0.3: processes other than this one, and what the host took."""
        busy, steal = _machine_ticks()
        ticks = (busy - self._busy) + (steal - self._steal) - (_own_ticks() - self._own)
        elapsed = os.times().elapsed - self._began
        return max(0.0, ticks / os.sysconf("SC_CLK_TCK") / elapsed) if elapsed > 0 else 0.0


def _machine_ticks() -> tuple[int, int]:
    """(busy, stolen by the host) of all cores, ever; see proc(5)."""
    try:
        words = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:  # not Linux: nothing is known of others
        return 0, 0
    user, nice, system, _, _, irq, softirq, steal = map(int, words[:8])
    return user + nice + system + irq + softirq, steal


def _own_ticks() -> int:
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return round(own * os.sysconf("SC_CLK_TCK"))

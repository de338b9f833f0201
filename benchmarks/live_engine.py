"""The engine without text and HTTP, on a load whose every step is recorded.

Model, sampler, scheduler and decision log are the served ones. Time is the machine's, or, where other processes take
the cores away, the engine thread's CPU time: then waiting for a request costs none.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Protocol

from maitred.config import EngineConfig
from maitred.core.clock import Clock
from maitred.core.request import RequestSpec, SamplingParams
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.log import Step
from maitred.engine.build import EngineParts, build_parts
from maitred.kv.prefix_cache import TokenHasher
from maitred.sim.workload import Arrival

WARM_UP = "warm-up"
Aside = Callable[[float], bool]
"""Told the clock's time between two steps; True if it took time for itself."""


class LiveClock(Clock, Protocol):
    def wait_until(self, at: float) -> None: ...

    def take_back(self, seconds: float) -> None:
        """Stop counting this time: it went into something that is not the engine's."""


class SleepingClock:
    """The machine's monotonic time."""

    def __init__(self) -> None:
        self._not_counted_s = 0.0

    def now(self) -> float:
        return time.monotonic() - self._not_counted_s

    def wait_until(self, at: float) -> None:
        time.sleep(max(0.0, at - self.now()))

    def take_back(self, seconds: float) -> None:
        self._not_counted_s += seconds


class CpuClock:
    """CPU time of the calling thread, and leaps where it would have waited. For an executor on that thread alone."""

    def __init__(self) -> None:
        self._leapt_s = 0.0

    def now(self) -> float:
        return time.thread_time() + self._leapt_s

    def wait_until(self, at: float) -> None:
        self._leapt_s += max(0.0, at - self.now())

    def take_back(self, seconds: float) -> None:
        self._leapt_s -= seconds


CLOCKS: dict[str, Callable[[], LiveClock]] = {"wall": SleepingClock, "cpu": CpuClock}


class LiveEngine:
    """An engine that is asked for tokens without text, and writes its decision log into a folder of its own."""

    def __init__(self, parts: EngineParts, clock: LiveClock, log: Path) -> None:
        self.parts, self.clock, self._log = parts, clock, log
        self._hasher = TokenHasher(parts.model.block_size, parts.model.revision)
        self._num_requests = self.num_steps = 0

    def request(self, arrival: Arrival) -> RequestSpec:
        """A request as the arrival says, of random tokens that no other prompt begins with.

        It asks for just the tokens it is to get, so that a prediction from max_tokens is the oracle's.
        """
        self._num_requests += 1
        rng, vocabulary = Random(self._num_requests), self.parts.model.vocab_size
        tokens = rng.choices(range(vocabulary // 4, vocabulary), k=arrival.prompt_tokens)
        return RequestSpec(
            request_id=f"{arrival.request_id}/{self._num_requests}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=0.0, max_tokens=arrival.output_tokens, ignore_eos=True),
            arrived_at=arrival.at,
            num_prompt_tokens=arrival.prompt_tokens,
            max_tokens=arrival.output_tokens,
            terms=arrival.terms,
            block_hashes=self._hasher.hash_prompt(tokens),
        )

    def serve(self, arrivals: Iterable[Arrival], aside: Aside | None = None) -> None:
        """An open loop: each request comes when it is due, whatever the engine does. Returns when all have ended.

        `aside` is called before each step; its time is taken back from the clock.
        """
        core, clock, source = self.parts.core, self.clock, iter(arrivals)
        began = clock.now()
        due = next(source, None)
        while due is not None or core.has_work:
            if due is not None and not core.has_work:
                clock.wait_until(began + due.at)
            while due is not None and began + due.at <= clock.now():
                core.add(self.request(replace(due, at=began + due.at)))
                due = next(source, None)
            if aside is not None:
                _step_aside(aside, clock)
            if core.has_work:
                core.step()
                self.num_steps += 1

    def serve_closed(
        self, arrivals: Iterator[Arrival], in_flight: int, until: float, aside: Aside | None = None
    ) -> None:
        """Keep `in_flight` requests running until the clock says `until`; those begun are finished."""
        core, clock, num_here = self.parts.core, self.clock, 0
        while core.has_work or clock.now() < until:
            while num_here < in_flight and clock.now() < until:
                core.add(self.request(replace(next(arrivals), at=clock.now())))
                num_here += 1
            if aside is not None:
                _step_aside(aside, clock)
            num_here -= sum(progress.finish_reason is not None for progress in core.step())
            self.num_steps += 1

    def close(self) -> list[Step]:
        """Everything that was recorded."""
        self.parts.close()
        _, steps = read_log(read_frames(log_parts(self._log)))
        return list(steps)


def _step_aside(aside: Aside, clock: LiveClock) -> None:
    began = clock.now()
    if aside(began):
        clock.take_back(clock.now() - began)


@contextmanager
def live_engine(config: EngineConfig, clock: LiveClock, on_event: Callable[[str], None]) -> Iterator[LiveEngine]:
    """Call `close` inside for its record; the folder goes with the context."""
    with tempfile.TemporaryDirectory(prefix="maitred-live-") as folder:
        parts = build_parts(replace(config, decision_log=folder), clock=clock, on_event=on_event)
        yield LiveEngine(parts, clock, Path(folder))


def record(
    config: EngineConfig, clock: LiveClock, arrivals: Iterable[Arrival], aside: Aside | None = None
) -> list[Step]:
    """One open-loop run on an engine of its own; `aside` as in `LiveEngine.serve`."""
    with live_engine(config, clock, lambda line: None) as live:
        live.serve([Arrival(at=0.0, request_id=WARM_UP, prompt_tokens=64, output_tokens=8, max_tokens=8)])
        live.serve(arrivals, aside)
        steps = live.close()
    return [step for step in steps if not any(row.request_id.startswith(WARM_UP) for row in step.plan.rows)]

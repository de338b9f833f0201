"""Figures of a simulated fleet: its cost and how evenly it is loaded, besides its clients' figures."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from maitred.sim.results import SimulatedResults, Sketch

SPAN_S = 1.0
MIN_LOAD = 8.0  # in flight on average: with fewer, the most loaded replica is far above the mean by chance


@dataclass(slots=True, eq=False)
class ReplicaLoad:
    """Load of one replica while it is there; loads count beside the speed of its device."""

    speed: float
    began_at: float  # s, as all times; its start, for it costs from then on
    is_ready: bool = False
    num_in_flight: int = 0
    in_flight_s: float = 0.0  # integral over the span, up to `counted_until`
    counted_until: float = 0.0

    def count_until(self, now: float) -> None:
        self.in_flight_s += self.num_in_flight * (now - self.counted_until)
        self.counted_until = now


@dataclass(slots=True, eq=False)
class FleetResults:
    """Figures of a fleet. Loads are averaged over spans of a second, of replicas that are ready at its end; spans after
    the last binding do not count, because without arrivals replicas run empty one by one, whatever the balance did.
    """

    replica_s: float = 0.0
    starts: list[tuple[float, str]] = field(default_factory=list)  # (s, name) besides those there at the beginning
    num_prompt_tokens: int = 0  # of finished requests
    max_over_mean: Sketch = field(default_factory=Sketch)
    targets: list[tuple[float, int]] = field(default_factory=list)  # (s, replicas there or starting), where it changed
    _loads: dict[str, ReplicaLoad] = field(default_factory=dict)
    _span_ends_at: float = SPAN_S
    _num_in_flight: int = 0
    _since_bound: list[float] = field(default_factory=list)  # of spans that count if a request is bound later

    def started(self, name: str, speed: float, now: float) -> None:
        self._loads[name] = ReplicaLoad(speed, now, counted_until=now)
        self._note_count(now)

    def ready(self, name: str) -> None:
        self._loads[name].is_ready = True

    def stopped(self, name: str, now: float) -> None:
        self._pass(now)
        self.replica_s += now - self._loads.pop(name).began_at
        self._note_count(now)

    def changed(self, name: str, more: int, now: float) -> None:
        """Count so many more in flight there, or fewer."""
        self._pass(now)
        load = self._loads[name]
        load.count_until(now)
        load.num_in_flight += more
        if more > 0:
            self._count_spans()
        self._num_in_flight += more

    def ended(self, now: float) -> None:
        for name in list(self._loads):
            self.stopped(name, now)

    def to_json(self, results: SimulatedResults) -> dict[str, Any]:
        """Return the figures that `maitred simulate --fleet --json` has besides those of one engine."""
        prompts = self.num_prompt_tokens
        return {
            "prefix_hit_ratio": results.num_cached_tokens / prompts if prompts else 0.0,
            "load_max_over_mean": self.max_over_mean.quantile(0.99),
            "replica_s": self.replica_s,
            "num_starts": len(self.starts),
        }

    def _note_count(self, now: float) -> None:
        self.targets.append((now, len(self._loads)))

    def _pass(self, now: float) -> None:
        """Ends the spans that are over."""
        while self._span_ends_at <= now:
            self._end_span()
            self._span_ends_at += SPAN_S
            if not self._num_in_flight and self._span_ends_at <= now:  # nothing happens until then
                self._span_ends_at = SPAN_S * (math.floor(now / SPAN_S) + 1)

    def _end_span(self) -> None:
        total_s = total_speed = most = 0.0
        num_ready = 0
        for load in self._loads.values():
            load.count_until(max(self._span_ends_at, load.counted_until))
            in_flight_s, load.in_flight_s = load.in_flight_s, 0.0
            if load.is_ready:
                num_ready += 1
                total_s += in_flight_s
                total_speed += load.speed
                most = max(most, in_flight_s / load.speed)
        if num_ready and total_s >= MIN_LOAD * SPAN_S * num_ready:
            self._since_bound.append(most * total_speed / total_s)

    def _count_spans(self) -> None:
        for ratio in self._since_bound:
            self.max_over_mean.add(ratio)
        self._since_bound.clear()


@dataclass(slots=True)
class HandoverFigures:
    """Figures of all hand-overs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wait_s: Sketch = field(default_factory=Sketch)  # from the first token until the receiver could go on
    hit_tokens: Counter[str] = field(default_factory=Counter)  # by tier

    def to_json(self, num_bytes: int, num_disk_blocks: int | None) -> dict[str, Any]:
        disk = {} if num_disk_blocks is None else {"kv_disk_blocks": num_disk_blocks}
        return {
            "handovers": dict(sorted(self.outcomes.items())),
            "handover_wait_s": self.wait_s.to_json(),
            "kv_transfer_bytes": num_bytes,
            "kv_tier_hit_tokens": dict(sorted(self.hit_tokens.items())),
            **disk,
        }

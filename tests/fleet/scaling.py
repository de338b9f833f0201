"""A fleet without requests' insides: Poisson arrivals into slots, and replicas that take their time to start."""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from maitred.fleet.sizing import FleetFigures

TICK_S = 0.5
Arrivals = Callable[[float], float]  # per second, at that time
Scaler = Callable[[FleetFigures, float], int]


@dataclass
class Run:
    """What came of it."""

    waits: list[float] = field(default_factory=list)
    targets: list[tuple[float, int]] = field(default_factory=list)
    num_starts: int = 0
    replica_s: float = 0.0

    def attainment(self, objective_s: float) -> float:
        return sum(wait <= objective_s for wait in self.waits) / max(1, len(self.waits))

    def reversals(self, within_s: float) -> Iterator[tuple[float, float]]:
        """Changes of the target, each with the one before when that went the other way so shortly before."""
        moves = [(now, target - before) for (_, before), (now, target) in pairwise(self.targets) if target != before]
        for (at, move), (later, next_move) in pairwise(moves):
            if move * next_move < 0 and later - at < within_s:
                yield at, later


@dataclass
class World:
    """`slots` per replica, `service_s` a request, `start_s` a start; stops drain, which costs until it is done."""

    scaler: Scaler
    arrivals: Arrivals
    slots: int = 8
    service_s: float = 6.0
    start_s: float = 20.0
    num_ready: int = 1
    low: int = 1
    high: int = 20
    seed: int = 0
    starting: list[float] = field(default_factory=list)  # when each is ready
    ends: list[tuple[float, float, float]] = field(default_factory=list)  # (when, how long it took, its wait before)
    held: deque[float] = field(default_factory=deque)
    num_arrived: int = 0
    num_ended: int = 0
    served_s: float = 0.0
    waited_s: float = 0.0  # of those that ended
    run: Run = field(default_factory=Run)

    def play(self, seconds: float) -> Run:
        randomly = random.Random(self.seed)
        for tick in range(int(seconds / TICK_S)):
            now = tick * TICK_S
            self._join(now)
            self._end(now)
            for _ in range(_poisson(randomly, self.arrivals(now) * TICK_S)):
                self.num_arrived += 1
                self.held.append(now)
            self._bind(now, randomly)
            self._scale(now)
            self.run.replica_s += TICK_S * max(
                self.num_ready + len(self.starting), math.ceil(len(self.ends) / self.slots)
            )
        self.run.waits += [seconds - at for at in self.held]
        return self.run

    def figures(self, now: float) -> FleetFigures:
        return FleetFigures(
            low=self.low,
            high=self.high,
            target=self.run.targets[-1][1] if self.run.targets else self.low,
            num_ready=self.num_ready,
            ready_in_s=[max(0.0, at - now) for at in self.starting],
            next_start_s=(self.start_s,),
            slots=self.slots,
            num_in_flight=len(self.ends),
            num_held=len(self.held),
            num_arrived=self.num_arrived,
            num_ended=self.num_ended,
            served_s=self.served_s,
        )

    def _join(self, now: float) -> None:
        ready = [at for at in self.starting if at <= now]
        self.starting = [at for at in self.starting if at > now]
        self.num_ready += len(ready)

    def _end(self, now: float) -> None:
        while self.ends and self.ends[0][0] <= now:
            self.num_ended += 1
            _, took_s, waited_s = heappop(self.ends)
            self.served_s += took_s
            self.waited_s += waited_s

    def _bind(self, now: float, randomly: random.Random) -> None:
        while self.held and len(self.ends) < self.num_ready * self.slots:
            self.run.waits.append(now - self.held.popleft())
            took_s = randomly.lognormvariate(math.log(self.service_s) - 0.125, 0.5)
            heappush(self.ends, (now + took_s, took_s, self.run.waits[-1]))

    def _scale(self, now: float) -> None:
        target = self.scaler(self.figures(now), now)
        self.run.targets.append((now, target))
        while self.num_ready + len(self.starting) < target:
            self.starting.append(now + self.start_s)
            self.run.num_starts += 1
        while self.num_ready + len(self.starting) > target:
            if self.starting:
                self.starting.pop()
            else:
                self.num_ready -= 1


def _poisson(randomly: random.Random, mean: float) -> int:
    """Knuth's, for small means."""
    number, product, floor = 0, randomly.random(), math.exp(-mean)
    while product > floor:
        number, product = number + 1, product * randomly.random()
    return number


MANIFEST = Path(__file__).parents[2] / "deploy/kubernetes/fleet/autoscaler.yaml"
PERIOD_S, TOLERANCE = 15.0, 0.1  # of kube-controller-manager
UP = {
    "stabilizationWindowSeconds": 0,
    "policies": [
        {"type": "Percent", "value": 100, "periodSeconds": 15},
        {"type": "Pods", "value": 4, "periodSeconds": 15},
    ],
}
DOWN = {"stabilizationWindowSeconds": 300, "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}]}


class Metric(NamedTuple):
    """Counters of `maitred_fleet_queue_wait_seconds`."""

    count: int
    sum_s: float


@dataclass
class HpaRule:
    """One autoscaler; it looks every 15 s, and at the metric as Prometheus has it, a mean over the adapter's window."""

    read: Callable[[], Metric]
    low: int
    high: int
    target_s: float
    window_s: float
    up: dict[str, Any]
    down: dict[str, Any]
    num: int = 1
    asked_at: float = -math.inf
    seen: deque[tuple[float, Metric]] = field(default_factory=deque)
    wishes: deque[tuple[float, int]] = field(default_factory=deque)
    changes: deque[tuple[float, int]] = field(default_factory=deque)

    @classmethod
    def of_manifest(cls, low: int, high: int, read: Callable[[], Metric]) -> HpaRule:
        """The manifest's target, window and behaviour, with these bounds."""
        autoscaler, adapter = yaml.safe_load_all(MANIFEST.read_text())
        spec = autoscaler["spec"]
        (metric,) = spec["metrics"]
        target = metric["external"]["target"]
        assert target["type"] == "Value"
        window = re.search(r"_sum\{.*?\}\[(\d+)m\]", adapter["data"]["config.yaml"])
        assert window is not None
        return cls(
            read, low=low, high=high, target_s=int(target["value"].removesuffix("m")) / 1000,
            window_s=60.0 * int(window[1]), up=UP | spec["behavior"]["scaleUp"],
            down=DOWN | spec["behavior"]["scaleDown"], num=low,
        )  # fmt: skip

    def __call__(self, figures: FleetFigures, now: float) -> int:
        self.seen.append((now, self.read()))
        while self.seen[0][0] < now - self.window_s:
            self.seen.popleft()
        if now - self.asked_at >= PERIOD_S:
            self.asked_at = now
            num = self._limited(self._stable(self._wish(figures.num_ready), now), now)
            self.changes.append((now, num - self.num))
            self.num = num
        return self.num

    def _wish(self, num_ready: int) -> int:
        before, latest = self.seen[0][1], self.seen[-1][1]
        mean_s = (latest.sum_s - before.sum_s) / max(1, latest.count - before.count)
        ratio = mean_s / self.target_s
        return self.num if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * num_ready)

    def _stable(self, wish: int, now: float) -> int:
        """No more than the least wish of the one window, no fewer than the most of the other."""
        self.wishes.append((now, wish))
        least = min(each for at, each in self.wishes if at >= now - self.up["stabilizationWindowSeconds"])
        most = max(each for at, each in self.wishes if at > now - self.down["stabilizationWindowSeconds"])
        return min(max(self.num, least), most)

    def _limited(self, wish: int, now: float) -> int:
        """Within the rates of the policies, of which the one that allows most holds, and the bounds."""
        if wish > self.num:
            limits = [self._allowed(policy, 1, now) for policy in self.up["policies"]]
            return min(wish, max(self.num, *limits), self.high)
        limits = [self._allowed(policy, -1, now) for policy in self.down["policies"]]
        return max(wish, min(self.num, *limits), self.low)

    def _allowed(self, policy: dict[str, Any], sign: int, now: float) -> int:
        """How many there may be, beside those at the beginning of the policy's period."""
        began = self.num - sum(change for at, change in self.changes if at > now - policy["periodSeconds"])
        if policy["type"] == "Pods":
            return began + sign * int(policy["value"])
        share = began * (1 + sign * policy["value"] / 100)
        return math.ceil(share) if sign > 0 else math.floor(share)

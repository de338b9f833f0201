"""The rule of the HorizontalPodAutoscaler of `deploy/kubernetes/fleet`.

Source: kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale, and pkg/controller/podautoscaler of
Kubernetes: a target of type `Value` is a ratio to the ready pods; what the manifest leaves out has the API's defaults.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from maitred.fleet.sizing import FleetFigures

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
            read,
            low=low,
            high=high,
            target_s=int(target["value"].removesuffix("m")) / 1000,
            window_s=60.0 * int(window[1]),
            up=UP | spec["behavior"]["scaleUp"],
            down=DOWN | spec["behavior"]["scaleDown"],
            num=low,
        )

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

"""Ray Serve's autoscaling by the fleet's autoscaler: what its replicas count, made into figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Protocol

from maitred.cluster.autoscale import AutoscaleConfig, Autoscaler, FleetFigures

FIRST_START_S = 10.0  # until a replica has told how long its start took
ARRIVED, ENDED, SERVED_S, START_S = "arrived", "ended", "served_s", "start_s"
"""What each replica tells: three counters, and the seconds its engine took to load."""


class Sample(Protocol):
    @property
    def value(self) -> float: ...


class Context(Protocol):
    """What is read of `ray.serve.config.AutoscalingContext`."""

    current_time: float | None
    target_num_replicas: int
    running_replicas: Sequence[Any]
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int

    @property
    def total_queued_requests(self) -> float | None: ...

    @property
    def raw_metrics(self) -> Mapping[str, Mapping[Any, Sequence[Sample]]] | None: ...


class ServeScaling:
    """A Serve autoscaling policy: a class that Serve makes once for each deployment, and calls again and again."""

    def __init__(self, slots: int, idle_s: float = 300.0, ttft_objective_s: float | None = None) -> None:
        """`slots` are those of one replica; for the others see AutoscaleConfig."""
        self._slots = slots
        self._autoscaler = Autoscaler(AutoscaleConfig(idle_s=idle_s, ttft_objective_s=ttft_objective_s))
        self._counted: dict[str, dict[Any, float]] = {}  # by counter, by replica; who is gone stays counted
        self._num_arrived = 0.0

    def __call__(self, context: Context) -> tuple[int, dict[str, Any]]:
        """How many replicas there shall be, and the state that Serve keeps for policies that keep none."""
        self._read(context.raw_metrics or {})
        return self._autoscaler(self._figures(context), context.current_time or 0.0), {}

    def _read(self, metrics: Mapping[str, Mapping[Any, Sequence[Sample]]]) -> None:
        for name in (ARRIVED, ENDED, SERVED_S, START_S):
            counted = self._counted.setdefault(name, {})
            counted |= {replica: samples[-1].value for replica, samples in metrics.get(name, {}).items() if samples}

    def _figures(self, context: Context) -> FleetFigures:
        held = ceil(context.total_queued_requests or 0.0)
        num_ready = len(context.running_replicas)
        start_s = max(self._counted[START_S].values(), default=FIRST_START_S)
        self._num_arrived = max(self._num_arrived, self._sum(ARRIVED) + held)  # one held that went away has arrived too
        return FleetFigures(
            low=context.capacity_adjusted_min_replicas,
            high=context.capacity_adjusted_max_replicas,
            target=context.target_num_replicas,
            num_ready=num_ready,
            ready_in_s=[start_s] * max(0, context.target_num_replicas - num_ready),
            next_start_s=(start_s,),
            slots=self._slots,
            num_in_flight=self._num_in_flight(context.running_replicas),
            num_held=held,
            num_arrived=int(self._num_arrived),
            num_ended=int(self._sum(ENDED)),
            served_s=self._sum(SERVED_S),
        )

    def _sum(self, name: str) -> float:
        return sum(self._counted[name].values())

    def _num_in_flight(self, running: Sequence[Any]) -> int:
        """At replicas that are there: what the others had is over."""
        arrived, ended = self._counted[ARRIVED], self._counted[ENDED]
        return int(sum(arrived.get(replica, 0.0) - ended.get(replica, 0.0) for replica in running))

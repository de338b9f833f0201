"""How many launched replicas there should be: the seam of the autoscaler, and starts and stops that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from maitred.cluster.actions import Start, Stop
from maitred.cluster.autoscale import FleetFigures
from maitred.cluster.replicas import Replica, ReplicaFacts, Replicas, State

EVERY_S = 1.0  # the autoscaler is asked
START_S = 10.0  # what a start is thought to take before one was seen

Autoscale = Callable[[FleetFigures, float], int]
"""(figures, now) -> how many launched replicas there should be; brought into [low, high]. Asked every second, and when
somebody comes while nobody serves. What it remembers must follow from what it was told."""


def as_asked(figures: FleetFigures, now: float) -> int:
    """As many as there were, and one when somebody is there to be served."""
    return max(figures.target, int(figures.num_held + figures.num_in_flight > 0))


class Counts(NamedTuple):
    """Of requests, since the beginning; those in flight too at the moment."""

    num_held: int
    num_in_flight: int
    num_arrived: int
    num_ended: int  # on a replica
    served_s: float  # from a replica's slot to the end


class _Begun(NamedTuple):
    at: float
    origin: str


class Sizing:
    """Starts launched replicas until there are as many as there should be, and says which may go."""

    MEMORY = 0.5  # of measured start times

    def __init__(self, fleet: Replicas, autoscale: Autoscale) -> None:
        self._fleet, self._autoscale = fleet, autoscale
        self.low = self.high = self.target = 0
        self._num_started = 0
        self._begun: dict[str, _Begun] = {}  # starts under way, by name
        self._start_s: dict[str, float] = {}  # what starts took lately, by origin
        self._restarts: deque[str] = deque()  # to be replaced by new ones, one by one
        self._replacing: tuple[str, str] | None = None  # (new, old)

    @property
    def is_on(self) -> bool:
        """Replicas are ours to start."""
        return self.high > 0

    def set_bounds(self, low: int, high: int) -> None:
        self.low, self.high = low, max(low, high)
        self.target = max(low, min(self.target, self.high))

    @property
    def is_anybody_coming(self) -> bool:
        """Or there; or replicas are not ours to start."""
        return not self.is_on or bool(self._serving())

    def figures(self, counts: Counts, now: float) -> FleetFigures:
        """What the autoscaler looks at."""
        launched = [r for r in self._fleet if r.facts.is_launched]
        states = [r.state for r in launched]
        slots = [r.slots for r in launched if r.state is State.READY] or [self._fleet.slots]
        starts = ["asleep"] * states.count(State.ASLEEP) + ["cold"]
        return FleetFigures(
            low=self.low,
            high=self.high,
            target=self.target,
            num_ready=states.count(State.READY),
            ready_in_s=[self._ready_in_s(r.name, now) for r in launched if r.state is State.STARTING],
            next_start_s=[self._start_s.get(origin, START_S) for origin in starts],
            slots=sum(slots) / len(slots),
            **counts._asdict(),
        )

    def _ready_in_s(self, name: str, now: float) -> float:
        """Of one that is started again nobody knows since when: as of one that begins."""
        begun = self._begun.get(name, _Begun(now, "cold"))
        return max(0.0, begun.at + self._start_s.get(begun.origin, START_S) - now)

    def restart(self, names: Iterable[str]) -> None:
        """Replace these one after another, each by a new one that is there before it goes."""
        self._restarts.extend(names)

    def aim(self, figures: FleetFigures, now: float) -> None:
        self.target = max(self.low, min(self.high, self._autoscale(figures, now)))

    def starts(self, now: float) -> list[Start]:
        """Those that are too few, those asleep first."""
        if not self.is_on:
            return []
        self._begin_replacing()
        lacking = self.target + (self._replacing is not None) - len(self._serving())
        asleep = [r for r in self._fleet if r.facts.is_launched and r.state is State.ASLEEP]
        actions: list[Start] = []
        for replica in asleep[: max(0, lacking)]:
            self._fleet.set_state(replica, State.STARTING, now)
            actions.append(Start(replica.name, "asleep"))
        for _ in range(lacking - len(actions)):
            actions.append(Start(self._new_name(), "cold"))
            facts = ReplicaFacts(name=actions[-1].name, state=State.STARTING, is_launched=True)
            self._fleet.put(facts, now)
        for action in actions:
            self._begun[action.name] = _Begun(now, action.origin)
        if self._replacing is not None and not self._replacing[0]:
            self._replacing = (actions[-1].name, self._replacing[1])
        return actions

    def surplus(self) -> list[str]:
        """Names of those that may go: one that was replaced, else the idlest of those too many, the newest first."""
        if not self.is_on:
            return []
        if self._replacing is not None:
            new, old = (self._fleet.by_name.get(name) for name in self._replacing)
            if new is not None and new.state is not State.READY:
                return []
            self._replacing = None
            return [] if new is None or old is None else [old.name]
        serving = self._serving()
        serving.sort(key=lambda r: (r.state is State.READY, r.num_own, -r.bit))
        return [r.name for r in serving[: max(0, len(serving) - self.target)]]

    def is_there(self, replica: Replica, now: float) -> None:
        """It is ready: its start is over."""
        begun = self._begun.pop(replica.name, None)
        if begun is not None:
            took_s = now - begun.at
            last = self._start_s.get(begun.origin, took_s)
            self._start_s[begun.origin] = last + self.MEMORY * (took_s - last)

    def emptied(self, replica: Replica) -> list[Stop]:
        """Nobody may be in flight there any more."""
        done = replica.state is State.DRAINING and not replica.in_flight and replica.facts.is_launched
        return [Stop(replica.name)] if done else []

    def _serving(self) -> list[Replica]:
        """Launched, and there or on the way."""
        gone = (State.DRAINING, State.ASLEEP)
        return [r for r in self._fleet if r.facts.is_launched and r.state not in gone]

    def _begin_replacing(self) -> None:
        """When the one before has gone."""
        if any(r.facts.is_launched and r.state is State.DRAINING for r in self._fleet):
            return
        while self._replacing is None and self._restarts:
            old = self._fleet.by_name.get(self._restarts.popleft())
            if old is not None and old.facts.is_launched and old.state is not State.DRAINING:
                self._replacing = ("", old.name)

    def _new_name(self) -> str:
        while True:
            self._num_started += 1
            name = f"replica-{self._num_started}"
            if name not in self._fleet.by_name:
                return name

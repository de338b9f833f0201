"""How many launched replicas there should be: the seam of the autoscaler, and starts and stops that follow from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from maitred.fleet.actions import Sleep, Start, Stop
from maitred.fleet.autoscale import FleetFigures
from maitred.fleet.config import FleetConfig
from maitred.fleet.replicas import Replica, ReplicaFacts, Replicas, State

EVERY_S = 1.0  # the autoscaler is asked
START_S = 10.0  # what a start is thought to take before one was seen

Autoscale = Callable[[FleetFigures, float], int]
"""(figures, now) -> how many launched replicas there should be; brought into [low, high]. Asked every second, and when
somebody comes while nobody serves. What it remembers must follow from what it was told."""


def as_asked(figures: FleetFigures, now: float) -> int:
    """As many replicas as there were, and at least one while a request is held or in flight."""
    return max(figures.target, int(figures.num_held + figures.num_in_flight > 0))


class Counts(NamedTuple):
    """Counts of requests, since the beginning; those in flight too at the moment."""

    num_held: int
    num_in_flight: int
    num_arrived: int
    num_ended: int  # on a replica
    served_s: float  # from a replica's slot to the end


class _Begun(NamedTuple):
    at: float
    origin: str


class Sizing:
    """Starts launched replicas until there are as many as there should be, and says which may go. Beyond those it keeps
    spares: `warm` ones are loaded and out of rotation, `asleep` ones have given their memory back.
    """

    MEMORY = 0.5  # of measured start times

    def __init__(self, config: FleetConfig, fleet: Replicas, autoscale: Autoscale) -> None:
        self._num_warm, self._num_spares = config.warm, config.warm + config.asleep
        self._fleet, self._autoscale = fleet, autoscale
        self.low = self.high = self.target = 0
        self._num_started = 0
        self._spares: set[str] = set()  # on their way, warm or asleep
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

    def is_spare(self, replica: Replica) -> bool:
        """Whether the replica stays out of rotation when it is ready."""
        return replica.name in self._spares

    def keep(self, replica: Replica) -> None:
        """Keep a sleeping replica as a spare, wanted or not."""
        self._spares.add(replica.name)

    def forget(self, replica: Replica) -> None:
        """Forget a replica that goes for good: if it was a spare, another takes its place."""
        self._spares.discard(replica.name)
        self._begun.pop(replica.name, None)

    # -- how many

    def figures(self, counts: Counts, now: float) -> FleetFigures:
        """Figures for the autoscaler."""
        serving = self._serving()
        slots = [r.slots for r in serving if r.state is State.READY] or [self._fleet.slots]
        starts = [0.0 for _ in self._spares_in(State.WARM)]
        starts += [self._start_s.get("asleep", START_S) for _ in self._spares_in(State.ASLEEP)]
        return FleetFigures(
            low=self.low,
            high=self.high,
            target=self.target,
            num_ready=sum(r.state is State.READY for r in serving),
            ready_in_s=[self._ready_in_s(r.name, now) for r in serving if r.state is State.STARTING],
            next_start_s=[*starts, self._start_s.get("cold", START_S)],
            slots=sum(slots) / len(slots),
            **counts._asdict(),
        )

    def _ready_in_s(self, name: str, now: float) -> float:
        """Seconds until a replica is ready; one started again, whose start is unknown, counts as beginning now."""
        begun = self._begun.get(name, _Begun(now, "cold"))
        return max(0.0, begun.at + self._start_s.get(begun.origin, START_S) - now)

    def aim(self, figures: FleetFigures, now: float) -> None:
        self.target = max(self.low, min(self.high, self._autoscale(figures, now)))

    # -- those too few

    def starts(self, now: float) -> list[Start]:
        """Start replicas that are too few: warm, then asleep, then new ones; then spares, of those too many."""
        if not self.is_on:
            return []
        actions = [*self._replacements(now), *self._stand_ins(now)]
        actions += self._starts_of(self._num_wanted - len(self._serving()), now)
        self._set_aside(now)
        for _ in range(self._num_spares - len(self._spares)):
            actions.append(self._start_cold(now))
            self._spares.add(actions[-1].name)
        return actions

    def _stand_ins(self, now: float) -> list[Start]:
        """Warm ones, also for those that are on their way, or out."""
        num_ready = sum(r.state is State.READY for r in self._serving())
        warm = self._spares_in(State.WARM)[: max(0, self.target - num_ready)]
        for replica in warm:
            self._spares.remove(replica.name)
            self._fleet.set_state(replica, State.READY, now)
        return [Start(replica.name, "warm") for replica in warm]

    def _starts_of(self, number: int, now: float) -> list[Start]:
        actions: list[Start] = []
        for replica in self._spares_in(State.ASLEEP)[: max(0, number)]:
            self._spares.remove(replica.name)
            self._fleet.set_state(replica, State.STARTING, now)
            self._begun[replica.name] = _Begun(now, "asleep")
            actions.append(Start(replica.name, "asleep"))
        coming = self._spares_in(State.STARTING)[: max(0, number - len(actions))]
        self._spares.difference_update(replica.name for replica in coming)
        return actions + [self._start_cold(now) for _ in range(number - len(actions) - len(coming))]

    def _start_cold(self, now: float) -> Start:
        start = Start(self._new_name(), "cold")
        self._fleet.put(ReplicaFacts(name=start.name, state=State.STARTING, is_launched=True), now)
        self._begun[start.name] = _Begun(now, start.origin)
        return start

    def is_there(self, replica: Replica, now: float) -> None:
        """Note that the replica is ready: its start is over."""
        begun = self._begun.pop(replica.name, None)
        if begun is not None:
            took_s = now - begun.at
            last = self._start_s.get(begun.origin, took_s)
            self._start_s[begun.origin] = last + self.MEMORY * (took_s - last)

    # -- those replaced

    def restart(self, names: Iterable[str]) -> None:
        """Replace these one after another, each by a new one that is there before it goes."""
        self._restarts.extend(names)

    def _replacements(self, now: float) -> list[Start]:
        """A new one for the next that is to go, when the one before has gone."""
        if self._replacing is not None or any(r.state is State.DRAINING for r in self._launched()):
            return []
        while self._restarts:
            old = self._fleet.by_name.get(self._restarts.popleft())
            if old is not None and old.facts.is_launched:
                start = self._start_cold(now)
                self._replacing = (start.name, old.name)
                return [start]
        return []

    # -- those too many

    def _set_aside(self, now: float) -> None:
        """Make spares of replicas too many, while there are too few spares."""
        for replica in self._too_many()[: max(0, self._num_spares - len(self._spares))]:
            self._spares.add(replica.name)
            if replica.state is State.READY:
                self._fleet.set_state(replica, State.WARM, now)

    def sleeps(self, now: float) -> list[Sleep]:
        """Spares that need not be warm."""
        warm = self._spares_in(State.WARM)
        tired = [r for r in warm if not r.in_flight][: max(0, len(warm) - self._num_warm)]
        for replica in tired:
            self._fleet.set_state(replica, State.ASLEEP, now)
        return [Sleep(replica.name) for replica in tired]

    def surplus(self) -> list[str]:
        """Names of those that may go: one that was replaced, else those too many."""
        if self._replacing is None:
            return [replica.name for replica in self._too_many()]
        new, old = (self._fleet.by_name.get(name) for name in self._replacing)
        if new is not None and new.state is not State.READY:
            return []
        self._replacing = None
        return [] if new is None or old is None else [old.name]

    def _too_many(self) -> list[Replica]:
        """The idlest first, of those the newest; none while one is being replaced."""
        if not self.is_on or self._replacing is not None:
            return []
        serving = self._serving()
        serving.sort(key=lambda r: (r.state is State.READY, r.num_own, -r.bit))
        return serving[: max(0, len(serving) - self.target)]

    def emptied(self, replica: Replica) -> list[Stop]:
        """Stop a draining replica once no request is in flight there and no KV there is awaited by another."""
        is_empty = not replica.in_flight and not self._fleet.work.num_here(replica.name)
        done = replica.state is State.DRAINING and is_empty and replica.facts.is_launched
        return [Stop(replica.name)] if done else []

    # -- spares and serving replicas

    @property
    def _num_wanted(self) -> int:
        """Replicas wanted in rotation or on their way there; one more while another is to go for it."""
        if self._replacing is None:
            return self.target
        old = self._fleet.by_name.get(self._replacing[1])
        return self.target + (old is not None and old.state is not State.DRAINING and not self.is_spare(old))

    def _launched(self) -> list[Replica]:
        return [r for r in self._fleet if r.facts.is_launched]

    def _serving(self) -> list[Replica]:
        """Launched replicas, there or on the way, spares left out."""
        return [r for r in self._launched() if r.state is not State.DRAINING and r.name not in self._spares]

    def _spares_in(self, state: State) -> list[Replica]:
        return [r for r in self._launched() if r.state is state and r.name in self._spares]

    def _new_name(self) -> str:
        while True:
            self._num_started += 1
            name = f"replica-{self._num_started}"
            if name not in self._fleet.by_name:
                return name

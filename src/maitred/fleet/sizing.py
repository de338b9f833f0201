"""How many launched replicas there should be: the autoscaler, and the starts and stops that follow from it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from maitred.config.field_checks import require_at_least
from maitred.fleet.actions import Sleep, Start, Stop
from maitred.fleet.config import FleetConfig
from maitred.fleet.replicas import FleetReplica, ReplicaFacts, Replicas, State

BETA_UP, BETA_DOWN = 1.0, 2.0  # start more below the first, stop some above the second: between them nothing happens
STEADY_S = 60.0  # no fewer replicas than at any moment of this long was needed
LOAD_S, SURGE_S = 30.0, 3.0  # time constants of the arrival rate: what stays, and what is new
CLEAR_S, CLEAR_STARTS = 5.0, 0.25  # a backlog may take so long, or so much of a start, to be cleared
DEFAULT_OBJECTIVE_S = 1.0
MIN_KNOWN_S = 5.0  # a first request is not a rate
MIN_TICK_S = 0.01
SURGE_SIGMAS = 3.0  # arrivals are more than usual when chance would hardly make them so many
NUM_REMEMBERED = 100.0  # requests over which service time is averaged


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleConfig:
    """When a fleet that is launched here has fewer replicas, and when more."""

    idle_s: float = 300.0
    """Without a request for so long (s), the last replica stops, where there need be none."""
    ttft_objective_s: float | None = None
    """How long (s) a request may wait for a replica; None is 1 s."""

    def __post_init__(self) -> None:
        require_at_least("idle_s", self.idle_s, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFigures:
    """A fleet of launched replicas at one moment. Counters only grow."""

    low: int
    """Fewest replicas there are to be."""
    high: int
    target: int
    """As decided last."""
    num_ready: int
    """Replicas in rotation: neither asleep, nor draining, nor kept warm beyond need."""
    ready_in_s: Sequence[float] = ()
    """Of each replica under way, the seconds until it is ready, as measured starts foretell."""
    next_start_s: Sequence[float] = (10.0,)
    """What the next starts would take, the quickest first: warm ones, then asleep, then cold; the last goes for all
    that follow."""
    slots: float
    """Requests that one replica works on at once; of unlike ones the mean."""
    num_in_flight: int = 0
    num_held: int = 0
    num_arrived: int = 0
    """Counter: requests that came."""
    num_ended: int = 0
    """Counter: requests that ended on a replica."""
    served_s: float = 0.0
    """Counter: their times from a replica's slot to the end, in seconds."""


class AimedAt(NamedTuple):
    """How many replicas there shall be in rotation, those under way included."""

    num_replicas: int
    why: str  # load, backlog, idle, bounds or steady (what was needed a moment ago)


class Autoscaler:
    """Asked about once a second. What it remembers follows from what it was told, so that a log replays."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._idle_s = config.idle_s
        self._objective_s = config.ttft_objective_s or DEFAULT_OBJECTIVE_S
        self._load_rate, self._surge_rate = _Rate(LOAD_S), _Rate(SURGE_S)  # arrivals/s
        self._service = _MeanService()
        self._needs: deque[tuple[float, int]] = deque()  # (when, how many), fewer and fewer: a maximum of STEADY_S
        self._busy_at: float | None = None  # when there was last a request
        self._asked_at: float | None = None
        self._num_arrived = 0
        self._fewer_at = -math.inf

    def __call__(self, figures: FleetFigures, now: float) -> int:
        return self.decide(figures, now).num_replicas

    def decide(self, figures: FleetFigures, now: float) -> AimedAt:
        """How many there shall be, from `low` to `high`."""
        self._learn(figures, now)
        wanted, why = self._wanted(figures, now)
        bounded = min(max(wanted, figures.low), figures.high)
        if bounded < figures.target:
            self._fewer_at = now
        return AimedAt(bounded, why if bounded == wanted else "bounds")

    def _wanted(self, figures: FleetFigures, now: float) -> tuple[int, str]:
        if self._is_idle(figures, now):
            self._needs.clear()
            return 0, "idle"
        usual = self._load_rate
        steady = self._staffed(usual.per_s, BETA_UP, figures.slots)
        at_most = self._staffed(usual.per_s + usual.noise_per_s, BETA_DOWN, figures.slots)
        backlog = self._needed_for_backlog(figures)
        self._note(max(at_most, backlog, 1), now)
        recent = self._needs[0][1]
        if backlog > figures.target:
            return backlog, "backlog"
        if steady > figures.target and now - self._fewer_at >= STEADY_S:
            return steady, "load"
        if recent < figures.target and not figures.num_held:
            return recent, "load"
        return max(1, figures.target), "steady"

    # -- what is known

    def _learn(self, figures: FleetFigures, now: float) -> None:
        passed_s = 0.0 if self._asked_at is None else max(0.0, now - self._asked_at)
        num_new = figures.num_arrived - self._num_arrived
        self._asked_at, self._num_arrived = now, figures.num_arrived
        for rate in (self._load_rate, self._surge_rate):
            rate.count(num_new, passed_s)
        self._service.learn(figures.num_ended, figures.served_s)

    def _is_idle(self, figures: FleetFigures, now: float) -> bool:
        """Whether there has been no request for `idle_s`, or none since the beginning."""
        if figures.num_in_flight or figures.num_held:
            self._busy_at = now
        if self._busy_at is None:
            return True
        return self._busy_at + self._idle_s <= now and not figures.num_in_flight and not figures.num_held

    def _note(self, need: int, now: float) -> None:
        needs = self._needs
        while needs and needs[-1][1] <= need:
            needs.pop()
        needs.append((now, need))
        while needs[0][0] <= now - STEADY_S:
            needs.popleft()

    # -- what is needed

    def _staffed(self, arrivals_per_s: float, beta: float, slots: float) -> int:
        """Replicas for so many arrivals; 0 until the mean service time is known."""
        if self._service.mean_s is None:
            return 0
        offered = arrivals_per_s * self._service.mean_s
        return math.ceil((offered + beta * math.sqrt(offered)) / slots - 1e-9)

    def _needed_for_backlog(self, figures: FleetFigures) -> int:
        """Replicas there, under way, and as many more as waiting asks for; 0 when no more are needed."""
        coming = figures.num_ready + len(figures.ready_in_s)
        if self._service.mean_s is None:  # no request has ended: one replica, which tells how fast it is
            return max(coming, 1) if figures.num_held and not coming else 0
        start_s = figures.next_start_s[0] if figures.next_start_s else 0.0
        held = self._held_after(figures, start_s)
        per_s = figures.slots / self._service.mean_s  # of one replica
        if held <= self._objective_s * per_s * max(1, coming):
            return 0
        more = math.ceil(held / (per_s * max(self._objective_s, start_s * CLEAR_STARTS, CLEAR_S)))
        return max(coming + more, self._staffed(self._arrivals_per_s, BETA_UP, figures.slots))

    @property
    def _arrivals_per_s(self) -> float:
        """The usual rate, or the recent one where that is more than chance."""
        usual, lately = self._load_rate, self._surge_rate
        noise = SURGE_SIGMAS * math.hypot(lately.noise_per_s, usual.noise_per_s)
        return lately.per_s if lately.per_s > usual.per_s + noise else usual.per_s

    def _held_after(self, figures: FleetFigures, seconds: float) -> float:
        """Requests held then, if no more replicas are started: a fluid of requests over full replicas."""
        assert self._service.mean_s is not None
        per_s = figures.slots / self._service.mean_s
        joining_s = sum(max(0.0, seconds - ready_in_s) for ready_in_s in figures.ready_in_s)
        num_joined = sum(ready_in_s <= seconds for ready_in_s in figures.ready_in_s)
        free = max(0.0, (figures.num_ready + num_joined) * figures.slots - figures.num_in_flight)
        served = per_s * (figures.num_ready * seconds + joining_s)
        return figures.num_held + self._arrivals_per_s * seconds - served - free


class _Rate:
    """Events per second, the older the less they count; as if nothing were known before the first."""

    def __init__(self, time_constant_s: float) -> None:
        self._time_constant_s = time_constant_s
        self._num, self._passed_s = 0, 0.0  # since the last tick that counted
        self._weight = 0.0  # of what is known, up to 1
        self._sum = 0.0

    @property
    def per_s(self) -> float:
        return self._sum / max(self._weight, 1 - math.exp(-MIN_KNOWN_S / self._time_constant_s))

    @property
    def noise_per_s(self) -> float:
        """Standard deviation of `per_s`, if arrivals are a Poisson process."""
        return math.sqrt(self.per_s / (2 * self._time_constant_s))

    def count(self, num: int, passed_s: float) -> None:
        self._num += num
        self._passed_s += passed_s
        if self._passed_s < MIN_TICK_S:
            return
        share = -math.expm1(-self._passed_s / self._time_constant_s)
        self._sum += share * (self._num / self._passed_s - self._sum)
        self._weight += share * (1 - self._weight)
        self._num, self._passed_s = 0, 0.0


class _MeanService:
    """How long a request holds its slot, over about NUM_REMEMBERED of them."""

    def __init__(self) -> None:
        self._num_ended, self._served_s = 0, 0.0  # the counters as they were
        self._weight, self._sum = 0.0, 0.0
        self.mean_s: float | None = None

    def learn(self, num_ended: int, served_s: float) -> None:
        num, seconds = num_ended - self._num_ended, served_s - self._served_s
        self._num_ended, self._served_s = num_ended, served_s
        if num <= 0:
            return
        fading = math.exp(-num / NUM_REMEMBERED)
        self._weight = self._weight * fading + num
        self._sum = self._sum * fading + seconds
        self.mean_s = max(1e-3, self._sum / self._weight)


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

    def is_spare(self, replica: FleetReplica) -> bool:
        """Whether the replica stays out of rotation when it is ready."""
        return replica.name in self._spares

    def keep(self, replica: FleetReplica) -> None:
        """Keep a sleeping replica as a spare, wanted or not."""
        self._spares.add(replica.name)

    def forget(self, replica: FleetReplica) -> None:
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

    def is_there(self, replica: FleetReplica, now: float) -> None:
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

    def _too_many(self) -> list[FleetReplica]:
        """The idlest first, of those the newest; none while one is being replaced."""
        if not self.is_on or self._replacing is not None:
            return []
        serving = self._serving()
        serving.sort(key=lambda r: (r.state is State.READY, r.num_own, -r.bit))
        return serving[: max(0, len(serving) - self.target)]

    def emptied(self, replica: FleetReplica) -> list[Stop]:
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

    def _launched(self) -> list[FleetReplica]:
        return [r for r in self._fleet if r.facts.is_launched]

    def _serving(self) -> list[FleetReplica]:
        """Launched replicas, there or on the way, spares left out."""
        return [r for r in self._launched() if r.state is not State.DRAINING and r.name not in self._spares]

    def _spares_in(self, state: State) -> list[FleetReplica]:
        return [r for r in self._launched() if r.state is state and r.name in self._spares]

    def _new_name(self) -> str:
        while True:
            self._num_started += 1
            name = f"replica-{self._num_started}"
            if name not in self._fleet.by_name:
                return name

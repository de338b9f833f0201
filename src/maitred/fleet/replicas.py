"""The replicas of a fleet: facts, state, health, requests in flight, and sets of them as bits of integers. Pure.

Outlier ejection as in Envoy; retry budget as in Finagle and Beyer et al., "Site Reliability Engineering", chapter 22.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice
from typing import NamedTuple

from maitred.core.errors import EngineDead, MaitredError, Unavailable
from maitred.fleet.config import FleetConfig, Tier, tiers_of
from maitred.fleet.disagg import WorkBook, WorkerFacts
from maitred.fleet.fleet_request import Failure, FailureKind, FleetRequest

MAX_CACHED_SETS = 64


class State(str, Enum):
    STARTING = "starting"
    READY = "ready"
    WARM = "warm"  # loaded, and kept out of rotation until there is need
    ASLEEP = "asleep"
    DRAINING = "draining"
    EJECTED = "ejected"


class Kind(str, Enum):
    MAITRED = "maitred"
    FOREIGN = "foreign"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Facts that a replica, or the command line, tells of it."""

    name: str
    url: str = ""
    kind: Kind = Kind.MAITRED
    state: State = State.READY  # starting, ready or asleep
    slots: int | None = None  # None is the configuration's
    models: tuple[str, ...] | None = None  # None until it has told them; adapters among them
    tier: str = ""
    weight: float | None = None  # speed beside the others', as the user says
    tokens_per_s: float | None = None  # speed, of prompt tokens, as it says itself
    fingerprint: str | None = None  # equal where the same numbers are computed
    is_launched: bool = False  # by us, so it may be started and stopped
    has_beats: bool = False  # its stream of events is open, so it is to be heard of four times a second
    pid: int | None = None
    error: str | None = None
    worker: WorkerFacts | None = None  # that it may hand KV over, and what foretelling its times takes
    is_silent: bool = False  # it is there and not heard of, so nothing says when it will be
    memory_bytes: int | None = None  # weights and KV, as a launched one told when it had loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A message of a replica's stream of events; the first of a stream is a snapshot."""

    num_in_flight: int | None = None  # of all its clients; None says nothing of it
    stored: Sequence[int] = ()  # prefix keys that it has from now on
    removed: Sequence[int] = ()
    is_snapshot: bool = False  # it has what is stored here, and nothing else
    is_broken: bool = False  # the stream ended: nothing is known of its keys any more


class Use(NamedTuple):
    """The part of a request that decides which replicas it may use; requests of equal Use wait in one queue."""

    model: str | None
    tiers: int  # bits
    barred: int  # bits of replicas where it failed
    fingerprint: str | None
    background: bool = False  # its class: it takes no slot that another request could have


@dataclass(slots=True, eq=False)
class FleetReplica:
    """One of them, as the router knows it. Written by `Replicas` and `health`."""

    name: str
    facts: ReplicaFacts
    bit: int
    tier: int
    limit: int  # most in flight: slots and reserve
    state: State = State.STARTING
    speed: float = 1.0  # beside the others'; their mean is about 1
    in_flight: dict[str, FleetRequest] = field(default_factory=dict)
    num_own: int = 0  # samples that we have in flight there; each takes a slot
    num_background: int = 0  # of them, those of the class background, which the engine puts out for others
    num_others: int = 0  # in flight there for other clients, as it told
    load: int = 0  # others and our own, without the class background
    is_full: bool = False  # it said so, and its Retry-After is not over
    turn: float = 0.0  # of round_robin
    # of its health
    num_failures: int = 0  # in a row
    num_probes: int = 0  # since it was taken out
    ejected_for: FailureKind | None = None
    is_watched: bool = False  # for silence
    is_leaving: bool = False  # it drains of itself, and may come back
    drain_ends_at: float = 0.0
    full_until: float = 0.0
    heard_at: float = 0.0
    unready_since: float = 0.0
    error: str | None = None

    @property
    def slots(self) -> int:
        return self.facts.slots or 0

    @property
    def room(self) -> int:
        """How many more samples it may get: one at a time at least, whatever load of others it reports."""
        return max(1, self.limit - self.num_others) - self.num_own + self.num_background

    @property
    def num_idle_slots(self) -> int:
        """Slots for the class background; it takes none of the reserve."""
        return self.slots - self.num_others - self.num_own


class Due(Enum):
    """An event of a replica that may fall due."""

    SILENCE = "silence"
    PROBE = "probe"
    FULL = "full"
    BACK = "back"  # it is not ready any more, and should be again


class ReplicaDue(NamedTuple):
    """An event of one replica, due."""

    what: Due
    replica: FleetReplica


class Replicas:
    """All there are, by name and by bit. `ready` and `room` are sets of bits, kept up to date by the methods here."""

    def __init__(self, config: FleetConfig) -> None:
        self._config = config
        self.tiers: tuple[Tier, ...] = tiers_of(config)
        self.by_name: dict[str, FleetReplica] = {}
        self._by_bit: list[FleetReplica | None] = []
        self.ready = 0
        self.room = 0  # of those ready
        self.idle = 0  # of those with room, those with a slot for the class background
        self.at_load: dict[int, int] = {}  # load -> who has it
        self.last_left_at = 0.0
        self.work = WorkBook()
        self.version = 0  # rises when anything but load changes
        self.facts_version = 0  # rises when a replica comes, goes or tells other facts
        self.models: dict[str, int] = {}  # told, by whom
        self._tier_bits = [0] * len(self.tiers)
        self._fingerprints: dict[str, int] = {}
        self._usable: dict[Use, int] = {}
        self._listed: dict[int, tuple[FleetReplica, ...]] = {}
        self._speeds: dict[int, float] = {}
        self._by_speed: list[tuple[list[FleetReplica], int]] = []  # by name, and as bits

    @property
    def slots(self) -> int:
        """Slots of a replica that tells none."""
        return self._config.slots

    def __iter__(self) -> Iterator[FleetReplica]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def at(self, bit: int) -> FleetReplica:
        replica = self._by_bit[bit]
        assert replica is not None, f"nobody has bit {bit}"
        return replica

    def of(self, bits: int) -> tuple[FleetReplica, ...]:
        """The replicas of a set, by bit."""
        found = self._listed.get(bits)
        if found is None:
            if len(self._listed) >= MAX_CACHED_SETS:
                self._listed.clear()
            found = self._listed[bits] = tuple(self.at(bit) for bit in bits_of(bits))
        return found

    def speed_of(self, bits: int) -> float:
        """Summed speed of a set."""
        found = self._speeds.get(bits)
        if found is None:
            found = self._speeds[bits] = sum([replica.speed for replica in self.of(bits)])
        return found

    def load_of(self, bits: int) -> int:
        """Summed load of a set."""
        return sum([load * (there & bits).bit_count() for load, there in self.at_load.items()])

    def least_loaded(self, bits: int, most: int) -> Iterator[FleetReplica]:
        """Replicas of a set that are first of their speed, by load, then by name: so many, or some more."""
        if not self._by_speed:
            listed: dict[float, list[FleetReplica]] = {}
            for name in sorted(self.by_name):
                listed.setdefault(self.by_name[name].speed, []).append(self.by_name[name])
            self._by_speed = [(each, sum([1 << replica.bit for replica in each])) for each in listed.values()]
        for replicas, alike in self._by_speed:
            num_left = most
            for load in sorted(self.at_load):
                there = self.at_load[load] & alike & bits
                if there.bit_count() > 2 * most:
                    yield from islice((replica for replica in replicas if there >> replica.bit & 1), num_left)
                else:
                    yield from (self.at(bit) for bit in bits_of(there))
                num_left -= there.bit_count()
                if num_left <= 0:
                    break

    # -- replicas that come and go

    def put(self, facts: ReplicaFacts, now: float) -> FleetReplica:
        """A new one, or new facts of one that there is; its state is the caller's to set."""
        replica = self.by_name.get(facts.name)
        if facts.slots is None:
            facts = replace(facts, slots=self._config.slots)
        if replica is not None and replace(facts, worker=replica.facts.worker) == replica.facts:
            replica.facts = facts  # what its steps take was measured anew
            return replica
        if replica is None:
            bit = next((bit for bit, there in enumerate(self._by_bit) if there is None), len(self._by_bit))
            replica = FleetReplica(facts.name, facts, bit, 0, 0, heard_at=now, unready_since=now)
            if bit == len(self._by_bit):
                self._by_bit.append(None)
            self._by_bit[bit] = self.by_name[facts.name] = replica
            self._move_load(replica, 0)
        replica.facts = facts
        replica.tier = self._tier_of(facts)
        replica.limit = self._config.limit_of(replica.slots)
        self._list_anew()
        self.note_room(replica)
        return replica

    def remove(self, replica: FleetReplica, now: float) -> None:
        self.last_left_at = now
        self.work.gone(replica.name)
        del self.by_name[replica.name]
        self._by_bit[replica.bit] = None
        self.ready &= ~(1 << replica.bit)
        self.room &= ~(1 << replica.bit)
        self.idle &= ~(1 << replica.bit)
        self._leave_load(replica)
        self._list_anew()

    def set_state(self, replica: FleetReplica, state: State, now: float) -> None:
        if replica.state is State.READY and state is not State.READY:
            replica.unready_since = now
        replica.state = state
        replica.is_leaving &= state is State.DRAINING
        flag = 1 << replica.bit
        self.ready = self.ready | flag if state is State.READY else self.ready & ~flag
        self._changed()
        self.note_room(replica)

    # -- requests in flight

    def bind(self, replica: FleetReplica, request: FleetRequest) -> None:
        replica.in_flight[request.request_id] = request
        self._count(replica, request, request.num_samples)

    def free(self, replica: FleetReplica, request: FleetRequest) -> None:
        del replica.in_flight[request.request_id]
        self._count(replica, request, -request.num_samples)

    def _count(self, replica: FleetReplica, request: FleetRequest, num_samples: int) -> None:
        replica.num_own += num_samples
        replica.num_background += num_samples if request.background else 0
        self._note_load(replica)

    def note_others(self, replica: FleetReplica, num_in_flight: int) -> None:
        """So many are in flight there, as it says."""
        replica.num_others = max(0, num_in_flight - replica.num_own)
        self._note_load(replica)

    def _note_load(self, replica: FleetReplica) -> None:
        self._move_load(replica, replica.num_own - replica.num_background + replica.num_others)
        self.note_room(replica)

    def note_room(self, replica: FleetReplica) -> None:
        """Note that the replica's load, or its report of it, has changed."""
        flag = 1 << replica.bit
        has_room = replica.state is State.READY and not replica.is_full and replica.room > 0
        self.room = self.room | flag if has_room else self.room & ~flag
        self.idle = self.idle | flag if has_room and replica.num_idle_slots > 0 else self.idle & ~flag

    def _move_load(self, replica: FleetReplica, load: int) -> None:
        self._leave_load(replica)
        self.at_load[load] = self.at_load.get(load, 0) | 1 << replica.bit
        replica.load = load

    def _leave_load(self, replica: FleetReplica) -> None:
        left = self.at_load.pop(replica.load, 0) & ~(1 << replica.bit)
        if left:
            self.at_load[replica.load] = left

    # -- replicas that may be used

    def usable(self, use: Use) -> int:
        """Ready replicas that a request may use, with room or not; those where it failed only if there is no other."""
        found = self._usable.get(use)
        if found is None:
            bits = self.ready & self.known(use)
            found = self._usable[use] = bits & ~use.barred or bits
        return found

    def known(self, use: Use) -> int:
        """Replicas that it may use if they are ready, or will be."""
        bits = 0
        for tier, of_tier in enumerate(self._tier_bits):
            if use.tiers >> tier & 1:
                bits |= of_tier
        if use.model is not None:
            bits &= self.models.get(use.model, 0)
        if use.fingerprint is not None:
            bits &= self._fingerprints.get(use.fingerprint, 0)
        return bits

    def in_tier(self, tier: int) -> int:
        return self._tier_bits[tier]

    def _tier_of(self, facts: ReplicaFacts) -> int:
        """The tier of its name, of its URL, or the first that lists no replicas; else the last."""
        for at, tier in enumerate(self.tiers):
            if facts.tier and facts.tier == tier.name:
                return at
            if facts.url and facts.url in tier.replicas:
                return at
        return next((at for at, tier in enumerate(self.tiers) if not tier.replicas), len(self.tiers) - 1)

    def _list_anew(self) -> None:
        self.models, self._fingerprints = {}, {}
        self._tier_bits = [0] * len(self.tiers)
        for replica in self:
            flag = 1 << replica.bit
            self._tier_bits[replica.tier] |= flag
            for model in replica.facts.models or ():
                self.models[model] = self.models.get(model, 0) | flag
            fingerprint = replica.facts.fingerprint
            if fingerprint is not None:
                self._fingerprints[fingerprint] = self._fingerprints.get(fingerprint, 0) | flag
        before = 0
        for tier, bits in zip(self.tiers, self._tier_bits, strict=True):
            if tier.model is not None:
                self.models = {name: at | bits if at & before else at for name, at in self.models.items()}
            before |= bits
        self._measure_speeds()
        self.facts_version += 1
        self._changed()

    def _measure_speeds(self) -> None:
        """A weight that the user gave, else its own figure beside the mean of those told, else 1."""
        told = [r.facts.tokens_per_s for r in self if r.facts.tokens_per_s and r.facts.weight is None]
        mean = sum(told) / len(told) if told else 1.0
        for replica in self:
            facts = replica.facts
            replica.speed = facts.weight or (facts.tokens_per_s / mean if facts.tokens_per_s else 1.0)

    def _changed(self) -> None:
        self.version += 1
        self._usable.clear()
        self._listed.clear()
        self._speeds.clear()
        self._by_speed.clear()

    def check_invariants(self) -> None:
        """Asserts that the sets agree with the replicas; slow."""
        for replica in self:
            assert self.at(replica.bit) is replica
            assert replica.load == replica.num_own - replica.num_background + replica.num_others
            assert self.at_load[replica.load] >> replica.bit & 1
            assert bool(self.ready >> replica.bit & 1) == (replica.state is State.READY)
            has_room = replica.state is State.READY and not replica.is_full and replica.room > 0
            assert bool(self.room >> replica.bit & 1) == has_room
            assert bool(self.idle >> replica.bit & 1) == (has_room and replica.num_idle_slots > 0)
        assert (self.ready | self.room) >> len(self._by_bit) == 0
        assert sum(there.bit_count() for there in self.at_load.values()) == len(self)


def bits_of(bits: int) -> Iterator[int]:
    """The numbers of the bits that are set, the lowest first."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


MIN_PROBE_S, MAX_PROBE_S = 0.25, 2.0  # between two probes of one that is out; doubled with each that fails


class RetryBudget:
    """A token bucket: each request brings a share of a retry, and one replica's death can always be paid."""

    MIN_BURST = 10

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._burst = self._left = float(self.MIN_BURST)

    def cover(self, limit: int) -> None:
        """Let the budget pay for a replica with at most `limit` requests in flight."""
        if limit > self._burst:
            self._left += limit - self._burst
            self._burst = float(limit)

    def arrived(self) -> None:
        self._left = min(self._burst, self._left + self._ratio)

    def take(self) -> bool:
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True


class Health:
    """Takes replicas out and back in. Never so many that less than half of them are left, unless they are gone."""

    def __init__(self, config: FleetConfig, fleet: Replicas) -> None:
        self._config, self._fleet = config, fleet
        self.budget = RetryBudget(config.retry_ratio)

    def failed(self, replica: FleetReplica, failure: Failure, now: float) -> bool:
        """An attempt failed there; FULL is none. True if it is taken out by that."""
        replica.num_failures += 1
        replica.error = failure.message or failure.kind.value
        in_a_row = replica.num_failures >= self._config.max_failures
        if failure.kind is FailureKind.RESET or (in_a_row and self.may_eject()):
            return self.eject(replica, failure.kind, now)
        return False

    def may_eject(self) -> bool:
        """Would at least half be left without one more?"""
        num_ready = self._fleet.ready.bit_count()
        num_out = sum(1 for replica in self._fleet if replica.state is State.EJECTED)
        return 2 * (num_ready - 1) >= num_ready + num_out

    def eject(self, replica: FleetReplica, kind: FailureKind, now: float) -> bool:
        """Take the replica out; False if it is not in rotation."""
        if replica.state is not State.READY:
            return False
        replica.num_probes, replica.ejected_for = 0, kind
        self._fleet.set_state(replica, State.EJECTED, now)
        return True

    def next_probe_s(self, replica: FleetReplica) -> float:
        """(s) until the next one."""
        replica.num_probes += 1
        return min(MAX_PROBE_S, MIN_PROBE_S * 2.0 ** (replica.num_probes - 1))

    def why_no_more(self, request: FleetRequest, replica: FleetReplica) -> MaitredError | None:
        """Why a request that failed gets no other attempt; None counts one more and lets it."""
        what = f"request {request.request_id}: the replica that had it failed"  # which, and how, the log tells
        if request.num_deaths >= self._config.max_deaths:
            return EngineDead(f"{what}, and {request.num_deaths} have by now; it is given to no other")
        if request.has_begun:
            return self._why_no_resume(request, replica, what)
        if request.num_retries >= self._config.max_retries:
            return Unavailable(f"{what}; it was tried {request.num_attempts} times")
        if not self.budget.take():
            return Unavailable(f"{what}; too many requests are tried again at this time")
        request.num_retries += 1
        return None

    def _why_no_resume(self, request: FleetRequest, replica: FleetReplica, what: str) -> MaitredError | None:
        if not self.can_resume(request, replica):
            return EngineDead(f"{what} in the middle of the answer, which cannot be gone on with elsewhere")
        if self._config.resume == "exact":
            request.fingerprint = replica.facts.fingerprint
        return None

    def can_resume(self, request: FleetRequest, replica: FleetReplica) -> bool:
        """May another replica go on where this one is?"""
        knows = self._config.resume == "always" or replica.facts.fingerprint is not None
        return request.can_resume and self._config.resume != "never" and knows

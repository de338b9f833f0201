"""Which replica a request goes to: filter, score, pick. A balance is a score; the bound on load is a filter for all.

Loads and prefills count in a device's own seconds, which is divided by its speed.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, inf
from typing import NamedTuple

import msgspec

from maitred.fleet.disagg import Option
from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.replicas import FleetReplica, Replicas, bits_of

NUM_POINTS = 96  # of a replica of speed 1: shares of the keys differ by some 10 %
MAX_POINTS = 1024


def hash_of(text: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class HashRing:
    """Names on a ring, each with points in proportion to its weight."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._num_points: dict[str, int] = {}

    def set_weights(self, weights: dict[str, float]) -> None:
        """Set the names on the ring; only the points of those that changed move."""
        for name in [name for name in self._num_points if name not in weights]:
            self._set(name, 0)
        for name, weight in weights.items():
            self._set(name, max(1, min(MAX_POINTS, round(NUM_POINTS * weight))))

    def owner(self, key: int, allowed: Container[str]) -> str | None:
        """The first of `allowed` from the key on, 64 bits; None when none of them is on the ring."""
        points = self._points
        start = bisect_right(points, (key, ""))
        for at in range(len(points)):
            name = points[(start + at) % len(points)][1]
            if name in allowed:
                return name
        return None

    def _set(self, name: str, num_points: int) -> None:
        had = self._num_points.get(name, 0)
        if num_points < had:
            kept = {(hash_of(f"{name}#{i}"), name) for i in range(num_points)}
            self._points = [point for point in self._points if point[1] != name or point in kept]
        for i in range(had, num_points):
            insort(self._points, (hash_of(f"{name}#{i}"), name))
        self._num_points[name] = num_points
        if not num_points:
            del self._num_points[name]


MAX_SESSIONS = 65_536
MAX_CANDIDATES = 32  # that a choice tells of


class Candidate(msgspec.Struct, frozen=True):
    """A replica as the choice saw it; smaller scores are better, and of equal ones the smaller load."""

    replica: str
    score: float | None  # in JSON null, for infinity, is never picked
    load: float  # samples in flight over its speed
    cached_tokens: int  # of the prompt, that it is thought to have


class Choice(NamedTuple):
    """A replica chosen for a request, and why."""

    replica: str
    prefill: str | None = None  # another replica that computes the prompt and hands its KV over
    ranked: Sequence[tuple[float, float, str, int]] = ()  # score, load, replica, cached tokens
    fetch_from: str | None = None  # another replica, whose KV of a prefix is fetched before the prompt is computed
    foretold: Sequence[Option] = ()  # where workers told what they are: ways to serve it, the best first

    @property
    def candidates(self) -> list[Candidate]:
        """Candidates within all filters, the best first, at most MAX_CANDIDATES."""
        return [Candidate(replica, score, load, cached) for score, load, replica, cached in self.ranked]


Cached = Mapping[int, int]  # bit number of a replica -> prompt tokens that it is thought to have; none is 0
Score = Callable[[FleetRequest, Sequence[FleetReplica], Cached], list[float]]
"""A number for each candidate; the smallest is picked, infinity never. Ties go by load in own seconds, then by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """One way to choose; see `BALANCES`."""

    source: str
    score: Score
    chosen: Callable[[FleetRequest, FleetReplica], None] | None = None
    met: Callable[[int, FleetReplica], None] | None = None
    """Another router sent this session there."""
    looks_at_prefixes: bool = False
    is_alike: bool = False
    """Replicas of equal speed, load and cached tokens have equal scores, and of a larger load no smaller ones."""


def choose(
    request: FleetRequest,
    fleet: Replicas,
    room: int,
    usable: int,
    *,
    balance: Balance,
    index: PrefixIndex,
    ratio: float,
) -> tuple[FleetReplica, Choice]:
    """Choose one replica of `room` (bits, not empty: those of `usable` that have room). Writes `num_cached`."""
    room = _first_tier(fleet, room)
    looked_at = room if balance.looks_at_prefixes else 0
    cached = cached_tokens(request, index, looked_at)
    candidates: Sequence[FleetReplica] = fleet.of(room) if not balance.is_alike else _worth_ranking(fleet, room, cached)
    share = ratio * fleet.load_of(usable) / fleet.speed_of(usable)
    candidates = within_bound(candidates, share, request.num_samples)
    scores = balance.score(request, candidates, cached)
    ranked = _rank(candidates, scores, cached)
    replica = fleet.by_name[ranked[0][2]]
    if balance.chosen is not None:
        balance.chosen(request, replica)
    if not looked_at:
        cached = cached_tokens(request, index, 1 << replica.bit)
    request.num_cached = min(cached.get(replica.bit, 0), request.num_inputs - 1)
    return replica, Choice(replica.name, None, ranked)


def _rank(
    candidates: Sequence[FleetReplica], scores: list[float], cached: Cached
) -> list[tuple[float, float, str, int]]:
    """Fields of Candidate, the best first; of many only those that are told of."""
    worst = sorted(scores)[MAX_CANDIDATES - 1] if len(scores) > MAX_CANDIDATES else inf
    ranked = [
        (score, r.load / r.speed, r.name, cached.get(r.bit, 0))
        for score, r in zip(scores, candidates, strict=True)
        if score <= worst and score < inf
    ]
    ranked.sort()
    del ranked[MAX_CANDIDATES:]
    return ranked


def cached_tokens(request: FleetRequest, index: PrefixIndex, bits: int) -> dict[int, int]:
    """Prompt tokens that each replica of a set is thought to have, by bit number; replicas with none are left out."""
    keys = request.keys
    found: dict[int, int] = {}
    for num_keys, holders in index.hits(keys, bits) if keys and bits else ():
        tokens = request.num_inputs * num_keys // len(keys)
        for bit in bits_of(holders):
            found[bit] = tokens
    return found


# -- filters


def _first_tier(fleet: Replicas, bits: int) -> int:
    if len(fleet.tiers) == 1:
        return bits
    return next(here for tier in range(len(fleet.tiers)) if (here := bits & fleet.in_tier(tier)))


def _listed(fleet: Replicas, bits: int) -> list[FleetReplica]:
    """A set that is looked at once."""
    return [fleet.at(bit) for bit in bits_of(bits)]


def _worth_ranking(fleet: Replicas, room: int, cached: Cached) -> list[FleetReplica]:
    """Candidates without those that come after as many of their speed as are told of, none of which has cached tokens:
    a choice takes no more time where there are more replicas.
    """
    others = room
    for bit in cached:
        others &= ~(1 << bit)
    return [*_listed(fleet, room & ~others), *fleet.least_loaded(others, MAX_CANDIDATES)]


def within_bound(candidates: Sequence[FleetReplica], share: float, num_samples: int) -> Sequence[FleetReplica]:
    """Candidates that stay at ceil(ratio x mean load) + 1 or below with the request; all when none would.

    The mean is of all that it may use, those without room too; of unlike devices each has its `share` by speed.
    """
    within = [r for r in candidates if r.load + num_samples <= ceil(share * r.speed) + 1]
    return within or candidates


# -- scores


def _loads(candidates: Sequence[FleetReplica]) -> list[float]:
    return [(r.load + 1) / r.speed for r in candidates]


def least_load(fleet: Replicas) -> Balance:
    """Fewest in flight, in own seconds."""
    return Balance(
        source="join the shortest queue: Winston, Journal of Applied Probability, 1977",
        score=lambda request, candidates, cached: _loads(candidates),
        is_alike=True,
    )


def two_choices(fleet: Replicas) -> Balance:
    """The one with fewer in flight of two drawn by the hash of the request's id."""

    def score(request: FleetRequest, candidates: Sequence[FleetReplica], cached: Cached) -> list[float]:
        draw, count = hash_of(request.request_id), len(candidates)
        first = draw % count
        drawn = {first, (first + 1 + (draw >> 32) % max(1, count - 1)) % count}
        return [(r.load + 1) / r.speed if i in drawn else inf for i, r in enumerate(candidates)]

    return Balance(source="Mitzenmacher, IEEE TPDS, 2001", score=score)


def round_robin(fleet: Replicas) -> Balance:
    """Each replica in turn, one of twice the speed twice as often; one that was away comes back without arrears."""
    latest = 0.0

    def chosen(request: FleetRequest, replica: FleetReplica) -> None:
        nonlocal latest
        latest = max(latest, replica.turn)
        replica.turn = latest + 1.0 / replica.speed

    return Balance(
        source="stride scheduling: Waldspurger and Weihl, MIT, 1995",
        score=lambda request, candidates, cached: [max(r.turn, latest) for r in candidates],
        chosen=chosen,
    )


def by_hash(fleet: Replicas) -> Balance:
    """The owner of the key on a ring; when that is over the bound, the next. Without a key of its own, a request goes
    by the first of its prefix keys, and without those by its id.
    """
    ring, version = HashRing(), -1

    def score(request: FleetRequest, candidates: Sequence[FleetReplica], cached: Cached) -> list[float]:
        nonlocal version
        if version != fleet.version:
            ring.set_weights({r.name: r.speed for r in fleet.of(fleet.ready)})
            version = fleet.version
        owner = ring.owner(ring_key(request), {r.name for r in candidates})
        return [0.0 if r.name == owner else 1.0 for r in candidates]

    return Balance(source="Mirrokni, Thorup, Zadimoghaddam, SODA 2018, arXiv:1608.01350", score=score)


def ring_key(request: FleetRequest) -> int:
    if request.hash_key is not None:
        return request.hash_key
    return request.keys[0] if request.keys else hash_of(request.request_id)


def prefix(fleet: Replicas) -> Balance:
    """Least uncached prefill, in own seconds, x (in flight + 1); of a prompt that is cached, the last token is computed
    anew. Of two devices the one of twice the speed gets twice the load: to divide the second factor too would make it
    four times.
    """
    return Balance(source="LMetric, arXiv:2603.15202", score=_prefix_scores, looks_at_prefixes=True, is_alike=True)


def _prefix_scores(request: FleetRequest, candidates: Sequence[FleetReplica], cached: Cached) -> list[float]:
    num_inputs = request.num_inputs
    if not cached:
        return [num_inputs * (r.load + 1) / r.speed for r in candidates]
    return [max(1, num_inputs - cached.get(r.bit, 0)) * (r.load + 1) / r.speed for r in candidates]


def session(fleet: Replicas) -> Balance:
    """The replica of the session's last request, while it has room within the bound; else, and from then on, the choice
    of `prefix`. Requests without a session go as under `prefix`.
    """
    sessions: OrderedDict[int, str] = OrderedDict()  # hash key -> replica; the least recently used first

    def score(request: FleetRequest, candidates: Sequence[FleetReplica], cached: Cached) -> list[float]:
        last = None if request.hash_key is None else sessions.get(request.hash_key)
        scores = _prefix_scores(request, candidates, cached)
        return (
            scores if last is None else [0.0 if r.name == last else s for r, s in zip(candidates, scores, strict=True)]
        )

    def met(hash_key: int, replica: FleetReplica) -> None:
        sessions[hash_key] = replica.name
        sessions.move_to_end(hash_key)
        if len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)

    def chosen(request: FleetRequest, replica: FleetReplica) -> None:
        if request.hash_key is not None:
            met(request.hash_key, replica)

    return Balance(source="sticky sessions", score=score, chosen=chosen, met=met, looks_at_prefixes=True)


BALANCES: dict[str, Callable[[Replicas], Balance]] = {
    "round_robin": round_robin,
    "least_load": least_load,
    "two_choices": two_choices,
    "hash": by_hash,
    "session": session,
    "prefix": prefix,
}

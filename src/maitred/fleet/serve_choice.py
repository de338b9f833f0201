"""Ray Serve by the fleet's rules: which replica a request goes to, and how many replicas there are. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from maitred.fleet.balance import BALANCES, choose, hash_of, least_load
from maitred.fleet.config import FleetConfig
from maitred.fleet.fleet_request import FleetRequest
from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.replicas import FleetReplica, ReplicaFacts, Replicas, State
from maitred.fleet.sizing import AutoscaleConfig, Autoscaler, FleetFigures

FIRST_START_S = 10.0  # until a replica has told how long its start took
ARRIVED, ENDED, SERVED_S, START_S = "arrived", "ended", "served_s", "start_s"
"""What each replica tells: three counters, and the seconds its engine took to load."""

KEYED = ("hash", "session", "prefix")


class Seen(NamedTuple):
    """A replica as Serve's router sees it."""

    name: str
    load: int  # requests in flight there
    slots: int  # it takes no more


class ServeChoice:
    """One balance over the replicas of a deployment; without a key (Serve tells routers the session alone) it is least
    load. `hash` alone needs no memory, so the routers of all proxies send a conversation to the same replica.
    """

    def __init__(self, balance: str = "hash", max_load_ratio: float = 1.25) -> None:
        """Raises ConfigError for a balance that there is not."""
        config = FleetConfig(balance=balance, max_load_ratio=max_load_ratio)
        self._fleet = Replicas(config)
        self._ratio = config.max_load_ratio
        self._balance = BALANCES[balance](self._fleet)
        self._keyless = least_load(self._fleet) if balance in KEYED else self._balance
        self._index = PrefixIndex()  # of prompts nothing is known here

    def ranked(self, replicas: Sequence[Seen], key: int | None, request_id: str, now: float) -> list[str]:
        """Names, the best first: the choice, those that were nearly it, and those beyond the bound on load."""
        if not replicas:
            return []
        self._look(replicas, now)
        request = FleetRequest(request_id=request_id, arrived_at=now, num_bytes=0, max_tokens=1, hash_key=key)
        room = self._bits(seen.name for seen in replicas if seen.load < seen.slots)
        usable = self._bits(seen.name for seen in replicas)
        balance = self._balance if key is not None else self._keyless
        chosen, choice = choose(
            request, self._fleet, room or usable, usable, balance=balance, index=self._index, ratio=self._ratio
        )
        rest = sorted(replicas, key=lambda seen: (seen.load, seen.name))
        names = (chosen.name, *(candidate.replica for candidate in choice.candidates), *(seen.name for seen in rest))
        return list(dict.fromkeys(names))

    def _look(self, replicas: Sequence[Seen], now: float) -> None:
        there = {seen.name for seen in replicas}
        for replica in [replica for replica in self._fleet if replica.name not in there]:
            self._fleet.remove(replica, now)
        for seen in replicas:
            self._fleet.note_others(self._fleet.by_name.get(seen.name) or self._new(seen, now), seen.load)

    def _new(self, seen: Seen, now: float) -> FleetReplica:
        replica = self._fleet.put(ReplicaFacts(name=seen.name, slots=seen.slots), now)
        self._fleet.set_state(replica, State.READY, now)
        return replica

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._fleet.by_name[name].bit for name in names)


def key_of(session_id: str) -> int | None:
    """Hash of the conversation that a request belongs to, 64 bits; None where it names none."""
    return hash_of(session_id) if session_id else None


class ServeScaling:
    """A Serve autoscaling policy: a class that Serve makes once for each deployment, and calls again and again."""

    def __init__(self, slots: int, idle_s: float = 300.0, ttft_objective_s: float | None = None) -> None:
        """`slots` are those of one replica; for the others see AutoscaleConfig."""
        self._slots = slots
        self._autoscaler = Autoscaler(AutoscaleConfig(idle_s=idle_s, ttft_objective_s=ttft_objective_s))
        self._counted: dict[str, dict[Any, float]] = {}  # by counter, by replica; replicas that are gone stay counted
        self._num_arrived = 0.0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Wanted replicas, by Ray's `AutoscalingContext`, and the state that Serve keeps of policies."""
        self._read(context.raw_metrics or {})
        return self._autoscaler(self._figures(context), context.current_time or 0.0), {}

    def _read(self, metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> None:
        for name in (ARRIVED, ENDED, SERVED_S, START_S):
            counted = self._counted.setdefault(name, {})
            counted |= {replica: samples[-1].value for replica, samples in metrics.get(name, {}).items() if samples}

    def _figures(self, context: Any) -> FleetFigures:
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
        """Requests in flight at replicas that are there; those of others are over."""
        arrived, ended = self._counted[ARRIVED], self._counted[ENDED]
        return int(sum(arrived.get(replica, 0.0) - ended.get(replica, 0.0) for replica in running))

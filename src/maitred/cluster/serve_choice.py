"""Ray Serve's choice of a replica by the fleet's balances. Of a request Serve hands routers the session alone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from maitred.cluster.balance import BALANCES, choose, least_load
from maitred.cluster.config import FleetConfig
from maitred.cluster.fleet_request import FleetRequest
from maitred.cluster.prefix_index import PrefixIndex
from maitred.cluster.replicas import Replica, ReplicaFacts, Replicas, State
from maitred.cluster.ring import hash_of

KEYED = ("hash", "session", "prefix")


class Seen(NamedTuple):
    """A replica as Serve's router sees it."""

    name: str
    load: int  # requests in flight there
    slots: int  # it takes no more


class ServeChoice:
    """One balance over the replicas of a deployment; without a key it is least load. `hash` alone needs no memory,
    so the routers of all proxies send a conversation to the same replica.
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

    def _new(self, seen: Seen, now: float) -> Replica:
        replica = self._fleet.put(ReplicaFacts(name=seen.name, slots=seen.slots), now)
        self._fleet.set_state(replica, State.READY, now)
        return replica

    def _bits(self, names: Iterable[str]) -> int:
        return sum(1 << self._fleet.by_name[name].bit for name in names)


def key_of(session_id: str) -> int | None:
    """Of the conversation that a request belongs to, 64 bits; None where it names none."""
    return hash_of(session_id) if session_id else None

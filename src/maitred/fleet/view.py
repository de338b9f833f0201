"""The answer of GET /admin/fleet."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.fleet.prefix_index import PrefixIndex
from maitred.fleet.replicas import Replica, Replicas
from maitred.fleet.waiting import Waiting


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica; names of fields are those of the JSON."""

    name: str
    url: str
    kind: str
    state: str
    pid: int | None
    in_flight: int
    slots: int
    models: tuple[str, ...]
    tier: str
    prefix_keys: int
    error: str | None


@dataclass(frozen=True, slots=True)
class FleetView:
    """The whole fleet."""

    target: int
    held: int
    oldest_held_s: float
    replicas: tuple[ReplicaView, ...]


def view_of(fleet: Replicas, index: PrefixIndex, waiting: Waiting, target: int, now: float) -> FleetView:
    oldest = min((r.arrived_at for r in waiting), default=now)
    views = tuple(_replica_view(fleet, index, replica) for replica in fleet)
    return FleetView(target, waiting.num_held, max(0.0, now - oldest), views)


def _replica_view(fleet: Replicas, index: PrefixIndex, replica: Replica) -> ReplicaView:
    facts = replica.facts
    return ReplicaView(
        name=facts.name,
        url=facts.url,
        kind=facts.kind.value,
        state=replica.state.value,
        pid=facts.pid,
        in_flight=len(replica.in_flight),
        slots=replica.slots,
        models=facts.models or (),
        tier=fleet.tiers[replica.tier].name,
        prefix_keys=index.num_keys_of(replica.bit),
        error=replica.error,
    )

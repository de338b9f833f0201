"""What GET /admin/fleet tells."""

from __future__ import annotations

from dataclasses import dataclass


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

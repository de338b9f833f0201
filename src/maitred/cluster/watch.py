"""Watching replicas: who has fallen silent, said that it is full, or is to be probed again. Pure."""

from __future__ import annotations

from maitred.cluster.actions import Action, Probe
from maitred.cluster.config import FleetConfig
from maitred.cluster.fleet_request import Failure, FailureKind
from maitred.cluster.health import Health
from maitred.cluster.replicas import Due, Replica, ReplicaDue, Replicas, State
from maitred.cluster.requests import Requests
from maitred.cluster.timers import Timers

SILENT = Failure(FailureKind.SILENT, message="nothing was heard of it")


class Watch:
    """Of one fleet; what falls due stands in `timers`."""

    def __init__(self, config: FleetConfig, fleet: Replicas, health: Health, requests: Requests) -> None:
        self._config, self._fleet, self._health, self._requests = config, fleet, health, requests
        self.timers: Timers[ReplicaDue] = Timers(self._is_living)

    def tick(self, now: float) -> list[Action]:
        """Whatever has fallen due."""
        return [action for due in self.timers.take_due(now) for action in self._fell_due(due, now)]

    def begin(self, replica: Replica) -> None:
        """It is ready, and tells of itself from time to time: it is noticed when it does not."""
        if replica.facts.has_beats and not replica.is_watched:
            replica.is_watched = True
            self.timers.add(replica.heard_at + self._config.silence_s, ReplicaDue(Due.SILENCE, replica))

    def said_full(self, replica: Replica, until: float, now: float) -> None:
        """It works and has no room: until then it gets nobody."""
        if not replica.is_full:
            replica.unready_since = now
        replica.full_until = max(until, replica.full_until)
        self.timers.add(replica.full_until, ReplicaDue(Due.FULL, replica))
        replica.is_full = True

    def expect_probe(self, replica: Replica, now: float) -> None:
        """It is out. What it does for others may still come to an end, so they stay."""
        self.timers.add(now + self._health.next_probe_s(replica), ReplicaDue(Due.PROBE, replica))

    def expect_back(self, replica: Replica, now: float) -> None:
        """A replica said that it serves nothing now; where that lasts, its requests go on elsewhere."""
        self.timers.add(now + self._config.silence_s, ReplicaDue(Due.BACK, replica))

    def _is_living(self, due: ReplicaDue) -> bool:
        return self._fleet.by_name.get(due.replica.name) is due.replica

    def _fell_due(self, due: ReplicaDue, now: float) -> list[Action]:
        what, replica = due
        if what is Due.SILENCE:
            return self._silence_due(replica, now)
        if what is Due.PROBE:
            return [Probe(replica.name)] if replica.state is State.EJECTED else []
        if what is Due.BACK:
            return self._back_due(replica, now)
        replica.is_full = now < replica.full_until
        self._fleet.note_room(replica)
        return []

    def _back_due(self, replica: Replica, now: float) -> list[Action]:
        """Looked at again while it has some that cannot go elsewhere yet."""
        is_due = now >= replica.unready_since + self._config.silence_s
        if replica.state is not State.STARTING or not is_due or not self._requests.at(replica):
            return []
        self.expect_back(replica, now)
        return self._requests.flee(replica, now)

    def _silence_due(self, replica: Replica, now: float) -> list[Action]:
        """A beat may have come since; if all fell silent at once, it may be us: then a probe tells. One that is out for
        another reason, and was left what it does for others, is not left it any longer.
        """
        replica.is_watched = False
        if replica.state not in (State.READY, State.EJECTED) or not replica.facts.has_beats:
            return []
        if now < replica.heard_at + self._config.silence_s:
            self.begin(replica)
            return []
        if replica.state is State.EJECTED:
            return self._requests.abandon(replica, SILENT, now)
        if self._health.may_eject() and self._health.eject(replica, FailureKind.SILENT, now):
            self.expect_probe(replica, now)
            return self._requests.abandon(replica, SILENT, now)
        self.timers.add(now + self._config.silence_s, ReplicaDue(Due.SILENCE, replica))
        replica.is_watched = True
        return [Probe(replica.name)]

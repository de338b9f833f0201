"""Replicas that take nobody any more: who has no token there goes elsewhere, the rest finishes or is handed over."""

from __future__ import annotations

from maitred.cluster.actions import Action
from maitred.cluster.health import Health
from maitred.cluster.replicas import Replica, Replicas, State
from maitred.cluster.requests import Requests
from maitred.cluster.sizing import Sizing
from maitred.cluster.timers import Timers

HAND_OVER_S = 1.0  # before a replica that ends by itself cuts what it has: to stop there, and to go on elsewhere


class Draining:
    """Drains replicas. Methods that return actions have done their part, as in `Requests`."""

    def __init__(self, fleet: Replicas, sizing: Sizing, requests: Requests, health: Health) -> None:
        self._fleet, self._sizing, self._requests, self._health = fleet, sizing, requests, health
        self.timers: Timers[Replica] = Timers(lambda replica: fleet.by_name.get(replica.name) is replica)

    def begin(self, replica: Replica, within_s: float, now: float) -> list[Action]:
        """It has so long to finish what it has."""
        self._sizing.forget(replica)
        self._fleet.set_state(replica, State.DRAINING, now)
        self._end_at(replica, now + within_s)
        without_token = [r for r in replica.in_flight.values() if not r.has_begun]
        return [*self._sizing.emptied(replica), *self._requests.move_on(replica, without_token, now)]

    def leave(self, replica: Replica, within_s: float, now: float) -> list[Action]:
        """It drains by itself, whether the router had it drain or not, and cuts what it has after `within_s`."""
        hand_over_s = max(within_s / 2, within_s - HAND_OVER_S)
        actions: list[Action] = []
        if replica.state is not State.DRAINING:
            actions = self.begin(replica, hand_over_s, now)
        elif now + hand_over_s < replica.drain_ends_at:
            self._end_at(replica, now + hand_over_s)
        replica.is_leaving = True
        return actions

    def tick(self, now: float) -> list[Action]:
        """Hand over what is left where the time is over."""
        return [action for replica in self.timers.take_due(now) for action in self._hand_over(replica, now)]

    def _end_at(self, replica: Replica, at: float) -> None:
        replica.drain_ends_at = at
        self.timers.add(at, replica)

    def _hand_over(self, replica: Replica, now: float) -> list[Action]:
        if replica.state is not State.DRAINING or now < replica.drain_ends_at:  # it came back, and drains again
            return []
        return self._requests.move_on(replica, self._requests.movable(replica), now)

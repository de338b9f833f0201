"""Which replicas are taken out and when they come back, and how many attempts there may be. Outlier ejection as in
Envoy; retry budget as in Finagle and in Beyer et al., "Site Reliability Engineering", chapter 22.
"""

from __future__ import annotations

from maitred.core.errors import EngineDead, MaitredError, Unavailable
from maitred.fleet.config import FleetConfig
from maitred.fleet.fleet_request import Failure, FailureKind, FleetRequest
from maitred.fleet.replicas import Replica, Replicas, State

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

    def failed(self, replica: Replica, failure: Failure, now: float) -> bool:
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

    def eject(self, replica: Replica, kind: FailureKind, now: float) -> bool:
        """Take the replica out; False if it is not in rotation."""
        if replica.state is not State.READY:
            return False
        replica.num_probes, replica.ejected_for = 0, kind
        self._fleet.set_state(replica, State.EJECTED, now)
        return True

    def next_probe_s(self, replica: Replica) -> float:
        """(s) until the next one."""
        replica.num_probes += 1
        return min(MAX_PROBE_S, MIN_PROBE_S * 2.0 ** (replica.num_probes - 1))

    def why_no_more(self, request: FleetRequest, replica: Replica) -> MaitredError | None:
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

    def _why_no_resume(self, request: FleetRequest, replica: Replica, what: str) -> MaitredError | None:
        if not self.can_resume(request, replica):
            return EngineDead(f"{what} in the middle of the answer, which cannot be gone on with elsewhere")
        if self._config.resume == "exact":
            request.fingerprint = replica.facts.fingerprint
        return None

    def can_resume(self, request: FleetRequest, replica: Replica) -> bool:
        """May another replica go on where this one is?"""
        knows = self._config.resume == "always" or replica.facts.fingerprint is not None
        return request.can_resume and self._config.resume != "never" and knows

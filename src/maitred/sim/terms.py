"""A workload under the terms of `tenants.yaml` and of the server: what a request leaves open, they say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from maitred.config import AdmissionConfig
from maitred.errors import ConfigError
from maitred.sim.workload import Arrival, Workload
from maitred.tenancy.tenant import Tenant


@dataclass(frozen=True, slots=True)
class WorkloadUnderTerms:
    """`workload`'s requests with their tenants' weight, priority, objective and time limits, then the server's.

    Without a file of tenants (`given` is None) the workload's own keep what it says of them. Requests of nobody are
    under the server's terms alone. Cache groups and `default_max_tokens` are not applied: what
    is shared, and what a client allows, is the workload's to say.
    """

    workload: Workload
    given: Mapping[str, Tenant] | None
    server: AdmissionConfig = field(default_factory=AdmissionConfig)

    @property
    def tenants(self) -> Mapping[str, Tenant]:
        return self.workload.tenants if self.given is None else self.given

    def arrivals(self) -> Iterator[Arrival]:
        """Raises ConfigError at the first request of a tenant that there are no terms for."""
        return map(self._under_terms, self.workload.arrivals())

    def _under_terms(self, arrival: Arrival) -> Arrival:
        if self.given is not None and arrival.tenant in self.given:
            arrival = under_terms(arrival, self.given[arrival.tenant])
        elif self.given is not None and arrival.tenant:
            raise ConfigError(
                f"request {arrival.request_id} is of tenant {arrival.tenant!r}, and the tenants given are "
                f"{', '.join(sorted(self.given))}; add it to their file"
            )
        server = self.server
        return replace(
            arrival,
            start_within_s=_sooner(arrival.start_within_s, server.queue_timeout_s),
            deadline_s=_sooner(arrival.deadline_s, server.request_timeout_s),
            ttft_slo_s=_sooner(arrival.ttft_slo_s, server.ttft_objective_s),
        )


def under_terms(arrival: Arrival, tenant: Tenant) -> Arrival:
    """A priority out of the tenant's range becomes the nearest in it, where the server would refuse."""
    low, high = tenant.priorities
    asked = tenant.default_priority if arrival.priority is None else arrival.priority
    return replace(
        arrival,
        weight=tenant.weight,
        priority=max(low, min(high, asked)),
        ttft_slo_s=_sooner(arrival.ttft_slo_s, tenant.ttft_slo_s),
        start_within_s=_sooner(arrival.start_within_s, tenant.queue_timeout_s),
        deadline_s=_sooner(arrival.deadline_s, tenant.timeout_s),
    )


def _sooner(own: float | None, others: float | None) -> float | None:
    return min((bound for bound in (own, others) if bound is not None), default=None)

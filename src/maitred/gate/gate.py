"""The gate: a request's rights, its quota, and its admission to the queue; one lease from there to the end.

Its tenants and engines are arguments: a server, a router in front of many and the simulator use the same gate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from maitred.config import AdmissionConfig, SchedulerConfig
from maitred.core.errors import InvalidRequest, MaitredError, Overloaded, PermissionDenied
from maitred.core.request import FinishReason, RequestSpec, Terms
from maitred.core.step import RequestProgress
from maitred.gate.admission import MIN_RETRY_S, AdmissionController, Queueable
from maitred.tenancy.caller import Caller
from maitred.tenancy.quota import QuotaLease
from maitred.tenancy.tenant import Tenant


class TimeLimits(NamedTuple):
    """Time limits in seconds from arrival; None is no limit."""

    ttft_slo_s: float | None = None
    queue_timeout_s: float | None = None
    timeout_s: float | None = None

    def and_also(self, other: TimeLimits) -> TimeLimits:
        """The stricter of both; mostly one of them says nothing."""
        if other == NO_LIMITS:
            return self
        return other if self == NO_LIMITS else TimeLimits(*map(_stricter, self, other))

    def asked(self, now: float) -> Terms:
        """Terms of a request that came now, with these limits alone."""
        return Terms(
            ttft_slo_s=self.ttft_slo_s,
            start_by=_after(now, self.queue_timeout_s),
            finish_by=_after(now, self.timeout_s),
        )


NO_LIMITS = TimeLimits()


def granted_priority(tenant: Tenant, asked: int | None) -> int:
    """The priority asked for, or the tenant's default. Raises PermissionDenied outside of the tenant's range."""
    if asked is None:
        return tenant.default_priority
    low, high = tenant.priorities
    if not low <= asked <= high:
        raise PermissionDenied(
            f"priority is {asked}; this key may ask for {low} (most urgent) to {high}", param="priority"
        )
    return asked


def granted(asked: Terms, caller: Caller, priority: int, limits: TimeLimits, arrived_at: float) -> Terms:
    """The terms asked for, within the caller's and the server's: the stricter time limits, the tenant's weight."""
    known = None if caller.is_anybody else caller.tenant
    return Terms(
        tenant=asked.tenant if known is None else known.name,
        key_id=asked.key_id if known is None else caller.key_id,
        weight=asked.weight if known is None else known.weight,
        priority=priority,
        ttft_slo_s=_stricter(asked.ttft_slo_s, limits.ttft_slo_s),
        start_by=_stricter(asked.start_by, _after(arrived_at, limits.queue_timeout_s)),
        finish_by=_stricter(asked.finish_by, _after(arrived_at, limits.timeout_s)),
        background=asked.background or caller.background,
    )


def cap_max_tokens(specs: Sequence[RequestSpec], limit: float | None) -> list[RequestSpec]:
    """Return the tokens allowed: without the client's own, `limit` as far as the context has room."""
    if limit is None or any(spec.sampling.max_tokens is not None for spec in specs):
        return list(specs)
    return [replace(spec, max_tokens=max(1, min(spec.max_tokens, int(limit)))) for spec in specs]


def num_prompt_tokens(specs: Iterable[RequestSpec]) -> int:
    """Return the tokens of one request; the samples of a prompt share them."""
    return sum(spec.num_prompt_tokens for spec in specs if spec.sample_index == 0)


def _stricter(one: float | None, other: float | None) -> float | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def _after(arrived_at: float, seconds: float | None) -> float | None:
    return None if seconds is None else arrived_at + seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Facts that a request tells before its prompt is looked at."""

    num_samples: int = 1
    """Samples of all its prompts; 0 takes no place, as the server's own probes."""
    priority: int | None = None
    """Priority; None is the tenant's default."""
    limits: TimeLimits = NO_LIMITS


class Admitted(NamedTuple):
    """Requests under their terms, to be submitted now."""

    specs: list[RequestSpec]
    shed: tuple[str, ...]
    """Ids of those that leave the queue for them: abort these with FinishReason.SHED."""


@dataclass(slots=True, eq=False)
class Lease:
    """Lease of one request: its part of the tenant's quota, the server's bound, the queue. `end` gives all back."""

    gate: Gate
    caller: Caller
    num_samples: int
    priority: int
    limits: TimeLimits  # of tenant and server
    quota: QuotaLease | None
    request_ids: tuple[str, ...] = ()  # once admitted
    waiting: set[str] = field(default_factory=set)  # of them, without a first token
    ended: bool = False

    def terms(self, asked: Terms, arrived_at: float) -> Terms:
        """Terms of a request under this lease that asked for these."""
        return granted(asked, self.caller, self.priority, self.limits, arrived_at)

    def tokens_came(self, request_id: str, num_tokens: int, now: float) -> None:
        """Count tokens of one of its samples; with the first its wait is over, for quota and queue alike."""
        if request_id in self.waiting:
            self.waiting.discard(request_id)
            if self.quota is not None:
                self.quota.first_token()
        if self.gate.admission is not None:
            self.gate.admission.tokens_came(request_id, num_tokens, now)

    def sample_ended(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Note that a sample has left the engine; a second call changes nothing."""
        self.gate.leases.pop(request_id, None)
        if self.gate.admission is not None:
            self.gate.admission.leave(request_id, reason)

    def end(self, num_tokens: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Give back all but the tokens used; idempotent. `reason` is of samples whose end the gate did not hear."""
        if self.ended:
            return
        self.ended = True
        self.gate.num_in_flight -= self.num_samples
        if self.quota is not None:
            self.quota.end(num_tokens)
        for request_id in self.request_ids:
            self.sample_ended(request_id, reason)


class Gate:
    """Gate that lets requests in, or raises why not; holds no lock and reads no clock.

    Without `admission` no request is refused for the queue, without `max_concurrent_requests` none for the number of
    samples in flight.
    """

    def __init__(
        self, admission: AdmissionController | None = None, *, max_concurrent_requests: int | None = None
    ) -> None:
        self.admission = admission
        self.num_in_flight = 0  # samples, of all leases
        self._max_concurrent_requests = max_concurrent_requests
        config = admission.config if admission is not None else AdmissionConfig()
        self._limits = TimeLimits(config.ttft_objective_s, config.queue_timeout_s, config.request_timeout_s)
        self.leases: dict[str, Lease] = {}  # by request id, of those that have something to hear of it

    def enter(self, caller: Caller, ask: Ask, now: float) -> Lease:
        """Let a request enter before any work is done for it.

        Raises PermissionDenied for a priority that the caller may not have, RateLimited or InsufficientQuota for its
        tenant's limits, InvalidRequest for more samples than the server ever holds, and Overloaded.
        """
        priority = granted_priority(caller.tenant, ask.priority)
        quota = None if caller.is_anybody else caller.quota.enter(ask.num_samples, now)
        tenant = caller.tenant
        limits = self._limits.and_also(TimeLimits(tenant.ttft_slo_s, tenant.queue_timeout_s, tenant.timeout_s))
        if caller.background:  # waits for as long as it asks to, in no place that another request could have
            return Lease(self, caller, 0, priority, NO_LIMITS, quota)
        try:
            self._check_room(ask.num_samples, now)
            if self.admission is not None:
                self.admission.check_early(priority, ask.limits.and_also(limits).ttft_slo_s, now)
        except MaitredError:
            if quota is not None:
                quota.end(0)
            raise
        self.num_in_flight += ask.num_samples
        return Lease(self, caller, ask.num_samples, priority, limits, quota)

    def admit(self, lease: Lease, specs: Sequence[RequestSpec], now: float) -> Admitted:
        """Admit all samples of a request or none, once its tokens are known, or only how many.

        Raises RateLimited, InsufficientQuota or Overloaded; the lease has ended then.
        """
        specs = self._under_terms(lease, specs, now)
        num_tokens = num_prompt_tokens(specs) + sum(spec.max_tokens for spec in specs)
        return Admitted(specs, self.let_in(lease, specs, num_tokens, now))

    def let_in(self, lease: Lease, requests: Sequence[Queueable], num_tokens: int, now: float) -> tuple[str, ...]:
        """Admit, as `admit`, requests that are under their terms and take so many tokens; return the shed ones."""
        try:
            if lease.quota is not None:
                lease.quota.reserve(num_tokens, now)
            admission = None if lease.caller.background else self.admission
            shed = admission.admit_all(requests, now) if admission is not None else ()
        except MaitredError:
            lease.end(0)
            raise
        lease.request_ids = tuple(request.request_id for request in requests)
        lease.waiting.update(lease.request_ids)
        if self.admission is not None or lease.quota is not None:
            self.leases.update(dict.fromkeys(lease.request_ids, lease))
        return shed

    def progressed(self, progress: Iterable[RequestProgress], num_queued: int, now: float) -> None:
        """Take in the engine's progress, and how many requests had no place in it then."""
        for item in progress:
            lease = self.leases.get(item.request_id)
            if lease is None:
                continue
            if item.new_token_ids:
                lease.tokens_came(item.request_id, len(item.new_token_ids), now)
            if item.finish_reason is not None:
                lease.sample_ended(item.request_id, item.finish_reason)
        if self.admission is not None:
            self.admission.look(num_queued, now)

    def reconfigure(self, scheduler: SchedulerConfig) -> None:
        """The engine has another number of slots, or another policy."""
        if self.admission is not None:
            self.admission.reconfigure(scheduler)

    def retry_after_s(self, now: float) -> float:
        """Return when there may be room again, by the rate at which work leaves."""
        return self.admission.retry_after_s(now) if self.admission is not None else MIN_RETRY_S

    def _check_room(self, num_samples: int, now: float) -> None:
        limit = self._max_concurrent_requests
        if limit is None:
            return
        if num_samples > limit:
            raise InvalidRequest(f"prompts times n is {num_samples}; this server holds at most {limit} at once")
        if num_samples and self.num_in_flight + num_samples > limit:
            raise Overloaded(
                f"{self.num_in_flight} requests are in flight, the limit is {limit}; try again later",
                retry_after_s=self.retry_after_s(now),
            )

    def _under_terms(self, lease: Lease, specs: Sequence[RequestSpec], now: float) -> list[RequestSpec]:
        caller, tenant = lease.caller, lease.caller.tenant
        if not caller.is_anybody:
            silent = caller.quota.silent_max_tokens(num_prompt_tokens(specs), len(specs), now)
            specs = cap_max_tokens(cap_max_tokens(specs, tenant.default_max_tokens), silent)
        return [replace(spec, terms=lease.terms(spec.terms, spec.arrived_at)) for spec in specs]

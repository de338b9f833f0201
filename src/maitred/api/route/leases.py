"""The gate as the router meets it: a request's lease, in estimated tokens until its usage tells."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from maitred.api.generate.time_limits import HEADERS
from maitred.api.http.exchange import Exchange
from maitred.api.ops.metrics_page import TenantCounts
from maitred.api.route.router import Router
from maitred.core.errors import RateLimited
from maitred.core.request import FinishReason
from maitred.fleet.fleet_request import FleetRequest, Usage
from maitred.fleet.routed_body import RoutedBody
from maitred.gate.gate import Ask, Lease
from maitred.gate.terms import NO_LIMITS, TimeLimits
from maitred.tenancy.caller import Caller
from maitred.tenancy.tenant import TIERS

BYTES_A_TOKEN = 4  # of English
_NONE = Usage(complete=False)
_HEADERS = [(field, name.encode()) for field, name in HEADERS.items()]
_NAMES = frozenset(name for _, name in _HEADERS)


@dataclass(slots=True)
class RouteLease:
    """A lease granted until the `with` ends. `usage`, as known by then, settles what was taken."""

    lease: Lease
    limits: TimeLimits  # of request, tenant and router, the strictest
    counts: TenantCounts
    usage: Usage | None = None
    default_max_tokens: int | None = None  # of each sample, where the request names none

    def start_by(self, now: float) -> float | None:
        return None if self.limits.queue_timeout_s is None else now + self.limits.queue_timeout_s

    def finish_by(self, now: float) -> float | None:
        return None if self.limits.timeout_s is None else now + self.limits.timeout_s

    def take(self, request: FleetRequest, *, is_silent: bool) -> tuple[str, ...]:
        """A place in the queue, and of the tenant's quota the prompt and most tokens of all samples; gives the ids of
        those that leave the queue for it. Raises as `Gate.admit`.

        A request that is silent of a limit gets the tenant's own, or a share of what is left.
        """
        lease, now = self.lease, request.arrived_at
        if is_silent and lease.quota is not None:
            self._limit_silent(request, now)
        num_tokens = request.num_prompt_tokens + request.max_tokens * request.num_samples
        return lease.gate.let_in(lease, (request,), num_tokens, now)

    def is_over(self, request: FleetRequest) -> bool:
        """Whether the tenant may never use as many tokens as the request is estimated to take."""
        if self.lease.quota is None:
            return False
        quota = self.lease.caller.quota
        budget = None if quota.limits.token_budget is None else quota.limits.token_budget - quota.spent_tokens
        needed = request.num_prompt_tokens + request.max_tokens * request.num_samples
        return any(most is not None and needed > most for most in (quota.limits.tokens_per_minute, budget))

    def _limit_silent(self, request: FleetRequest, now: float) -> None:
        caller = self.lease.caller
        share = caller.quota.silent_max_tokens(request.num_prompt_tokens, request.num_samples, now)
        limits = [limit for limit in (caller.tenant.default_max_tokens, share) if limit is not None]
        if limits:
            self.default_max_tokens = request.max_tokens = max(1, min(limits))

    def tokens_came(self, num_tokens: int, now: float) -> None:
        """Count more tokens of the answer; with the first call the request waits no longer."""
        lease = self.lease
        if lease.waiting and lease.quota is not None:
            for _ in range(lease.num_samples - 1):  # the gate knows them for one
                lease.quota.first_token()
        for request_id in lease.request_ids:
            lease.tokens_came(request_id, num_tokens, now)

    def __enter__(self) -> RouteLease:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the lease; the request came to its end if usage says so."""
        usage, caller = self.usage or _NONE, self.lease.caller
        prompt, output = usage.num_prompt_tokens or 0, usage.num_output_tokens or 0
        self.lease.end(prompt + output, FinishReason.STOP if usage.complete else FinishReason.ABORT)
        if not caller.is_anybody:
            self.counts.left(caller.quota, prompt, output)
            if isinstance(error, RateLimited):
                self.counts.refused(caller.tenant.name, error)


def leased(router: Router, exchange: Exchange, read: RoutedBody) -> RouteLease:
    """A lease for `with`, until the request has its answer. Raises as `Gate.enter`."""
    caller, counts = exchange.caller, router.metrics.tenants
    asked = _limits(read, exchange.headers)
    ask = Ask(num_samples=max(1, read.n or 1), priority=_priority(caller, read), limits=asked)
    try:
        lease = router.gate.enter(caller, ask, router.clock.now())
    except RateLimited as error:
        counts.refused(caller.tenant.name, error)
        raise
    if not caller.is_anybody:
        counts.entered(caller.quota)
    return RouteLease(lease, asked.and_also(lease.limits), counts)


def _priority(caller: Caller, read: RoutedBody) -> int:
    """The priority asked for, which the gate checks; the replica refuses what is no tier."""
    if read.priority is not None:
        return read.priority
    known = not caller.is_anybody and read.service_tier in TIERS
    return caller.tenant.priority_of_tier(read.service_tier if known else None)


def _limits(read: RoutedBody, headers: Mapping[bytes, bytes]) -> TimeLimits:
    """The request's limits, a field before its header; the replica refuses what is no number of milliseconds."""
    if read.ttft_slo_ms is read.queue_timeout_ms is read.timeout_ms is None and _NAMES.isdisjoint(headers):
        return NO_LIMITS
    return TimeLimits(*(_seconds(getattr(read, field), headers.get(name)) for field, name in _HEADERS))


def _seconds(field: float | None, header: bytes | None) -> float | None:
    if field is None and header is not None:
        with suppress(ValueError):
            field = float(header)
    return field / 1000.0 if field is not None and field > 0 else None

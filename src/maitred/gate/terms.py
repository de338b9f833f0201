"""Terms: what a tenant and the server lay over what a request says of itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from maitred.core.errors import PermissionDenied
from maitred.core.request import RequestSpec, Terms
from maitred.tenancy.caller import Caller
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

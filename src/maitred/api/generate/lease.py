"""One generation request as its tenant's: what it may ask, what it takes of the tenant's limits and gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec.structs import replace

from maitred.api.dialects.openai.refusals import unsupported
from maitred.api.dialects.openai.requests import cap_max_tokens
from maitred.api.dialects.openai.schemas import GenerationFields
from maitred.api.generate.generation import Generation
from maitred.api.http.auth import Caller
from maitred.api.http.edge import Edge
from maitred.api.http.exchange import Exchange
from maitred.errors import PermissionDenied, RateLimited
from maitred.request import RequestSpec
from maitred.tenancy.quota import Lease
from maitred.tenancy.tenant import TIERS, Tenant, tier_of_priority


class TenantLease:
    """From the tenant's limits being asked to everything being given back; see `tenant_lease`."""

    def __init__(self, edge: Edge, caller: Caller, body: GenerationFields, lease: Lease | None) -> None:
        self._edge, self._caller, self._lease = edge, caller, lease
        self._generation: Generation | None = None
        self.priority = _priority(caller, body)
        self.cache_salt = body.cache_salt or ""
        if not caller.is_anybody:
            self.cache_salt = caller.tenant.cache_salt(edge.salt_secret, self.cache_salt)

    def take(self, batches: Sequence[Sequence[RequestSpec]]) -> Sequence[Sequence[RequestSpec]]:
        """The requests under their tenant's terms; takes their tokens. Raises RateLimited or InsufficientQuota."""
        if self._lease is None:
            return batches
        num_prompt, now = sum(batch[0].num_prompt_tokens for batch in batches), self._edge.clock.now()
        num_samples = sum(map(len, batches))
        silent = self._caller.quota.silent_max_tokens(num_prompt, num_samples, now)
        batches = [self._under_terms(batch, silent) for batch in batches]
        num_output = sum(request.max_tokens for batch in batches for request in batch)
        with _counting_refusals(self._edge, self._caller.tenant):
            self._lease.reserve(num_prompt + num_output, now)
        return batches

    def _under_terms(self, batch: Sequence[RequestSpec], silent_max_tokens: float | None) -> list[RequestSpec]:
        tenant, key_id = self._caller.tenant, self._caller.key_id
        return [
            replace(
                request,
                tenant=tenant.name,
                weight=tenant.weight,
                key_id=key_id,
                ttft_slo_s=_sooner(request.ttft_slo_s, tenant.ttft_slo_s),
                start_by=_sooner(request.start_by, tenant.queue_timeout_s, request.arrived_at),
                finish_by=_sooner(request.finish_by, tenant.timeout_s, request.arrived_at),
            )
            for request in cap_max_tokens(cap_max_tokens(batch, tenant.default_max_tokens), silent_max_tokens)
        ]

    def follow(self, generation: Generation) -> Generation:
        """Note the first token of each sample, and what all of them use."""
        self._generation = generation
        if self._lease is not None:
            generation.on_first_token = self._lease.first_token
        return generation

    def end(self) -> None:
        """Give back what was taken and not used; idempotent."""
        if self._lease is None or self._lease.ended:
            return
        prompt, output = self._used()
        self._lease.end(prompt + output)
        self._edge.metrics.tenants.left(self._caller.quota, prompt, output)

    def _used(self) -> tuple[int, int]:
        """Prompt and output tokens. What the engine does before it hears of an abort only the ledger knows."""
        return self._generation.num_tokens_used() if self._generation is not None else (0, 0)


def granted_tier(caller: Caller, body: GenerationFields) -> str:
    """The one the request gets, for the answer. Raises PermissionDenied where it may not have what it asks for."""
    priority = _priority(caller, body)
    return "default" if caller.is_anybody else tier_of_priority(priority)


@contextmanager
def tenant_lease(edge: Edge, exchange: Exchange, body: GenerationFields, num_samples: int) -> Iterator[TenantLease]:
    """A request's part of its tenant's limits. Raises PermissionDenied, RateLimited or InsufficientQuota."""
    caller = exchange.caller
    if caller.is_anybody:
        yield TenantLease(edge, caller, body, None)
        return
    _priority(caller, body)  # what it may not ask costs it nothing
    with _counting_refusals(edge, caller.tenant):
        lease = caller.quota.enter(num_samples, edge.clock.now())
    taken = TenantLease(edge, caller, body, lease)
    edge.metrics.tenants.entered(caller.quota)
    try:
        yield taken
    finally:
        taken.end()


@contextmanager
def _counting_refusals(edge: Edge, tenant: Tenant) -> Iterator[None]:
    try:
        yield
    except RateLimited as error:
        edge.metrics.tenants.refused(tenant.name, error)
        raise


def _priority(caller: Caller, body: GenerationFields) -> int:
    tier = body.service_tier
    if tier not in (None, "auto", "default") and (caller.is_anybody or tier not in TIERS):
        choices = "auto or default" if caller.is_anybody else ", ".join(("auto", *TIERS))
        raise unsupported("service_tier", f"send {choices}")
    if body.priority is None:
        return caller.tenant.priority_of_tier(None if caller.is_anybody else tier)
    low, high = caller.tenant.priorities
    if not low <= body.priority <= high:
        raise PermissionDenied(
            f"priority is {body.priority}; this key may ask for {low} (most urgent) to {high}", param="priority"
        )
    return body.priority


def _sooner(asked: float | None, allowed: float | None, since: float = 0.0) -> float | None:
    """The stricter of what the request asks and what its tenant's terms say."""
    if allowed is None:
        return asked
    return since + allowed if asked is None else min(asked, since + allowed)

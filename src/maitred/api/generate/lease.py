"""One generation request as its tenant's: what it may ask, what it takes of the tenant's limits and gives back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maitred.api.dialects.openai.refusals import unsupported
from maitred.api.dialects.openai.requests import cap_max_tokens
from maitred.api.dialects.openai.schemas import GenerationFields
from maitred.api.generate.generation import Generation
from maitred.api.http.auth import Caller
from maitred.api.http.edge import Edge
from maitred.api.http.exchange import Exchange
from maitred.errors import PermissionDenied, RateLimited
from maitred.request import Request
from maitred.tenancy.quota import Lease
from maitred.tenancy.tenant import TIERS, Tenant, tier_of_priority


class Stay:
    """From the tenant's limits being asked to everything being given back; see `stay`."""

    def __init__(self, edge: Edge, caller: Caller, body: GenerationFields, lease: Lease | None) -> None:
        self._edge, self._caller, self._lease = edge, caller, lease
        self._batches: Sequence[Sequence[Request]] = ()
        self._generation: Generation | None = None
        self.priority = _priority(caller, body)
        self.cache_salt = body.cache_salt or ""
        if not caller.is_anybody:
            self.cache_salt = caller.tenant.cache_salt(edge.salt_secret, self.cache_salt)

    def take(self, batches: Sequence[Sequence[Request]]) -> None:
        """Give requests their tenant's terms, and take their tokens. Raises RateLimited or InsufficientQuota."""
        if self._lease is None:
            return
        tenant, requests = self._caller.tenant, [request for batch in batches for request in batch]
        num_prompt = sum(batch[0].num_prompt_tokens for batch in batches)
        cap_max_tokens(requests, tenant.default_max_tokens)
        now = self._edge.clock.now()
        cap_max_tokens(requests, self._caller.quota.silent_max_tokens(num_prompt, len(requests), now))
        for request in requests:
            request.tenant, request.weight, request.key_id = tenant.name, tenant.weight, self._caller.key_id
            request.ttft_slo_s = _sooner(request.ttft_slo_s, tenant.ttft_slo_s)
            request.start_by = _sooner(request.start_by, tenant.queue_timeout_s, request.arrived_at)
            request.finish_by = _sooner(request.finish_by, tenant.timeout_s, request.arrived_at)
        num_output = sum(request.max_tokens for request in requests)
        with _counting_refusals(self._edge, tenant):
            self._lease.reserve(num_prompt + num_output, now)
        self._batches = batches

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
        if self._generation is None:
            return 0, 0
        seen = self._generation.num_tokens_seen
        output = [max(seen[i], sample.request.num_output_tokens) for i, sample in enumerate(self._generation.samples)]
        prompt = sum(
            batch[0].num_prompt_tokens
            for batch in self._batches
            if any(request.first_scheduled_at is not None for request in batch)
        )
        return prompt, sum(output)


def granted_tier(caller: Caller, body: GenerationFields) -> str:
    """The one the request gets, for the answer. Raises PermissionDenied where it may not have what it asks for."""
    priority = _priority(caller, body)
    return "default" if caller.is_anybody else tier_of_priority(priority)


@contextmanager
def stay(edge: Edge, exchange: Exchange, body: GenerationFields, num_samples: int) -> Iterator[Stay]:
    """Let a request in at its tenant's door. Raises PermissionDenied, RateLimited or InsufficientQuota."""
    caller = exchange.caller
    if caller.is_anybody:
        yield Stay(edge, caller, body, None)
        return
    _priority(caller, body)  # what it may not ask costs it nothing
    with _counting_refusals(edge, caller.tenant):
        lease = caller.quota.enter(num_samples, edge.clock.now())
    guest = Stay(edge, caller, body, lease)
    edge.metrics.tenants.entered(caller.quota)
    try:
        yield guest
    finally:
        guest.end()


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

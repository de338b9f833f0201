"""A generating request's lease of the gate: what it asks for, what is counted, and which requests to shed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from maitred.api.generate.dialect import GenerationAsk
from maitred.api.generate.outcome import Outcome
from maitred.api.http.app import App
from maitred.core.errors import InvalidRequest, Overloaded, RateLimited
from maitred.core.request import FinishReason, RequestSpec
from maitred.gate.gate import Ask, Lease, TimeLimits
from maitred.tenancy.caller import Caller


class HttpLease:
    """One request's lease of the gate; see `leased`."""

    def __init__(self, app: App, caller: Caller, lease: Lease) -> None:
        self._app, self._caller, self._lease = app, caller, lease
        self.outcome: Outcome | None = None  # once there is one
        self.ended: frozenset[str] = frozenset()  # ids of samples that another replica had ended

    @property
    def priority(self) -> int:
        """The priority granted."""
        return self._lease.priority

    def admit(self, batches: Sequence[Sequence[RequestSpec]]) -> list[list[RequestSpec]]:
        """The samples of each prompt under their terms, to be submitted now. Raises as `Gate.admit`."""
        num_each = len(batches[0])
        specs = admitted(self._app, self._lease, [spec for batch in batches for spec in batch])
        return [specs[first : first + num_each] for first in range(0, len(specs), num_each)]

    def have_ended(self, request_ids: Iterable[str]) -> None:
        """Free the places of samples that another replica had ended."""
        self.ended = frozenset(request_ids)
        for request_id in self.ended:
            self._lease.sample_ended(request_id)

    def end(self) -> None:
        """Give back what was taken and not used; idempotent."""
        if self._lease.ended:
            return
        # what the engine does before it hears of an abort only the ledger knows
        prompt, output = self.outcome.num_tokens_used() if self.outcome is not None else (0, 0)
        self._lease.end(prompt + output)
        if not self._caller.is_anybody:
            self._app.observer.metrics.tenants.left(self._caller.quota, prompt, output)


@contextmanager
def leased(app: App, caller: Caller, asked: GenerationAsk, limits: TimeLimits) -> Iterator[HttpLease]:
    """A request's lease, until it has its answer. Raises as `Gate.enter`, and Unavailable from a server that closes."""
    ask = Ask(num_samples=asked.num_samples, priority=_priority(caller, asked), limits=limits)
    with app.in_flight.answering():
        lease = HttpLease(app, caller, enter(app, caller, ask))
        try:
            yield lease
        finally:
            lease.end()


def admitted(app: App, lease: Lease, specs: Sequence[RequestSpec]) -> list[RequestSpec]:
    """The specs under their terms, after those that make room for them were ended. Raises as `Gate.admit`."""
    with counting_refusals(app, lease.caller):
        found = app.gate.admit(lease, specs, app.clock.now())
    for request_id in found.shed:
        app.replica.abort(request_id, FinishReason.SHED)
    return found.specs


def cache_salt(app: App, caller: Caller, sent: str) -> str:
    """The client's own, and where there are tenants its tenant's."""
    return sent if caller.is_anybody else caller.tenant.cache_salt(app.salt_secret, sent)


def enter(app: App, caller: Caller, ask: Ask) -> Lease:
    """`Gate.enter`, counting requests within the tenant's own limits, even if the server then refuses them."""
    try:
        with counting_refusals(app, caller):
            lease = app.gate.enter(caller, ask, app.clock.now())
    except (InvalidRequest, Overloaded):
        _count_entered(app, caller)
        raise
    _count_entered(app, caller)
    return lease


def _count_entered(app: App, caller: Caller) -> None:
    if not caller.is_anybody:
        app.observer.metrics.tenants.entered(caller.quota)


@contextmanager
def counting_refusals(app: App, caller: Caller) -> Iterator[None]:
    try:
        yield
    except RateLimited as error:
        app.observer.metrics.tenants.refused(caller.tenant.name, error)
        raise


def _priority(caller: Caller, asked: GenerationAsk) -> int:
    """The priority sent, else that of the service tier."""
    if asked.priority is not None:
        return asked.priority
    if asked.tier is None or caller.is_anybody:
        return caller.tenant.default_priority
    return caller.tenant.priority_of_tier(asked.tier)

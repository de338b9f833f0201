"""The gate as a tensor request meets it: the caller's terms laid over it, a place held until it has its answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from maitred.api.generate.lease import counting_refusals, enter
from maitred.api.http.app import App
from maitred.core.errors import ModelNotFound
from maitred.core.tensor_request import InferRequest, InferResponse
from maitred.engine.tensors import TensorModels
from maitred.gate.gate import NO_LIMITS, Ask, Lease, TimeLimits
from maitred.tenancy.caller import Caller


def tensors_of(app: App) -> TensorModels:
    """Raises ModelNotFound from a server without a model repository, Unavailable before the engine is there."""
    app.check_loaded()
    if app.tensors is None:
        raise ModelNotFound("this server has no tensor models; serve with --model-repository")
    return app.tensors


_random = random.Random()  # ids are no secrets


def new_id() -> str:
    """An id for a request of ours; the client's own need not be unique."""
    return f"{_random.getrandbits(128):032x}"


class TensorLease:
    """One HTTP request's lease of the gate, for all its inferences; see `leased`."""

    def __init__(self, app: App, lease: Lease, limits: TimeLimits) -> None:
        self._app, self._lease, self._limits = app, lease, limits
        self.num_tokens = self.compute_us = 0  # of inferences that were answered

    def reserve(self, num_tokens: int) -> None:
        """Take tokens of the tenant's limits, once their number is known. Raises RateLimited or InsufficientQuota."""
        with counting_refusals(self._app, self._lease.caller):
            self._app.gate.let_in(self._lease, (), num_tokens, self._app.clock.now())

    async def infer(self, request: InferRequest) -> InferResponse:
        """The model's answer. Cancelling gives up the request's place at once. Raises as `TensorModels.infer`."""
        asked = _under_terms(self._lease, request, self._app.clock.now(), self._limits)
        response = await tensors_of(self._app).infer(asked)
        self.num_tokens += request.num_tokens
        self.compute_us += response.compute_us
        return response


@contextmanager
def leased(
    app: App, caller: Caller, *, num_requests: int = 1, priority: int | None = None, limits: TimeLimits = NO_LIMITS
) -> Iterator[TensorLease]:
    """A lease for so many inferences, until they have their answers. `priority` None is the tenant's default.

    Raises as `Gate.enter`, and Unavailable from a server that closes.
    """
    tensors_of(app)
    with app.in_flight.answering():
        lease = enter(app, caller, Ask(num_samples=num_requests, priority=priority, limits=limits))
        held = TensorLease(app, lease, limits)
        try:
            yield held
        finally:
            lease.end(held.num_tokens)
            if not caller.is_anybody:
                app.observer.metrics.tenants.left(caller.quota, held.num_tokens, 0)


async def infer(
    app: App, caller: Caller, request: InferRequest, *, priority: int | None = None, limits: TimeLimits = NO_LIMITS
) -> InferResponse:
    """A lease for one inference, and what the model answers."""
    with leased(app, caller, priority=priority, limits=limits) as lease:
        return await lease.infer(request)


def _under_terms(lease: Lease, request: InferRequest, now: float, limits: TimeLimits) -> InferRequest:
    return replace(request, terms=lease.terms(limits.asked(now), now), arrived_at=now)

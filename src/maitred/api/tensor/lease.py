"""The gate as a tensor request meets it: the caller's terms laid over it, a place held until it has its answer."""

from __future__ import annotations

from msgspec.structs import replace

from maitred.api.generate.lease import enter
from maitred.api.http.app import App
from maitred.errors import ModelNotFound
from maitred.gate.gate import Ask, Lease
from maitred.gate.terms import NO_LIMITS, TimeLimits
from maitred.tenancy.caller import Caller
from maitred.tensor.service import InferRequest, InferResponse, TensorService


def tensors_of(app: App) -> TensorService:
    """Raises ModelNotFound from a server without a model repository, Unavailable before the engine is there."""
    app.check_loaded()
    if app.tensors is None:
        raise ModelNotFound("this server has no tensor models; serve with --model-repository")
    return app.tensors


async def infer(
    app: App,
    caller: Caller,
    request: InferRequest,
    *,
    priority: int | None = None,
    limits: TimeLimits = NO_LIMITS,
) -> InferResponse:
    """What the model answers. `priority` None is the tenant's default. Cancelling it gives up its place at once.

    Raises as `Gate.enter` and `TensorService.infer`, and Unavailable from a server that closes.
    """
    tensors = tensors_of(app)
    with app.in_flight.answering():
        lease = enter(app, caller, Ask(priority=priority, limits=limits))
        try:
            return await tensors.infer(_under_terms(lease, request, app.clock.now(), limits))
        finally:
            lease.end(0)
            if not caller.is_anybody:
                app.observer.metrics.tenants.left(caller.quota, 0, 0)


def _under_terms(lease: Lease, request: InferRequest, now: float, limits: TimeLimits) -> InferRequest:
    caller, limits = lease.caller, lease.limits.and_also(limits)
    known = {} if caller.is_anybody else {"tenant": caller.tenant.name, "weight": caller.tenant.weight}
    return replace(
        request,
        **known,
        key_id=caller.key_id,
        priority=lease.priority,
        arrived_at=now,
        start_by=None if limits.queue_timeout_s is None else now + limits.queue_timeout_s,
        finish_by=None if limits.timeout_s is None else now + limits.timeout_s,
    )

"""Which tiers a request may use, and whether it can be served at all."""

from __future__ import annotations

from maitred.cluster.fleet_request import FleetRequest
from maitred.cluster.replicas import Replicas
from maitred.errors import MaitredError, ModelNotFound, PromptTooLong


def why_never(request: FleetRequest, fleet: Replicas, models: tuple[str, ...], fit: list[int]) -> MaitredError | None:
    """Why nobody serves it, however long it waits. `models` are those known, none before a replica has told them;
    `fit` are its `fitting_tiers`.
    """
    if models and request.model is not None and request.model not in models:
        there = ", ".join(models)
        return ModelNotFound(f"no replica serves the model {request.model!r}; there are: {there}", param="model")
    if fit:
        return None
    tiers = fleet.tiers[:1] if request.is_local else fleet.tiers
    limits = ", ".join(f"{tier.max_prompt_tokens} in {tier.name}" for tier in tiers)
    why = ", which x-maitred-privacy: local keeps it in" if request.is_local else ""
    return PromptTooLong(f"the prompt has {request.num_inputs} tokens; at most {limits}{why}", param="messages")


def fitting_tiers(request: FleetRequest, fleet: Replicas) -> list[int]:
    """Numbers of the tiers that take so long a prompt, in order; without those that serve other models, if any serves
    its own. An estimate refuses nothing: a prompt that by it fits no tier goes to the tier of the longest prompts.
    """
    limits = [tier.max_prompt_tokens for tier in (fleet.tiers[:1] if request.is_local else fleet.tiers)]
    fit = [number for number, limit in enumerate(limits) if limit is None or request.num_inputs <= limit]
    if not fit and not request.num_counted:
        return [limits.index(max(limit for limit in limits if limit is not None))]
    if request.model is None:
        return fit
    holders = fleet.models.get(request.model, 0)
    return [number for number in fit if holders & fleet.in_tier(number)] or fit


def allow_tiers(request: FleetRequest, fleet: Replicas, fit: list[int]) -> float | None:
    """Writes which of `fit` it may use now. Returns (s) after which it may use the next too, None where none is."""
    allowed = fit[: request.num_spills + 1]
    request.tiers = sum(1 << number for number in allowed)
    return fleet.tiers[allowed[-1]].spill_after_s if len(fit) > len(allowed) else None

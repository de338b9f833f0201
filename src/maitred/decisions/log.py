"""The log of a run, from which a fresh scheduler makes the same plans again (`replay`): what is told, and by whom.

For each step it holds what the scheduler was told since the step before (arrivals, ends, changes of policy and
config), `now`, the plan, and the outcome as far as scheduling depends on it (how many tokens, why a request ended,
names of blocks that output filled). Shortened block hashes stand for tokens: no token, text or key is in it.
`log_codec` makes bytes of it, `engine/store` keeps them in files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from maitred.config import SchedulerConfig
from maitred.request import FinishReason, Request, SamplingParams
from maitred.scheduler.swap import SwapCosts
from maitred.step import RequestProgress, SchedulerOutput

DIGEST_BYTES = (
    8  # of a block hash; scheduling only asks whether two are equal, and among 2^20 blocks none meet by chance
)


class Arrived(msgspec.Struct, frozen=True, tag="arrived", omit_defaults=True):
    """All of a request that scheduling depends on."""

    now: float
    request_id: str
    arrived_at: float
    num_prompt_tokens: int
    max_tokens: int
    sample_index: int = 0
    parent_id: str | None = None
    priority: int = 0
    tenant: str = ""
    weight: float = 1.0
    ttft_slo_s: float | None = None
    start_by: float | None = None
    finish_by: float | None = None
    predicted_output_tokens: float | None = None
    wants_prompt_logprobs: bool = False
    block_digests: bytes = b""  # DIGEST_BYTES each
    num_output_tokens: int = 0  # over 0 for one that another engine began


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """Ended from outside: aborted, or by a stop string."""

    now: float
    request_id: str
    reason: FinishReason


class Configured(msgspec.Struct, frozen=True, tag="configured"):
    now: float
    config: SchedulerConfig


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """What swapping and computing take, as the engine found."""

    now: float
    costs: SwapCosts


Event = Arrived | Ended | Configured | Measured


class Outcome(msgspec.Struct, frozen=True):
    """What a row gave; rows that gave nothing have none."""

    request_id: str
    num_tokens: int = 0  # kept, not those after the end
    finish_reason: FinishReason | None = None
    new_hashes: tuple[bytes, ...] = ()


class Step(msgspec.Struct, frozen=True):
    """`events` since the step before, then schedule(scheduled_at), then update(..., updated_at)."""

    scheduled_at: float
    updated_at: float
    plan: SchedulerOutput  # tokens and sampling, which take no part in equality, are empty
    events: tuple[Event, ...] = ()
    outcomes: tuple[Outcome, ...] = ()


class Arrival(NamedTuple):
    """An `Arrived` that nobody has written out yet. The request's first hashes stay what they are."""

    now: float
    request: Request
    num_hashes: int
    num_output_tokens: int = 0


class StepRecord(NamedTuple):
    """One step as the engine hands it over: nothing in it changes any more, so it can be encoded later, elsewhere."""

    scheduled_at: float
    updated_at: float
    plan: SchedulerOutput
    progress: tuple[RequestProgress, ...]
    events: tuple[Arrival | Ended | Configured | Measured, ...] = ()


class Recorder:
    """The StepObserver of one EngineCore; `write` is called once a step. Costs the step a few microseconds."""

    def __init__(self, write: Callable[[StepRecord], object]) -> None:
        self._write = write
        self._events: list[Arrival | Ended | Configured | Measured] = []

    def added(self, request: Request, now: float) -> None:
        self._events.append(Arrival(now, request, len(request.block_hashes), request.num_output_tokens))

    def ended(self, request_id: str, reason: FinishReason, now: float) -> None:
        self._events.append(Ended(now, request_id, reason))

    def configured(self, config: SchedulerConfig, now: float) -> None:
        self._events.append(Configured(now, config))

    def measured(self, costs: SwapCosts, now: float) -> None:
        self._events.append(Measured(now, costs))

    def stepped(
        self, plan: SchedulerOutput, progress: list[RequestProgress], scheduled_at: float, updated_at: float
    ) -> None:
        self._write(StepRecord(scheduled_at, updated_at, plan, tuple(progress), tuple(self._events)))
        self._events = []


def arrived_of(arrival: Arrival) -> Arrived:
    request = arrival.request
    return Arrived(
        now=arrival.now,
        request_id=request.request_id,
        arrived_at=request.arrived_at,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        sample_index=request.sample_index,
        parent_id=request.parent_id,
        priority=request.priority,
        tenant=request.tenant,
        weight=request.weight,
        ttft_slo_s=request.ttft_slo_s,
        start_by=request.start_by,
        finish_by=request.finish_by,
        predicted_output_tokens=request.predicted_output_tokens,
        wants_prompt_logprobs=request.sampling.prompt_logprobs is not None,
        block_digests=b"".join([digest[:DIGEST_BYTES] for digest in request.block_hashes[: arrival.num_hashes]]),
        num_output_tokens=arrival.num_output_tokens,
    )


def request_of(arrived: Arrived) -> Request:
    """A request made from digests in place of tokens; it is scheduled as the recorded one was."""
    return Request(
        request_id=arrived.request_id,
        prompt_token_ids=(),
        sampling=SamplingParams(prompt_logprobs=0 if arrived.wants_prompt_logprobs else None),
        arrived_at=arrived.arrived_at,
        num_prompt_tokens=arrived.num_prompt_tokens,
        max_tokens=arrived.max_tokens,
        sample_index=arrived.sample_index,
        parent_id=arrived.parent_id,
        priority=arrived.priority,
        tenant=arrived.tenant,
        weight=arrived.weight,
        ttft_slo_s=arrived.ttft_slo_s,
        start_by=arrived.start_by,
        finish_by=arrived.finish_by,
        predicted_output_tokens=arrived.predicted_output_tokens,
        block_hashes=list(split_digests(arrived.block_digests)),
        output_token_ids=[0] * arrived.num_output_tokens,
    )


def split_digests(digests: bytes) -> tuple[bytes, ...]:
    return tuple(digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES))

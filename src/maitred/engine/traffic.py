"""The last requests and steps of one engine, for a replay under other terms: lengths, block digests, tenants and times.

No token, text or key is in it. Both kinds of records are kept encoded, so that their size is known: 8 MiB in all.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from maitred.core.cost_model import StepShape, shape_of
from maitred.core.request import Charges, RequestSpec, RequestState
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.decisions.codec import Header
from maitred.decisions.log import Arrival, arrived_of
from maitred.scheduler.engine_core import EngineCore, StepListener, StepTimes

MAX_REQUEST_BYTES = 7 << 20
MAX_STEPS = 8192  # of less than 128 bytes each
RECORD_BYTES = 64  # of a record beside its contents
EACH_STEP = 1024  # so many first steps are all looked at
LOOK_EVERY = 4  # of later ones, one in so many


class ServedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended; its spec has what a decision log has, and digests of its output's blocks too."""

    spec: RequestSpec
    charges: Charges
    ended_at: float


class ServedStep(msgspec.Struct, frozen=True, array_like=True):
    shape: StepShape
    step_s: float
    gap_s: float | None  # to the next step; None when there was no request in between


class Traffic(msgspec.Struct, frozen=True):
    """A recording of one engine, and the configuration of its scheduler now."""

    header: Header
    kv_bytes_per_token: float
    num_layers: int
    requests: list[ServedRequest]
    steps: list[ServedStep]


Count = Annotated[int, msgspec.Meta(ge=1, le=16)]


class WhatIf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A change of what serves now; what is left out stays as it is."""

    policy: str | None = None
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    replicas: Count | None = None
    """Engines alike, in all."""
    prefill_workers: Count | None = None
    """Engines for prompts alone, besides; the others then decode."""
    slo: tuple[str, ...] = ()
    """Objectives of each request, as ttft:500ms."""
    minutes: Annotated[float, msgspec.Meta(ge=0.1, le=1440)] = 10.0
    """How far to go back."""


class ReplayAsked(msgspec.Struct, frozen=True):
    """A change, and the recording of each engine that serves."""

    change: WhatIf
    recordings: list[Traffic]


class TrafficRing(StepListener):
    """Keeps the last of both; costs a step that is looked at a few microseconds, and others next to nothing."""

    def __init__(self, header: Header, kv_bytes_per_token: float, num_layers: int) -> None:
        self._header, self._kv_bytes_per_token, self._num_layers = header, kv_bytes_per_token, num_layers
        self._here: dict[str, RequestState] = {}
        self._requests: deque[bytes] = deque()
        self._steps: deque[bytes] = deque(maxlen=MAX_STEPS)
        self._num_bytes = self._num_steps = 0
        self._last: tuple[StepShape, float, float, bool] | None = None  # the step before, if it was looked at
        self._encode = msgspec.msgpack.Encoder().encode

    def begin(self, core: EngineCore) -> None:
        self._core = core

    def added(self, request: RequestState, now: float) -> None:
        if not request.spec.kv_only:
            self._here[request.request_id] = request

    def ended(self, request_id: str) -> None:
        request = self._here.pop(request_id, None)
        if request is None or request.first_token_at is None or request.first_scheduled_at is None:
            return
        spec = arrived_of(Arrival(0.0, request, len(request.block_hashes))).spec
        ended_at = request.finished_at or request.last_token_at or request.first_token_at
        record = ServedRequest(replace(spec, request_id="", parent_id=None, resumed=None), request.charges, ended_at)
        self._requests.append(self._encode(record))
        self._num_bytes += len(self._requests[-1]) + RECORD_BYTES
        while self._num_bytes > MAX_REQUEST_BYTES:
            self._num_bytes -= len(self._requests.popleft()) + RECORD_BYTES

    def stepped(
        self, plan: SchedulerOutput, output: ModelOutput, progress: list[RequestProgress], times: StepTimes
    ) -> None:
        last, self._last = self._last, None
        if last is not None:
            shape, step_s, ended_at, goes_on = last
            gap_s = times.scheduled_at - ended_at if goes_on else None
            self._steps.append(self._encode(ServedStep(shape, step_s, gap_s)))
        self._num_steps += 1
        if plan.rows and (self._num_steps <= EACH_STEP or self._num_steps % LOOK_EVERY == 0):
            step_s, num_ended = (
                times.executed_at - times.scheduled_at,
                sum([p.finish_reason is not None for p in progress]),
            )
            self._last = shape_of(plan.rows), step_s, times.executed_at, len(self._here) > num_ended

    def recording(self) -> bytes:
        header = replace(self._header, config=self._core.scheduler.config)
        requests: Any = [msgspec.Raw(each) for each in self._requests]
        steps: Any = [msgspec.Raw(each) for each in self._steps]
        return self._encode(Traffic(header, self._kv_bytes_per_token, self._num_layers, requests, steps))

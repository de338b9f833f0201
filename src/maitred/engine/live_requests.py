"""Live requests, as a client keeps them: enough for the ledger, and to go on with another engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from msgspec.structs import replace

from maitred.core.request import (
    NO_CHARGES,
    Charges,
    FinishReason,
    RequestSpec,
    RequestState,
    ResumePoint,
)
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import InferRequest, InferResponse
from maitred.engine.frames import Infer
from maitred.engine.progress_streams import ProgressStream
from maitred.scheduler.timing import timing_of


@dataclass(slots=True, eq=False)
class LiveRequest:
    """One request between its submission and its last progress. It outlives engines."""

    spec: RequestSpec
    stream: ProgressStream
    output_token_ids: list[int] = field(default_factory=list)
    charges: Charges = NO_CHARGES
    finish_reason: FinishReason | None = None  # written last: a ledger that sees it finds everything else in place
    last_token_at: float | None = None  # s
    stalled_at: float | None = None  # s, since when no engine has it that had been in a step
    stalled_prefill_s: float = 0.0
    stalled_decode_s: float = 0.0
    ending: FinishReason | None = None  # an abort is on its way, and this is its reason
    sent: bool = False  # to the present engine
    num_resumes: int = 0
    num_deaths: int = 0  # of engines that had it, and may have died of it
    num_prompt_logprobs: int = 0  # positions delivered
    kv_from: tuple[str, ...] = ()  # where the next engine finds its KV
    num_repeated: int = 0  # prompt positions that the present engine reported again

    def __post_init__(self) -> None:
        point = self.spec.resumed
        if point is not None:  # another server began it
            self.output_token_ids = list(point.output_token_ids)
            self.charges, self.last_token_at = point.charges, point.last_token_at
        self.kv_from = self.kv_from or self.spec.kv_from

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def num_output_tokens(self) -> int:
        """Made here; those that it came with were counted where they were made."""
        point = self.spec.resumed
        return len(self.output_token_ids) - (len(point.output_token_ids) if point is not None else 0)

    def take(self, progress: RequestProgress, now: float) -> RequestProgress:
        """Note progress; returns what of it is news to the request's listener."""
        if progress.new_token_ids:
            self.output_token_ids.extend(progress.new_token_ids)
            self.last_token_at = now
        if progress.charges is not None:
            self.charges = progress.charges
        self.finish_reason = progress.finish_reason
        return self._without_repeats(progress) if progress.prompt_logprobs is not None else progress

    def left(self, now: float) -> None:
        """The engine that had it died; the next one computes its prompt again. Until then it is stalled."""
        self.num_resumes += self.sent
        self.sent = False
        if self.charges.first_scheduled_at is not None:
            self.stalled_at = now
        self.num_repeated = 0

    def moved(self, now: float) -> None:
        """Note the move from an engine that lives on to another one."""
        self.sent, self.stalled_at, self.num_repeated = False, now, 0

    def resume(self, now: float) -> RequestSpec:
        """The request for the next engine: what was asked, and how far it had come."""
        if self.stalled_at is not None:
            stalled_s, self.stalled_at = now - self.stalled_at, None
            if self.charges.first_token_at is None:
                self.stalled_prefill_s += stalled_s
            else:
                self.stalled_decode_s += stalled_s
        return self._as_it_stands()

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> RequestProgress:
        """Last progress of the request, when there is no engine to make one."""
        state = RequestState(self._as_it_stands())
        self.finish_reason = reason
        charges = self.charges._replace(num_generated_tokens=len(self.output_token_ids))
        timing = timing_of(state, now)
        return RequestProgress(self.request_id, finish_reason=reason, error=error, charges=charges, timing=timing)

    def _as_it_stands(self) -> RequestSpec:
        if self.charges is NO_CHARGES and not self.output_token_ids:
            return replace(self.spec, kv_from=self.kv_from) if self.kv_from else self.spec
        point = ResumePoint(
            output_token_ids=list(self.output_token_ids),
            charges=self.charges,
            last_token_at=self.last_token_at,
            stalled_at=self.stalled_at,
            stalled_prefill_s=self.stalled_prefill_s,
            stalled_decode_s=self.stalled_decode_s,
        )
        return replace(self.spec, resumed=point, kv_from=self.kv_from)

    def _without_repeats(self, progress: RequestProgress) -> RequestProgress:
        """An engine reports each prompt position once and in order; a second engine begins again."""
        told = progress.prompt_logprobs or ()
        first = self.num_repeated
        self.num_repeated += len(told)
        news = told[max(0, self.num_prompt_logprobs - first) :]
        self.num_prompt_logprobs += len(news)
        return progress._replace(prompt_logprobs=news or None)


@dataclass(slots=True, eq=False)
class LiveTensor:
    """One request to a tensor model between its submission and its answer. It outlives engines, and has no tokens."""

    spec: InferRequest
    stream: ProgressStream  # its one progress is its end
    charges: Charges = NO_CHARGES
    finish_reason: FinishReason | None = None  # written last
    result: InferResponse | None = None
    frame: Infer | None = None  # as it crosses, once it was sent to any engine
    ending: FinishReason | None = None  # an abort is on its way; its end comes with what its batch took
    sent: bool = False  # to the present engine
    num_deaths: int = 0  # of engines that had it, and may have died of it

    output_token_ids: ClassVar[tuple[int, ...]] = ()
    num_output_tokens: ClassVar[int] = 0

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    def left(self, now: float) -> None:
        """The engine that had it died; the next one begins it anew."""
        self.sent = False

    def ended(self, reason: FinishReason, now: float, error: str | None = None) -> RequestProgress:
        """Last progress of the request."""
        self.finish_reason = reason
        return RequestProgress(self.request_id, finish_reason=reason, error=error, charges=self.charges)


Live = LiveRequest | LiveTensor

"""The outcome so far of a request that generates: its samples, and what they used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from maitred.core.objectives import Pace, new_pace
from maitred.core.request import HANDOVER_OUTCOMES, NO_CHARGES, FinishReason, RequestSpec
from maitred.core.step import RequestTiming, TokenLogprobs
from maitred.engine.output import Piece


class TokenUsage(NamedTuple):
    """Tokens of a whole answer. A prompt counts once, however many samples it has."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompts, taken from the prefix cache
    num_generated_tokens: int
    num_reasoning_tokens: int = 0
    num_predicted_tokens: int = 0  # drafts of samples that brought a prediction
    num_accepted_tokens: int = 0  # of them, those that became output
    compute_us: int = 0  # in the executor, all samples together
    handover: str = ""  # the worst of its samples'; empty where engines hand nothing over


@dataclass(slots=True, eq=False)
class Sample:
    """One choice of the answer so far."""

    index: int  # of the choice: prompts in order, the n samples of each together
    request: RequestSpec
    texts: list[str] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)  # where marks are looked for
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0
    num_reasoning_tokens: int = 0  # of them, as far as the answer's writer has told them apart
    pace: Pace = field(default_factory=Pace)  # monotonic
    timing: RequestTiming | None = None  # once it has ended

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Outcome:
    """All samples of one HTTP request. `Generation` writes it, dialects and traces read it."""

    def __init__(self, batches: Sequence[Sequence[RequestSpec]], *, keeps_gaps: bool = False) -> None:
        """The samples of each prompt; as many of each."""
        self.batches = batches
        self.num_samples_per_prompt = len(batches[0])
        requests = [request for batch in batches for request in batch]
        self.samples = [
            Sample(index, request, pace=new_pace(keeps_gaps=keeps_gaps)) for index, request in enumerate(requests)
        ]
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in batches]  # by prompt, positions 1..
        self.charges = [NO_CHARGES] * len(requests)  # by sample, as told last
        self.num_tokens_seen = [0] * len(requests)  # by sample, hidden ones too

    def prompt_index(self, sample: Sample) -> int:
        return sample.index // self.num_samples_per_prompt

    def siblings(self, sample: Sample) -> list[Sample]:
        """The other samples of its prompt."""
        first = self.prompt_index(sample) * self.num_samples_per_prompt
        return [s for s in self.samples[first : first + self.num_samples_per_prompt] if s is not sample]

    def knows_prompt(self, sample: Sample) -> bool:
        """Whether the log-probabilities of the sample's whole prompt have come."""
        known = self.prompt_logprobs[self.prompt_index(sample)]
        return len(known) >= sample.request.num_prompt_tokens - 1

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities of answers, and of prompts once per sample; about, as positions are taken as alike."""
        kept = [sample.logprobs for sample in self.samples] + self.prompt_logprobs * self.num_samples_per_prompt
        return sum(len(positions) * len(positions[0].token_ids) for positions in kept if positions)

    def timing(self) -> RequestTiming | None:
        """Timing of the sample that took longest; None until all have ended."""
        if len(self.samples) == 1:
            return self.samples[0].timing
        timings = [sample.timing for sample in self.samples if sample.timing is not None]
        return max(timings, key=lambda t: t.total_s) if len(timings) == len(self.samples) else None

    def usage(self) -> TokenUsage:
        """Tokens used so far."""
        predicted = [c for c, s in zip(self.charges, self.samples, strict=True) if s.request.prediction_token_ids]
        return TokenUsage(
            num_prompt_tokens=sum(batch[0].num_prompt_tokens for batch in self.batches),
            num_cached_tokens=sum(c.num_cached_tokens for c in self.charges[:: self.num_samples_per_prompt]),
            num_generated_tokens=sum(sample.num_tokens for sample in self.samples),
            num_reasoning_tokens=sum(sample.num_reasoning_tokens for sample in self.samples),
            num_predicted_tokens=sum(charges.num_draft_tokens for charges in predicted),
            num_accepted_tokens=sum(charges.num_accepted_tokens for charges in predicted),
            compute_us=sum(charges.compute_us for charges in self.charges),
            handover=max((c.handover for c in self.charges if c.handover), key=HANDOVER_OUTCOMES.index, default=""),
        )

    def num_tokens_used(self) -> tuple[int, int]:
        """Prompt and output tokens that the engine has said it computed, hidden ones too; a prompt counts once."""
        num_samples, charges = self.num_samples_per_prompt, self.charges
        prompt = sum(
            batch[0].num_prompt_tokens
            for i, batch in enumerate(self.batches)
            if any(c.first_scheduled_at is not None for c in charges[i * num_samples : (i + 1) * num_samples])
        )
        seen = zip(charges, self.num_tokens_seen, strict=True)
        return prompt, sum(max(charge.num_generated_tokens, num_seen) for charge, num_seen in seen)


def timing_parts_ms(timing: RequestTiming) -> dict[str, float]:
    """The five parts, in ms, to the microsecond; they add up to the stay in the engine."""
    return {
        "queue": round(timing.queue_s * 1000, 3),
        "schedule": round(timing.schedule_s * 1000, 3),
        "prefill": round(timing.prefill_s * 1000, 3),
        "decode": round(timing.decode_s * 1000, 3),
        "stall": round(timing.stall_s * 1000, 3),
    }

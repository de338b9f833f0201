"""The samples of one HTTP request on their way: deltas of all prompts merged, counted, gathered or refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from maitred.api.generate.kept_logprobs import Keep
from maitred.api.http.edge import Edge
from maitred.engine.output import MAX_MERGED, TextDelta, stream_text
from maitred.errors import GenerationFailed, Overloaded, QueueTimeout, RequestTimeout, ServerError
from maitred.request import NO_CHARGES, FinishReason, RequestSpec, RequestTiming
from maitred.step import TokenLogprobs

_GOOD_ENDS = (None, FinishReason.STOP, FinishReason.LENGTH)
_Queue = asyncio.Queue[tuple[int, TextDelta] | Exception | None]


class TokenUsage(NamedTuple):
    """Tokens of a whole answer. A prompt counts once, however many samples it has."""

    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompts, taken from the prefix cache
    num_generated_tokens: int


@dataclass(slots=True, eq=False)
class Sample:
    """One choice of the answer, as far as it has come."""

    index: int  # of the choice: prompts in order, the n samples of each together
    request: RequestSpec
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_tokens: int = 0
    last_token_at: float | None = None  # s, monotonic
    timing: RequestTiming | None = None  # once it has ended

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Generation:
    """All samples of one HTTP request.

    `score_only` hides the one token that was sampled because every request must (max_tokens 0).
    """

    def __init__(self, edge: Edge, batches: Sequence[Sequence[RequestSpec]], *, score_only: bool = False) -> None:
        self._edge, self._batches, self._score_only = edge, batches, score_only
        self.num_samples_per_prompt = len(batches[0])
        requests = [request for batch in batches for request in batch]
        self.samples = [Sample(index, request) for index, request in enumerate(requests)]
        self.prompt_logprobs: list[list[TokenLogprobs]] = [[] for _ in batches]  # by prompt, positions 1..
        self._charges = [NO_CHARGES] * len(requests)  # by sample, as told last
        self.num_tokens_seen = [0] * len(requests)  # by sample, hidden ones too

    def prompt_index(self, sample: Sample) -> int:
        return sample.index // self.num_samples_per_prompt

    def siblings(self, sample: Sample) -> list[Sample]:
        """The other samples of its prompt."""
        first = self.prompt_index(sample) * self.num_samples_per_prompt
        return [s for s in self.samples[first : first + self.num_samples_per_prompt] if s is not sample]

    def knows_prompt(self, sample: Sample) -> bool:
        """Whether the log-probabilities of its whole prompt have come."""
        known = self.prompt_logprobs[self.prompt_index(sample)]
        return len(known) >= sample.request.num_prompt_tokens - 1

    @property
    def num_logprobs(self) -> int:
        """Of prompts, as often as their samples repeat them, and of answers; about, as positions are alike."""
        kept = [sample.logprobs for sample in self.samples] + self.prompt_logprobs * self.num_samples_per_prompt
        return sum(len(positions) * len(positions[0].token_ids) for positions in kept if positions)

    def timing(self) -> RequestTiming | None:
        """Of the sample that took longest; None until all have ended."""
        if len(self.samples) == 1:
            return self.samples[0].timing
        timings = [sample.timing for sample in self.samples if sample.timing is not None]
        return max(timings, key=lambda t: t.total_s) if len(timings) == len(self.samples) else None

    def usage(self) -> TokenUsage:
        """So far."""
        return TokenUsage(
            num_prompt_tokens=sum(batch[0].num_prompt_tokens for batch in self._batches),
            num_cached_tokens=sum(c.num_cached_tokens for c in self._charges[:: self.num_samples_per_prompt]),
            num_generated_tokens=sum(sample.num_tokens for sample in self.samples),
        )

    def num_tokens_used(self) -> tuple[int, int]:
        """Prompt and output tokens that the engine has said it computed, hidden ones too; a prompt counts once."""
        num_samples, charges = self.num_samples_per_prompt, self._charges
        prompt = sum(
            batch[0].num_prompt_tokens
            for i, batch in enumerate(self._batches)
            if any(c.first_scheduled_at is not None for c in charges[i * num_samples : (i + 1) * num_samples])
        )
        seen = zip(charges, self.num_tokens_seen, strict=True)
        return prompt, sum(max(charge.num_generated_tokens, num_seen) for charge, num_seen in seen)

    async def deltas(self) -> AsyncGenerator[tuple[Sample, TextDelta], None]:
        """What each sample gained, as it comes; closing it ends all. Raises a ServerError when one cannot go on."""
        if len(self._batches) == 1:
            async with aclosing(_stream(self._edge, self._batches[0])) as alone:
                async for delta in alone:
                    yield self._noted(0, delta)
            return
        async with aclosing(self._merged()) as merged:
            async for prompt_index, delta in merged:
                yield self._noted(prompt_index, delta)

    def _noted(self, prompt_index: int, delta: TextDelta) -> tuple[Sample, TextDelta]:
        sample = self.samples[prompt_index * self.num_samples_per_prompt + delta.index]
        self._count(prompt_index, sample, delta)
        if delta.finish_reason not in _GOOD_ENDS:
            raise self._failure(delta)
        return sample, self._without_output(delta) if self._score_only else delta

    def _failure(self, delta: TextDelta) -> ServerError:
        waited_s = delta.timing.total_s if delta.timing is not None else 0.0
        if delta.finish_reason is FinishReason.QUEUE_TIMEOUT:
            message = f"the request was in no step after {waited_s:.3g} s, all the time it had to wait"
            return QueueTimeout(message, retry_after_s=self._edge.gate.retry_after_s(self._edge.clock.now()))
        if delta.finish_reason is FinishReason.SHED:
            message = f"after {waited_s:.3g} s in the queue the request made room for a more urgent one"
            return Overloaded(message, retry_after_s=self._edge.gate.retry_after_s(self._edge.clock.now()))
        if delta.finish_reason is FinishReason.TIMEOUT:
            return RequestTimeout(f"the request was not done after {waited_s:.3g} s, all the time it had")
        return GenerationFailed(delta.error or "the server ended this request")

    async def gather(self, keep: Keep) -> None:
        """Run to the end; the samples then hold everything. `keep` is told what that costs, and may end it."""
        async with aclosing(self.deltas()) as deltas:
            async for sample, delta in deltas:
                if delta.text:
                    sample.texts.append(delta.text)
                sample.token_ids.extend(delta.token_ids)
                if delta.logprobs is not None:
                    keep(delta.logprobs)
                    sample.logprobs.extend(delta.logprobs)
                if delta.prompt_logprobs is not None:
                    keep(delta.prompt_logprobs)
                if delta.finish_reason is not None:
                    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason

    def _count(self, prompt_index: int, sample: Sample, delta: TextDelta) -> None:
        new = len(delta.token_ids)
        if new:
            now = time.monotonic()
            if sample.last_token_at is not None:
                gap_s = (now - sample.last_token_at) / new
                self._edge.metrics.tokens_came(gap_s, new)
                self._edge.latencies.between_tokens.observe(gap_s, new)
            self._edge.latencies.tokens_came(sample.request.tenant, new)
            sample.last_token_at = now
            self.num_tokens_seen[sample.index] += new
            if not self._score_only:
                sample.num_tokens += new
        if delta.charges is not None:
            self._charges[sample.index] = delta.charges
        if delta.index == 0 and delta.prompt_logprobs is not None:
            self.prompt_logprobs[prompt_index].extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            sample.timing = delta.timing
            self._edge.metrics.sample_finished(
                delta.timing, num_prompt_tokens=sample.request.num_prompt_tokens, num_tokens=sample.num_tokens
            )
            if delta.timing is not None:
                self._edge.latencies.answer_ended(delta.timing)

    def _without_output(self, delta: TextDelta) -> TextDelta:
        finish = FinishReason.LENGTH if delta.finish_reason is not None else None
        return TextDelta(index=delta.index, finish_reason=finish)

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        edge = self._edge
        queue: _Queue = asyncio.Queue(MAX_MERGED)
        tasks = [asyncio.create_task(_pump(edge, i, batch, queue)) for i, batch in enumerate(self._batches)]
        try:
            left = len(tasks)
            while left:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    left -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # their aborts are done when we return


def timing_parts_ms(timing: RequestTiming) -> dict[str, float]:
    """The five parts, in ms, to the microsecond; they add up to the stay in the engine."""
    return {
        "queue": round(timing.queue_s * 1000, 3),
        "schedule": round(timing.schedule_s * 1000, 3),
        "prefill": round(timing.prefill_s * 1000, 3),
        "decode": round(timing.decode_s * 1000, 3),
        "stall": round(timing.stall_s * 1000, 3),
    }


def _stream(edge: Edge, batch: Sequence[RequestSpec]) -> AsyncGenerator[TextDelta, None]:
    return cast(AsyncGenerator[TextDelta, None], stream_text(edge.replica, edge.model, batch))


async def _pump(edge: Edge, prompt_index: int, batch: Sequence[RequestSpec], queue: _Queue) -> None:
    """Carry one prompt's deltas into the common queue; None marks its end."""
    try:
        async with aclosing(_stream(edge, batch)) as deltas:
            async for delta in deltas:
                await queue.put((prompt_index, delta))
        await queue.put(None)
    except Exception as error:  # raised again by whoever reads the queue
        await queue.put(error)

"""The samples of one HTTP request on their way: deltas of all prompts merged, counted, gathered or refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import cast

from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App, Keep
from maitred.core import errors
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine.output import MAX_MERGED, TextDelta, stream_text

_GOOD_ENDS = (None, FinishReason.STOP, FinishReason.LENGTH)
_Queue = asyncio.Queue[tuple[int, TextDelta] | Exception | None]


class Generation:
    """Runs all samples of one HTTP request, and writes what comes into its outcome.

    `score_only` hides the one token that every request must sample (max_tokens 0). Samples with ids in `ended` belong
    to the outcome, and are not run.
    """

    def __init__(
        self,
        app: App,
        batches: Sequence[Sequence[RequestSpec]],
        *,
        score_only: bool = False,
        ended: frozenset[str] = frozenset(),
        marks: Collection[int] | None = None,
    ) -> None:
        self._app, self._score_only, self._marks = app, score_only, marks
        self._batches = [[spec for spec in batch if spec.request_id not in ended] for batch in batches]
        self.num_running = sum(map(len, self._batches))
        self._leads = [batch[0].sample_index if batch else 0 for batch in self._batches]  # each computes its prompt
        self.outcome = Outcome(batches, keeps_gaps=app.observer.keeps_gaps)

    async def deltas(self) -> AsyncGenerator[tuple[Sample, TextDelta], None]:
        """Deltas of all samples as they come; closing it ends all. Raises a MaitredError if a sample cannot go on."""
        if not self.num_running:
            return
        if len(self._batches) == 1:
            async with aclosing(self._stream(self._batches[0])) as alone:
                async for delta in alone:
                    yield self._noted(0, delta)
            return
        async with aclosing(self._merged()) as merged:
            async for prompt_index, delta in merged:
                yield self._noted(prompt_index, delta)

    def _noted(self, prompt_index: int, delta: TextDelta) -> tuple[Sample, TextDelta]:
        sample = self.outcome.samples[prompt_index * self.outcome.num_samples_per_prompt + delta.index]
        self._count(prompt_index, sample, delta)
        if delta.finish_reason not in _GOOD_ENDS:
            raise failure_of(self._app, delta)
        return sample, self._without_output(delta) if self._score_only else delta

    async def gather(self, keep: Keep | None) -> None:
        """Run to the end; the samples then hold everything. `keep` is told what log-probabilities cost, and may end it;
        None where there are none.
        """
        async with aclosing(self.deltas()) as deltas:
            async for sample, delta in deltas:
                if delta.text:
                    sample.texts.append(delta.text)
                sample.pieces.extend(delta.pieces)
                sample.token_ids.extend(delta.token_ids)
                if delta.logprobs is not None:
                    assert keep is not None, "log-probabilities that were not asked for"
                    keep(delta.logprobs)
                    sample.logprobs.extend(delta.logprobs)
                if delta.prompt_logprobs is not None and keep is not None:
                    keep(delta.prompt_logprobs)
                if delta.finish_reason is not None:
                    sample.finish_reason, sample.stop_reason = delta.finish_reason, delta.stop_reason

    def _count(self, prompt_index: int, sample: Sample, delta: TextDelta) -> None:
        new, outcome, observer = len(delta.token_ids), self.outcome, self._app.observer
        if new:
            gap_s = sample.pace.came(time.monotonic(), new)
            observer.tokens_came(sample.request.terms.tenant, new, gap_s)
            outcome.num_tokens_seen[sample.index] += new
            if not self._score_only:
                sample.num_tokens += new
        if delta.charges is not None:
            outcome.charges[sample.index] = delta.charges
        if delta.index == self._leads[prompt_index] and delta.prompt_logprobs is not None:
            outcome.prompt_logprobs[prompt_index].extend(delta.prompt_logprobs)
        if delta.finish_reason is not None:
            sample.timing = delta.timing
            observer.sample_ended(sample)

    def _without_output(self, delta: TextDelta) -> TextDelta:
        finish = FinishReason.LENGTH if delta.finish_reason is not None else None
        return TextDelta(index=delta.index, finish_reason=finish)

    async def _merged(self) -> AsyncGenerator[tuple[int, TextDelta], None]:
        queue: _Queue = asyncio.Queue(MAX_MERGED)
        tasks = [asyncio.create_task(self._pump(i, batch, queue)) for i, batch in enumerate(self._batches) if batch]
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

    def _stream(self, batch: Sequence[RequestSpec]) -> AsyncGenerator[TextDelta, None]:
        deltas = stream_text(self._app.replica, self._app.model, batch, self._marks)
        return cast(AsyncGenerator[TextDelta, None], deltas)

    async def _pump(self, prompt_index: int, batch: Sequence[RequestSpec], queue: _Queue) -> None:
        """Carry one prompt's deltas into the common queue; None marks its end."""
        try:
            async with aclosing(self._stream(batch)) as deltas:
                async for delta in deltas:
                    await queue.put((prompt_index, delta))
            await queue.put(None)
        except Exception as error:  # raised again where the queue is read
            await queue.put(error)


def failure_of(app: App, delta: TextDelta | RequestProgress) -> errors.MaitredError:
    """Error of a request that ended otherwise than by itself."""
    waited_s = delta.timing.total_s if delta.timing is not None else 0.0
    if delta.finish_reason is FinishReason.QUEUE_TIMEOUT:
        message = f"the request was in no step after {waited_s:.3g} s, all the time it had to wait"
        return errors.QueueTimeout(message, retry_after_s=app.gate.retry_after_s(app.clock.now()))
    if delta.finish_reason is FinishReason.SHED:
        message = f"after {waited_s:.3g} s in the queue the request made room for a more urgent one"
        return errors.Overloaded(message, retry_after_s=app.gate.retry_after_s(app.clock.now()))
    if delta.finish_reason is FinishReason.TIMEOUT:
        return errors.RequestTimeout(f"the request was not done after {waited_s:.3g} s, all the time it had")
    if delta.finish_reason is FinishReason.ABORT:  # by an administrator, for the client is still there
        return errors.Unavailable("the server was told to end its requests before it sleeps; send the request again")
    error = delta.error or "the server ended this request"
    return errors.InvalidRequest(error) if delta.is_requests_fault else errors.GenerationFailed(error)

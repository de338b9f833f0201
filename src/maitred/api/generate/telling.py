"""Tells a router the tokens of a stream beside its text, so that another replica can go on with it."""

from __future__ import annotations

import msgspec

from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.ops.fleet_feed import identity
from maitred.engine.intake import ServedModel
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.output import TextDelta
from maitred.fleet.told import StreamHead, ToldSample, ToldUsage, frame, head_line


def fingerprint_of(model: ServedModel, adapter: AdapterFacts | None = None) -> str:
    """Names all that tokens depend on besides the request: equal fingerprints give equal tokens."""
    told = identity(model).fingerprint
    own = model.revision if told is None else " ".join(msgspec.structs.astuple(told))
    return own if adapter is None else f"{own} {adapter.digest}"


def told_usage(outcome: Outcome) -> ToldUsage:
    """Usage by the engine's counters, by which a router bills."""
    num_prompt, num_output = outcome.num_tokens_used()
    used = outcome.usage()
    return ToldUsage(num_prompt, used.num_cached_tokens, num_output, used.compute_us)


class Teller:
    """Makes frames of one stream's writes."""

    def __init__(self, head: StreamHead, outcome: Outcome) -> None:
        self._first = head_line(head)  # goes out with the first frame
        self._outcome = outcome
        self._begun = [sample.num_tokens > 0 for sample in outcome.samples]
        # Of samples of which the client has nothing yet (an echo may wait for its log-probabilities): another replica
        # would begin them anew, and their seed gives the same tokens.
        self._untold: dict[int, ToldSample] = {}

    def frame(self, sample: Sample, delta: TextDelta, written: bytes, num_more: int = 0, *, is_last: bool) -> bytes:
        """Frame of the bytes `written` for `delta` and their tokens; `num_more` bytes that follow belong to it too."""
        told = self._told(sample, delta)
        if not written and not self._begun[sample.index]:
            self._untold[sample.index] = told
            return b""
        self._begun[sample.index] = True
        samples = [told]
        if self._untold:
            samples = [*self._released(sample, delta), told]
        if not written and not told.token_ids and not told.ended:
            return b""
        first, self._first = self._first, b""
        return first + frame(samples, written, num_more, told_usage(self._outcome) if is_last else None)

    def _told(self, sample: Sample, delta: TextDelta) -> ToldSample:
        token_ids = list(delta.token_ids)
        before = self._untold.pop(sample.index, None) if self._untold else None
        if before is not None:
            token_ids = before.token_ids + token_ids
        told = ToldSample(sample.index, token_ids, delta.finish_reason is not None)
        if delta.charges is not None:
            told.num_cached_tokens = delta.charges.num_cached_tokens
        elif before is not None:
            told.num_cached_tokens = before.num_cached_tokens
        return told

    def _released(self, sample: Sample, delta: TextDelta) -> list[ToldSample]:
        """Siblings whose text went out with this delta, because the prompt that they waited for is known now."""
        if not delta.prompt_logprobs:
            return []
        indices = [s.index for s in self._outcome.siblings(sample) if s.index in self._untold]
        for index in indices:
            self._begun[index] = True
        return [self._untold.pop(index) for index in indices]

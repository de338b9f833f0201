"""A stream that another replica began: what was told of it is replayed silently, and it goes on from exactly there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

import msgspec

from maitred.api.generate.dialect import GenerationAsk, StreamWriter
from maitred.api.generate.outcome import Outcome, Sample
from maitred.core.errors import InvalidRequest
from maitred.core.request import Charges, RequestSpec, ResumePoint
from maitred.core.step import RequestProgress, TokenLogprobs
from maitred.engine.intake import ServedModel
from maitred.engine.output import SampleText
from maitred.fleet.told import ResumeRequest, ToldSample


class Resumption:
    """A router's record of one stream, checked against the request that it claims to continue."""

    def __init__(self, asked: ResumeRequest, ask: GenerationAsk, model: ServedModel) -> None:
        """Raises InvalidRequest for what cannot be of this request."""
        self._asked, self._ask, self._model = asked, ask, model
        self._told = _by_index(asked.samples)
        _check(asked, ask, self._told, model.vocab_size)
        ask.id = ask.answer.id = asked.head.id
        ask.answer.created = asked.head.created
        self.ended: frozenset[str] = frozenset()  # ids of samples of which nothing is left

    def seeds(self) -> Callable[[], int]:
        """The seeds that the samples were drawn with, prompt by prompt."""
        return iter(self._asked.head.seeds).__next__

    def placed(self, batches: Sequence[Sequence[RequestSpec]], now: float) -> list[list[RequestSpec]]:
        """The samples as they stand; `ended` are known from here on. Raises InvalidRequest."""
        num_each = len(batches[0])
        placed = [
            [self._placed(spec, number * num_each + spec.sample_index, now) for spec in batch]
            for number, batch in enumerate(batches)
        ]
        specs = list(chain.from_iterable(placed))
        self.ended = frozenset(specs[index].request_id for index, told in self._told.items() if told.ended)
        return placed

    def replay(self, outcome: Outcome, writer: StreamWriter) -> None:
        """Bring outcome and writer to where the client is; what is written on the way it has already."""
        for index, told in self._told.items():
            sample = outcome.samples[index]
            spec, position = sample.request, outcome.prompt_index(sample)
            if spec.sampling.prompt_logprobs is not None:  # they come again, for those that have not begun
                outcome.prompt_logprobs[position] = [_unknown(token) for token in spec.prompt_token_ids[1:]]
            if spec.resumed is not None:
                self._replay(outcome, sample, spec.resumed, writer, ended=told.ended)
            outcome.prompt_logprobs[position] = []

    def _replay(
        self, outcome: Outcome, sample: Sample, point: ResumePoint, writer: StreamWriter, *, ended: bool
    ) -> None:
        sample.num_tokens = outcome.num_tokens_seen[sample.index] = len(point.output_token_ids)
        outcome.charges[sample.index] = point.charges
        if ended:
            return
        fresh = msgspec.structs.replace(sample.request, resumed=None)
        delta = SampleText(self._model.tokenizer, fresh, self._ask.shape_found.marks).push(
            replayed(fresh, point.output_token_ids)
        )
        if delta.finish_reason is not None:
            raise InvalidRequest(
                f"the tokens of sample {sample.index} hold a stop string, so it had ended", param="samples"
            )
        writer.delta(sample, delta)

    def _placed(self, spec: RequestSpec, index: int, now: float) -> RequestSpec:
        asked, told = self._asked, self._told.get(index)
        num_each = spec.sampling.n
        max_tokens = min(asked.head.max_tokens[index // num_each], self._model.max_model_len - spec.num_prompt_tokens)
        began_at = now - asked.age_s
        if told is None:
            return msgspec.structs.replace(spec, max_tokens=max_tokens, arrived_at=began_at)
        if len(told.token_ids) >= max_tokens and not told.ended:
            text = f"sample {index} has {len(told.token_ids)} tokens of at most {max_tokens}, so it had ended"
            raise InvalidRequest(text, param="samples")
        charges = Charges(
            num_cached_tokens=told.num_cached_tokens or 0,  # its prompt was counted where it began
            num_generated_tokens=len(told.token_ids),
            first_scheduled_at=began_at,
            first_token_at=began_at + asked.ttft_s,
        )
        point = ResumePoint(output_token_ids=told.token_ids, charges=charges, last_token_at=now, stalled_at=now)
        return msgspec.structs.replace(spec, max_tokens=max_tokens, arrived_at=began_at, resumed=point)


def replayed(spec: RequestSpec, token_ids: Sequence[int]) -> RequestProgress:
    """Tokens that the client has the text of, as if they came now; of their log-probabilities nothing is read."""
    logprobs = None if spec.sampling.logprobs is None else tuple(map(_unknown, token_ids))
    return RequestProgress(spec.request_id, tuple(token_ids), logprobs)


def _unknown(token_id: int) -> TokenLogprobs:
    return TokenLogprobs((token_id,), (0.0,), (1,))


def _by_index(samples: Sequence[ToldSample]) -> dict[int, ToldSample]:
    told = {sample.index: sample for sample in samples if sample.token_ids or sample.ended}
    if len({sample.index for sample in samples}) < len(samples):
        raise InvalidRequest("a sample is told of twice", param="samples")
    return told


def _check(asked: ResumeRequest, ask: GenerationAsk, told: dict[int, ToldSample], vocab_size: int) -> None:
    if not ask.stream:
        raise InvalidRequest("only streams are resumed; ask for a whole answer again, with its seed", param="body")
    head = asked.head
    if not len(head.seeds) == len(head.max_tokens) == ask.num_prompts:
        raise InvalidRequest(
            f"head has {len(head.seeds)} seeds and {len(head.max_tokens)} max_tokens for {ask.num_prompts} prompts",
            param="head",
        )
    if not (0 <= asked.ttft_s <= asked.age_s):
        raise InvalidRequest(f"ttft_s is {asked.ttft_s}, age_s {asked.age_s}; 0 <= ttft_s <= age_s", param="age_s")
    for sample in told.values():
        if not 0 <= sample.index < ask.num_samples:
            raise InvalidRequest(f"there is no sample {sample.index} of {ask.num_samples}", param="samples")
        if not all(0 <= token < vocab_size for token in sample.token_ids):
            raise InvalidRequest(
                f"sample {sample.index} has a token that is none of the {vocab_size} there are", param="samples"
            )

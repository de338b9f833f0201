"""POST /v1/completions, after OpenAI's specification with vLLM's extensions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import msgspec

from maitred.api.dialects.openai.answers import (
    FINGERPRINT,
    OPENAI,
    ChunkWriter,
    CompletionLogprobsWriter,
    TokenNames,
    WantedUsage,
    completion_id,
    encode,
    finish_name,
    joined,
    named_prompt_logprobs,
    usage_of,
)
from maitred.api.dialects.openai.reading import is_shaped, text_shape
from maitred.api.dialects.openai.refusals import COMPLETION_REFUSED, MAX_LISTED, heed_others, prompts_of
from maitred.api.dialects.openai.sampling import (
    COMPLETION_MAX_TOKENS,
    check_common,
    completion_sampling,
    make_ask,
    wanted_usage,
)
from maitred.api.dialects.openai.schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from maitred.api.generate.dialect import Dialect, GenerationAsk, Prompt
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.exchange import Exchange
from maitred.engine.intake import ServedModel
from maitred.engine.output import TextDelta
from maitred.tenancy.caller import Caller

DECODER = BodyDecoder(CompletionRequest, COMPLETION_REFUSED)


def decode_completion(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """POST /v1/completions. Raises InvalidRequest, UnsupportedParameter or ModelNotFound."""
    as_sent = DECODER.decode(sent)
    model = app.check_model(as_sent.body.model, exchange.caller)
    heed_others(app, exchange, as_sent, DECODER, COMPLETION_REFUSED)
    if as_sent.body.prompt_logprobs is None:  # those of an echo
        exchange.field_names = lambda: {"prompt_logprobs": "logprobs"}
    ask = completion_ask(app, exchange.caller, as_sent.body, model, exchange.request_id)
    exchange.log |= {"model": model, "stream": ask.stream, "n": ask.sampling.n, "prompts": ask.num_prompts}
    return ask


def completion_ask(app: App, caller: Caller, body: CompletionRequest, model: str, request_id: str) -> GenerationAsk:
    """The GenerationAsk of `body`, from any route. Raises InvalidRequest and UnsupportedParameter."""
    check_common(body, caller, policy_without_priorities=app.policy_without_priorities)
    sampling = completion_sampling(body, app.model, app.config.default_max_n)
    prompts = prompts_of(body.prompt, max_listed=max(MAX_LISTED, 2 * app.model.max_model_len))
    body.prompt = msgspec.Raw()  # which was the whole body
    answer_id, usage = completion_id("cmpl", body, request_id), wanted_usage(body)
    return make_ask(
        body,
        CompletionAnswer(app.model, body, model, prompts, answer_id, usage),
        id=answer_id,
        sampling=sampling,
        num_prompts=len(prompts),
        adapter=app.adapter(body.model, caller),
        prompts=lambda: prompts,
        add_special_tokens=body.add_special_tokens is not False,
        default_max_tokens=COMPLETION_MAX_TOKENS,
        score_only=body.max_tokens == 0,
        is_shaped=is_shaped(body),
        shape=partial(text_shape, app.grammars, body),
    )


COMPLETIONS = Dialect(OPENAI, decode_completion)


class CompletionAnswer:
    """Writes one text completion, whole or in chunks."""

    def __init__(
        self,
        model: ServedModel,
        body: CompletionRequest,
        name: str,
        prompts: Sequence[Prompt],
        completion_id: str,
        usage: WantedUsage,
    ) -> None:
        """`name` is the model's in the answer."""
        self.id, self._name = completion_id, name
        self._body, self._prompts, self._usage = body, prompts, usage
        self.created = int(time.time())
        self._tokenizer = model.tokenizer
        self._names = TokenNames(model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._skip_special = body.skip_special_tokens is not False
        self.echoes = bool(body.echo)
        self.returns_token_ids = bool(body.return_token_ids)

    def whole(self, outcome: Outcome) -> bytes:
        return encode(
            Completion(
                id=self.id,
                created=self.created,
                model=self._name,
                system_fingerprint=FINGERPRINT,
                choices=[self._choice(outcome, sample) for sample in outcome.samples],
                usage=usage_of(outcome),
            )
        )

    def _choice(self, outcome: Outcome, sample: Sample) -> CompletionChoice:
        body, writer = self._body, self.logprobs_writer(sample)
        choice = CompletionChoice(
            index=sample.index,
            text=sample.text,
            logprobs=writer.output(()) if writer is not None else None,
            finish_reason=finish_name(sample.finish_reason),
            stop_reason=sample.stop_reason,
        )
        if self.echoes:
            choice.text = self.echoed(outcome, sample) + choice.text
            choice.logprobs = prompt_logprobs(outcome, sample, writer)
        if writer is not None and choice.logprobs is not None:
            choice.logprobs = joined(choice.logprobs, writer.packed_output(sample.logprobs))
        if self.returns_token_ids:
            choice.token_ids = sample.token_ids
            choice.prompt_token_ids = list(sample.request.prompt_token_ids)
        if body.prompt_logprobs is not None:
            known = outcome.prompt_logprobs[outcome.prompt_index(sample)]
            choice.prompt_logprobs = named_prompt_logprobs(known, self._names, body.prompt_logprobs)
        return choice

    def stream(self, outcome: Outcome) -> CompletionStream:
        envelope = {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self._name,
            "system_fingerprint": FINGERPRINT,
        }
        return CompletionStream(self, outcome, ChunkWriter(envelope, outcome, self._usage))

    def echoed(self, outcome: Outcome, sample: Sample) -> str:
        """The prompt as text, if the answer repeats it."""
        if not self.echoes:
            return ""
        prompt = self._prompts[outcome.prompt_index(sample)]
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=self._skip_special)

    def logprobs_writer(self, sample: Sample) -> CompletionLogprobsWriter | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobsWriter(
            self._tokenizer,
            self._names,
            self._body.logprobs,
            skip_special_tokens=self._skip_special,
            context=() if self._body.echo else sample.request.prompt_token_ids,
        )


class CompletionStream:
    """Writes the chunks of one."""

    def __init__(self, answer: CompletionAnswer, outcome: Outcome, chunks: ChunkWriter) -> None:
        self._outcome = outcome
        self._choices = [_ChoiceStream(answer, outcome, sample, chunks) for sample in outcome.samples]
        self.last = chunks.last

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        written = self._choices[sample.index].write(delta)
        if delta.prompt_logprobs and self._outcome.num_samples_per_prompt > 1:  # what siblings may wait for
            for sibling in self._outcome.siblings(sample):
                written += self._choices[sibling.index].write(None)
        return written


class _ChoiceStream:
    """One choice of a stream. An echo with logprobs goes first, so deltas that come earlier wait for it."""

    def __init__(self, answer: CompletionAnswer, outcome: Outcome, sample: Sample, chunks: ChunkWriter) -> None:
        self._answer, self._outcome, self._sample, self._chunks = answer, outcome, sample, chunks
        self._logprobs = answer.logprobs_writer(sample)
        self._waiting: list[TextDelta] = []
        self._begun = False

    def write(self, delta: TextDelta | None) -> bytes:
        """The events for `delta` and those before it, once they may be sent."""
        if delta is not None:
            self._waiting.append(delta)
        if not self._waiting or not self._may_begin():
            return b""
        deltas, self._waiting = self._waiting, []
        return b"".join([self._begin(), *map(self._piece, deltas)])

    def _may_begin(self) -> bool:
        ended = self._waiting[-1].finish_reason is not None
        return self._begun or ended or not self._needs_prompt_logprobs or self._outcome.knows_prompt(self._sample)

    @property
    def _needs_prompt_logprobs(self) -> bool:
        return self._logprobs is not None and self._answer.echoes

    def _begin(self) -> bytes:
        """The echo and the prompt's tokens, as far as they were asked for."""
        if self._begun:
            return b""
        self._begun = True
        if not self._answer.echoes and not self._answer.returns_token_ids:
            return b""
        choice = CompletionChoice(self._sample.index, self._answer.echoed(self._outcome, self._sample))
        if self._answer.echoes:
            choice.logprobs = prompt_logprobs(self._outcome, self._sample, self._logprobs)
        if self._answer.returns_token_ids:
            choice.prompt_token_ids = list(self._sample.request.prompt_token_ids)
        return self._chunks.event(choice)

    def _piece(self, delta: TextDelta) -> bytes:
        """The new text, then the end: clients may stop reading a chunk once they see its finish_reason."""
        logprobs = self._logprobs.output(delta.logprobs) if self._logprobs is not None and delta.logprobs else None
        shows_ids = bool(self._answer.returns_token_ids and delta.token_ids)
        piece = b""
        if delta.text or logprobs is not None or shows_ids:
            choice = CompletionChoice(self._sample.index, delta.text, logprobs)
            if shows_ids:
                choice.token_ids = list(delta.token_ids)
            piece = self._chunks.event(choice)
        if delta.finish_reason is not None:
            last = CompletionChoice(self._sample.index, "", finish_reason=finish_name(delta.finish_reason))
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            piece += self._chunks.event(last)
        return piece


def prompt_logprobs(
    outcome: Outcome, sample: Sample, writer: CompletionLogprobsWriter | None
) -> CompletionLogprobs | None:
    """The echoed prompt's log-probabilities."""
    if writer is None:
        return None
    known = outcome.prompt_logprobs[outcome.prompt_index(sample)]
    return writer.prompt(sample.request.prompt_token_ids[0], known)

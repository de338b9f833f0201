"""POST /v1/completions, after OpenAI's specification with vLLM's extensions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from maitred.api.dialects.openai.bounded import MAX_LISTED, Prompt, prompts_of
from maitred.api.dialects.openai.logprobs import CompletionLogprobsWriter, TokenNames, joined, named_prompt_logprobs
from maitred.api.dialects.openai.refusals import COMPLETION_REFUSED, CompletionAsSent, refuse_unbuilt
from maitred.api.dialects.openai.requests import completion_id
from maitred.api.dialects.openai.sampling import COMPLETION_MAX_TOKENS, check_common, completion_sampling
from maitred.api.dialects.openai.schemas import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from maitred.api.generate.complete import complete
from maitred.api.generate.generation import Generation, Sample
from maitred.api.generate.streaming import ChunkWriter, finish_name, stream_events
from maitred.api.http.edge import Edge, RequestOptions
from maitred.api.http.exchange import Exchange
from maitred.api.http.sse import EventStream
from maitred.engine.output import TextDelta
from maitred.errors import RequestError
from maitred.gate.terms import cap_max_tokens
from maitred.request import RequestSpec

_DECODER = msgspec.json.Decoder(CompletionAsSent)


async def create_completion(edge: Edge, exchange: Exchange) -> None:
    """Check, tokenise, generate; answer whole or as a stream."""
    body = await exchange.json(_DECODER)
    model = edge.check_model(body.model)
    refuse_unbuilt(body, COMPLETION_REFUSED)
    check_common(body, policy_without_priorities=edge.policy_without_priorities)
    sampling = completion_sampling(body, edge.model, edge.config.default_max_n)
    async with exchange.turn():
        prompts = prompts_of(body.prompt, max_listed=max(MAX_LISTED, 2 * edge.model.max_model_len))
    body.prompt = msgspec.Raw()  # which was the whole body
    answer = CompletionAnswer(edge, body, model, prompts, completion_id("cmpl", body, exchange))
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": sampling.n, "prompts": len(prompts)}
    special = body.add_special_tokens is not False

    def make_batches(options: RequestOptions) -> list[list[RequestSpec]]:
        try:
            batches = edge.make_batches(prompts, sampling, options, answer.id, add_special_tokens=special)
        except RequestError as error:
            if error.param == "prompt_logprobs" and body.prompt_logprobs is None:
                error.param = "logprobs"  # those of an echo
            raise
        batches = [cap_max_tokens(batch, COMPLETION_MAX_TOKENS) for batch in batches]
        if not body.echo:
            prompts.clear()
        return batches

    num_samples, score_only = sampling.n * len(prompts), body.max_tokens == 0
    await complete(edge, exchange, body, answer, make_batches, num_samples=num_samples, score_only=score_only)


class CompletionAnswer:
    """Writes one text completion, whole or in chunks."""

    def __init__(
        self, edge: Edge, body: CompletionRequest, model: str, prompts: Sequence[Prompt], completion_id: str
    ) -> None:
        """`model` is the name that the answer gives."""
        self.id, self._model = completion_id, model
        self._edge, self._body, self._prompts = edge, body, prompts
        self._created = int(time.time())
        self._names = TokenNames(edge.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._skip_special = body.skip_special_tokens is not False
        self.echoes = bool(body.echo)
        self.returns_token_ids = bool(body.return_token_ids)

    def whole(self, generation: Generation) -> Completion:
        return Completion(
            id=self.id,
            created=self._created,
            model=self._model,
            system_fingerprint=self._edge.fingerprint,
            choices=[self._choice(generation, sample) for sample in generation.samples],
            usage=generation.usage(),
        )

    def _choice(self, generation: Generation, sample: Sample) -> CompletionChoice:
        body, writer = self._body, self.logprobs_writer(sample)
        choice = CompletionChoice(
            index=sample.index,
            text=sample.text,
            logprobs=writer.output(()) if writer is not None else None,
            finish_reason=finish_name(sample.finish_reason),
            stop_reason=sample.stop_reason,
        )
        if self.echoes:
            choice.text = self.echoed(generation, sample) + choice.text
            choice.logprobs = prompt_logprobs(generation, sample, writer)
        if writer is not None and choice.logprobs is not None:
            choice.logprobs = joined(choice.logprobs, writer.packed_output(sample.logprobs))
        if self.returns_token_ids:
            choice.token_ids = sample.token_ids
            choice.prompt_token_ids = list(sample.request.prompt_token_ids)
        if body.prompt_logprobs is not None:
            known = generation.prompt_logprobs[generation.prompt_index(sample)]
            choice.prompt_logprobs = named_prompt_logprobs(known, self._names, body.prompt_logprobs)
        return choice

    async def stream(self, generation: Generation, events: EventStream, *, usage: bool, continuous: bool) -> None:
        envelope = {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._edge.fingerprint,
        }
        chunks = ChunkWriter(envelope, generation, usage=usage, continuous=continuous)
        streams = [_ChoiceStream(self, generation, sample, chunks) for sample in generation.samples]

        def write(sample: Sample, delta: TextDelta) -> bytes:
            written = streams[sample.index].write(delta)
            if delta.prompt_logprobs and generation.num_samples_per_prompt > 1:  # what siblings may wait for
                for sibling in generation.siblings(sample):
                    written += streams[sibling.index].write(None)
            return written

        await stream_events(generation, events, write, chunks)

    def echoed(self, generation: Generation, sample: Sample) -> str:
        """The prompt as text, if the answer repeats it."""
        if not self.echoes:
            return ""
        prompt = self._prompts[generation.prompt_index(sample)]
        if isinstance(prompt, str):
            return prompt
        return self._edge.model.tokenizer.decode(prompt, skip_special_tokens=self._skip_special)

    def logprobs_writer(self, sample: Sample) -> CompletionLogprobsWriter | None:
        if self._body.logprobs is None:
            return None
        return CompletionLogprobsWriter(
            self._edge.model.tokenizer,
            self._names,
            self._body.logprobs,
            skip_special_tokens=self._skip_special,
            context=() if self._body.echo else sample.request.prompt_token_ids,
        )


class _ChoiceStream:
    """One choice of a stream. An echo with logprobs goes first, so what comes earlier waits for it."""

    def __init__(self, answer: CompletionAnswer, generation: Generation, sample: Sample, chunks: ChunkWriter) -> None:
        self._answer, self._generation, self._sample, self._chunks = answer, generation, sample, chunks
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
        return self._begun or ended or not self._needs_prompt_logprobs or self._generation.knows_prompt(self._sample)

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
        choice = CompletionChoice(self._sample.index, self._answer.echoed(self._generation, self._sample))
        if self._answer.echoes:
            choice.logprobs = prompt_logprobs(self._generation, self._sample, self._logprobs)
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
    generation: Generation, sample: Sample, writer: CompletionLogprobsWriter | None
) -> CompletionLogprobs | None:
    """The echoed prompt's log-probabilities."""
    if writer is None:
        return None
    known = generation.prompt_logprobs[generation.prompt_index(sample)]
    return writer.prompt(sample.request.prompt_token_ids[0], known)

"""POST /v1/chat/completions, after OpenAI's specification with vLLM's extensions."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from maitred.api.dialects.openai.bounded import any_object, check_object
from maitred.api.dialects.openai.logprobs import TokenNames, chat_logprobs, named_prompt_logprobs, packed_chat_logprobs
from maitred.api.dialects.openai.messages import render_chat, text_of
from maitred.api.dialects.openai.refusals import CHAT_REFUSED, ChatAsSent, refuse_unbuilt
from maitred.api.dialects.openai.requests import completion_id
from maitred.api.dialects.openai.sampling import chat_sampling, check_common
from maitred.api.dialects.openai.schemas import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionRequest,
    ChatDelta,
    ChatLogprobs,
)
from maitred.api.generate.complete import complete
from maitred.api.generate.generation import Generation, Sample
from maitred.api.generate.lease import granted_tier
from maitred.api.generate.streaming import ChunkWriter, finish_name, stream_events
from maitred.api.http.edge import Edge, RequestOptions
from maitred.api.http.exchange import Exchange
from maitred.api.http.sse import EventStream
from maitred.engine.output import TextDelta
from maitred.errors import RequestError
from maitred.gate.terms import cap_max_tokens
from maitred.request import RequestSpec, SamplingParams

_DECODER = msgspec.json.Decoder(ChatAsSent)


async def create_chat_completion(edge: Edge, exchange: Exchange) -> None:
    """Check, render, tokenise, generate; answer whole or as a stream."""
    body = await exchange.json(_DECODER)
    model = edge.check_model(body.model)
    refuse_unbuilt(body, CHAT_REFUSED)
    check_common(body, policy_without_priorities=edge.policy_without_priorities)
    check_object(body.prompt_cache_options, "prompt_cache_options")
    sampling = chat_sampling(body, edge.model, edge.config.default_max_n)
    tier = granted_tier(exchange.caller, body)
    answer = ChatAnswer(edge, body, model, completion_id("chatcmpl", body, exchange), tier)
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": sampling.n}
    make_batches = partial(_make_batches, edge, body, sampling, answer.id)
    await complete(edge, exchange, body, answer, make_batches, num_samples=sampling.n)


def _make_batches(
    edge: Edge, body: ChatCompletionRequest, sampling: SamplingParams, completion_id: str, options: RequestOptions
) -> list[list[RequestSpec]]:
    prompt = render_chat(
        edge.model,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=any_object(body.chat_template_kwargs, "chat_template_kwargs"),
    )
    body.messages.clear()
    special = bool(body.add_special_tokens)  # the template writes them
    try:
        batches = edge.make_batches([prompt], sampling, options, completion_id, add_special_tokens=special)
    except RequestError as error:
        if error.param == "prompt":
            error.param = "messages"
        elif error.param == "max_tokens" and body.max_tokens is None:
            error.param = "max_completion_tokens"
        raise
    return [cap_max_tokens(batches[0], edge.model.generation_defaults.get("max_tokens"))]


class ChatAnswer:
    """Writes one chat completion, whole or in chunks."""

    def __init__(
        self, edge: Edge, body: ChatCompletionRequest, model: str, completion_id: str, service_tier: str
    ) -> None:
        """`model` is the name that the answer gives."""
        self.id, self._model = completion_id, model
        self._edge, self._body, self._service_tier = edge, body, service_tier
        self._created = int(time.time())
        self._names = TokenNames(edge.model.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        last = body.messages[-1] if body.messages else None
        self._echoed = text_of(last) if body.echo and last is not None and last.role == "assistant" else ""

    def whole(self, generation: Generation) -> ChatCompletion:
        body, sample = self._body, generation.samples[0]
        answer = ChatCompletion(
            id=self.id,
            created=self._created,
            model=self._model,
            choices=[self._choice(sample) for sample in generation.samples],
            usage=generation.usage(),
            system_fingerprint=self._edge.fingerprint,
        )
        if body.service_tier is not None:
            answer.service_tier = self._service_tier
        if body.return_token_ids:
            answer.prompt_token_ids = list(sample.request.prompt_token_ids)
        if body.prompt_logprobs is not None:
            known = generation.prompt_logprobs[0]
            answer.prompt_logprobs = named_prompt_logprobs(known, self._names, body.prompt_logprobs)
        return answer

    def _choice(self, sample: Sample) -> ChatChoice:
        logprobs = None if self._num_top is None else packed_chat_logprobs(sample.logprobs, self._names, self._num_top)
        return ChatChoice(
            index=sample.index,
            message=AssistantMessage(self._echoed + sample.text),
            logprobs=logprobs,
            finish_reason=finish_name(sample.finish_reason),
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self._body.return_token_ids else UNSET,
        )

    async def stream(self, generation: Generation, events: EventStream, *, usage: bool, continuous: bool) -> None:
        envelope = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._edge.fingerprint,
        }
        if self._body.service_tier is not None:
            envelope["service_tier"] = self._service_tier
        chunks = ChunkWriter(envelope, generation, usage=usage, continuous=continuous)
        begun = [False] * len(generation.samples)

        def write(sample: Sample, delta: TextDelta) -> bytes:
            first = b""
            if not begun[sample.index]:
                begun[sample.index] = True
                first = self._first(chunks, sample)
            return first + self._piece(chunks, sample, delta)

        await stream_events(generation, events, write, chunks)

    def _first(self, chunks: ChunkWriter, sample: Sample) -> bytes:
        """The role, and the message that is continued, if it is to be repeated."""
        more: dict[str, Any] = {}
        if self._body.return_token_ids and sample.index == 0:
            more["prompt_token_ids"] = list(sample.request.prompt_token_ids)
        choice = ChatChunkChoice(sample.index, ChatDelta(role="assistant", content=self._echoed))
        return chunks.event(choice, **more)

    def _piece(self, chunks: ChunkWriter, sample: Sample, delta: TextDelta) -> bytes:
        """The new text, then the end: clients may stop reading a chunk once they see its finish_reason."""
        logprobs: ChatLogprobs | None = None
        if self._num_top is not None and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._names, self._num_top)
        shows_ids = bool(self._body.return_token_ids and delta.token_ids)
        piece = b""
        if delta.text or logprobs is not None or shows_ids:
            choice = ChatChunkChoice(sample.index, ChatDelta(content=delta.text), logprobs)
            if shows_ids:
                choice.token_ids = list(delta.token_ids)
            piece = chunks.event(choice)
        if delta.finish_reason is not None:
            last = ChatChunkChoice(sample.index, ChatDelta(), finish_reason=finish_name(delta.finish_reason))
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            piece += chunks.event(last)
        return piece

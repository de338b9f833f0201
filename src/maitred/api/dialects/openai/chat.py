"""POST /v1/chat/completions, after OpenAI's specification with vLLM's extensions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from msgspec import UNSET

from maitred.api.dialects.openai import schemas
from maitred.api.dialects.openai.answers import (
    FINGERPRINT,
    OPENAI,
    ChunkWriter,
    TokenNames,
    WantedUsage,
    chat_logprobs,
    completion_id,
    encode,
    finish_name,
    named_prompt_logprobs,
    packed_chat_logprobs,
    usage_of,
)
from maitred.api.dialects.openai.reading import AnswerReader, ChatReading, is_shaped, text_of
from maitred.api.dialects.openai.refusals import CHAT_REFUSED, check_object, heed_others
from maitred.api.dialects.openai.sampling import chat_sampling, check_common, make_ask, wanted_usage
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.exchange import Exchange
from maitred.core.request import RequestSpec
from maitred.engine.intake import ServedModel
from maitred.engine.output import TextDelta
from maitred.tenancy.tenant import tier_of_priority
from maitred.text.answer_parser import ArgumentsText, CallBegun

_DECODER = BodyDecoder(schemas.ChatCompletionRequest, CHAT_REFUSED)


def decode_chat(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """POST /v1/chat/completions. Raises InvalidRequest, UnsupportedParameter or ModelNotFound."""
    as_sent = _DECODER.decode(sent)
    body = as_sent.body
    model = app.check_model(body.model, exchange.caller)
    if as_sent.refused or as_sent.unknown:
        heed_others(app, exchange, as_sent, _DECODER, CHAT_REFUSED)
    max_tokens = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    exchange.field_names = lambda: {"prompt": "messages", "max_tokens": max_tokens}
    check_common(body, exchange.caller, policy_without_priorities=app.policy_without_priorities)
    if body.prompt_cache_options is not UNSET:
        check_object(body.prompt_cache_options, "prompt_cache_options")
    sampling = chat_sampling(body, app.model, app.config.default_max_n)
    id = completion_id("chatcmpl", body, exchange.request_id)
    reading = ChatReading(app.model, app.grammars, body, id)
    answer = ChatAnswer(app.model, body, model, reading, wanted_usage(body))
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": sampling.n}
    return make_ask(
        body,
        answer,
        id=id,
        sampling=sampling,
        prompts=reading.prompts,
        adapter=app.adapter(body.model, exchange.caller),
        shape=reading.shape,
        prediction=None if body.prediction is UNSET else reading.prediction,
        is_shaped=is_shaped(body),
        may_take_long=body.chat_template_kwargs is not UNSET,
        add_special_tokens=bool(body.add_special_tokens),  # the template writes them
        default_max_tokens=app.model.generation_defaults.get("max_tokens"),
    )


CHAT = Dialect(OPENAI, decode_chat)


class ChatAnswer:
    """Writes one chat completion, whole or in chunks."""

    def __init__(
        self,
        model: ServedModel,
        body: schemas.ChatCompletionRequest,
        name: str,
        reading: ChatReading,
        usage: WantedUsage,
    ) -> None:
        """`name` is the model's in the answer."""
        self.id, self._name, self._reading = reading.id, name, reading
        self._body, self._usage = body, usage
        self.created = int(time.time())
        self._tokenizer = model.tokenizer
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        last = body.messages[-1] if body.messages else None
        self._echoed = text_of(last) if body.echo and last is not None and last.role == "assistant" else ""

    @cached_property
    def _names(self) -> TokenNames:
        return TokenNames(self._tokenizer, as_ids=bool(self._body.return_tokens_as_token_ids))

    def whole(self, outcome: Outcome) -> bytes:
        body, request = self._body, outcome.samples[0].request
        answer = schemas.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self._name,
            choices=[self._choice(sample) for sample in outcome.samples],
            usage=usage_of(outcome),
            system_fingerprint=FINGERPRINT,
        )
        if body.service_tier is not None:
            answer.service_tier = _tier_of(request)
        if body.return_token_ids:
            answer.prompt_token_ids = list(request.prompt_token_ids)
        if body.prompt_logprobs is not None:
            known = outcome.prompt_logprobs[0]
            answer.prompt_logprobs = named_prompt_logprobs(known, self._names, body.prompt_logprobs)
        return encode(answer)

    def _choice(self, sample: Sample) -> schemas.ChatChoice:
        logprobs = None if self._num_top is None else packed_chat_logprobs(sample.logprobs, self._names, self._num_top)
        message = self._message(sample)
        return schemas.ChatChoice(
            index=sample.index,
            message=message,
            logprobs=logprobs,
            finish_reason=finish_name(sample.finish_reason, calls=message.tool_calls is not UNSET),
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self._body.return_token_ids else UNSET,
        )

    def _message(self, sample: Sample) -> schemas.AssistantMessage:
        reader = self._reading.reader(sample)
        if reader is None:
            return schemas.AssistantMessage(self._echoed + sample.text)
        read = reader.push(sample.pieces, is_last=True)
        content = self._echoed + read.content
        message = schemas.AssistantMessage(content or None if read.calls else content)
        if read.reasoning:
            message.reasoning = message.reasoning_content = read.reasoning
        if read.calls:
            message.tool_calls = whole_calls(read.calls)
        return message

    def stream(self, outcome: Outcome) -> ChatStream:
        envelope = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self._name,
            "system_fingerprint": FINGERPRINT,
        }
        if self._body.service_tier is not None:
            envelope["service_tier"] = _tier_of(outcome.samples[0].request)
        readers = [self._reading.reader(sample) for sample in outcome.samples]
        return ChatStream(self, ChunkWriter(envelope, outcome, self._usage), readers)

    def first(self, chunks: ChunkWriter, sample: Sample) -> bytes:
        """The role, and the message that is continued, if it is to be repeated."""
        more: dict[str, Any] = {}
        if self._body.return_token_ids and sample.index == 0:
            more["prompt_token_ids"] = list(sample.request.prompt_token_ids)
        choice = schemas.ChatChunkChoice(sample.index, schemas.ChatDelta(role="assistant", content=self._echoed))
        return chunks.event(choice, **more)

    def piece(self, chunks: ChunkWriter, sample: Sample, delta: TextDelta, reader: AnswerReader | None) -> bytes:
        """The new text, then the end: clients may stop reading a chunk once they see its finish_reason."""
        logprobs: schemas.ChatLogprobs | None = None
        if self._num_top is not None and delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs, self._names, self._num_top)
        shows_ids = bool(self._body.return_token_ids and delta.token_ids)
        told = _plain_deltas(delta) if reader is None else _read_deltas(reader, delta)
        if not told and (logprobs is not None or shows_ids):
            told = [schemas.ChatDelta()]
        choices = [schemas.ChatChunkChoice(sample.index, of_one) for of_one in told]
        if choices:
            choices[0].logprobs = logprobs
            choices[0].token_ids = list(delta.token_ids) if shows_ids else UNSET
        piece = b"".join(map(chunks.event, choices))
        if delta.finish_reason is not None:
            finish = finish_name(delta.finish_reason, calls=reader is not None and reader.num_calls > 0)
            last = schemas.ChatChunkChoice(sample.index, schemas.ChatDelta(), finish_reason=finish)
            if delta.stop_reason is not None:
                last.stop_reason = delta.stop_reason
            piece += chunks.event(last)
        return piece


class ChatStream:
    """Writes the chunks of one."""

    def __init__(self, answer: ChatAnswer, chunks: ChunkWriter, readers: Sequence[AnswerReader | None]) -> None:
        self._answer, self._chunks, self._readers = answer, chunks, readers
        self._begun = [False] * len(readers)
        self.last = chunks.last

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        first = b""
        if not self._begun[sample.index]:
            self._begun[sample.index] = True
            first = self._answer.first(self._chunks, sample)
        return first + self._answer.piece(self._chunks, sample, delta, self._readers[sample.index])


def _plain_deltas(delta: TextDelta) -> list[schemas.ChatDelta]:
    return [schemas.ChatDelta(content=delta.text)] if delta.text else []


def _read_deltas(reader: AnswerReader, delta: TextDelta) -> list[schemas.ChatDelta]:
    """Deltas of one kind and one call each, as OpenAI's: instructor reads only the first of a chunk's `tool_calls`."""
    read = reader.push(delta.pieces, is_last=delta.finish_reason is not None)
    told: list[schemas.ChatDelta] = []
    if read.reasoning:
        told.append(schemas.ChatDelta(reasoning=read.reasoning, reasoning_content=read.reasoning))
    if read.content:
        told.append(schemas.ChatDelta(content=read.content))
    return told + [schemas.ChatDelta(tool_calls=[_call_delta(event)]) for event in joined_calls(read.calls)]


def joined_calls(events: Sequence[CallBegun | ArgumentsText]) -> list[CallBegun | ArgumentsText]:
    """Events with consecutive texts of one call's arguments joined."""
    joined: list[CallBegun | ArgumentsText] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, ArgumentsText) and isinstance(last, ArgumentsText) and last.index == event.index:
            joined[-1] = ArgumentsText(event.index, last.text + event.text)
        else:
            joined.append(event)
    return joined


def _call_delta(event: CallBegun | ArgumentsText) -> schemas.ToolCallDelta:
    if isinstance(event, CallBegun):
        function = schemas.CalledFunction(name=event.name, arguments="")
        return schemas.ToolCallDelta(index=event.index, id=event.id, type="function", function=function)
    return schemas.ToolCallDelta(index=event.index, function=schemas.CalledFunction(arguments=event.text))


def whole_calls(events: Sequence[CallBegun | ArgumentsText]) -> list[schemas.ToolCall]:
    """Calls with all of their arguments."""
    calls: list[schemas.ToolCall] = []
    for event in events:
        if isinstance(event, CallBegun):
            calls.append(schemas.ToolCall(id=event.id, function=schemas.CalledFunction(name=event.name, arguments="")))
        else:
            calls[event.index].function.arguments += event.text
    return calls


def _tier_of(request: RequestSpec) -> str:
    """The service tier granted; without tenants there are no tiers."""
    return tier_of_priority(request.terms.priority) if request.terms.tenant else "default"

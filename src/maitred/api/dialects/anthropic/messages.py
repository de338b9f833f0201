"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the reading of chats."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, Raw

from maitred.api.dialects.anthropic.reading import MessagesReading
from maitred.api.dialects.anthropic.schemas import (
    ANTHROPIC,
    AnthropicMessage,
    AnthropicUsage,
    InputTokens,
    MessagesRequest,
    StopReasonName,
    TextBlock,
    ThinkingBlock,
    ThinkingTokens,
    ToolUseBlock,
)
from maitred.api.dialects.openai.chat import joined_calls, whole_calls
from maitred.api.dialects.openai.models import MOST_CONTEXTS, MOST_TOKENS
from maitred.api.dialects.openai.reading import AnswerReader, ChatReading, is_shaped, read_answer
from maitred.api.dialects.openai.sampling import chat_sampling, check_common, make_ask
from maitred.api.dialects.openai.schemas import ToolCall
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, Sent
from maitred.api.http.exchange import IGNORED_FIELDS, IGNORED_TOOLS, LEFT_OUT, Exchange
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.engine.output import TextDelta
from maitred.tenancy.tenant import tier_of_priority
from maitred.text.answer_parser import CallBegun

_encode = msgspec.json.Encoder().encode
_DECODER = BodyDecoder(MessagesRequest)
_BETA = b"anthropic-beta"
_STANDARD = {"priority": "priority", "flex": "batch"}  # tiers by Anthropic's names; others are standard


def decode_messages(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """POST /v1/messages. Raises InvalidRequest, UnsupportedParameter, UnsupportedContent or ModelNotFound."""
    body, reading, model = _read(app, exchange, _DECODER.decode(sent))
    if body.max_tokens is None:
        raise InvalidRequest("max_tokens is missing; send how many tokens the answer may have", param="max_tokens")
    chat = reading.chat
    check_common(chat, exchange.caller, policy_without_priorities=None)
    sampling = chat_sampling(chat, app.model, app.config.default_max_n)
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": 1}
    id = f"msg_{exchange.request_id}"
    read = ChatReading(app.model, app.grammars, chat, id)
    return make_ask(
        chat,
        MessageAnswer(id, model, body, read),
        id=id,
        sampling=sampling,
        prompts=read.prompts,
        adapter=app.adapter(body.model, exchange.caller),
        shape=read.shape,
        is_shaped=is_shaped(chat),
        may_take_long=chat.chat_template_kwargs is not UNSET,
        add_special_tokens=False,
        cuts_max_tokens=True,
        score_only=body.max_tokens == 0,
    )


MESSAGES = Dialect(ANTHROPIC, decode_messages)


def _read(app: App, exchange: Exchange, sent: Sent[MessagesRequest]) -> tuple[MessagesRequest, MessagesReading, str]:
    """The body, what it asks for, and the model's name; tells in headers what has no effect."""
    body, template = sent.body, app.model.chat_template
    model = app.check_model(body.model, exchange.caller)
    app.ignored_fields.heed(exchange, sent.unknown, _DECODER.known)
    late = template is not None and any(turn.role not in ("user", "assistant") for turn in body.messages)
    reading = MessagesReading(body, takes_late_system=late and template.takes_late_system)  # type: ignore[union-attr]
    exchange.field_names = reading.field_names
    betas = exchange.headers.get(_BETA, b"").decode("latin-1").split(",")
    ignored = [*reading.ignored, *(f"{_BETA.decode()}.{beta.strip()}" for beta in betas if beta.strip())]
    exchange.tell(IGNORED_FIELDS, ignored)
    exchange.tell(IGNORED_TOOLS, reading.ignored_tools)
    exchange.tell(LEFT_OUT, reading.left_out)
    return body, reading, model


async def count_tokens(app: App, exchange: Exchange) -> None:
    """Tokens of the prompt that /v1/messages would make of the same body."""
    _, reading, _ = _read(app, exchange, await exchange.sent(_DECODER))
    read = ChatReading(app.model, app.grammars, reading.chat, "")

    def count() -> int:
        [prompt], most = read.prompts(), max(MOST_TOKENS, MOST_CONTEXTS * app.model.max_model_len)
        assert isinstance(prompt, str), "a template makes text"
        return len(app.model.tokenizer.encode(prompt, add_special_tokens=False, most=most))

    async with app.in_flight.watch(exchange):
        num_tokens = await app.text.run(exchange.num_body_bytes, count, may_take_long=is_shaped(reading.chat))
    await exchange.answer_json(InputTokens(num_tokens))


class MessageAnswer:
    """Writes one message, whole or event by event."""

    def __init__(self, id: str, name: str, body: MessagesRequest, reading: ChatReading) -> None:
        """`name` is the model's in the answer."""
        self.id, self.name, self._reading = id, name, reading
        self.created = int(time.time())
        self._max_tokens, self._tells_tier = body.max_tokens or 0, body.service_tier is not None

    def whole(self, outcome: Outcome) -> bytes:
        sample = outcome.samples[0]
        reader = self._reading.reader(sample)
        read = read_answer(reader, sample.text, sample.pieces, is_last=True)
        content: list[ThinkingBlock | TextBlock | ToolUseBlock] = []
        if read.reasoning:
            content.append(ThinkingBlock(read.reasoning, self.id))
        if read.content:
            content.append(TextBlock(read.content))
        content += map(_tool_use, whole_calls(read.calls))
        stop, sequence = self.stop(sample, sample.finish_reason, sample.stop_reason, calls=bool(read.calls))
        return _encode(self.message(content, self.usage(outcome), stop, sequence))

    def message(
        self, content: list[Any], usage: AnthropicUsage, stop: StopReasonName | None, sequence: str | None
    ) -> AnthropicMessage:
        return AnthropicMessage(
            id=self.id, model=self.name, content=content, stop_reason=stop, stop_sequence=sequence, usage=usage
        )

    def stop(
        self, sample: Sample, finish: FinishReason | None, reason: int | str | None, *, calls: bool
    ) -> tuple[StopReasonName, str | None]:
        """Why the answer ended, and the stop sequence that was met."""
        if finish is not FinishReason.STOP:
            is_full = sample.request.max_tokens < self._max_tokens
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        if isinstance(reason, str):
            return "stop_sequence", reason
        return "tool_use" if calls else "end_turn", None

    def usage(self, outcome: Outcome) -> AnthropicUsage:
        """Usage so far. What of the prompt was computed is `input_tokens`: no caching was ordered, or is charged."""
        used = outcome.usage()
        usage = AnthropicUsage(
            input_tokens=used.num_prompt_tokens - used.num_cached_tokens,
            cache_read_input_tokens=used.num_cached_tokens,
            cache_creation_input_tokens=0,
            output_tokens=used.num_generated_tokens,
        )
        if used.num_reasoning_tokens:
            usage.output_tokens_details = ThinkingTokens(used.num_reasoning_tokens)
        if self._tells_tier:
            tier = tier_of_priority(outcome.samples[0].request.terms.priority)
            usage.service_tier = _STANDARD.get(tier, "standard")  # type: ignore[assignment]
        return usage

    def stream(self, outcome: Outcome) -> MessageStream:
        return MessageStream(self, outcome, self._reading.reader(outcome.samples[0]))


def _tool_use(call: ToolCall) -> ToolUseBlock:
    """A call with its input; one that was cut has its text as INVALID_JSON, as Anthropic has clients send it back."""
    input = (call.function.arguments or "{}").encode()
    try:
        msgspec.json.decode(input, type=dict[str, Raw])
    except msgspec.DecodeError:
        input = _encode({"INVALID_JSON": call.function.arguments})
    return ToolUseBlock(call.id, str(call.function.name), Raw(input))


_THINKING, _TEXT, _CALL = "thinking", "text", "tool_use"
_BEGIN = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
_DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b":%b}}\n\n'
_STOP = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
_PIECES = {
    _THINKING: b'thinking_delta","thinking',
    _TEXT: b'text_delta","text',
    _CALL: b'input_json_delta","partial_json',
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_END = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessageStream:
    """Writes the events of one message: blocks one after the other, each of one kind, then the reason of the end."""

    def __init__(self, answer: MessageAnswer, outcome: Outcome, reader: AnswerReader | None) -> None:
        self._answer, self._outcome, self._reader = answer, outcome, reader
        self._has_begun = False
        self._open, self._index = "", -1  # the block that is open, or was the last

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        events: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            usage = self._answer.usage(self._outcome)
            usage.output_tokens, usage.output_tokens_details = 0, UNSET
            message = _encode(self._answer.message([], usage, None, None))
            events += b'event: message_start\ndata: {"type":"message_start","message":%b}\n\n' % message, _PING
        reader, is_last = self._reader, delta.finish_reason is not None
        read = read_answer(reader, delta.text, delta.pieces, is_last=is_last)
        self._say(_THINKING, read.reasoning, events)
        self._say(_TEXT, read.content, events)
        for event in joined_calls(read.calls):
            if isinstance(event, CallBegun):
                self._begin(_CALL, _encode(ToolUseBlock(event.id, event.name, Raw(b"{}"))), events)
            else:
                self._say(_CALL, event.text, events)
        if is_last:
            self._close(events)
            calls = reader is not None and reader.num_calls > 0
            stop, sequence = self._answer.stop(sample, delta.finish_reason, delta.stop_reason, calls=calls)
            told = {"stop_reason": stop, "stop_sequence": sequence}
            last = {"type": "message_delta", "delta": told, "usage": self._answer.usage(self._outcome)}
            events += b"event: message_delta\ndata: %b\n\n" % _encode(last), _END
        return b"".join(events)

    def last(self) -> bytes:
        return b""  # of the one sample the last delta had all

    def _say(self, kind: str, text: str, events: list[bytes]) -> None:
        if not text:
            return
        if self._open != kind:
            self._begin(kind, _encode(ThinkingBlock("", "") if kind == _THINKING else TextBlock("")), events)
        events.append(_DELTA % (self._index, _PIECES[kind], _encode(text)))

    def _begin(self, kind: str, block: bytes, events: list[bytes]) -> None:
        self._close(events)
        self._open, self._index = kind, self._index + 1
        events.append(_BEGIN % (self._index, block))

    def _close(self, events: list[bytes]) -> None:
        if self._open == _THINKING:
            events.append(_DELTA % (self._index, b'signature_delta","signature', _encode(self._answer.id)))
        if self._open:
            events.append(_STOP % self._index)
        self._open = ""

"""POST /api/chat and /api/generate: bodies of Ollama's clients as chats, answers as lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai.answers import TokenNames, encode, packed_chat_logprobs
from maitred.api.dialects.openai.reading import MAX_SHAPE_BYTES, ChatReading, is_shaped, read_answer, text_shape
from maitred.api.dialects.openai.refusals import any_value, has_value, unsupported, unsupported_content
from maitred.api.dialects.openai.sampling import chat_sampling, make_ask
from maitred.api.dialects.openai.schemas import AnyList, ChatCompletionRequest, ChatMessage, SentTokenIds
from maitred.api.generate.dialect import GenerationAsk, Prompt
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder, Sent
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.core.step import TokenLogprobs
from maitred.engine.output import Piece, TextDelta
from maitred.fleet.prefix_keys import keep_alive_s, without_latest
from maitred.text.answer_parser import ArgumentsText, CallBegun


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Options that have an effect here; others are named in a header."""

    num_predict: int | None = None  # below 0: no limit
    num_ctx: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    seed: int | None = None  # below 0: drawn
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


_OPTIONS = {  # of a chat's fields
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "num_predict"),
    "repetition_penalty": "repeat_penalty",
    **{
        n: n
        for n in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
    },
}
_FIELD_NAMES = {
    **{ours: f"options.{theirs}" for ours, theirs in _OPTIONS.items()},
    **dict.fromkeys(("response_format", "response_format.schema", "response_format.json_schema"), "format"),
    **dict.fromkeys(("reasoning_effort", "chat_template_kwargs"), "think"),
}


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: Raw | UnsetType = UNSET
    tool_calls: AnyList = UNSET
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """The body of either; `messages` and `tools` are a chat's, the last five fields a prompt's."""

    model: str | None = None
    stream: bool | None = None  # true is the default
    format: Raw | UnsetType = UNSET  # "json", or a schema
    options: OllamaOptions | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    messages: list[OllamaMessage] = []
    tools: AnyList = UNSET
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: Raw | UnsetType = UNSET
    context: SentTokenIds | None = None  # of an earlier answer


_DECODER = BodyDecoder(OllamaRequest, ("suffix", "template"))
_WHY = {
    "suffix": "models are asked to go on with a text, not to fill one in",
    "template": "a template may not come with a request; start the server with --chat-template FILE",
}
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}  # `max` is as Ollama takes it
_THINKS = Raw(b'{"enable_thinking":true,"thinking":true}')
_ARGUMENTS = msgspec.json.Decoder(dict[str, Raw])


class OnlyLoaded(Exception):
    """Nothing is asked but that the model be there. `reply` is the answer."""

    def __init__(self, reply: dict[str, Any]) -> None:
        self.reply = reply


def empty_reply(name: str, done_reason: str, *, is_chat: bool) -> dict[str, Any]:
    """The answer where nothing is asked, which loads or unloads the model."""
    told = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
    now = rfc3339(int(time.time()))
    return {"model": name, "created_at": now, **told, "done": True, "done_reason": done_reason}


def rfc3339(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def decode(is_chat: bool, app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """POST /api/chat, or /api/generate: one message of a chat, or with `raw` the text itself. Raises InvalidRequest,
    UnsupportedParameter, ModelNotFound or OnlyLoaded.
    """
    as_sent = _DECODER.decode(sent)
    body = as_sent.body
    if not is_chat and has_value(body.images):
        raise unsupported_content("images", "images")
    if not is_chat and body.raw and (body.system or body.context):
        raise InvalidRequest("raw takes the prompt as it is; leave system and context out", param="raw")
    asked = _as_asked(app, exchange, as_sent)
    exchange.field_names = lambda: {**_FIELD_NAMES, **({"prompt": "messages"} if is_chat else {"messages": "prompt"})}
    if not (body.messages if is_chat else body.prompt):
        raise OnlyLoaded(empty_reply(body.model or str(asked.model), "load", is_chat=is_chat))
    reading = None if body.raw and not is_chat else ChatReading(app.model, app.grammars, asked, exchange.request_id)
    answer = OllamaAnswer(app, exchange.request_id, body, asked, reading, is_chat=is_chat)
    exchange.log |= {"model": asked.model, "stream": asked.stream, "n": 1}

    def prompts() -> list[Prompt]:
        if reading is None:
            return [body.prompt or ""]
        if body.think and reading.format.reasoning is None:
            raise InvalidRequest(f'"{asked.model}" does not support thinking', param="think")
        system = [ChatMessage(role="system", content=body.system)] if body.system else []
        asked.messages = (
            _as_chat(body.messages) if is_chat else [*system, ChatMessage(role="user", content=body.prompt)]
        )
        (prompt,) = reading.prompts()
        if is_chat or not body.context:
            return [prompt]
        return [[*body.context, *app.model.tokenizer.encode(str(prompt), add_special_tokens=False)]]

    return make_ask(
        asked,
        answer,
        id=answer.id,
        sampling=chat_sampling(asked, app.model, 1),
        prompts=prompts,
        adapter=app.adapter(asked.model, exchange.caller),
        shape=partial(text_shape, app.grammars, asked) if reading is None else reading.shape,
        is_shaped=is_shaped(asked),
        add_special_tokens=reading is None,  # else the template writes them
        cuts_max_tokens=True,  # clients ask for more than any context has
        default_max_tokens=app.model.generation_defaults.get("max_tokens"),
    )


def _as_asked(app: App, exchange: Exchange, sent: Sent[OllamaRequest]) -> ChatCompletionRequest:
    """The fields by the names of a chat's, messages left out."""
    body, options = sent.body, sent.body.options or OllamaOptions()
    name, caller = body.model or None, exchange.caller
    if name and not app.is_model(name) and app.adapter(name, caller) is None:
        name = without_latest(name)  # clients write it behind names that have no tag
    for name, value in sent.refused.items():
        if bytes(value) not in (b"null", b'""'):
            raise unsupported(name, _WHY[name])
    if options.typical_p not in (None, 1):
        raise unsupported("options.typical_p", "there is no such sampler; send min_p or top_p")
    if body.think not in (None, True, False, "", *_LEVELS):
        raise InvalidRequest(f"think must be true, false or one of {', '.join(_LEVELS)}", param="think")
    unserved = ["options.num_ctx"] if (options.num_ctx or 0) > app.model.max_model_len else []
    kept_s = keep_alive_s(body.keep_alive)
    if kept_s is None and body.keep_alive is not None:
        raise InvalidRequest(
            f"keep_alive is {shortened(repr(body.keep_alive), 40)}; it must be a number of seconds, or a duration such "
            'as "5m"; 0 unloads the model, below 0 keeps it',
            param="keep_alive",
        )
    if kept_s == 0 and not exchange.from_router:  # the only model stays; a router may unload it
        unserved.append("keep_alive")
    app.ignored_fields.heed(exchange, (*sent.unknown, *unserved), _DECODER.known)
    given = {ours: getattr(options, theirs) for ours, theirs in _OPTIONS.items() if ours != "max_tokens"}
    given |= {name: None for name in ("max_completion_tokens", "seed") if (given[name] or 0) < 0}
    return ChatCompletionRequest(
        messages=[],
        model=app.check_model(name, caller),
        stream=body.stream is not False,
        **given,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs,
        tools=body.tools,
        response_format=_response_format(body.format),
        chat_template_kwargs=_THINKS if body.think is True else UNSET,
        reasoning_effort="none" if body.think is False else _LEVELS.get(str(body.think)),
    )


def _response_format(format: Raw | UnsetType) -> Raw | UnsetType:
    """`"json"` or a schema, as a chat's `response_format`."""
    sent = b"" if isinstance(format, UnsetType) else bytes(format)
    if sent in (b"", b"null", b'""'):
        return UNSET
    if sent != b'"json"' and sent[:1] != b"{":
        raise InvalidRequest('format must be "json" or a JSON schema', param="format")
    return Raw(b'{"type":"json_object"%b}' % (b"" if sent == b'"json"' else b',"schema":' + sent))


def _as_chat(messages: Sequence[OllamaMessage]) -> list[ChatMessage]:
    """Messages as a chat's. Calls without ids get them, and a result without one answers the first call of its tool
    that has no answer.
    """
    chat: list[ChatMessage] = []
    unanswered: list[tuple[str, str]] = []  # (tool, id)
    for number, message in enumerate(messages):
        converted = ChatMessage(role=message.role.lower(), content=message.content or "", images=message.images)
        converted.reasoning_content = message.thinking or None
        calls = any_value(message.tool_calls, f"messages[{number}].tool_calls", MAX_SHAPE_BYTES) or []
        for place, call in enumerate(calls if isinstance(calls, list) else []):
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                call |= {"type": "function", "id": call.get("id") or f"call{number:02d}{place:03d}"}
                unanswered.append((str(function.get("name")), str(call["id"])))
        if calls:
            converted.tool_calls = Raw(msgspec.json.encode(calls))
        if converted.role == "tool":
            meant = [each for each in unanswered if each[0] == message.tool_name] or unanswered
            converted.name = message.tool_name
            converted.tool_call_id = message.tool_call_id or (meant[0][1] if meant else f"call{number:05d}")
            unanswered = [each for each in unanswered if each[1] != converted.tool_call_id]
        chat.append(converted)
    return chat


class OllamaAnswer:
    """Writes one answer, whole or in lines. Each line has the time at which the answer began, so that all replicas that
    go on with a stream write the same.
    """

    def __init__(
        self,
        app: App,
        id: str,
        body: OllamaRequest,
        asked: ChatCompletionRequest,
        reading: ChatReading | None,
        *,
        is_chat: bool,
    ) -> None:
        """`reading` None is of a raw prompt, whose answer is all text."""
        self.id, self.created, self.reading = id, int(time.time()), reading
        self._name, self._is_chat = body.model or asked.model, is_chat
        self.keeps_context = not is_chat and reading is not None
        self._names = TokenNames(app.model.tokenizer, as_ids=False)
        self._num_top = (asked.top_logprobs or 0) if asked.logprobs else None

    def whole(self, outcome: Outcome) -> bytes:
        (sample,) = outcome.samples
        told = OllamaStream(self, outcome).read(sample.text, sample.pieces, sample.logprobs, is_last=True)
        told |= self.last(outcome, sample.finish_reason, sample.token_ids)
        return encode(self.reply(**told))

    def stream(self, outcome: Outcome) -> OllamaStream:
        return OllamaStream(self, outcome)

    def reply(
        self, text: str = "", done_reason: str = "", thinking: str = "", tool_calls: Sequence[Any] = (), **more: Any
    ) -> dict[str, Any]:
        """An answer, or a line of one; `more` stands beside."""
        told: dict[str, Any] = {"role": "assistant", "content": text} if self._is_chat else {"response": text}
        if thinking:
            told["thinking"] = thinking
        if tool_calls:
            told["tool_calls"] = tool_calls
        if done_reason:
            more["done_reason"] = done_reason
        return {**self._begin, **({"message": told} if self._is_chat else told), "done": bool(done_reason), **more}

    @cached_property
    def _begin(self) -> dict[str, Any]:
        return {"model": self._name, "created_at": rfc3339(self.created)}

    def logprobs(self, positions: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
        if self._num_top is None or not positions:
            return {}
        return {"logprobs": packed_chat_logprobs(positions, self._names, self._num_top).content}

    def last(self, outcome: Outcome, finish: FinishReason | None, token_ids: Sequence[int]) -> dict[str, Any]:
        """What the end tells; durations are ns."""
        (sample,), used, timing = outcome.samples, outcome.usage(), outcome.timing()
        told: dict[str, Any] = {"done_reason": "stop" if finish is FinishReason.STOP else "length"}
        if self.keeps_context:
            told["context"] = [*sample.request.prompt_token_ids, *token_ids]
        told |= {"prompt_eval_count": used.num_prompt_tokens, "eval_count": used.num_generated_tokens}
        if timing is not None:
            told |= {
                "total_duration": int(timing.total_s * 1e9),
                "load_duration": 0,
                "prompt_eval_duration": int(timing.prefill_s * 1e9),
                "eval_duration": int((timing.total_s - timing.queue_s - timing.prefill_s) * 1e9),
            }
        return told


class OllamaStream:
    """Writes the lines of one answer. A call is told once it is whole, for its arguments are an object."""

    def __init__(self, answer: OllamaAnswer, outcome: Outcome) -> None:
        self._answer, self._outcome = answer, outcome
        self._reader = answer.reading.reader(outcome.samples[0]) if answer.reading is not None else None
        self._call: CallBegun | None = None
        self._arguments = ""
        self._token_ids: list[int] = []  # for the context

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        is_last = delta.finish_reason is not None
        if self._answer.keeps_context:
            self._token_ids.extend(delta.token_ids)
        read = self.read(delta.text, delta.pieces, delta.logprobs, is_last=is_last)
        written = encode(self._answer.reply(**read)) + b"\n" if read else b""
        if is_last:
            read = self._answer.last(self._outcome, delta.finish_reason, self._token_ids)
            written += encode(self._answer.reply(**read)) + b"\n"
        return written

    def last(self) -> bytes:
        return b""

    def read(
        self, text: str, pieces: Sequence[Piece], logprobs: Sequence[TokenLogprobs] | None, *, is_last: bool
    ) -> dict[str, Any]:
        """What came, by the names of `OllamaAnswer.reply`."""
        told: dict[str, Any] = self._answer.logprobs(logprobs)
        read, calls = read_answer(self._reader, text, pieces, is_last=is_last), list[Any]()
        content = read.content
        for event in read.calls:
            if isinstance(event, ArgumentsText):
                self._arguments += event.text
            else:
                content += self._ended(calls)
                self._call = event
        content += self._ended(calls) if is_last else ""
        came = {"text": content, "thinking": read.reasoning, "tool_calls": calls}
        return told | {name: value for name, value in came.items() if value}

    def _ended(self, calls: list[Any]) -> str:
        """Add the call that has ended; one that was cut is text."""
        call, text = self._call, self._arguments
        self._call, self._arguments = None, ""
        if call is None:
            return ""
        try:
            function = {"index": call.index, "name": call.name, "arguments": _ARGUMENTS.decode(text or "{}")}
        except msgspec.DecodeError:
            return f'{{"name": "{call.name}", "arguments": {text}'
        calls.append({"id": call.id, "function": function})
        return ""

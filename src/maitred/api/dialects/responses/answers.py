"""POST /v1/responses where tokens are made: a body becomes the ask of a chat, and what is read of it becomes items.

Events have the sequence number 0 here: the server that the client talks to counts them, so that a stream which another
replica goes on with has no gap (see `stored`).
"""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from maitred.api.dialects.openai import refusals
from maitred.api.dialects.openai.answers import OPENAI, TokenNames, chat_logprobs, completion_id, encode
from maitred.api.dialects.openai.chat import joined_calls
from maitred.api.dialects.openai.reading import ChatReading, is_shaped, read_answer
from maitred.api.dialects.openai.sampling import chat_sampling, check_common, make_ask, wanted_usage
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, GenerationFields
from maitred.api.dialects.responses import schemas as s
from maitred.api.dialects.responses.reading import NOTHING_READ, sealed, translated
from maitred.api.generate.dialect import Dialect, GenerationAsk, Prompt
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.exchange import IGNORED_TOOLS, Exchange, names_told
from maitred.api.http.routes import StreamFormat
from maitred.core.errors import InvalidRequest
from maitred.core.request import FinishReason
from maitred.core.step import TokenLogprobs
from maitred.engine.output import TextDelta
from maitred.tenancy.tenant import tier_of_priority
from maitred.text.answer_parser import CallBegun
from maitred.text.shape import Shape

RESPONSES = OPENAI._replace(stream=StreamFormat())  # nothing comes after the last event
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_NOT_HERE: Mapping[str, str] = {  # of the fields that chats and texts have
    "max_tokens": "send max_output_tokens",
    "response_format": "send text.format",
    "n": "a response is one answer",
    **dict.fromkeys(("echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"), "ask a completion"),
}
_WHY: Mapping[str, str] = {
    "conversation": "send previous_response_id",
    "prompt": "send the text as instructions and input",
    "moderation": "there is none",
    "context_management": "a conversation is never shortened here",
    "messages": "send input",
}
REFUSED: refusals.Refused = {
    name: neutral
    for name, neutral in refusals.CHAT_REFUSED.items()
    if name not in (*s.ResponsesRequest.__struct_fields__, *_WHY)
} | dict.fromkeys(_WHY, ([],))
decoder = cache(lambda: BodyDecoder(s.ResponsesRequest, REFUSED))  # made for its first user: it takes 15 ms
_TO_CHAT = (
    *(name for name in GenerationFields.__struct_fields__ if name not in ("stream_options", "response_format")),
    *("parallel_tool_calls", "chat_template_kwargs", "thinking_token_budget", "top_logprobs"),
)
_to_chat = attrgetter(*_TO_CHAT)


def decode_response(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """The body's `previous_response_id` and `background` are done with, or were never there."""
    as_sent = decoder().decode(sent)
    body = as_sent.body
    model = app.check_model(body.model, exchange.caller)
    check_fields(body, as_sent.refused)
    exchange.field_names = NOTHING_READ.field_names
    if as_sent.refused or as_sent.unknown:
        refusals.heed_others(app, exchange, as_sent, decoder(), REFUSED)
    chat = _chat_of(body)
    check_common(chat, exchange.caller, policy_without_priorities=app.policy_without_priorities)
    sampling = chat_sampling(chat, app.model, 1)
    id = body.request_id or f"resp_{secrets.token_hex(24)}"
    reading = ChatReading(app.model, app.grammars, chat, id)
    answer = ResponseAnswer(
        app,
        exchange,
        body,
        chat,
        reading,
        s.response_of(body, id, model, temperature=sampling.temperature, top_p=sampling.top_p),
    )
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": 1}
    return make_ask(
        chat,
        answer,
        id=id,
        sampling=sampling,
        prompts=answer.prompts,
        adapter=app.adapter(body.model, exchange.caller),
        shape=answer.shape,
        is_shaped=is_shaped(chat) or any(map(_is_sent, (body.tools, body.tool_choice, _format_of(body)))),
        may_take_long=body.chat_template_kwargs is not UNSET,
        add_special_tokens=bool(body.add_special_tokens),
        default_max_tokens=app.model.generation_defaults.get("max_tokens"),
    )


DIALECT = Dialect(RESPONSES, decode_response)


def check_fields(body: s.ResponsesRequest, refused: Mapping[str, Raw]) -> None:
    """Raises InvalidRequest or UnsupportedParameter."""
    if not _is_sent(body.input):
        raise InvalidRequest("input is missing; send a text or a list of items", param="input")
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        text = f"max_output_tokens is {body.max_output_tokens}; it must be at least 1"
        raise InvalidRequest(text, param="max_output_tokens")
    for name, why in _WHY.items() if refused else ():
        if name in refused and refusals.has_value(refused[name]):
            raise refusals.unsupported(name, why)
    for name, why in _NOT_HERE.items():
        if getattr(body, name) not in (None, UNSET, False) and not (name == "n" and body.n == 1):
            raise refusals.unsupported(name, why)
    wanted_usage(body)
    completion_id("resp", body, "")  # one that is sent must be an id


def _format_of(body: s.ResponsesRequest) -> Raw | UnsetType:
    return UNSET if body.text is None else body.text.format


def _is_sent(raw: Raw | UnsetType) -> bool:
    return not isinstance(raw, UnsetType) and bytes(raw) != b"null"


def _chat_of(body: s.ResponsesRequest) -> ChatCompletionRequest:
    """The chat, without messages, tools and format: those are translated in a thread."""
    chat = ChatCompletionRequest(messages=[], **dict(zip(_TO_CHAT, _to_chat(body), strict=True)))
    chat.max_completion_tokens = body.max_output_tokens
    chat.logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    chat.reasoning_effort = body.reasoning.effort if body.reasoning is not None else None
    return chat


class ResponseAnswer:
    """Writes one response, whole or event by event."""

    def __init__(
        self,
        app: App,
        exchange: Exchange,
        body: s.ResponsesRequest,
        chat: ChatCompletionRequest,
        reading: ChatReading,
        base: s.ResponseObject,
    ) -> None:
        """`base` is the response before anything is known of its output."""
        self._exchange, self.body, self._chat, self.reading, self.base = exchange, body, chat, reading, base
        self.id, self.created = base.id, base.created_at
        self._names = TokenNames(app.model.tokenizer, as_ids=False)
        self.translation = NOTHING_READ

    def prompts(self) -> list[Prompt]:
        """The conversation as the model reads it; called once, in a thread."""
        self.translation = told = translated(self.body, self._chat)
        self.body.input, self._exchange.field_names = UNSET, told.field_names
        if told.ignored_tools:
            self._exchange.told += ((IGNORED_TOOLS, names_told(told.ignored_tools)),)
        return self.reading.prompts()

    def shape(self) -> Shape:
        """Raises InvalidRequest for what cannot be enforced."""
        shape, told = self.reading.shape(), self.translation
        return shape._replace(unknown=(*shape.unknown, *told.unread), ignored=(*shape.ignored, *told.unenforced))

    def logprobs(self, positions: Iterable[TokenLogprobs]) -> list[Any]:
        return [*chat_logprobs(positions, self._names, self._chat.top_logprobs or 0).content]

    def whole(self, outcome: Outcome) -> bytes:
        """The stream at once, without its events."""
        stream, sample = self.stream(outcome), outcome.samples[0]
        stream.tells_events = False
        whole = TextDelta(0, sample.text, tuple(sample.pieces), finish_reason=sample.finish_reason)
        stream.read(whole, sample.logprobs)
        return encode(stream.ended())

    def stream(self, outcome: Outcome) -> ResponseStream:
        self.reading.id = self.id  # of its calls, wherever the stream began
        terms = outcome.samples[0].request.terms
        tier = tier_of_priority(terms.priority) if terms.tenant else "default"
        self.base = replace(self.base, id=self.id, created_at=self.created, service_tier=tier)
        return ResponseStream(self, outcome)


UNCOUNTED = b'"sequence_number":0}\n\n'


def event(type: str, **fields: Any) -> bytes:
    """One event, whose sequence number is not known yet."""
    return b"event: %b\ndata: %b,%b" % (type.encode(), encode({"type": type, **fields})[:-1], UNCOUNTED)


class _Text(NamedTuple):
    """A kind of text: types of its item and part, names of the events of both, and of the part's place."""

    item: str
    part: str
    part_event: str
    text_event: str
    place: str


_TEXTS = {
    "message": _Text("message", "output_text", "content_part", "output_text", "content_index"),
    "thoughts": _Text("reasoning", "reasoning_text", "content_part", "reasoning_text", "content_index"),
    "summary": _Text("reasoning", "summary_text", "reasoning_summary_part", "reasoning_summary_text", "summary_index"),
}
_CALLS = {  # type of a call -> prefix of its events, and the field of its text
    "function_call": ("function_call_arguments", "arguments"),
    "custom_tool_call": ("custom_tool_call_input", "input"),
}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}  # of ids


class ResponseStream:
    """Items of one answer as its parts become certain, and the events that tell of them."""

    def __init__(self, answer: ResponseAnswer, outcome: Outcome) -> None:
        self._answer, self._outcome = answer, outcome
        sample, options = outcome.samples[0], answer.body.reasoning or s.ReasoningOptions()
        self._reader = answer.reading.reader(sample)
        resumed = sample.request.resumed
        # those of tokens that another replica made are not known here
        self._knows_logprobs = resumed is None or not resumed.output_token_ids
        self._thoughts = "summary" if options.summary or options.generate_summary else "thoughts"
        self._is_sealed = ENCRYPTED in (answer.body.include or ())
        self._items: list[dict[str, Any]] = []
        self._events: list[bytes] = []  # not written yet
        self._open = ""  # kind of the last item, while it is open
        self._pieces: list[str] = []  # of its text
        self._delta = b""  # the event of more text, up to the text
        self._logprobs: list[Any] = []  # of the answer, not told yet
        self._told_logprobs: list[Any] = []
        self._input = CustomInput()
        self._has_begun = self._is_cut = False
        self.tells_events = True

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            self._events += (
                event(f"response.{kind}", response=self._answer.base) for kind in ("created", "in_progress")
            )
        self.read(delta, delta.logprobs or ())
        told, self._events = b"".join(self._events), []
        return told

    def last(self) -> bytes:
        ended = self.ended()
        return event(f"response.{ended.status}", response=ended)

    def ended(self) -> s.ResponseObject:
        used = self._outcome.usage()
        return replace(
            self._answer.base,
            status="incomplete" if self._is_cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if self._is_cut else None,
            completed_at=None if self._is_cut else int(time.time()),
            output=self._items,
            usage={
                "input_tokens": used.num_prompt_tokens,
                "input_tokens_details": {"cached_tokens": used.num_cached_tokens, "cache_write_tokens": 0},
                "output_tokens": used.num_generated_tokens,
                "output_tokens_details": {"reasoning_tokens": used.num_reasoning_tokens},
                "total_tokens": used.num_prompt_tokens + used.num_generated_tokens,
            },
        )

    def read(self, delta: TextDelta, logprobs: Iterable[TokenLogprobs]) -> None:
        """Take more of the answer."""
        if logprobs:
            self._logprobs += self._answer.logprobs(logprobs)
        finish = delta.finish_reason
        read = read_answer(self._reader, delta.text, delta.pieces, is_last=finish is not None)
        if read.reasoning:
            self._text(self._thoughts, read.reasoning)
        if read.content:
            self._text("message", read.content)
        for told in joined_calls(read.calls):
            if isinstance(told, CallBegun):
                self._begin_call(told)
            else:
                self._call_text(told.text)
        if finish is not None:
            self._is_cut = finish is FinishReason.LENGTH
            if not self._items:
                self._begin_text("message")  # an answer without anything is an empty one
            self._close("incomplete" if self._is_cut else "completed")

    def _tell(self, type: str, **fields: Any) -> None:
        """Tell of the last item."""
        if self.tells_events:
            self._events.append(event(f"response.{type}", output_index=len(self._items) - 1, **fields))

    def _begin(self, kind: str, type: str, **fields: Any) -> None:
        self._close("completed")
        self._open, self._pieces = kind, []
        id = f"{_PREFIXES[type]}_{self._answer.id.removeprefix('resp_')}_{len(self._items)}"
        self._items.append({"id": id, "type": type, "status": "in_progress", **fields})
        self._tell("output_item.added", item=self._items[-1])

    def _begin_text(self, kind: str) -> None:
        text = _TEXTS[kind]
        fields = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        self._begin(kind, text.item, **fields)
        self._tell(f"{text.part_event}.added", **self._place(text), part=_part(text.part, "", []))

    def _place(self, text: _Text) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], text.place: 0}

    def _text(self, kind: str, more: str) -> None:
        if self._open != kind:
            self._begin_text(kind)
            if self.tells_events:
                text = _TEXTS[kind]
                told = {"output_index": len(self._items) - 1, **self._place(text), "delta": ""}
                self._delta = event(f"response.{text.text_event}.delta", **told).partition(b'"",')[0]
        self._pieces.append(more)
        if not self.tells_events:
            return
        logprobs = b',"logprobs":%b' % encode(self._new_logprobs()) if kind == "message" else b""
        self._events.append(b"%b%b%b,%b" % (self._delta, encode(more), logprobs, UNCOUNTED))

    def _new_logprobs(self) -> list[Any]:
        """Those that go with more text of a message."""
        told, self._logprobs = self._logprobs, []
        self._told_logprobs += told
        return told

    def _begin_call(self, call: CallBegun) -> None:
        self._input = CustomInput()
        type = "custom_tool_call" if call.name in self._answer.translation.custom_tools else "function_call"
        self._begin(type, type, call_id=call.id, name=call.name, **{_CALLS[type][1]: ""})

    def _call_text(self, arguments: str) -> None:
        text = self._input.push(arguments) if self._open == "custom_tool_call" else arguments
        if text:
            self._pieces.append(text)
            self._tell(f"{_CALLS[self._open][0]}.delta", item_id=self._items[-1]["id"], delta=text)

    def _close(self, status: str) -> None:
        """End the item that is open."""
        if not self._open:
            return
        kind, item, whole = self._open, self._items[-1], "".join(self._pieces)
        self._open, item["status"] = "", status
        if kind in _TEXTS:
            text, more = _TEXTS[kind], dict[str, Any]()
            if kind == "message":
                self._new_logprobs()
                more["logprobs"] = self._told_logprobs if self._knows_logprobs else []
                self._told_logprobs = []
            part = _part(text.part, whole, more.get("logprobs", []))
            self._tell(f"{text.text_event}.done", **self._place(text), text=whole, **more)
            self._tell(f"{text.part_event}.done", **self._place(text), part=part)
            item["summary" if kind == "summary" else "content"] = [part]
            if kind != "message" and self._is_sealed:
                item["encrypted_content"] = sealed(whole)
        else:
            events, field = _CALLS[kind]
            item[field] = whole
            self._tell(f"{events}.done", item_id=item["id"], name=item["name"], **{field: whole})
        self._tell("output_item.done", item=item)


def _part(type: str, text: str, logprobs: list[Any]) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": logprobs} if type == "output_text" else {}
    return {"type": type, "text": text, **more}


_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_WHOLE = re.compile(r'(?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u])*')  # letters and escapes that are all there


class CustomInput:
    """Reads the text of a custom tool out of the arguments `{"input": "..."}`, as they come."""

    def __init__(self) -> None:
        self._sent, self._is_open = "", False

    def push(self, arguments: str) -> str:
        """The text that became certain."""
        self._sent += arguments
        if not self._is_open:
            head = _INPUT.match(self._sent)
            if head is None:
                return ""
            self._is_open, self._sent = True, self._sent[head.end() :]
        found = _WHOLE.match(self._sent)
        assert found is not None, "it matches nothing at least"
        text: str = json.loads(f'"{found[0]}"', strict=False)
        end = found.end()
        if "\ud800" <= text[-1:] <= "\udbff":  # half of a letter
            text, end = text[:-1], end - 6
        self._sent = self._sent[end:]
        return text

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
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from msgspec import UNSET, Raw, UnsetType

from maitred.api.dialects.openai import refusals
from maitred.api.dialects.openai.answers import OPENAI, TokenNames, chat_logprobs, completion_id, encode
from maitred.api.dialects.openai.chat import joined_calls
from maitred.api.dialects.openai.reading import ChatReading, is_shaped, read_answer
from maitred.api.dialects.openai.sampling import chat_sampling, check_common, make_ask
from maitred.api.dialects.responses import schemas as s
from maitred.api.dialects.responses.reading import Translation, sealed
from maitred.api.generate.dialect import Dialect, GenerationAsk, Prompt
from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.bodies import BodyDecoder
from maitred.api.http.exchange import IGNORED_TOOLS, Exchange
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
_REFUSED_HERE: Mapping[str, str] = {
    "conversation": "send previous_response_id",
    "prompt": "send the text as instructions and input",
    "moderation": "there is none",
    "context_management": "a conversation is never shortened here",
}
_OF_OTHERS: Mapping[str, str] = {  # fields that chats and texts have
    "messages": "send input",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "send max_output_tokens"),
    "response_format": "send text.format",
    "reasoning_effort": "send reasoning.effort",
    "logprobs": f"send include: {[LOGPROBS]}",
    "n": "a response is one answer",
    "prediction": "ask a chat",
    **dict.fromkeys(("echo", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"), "ask a completion"),
}
_of_others = attrgetter(*_OF_OTHERS)
_NONE_OF_OTHERS = _of_others(s.ResponsesRequest())
REFUSED: refusals.Refused = {
    name: neutral
    for name, neutral in refusals.CHAT_REFUSED.items()
    if name not in (*s.ResponsesRequest.__struct_fields__, *_REFUSED_HERE)
} | dict.fromkeys(_REFUSED_HERE, ([],))
decoder = cache(lambda: BodyDecoder(s.ResponsesRequest, REFUSED))  # made for its first user: it takes 15 ms


def decode_response(app: App, exchange: Exchange, sent: bytes) -> GenerationAsk:
    """The body's `previous_response_id` and `background` are done with, or were never there."""
    as_sent = decoder().decode(sent)
    body = as_sent.body
    model = app.check_model(body.model, exchange.caller)
    check_fields(body, as_sent.refused)
    translation = Translation()
    exchange.field_names = translation.field_names
    if as_sent.refused or as_sent.unknown:
        refusals.heed_others(app, exchange, as_sent, decoder(), REFUSED)
    check_common(body, exchange.caller, policy_without_priorities=app.policy_without_priorities)
    body.max_completion_tokens = body.max_output_tokens
    body.logprobs = bool(body.top_logprobs) or LOGPROBS in (body.include or ())
    body.reasoning_effort = body.reasoning.effort if body.reasoning is not None else None
    sampling = chat_sampling(body, app.model, 1)
    id = body.request_id or f"resp_{secrets.token_hex(24)}"
    base = s.response_of(body, id, model, temperature=sampling.temperature, top_p=sampling.top_p)
    reading, names = ChatReading(app.model, app.grammars, body, id), TokenNames(app.model.tokenizer, as_ids=False)
    answer = ResponseAnswer(id, base.created_at, base, body, exchange, reading, names, translation)
    exchange.log |= {"model": model, "stream": bool(body.stream), "n": 1}
    return make_ask(
        body,
        answer,
        id=id,
        sampling=sampling,
        prompts=answer.prompts,
        adapter=app.adapter(body.model, exchange.caller),
        shape=answer.shape,
        is_shaped=is_shaped(body) or (body.text is not None and _is_sent(body.text.format)),
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
    for name, why in _REFUSED_HERE.items() if refused else ():
        if name in refused and refusals.has_value(refused[name]):
            raise refusals.unsupported(name, why)
    for name, why in _OF_OTHERS.items() if _of_others(body) != _NONE_OF_OTHERS else ():
        if getattr(body, name) not in (None, UNSET, False, []) and not (name == "n" and body.n == 1):
            raise refusals.unsupported(name, why)
    completion_id("resp", body, "")  # one that is sent must be an id


def _is_sent(raw: Raw | UnsetType) -> bool:
    return raw is not UNSET and bytes(raw) != b"null"


@dataclass(slots=True, eq=False)
class ResponseAnswer:
    """Writes one response, whole or event by event."""

    id: str
    created: int
    base: s.ResponseObject  # before anything is known of its output
    body: s.ResponsesRequest
    exchange: Exchange
    reading: ChatReading
    names: TokenNames
    translation: Translation

    def prompts(self) -> list[Prompt]:
        """The conversation as the model reads it; called once, in a thread."""
        self.translation.read(self.body)
        self.exchange.tell(IGNORED_TOOLS, self.translation.ignored_tools)
        return self.reading.prompts()

    def shape(self) -> Shape:
        """Raises InvalidRequest for what cannot be enforced."""
        shape, told = self.reading.shape(), self.translation
        if not (told.unread or told.unenforced):
            return shape
        return shape._replace(unknown=(*shape.unknown, *told.unread), ignored=(*shape.ignored, *told.unenforced))

    def logprobs(self, positions: Iterable[TokenLogprobs]) -> list[Any]:
        return [*chat_logprobs(positions, self.names, self.body.top_logprobs or 0).content]

    def whole(self, outcome: Outcome) -> bytes:
        """The stream at once, without its events."""
        stream, sample = self.stream(outcome), outcome.samples[0]
        stream.tells_events = False
        whole = TextDelta(0, sample.text, tuple(sample.pieces), finish_reason=sample.finish_reason)
        stream.read(whole, sample.logprobs)
        return encode(stream.ended())

    def stream(self, outcome: Outcome) -> ResponseStream:
        self.reading.id = self.base.id = self.id  # of its calls too, wherever the stream began
        terms = outcome.samples[0].request.terms
        self.base.created_at = self.created
        self.base.service_tier = tier_of_priority(terms.priority) if terms.tenant else "default"
        return ResponseStream(self, outcome)


UNCOUNTED = b'"sequence_number":0}\n\n'


def event(type: str, **fields: Any) -> bytes:
    """One event, whose sequence number is not known yet."""
    return b"event: %b\ndata: %b,%b" % (type.encode(), encode({"type": type, **fields})[:-1], UNCOUNTED)


class _Kind(NamedTuple):
    """A kind of item: its type, how ids begin, names of its text's events and of the field that holds the text; of
    texts that are a part of the item, the part's type, the names of its events and of its place too.
    """

    type: str
    prefix: str
    events: str
    field: str
    part: str = ""
    part_events: str = ""
    place: str = ""


_TEXT = ("content", "output_text", "content_part", "content_index")
_THOUGHT = ("content", "reasoning_text", "content_part", "content_index")
_SUMMARY = ("summary", "summary_text", "reasoning_summary_part", "summary_index")
_MESSAGE = _Kind("message", "msg", "output_text", *_TEXT)
_THOUGHTS = _Kind("reasoning", "rs", "reasoning_text", *_THOUGHT)
_SUMMARISED = _Kind("reasoning", "rs", "reasoning_summary_text", *_SUMMARY)
_CALL = _Kind("function_call", "fc", "function_call_arguments", "arguments")
_CUSTOM_CALL = _Kind("custom_tool_call", "ctc", "custom_tool_call_input", "input")


class ResponseStream:
    """Items of one answer as its parts become certain, and the events that tell of them."""

    def __init__(self, answer: ResponseAnswer, outcome: Outcome) -> None:
        self._answer, self._outcome = answer, outcome
        sample, options = outcome.samples[0], answer.body.reasoning or s.ReasoningOptions()
        self._reader = answer.reading.reader(sample)
        resumed = sample.request.resumed
        # those of tokens that another replica made are not known here
        self._knows_logprobs = resumed is None or not resumed.output_token_ids
        self._thoughts = _SUMMARISED if options.summary or options.generate_summary else _THOUGHTS
        self._items: list[dict[str, Any]] = []
        self._events: list[bytes] = []  # not written yet
        self._open: _Kind | None = None  # of the last item, while it is open
        self._pieces: list[str] = []  # of its text
        self._at: dict[str, Any] = {}  # its place
        self._delta = b""  # the event of more of its text, up to the text
        self._logprobs: list[Any] = []  # of the answer, not told yet
        self._told_logprobs: list[Any] = []
        self._input = CustomInput()
        self._has_begun = self._is_cut = False
        self.tells_events = True

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            self._events = [
                event(f"response.{name}", response=self._answer.base) for name in ("created", "in_progress")
            ]
        self.read(delta, delta.logprobs or ())
        told, self._events = b"".join(self._events), []
        return told

    def last(self) -> bytes:
        ended = self.ended()
        return event(f"response.{ended.status}", response=ended)

    def ended(self) -> s.ResponseObject:
        used, response = self._outcome.usage(), self._answer.base
        response.status, response.output = "incomplete" if self._is_cut else "completed", self._items
        if self._is_cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        else:
            response.completed_at = int(time.time())
        response.usage = {
            "input_tokens": used.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.num_generated_tokens,
            "output_tokens_details": {"reasoning_tokens": used.num_reasoning_tokens},
            "total_tokens": used.num_prompt_tokens + used.num_generated_tokens,
        }
        return response

    def read(self, delta: TextDelta, logprobs: Iterable[TokenLogprobs]) -> None:
        """Take more of the answer."""
        if logprobs:
            self._logprobs += self._answer.logprobs(logprobs)
        finish = delta.finish_reason
        read = read_answer(self._reader, delta.text, delta.pieces, is_last=finish is not None)
        for kind, text in ((self._thoughts, read.reasoning), (_MESSAGE, read.content)):
            if text:
                if self._open is not kind:
                    self._begin_text(kind)
                self._more(text)
        for told in joined_calls(read.calls) if read.calls else ():
            if isinstance(told, CallBegun):
                self._begin_call(told)
            elif text := self._input.push(told.text) if self._open is _CUSTOM_CALL else told.text:
                self._more(text)
        if finish is not None:
            self._is_cut = finish is FinishReason.LENGTH
            if not self._items:
                self._begin_text(_MESSAGE)  # an answer without anything is an empty one
            self._close("incomplete" if self._is_cut else "completed")

    def _tell(self, type: str, **fields: Any) -> None:
        """Tell of the last item."""
        if self.tells_events:
            self._events.append(event(f"response.{type}", output_index=len(self._items) - 1, **fields))

    def _begin(self, kind: _Kind, **fields: Any) -> None:
        self._close("completed")
        self._open, self._pieces = kind, []
        id = f"{kind.prefix}_{self._answer.id.removeprefix('resp_')}_{len(self._items)}"
        self._items.append({"id": id, "type": kind.type, "status": "in_progress", **fields})
        self._at = {"item_id": id, **({kind.place: 0} if kind.place else {})}
        self._tell("output_item.added", item=self._items[-1])
        if self.tells_events:
            told = {"output_index": len(self._items) - 1, **self._at, "delta": ""}
            self._delta = event(f"response.{kind.events}.delta", **told).partition(b'"",')[0]

    def _begin_text(self, kind: _Kind) -> None:
        fields: dict[str, Any] = {"role": "assistant"} if kind is _MESSAGE else {"summary": []}
        self._begin(kind, **fields, content=[])
        self._tell(f"{kind.part_events}.added", **self._at, part=_part(kind, "", []))

    def _begin_call(self, call: CallBegun) -> None:
        self._input = CustomInput()
        kind = _CUSTOM_CALL if call.name in self._answer.translation.custom_tools else _CALL
        self._begin(kind, call_id=call.id, name=call.name, **{kind.field: ""})

    def _more(self, text: str) -> None:
        """More text of the item that is open."""
        self._pieces.append(text)
        if not self.tells_events:
            return
        logprobs = b"" if self._open is not _MESSAGE else b',"logprobs":[]'
        if self._logprobs and self._open is _MESSAGE:
            logprobs = b',"logprobs":%b' % encode(self._new_logprobs())
        self._events.append(b"%b%b%b,%b" % (self._delta, encode(text), logprobs, UNCOUNTED))

    def _new_logprobs(self) -> list[Any]:
        """Those that go with more text of a message."""
        told, self._logprobs = self._logprobs, []
        self._told_logprobs += told
        return told

    def _close(self, status: str) -> None:
        """End the item that is open."""
        kind = self._open
        if kind is None:
            return
        item, whole = self._items[-1], "".join(self._pieces)
        self._open, item["status"] = None, status
        if kind.part:
            more = dict[str, Any]()
            if kind is _MESSAGE:
                self._new_logprobs()
                more["logprobs"] = self._told_logprobs if self._knows_logprobs else []
                self._told_logprobs = []
            part = _part(kind, whole, more.get("logprobs", []))
            self._tell(f"{kind.events}.done", **self._at, text=whole, **more)
            self._tell(f"{kind.part_events}.done", **self._at, part=part)
            item[kind.field] = [part]
            if kind is not _MESSAGE and ENCRYPTED in (self._answer.body.include or ()):
                item["encrypted_content"] = sealed(whole)
        else:
            item[kind.field] = whole
            self._tell(f"{kind.events}.done", **self._at, name=item["name"], **{kind.field: whole})
        self._tell("output_item.done", item=item)


def _part(kind: _Kind, text: str, logprobs: list[Any]) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": logprobs} if kind is _MESSAGE else {}
    return {"type": kind.part, "text": text, **more}


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

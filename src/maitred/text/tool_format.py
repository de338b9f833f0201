"""Reads a model's answer format off its chat template, by rendering probe calls and probe thoughts."""

from __future__ import annotations

import functools
import json
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

from maitred.core.errors import CheckpointError, ConfigError, InvalidRequest, did_you_mean
from maitred.text.answer_format import (
    AnswerFormat,
    CallFormat,
    Mark,
    Marked,
    PairsFormat,
    Pieces,
    ReasoningFormat,
    Slot,
    plain,
)
from maitred.text.answer_parser import AnswerParser, ArgumentsText, CallBegun
from maitred.text.chat_template import HINTS, TOOL_FORMATS, UNTAUGHT_FORMAT, ChatTemplate, tools_system_text
from maitred.text.marks import Marks, is_bracketed
from maitred.text.tokenizer import Tokenizer

_QUESTION, _ANSWER, _THOUGHTS = "probe question", "probe answer", "probe thoughts"
_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_/]+\]")
_LONG_ID = "call_0123456789abcdef01234567"
_THINKING: tuple[Mapping[str, Any], ...] = ({}, {"enable_thinking": True, "thinking": True})
KEYS = ("alpha_key", "beta_key")


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A call with a text and a number as arguments, whose parts are found again in a rendered text."""

    id: str
    name: str
    values: tuple[str, int]

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(KEYS, self.values, strict=True))

    def call(self, id: str | None = None) -> dict[str, Any]:
        return {"id": id or self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


PROBES = (
    ProbeCall("probe0001", "probe_alpha", ("one value", 7301)),
    ProbeCall("probe0002", "probe_beta", ("a value", 9402)),
)
_PROPERTIES = {KEYS[0]: {"type": "string", "description": "k"}, KEYS[1]: {"type": "integer", "description": "k"}}
PARAMETERS = {"type": "object", "properties": _PROPERTIES, "required": list(KEYS)}
TOOLS = [
    {"type": "function", "function": {"name": probe.name, "description": "p", "parameters": PARAMETERS}}
    for probe in PROBES
]


class Thoughts(NamedTuple):
    """Words before and after thoughts in an answer that a template wrote."""

    before: str
    after: str


class ProbeTemplate:
    """Renders probes; None where the template refuses one, or leaves it out."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._plain = self._answer({"content": _ANSWER}) or ""
        self._told = self._answer({"content": _ANSWER}, tools=TOOLS) or self._plain
        self.openings = [
            opening for thinking in (True, False) if (opening := self._opening(thinking=thinking)) is not None
        ]
        """Ends of generation prompts, with thinking on and off."""

    def write(self, probes: Sequence[ProbeCall]) -> str | None:
        """The answer that makes these calls."""
        text = self._answer({"content": None, "tool_calls": [probe.call() for probe in probes]}, tools=TOOLS)
        value = str(probes[-1].values[1])
        if text is None or value not in text or not all(probe.name in text for probe in probes):
            return None
        return self._without_turn(text, text.rindex(value) + len(value))

    def knows_tools(self) -> bool:
        """Return whether a prompt changes with its tools."""
        chat = [{"role": "user", "content": _QUESTION}]
        return self._render(chat, tools=TOOLS) != self._render(chat)

    def takes_long_ids(self) -> bool:
        calls = [PROBES[0].call(_LONG_ID)]
        return self._answer({"content": None, "tool_calls": calls}, tools=TOOLS) is not None

    def thoughts(self) -> list[Thoughts]:
        """Return the thoughts of an answer with content, and of one with a call; neither where they are not shown."""
        found: list[Thoughts] = []
        with_content = {"content": _ANSWER, "reasoning_content": _THOUGHTS}
        with_call = {"content": None, "reasoning_content": _THOUGHTS, "tool_calls": [PROBES[0].call()]}
        for message in (with_content, with_call):
            for variables in _THINKING:
                text = self._answer(message, tools=TOOLS if "tool_calls" in message else None, **variables)
                before, thoughts, after = (text or "").partition(_THOUGHTS)
                if thoughts:
                    found.append(Thoughts(before, after.partition(_ANSWER)[0]))
                    break
        return found

    @property
    def plain_head(self) -> str:
        """Return the words between a question and an answer without thoughts."""
        return self._plain.partition(_ANSWER)[0]

    def _answer(self, message: Mapping[str, Any], **variables: Any) -> str | None:
        """Return all that is rendered behind the question."""
        chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", **message}]
        text = self._render(chat, **variables)
        return None if text is None or _QUESTION not in text else text.rpartition(_QUESTION)[2]

    def _opening(self, *, thinking: bool) -> str | None:
        chat = [{"role": "user", "content": _QUESTION}]
        text = self._render(chat, add_generation_prompt=True, enable_thinking=thinking, thinking=thinking)
        return None if text is None else text.rpartition(_QUESTION)[2]

    def _render(self, chat: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
        with suppress(InvalidRequest, CheckpointError):
            return self._template.render(chat, **{"add_generation_prompt": False, **variables})
        return None

    def _without_turn(self, text: str, values_end: int) -> str:
        head, _, tail = self._told.partition(_ANSWER)
        heads = [known for known in (head, self.plain_head, *self.openings) if known and text.startswith(known)]
        start = len(max(heads, key=len)) if heads else to_tag(text, len(shared_prefix(text, head)))
        end = len(text) - len(tail) if tail and text.endswith(tail) else len(text)
        turns = set(_TAG.findall(head + tail))
        new_turn = next((tag.start() for tag in _TAG.finditer(text, values_end) if tag[0] in turns), end)
        return text[start : max(values_end, min(end, new_turn))]


def shared_prefix(*texts: str) -> str:
    return os.path.commonprefix(texts)  # noqa: RUF071  character by character is what is wanted


def to_tag(text: str, end: int) -> int:
    """`end`, or the start of the tag that it would cut."""
    begins = max(text.rfind("<", 0, end), text.rfind("[", 0, end))
    return begins if begins > max(text.rfind(">", 0, end), text.rfind("]", 0, end)) else end


_DECODER = json.JSONDecoder()


class _Core(NamedTuple):
    """A call in a text, without the literals around it."""

    start: int
    end: int
    kind: Literal["json", "name_json", "pairs"]
    arguments: tuple[int, int]  # from and to; in `pairs` from the first key to the end of the last value


def read_calls(write: Callable[[Sequence[ProbeCall]], str | None]) -> CallFormat | None:
    """The format in which `write` writes calls; None for one that is none of the three forms."""
    first = PROBES[0]
    text = write(PROBES)
    cores = None if text is None else _cores(text, PROBES)
    if text is None or cores is None:
        text = write((first,))
        cores = None if text is None else _cores(text, (first,))
    if text is None or cores is None:
        return None
    pieces = [_pieces(text, core, probe) for core, probe in zip(cores, PROBES, strict=False)]
    call, index_from = _with_index(pieces[0], pieces[-1])
    parts = _split(text[: cores[0].start], text[cores[0].end : cores[-1].start], text[cores[-1].end :])
    if len(cores) == 1:
        parts = _Split("", text[: cores[0].start], "", text[cores[0].end :], "")
    parts = _without_first_space(parts)
    if call is None or (not parts.before.strip() and not parts.begin.strip() and cores[0].kind != "json"):
        return None  # nothing tells that a call begins
    found = CallFormat(
        kind=cores[0].kind,
        begin=_text(parts.before),
        call_begin=_text(parts.begin),
        call=call,
        call_end=_text(parts.end),
        separator=_text(parts.separator),
        end=_text(parts.after),
        several=len(cores) > 1,
        index_from=index_from,
    )
    if found.kind == "json":
        return _with_keys(found, text[cores[0].start : cores[0].end], first)
    return _with_pairs(found, text, cores, parts) if found.kind == "pairs" else found


def _cores(text: str, probes: Sequence[ProbeCall]) -> list[_Core] | None:
    cores: list[_Core] = []
    for probe in probes:
        core = _core(text, probe, cores[-1].end if cores else 0)
        if core is None or (cores and core.kind != cores[0].kind):
            return None
        cores.append(core)
    return cores


def _core(text: str, probe: ProbeCall, since: int) -> _Core | None:
    name_at = text.find(probe.name, since)
    if name_at < 0:
        return None
    starts = [at for part in (probe.name, probe.id) if (at := text.find(part, since)) >= 0]
    opening = text.rfind("{", since, name_at)
    value, end = _json_at(text, opening)
    if isinstance(value, dict) and probe.name in value.values() and probe.arguments in value.values():
        return _Core(opening, end, "json", _arguments_in(text, probe, opening))
    arguments = _arguments_in(text, probe, name_at)
    if arguments[1] > 0:
        return _Core(min(starts), arguments[1], "name_json", arguments)
    places = [name_at]
    for part in (KEYS[0], probe.values[0], KEYS[1], str(probe.values[1])):
        places.append(text.find(part, places[-1]))
        if places[-1] < 0:
            return None
    end = places[-1] + len(str(probe.values[1]))
    return _Core(min(starts), end, "pairs", (places[1], end))


def _arguments_in(text: str, probe: ProbeCall, since: int) -> tuple[int, int]:
    at = text.find("{", since)
    while at >= 0:
        value, end = _json_at(text, at)
        if value == probe.arguments:
            return at, end
        at = text.find("{", at + 1)
    return 0, 0


def _json_at(text: str, at: int) -> tuple[Any, int]:
    if at < 0:
        return None, 0
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError:
        return None, 0


def _pieces(text: str, core: _Core, probe: ProbeCall) -> Pieces:
    slot = Slot.PAIRS if core.kind == "pairs" else Slot.ARGUMENTS
    before = _named(text[core.start : core.arguments[0]], probe)
    after = _named(text[core.arguments[1] : core.end], probe)
    return (*before, slot, *after)


def _named(text: str, probe: ProbeCall) -> Iterator[str | Slot]:
    slots = {probe.name: Slot.NAME, probe.id: Slot.ID}
    pieces: list[str] = re.split(f"({probe.name}|{probe.id})", text)
    yield from (slots.get(piece, piece) for piece in pieces if piece)


def _with_index(first: Pieces, last: Pieces) -> tuple[Pieces | None, int]:
    """Pieces in which a number that counts the calls is a slot, and with what it begins."""
    if len(first) != len(last):
        return None, 0
    found: list[Any] = []
    index_from = 0
    for one, other in zip(first, last, strict=True):
        if one == other:
            found.append(one)
            continue
        ones, others = re.split(r"(\d+)", str(one)), re.split(r"(\d+)", str(other))
        if len(ones) != len(others) or not isinstance(one, str):
            return None, 0
        for here, there in zip(ones, others, strict=True):
            if here == there:
                found.append(here)
            elif here.isdigit() and there.isdigit() and int(there) == int(here) + 1:
                found.append(Slot.INDEX)
                index_from = int(here)
            else:
                return None, 0
    return tuple(piece for piece in found if piece), index_from


def _with_keys(found: CallFormat, text: str, probe: ProbeCall) -> CallFormat:
    value = json.loads(text)
    keys = {json.dumps(inner, sort_keys=True): key for key, inner in value.items()}
    return replace(
        found,
        name_key=keys[json.dumps(probe.name)],
        arguments_key=keys[json.dumps(probe.arguments, sort_keys=True)],
        id_key=keys.get(json.dumps(probe.id)),
    )


def _with_pairs(found: CallFormat, text: str, cores: Sequence[_Core], parts: _Split) -> CallFormat | None:
    """`call` then ends with the literal behind the last value, which `call_end` was read with."""
    probe, core = PROBES[0], cores[0]
    inner = text[core.arguments[0] : core.arguments[1]]
    text_at, key_at = inner.index(probe.values[0]), inner.index(KEYS[1])
    value_begin = inner[len(KEYS[0]) : text_at]
    other_begin = inner[key_at + len(KEYS[1]) : -len(str(probe.values[1]))]
    between = inner[text_at + len(probe.values[0]) : key_at]
    quote = value_begin.removeprefix(other_begin) if value_begin.startswith(other_begin) else ""
    if quote:
        if quote in "'\"" or not between.startswith(quote):
            return None  # a language's own literals, which no form has
        value_begin, between = other_begin, between.removeprefix(quote)
    slot_at = found.call.index(Slot.PAIRS)
    head = found.call[slot_at - 1] if slot_at and isinstance(found.call[slot_at - 1], str) else ""
    pair = _split(str(head), between, parts.end)
    pairs = PairsFormat(
        key_begin=_text(pair.begin),
        value_begin=_text(value_begin),
        value_end=_text(pair.end),
        separator=_text(pair.separator),
        quote=_text(quote),
        value_begin_of={} if quote or value_begin == other_begin else _other_types(_text(other_begin)),
    )
    if not (pair.end or quote) or any(key in literal for key in KEYS for literal in pair):
        return None  # nothing tells where a value ends, or each key's literals are others
    kept = found.call[: slot_at - 1] if head else found.call[:slot_at]
    call = (*kept, *_text(pair.before), Slot.PAIRS)
    return replace(found, call=call, call_end=_text(pair.after), pairs=pairs)


def _other_types(begin: Marked) -> dict[str, Marked]:
    return dict.fromkeys(("integer", "number", "boolean", "null", "array", "object"), begin)


class _Split(NamedTuple):
    """`before begin X end, joined by separator, after`."""

    before: str
    begin: str
    separator: str
    end: str
    after: str


def _split(before: str, between: str, after: str) -> _Split:
    """Return the common begin and end of two things X written as `before X between X after`; no tag is cut."""
    low = len(between) - len(shared_prefix(before[::-1], between[::-1]))
    high = len(shared_prefix(between, after))
    if low <= high:  # also what they share by chance
        low = high = max((at for at in range(low, min(high, len(between) - 1) + 1) if between[at] in "<["), default=low)
    else:
        high = to_tag(between, high)
        closed = re.match(r"[^<\[]*[>\]]", between[low:])
        low += len(closed[0]) if closed else 0
    begin, end = between[low:], between[:high]
    return _Split(before[: len(before) - len(begin)], begin, between[high:low], end, after[len(end) :])


def _without_first_space(parts: _Split) -> _Split:
    """White space before a first call is not the call's; before the others it separates them."""
    if parts.before:
        return parts._replace(before=parts.before.lstrip())
    space = parts.begin[: len(parts.begin) - len(parts.begin.lstrip())]
    return parts._replace(begin=parts.begin.lstrip(), separator=parts.separator + space)


def _text(text: str) -> Marked:
    return (text,) if text else ()


HARMONY = "harmony"
_HARMONY_FORMAT = AnswerFormat(
    HARMONY,
    CallFormat(
        kind="name_json",
        begin=(),
        call_begin=("<|channel|>commentary to=functions.",),
        call=(Slot.NAME, " <|constrain|>json<|message|>", Slot.ARGUMENTS),
        call_end=("<|call|>",),
        several=False,
    ),
    ReasoningFormat(begin=("<|channel|>analysis<|message|>",), end=("<|end|>",)),
    reasoning_name=HARMONY,
    channels=True,
    content_begin=("<|channel|>final<|message|>",),
    message_begin=("<|start|>assistant",),
)
"""Source: openai/harmony, docs/format.md."""
_LAST_TAG = re.compile(r"[<\[][^<>\[\]]*[>\]][^<>\[\]]*\Z")
_THINK_END = re.compile(r"</([\w:]*think[\w:]*)>|\[/(THINK)\]")


def tool_format_names() -> list[str]:
    """Return the names that `--tool-format` takes."""
    return sorted([*TOOL_FORMATS, HARMONY])


def read_answer_format(
    template: ChatTemplate, tokenizer: Tokenizer | None = None, override: str | None = None
) -> AnswerFormat:
    """Takes tens of milliseconds; the caller keeps it. `override` is a name of a call format.

    Never raises for an odd template: what cannot be read is None. Raises ConfigError for an unknown override.
    """
    if override is not None and override not in tool_format_names():
        known = ", ".join(tool_format_names())
        raise ConfigError(
            f"--tool-format is {override!r}{did_you_mean(override, tool_format_names())}; choose one of {known}"
        )
    if override == HARMONY or (override is None and _is_harmony(template.source)):
        return _with_marks(_HARMONY_FORMAT, tokenizer)
    probe = ProbeTemplate(template)
    found = _named_format(override) if override else _read(template, probe)
    reasoning = _read_reasoning(template.source, probe, found.calls)
    name = "none" if reasoning is None else _name_of(plain(reasoning.begin) or plain(reasoning.end))
    return _with_marks(replace(found, reasoning=reasoning, reasoning_name=name), tokenizer)


def _read(template: ChatTemplate, probe: ProbeTemplate) -> AnswerFormat:
    calls = read_calls(probe.write)
    if calls is not None and _is_read_back(calls, probe):
        name, calls = _known(calls)
        return AnswerFormat(name, replace(calls, id_length=None if probe.takes_long_ids() else len(PROBES[0].id)))
    hint = next((hint for hint in HINTS if hint.sign in template.source), None)
    if hint is not None:
        return replace(
            _named_format(hint.format),
            writes_calls=False,
            tools_variable="tools" if probe.knows_tools() else hint.tools_variable,
            tools_in_system=hint.tools_in_system,
            tool_role=hint.tool_role,
        )
    if probe.knows_tools():
        return AnswerFormat("none")
    untaught = _named_format(UNTAUGHT_FORMAT)
    return replace(untaught, tools_system_text=tools_system_text, writes_calls=False, tool_role="user")


def _is_read_back(calls: CallFormat, probe: ProbeTemplate) -> bool:
    """Return whether the calls that the template writes are found again by the format that was read off it."""
    schemas = {known.name: PARAMETERS for known in PROBES}
    for probes in (PROBES[:1], PROBES)[: 2 if calls.several else 1]:
        parser = AnswerParser(AnswerFormat("", calls), make_id=str, tools=schemas)
        found = [*parser.push([probe.write(probes) or ""]).calls, *parser.flush().calls]
        names = [call.name for call in found if isinstance(call, CallBegun)]
        texts = [""] * len(names)
        for part in found:
            if isinstance(part, ArgumentsText):
                texts[part.index] += part.text
        if names != [call.name for call in probes] or not all(map(_is_of, texts, probes)):
            return False
    return True


def _is_of(text: str, probe: ProbeCall) -> bool:
    with suppress(ValueError):
        return bool(json.loads(text) == probe.arguments)
    return False


def _is_harmony(source: str) -> bool:
    return "<|channel|>analysis<|message|>" in source and "<|channel|>commentary" in source


@functools.cache
def _named_format(name: str) -> AnswerFormat:
    template = ChatTemplate(TOOL_FORMATS[name])

    def write(probes: tuple[ProbeCall, ...]) -> str:
        return template.render((), calls=[{"id": probe.id, **probe.call()["function"]} for probe in probes])

    return AnswerFormat(name, read_calls(write))  # type: ignore[arg-type]


def _known(calls: CallFormat) -> tuple[str, CallFormat]:
    """Return the format's name in the table, and the calls without a next turn's begin that was taken for their end."""
    for ended in (calls, replace(calls, end=())):
        for name in TOOL_FORMATS:
            if _shape(_named_format(name).calls) == _shape(ended):
                return name, ended
    return "template", calls


def _shape(calls: CallFormat | None) -> list[str]:
    """The call's letters, without white space at the ends of literals."""
    texts = AnswerFormat("", replace(calls, opener=())).texts() if calls else ()
    return ["".join(piece.name if isinstance(piece, Slot) else str(piece) for piece in text).strip() for text in texts]


# Thoughts.


def _read_reasoning(source: str, probe: ProbeTemplate, calls: CallFormat | None) -> ReasoningFormat | None:
    thoughts = probe.thoughts()
    if thoughts:
        first = (plain(calls.begin) or plain(calls.call_begin)).strip() if calls else ""
        ends = [shown.after.partition(first)[0] if first else shown.after for shown in thoughts]
        found = _around(_begin_of(thoughts[0].before, probe), _shared_tags(ends))
        if found is not None:
            return found
    tag = _THINK_END.search(source)
    if tag is None:
        return None
    begin, end = (f"<{tag[1]}>", tag[0]) if tag[1] else ("[THINK]", tag[0])
    opened = next((opening for opening in probe.openings if opening.rstrip().endswith(begin)), begin)
    return ReasoningFormat((begin,), (end,), before=opened[len(opened.rstrip()) :])


def _shared_tags(texts: list[str]) -> str:
    """Return the common begin of the texts, of which one may be longer; no tag is cut."""
    shared = shared_prefix(*texts)
    return shared[: to_tag(shared, len(shared))] or texts[0]


def _around(begin: str, end: str) -> ReasoningFormat | None:
    if not end.strip():
        return None
    return ReasoningFormat(
        begin=(begin.strip(),) if begin.strip() else (),
        end=(end.strip(),),
        before=begin[len(begin.rstrip()) :],
        after=end[: len(end) - len(end.lstrip())],
        behind=end[len(end.rstrip()) :],
    )


def _begin_of(before: str, probe: ProbeTemplate) -> str:
    """The last tag before the thoughts, unless every answer begins with it: then what the prompt adds to that."""
    tag = _LAST_TAG.search(before)
    if tag is not None and not probe.plain_head.rstrip().endswith(tag[0].rstrip()):
        return tag[0]
    head = probe.plain_head
    return next((opening[len(head) :] for opening in probe.openings if opening.startswith(head)), "")


def _name_of(mark: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", mark.lower()).strip("_") or "template"


# Marks.


def _with_marks(format: AnswerFormat, tokenizer: Tokenizer | None) -> AnswerFormat:
    """Literals with the tokens in them told apart."""
    if tokenizer is None:
        return format
    ids = {text: tokenizer.token_id(text) for text in tokenizer.added_tokens if is_bracketed(text)}
    if format.name == "llama3" and format.calls and "<|python_tag|>" in ids:
        format = replace(format, calls=replace(format.calls, opener=("<|python_tag|>",)))
    marks = Marks(ids)
    return _marked(format, lambda text: _split_marks(text, marks, ids))  # type: ignore[no-any-return]


def _marked(value: Any, split: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(part for piece in value for part in (split(piece) if isinstance(piece, str) else (piece,)))
    if isinstance(value, dict):
        return {key: _marked(inner, split) for key, inner in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _marked(getattr(value, field.name), split) for field in fields(value)})
    return value


def _split_marks(text: str, marks: Marks, ids: dict[str, int | None]) -> list[str | Mark]:
    found: list[str | Mark] = []
    at = 0
    for match in marks.pattern.finditer(text):
        token_id = ids[match[0]]
        if token_id is not None:
            found += [text[at : match.start()], Mark(match[0], token_id)]
            at = match.end()
    return [piece for piece in (*found, text[at:]) if piece]

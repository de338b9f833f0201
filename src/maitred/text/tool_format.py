"""Reads a model's answer format off its chat template, by rendering probe calls and probe thoughts."""

from __future__ import annotations

import functools
import json
import re
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

from maitred.core.errors import ConfigError, did_you_mean
from maitred.text.answer_format import AnswerFormat, CallFormat, Mark, ReasoningFormat, Slot, plain
from maitred.text.answer_parser import AnswerParser, ArgumentsText, CallBegun
from maitred.text.call_literals import read_calls
from maitred.text.chat_template import ChatTemplate
from maitred.text.marks import Marks, is_bracketed
from maitred.text.probes import PARAMETERS, PROBES, ProbeCall, ProbeTemplate, shared_prefix, to_tag
from maitred.text.tokenizer import Tokenizer
from maitred.text.tool_formats import HINTS, TOOL_FORMATS, UNTAUGHT_FORMAT, tools_system_text

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

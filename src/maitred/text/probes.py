"""Probe calls and probe thoughts, rendered by a chat template; what it writes around an answer is cut off."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.text.chat_template import ChatTemplate

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

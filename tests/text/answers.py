"""Calls that are hard to write, templates that write them in each form, and answers parsed and put together again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken

from maitred.text.answer_format import AnswerFormat
from maitred.text.answer_parser import AnswerParser, CallBegun
from maitred.text.chat_template import TOOL_FORMATS, ChatTemplate
from maitred.text.tokenizer import Tokenizer
from tests.text.kinds import NAMED, byte_level

EASY = {"city": "Paris", "days": 3}
HARD = {
    "text": 'a "quoted" line\nand another\n\n  é 你好 🔧 </x> {b} [c] \\ back',
    "nested": {"a": [1, 2, {"b": None}], "c": True},
    "flag": False,
    "share": 1.5,
    "list": ["a", "b, c"],
    "empty": "",
}
CALLS: dict[str, dict[str, Any]] = {"get_weather": EASY, "get_weather_now": HARD, "list_all": {}}
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", list: "array"}


def schema_of(arguments: Mapping[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": _TYPES[type(value)], "description": "d"} for key, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": []}


SCHEMAS = {name: schema_of(arguments) for name, arguments in CALLS.items()}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


def tool_calls(names: Sequence[str]) -> list[dict[str, Any]]:
    return [
        {"id": f"callid00{number}", "type": "function", "function": {"name": name, "arguments": CALLS[name]}}
        for number, name in enumerate(names)
    ]


TURNS = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}
{{- m.content or '' }}
{%- if m.tool_calls %}CALLS{% endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
_FLAT = """{% set ns = namespace(calls=[]) %}{% for t in m.tool_calls %}\
{% set ns.calls = ns.calls + [{'id': t.id, 'name': t.function.name, 'arguments': t.function.arguments}] %}\
{% endfor %}{% set calls = ns.calls %}"""


def template_of(name: str) -> ChatTemplate:
    """One whose assistant thinks in <think> tags, and calls in a format of the table."""
    return ChatTemplate(TURNS.replace("CALLS", _FLAT + TOOL_FORMATS[name]))


def answer_of(template: ChatTemplate, message: Mapping[str, Any]) -> str:
    """What the template writes of an answer, and the end of its turn."""
    question = [{"role": "user", "content": "Which one?"}]
    prompt = template.render(question, tools=TOOLS)
    whole = template.render([*question, {"role": "assistant", **message}], tools=TOOLS, add_generation_prompt=False)
    return whole[len(prompt) :] if whole.startswith(prompt) else whole.rpartition("Which one?")[2]


def tokenizer_with(*marks: str) -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return Tokenizer(inner, NAMED)


@dataclass
class Parsed:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for _, name, text in self.calls]


def parse(format: AnswerFormat, pieces: Sequence[str | int], **options: Any) -> Parsed:
    """Each piece pushed alone, and all deltas joined."""
    parser = AnswerParser(format, make_id="id{}".format, **{"tools": SCHEMAS, **options})
    parsed = Parsed()
    for delta in [*(parser.push([piece]) for piece in pieces), parser.flush()]:
        parsed.content += delta.content
        parsed.reasoning += delta.reasoning
        for part in delta.calls:
            if isinstance(part, CallBegun):
                assert part.index == len(parsed.calls)
                parsed.calls.append([part.id, part.name, ""])
            else:
                assert part.index == len(parsed.calls) - 1
                assert part.text
                parsed.calls[-1][2] += part.text
    return parsed

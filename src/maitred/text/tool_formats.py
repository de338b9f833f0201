"""Call formats by name, and what chat templates do not show of their models.

Each format is a snippet of a template that writes `calls`; it is read as a chat template is. Sources: the models'
cards and chat templates, and the parsers of vLLM (`tool_parsers`), SGLang (`function_call`) and llama.cpp
(`common/chat.cpp`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_JOINED = "{% for c in calls %}BEFORE{{ {'name': c.name, 'arguments': c.arguments} | tojson }}AFTER{% endfor %}"
_LISTED = "BEFORE[{% for c in calls %}{{ {'name': c.name, 'arguments': c.arguments} | tojson }}COMMA{% endfor %}]AFTER"
_COMMA = "{{ ', ' if not loop.last }}"
_LINE = "{{ '\\n' if not loop.last }}"


def _joined(before: str, after: str) -> str:
    return _JOINED.replace("BEFORE", before).replace("AFTER", after)


def _listed(before: str, after: str = "") -> str:
    return _LISTED.replace("BEFORE", before).replace("AFTER", after).replace("COMMA", _COMMA)


def _named(before: str, between: str, after: str) -> str:
    return (
        "{% for c in calls %}"
        + before
        + "{{ c.name }}"
        + between
        + "{{ c.arguments | tojson }}"
        + after
        + "{% endfor %}"
    )


def _paired(before: str, key: str, value: str, end: str, after: str) -> str:
    pairs = (
        "{% for k in c.arguments %}"
        + key
        + "{{ k }}"
        + value
        + "{{ (c.arguments[k] if c.arguments[k] is string else c.arguments[k] | tojson) }}"
        + end
        + "{% endfor %}"
    )
    return "{% for c in calls %}" + before + pairs + after + "{% endfor %}"


TOOL_FORMATS: dict[str, str] = {
    "hermes": _joined("<tool_call>\n", "\n</tool_call>" + _LINE),
    "llama3": "{{ {'name': calls[0].name, 'parameters': calls[0].arguments} | tojson }}",
    "mistral": "[TOOL_CALLS][{% for c in calls %}"
    "{{ {'name': c.name, 'arguments': c.arguments, 'id': c.id} | tojson }}" + _COMMA + "{% endfor %}]",
    "mistral_args": _named("[TOOL_CALLS]", "[ARGS]", ""),
    "mistral_call_id": _named("[TOOL_CALLS]", "[CALL_ID]{{ c.id }}[ARGS]", ""),
    "granite": _listed("<|tool_call|>"),
    "phi4_mini": _listed("<|tool_call|>", "<|/tool_call|>"),
    "functools": _listed("functools"),
    "qwen3_coder": _paired(
        "<tool_call>\n<function={{ c.name }}>\n",
        "<parameter=",
        ">\n",
        "\n</parameter>\n",
        "</function>\n</tool_call>" + _LINE,
    ),
    "glm45": _paired(
        "<tool_call>{{ c.name }}\n",
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>\n",
        "</tool_call>" + _LINE,
    ),
    "glm47": _paired("<tool_call>{{ c.name }}", "<arg_key>", "</arg_key><arg_value>", "</arg_value>", "</tool_call>"),
    "gemma4": "{% for c in calls %}<|tool_call>call:{{ c.name }}{{ '{' }}"
    "{% for k in c.arguments %}{{ k }}:"
    "{{ '<|\"|>' ~ c.arguments[k] ~ '<|\"|>' if c.arguments[k] is string else c.arguments[k] | tojson }}"
    "{{ ',' if not loop.last }}{% endfor %}}<tool_call|>{% endfor %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n"
    "```json\n{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>" + _LINE + "{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>"
    + _named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>")
    + "<｜tool▁calls▁end｜>",
}
"""`--tool-format` takes these, and `harmony`."""


THOUGHT_MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]")


class Hint(NamedTuple):
    """Facts that templates which hold `sign` do not show."""

    sign: str
    format: str
    tools_variable: str = "tools"
    tools_in_system: bool = False
    tool_role: str = "tool"


HINTS = (
    Hint("xml_tools", "hermes", tools_variable="xml_tools"),  # SmolLM3
    Hint("<|/tool|>", "phi4_mini", tools_in_system=True, tool_role="tool_response"),  # Phi-4-mini
    Hint("<|tool_call|>", "granite"),  # Granite 3
)

UNTAUGHT_FORMAT = "hermes"
"""Texts for a template without tools, beside `tools_system_text`."""


def tools_system_text(tools: Sequence[Mapping[str, Any]]) -> str:
    """Tells a model that was taught no calls how to write them."""
    told = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions, one JSON object a line:\n"
        f"<tools>\n{told}\n</tools>\n"
        "To call one, write nothing but its name and its arguments, as a JSON object in these tags:\n"
        '<tool_call>\n{"name": "function_name", "arguments": {"argument": "value"}}\n</tool_call>\n'
        "Write one such block for each call. What the function gives comes as the next message. "
        "When no function is needed, answer as always."
    )

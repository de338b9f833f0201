"""All that binds one answer, thoughts, calls and content, as one grammar for llguidance.

Literals of the format are met as tokens where they are tokens; free text never holds a special token. Syntax:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maitred.text.answer_format import AnswerFormat, CallFormat, Literal, Mark, ReasoningFormat
from maitred.text.schema import Source, quoted

_BLANKS = "BLANKS: /[ \\t\\r\\n]{0,8}/"
_TEXT = "TEXT: /(.|\\n)*/"


@dataclass(frozen=True, slots=True)
class Tool:
    """One that may be called."""

    name: str
    parameters: Mapping[str, Any]  # JSON schema of its arguments
    source: Source  # of it
    definition: Mapping[str, Any]  # as the chat template takes it


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    names: tuple[str, ...] = ()  # that may be called
    is_required: bool = False  # at least one call, and nothing else
    parallel: bool = True  # several at a time


NO_CALLS = ToolChoice()


class ThinkingLimit(NamedTuple):
    """Most tokens of thoughts, and what then follows them."""

    max_tokens: int
    end_token_ids: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Grammar:
    """Rules of the main grammar, and the named ones beside it."""

    rules: list[str] = field(default_factory=lambda: [_TEXT, _BLANKS])
    beside: list[Mapping[str, Any]] = field(default_factory=list)

    def rule(self, name: str, body: str) -> str:
        self.rules.append(f"{name}: {body}")
        return name

    def schema(self, name: str, schema_text: str) -> str:
        self.beside.append({"name": name, "json_schema": json.loads(schema_text)})
        return f"@{name}"

    def text(self) -> str:
        return json.dumps({"grammars": [{"lark_grammar": "\n".join(self.rules)}, *self.beside]}, ensure_ascii=False)

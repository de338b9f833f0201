"""Incremental parser of an answer: content, thoughts and calls of tools from text as it comes.

A whole answer is its stream fed at once. However the text is cut, the joined deltas are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from maitred.text.answer_format import AnswerFormat


class CallBegun(NamedTuple):
    index: int
    id: str
    name: str


class ArgumentsText(NamedTuple):
    index: int
    text: str


@dataclass(slots=True)
class AnswerDelta:
    """What became certain with one push. `calls` in order; nothing else in a delta has an order."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallBegun | ArgumentsText] = field(default_factory=list)


class AnswerParser:
    """Content, thoughts and calls from the pieces of an answer."""

    def __init__(
        self,
        format: AnswerFormat,
        *,
        make_id: Callable[[int], str],
        tools: Mapping[str, Mapping[str, Any]] | None = None,
        starts_in_reasoning: bool = False,
        parse_calls: bool = True,
        parse_reasoning: bool = True,
    ) -> None:
        """`tools`: name -> JSON schema of its parameters; a call of another name is no call."""

    def push(self, pieces: Sequence[str | int]) -> AnswerDelta:
        """Text, and ids of those tokens that are in `AnswerFormat.mark_ids`."""
        raise NotImplementedError

    def flush(self) -> AnswerDelta:
        """What was held back, at the end of the answer."""
        raise NotImplementedError

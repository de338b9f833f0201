"""Answer format: how a model writes its thoughts and its calls of tools, as literals around slots. Plain data.

The grammar of an answer is composed from it, and `answer_parser` finds its parts by it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Mark:
    """Literal text that is one added token of the tokenizer: it is met as that token, never as letters."""

    text: str
    token_id: int


class Slot(Enum):
    """The part of a call that stands between its literals."""

    NAME = "name"
    ID = "id"  # the call's, made up by the model
    INDEX = "index"  # of the call in the answer, in decimal
    ARGUMENTS = "arguments"  # one JSON object
    PAIRS = "pairs"  # the arguments as keys and values, see PairsFormat


Marked = tuple[str | Mark, ...]
"""Literal text; () is none."""
Pieces = tuple[str | Mark | Slot, ...]


@dataclass(frozen=True, slots=True)
class PairsFormat:
    """Arguments as `key_begin KEY value_begin VALUE value_end`, with `separator` between two of them.

    A text VALUE is written as it is; where there is a `quote`, between two quotes (texts in arrays and objects too,
    where keys are bare). Every other VALUE is JSON.
    """

    key_begin: Marked
    value_begin: Marked
    value_end: Marked
    separator: Marked = ()
    quote: Marked = ()
    value_begin_of: Mapping[str, Marked] = field(default_factory=dict)
    """Words before a value of a JSON type (string, integer, number, boolean, null, array, object), if special."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`begin (call_begin call call_end), joined by separator, end`.

    `call` is its canonical text. In `json` form it is one JSON object, from its `{` to its `}`, which a model may also
    space or order otherwise; in the other two it begins with a slot.
    """

    kind: Literal["json", "name_json", "pairs"]
    begin: Marked
    call_begin: Marked
    call: Pieces
    call_end: Marked
    separator: Marked = ()
    end: Marked = ()
    opener: Marked = ()
    """May stand before the first call, and means nothing: `<|python_tag|>` of Llama 3."""
    several: bool = True
    """An answer may hold more than one call."""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str | None = None
    pairs: PairsFormat | None = None
    index_from: int = 0
    """The first call's INDEX."""
    id_length: int | None = None
    """Letters and digits that the chat template demands of an id; None where any id will do."""


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """`begin before THOUGHTS after end behind`: marks, and the white space that the template puts at them."""

    begin: Marked
    end: Marked
    before: str = ""
    after: str = ""
    behind: str = ""

    def opened_by(self, prompt: str) -> bool:
        """Return whether the prompt ends inside thoughts that it began."""
        begin = plain(self.begin)
        return bool(begin.strip()) and prompt.rstrip().endswith(begin.rstrip())


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """The format of a model's answers, as far as it is known."""

    name: str
    """Name of the call format in TOOL_FORMATS, `template` for one without a name, `none`."""
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasoning_name: str = "none"
    channels: bool = False
    """Harmony (gpt-oss): thoughts, calls and content are messages on channels, see `answer_parser`."""
    content_begin: Marked = ()
    """Words before content, where it is marked."""
    message_begin: Marked = ()
    """Words that begin each message of an answer but the first, which the prompt has begun."""
    tools_variable: str = "tools"
    """The template's variable for the tools."""
    tools_in_system: bool = False
    """The template takes the tools as JSON text in the field `tools` of a system message."""
    tools_system_text: Callable[[Any], str] | None = None
    """For a template without tools: the text about them that goes before the first message."""
    writes_calls: bool = True
    """The template writes calls that were made; otherwise they must be content."""
    tool_role: str = "tool"
    """Role of a call's result where the template does not write calls."""

    @property
    def mark_ids(self) -> frozenset[int]:
        """Tokens that a parser must be given as ids."""
        return frozenset(mark.token_id for mark in self.marks())

    def marks(self) -> Iterator[Mark]:
        for text in self.texts():
            yield from (piece for piece in text if isinstance(piece, Mark))

    def texts(self) -> Iterable[Pieces]:
        """Return every literal, and the calls' slots."""
        if self.reasoning:
            yield from (self.reasoning.begin, self.reasoning.end)
        yield from (self.content_begin, self.message_begin)
        if self.calls:
            calls = self.calls
            yield from (
                calls.opener,
                calls.begin,
                calls.call_begin,
                calls.call,
                calls.call_end,
                calls.separator,
                calls.end,
            )
            if calls.pairs:
                pairs = calls.pairs
                yield from (pairs.key_begin, pairs.value_begin, pairs.value_end, pairs.separator, pairs.quote)
                yield from pairs.value_begin_of.values()


def plain(text: Marked) -> str:
    """The letters of a literal."""
    return "".join(piece.text if isinstance(piece, Mark) else piece for piece in text)


def call_id(request_id: str, index: int, length: int | None = None) -> str:
    """The id of an answer's call: the same whenever the answer is made again. `length` is `CallFormat.id_length`."""
    digest = hashlib.sha256(f"{request_id}/{index}".encode()).hexdigest()
    return f"call_{digest[:24]}" if length is None else digest[:length]

"""Special tokens of chats (marks): a client's text may hold their letters, and stays letters.

`<|im_end|>` in a content would end the turn and let its author write the next one, of any role; `<tool_call>` in a
tool's result would be a call. So a template never sees the marks of its values: it is rendered with a character of
private use in place of each, which no value holds. Where these stand in the prompt, the letters come back as a span
that `Tokenizer.encode` reads as plain text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from maitred.core.errors import InvalidRequest

_FIRST_PRIVATE, _LAST_PRIVATE = 0xF0000, 0x10FFFD  # planes 15 and 16
_PRIVATE = re.compile(f"[{chr(_FIRST_PRIVATE)}-{chr(_LAST_PRIVATE)}]")
_OWN_ROLES = ("assistant", "system", "developer")
_OWN_FIELDS = ("content", "thinking", "reasoning", "reasoning_content")


class Marks:
    """Some tokens, by their text, and their places in other texts: leftmost, and of those the longest."""

    def __init__(self, texts: Collection[str]) -> None:
        self.texts = tuple(sorted(filter(None, texts)))
        self.pattern = re.compile(_any_of(self.texts) or "(?!)")


def is_bracketed(text: str) -> bool:
    """Return whether the token looks like `<x>` or `[x]`; words and line ends may be added tokens too."""
    return len(text) > 2 and not (text[0].isalnum() or text[0].isspace() or text[-1].isalnum() or text[-1].isspace())


class MarkedText(str):
    """A prompt in which the marks at `spans`, from and to, in order, are a client's and not the template's."""

    spans: tuple[tuple[int, int], ...]
    marks: Marks

    def __new__(cls, text: str, spans: Sequence[tuple[int, int]], marks: Marks) -> MarkedText:
        made = super().__new__(cls, text)
        made.spans, made.marks = tuple(spans), marks
        return made

    def parts(self) -> Iterator[tuple[str, bool]]:
        """Return all of the text in order, each piece with whether it is one of the spans."""
        at = 0
        for start, end in self.spans:
            yield self[at:start], False
            yield self[start:end], True
            at = end
        yield self[at:], False


class HiddenMarks:
    """Stands between the values given to a template and the prompt that it makes of them. Time is linear in both."""

    def __init__(self, marks: Marks, turn_marks: Marks, source: str, *values: Any) -> None:
        """`turn_marks` are those of the marks that the model's own messages may not hold either, `source` is the
        template's. Raises InvalidRequest for values that use up all private characters."""
        self._marks, self._turn_marks = marks, turn_marks
        texts = [text for value in values for text in _texts_in(value)]
        found = sorted({mark for text in texts for each in (marks, turn_marks) for mark in each.pattern.findall(text)})
        self._stand_ins = dict(zip(found, _unused([source, *texts]) if found else "", strict=False))
        if len(self._stand_ins) < len(found):
            raise InvalidRequest("the messages hold nearly every character of private use; leave some out")

    def hide_in_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """The same of a message; what the model thought and said, and the system, may hold marks of answers."""
        own = _OWN_FIELDS if message.get("role") in _OWN_ROLES else ()
        return {self.hide(name): self.hide(value, own=name in own) for name, value in message.items()}

    def hide(self, value: Any, *, own: bool = False) -> Any:
        """The value, or a copy in which each mark is a character; of a MarkedText those in its spans. In a text of the
        model's `own`, those of turns alone."""
        if not self._stand_ins:
            return value
        if isinstance(value, MarkedText):
            return "".join(self.hide(piece) if is_clients else piece for piece, is_clients in value.parts())
        if isinstance(value, str):
            marks = self._turn_marks if own else self._marks
            return marks.pattern.sub(lambda found: self._stand_ins[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(name): self.hide(inner) for name, inner in value.items()}
        return [self.hide(inner) for inner in value] if isinstance(value, (list, tuple)) else value

    def restore(self, prompt: str) -> str:
        """The prompt with the letters of the marks; a MarkedText where there are any."""
        if not self._stand_ins:
            return prompt
        mark_of = {character: mark for mark, character in self._stand_ins.items()}
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        at = 0
        split: list[str] = re.split(f"([{''.join(mark_of)}])", prompt)
        for piece in split:
            text = mark_of.get(piece, piece)
            if piece in mark_of:
                spans.append((at, at + len(text)))
            pieces.append(text)
            at += len(text)
        return MarkedText("".join(pieces), spans, self._marks)


def _texts_in(value: Any) -> Iterator[str]:
    """Return every text in a value as JSON has them, names of fields too."""
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple)):
            rest += value


def _unused(texts: Sequence[str]) -> Iterator[str]:
    used = {character for text in texts for character in _PRIVATE.findall(text)}
    return (chr(code) for code in range(_FIRST_PRIVATE, _LAST_PRIVATE + 1) if chr(code) not in used)


def _any_of(texts: Sequence[str]) -> str:
    """A pattern for the longest of them, as a tree of their letters: so a match never goes back over a text, which an
    alternation of hundreds does at each letter."""
    by_first: dict[str, list[str]] = {}
    for text in filter(None, texts):
        by_first.setdefault(text[0], []).append(text[1:])
    branches = [re.escape(first) + _any_of(rests) for first, rests in by_first.items()]
    if not branches:
        return ""
    whole = branches[0] if len(branches) == 1 and "" not in texts else f"(?:{'|'.join(branches)})"
    return f"{whole}?" if "" in texts else whole

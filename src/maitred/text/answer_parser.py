"""Incremental parser of an answer: content, thoughts and calls of tools from text as it comes.

A whole answer is its stream fed at once. However the text is cut, the joined deltas are the same. White space is the
format's, and dropped, where it touches a mark: up to 64 characters before a call or the end of thoughts, all behind a
call, line ends around thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from maitred.text.answer_format import AnswerFormat, Pieces, Slot
from maitred.text.call_reader import CallReader, Schemas, Sink
from maitred.text.feed import Feed, Reading, find, held_from, match, pass_json, skip_space, skip_words, words

_RECIPIENT = re.compile(r"to=(functions\.)?([\w./:-]+)")
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_BEGINS = ("<|start|>", "<|channel|>")


class ChannelReader:
    """`mark` gives a mark as the feed has it, `tell` is given text and whether it is thoughts."""

    def __init__(
        self,
        feed: Feed,
        mark: Callable[[str], str],
        tools: Schemas | None,
        sink: Sink | None,
        tell: Callable[[str, bool], None],
    ) -> None:
        """`sink` None: calls are content."""
        self._feed, self._tools, self._sink, self._tell = feed, tools, sink, tell
        self._message = mark("<|message|>")
        self._ends, self._begins = [mark(text) for text in _ENDS], [mark(text) for text in _BEGINS]
        self._channel = re.compile(re.escape(mark("<|channel|>")) + r"\s*(\w+)")
        self._num_thoughts = 0

    def read(self) -> Reading[None]:
        """Read all of an answer."""
        feed = self._feed
        while (yield from skip_space(feed, 0)) < len(feed.text):
            header = ""
            if (yield from self._is_header()):
                found = yield from find(feed, 0, [self._message])
                if found is None:
                    break
                header = feed.cut(found[0])
                feed.cut(len(self._message))
            yield from self._body(header)

    def _is_header(self) -> Reading[bool]:
        for begin in (*self._begins, "to="):
            if (yield from skip_words(self._feed, 0, [begin])) is not None:
                return True
        return False

    def _body(self, header: str) -> Reading[None]:
        recipient, channel = _RECIPIENT.search(header), self._channel.search(header)
        if recipient is not None and recipient[1] and self._sink is not None and self._is_tool(recipient[2]):
            yield from self._call(recipient[2], self._sink)
            return
        is_thoughts = channel is not None and channel[1] == "analysis"
        is_thoughts = is_thoughts or (recipient is not None and recipient[2] != "user" and not recipient[1])
        if is_thoughts and self._num_thoughts:
            self._tell("\n", True)
        self._num_thoughts += is_thoughts
        yield from self._pass(lambda text: self._tell(text, is_thoughts))

    def _is_tool(self, name: str) -> bool:
        return self._tools is None or name in self._tools

    def _call(self, name: str, sink: Sink) -> Reading[None]:
        sink.begin(name, None)
        at = yield from skip_space(self._feed, 0)
        self._feed.cut(at)
        if self._feed.text.startswith("{"):
            yield from pass_json(self._feed, sink.arguments)
            yield from self._pass(lambda text: None)
            return
        told: list[bool] = []

        def tell(text: str) -> None:
            told.append(bool(text))
            sink.arguments(text)

        yield from self._pass(tell)
        if not any(told):
            sink.arguments("{}")

    def _pass(self, tell: Callable[[str], None]) -> Reading[None]:
        """Hands on the text up to a mark that ends it, and takes that away unless it begins the next message."""
        feed, stops = self._feed, [*self._ends, *self._begins]
        while (place := _first(feed.text, stops)) is None:
            tell(feed.cut(len(feed.text) if feed.ended else held_from(feed.text, stops)))
            if feed.ended:
                return
            yield
        tell(feed.cut(place[0]))
        if place[1] in self._ends:
            feed.cut(len(place[1]))


def _first(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    return min(((at, stop) for stop in stops if (at := text.find(stop)) >= 0), default=None)


_MAX_SPACE = 64
_MOST_AT_ONCE = 1024  # characters: so that time is linear in an answer that is fed as a whole
# A mark stands in the text as half of a surrogate pair, which no text has.
_FIRST_MARK = 0xD800
_MARK = re.compile("[\ud800-\udfff]")
_NEW_LINES = re.compile(r"\n*")


@dataclass(slots=True)
class CallBegun:
    index: int
    id: str
    name: str


@dataclass(slots=True)
class ArgumentsText:
    index: int
    text: str


@dataclass(slots=True)
class AnswerDelta:
    """The parts that became certain with one push. `calls` is in order; nothing else in a delta has an order."""

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
        tools: Schemas | None = None,
        starts_in_reasoning: bool = False,
        parse_calls: bool = True,
        parse_reasoning: bool = True,
    ) -> None:
        """`tools`: name -> JSON schema of its parameters; a call of another name is no call. None: any name is one."""
        marks = {mark.token_id: mark.text for mark in format.marks()}
        self._characters = {token_id: chr(_FIRST_MARK + number) for number, token_id in enumerate(marks)}
        self._letters = {self._characters[token_id]: text for token_id, text in marks.items()}
        self._make_id = make_id
        self._feed = Feed()
        self._delta = AnswerDelta()
        self._num_calls = 0
        self._has_marks = False
        self._thinking = starts_in_reasoning and parse_reasoning
        self._started = False  # content has begun, so what only may begin it does not any more
        self._is_done = False
        sink = Sink(self._tell_call, self._tell_arguments)
        calls = format.calls if parse_calls else None
        self._calls = CallReader(calls, self._encode, tools, self._feed, sink) if calls else None
        reasoning = format.reasoning if parse_reasoning else None
        self._begin = words(self._encode(reasoning.begin)) if reasoning else []
        self._end = words(self._encode(reasoning.end)) if reasoning else []
        # What may end content and thoughts. Letters that look like the begin of thoughts do not, behind content.
        call = [self._calls.trigger] if self._calls and self._calls.trigger else []
        self._triggers = {False: [*call, *filter(_MARK.match, self._begin[:1])], True: [*call, *self._end[:1]]}
        self._opener = words(self._encode(calls.opener)) if calls else []
        channels = ChannelReader(self._feed, self._mark, tools, sink if parse_calls else None, self._tell_as)
        self._run = channels.read() if format.channels else self._prose()

    @property
    def in_reasoning(self) -> bool:
        """Return whether the next text is thought, as far as is certain."""
        return self._thinking

    def push(self, pieces: Sequence[str | int]) -> AnswerDelta:
        """Text, and ids of those tokens that are in `AnswerFormat.mark_ids`."""
        for piece in pieces:
            if not isinstance(piece, str):
                self._has_marks = True
                self._feed.text += self._characters.get(piece, "")
            elif len(piece) <= _MOST_AT_ONCE:
                self._feed.text += piece
            else:
                for start in range(0, len(piece), _MOST_AT_ONCE):
                    self._feed.text += piece[start : start + _MOST_AT_ONCE]
                    self._advance()
        self._advance()
        return self._told()

    def flush(self) -> AnswerDelta:
        """Return the text that was held back, at the end of the answer."""
        self._feed.ended = True
        self._advance()
        return self._told()

    def _advance(self) -> None:
        if not self._is_done:
            self._is_done = next(self._run, self) is self

    def _told(self) -> AnswerDelta:
        delta, self._delta = self._delta, AnswerDelta()
        return delta

    def _encode(self, text: Pieces) -> str:
        """A literal as the feed has it."""
        pieces = (piece for piece in text if not isinstance(piece, Slot))
        return "".join(piece if isinstance(piece, str) else self._characters[piece.token_id] for piece in pieces)

    def _mark(self, text: str) -> str:
        return next((character for character, letters in self._letters.items() if letters == text), text)

    # What is told.

    def _shown(self, text: str) -> str:
        if not self._has_marks:
            return text
        return _MARK.sub(lambda mark: self._letters.get(mark[0], ""), text)

    def _tell(self, text: str) -> None:
        if self._thinking:
            self._delta.reasoning += self._shown(text)
        elif text:
            self._delta.content += self._shown(text)
            self._started = True

    def _tell_as(self, text: str, thinking: bool) -> None:
        self._thinking = thinking
        self._tell(text)

    def _tell_call(self, name: str, own_id: str | None) -> None:
        self._delta.calls.append(CallBegun(self._num_calls, own_id or self._make_id(self._num_calls), name))
        self._num_calls += 1

    def _tell_arguments(self, text: str) -> None:
        if text:
            self._delta.calls.append(ArgumentsText(self._num_calls - 1, self._shown(text)))

    # Content and thoughts.

    def _prose(self) -> Reading[None]:
        feed = self._feed
        if self._thinking:  # the prompt began them; a model may do so again
            behind = yield from skip_words(feed, 0, self._begin)
            yield from self._enter_thoughts(behind or 0)
        while True:
            if not self._started and not self._thinking and (yield from self._read_start()):
                continue
            triggers = self._triggers[self._thinking]
            places = [(at, trigger) for trigger in triggers if (at := feed.text.find(trigger)) >= 0]
            if places:
                yield from self._read_mark(*min(places))
            elif feed.ended:
                self._tell(feed.cut(len(feed.text)))
                return
            else:
                self._tell(feed.cut(_before_space(feed.text, held_from(feed.text, triggers))))
                yield

    def _read_start(self) -> Reading[bool]:
        """Reads what may only stand at the start of content; whether there was any."""
        feed = self._feed
        at = yield from skip_space(feed, 0)
        if self._begin:
            behind = yield from skip_words(feed, at, self._begin)
            if behind is not None:
                yield from self._enter_thoughts(behind)
                return True
        if self._calls and self._calls.trigger is None and at < len(feed.text):
            behind = yield from skip_words(feed, at, self._opener)
            if (yield from self._calls.read(at if behind is None else behind)):
                return True
        self._started = True
        return False

    def _read_mark(self, at: int, trigger: str) -> Reading[None]:
        feed = self._feed
        start = _before_space(feed.text, at)
        self._tell(feed.cut(start))
        at -= start
        behind = None
        reached = at + 1
        if self._calls and trigger == self._calls.trigger:
            if (yield from self._calls.read(at)):
                return
            reached = max(reached, self._calls.reached)
        reasoning = self._end if self._thinking else self._begin
        if trigger in reasoning[:1]:
            behind = yield from skip_words(feed, at, reasoning)
        if behind is None:
            self._tell(feed.cut(reached))
        elif self._thinking:
            feed.cut(behind)
            self._thinking = self._started = False
            yield from self._skip_new_lines()
        else:
            yield from self._enter_thoughts(behind)

    def _enter_thoughts(self, behind: int) -> Reading[None]:
        self._feed.cut(behind)
        self._thinking = True
        yield from self._skip_new_lines()

    def _skip_new_lines(self) -> Reading[None]:
        _, end = yield from match(self._feed, 0, _NEW_LINES)
        self._feed.cut(end)


def _before_space(text: str, at: int) -> int:
    """Return where the white space before `at` begins."""
    if at and not text[at - 1].isspace():
        return at
    since = max(0, at - _MAX_SPACE)
    return since + len(text[since:at].rstrip())

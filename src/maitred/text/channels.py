"""Reads answers in harmony (gpt-oss): messages on channels, each a header, `<|message|>` and a body.

`analysis` holds thoughts, `final` and `commentary` content, a message to `functions.NAME` is a call. Messages to other
recipients (built-in tools, which do not run here) are thoughts. Source: openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from maitred.text.call_reader import Schemas, Sink
from maitred.text.feed import Feed, Reading, find, held_from, pass_json, skip_space, skip_words

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

"""Terminal of a chat: editing and history, or plain pipes."""

from __future__ import annotations

import signal
import sys
from contextlib import suppress
from typing import Protocol, TextIO

from maitred.cli.console import inert


class Terminal(Protocol):
    """What a chat needs of the person's side."""

    interactive: bool

    async def read(self) -> str | None:
        """What was typed; None when the person leaves."""

    def show(self, text: str) -> None:
        """A piece of the answer, as it comes."""

    def think(self, text: str) -> None:
        """A piece of the thoughts before the answer, as it comes."""

    def tell(self, text: str) -> None:
        """A line from us, not from the model."""

    def remark(self, text: str) -> None:
        """A line that only someone at a terminal wants."""


def open_terminal() -> Terminal:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a lone surrogate must not end the chat
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return PipeTerminal(sys.stdin, sys.stdout)
    from maitred.cli.chat.screen import ScreenTerminal

    return ScreenTerminal()


class PipeTerminal:
    """One question a line (a backslash at its end continues it), answers without colours."""

    interactive = False

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source, self._sink = source, sink

    async def read(self) -> str | None:
        lines: list[str] = []
        while line := self._read_line():
            line = line.rstrip("\n")
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        return "\n".join(lines) if lines else None

    def _read_line(self) -> str:
        """Blocks, in this thread: nothing else waits on our event loop, and a thread stuck here could not be ended.

        asyncio's own handler of Ctrl-C would only set a flag, so for this long Python's raises at once.
        """
        with suppress(ValueError):  # not the main thread
            previous = signal.signal(signal.SIGINT, signal.default_int_handler)
            try:
                return self._source.readline()
            finally:
                signal.signal(signal.SIGINT, previous)
        return self._source.readline()

    def show(self, text: str) -> None:
        self._sink.write(inert(text))
        self._sink.flush()

    def think(self, text: str) -> None:
        """Nothing: who reads a pipe wants the answer alone."""

    def tell(self, text: str) -> None:
        print(inert(text), file=sys.stderr, flush=True)

    def remark(self, text: str) -> None:
        pass

"""Terminal of a chat: editing and history, or plain pipes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from maitred.cli.chat.conversation import COMMANDS
from maitred.cli.console import dim, inert

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent


class Terminal(Protocol):
    """The person's side, as a chat needs it."""

    interactive: bool

    async def read(self) -> str | None:
        """Text as typed; None when the person leaves."""

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
        """Print nothing: a pipe's reader wants the answer alone."""

    def tell(self, text: str) -> None:
        print(inert(text), file=sys.stderr, flush=True)

    def remark(self, text: str) -> None:
        pass


class ScreenTerminal:
    """A person at a keyboard: line editing, history and completion by prompt_toolkit."""

    interactive = True

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.formatted_text import ANSI

        self._session: PromptSession[str] = PromptSession(
            ANSI("\x1b[1;36m>\x1b[0m "),
            history=self._history(),
            multiline=True,
            prompt_continuation=lambda width, line_number, is_soft_wrap: "  ",
            key_bindings=_key_bindings(),
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
        )

    def _history(self) -> History:
        """History in a file; where that cannot be written, of this chat alone."""
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        try:
            return FileHistory(str(history_file(os.environ)))
        except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home at all
            self.remark(f"no history is kept ({error}); XDG_STATE_HOME names a folder for it")
            return InMemoryHistory()

    async def read(self) -> str | None:
        try:
            return await self._session.prompt_async()
        except KeyboardInterrupt:
            self.remark("Ctrl-D or /exit leaves")
            return ""
        except EOFError:
            return None

    def show(self, text: str) -> None:
        sys.stdout.write(inert(text))
        sys.stdout.flush()

    def think(self, text: str) -> None:
        sys.stdout.write(dim(inert(text)))
        sys.stdout.flush()

    def tell(self, text: str) -> None:
        print(inert(text), flush=True)

    def remark(self, text: str) -> None:
        print(dim(inert(text)), flush=True)


def _key_bindings() -> KeyBindings:
    from prompt_toolkit.key_binding import KeyBindings

    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def history_file(environ: Mapping[str, str]) -> Path:
    """History file under XDG_STATE_HOME, readable by its owner alone. Raises OSError where it cannot be written."""
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "maitred"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    path.open("a+b").close()
    return path

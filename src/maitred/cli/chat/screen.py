"""The chat on a real terminal: line editing, history and completion by prompt_toolkit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import ANSI
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from maitred.cli.chat.conversation import COMMANDS
from maitred.cli.console import dim, inert


class ScreenTerminal:
    """A person at a keyboard."""

    interactive = True

    def __init__(self) -> None:
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
        """In a file; where that cannot be written, of this chat alone."""
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
    """Under XDG_STATE_HOME; readable by its owner alone. Raises OSError where it cannot be written."""
    state = Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    folder = state / "maitred"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / "chat_history"
    path.touch(mode=0o600)
    path.open("a+b").close()
    return path

"""The text parts of one model, tokenizer and chat template, read when they are first needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from maitred.text.folder import read_named_tokens

if TYPE_CHECKING:
    from maitred.text.answer_format import AnswerFormat
    from maitred.text.chat_template import ChatTemplate
    from maitred.text.tokenizer import Tokenizer


class Text(Protocol):
    """Text parts of a model: text to tokens, messages to a prompt."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def chat_template(self) -> ChatTemplate | None: ...

    @property
    def answer_format(self) -> AnswerFormat:
        """Return the format in which the model writes thoughts and calls of tools."""

    def read(self) -> object:
        """Read everything now, so that no request waits later; raises CheckpointError for files that cannot be read."""


class TextParts(NamedTuple):
    """Parts that were read."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    tool_format: str | None = None

    @property
    def answer_format(self) -> AnswerFormat:
        return answer_format_of(self)

    def read(self) -> TextParts:
        return self


class FolderText:
    """The parts of a model folder or a GGUF file, read by the first thread that asks.

    A vocabulary of 150,000 tokens takes 0.15 s and 60 MB, which callers with token ids alone never need. Asking raises
    CheckpointError for files that are missing or broken.
    """

    def __init__(
        self,
        folder: Path,
        chat_template: str | Mapping[str, str] | None,
        read_tokenizer: Callable[[Path], Tokenizer] | None = None,
        *,
        allow_special_tokens_in_content: bool = False,
        tool_format: str | None = None,
        num_rows: int | None = None,
    ) -> None:
        """`chat_template` is as in ChatTemplate; `read_tokenizer` None is `Tokenizer.from_folder`; `num_rows` are those
        of the model's embedding."""
        self._allow_special_tokens, self._tool_format = allow_special_tokens_in_content, tool_format
        self._num_rows = num_rows
        self._folder, self._template, self._read_tokenizer = folder, chat_template, read_tokenizer
        self._parts: TextParts | None = None
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.read().tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self.read().chat_template

    @property
    def answer_format(self) -> AnswerFormat:
        return self.read().answer_format

    def read(self) -> TextParts:
        """Now, unless it was done before."""
        if self._parts is None:
            with self._lock:
                if self._parts is None:
                    self._parts = self._read()
        return self._parts

    def _read(self) -> TextParts:
        from maitred.text.tokenizer import Tokenizer  # noqa: PLC0415  the libraries beneath take their time too

        tokenizer = (self._read_tokenizer or Tokenizer.from_folder)(self._folder)
        if self._num_rows is not None:
            tokenizer.limit_to(self._num_rows)
        if self._template is None:
            return TextParts(tokenizer, None, self._tool_format)
        from maitred.text.chat_template import ChatTemplate  # noqa: PLC0415

        added = None if self._allow_special_tokens else tokenizer.added_tokens
        template = ChatTemplate(self._template, read_named_tokens(self._folder), added_tokens=added)
        return TextParts(tokenizer, template, self._tool_format)


@lru_cache(maxsize=4)
def answer_format_of(parts: TextParts) -> AnswerFormat:
    """Takes tens of milliseconds, once; without a chat template nothing is known."""
    from maitred.text.answer_format import AnswerFormat  # noqa: PLC0415
    from maitred.text.tool_format import read_answer_format  # noqa: PLC0415

    if parts.chat_template is None:
        return AnswerFormat("none")
    return read_answer_format(parts.chat_template, parts.tokenizer, parts.tool_format)

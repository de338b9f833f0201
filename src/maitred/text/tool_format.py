"""Reads a model's answer format off its chat template, by rendering probe calls and probe thoughts."""

from __future__ import annotations

from maitred.text.answer_format import AnswerFormat
from maitred.text.chat_template import ChatTemplate
from maitred.text.tokenizer import Tokenizer


def read_answer_format(
    template: ChatTemplate, tokenizer: Tokenizer | None = None, override: str | None = None
) -> AnswerFormat:
    """Takes tens of milliseconds; the caller keeps it. `override` is a name in TOOL_FORMATS.

    Never raises for an odd template: what cannot be read is None. Raises ConfigError for an unknown override.
    """
    raise NotImplementedError

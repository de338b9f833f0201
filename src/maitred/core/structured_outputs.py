"""Shapes of answers that a client may ask for, by the names that users of vLLM know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from maitred.core.errors import InvalidRequest

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The shape of an answer: exactly one of its kinds. Raises InvalidRequest for none, for two, or an empty one.

    `json` and `json_object` bind what is neither thought nor call; the others all of the text, as the model writes it.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema (draft 2020-12), as text or as what it decodes to."""
    regex: str | None = None
    """A regular expression, of Rust's `regex` without look-around."""
    choice: Sequence[str] | None = None
    """The answer is one of these."""
    grammar: str | None = None
    """Lark, or llama.cpp's GBNF."""
    json_object: bool | None = None
    """Any JSON object."""
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text in which what follows a trigger fits a schema."""
    whitespace_pattern: str | None = None
    """A regular expression for blanks between the parts of JSON; without it, they are those of Python's json.dumps."""

    def __post_init__(self) -> None:
        given = self.given
        if len(given) != 1:
            told = " and ".join(given) or "none"
            raise InvalidRequest(
                f"structured_outputs has {told}; send exactly one of {', '.join(KINDS)}", param="structured_outputs"
            )
        if self.choice is not None:
            _check_choice(self.choice)
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise InvalidRequest(f"{name} must be a text", param=f"structured_outputs.{name}")
        if self.whitespace_pattern is not None and not self.binds_content:
            raise InvalidRequest(
                f"whitespace_pattern is for json and json_object, not for {self.kind}",
                param="structured_outputs.whitespace_pattern",
            )
        if getattr(self, self.kind) == "":
            raise InvalidRequest(f"{self.kind} is empty", param=f"structured_outputs.{self.kind}")

    @property
    def given(self) -> tuple[str, ...]:
        """The kinds that are there; `json_object` false is not."""
        return tuple(kind for kind in KINDS if getattr(self, kind) not in (None, *([False] if kind != "json" else [])))

    @property
    def kind(self) -> str:
        return self.given[0]

    @property
    def binds_content(self) -> bool:
        """Only what is neither thought nor call; else all of the text as the model writes it."""
        return self.kind in ("json", "json_object")


def _check_choice(choice: Sequence[str]) -> None:
    at = "structured_outputs.choice"
    is_list = isinstance(choice, Sequence) and not isinstance(choice, str)
    if not is_list or not choice or not all(isinstance(text, str) and text for text in choice):
        raise InvalidRequest("choice must be a list of texts that are not empty", param=at)
    if len(choice) > MAX_CHOICES:
        raise InvalidRequest(f"choice has {len(choice)} texts; at most {MAX_CHOICES}", param=at)

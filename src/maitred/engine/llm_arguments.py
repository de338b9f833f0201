"""Prompts, conversations and parameters as scripts give them to `LLM`: one, or a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from maitred.errors import InvalidRequest

Prompt = str | Sequence[int]
Message = Mapping[str, Any]
T = TypeVar("T")


def as_prompts(prompts: Any) -> list[Prompt]:
    """One text, one list of token ids, or a list of either, as a list of prompts."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is {type(prompts).__name__}; give a string, a list of token ids, or a list of either",
            param="prompts",
        )
    listed = list(prompts)
    if listed and all(isinstance(item, int) for item in listed):
        return [listed]
    for position, item in enumerate(listed):
        if not isinstance(item, (str, Sequence)):
            raise InvalidRequest(
                f"prompts[{position}] is {type(item).__name__}; a prompt is a string or a list of token ids",
                param="prompts",
            )
    return listed


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One list of messages, or a list of such lists, as a list of conversations."""
    if not messages or isinstance(messages, (str, Mapping)) or not isinstance(messages[0], (Mapping, Sequence)):
        raise InvalidRequest("messages is a list of {role, content}, or a list of such lists", param="messages")
    return [messages] if isinstance(messages[0], Mapping) else list(messages)


def one_each(value: T | Sequence[T], count: int, name: str) -> list[T]:
    if not isinstance(value, Sequence):
        return [value] * count
    if len(value) != count:
        raise InvalidRequest(f"{name} has {len(value)} entries for {count} prompts; give one, or one each", param=name)
    return list(value)

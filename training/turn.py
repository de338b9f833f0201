"""The pieces a conversation is made of: one question with its answer, what the guest has said so far, and the split."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from training.tools import result_of

HELD_OUT_BUCKETS = 10
"""One key in this many is held out."""


class Call(NamedTuple):
    """A tool call; its result is what `training.tools` gives for it."""

    name: str
    arguments: dict[str, Any]

    def message_part(self, index: int) -> dict[str, Any]:
        return {"id": f"call_{index}", "type": "function", "function": self._asdict()}


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message and the only right reply, before which tools may be called and thoughts written.

    `key` says what makes the question new: the order for a bill, the two numbers for a sum, the wording for a fact.
    All turns with an equal key are on the same side of the split. An empty key is small talk and is never scored.
    """

    category: str
    user: str
    assistant: str
    key: str
    calls: tuple[Call, ...] = ()
    thoughts: str = ""
    """Before the reply."""
    call_thoughts: str = ""
    """Before the calls, where there are any."""
    call_text: str = ""
    """What is said before the calls, after their thoughts."""

    @property
    def thinks(self) -> bool:
        return bool(self.thoughts)

    def replies(self) -> list[dict[str, Any]]:
        """Everything after the user's message, in the form of the OpenAI API, with arguments as objects."""
        said: list[dict[str, Any]] = []
        if self.calls:
            calls = [call.message_part(index) for index, call in enumerate(self.calls)]
            said.append(
                _thought(
                    {"role": "assistant", "content": self.call_text or None, "tool_calls": calls}, self.call_thoughts
                )
            )
            said += [
                {"role": "tool", "tool_call_id": f"call_{index}", "content": result_of(*call)}
                for index, call in enumerate(self.calls)
            ]
        return [*said, _thought({"role": "assistant", "content": self.assistant}, self.thoughts)]


def _thought(message: dict[str, Any], thoughts: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thoughts} if thoughts else message


@dataclass(slots=True)
class Guest:
    """What must be remembered from earlier turns of the same chat."""

    name: str = ""
    order: dict[str, int] = field(default_factory=dict)
    table: str = ""
    bill: int = 0
    paid: bool = False


def is_held_out(key: str) -> bool:
    """Whether a key belongs to the held-out side; a fixed hash, so that the split never depends on a seed."""
    return bool(key) and zlib.crc32(key.encode()) % HELD_OUT_BUCKETS == 0


def wording_key(category: str, question: str) -> str:
    """The key of a question whose wording is what varies: case, spaces and end marks do not make it new."""
    return f"{category}:{' '.join(question.lower().split()).rstrip('.?! ')}"


PREFIXES = (
    "",
    "",
    "",
    "",
    "Hello! ",
    "Hi, ",
    "Please tell me: ",
    "Quick question: ",
    "I have a question. ",
    "Good evening. ",
    "Excuse me, ",
    "One more thing: ",
    "Sorry, ",
    "And ",
    "Okay, ",
)
SUFFIXES = ("", "", "", "", " Thanks.", " Thank you.", " Please.", " I would like to know.", " I am curious.")


def politely(rng: Random, question: str) -> str:
    """The question with something polite before or after it, or nothing."""
    prefix = rng.choice(PREFIXES)
    goes_on = prefix.endswith((", ", ": ", "And ")) and question[1:2].islower()
    if goes_on and rng.random() < 0.5:
        question = question[0].lower() + question[1:]
    return prefix + question + rng.choice(SUFFIXES)


def carelessly(rng: Random, text: str) -> str:
    """Sometimes the text as people really type it: in small letters, or without its last mark."""
    if rng.random() < 0.12:
        text = text.lower()
    if rng.random() < 0.12:
        text = text.rstrip(".?!")
    return text

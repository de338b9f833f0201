"""A coding agent's loop of twenty turns over a growing prompt: how much of each prompt the prefix cache has.

Each dialect talks to a server of its own, one after the other. The client is the dialect's own in form: a system prompt
and tools of some 2,000 tokens, then a call and its result each turn, a twentieth of that (as a session of 20,000 tokens
that grows by 1,000). What Claude Code puts into its prompts for its books, new each turn, is there too: a checksum
before the system prompt, and how many tokens are left. `chat` is the same as a proxy translates it to chat completions,
with all that. The first turn has nothing to find and is not counted in the share; a turn's time is that to its whole
answer.
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any, NamedTuple

from harness import served

NUM_TURNS = 20
PATHS = [f"src/module_{number}.py" for number in range(NUM_TURNS)]
SCHEMA = {
    "type": "object",
    "properties": {"file_path": {"type": "string", "enum": PATHS}},
    "required": ["file_path"],
    "additionalProperties": False,
}
RULES = "\n".join(
    f"Rule {number}: read a file of the project before you change a line of it, and say in a sentence what changed."
    for number in range(60)
)
RESULT = "\n".join(f"{number:>6}\tdef step_{number}(value): return value + {number}" for number in range(1, 4))


def billing(turn: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.232.{turn:03x}; cc_entrypoint=cli; cch={turn * 4099:05x};"


def left(turn: int) -> str:
    return f"<total_tokens>{200_000 - 1_117 * turn} tokens left</total_tokens>"


class Told(NamedTuple):
    """A turn's answer, for the next request, and its prompt's tokens."""

    calls: Any
    num_prompt: int
    num_cached: int


class Anthropic:
    path = "/v1/messages"

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": "Tidy up the project."}]

    def asked(self, turn: int) -> dict[str, Any]:
        tool = {"name": "Read", "description": "Reads a file.", "input_schema": SCHEMA}
        last = {"role": "system", "content": left(turn)}
        return {
            "max_tokens": 32_000,
            "temperature": 0,
            "system": [{"type": "text", "text": text} for text in (billing(turn), RULES)],
            "messages": [*self._messages, *([last] if turn else [])],
            "tools": [tool],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }

    def heard(self, told: dict[str, Any]) -> Told:
        [call] = [block for block in told["content"] if block["type"] == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": RESULT}
        self._messages += [{"role": "assistant", "content": told["content"]}, {"role": "user", "content": [result]}]
        used = told["usage"]
        return Told(call, used["input_tokens"] + used["cache_read_input_tokens"], used["cache_read_input_tokens"])


class Chat:
    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": "Tidy up the project."}]

    def asked(self, turn: int) -> dict[str, Any]:
        tool = {"type": "function", "function": {"name": "Read", "description": "Reads a file.", "parameters": SCHEMA}}
        first = {"role": "system", "content": f"{billing(turn)}\n{RULES}"}
        last = {"role": "system", "content": left(turn)}
        return {
            "temperature": 0,
            "messages": [first, *self._messages, *([last] if turn else [])],
            "tools": [tool],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }

    def heard(self, told: dict[str, Any]) -> Told:
        message = told["choices"][0]["message"]
        [call] = message["tool_calls"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
        self._messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        used = told["usage"]
        return Told(call, used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"])


class Responses:
    """A session as Codex sends it: nothing is stored, and every item goes back."""

    path = "/v1/responses"

    def __init__(self) -> None:
        content = [{"type": "input_text", "text": "Tidy up the project."}]
        self._items: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": content}]

    def asked(self, turn: int) -> dict[str, Any]:
        return {
            "temperature": 0,
            "instructions": RULES,
            "input": self._items,
            "tools": [
                {"type": "function", "name": "Read", "description": "Reads a file.", "parameters": SCHEMA},
                {"type": "web_search"},
            ],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "store": False,
            "prompt_cache_key": "session",
        }

    def heard(self, told: dict[str, Any]) -> Told:
        [call] = [item for item in told["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": RESULT}
        self._items += [*told["output"], result]
        used = told["usage"]
        return Told(call, used["input_tokens"], used["input_tokens_details"]["cached_tokens"])


DIALECTS: dict[str, Callable[[], Any]] = {"anthropic": Anthropic, "chat": Chat, "responses": Responses}


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dialects", nargs="*", default=[*DIALECTS], choices=[*DIALECTS])
    options = parser.parse_args()
    print(f"{'dialect':<12} {'first prompt':>12} {'last':>6} {'cached of 2..20':>15} {'of all':>7} {'s a turn':>9}")
    for name in options.dialects:
        with served(options.model) as server:
            agent = DIALECTS[name]()
            turns, times = [], []
            for turn in range(NUM_TURNS):
                began = time.perf_counter()
                turns.append(agent.heard(post(server.url + agent.path, agent.asked(turn))))
                times.append(time.perf_counter() - began)
        shares = [
            sum(told.num_cached for told in some) / sum(told.num_prompt for told in some) for some in (turns[1:], turns)
        ]
        print(
            f"{name:<12} {turns[0].num_prompt:>12,} {turns[-1].num_prompt:>6,} {shares[0]:>14.1%} {shares[1]:>7.1%}"
            f" {sum(times[1:]) / (NUM_TURNS - 1):>9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()

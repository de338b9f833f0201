"""The same answers in each dialect: the server's processor time against a chat's, where the model costs nothing.

The server of `bench_http.py` in a process of its own. A round asks every dialect for the same conversations, whole and
as streams, in turn; a row has the median over rounds of its time over chat's in the same round. `agent` is a
conversation of forty messages with tools, calls and results, as a coding agent sends it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import uvloop
from bench_http import bare_server
from bench_route import cpu_s, load

QUESTION = "I would like two soups and a tea, please."
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
NUM_CALLS = 13


class Asked(NamedTuple):
    """A conversation, told to every dialect."""

    num_calls: int  # each an answer that reads a file, and what the file holds
    max_tokens: int
    stream: bool


def chat(asked: Asked) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number in range(asked.num_calls):
        function = {"name": "read", "arguments": json.dumps({"path": f"file{number}"})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": f"a line of file {number}"},
            {"role": "user", "content": "And the next?"},
        ]
    fields = {"messages": messages, "max_tokens": asked.max_tokens, "stream": asked.stream}
    tool = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": SCHEMA}}
    return fields | ({"tools": [tool], "tool_choice": "auto"} if asked.num_calls else {})


def anthropic(asked: Asked) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number in range(asked.num_calls):
        call = {"type": "tool_use", "id": f"c{number}", "name": "read", "input": {"path": f"file{number}"}}
        result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": f"a line of file {number}"}
        next_one = {"type": "text", "text": "And the next?"}
        messages += [
            {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result, next_one]},
        ]
    fields = {"messages": messages, "max_tokens": asked.max_tokens, "stream": asked.stream}
    tool = {"name": "read", "description": "Read a file.", "input_schema": SCHEMA}
    return fields | ({"tools": [tool], "tool_choice": {"type": "auto"}} if asked.num_calls else {})


def responses(asked: Asked) -> dict[str, Any]:
    items: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number in range(asked.num_calls):
        call = {"type": "function_call", "call_id": f"c{number}", "name": "read"}
        items += [
            {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {**call, "arguments": json.dumps({"path": f"file{number}"})},
            {"type": "function_call_output", "call_id": f"c{number}", "output": f"a line of file {number}"},
            {"role": "user", "content": "And the next?"},
        ]
    fields = {"input": items, "max_output_tokens": asked.max_tokens, "stream": asked.stream}
    tool = {"type": "function", "name": "read", "description": "Read a file.", "parameters": SCHEMA}
    return fields | ({"tools": [tool], "tool_choice": "auto"} if asked.num_calls else {})


def unstored(asked: Asked) -> dict[str, Any]:
    """A response as Codex asks for it."""
    return {**responses(asked), "store": False}


def ollama(asked: Asked) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
    for number in range(asked.num_calls):
        function = {"name": "read", "arguments": {"path": f"file{number}"}}
        messages += [
            {"role": "assistant", "content": "I look.", "tool_calls": [{"function": function}]},
            {"role": "tool", "tool_name": "read", "content": f"a line of file {number}"},
            {"role": "user", "content": "And the next?"},
        ]
    fields = {"messages": messages, "options": {"num_predict": asked.max_tokens}, "stream": asked.stream}
    tool = {"type": "function", "function": {"name": "read", "description": "Read a file.", "parameters": SCHEMA}}
    return fields | ({"tools": [tool]} if asked.num_calls else {})


Tell = Callable[[Asked], dict[str, Any]]
DIALECTS: dict[str, tuple[str, Tell]] = {
    "chat": ("/v1/chat/completions", chat),
    "anthropic": ("/v1/messages", anthropic),
    "responses": ("/v1/responses", responses),
    "unstored": ("/v1/responses", unstored),
    "ollama": ("/api/chat", ollama),
}
ROWS = {
    "whole, 16 tokens": Asked(0, 16, False),
    "whole, 256 tokens": Asked(0, 256, False),
    "stream, 256 tokens": Asked(0, 256, True),
    "agent, whole, 64 tokens": Asked(NUM_CALLS, 64, False),
    "agent, stream, 64 tokens": Asked(NUM_CALLS, 64, True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=1000, help="of each row, dialect and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", nargs="*", default=[*ROWS], choices=[*ROWS])
    parser.add_argument("--dialects", nargs="*", default=[*DIALECTS], choices=[*DIALECTS])
    options = parser.parse_args()
    others = [name for name in options.dialects if name != "chat"]
    print(f"{'answers':<26} {'chat us':>8}", *(f"{name:>12}" for name in others))
    with bare_server() as (port, process):
        for row, asked in ((row, ROWS[row]) for row in options.rows):
            num = options.answers // (8 if asked.stream else 1)
            spent: dict[str, list[float]] = {name: [] for name in ("chat", *others)}
            for number in range(-1, options.rounds):  # the first warms up
                for name, times in spent.items():
                    path, tell = DIALECTS[name]
                    body = tell(asked)
                    before = cpu_s(process)
                    uvloop.run(load(port, 8, num, lambda _, body=body: body, path=path))
                    if number >= 0:
                        times.append((cpu_s(process) - before) / num * 1e6)
            ratios = {name: median(map(float.__truediv__, spent[name], spent["chat"])) for name in others}
            shown = (f"{ratio:>11.3f}x" for ratio in ratios.values())
            print(f"{row:<26} {median(spent['chat']):>8.0f}", *shown, flush=True)


if __name__ == "__main__":
    main()

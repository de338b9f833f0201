"""What a client of a stream has in the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def client_has(events: bytes) -> dict[str, Any]:
    """All that a stream says, put together."""
    lines = [line[6:] for line in events.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    choices: dict[int, list[Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    usage = [without_times(chunk.get("usage")) for chunk in chunks]
    return {
        "ids": {(chunk["id"], chunk["created"]) for chunk in chunks},
        "choices": {index: together(parts) for index, parts in choices.items()},
        "usage": usage[-1],
        "generated": [told["completion_tokens"] for told in usage if told],
    }


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    deltas = [part["delta"] for part in parts if "delta" in part]
    logprobs = [part["logprobs"] for part in parts if part["logprobs"]]
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return {
        "text": "".join(part.get("text", "") for part in parts) + "".join(d.get("content") or "" for d in deltas),
        "calls": calls_of(deltas),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "logprobs": {name: [x for told in logprobs for x in told[name] or ()] for name in (logprobs or [{}])[0]},
        "token_ids": [token for part in parts for token in part.get("token_ids") or ()],
        "prompts": [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part],
        "end": (parts[-1]["finish_reason"], parts[-1].get("stop_reason")),
    }


def calls_of(deltas: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    """Id, name and arguments of each call."""
    calls: list[list[str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls") or ()):
        if "id" in piece:
            calls.append([piece["id"], piece["function"]["name"], ""])
        calls[piece["index"]][2] += piece["function"]["arguments"]
    return [(id, name, arguments) for id, name, arguments in calls]


def without_times(usage: dict[str, Any] | None) -> dict[str, Any] | None:
    return {name: told for name, told in usage.items() if name not in ("timing_ms", "engine_ms")} if usage else None

"""Hostile grammars beside plain streams: each is refused or answered, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from tests.reliability.grammar_bombs import BOMBS
from tests.reliability.test_served_engine import engine_of
from tests.waiting import HANGS_S

NUM_STREAMS = 8
LONG = [name for name in BOMBS if "1 MB" in name]  # seconds of compilation each
MESSAGES = [{"role": "user", "content": "What can I eat?"}]


async def streamed(client: httpx.AsyncClient, seed: int) -> str:
    """The content of a plain answer."""
    body = {"messages": MESSAGES, "seed": seed, "temperature": 1, "ignore_eos": True, "max_tokens": 60, "stream": True}
    content = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                [choice] = json.loads(line[6:])["choices"]
                content += choice["delta"].get("content") or ""
    return content


async def until_done(client: httpx.AsyncClient, seed: int, done: asyncio.Event) -> list[str]:
    told = [await streamed(client, seed)]
    while not done.is_set():
        told.append(await streamed(client, seed))
    return told


async def ask(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    body = {"messages": MESSAGES, "max_tokens": 20, "temperature": 0, **BOMBS[name]}
    answer = await client.post("/v1/chat/completions", json=body)
    told: dict[str, Any] = answer.json()
    if answer.status_code == 400:
        assert told["error"]["code"] == "unsupported_schema", told
        assert len(told["error"]["message"]) < 1000
    else:
        assert answer.status_code == 200, told
        assert told["choices"][0]["finish_reason"] in ("stop", "length")
    return told


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([name for name in BOMBS if name not in LONG], id="quick"),
        pytest.param(LONG, id="long", marks=pytest.mark.soak),
    ],
)
async def test_hostile_grammars_are_refused_or_answered_and_no_stream_and_no_process_notices(server, names):
    engine = engine_of(server).pid
    async with httpx.AsyncClient(base_url=server.url, timeout=HANGS_S) as client:
        undisturbed = [await streamed(client, seed) for seed in range(NUM_STREAMS)]
        done = asyncio.Event()
        beside = [asyncio.create_task(until_done(client, seed, done)) for seed in range(NUM_STREAMS)]
        try:
            for name in names:
                await ask(client, name)
        finally:
            done.set()
            told = await asyncio.gather(*beside)
    assert [set(texts) for texts in told] == [{text} for text in undisturbed]
    assert engine_of(server).pid == engine
    assert server.process.poll() is None

"""Objectives of `route --slo`: as clients of the router see its answers."""

from __future__ import annotations

import asyncio

import httpx

from tests.api.test_promises import counted
from tests.fleet.fake_upstream import Seen, whole
from tests.fleet.routers import WHOLE_STREAM, chat, client_of, completion, routed


async def answers(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """As it was asked: streamed, whole, or not at all."""
    if b'"stream":true' in seen.body.replace(b" ", b""):
        writer.write(WHOLE_STREAM)
    else:
        writer.write(whole(completion(), "500 Broken" if b"fail" in seen.body else "200 OK"))


async def test_the_router_counts_the_promises_that_its_fleet_kept():
    async with routed(answers, server={"slo": ("ttft:60s", "e2e:0.000001s")}) as (running, _):
        async with client_of(running) as client:
            for fields in ({"stream": True}, {}):
                assert (await client.post("/v1/chat/completions", json=chat(**fields))).status_code == 200
            assert (await client.post("/v1/chat/completions", json=chat("fail"))).status_code == 500
        counts = await asyncio.to_thread(counted, running.url)
    assert counts["ttft", True] == 2
    assert counts["ttft", False] == 1
    assert counts["e2e", False] == counts["all", False] == 3  # nobody answers in a microsecond


async def test_a_router_without_objectives_counts_none():
    async with routed(answers) as (running, _):
        httpx_answer = await asyncio.to_thread(httpx.post, f"{running.url}/v1/chat/completions", json=chat())
        assert httpx_answer.status_code == 200
        assert await asyncio.to_thread(counted, running.url) == {}

"""Why a request went where it did, as a router remembers it and `maitred why --url` tells it."""

from __future__ import annotations

import httpx

from maitred.fleet.actions import MAX_REQUESTS, Bind, Choices
from maitred.fleet.balance import Choice
from tests.cli.running import maitred_thread
from tests.fleet.routers import chat, client_of, routed
from tests.fleet.test_promises import answers


async def test_each_term_of_a_choice_is_told(capsys):
    async with routed(answers, answers, server={"api_keys": ()}) as (running, fakes), client_of(running) as client:
        asked = await client.post("/v1/chat/completions", json=chat(), headers={"x-request-id": "mine"})
        told = (await client.get("/admin/fleet/choices/chatcmpl-mine")).json()
        assert told["request_id"] == "mine"
        assert [choice["replica"] for choice in told["choices"]] == [asked.headers["x-maitred-replica"]]
        assert len(told["choices"][0]["candidates"]) == len(fakes)
        assert (await client.get("/admin/fleet/choices/another")).status_code == httpx.codes.NOT_FOUND
        assert await maitred_thread("why", "mine", "--url", running.url) == 0
    shown = capsys.readouterr().out
    assert f"attempt 1: sent to {asked.headers['x-maitred-replica']}" in shown
    assert shown.count("->") == 1


def test_only_the_last_requests_are_remembered():
    choices = Choices()
    for number in range(MAX_REQUESTS + 5):
        choices.bound(Bind(f"request-{number:05}", Choice("a"), 1), 0.0)
    choices.bound(Bind("request-00100", Choice("b"), 2, resumes=True), 0.5)
    assert choices.of("request-00004") is None
    assert [(made.replica, made.resumes) for made in choices.of("request-00100").choices] == [("a", False), ("b", True)]

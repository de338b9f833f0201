"""A tier with `escalate_below`: answers with an unlikely token are not sent, and the next tier is asked."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from maitred.core.errors import ConfigError
from maitred.fleet.config import FleetConfig
from tests.fleet.routers import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    a_server,
    asked,
    chat,
    chunk,
    client_of,
    fake_upstream,
    one_of_ours,
    running_router,
    says,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.fleet.routers import FakeUpstream, RunningRouter, Script, Seen

SURE, UNSURE = math.log(0.9), math.log(0.2)


@asynccontextmanager
async def cascade(
    small: Script, large: Script, *, ours: bool = False
) -> AsyncIterator[tuple[RunningRouter, list[FakeUpstream]]]:
    kind = one_of_ours if ours else a_server
    async with fake_upstream(kind(small)) as edge, fake_upstream(kind(large)) as cloud:
        tiers = {"edge": {"replicas": [edge.url], "escalate_below": 0.5}, "cloud": {}}
        with running_router(edge.url, cloud.url, tiers=tiers) as running:
            await running.wait_for("ready", "ready")
            yield running, [edge, cloud]


def answer(text: str, *logprobs: float) -> bytes:
    told = {"content": [{"token": "x", "logprob": each} for each in logprobs]} if logprobs else None
    usage = {"prompt_tokens": 5, "completion_tokens": 2}
    choice = {"index": 0, "message": {"content": text}, "logprobs": told, "finish_reason": "stop"}
    return json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode()


def delta(text: str, logprob: float) -> bytes:
    choice = {"delta": {"content": text}, "logprobs": {"content": [{"token": text, "logprob": logprob}]}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


LARGE = says(whole(answer("large")))


async def said(running: RunningRouter, **fields: Any) -> dict[str, Any]:
    headers = fields.pop("headers", {})
    async with client_of(running) as client:
        response = await client.post("/v1/chat/completions", json=chat(**fields), headers=headers)
    assert response.status_code == 200
    found: dict[str, Any] = response.json()["choices"][0]
    return found


async def test_a_sure_answer_is_sent_without_the_probabilities_that_no_client_asked_for():
    async with cascade(says(whole(answer("small", SURE, SURE))), LARGE) as (running, (edge, cloud)):
        assert await said(running) == {
            "index": 0, "message": {"content": "small"}, "logprobs": None, "finish_reason": "stop"
        }  # fmt: skip
        asked_for = await said(running, logprobs=True)
        assert asked_for["logprobs"]["content"][0]["logprob"] == SURE
        assert not asked(cloud)
        assert [json.loads(seen.body)["logprobs"] for seen in asked(edge)] == [True, True]


async def test_an_answer_with_one_unlikely_token_is_the_next_tiers_which_gets_the_body_as_it_came():
    async with cascade(says(whole(answer("small", SURE, UNSURE, SURE))), LARGE) as (running, (edge, cloud)):
        assert (await said(running))["message"]["content"] == "large"
        assert (len(asked(edge)), [json.loads(seen.body) for seen in asked(cloud)]) == (1, [chat()])
        async with client_of(running) as client:
            assert "maitred_fleet_escalations_total 1.0" in (await client.get("/metrics")).text


async def test_tiers_whose_models_have_their_own_names_escalate_where_the_later_one_is_named():
    async with (
        fake_upstream(a_server(says(whole(answer("small", UNSURE), headers="x-maitred-version: 3\r\n")))) as edge,
        fake_upstream(a_server(LARGE, models=("big",))) as cloud,
    ):
        tiers = {"edge": {"replicas": [edge.url], "escalate_below": 0.5}, "cloud": {"model": "big"}}
        with running_router(edge.url, cloud.url, tiers=tiers) as running:
            await running.wait_for("ready", "ready")
            assert (await said(running))["message"]["content"] == "large"
            assert (await said(running, model="big"))["message"]["content"] == "large"
            assert [json.loads(seen.body)["model"] for seen in asked(cloud)] == ["big", "big"]
            assert len(asked(edge)) == 1
            async with client_of(running) as client:
                pinned = {"x-maitred-privacy": "local"}
                response = await client.post("/v1/chat/completions", json=chat(), headers=pinned)
            assert response.headers["x-maitred-version"] == "3"


async def test_a_pinned_request_gets_the_answer_of_its_tier_however_unsure():
    async with cascade(says(whole(answer("small", UNSURE))), LARGE) as (running, (edge, cloud)):
        assert (await said(running, headers={"x-maitred-privacy": "local"}))["message"]["content"] == "small"
        assert not asked(cloud)
        assert "logprobs" not in json.loads(asked(edge)[0].body)


async def test_while_no_later_tier_is_ready_the_answer_is_sent():
    async with fake_upstream(a_server(says(whole(answer("small", UNSURE))))) as edge:
        tiers = {"edge": {"replicas": [edge.url], "escalate_below": 0.5}, "cloud": {}}
        with running_router(edge.url, "http://127.0.0.1:1", tiers=tiers) as running:
            await running.wait_for("ready", "starting")
            assert (await said(running))["message"]["content"] == "small"


async def test_a_server_that_refuses_to_tell_probabilities_leaves_the_request_to_the_next():
    refuses = says(whole(b'{"error": {"message": "logprobs is not supported"}}', "400 Bad Request"))
    async with cascade(refuses, LARGE) as (running, _):
        assert (await said(running))["message"]["content"] == "large"


@pytest.mark.parametrize("ours", [False, True])
async def test_a_stream_is_held_until_it_is_decided_and_ends_at_the_first_unlikely_token(ours: bool):
    small = says(STREAM_HEAD + chunk(delta("sm", SURE)), chunk(delta("all", UNSURE)), then="wait")
    large = says(STREAM_HEAD + chunk(delta("large", UNSURE)) + chunk(DONE) + LAST_CHUNK)
    async with cascade(small, large, ours=ours) as (running, (edge, _)), client_of(running) as client:
        response = await client.post("/v1/chat/completions", json=chat(stream=True))
        assert "large" in response.text
        assert "sm" not in response.text
        assert response.text.count("[DONE]") == 1
        assert len(asked(edge)) == 1


async def test_a_sure_stream_comes_whole_though_its_first_replica_broke_off():
    begin = STREAM_HEAD + chunk(delta("sm", SURE))
    breaks, whole_one = says(begin, then="reset"), says(begin + chunk(delta("all", SURE)) + chunk(DONE) + LAST_CHUNK)
    answers = iter([breaks, whole_one])

    async def small(seen: Seen, writer: asyncio.StreamWriter) -> None:
        await next(answers)(seen, writer)

    async with cascade(small, LARGE) as (running, _), client_of(running) as client:
        response = await client.post("/v1/chat/completions", json=chat(stream=True))
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert [(event["choices"][0]["delta"]["content"], event["choices"][0]["logprobs"]) for event in events] == [
            ("sm", None), ("all", None)
        ]  # fmt: skip
        assert response.text.endswith("data: [DONE]\n\n")


def refused(status: str, header: str = "x-any: 1") -> Script:
    return says(whole(b'{"error": {"message": "no"}}', status, f"content-type: application/json\r\n{header}\r\n"))


@pytest.mark.parametrize(
    "large",
    [
        refused("400 Bad Request"),  # of a shorter context, say
        refused("404 Not Found"),
        refused("429 Too Many Requests"),
        refused("500 Internal Server Error"),
        refused("503 Service Unavailable", "retry-after: 30"),
        refused("307 Temporary Redirect", "location: /elsewhere"),
        says(whole(b'{"error": {"message": "an error for all that its status says"}}')),
        says(b"", then="reset"),
    ],
    ids=["too long", "unknown", "limited", "faulty", "full", "redirect", "error in 200", "dies"],
)
async def test_where_no_later_tier_answers_the_held_answer_is_sent_and_says_so(large: Script):
    async with (
        cascade(says(whole(answer("small", UNSURE))), large) as (running, (edge, _)),
        client_of(running) as client,
    ):
        response = await client.post("/v1/chat/completions", json=chat())
        assert (response.status_code, response.headers["x-maitred-escalation"]) == (200, "failed")
        choice = response.json()["choices"][0]
        assert (choice["message"]["content"], choice["logprobs"], len(asked(edge))) == ("small", None, 1)
        assert "maitred_fleet_escalations_failed_total 1.0" in (await client.get("/metrics")).text


@pytest.mark.parametrize("large", [refused("400 Bad Request"), refused("503 Service Unavailable", "retry-after: 30")])
async def test_a_dropped_stream_is_asked_for_again_and_sent_unjudged_where_no_later_tier_answers(large: Script):
    small = says(STREAM_HEAD + chunk(delta("sm", SURE)) + chunk(delta("all", UNSURE)) + chunk(DONE) + LAST_CHUNK)
    async with cascade(small, large) as (running, (edge, cloud)), client_of(running) as client:
        response = await client.post("/v1/chat/completions", json=chat(stream=True))
        assert response.headers["x-maitred-escalation"] == "failed"
        assert ("sm" in response.text, "all" in response.text, response.text.count("[DONE]")) == (True, True, 1)
        assert (len(asked(cloud)), ["logprobs" in json.loads(seen.body) for seen in asked(edge)]) == (1, [True, False])


async def test_a_request_whose_time_is_over_while_a_later_tier_computes_gets_the_held_answer():
    async with cascade(says(whole(answer("small", UNSURE))), says(b"", then="wait")) as (running, _):
        assert (await said(running, timeout_ms=300))["message"]["content"] == "small"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"edge": {"escalate_below": 1.5}, "cloud": {}}, "at most 1"),
        ({"edge": {"escalate_below": "low"}, "cloud": {}}, "must be a number"),
        ({"edge": {}, "cloud": {"escalate_below": 0.5}}, "this is the last"),
        ({"edge": {}, "cloud": {"model": ["big"]}}, "must be a name"),
    ],
)
def test_a_probability_that_none_is_and_a_last_tier_are_refused(tiers: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        FleetConfig(tiers=tiers)

"""Adapters behind a router: those loaded since it looked, and whose they are."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from maitred.api.http.fleet_headers import FleetToken
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeTenants
from tests.fleet.fake_upstream import STREAM_HEAD, FakeUpstream, Script, Seen, fake_upstream, whole
from tests.fleet.routers import MODEL, asked, client_of, completion, one_of_ours, running_router

CHAT = "/v1/chat/completions"
TOKEN = FleetToken(b"0123456789abcdef0123456789abcdef")


def body(model: str) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}]}


def with_adapters(adapters: list[str]) -> Script:
    """One of ours that tells by its events that nothing happens, and lists what is in `adapters` when it is asked."""

    async def well(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(completion()))

    other = one_of_ours(well)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/fleet/events":
            writer.write(STREAM_HEAD)
        elif seen.path == "/v1/models":
            cards = [{"id": MODEL, "parent": None}, *({"id": name, "parent": MODEL} for name in adapters)]
            writer.write(whole(json.dumps({"object": "list", "data": cards}).encode()))
        else:
            await other(seen, writer)

    return script


def num_looks(fake: FakeUpstream) -> int:
    return sum(seen.path == "/v1/models" for seen in fake.requests)


async def test_an_adapter_loaded_since_the_last_look_is_found_by_the_first_request_for_it():
    adapters: list[str] = []
    async with fake_upstream(with_adapters(adapters)) as fake:
        with running_router(fake.url, token=TOKEN) as running:
            await running.wait_for("ready")
            async with client_of(running) as client:
                assert (await client.post(CHAT, json=body(MODEL))).status_code == 200
                before = num_looks(fake)
                adapters += ["sql", "chat"]
                told = await asyncio.gather(*(client.post(CHAT, json=body("sql")) for _ in range(5)))
                assert [one.status_code for one in told] == [200] * 5
                assert before < num_looks(fake) <= before + 2, "they shared looks"
                assert (await client.post(CHAT, json=body("chat"))).status_code == 200
                wrong = await client.post(CHAT, json=body("sqm"))
                assert wrong.status_code == 404
                assert wrong.json()["error"]["message"] == (
                    "no replica serves the model 'sqm'; there are: mini, sql, chat"
                )
                assert (await client.get("/v1/models/sql")).json()["parent"] == MODEL


async def test_a_tenants_adapters_are_its_own():
    tenants = FakeTenants(table_of({"sql": {"adapters": ["sql"]}, "all": {"adapters": ["*"]}, "no": {}}))
    async with fake_upstream(with_adapters(["sql", "chat"])) as fake:
        with running_router(fake.url, token=TOKEN, tenants=tenants) as running:
            await running.wait_for("ready")
            async with client_of(running) as client:
                seen = {}
                for key in ("sql", "all", "no"):
                    headers = {"authorization": f"Bearer {key}"}
                    cards = (await client.get("/v1/models", headers=headers)).json()["data"]
                    answers = [await client.post(CHAT, json=body(name), headers=headers) for name in ("sql", "chat")]
                    seen[key] = [card["id"] for card in cards], [answer.status_code for answer in answers]
                assert seen == {
                    "sql": ([MODEL, "sql"], [200, 404]),
                    "all": ([MODEL, "sql", "chat"], [200, 200]),
                    "no": ([MODEL], [404, 404]),
                }
                refused = answers[0].json()["error"]["message"]
                assert refused == "no replica serves the model 'sql'; there are: mini"
    assert [one.headers.get("x-maitred-adapter") for one in asked(fake)] == ["sql", "sql", "chat"]

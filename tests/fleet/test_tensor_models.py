"""Models of tensors behind a router: a request goes where its model is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.fleet.fake_upstream import FakeUpstream, Script, Seen, fake_upstream, whole
from tests.fleet.routers import MODEL, asked, client_of, one_of_ours, running_router


def serving(*names: str, models: list[str] | None = None) -> Script:
    """One of ours with these models of tensors beside the language model; `models` may change meanwhile."""
    served = models if models is not None else [*names]

    async def echo(seen: Seen, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(seen.body or json.dumps(seen.path).encode()))

    other = one_of_ours(echo)

    async def script(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/version":
            told = {"version": "1", "name": "maitred", "models": [MODEL], "tensor_models": served}
            writer.write(whole(json.dumps(told).encode()))
        else:
            await other(seen, writer)

    return script


@asynccontextmanager
async def two(first: Script, second: Script) -> AsyncIterator[tuple[httpx.AsyncClient, list[FakeUpstream]]]:
    async with fake_upstream(first) as one, fake_upstream(second) as other:
        with running_router(one.url, other.url) as running:
            await running.wait_for("ready", "ready")
            async with client_of(running) as client:
                yield client, [one, other]


async def test_what_names_a_model_of_tensors_goes_to_a_replica_that_serves_it():
    paths = ("/v2/models/boxes", "/v2/models/boxes/versions/2/config", "/v1/models/boxes", "/v1/models/boxes/metadata")
    async with two(serving("faces"), serving("boxes")) as (client, (faces, boxes)):
        for path in paths:
            assert (await client.get(path)).json() == path
        for path in ("/v2/models/boxes/infer", "/v1/models/boxes:predict", "/v1/models/boxes/labels/new:predict"):
            assert (await client.post(path, content=b"\x00\x01 no JSON")).content == b"\x00\x01 no JSON"
        assert (await client.post("/v2/models/faces/infer", json={})).status_code == 200
        assert [seen.path for seen in asked(faces)] == ["/v2/models/faces/infer"]
        assert len(asked(boxes)) == len(paths) + 3
        cards = (await client.get("/v1/models")).json()["data"]
        assert [card["id"] for card in cards] == [MODEL], "chats ask none of them"


async def test_a_model_loaded_since_the_last_look_is_found():
    models: list[str] = []
    async with two(serving(), serving(models=models)) as (client, (_, second)):
        models.append("late")
        assert (await client.post("/v2/models/late/infer", json={})).status_code == 200
        assert [seen.path for seen in asked(second)] == ["/v2/models/late/infer"]


async def test_what_belongs_to_one_replica_is_refused_in_the_protocols_own_form():
    async with two(serving("boxes"), serving("boxes")) as (client, (first, second)):
        for path in ("/v2/repository/models/boxes/unload", "/v2/systemsharedmemory/region/mine/register"):
            refused = await client.post(path, json={})
            assert refused.status_code == 404
            assert refused.json() == {"error": f"{path} is not passed on to replicas; ask one at its own address"}
        assert (await client.get("/v1/models/nobody")).json()["error"]["code"] == "model_not_found"
        assert not asked(first) + asked(second)


@pytest.mark.parametrize("path", ["/v2/models/boxes/infer", "/v1/models/boxes:predict"])
async def test_a_replica_that_dies_before_it_answers_costs_nothing(path):
    dead: list[Seen] = []

    async def dies(seen: Seen, writer: asyncio.StreamWriter) -> None:
        dead.append(seen)
        writer.transport.abort()

    well = serving("boxes")

    def until_asked(script: Script) -> Script:
        async def chosen(seen: Seen, writer: asyncio.StreamWriter) -> None:
            is_first = seen.path == path and not dead
            await (dies if is_first else script)(seen, writer)

        return chosen

    async with two(until_asked(well), until_asked(well)) as (client, _):
        assert (await client.post(path, json={"inputs": []})).json() == {"inputs": []}
        assert len(dead) == 1

"""Replicas on a Ray cluster of several nodes, and the Ray Serve application, with real engines."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.fleet.launch import Exited, IsReady, Listens
from tests.fleet.launching import Told
from tests.fleet.test_end_to_end import RealFleet, start_router
from tests.fleet.test_failover import num_resumed, streams_while
from tests.waiting import HANGS_S, until, until_async

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'maitred[ray]'")
pytestmark = pytest.mark.soak

TOKEN = "a-secret-of-the-fleet"
STORE_BYTES = 80 * 2**20
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8, "temperature": 0}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A head on which no replica fits, and nodes that a test adds."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": STORE_BYTES})
    monkeypatch.setenv("RAY_ADDRESS", made.address)
    yield made
    ray.shutdown()
    made.shutdown()


def add_node(cluster: Any, label: str) -> Any:
    """With place for one replica."""
    return cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES, resources={label: 1})


def node_of(pid: int, nodes: list[Any]) -> Any:
    """The node whose raylet is an ancestor of a process."""
    import psutil

    ancestors = {parent.pid for parent in psutil.Process(pid).parents()}
    return next(node for node in nodes if {p[0].process.pid for p in node.all_processes.values()} & ancestors)


async def until_end(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


@asynccontextmanager
async def launching(**fields: Any) -> AsyncIterator[tuple[Any, Told]]:
    from maitred.fleet.ray_backend import RayLauncher

    told = Told()
    launcher = RayLauncher((), token=TOKEN, on_event=told.events.append, write_line=told.lines.append, **fields)
    try:
        yield launcher, told
    finally:
        async with asyncio.timeout(HANGS_S):
            await launcher.close()


async def test_a_lost_node_is_told_and_its_replica_comes_back_on_another(cluster: Any):
    nodes = [add_node(cluster, "one"), add_node(cluster, "two")]
    async with launching(placement="spread", num_shared=2) as (launcher, told):
        launcher.start("a")
        launcher.start("b")
        first = {name: await told.wait_for(Listens, name) for name in "ab"}
        for name in "ab":
            await told.wait_for(IsReady, name)
        lost = node_of(first["a"].pid, nodes)
        assert node_of(first["b"].pid, nodes) is not lost, "they are spread"
        async with httpx.AsyncClient(base_url=first["a"].url, timeout=HANGS_S) as client:
            body = {**CHAT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                pieces = answer.aiter_bytes()
                assert await anext(pieces)  # in mid-stream
                cluster.remove_node(lost, allow_graceful=False)
                with pytest.raises(httpx.TransportError):
                    await asyncio.wait_for(until_end(pieces), HANGS_S)
        ended = await told.wait_for(Exited, "a")
        assert not ended.as_told
        assert ended.again_in_s is not None
        async with httpx.AsyncClient(base_url=first["b"].url, timeout=HANGS_S) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        add_node(cluster, "three")
        again = await told.wait_for(Listens, "a", count=2)
        await told.wait_for(IsReady, "a", count=2)
        assert again.pid != first["a"].pid
        async with httpx.AsyncClient(base_url=again.url, timeout=HANGS_S) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        assert not told.of(Exited, "b")
    assert [event.as_told for event in told.of(Exited, "b")] == [True]


async def test_one_beyond_those_shared_has_a_place_of_its_own_and_gives_it_back(cluster: Any):
    add_node(cluster, "one")
    async with launching(num_shared=0) as (launcher, told):
        launcher.start("a")
        await told.wait_for(Listens, "a")
        launcher.start("b")  # no room
        launcher.stop("a")
        assert (await told.wait_for(Exited, "a")).as_told
        await told.wait_for(Listens, "b")
        launcher.restart("b")
        assert (await told.wait_for(Exited, "b")).again_in_s == 0.0
        await told.wait_for(Listens, "b", count=2)


async def test_a_wrong_flag_is_told_and_not_tried_again(cluster: Any):
    from maitred.fleet.ray_backend import RayLauncher

    add_node(cluster, "one")
    told = Told()
    launcher = RayLauncher(("--bogus",), token=TOKEN, on_event=told.events.append, write_line=told.lines.append)
    launcher.start("a")
    ended = await told.wait_for(Exited, "a")
    assert ended.again_in_s is None
    assert "--bogus" in ended.cause
    await launcher.close()


async def test_no_request_is_lost_with_a_node_before_its_first_byte(cluster: Any, tmp_path: Path):
    nodes = [add_node(cluster, "one"), add_node(cluster, "two")]
    async with launching(placement="spread", num_shared=2) as (launcher, told):
        for name in "ab":
            launcher.start(name)
        listens = {name: await told.wait_for(Listens, name) for name in "ab"}
        for name in "ab":
            await told.wait_for(IsReady, name)
        (tmp_path / "token").write_text(TOKEN)
        urls = [listens[name].url for name in "ab"]
        router = await asyncio.to_thread(start_router, *urls, "--fleet-token-file", str(tmp_path / "token"))
        try:
            async with httpx.AsyncClient(base_url=router.url, timeout=HANGS_S) as client:
                body = {**CHAT, "max_tokens": 800, "ignore_eos": True}
                asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for _ in range(8)]
                while not await are_all_busy(client):
                    pass
                cluster.remove_node(node_of(listens["a"].pid, nodes), allow_graceful=False)
                answers = await asyncio.gather(*asked)
                assert [answer.status_code for answer in answers] == [200] * 8
                assert len({answer.json()["choices"][0]["message"]["content"] for answer in answers}) == 1
        finally:
            router.stop()
        assert not (await told.wait_for(Exited, "a")).as_told


def test_streams_of_a_lost_node_go_on_as_undisturbed_and_its_replica_comes_back(cluster: Any):
    nodes = [add_node(cluster, "one"), add_node(cluster, "two")]
    router = start_router("--replicas", "2", "--launch", "ray", "--placement", "spread")
    try:
        with httpx.Client(base_url=router.url, timeout=HANGS_S) as client:
            fleet = RealFleet([], router, client)
            until(lambda: fleet.states == ["ready"] * 2)
            expected = streams_while(fleet, lambda: None)

            def lose_a_node() -> None:
                busiest = max(fleet.view()["replicas"], key=lambda replica: replica["in_flight"])
                assert busiest["in_flight"]
                cluster.remove_node(node_of(busiest["pid"], nodes), allow_graceful=False)

            assert streams_while(fleet, lose_a_node) == expected
            assert num_resumed(fleet) > 0
            add_node(cluster, "three")
            until(lambda: fleet.states == ["ready"] * 2)
    finally:
        router.stop()


async def are_all_busy(client: httpx.AsyncClient) -> bool:
    """Whether each replica of a router has requests in flight."""
    replicas = (await client.get("/admin/fleet")).json()["replicas"]
    return all(replica["in_flight"] for replica in replicas)


@asynccontextmanager
async def serving(cluster: Any, **args: Any) -> AsyncIterator[httpx.AsyncClient]:
    """The application of Ray Serve behind its proxy."""
    from ray import serve

    from maitred.fleet.ray_backend import app

    ray.init(log_to_driver=False)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        await asyncio.to_thread(serve.run, app(args), name="chat", route_prefix="/")
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=HANGS_S) as client:
            yield client
    finally:
        await asyncio.to_thread(serve.shutdown)


async def test_the_serve_application_answers_chats_and_a_session_stays_where_it_was(cluster: Any):
    for label in ("one", "two", "three"):
        add_node(cluster, label)
    async with serving(cluster, min_replicas=2, max_replicas=2) as client:
        for name in ("ann", "bob", "cid"):
            of_session = {"x-session-id": name}
            before = await num_chats(client, of_session)
            for _ in range(3):
                whole = await client.post("/v1/chat/completions", json=CHAT, headers=of_session)
                assert whole.status_code == 200, whole.text
                assert whole.json()["choices"][0]["message"]["content"]
            async with asyncio.timeout(HANGS_S):  # an answer is counted a moment after it
                while await num_chats(client, of_session) != before + 3:
                    pass
        streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n")
        wrong = await client.post("/v1/chat/completions", json={"messages": []})
        assert wrong.status_code == 400


async def test_the_serve_application_starts_from_zero_and_goes_back(cluster: Any):
    from ray import serve

    add_node(cluster, "one")
    async with serving(cluster, min_replicas=0, max_replicas=1, idle_s=3.0) as client:

        def num_replicas() -> int:
            deployment = serve.status().applications["chat"].deployments["maitred"]
            return sum(deployment.replica_states.values())

        await until_async(lambda: num_replicas() == 0)
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert answer.status_code == 200
        await until_async(lambda: num_replicas() == 0)


async def num_chats(client: httpx.AsyncClient, headers: dict[str, str]) -> int:
    """That the replica of a session has answered."""
    page = (await client.get("/metrics", headers=headers)).text
    found = re.search(r'^maitred_http_requests_total\{route="/v1/chat/completions",status="200"\} (\d+)', page, re.M)
    return int(found[1]) if found else 0

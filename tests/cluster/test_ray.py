"""Replicas on a Ray cluster of several nodes, and the Ray Serve application, with real engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from maitred.cluster.launch import Ended, IsReady, Listens
from tests.cluster.launching import Told
from tests.waiting import HANGS_S, until, until_async

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'maitred[ray]'")
pytestmark = pytest.mark.soak

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


@asynccontextmanager
async def launching(**fields: Any) -> AsyncIterator[tuple[Any, Told]]:
    from maitred.cluster.ray_backend import RayLauncher

    told = Told()
    launcher = RayLauncher((), token="secret", on_event=told.events.append, write_line=told.lines.append, **fields)
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
            with pytest.raises(httpx.TransportError):
                async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_bytes():  # in mid-stream
                        if lost is not None:
                            cluster.remove_node(lost, allow_graceful=False)
                            lost = None
        ended = await told.wait_for(Ended, "a")
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
        assert not told.of(Ended, "b")
    assert [event.as_told for event in told.of(Ended, "b")] == [True]


async def test_one_beyond_those_shared_has_a_place_of_its_own_and_gives_it_back(cluster: Any):
    add_node(cluster, "one")
    async with launching(num_shared=0) as (launcher, told):
        launcher.start("a")
        await told.wait_for(Listens, "a")
        launcher.start("b")  # no room
        launcher.stop("a")
        assert (await told.wait_for(Ended, "a")).as_told
        await told.wait_for(Listens, "b")
        launcher.restart("b")
        assert (await told.wait_for(Ended, "b")).again_in_s == 0.0
        await told.wait_for(Listens, "b", count=2)


async def test_a_wrong_flag_is_told_and_not_tried_again(cluster: Any):
    from maitred.cluster.ray_backend import RayLauncher

    add_node(cluster, "one")
    told = Told()
    launcher = RayLauncher(("--bogus",), token="secret", on_event=told.events.append, write_line=told.lines.append)
    launcher.start("a")
    ended = await told.wait_for(Ended, "a")
    assert ended.again_in_s is None
    assert "--bogus" in ended.cause
    await launcher.close()


async def test_the_serve_application_answers_chats_whole_and_streamed(cluster: Any):
    from ray import serve

    from maitred.cluster.ray_backend import app

    for label in ("one", "two", "three"):
        add_node(cluster, label)
    ray.init(log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": 0 or 18431})
    try:
        serve.run(app({"min_replicas": 2, "max_replicas": 2, "num_cpus": 1}), name="chat", route_prefix="/")
        async with httpx.AsyncClient(base_url="http://127.0.0.1:18431", timeout=HANGS_S) as client:
            whole = await client.post("/v1/chat/completions", json=CHAT)
            assert whole.status_code == 200, whole.text
            assert whole.json()["choices"][0]["message"]["content"]
            streamed = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
            assert streamed.text.endswith("data: [DONE]\n\n")
            pids = set()
            for _ in range(6):
                answer = await client.get("/v1/models", headers={"x-session-id": "one"})
                assert answer.status_code == 200
                pids.add(answer.headers.get("x-serve-replica"))
    finally:
        serve.shutdown()

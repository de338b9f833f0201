"""The live view over HTTP: who may watch, how often the engine is asked, and how it ends."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from maitred.api.ops.live_feed import (
    COST_FACTOR,
    FRAME_S,
    GROWTH,
    IDLE_S,
    MAX_PAUSE_S,
    MAX_TENANTS,
    MAX_WATCHERS,
    NUM_SLICES,
    SLICE_S,
    Latencies,
    LiveFeed,
    RecentTimes,
    SlotRows,
    pause_s,
)
from maitred.core.clock import ManualClock
from maitred.core.errors import EngineDead, Overloaded
from maitred.core.replica import ReplicaState
from maitred.core.step import RequestTiming
from maitred.engine.intake import Footprint
from maitred.engine.live_view import LiveView, live_view
from tests.api.test_tenants import table_of
from tests.fakes import make_request, make_scheduler
from tests.fakes_api import FakeReplica, FakeTenants, RunningServer, make_model, running_server
from tests.page.worlds import FOREVER, serving
from tests.waiting import HANGS_S, joined, until, until_async


@pytest.fixture
def kitchen() -> Iterator[RunningServer]:
    with serving(FOREVER, repeats=True) as server:
        yield server


def frames(response: httpx.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def watch(server: RunningServer, key: str | None = None) -> Any:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.stream("GET", f"{server.url}/admin/live", headers=headers, timeout=HANGS_S)


def test_frames_tell_what_the_engine_does_and_where_each_request_sits(kitchen):
    with watch(kitchen) as response:
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        stream = frames(response)
        first = next(stream)
        assert (first["sequence"], first["model"], first["seats"], first["engine"]["running"]) == (1, "tiny", [], [])
        body = {"model": "tiny", "prompt": "soup", "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{kitchen.url}/v1/completions", json=body, timeout=HANGS_S):
            frame = next(frame for frame in stream if frame["engine"]["running"])
            assert (frame["seats"], frame["engine"]["running"][0]["num_prompt_tokens"]) == ([0], 4)
            later = next(frame for frame in stream if frame["engine"]["running"][0]["num_output_tokens"] > 5)
            assert later["sequence"] > frame["sequence"]
            assert later["tokens_by_tenant"][""] > 0
        empty = next(frame for frame in stream if not frame["engine"]["running"])
        assert empty["engine"]["blocks"]["num_used"] == 0


def test_late_watchers_have_percentiles_and_those_who_leave_cancelled_nothing(kitchen):
    body = {"model": "tiny", "prompt": "soup", "max_tokens": 4}
    httpx.post(f"{kitchen.url}/v1/completions", json=body)
    with watch(kitchen) as response:
        frame = next(frames(response))
    assert frame["first_token"]["count"] == frame["queue"]["count"] == 1
    assert frame["between_tokens"]["count"] == 3
    assert frame["first_token"]["p50"] >= frame["queue"]["p50"] > 0
    metrics = kitchen.server.app.observer.metrics
    with watch(kitchen) as response:
        next(frames(response))
    until(lambda: metrics._answered.get(("/admin/live", "200")))
    assert metrics.num_cancelled == 0
    assert ("/admin/live", "499") not in metrics._answered


def test_only_administrators_watch():
    tenants = FakeTenants(table_of({"guest": {}, "boss": {}}))
    with serving("Hello.", tenants=tenants) as server:
        for path in ("/admin/live", "/admin/models"):
            assert httpx.get(server.url + path).status_code == 401
            refused = httpx.get(server.url + path, headers={"authorization": "Bearer guest"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        with watch(server, "boss") as response:
            assert next(frames(response))["sequence"] == 1


def test_who_lost_the_right_to_watch_sees_no_more(monkeypatch):
    monkeypatch.setattr("maitred.api.ops.live.RECHECK_S", -1.0)  # after each frame
    tenants = FakeTenants(table_of({"boss": {}}))
    with serving("Hello.", tenants=tenants) as server, watch(server, "boss") as response:
        stream = frames(response)
        assert next(stream)["sequence"] == 1
        tenants.table = table_of({"guest": {}})
        last = list(stream)[-1]
        assert last["error"]["code"] == "invalid_api_key"


def test_a_server_that_goes_ends_the_watch_at_once():
    with serving("Hello.") as server:
        ended = threading.Event()

        def look() -> None:
            with watch(server) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        ended.set()

        thread = threading.Thread(target=look)
        thread.start()
        until(lambda: server.server.app.in_flight.num_watched == 1)
        server.server.should_exit = True
        joined(thread)
        assert ended.is_set()


def test_the_table_of_models_has_what_is_known():
    held = Footprint(
        architecture="LlamaForCausalLM", num_parameters=4_000_000, executor="torch", device="cpu", dtype="float32",
        kv_dtype="float32", weights_bytes=16_000_000, kv_bytes=64_000_000,
    )  # fmt: skip
    with running_server(FakeReplica(), make_model(footprint=held)) as server:
        (row,) = httpx.get(f"{server.url}/admin/models").json()["models"]
    assert (row["id"], row["aliases"], row["since"], row["max_model_len"]) == (
        "tiny", ["tiny-alias"], 1_700_000_000, 512,
    )  # fmt: skip
    assert (row["dtype"], row["weights_bytes"], row["kv_bytes"]) == ("float32", 16_000_000, 64_000_000)
    with running_server(FakeReplica(), make_model()) as server:
        (row,) = httpx.get(f"{server.url}/admin/models").json()["models"]
    assert row["dtype"] is None


# ---- the feed itself


class Looked:
    """A replica that counts how often it is looked at, and can be made slow or dead."""

    def __init__(self) -> None:
        self.looks = 0
        self.error: Exception | None = None
        self.answers = asyncio.Event()  # not set while the engine is silent
        self.answers.set()
        self.ill: str | None = None
        self.scheduler = make_scheduler()

    async def live_view(self) -> LiveView:
        self.looks += 1
        if self.error is not None:
            raise self.error
        await self.answers.wait()
        return live_view(self.scheduler, float(self.looks))

    def state(self) -> ReplicaState:
        return ReplicaState(alive=self.ill is None, error=self.ill)


def make_feed(replica: Looked, is_over: Any = lambda: False) -> LiveFeed:
    return LiveFeed(replica, Latencies(), "tiny", is_over=is_over)


def view_with(cost_s: float, *, busy: bool) -> LiveView:
    scheduler = make_scheduler()
    if busy:
        scheduler.add(make_request(), 0.0)
    return msgspec.structs.replace(live_view(scheduler, 0.0), cost_s=cost_s)


def test_the_engine_is_asked_so_seldom_that_it_costs_half_a_percent_at_most():
    assert (pause_s(view_with(0.0, busy=True)), pause_s(view_with(0.0, busy=False))) == (FRAME_S, IDLE_S)
    assert pause_s(view_with(0.005, busy=True)) == 0.005 * COST_FACTOR == 1.0
    assert pause_s(view_with(0.125, busy=True)) == MAX_PAUSE_S


async def test_watchers_share_one_look_and_a_slow_one_gets_the_newest_frame(monkeypatch):
    monkeypatch.setattr("maitred.api.ops.live_feed.IDLE_S", 1e6)
    replica = Looked()
    feed = make_feed(replica)
    watching = [feed.frames() for _ in range(5)]
    events = [await anext(frames) for frames in watching]
    assert (len(set(events)), replica.looks, feed.num_watchers) == (1, 1, 5)
    for frames_ in watching:
        await frames_.aclose()
    assert feed.num_watchers == 0
    monkeypatch.setattr("maitred.api.ops.live_feed.IDLE_S", 0.001)
    replica = Looked()
    feed = make_feed(replica)
    slow = feed.frames()
    await anext(slow)
    await until_async(lambda: replica.looks > 20)
    newest = json.loads((await anext(slow)).removeprefix(b"data: "))
    assert newest["sequence"] > 15
    await slow.aclose()


async def test_nobody_looks_when_nobody_watches_and_looking_begins_anew(monkeypatch):
    monkeypatch.setattr("maitred.api.ops.live_feed.IDLE_S", 0.001)
    replica = Looked()
    feed = make_feed(replica)
    for _ in range(3):
        watching = feed.frames()
        assert json.loads((await anext(watching)).removeprefix(b"data: "))["sequence"] == 1
        await watching.aclose()
    looks = replica.looks
    for _ in range(50):
        await asyncio.sleep(0)
    assert replica.looks == looks


async def test_there_are_only_so_many_watchers():
    feed = make_feed(Looked())
    watching = [feed.frames() for _ in range(MAX_WATCHERS)]
    for frames_ in watching:
        await anext(frames_)
    with pytest.raises(Overloaded, match="32 are watching"):
        await anext(feed.frames())
    await watching[0].aclose()
    again = feed.frames()
    await anext(again)
    for frames_ in [*watching[1:], again]:
        await frames_.aclose()


async def test_every_watcher_hears_of_the_engines_death():
    replica = Looked()
    replica.error = EngineDead("the engine stopped: out of memory")
    feed = make_feed(replica)
    for _ in range(2):
        with pytest.raises(EngineDead, match="out of memory"):
            await anext(feed.frames())
    replica.error = None
    watching = feed.frames()
    await anext(watching)
    await watching.aclose()


async def test_a_silent_engine_ends_the_watch_once_it_counts_as_ill(monkeypatch):
    monkeypatch.setattr("maitred.api.ops.live_feed.IDLE_S", 0.001)
    replica = Looked()
    watching = make_feed(replica).frames()
    await anext(watching)
    replica.answers.clear()
    asyncio.get_running_loop().call_later(0.02, setattr, replica, "ill", "silent for 3 s")
    with pytest.raises(EngineDead, match="silent for 3 s"):
        [_ async for _ in watching]


@pytest.mark.parametrize("scale", [0.003, 0.05, 3.0, 40.0])
def test_percentiles_are_right_to_the_width_of_a_bucket(scale: float):
    times, draw = RecentTimes(ManualClock(1000.0).now), random.Random(3)
    values = sorted(draw.lognormvariate(0, 1) * scale for _ in range(5000))
    for value in values:
        times.observe(value)
    found = times.percentiles()
    assert found.count == 5000
    for share, at in ((0.5, found.p50), (0.9, found.p90), (0.99, found.p99)):
        assert at == pytest.approx(values[round(share * 5000) - 1], rel=GROWTH - 1)


def test_what_is_older_than_a_minute_is_forgotten():
    clock = ManualClock(17.0)
    times = RecentTimes(clock.now)
    times.observe(5.0)
    clock.advance(30.0)
    times.observe(0.5, times=3)
    assert times.percentiles().count == 4
    clock.advance(NUM_SLICES * SLICE_S - 30.0)
    assert times.percentiles().count == 3
    clock.advance(10_000.0)
    assert times.percentiles().count == 0
    assert times.percentiles().p50 is None
    times.observe(1.0)
    assert times.percentiles().count == 1


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9])
def test_values_beyond_the_buckets_count_in_the_last_ones(value: float):
    times = RecentTimes(ManualClock().now)
    times.observe(value)
    assert times.percentiles().count == 1


def test_an_answer_counts_once_and_tokens_by_tenant_for_so_many_only():
    latencies = Latencies(ManualClock().now)
    latencies.answer_ended(RequestTiming(queue_s=1.0, prefill_s=2.0, decode_s=4.0, ttft_s=3.0))
    assert latencies.first_token.percentiles().p50 == pytest.approx(3.0, rel=0.06)
    assert latencies.queue.percentiles().p50 == pytest.approx(1.0, rel=0.06)
    assert latencies.between_tokens.percentiles().count == 0
    latencies = Latencies(ManualClock().now)
    for i in range(2 * MAX_TENANTS):
        latencies.tokens_came(f"t{i}", 1)
    latencies.tokens_came("t0", 5)
    assert (len(latencies.tokens_by_tenant), latencies.tokens_by_tenant["t0"]) == (MAX_TENANTS, 6)


def test_a_request_keeps_its_row_and_rows_are_never_shared():
    plan = SlotRows()
    assert (plan.rows_of(["a", "b", "c"]), plan.rows_of(["c", "a"])) == ([0, 1, 2], [2, 0])
    assert (plan.rows_of(["d", "c", "a", "e"]), plan.rows_of([])) == ([1, 2, 0, 3], [])
    assert plan.rows_of(["a"]) == [0]
    plan, draw = SlotRows(), random.Random(1)
    for _ in range(500):
        running = draw.sample([f"r{i}" for i in range(40)], draw.randint(0, 12))
        rows = plan.rows_of(running)
        assert len(set(rows)) == len(rows)
        assert all(row < 12 for row in rows)

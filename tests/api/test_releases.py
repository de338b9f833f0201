"""Which version answers: newcomers get the current one, and no client sees what is wrong with the next one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.api import releases
from maitred.api.http.app import App
from maitred.api.http.auth import Authenticator
from maitred.api.ops.observer import Observer
from maitred.api.releases import Releases
from maitred.api.routes import make_routes
from maitred.config import AdmissionConfig, SchedulerConfig, ServerConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, MaitredError, OutOfMemory
from maitred.core.replica import ReplicaState, WorkerView
from maitred.engine.memory import MemoryPlan
from maitred.engine.starting import Engine
from maitred.gate.admission import admission_of
from maitred.model.shelf import ModelRelease, Shelf
from tests.fakes_api import FakeReplica, make_model, says
from tests.waiting import until_async

PLAN = MemoryPlan(
    available_bytes=0, weights_bytes=0, bytes_per_block=1, block_size=16, num_blocks=32, max_model_len=512,
    model_context=512, longest_context=512,
)  # fmt: skip


@dataclass
class Waiter(FakeReplica):
    """Ends when it is put to sleep, once nothing is asked of it."""

    is_gone: bool = False
    loads: bool = False  # as the second of two engines may, when the first is there
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def state(self) -> ReplicaState:
        return replace(super().state(), num_generated_tokens=100)

    def workers(self) -> tuple[WorkerView, ...]:
        return (WorkerView.of(0, None, replace(self.state(), alive=not self.loads)),)

    async def sleep(self, *, abort: bool = False) -> None:
        await until_async(lambda: not self.live)

    async def close(self) -> None:
        self.is_gone = True

    async def scheduler_config(self) -> SchedulerConfig:
        return self.scheduler

    async def configure(self, config: SchedulerConfig) -> None:
        self.scheduler = config


@dataclass
class Next:
    """A version on its way: it loads, is looked at, or one of both raises."""

    engine: Engine
    cannot_load: MaitredError | None = None
    is_wrong: MaitredError | None = None

    def wait(self) -> Engine:
        if self.cannot_load is not None:
            raise self.cannot_load
        return self.engine

    async def checked(self, engine: Engine) -> None:
        if self.is_wrong is not None:
            raise self.is_wrong

    def give_up(self) -> None:
        """It waits for nothing."""


class FakeShelf(Shelf):
    """All versions are as they were published, but one."""

    damaged: int | None = None
    now = (1, 0)

    def current(self) -> tuple[int, int]:
        return self.now

    def use(self, version: int) -> None:
        self.now = (version, self.now[1] + 1)

    def verify(self, version: int) -> ModelRelease:
        if version == self.damaged:
            raise CheckpointError(f"version {version} is not as it was published")
        return ModelRelease(version, "tiny", 0, "", ())


@dataclass
class House:
    shelf: FakeShelf
    client: httpx.AsyncClient
    first: Waiter
    nexts: dict[int, Next]
    app: App
    following: Releases
    halves: dict[int, int | None]

    async def ask(self, text: str = "?") -> tuple[str, str]:
        """What a completion says, and its version."""
        body = {"model": "tiny", "prompt": text, "max_tokens": 20}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"], answer.headers["x-maitred-version"]

    async def told(self) -> dict[str, Any]:
        return (await self.client.get("/admin/releases")).json()

    def add(self, number: int, **fields: Any) -> Waiter:
        replica = Waiter(says(f"I am {number}"))
        model = replace(make_model(), version=number, **fields.pop("model", {}))
        engine = Engine(replica, model, fields.pop("plan", PLAN), admission_of(AdmissionConfig(), SchedulerConfig()))
        self.nexts[number] = Next(engine, **fields)
        return replica


@asynccontextmanager
async def house(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    """A server that follows a shelf, on this loop; version 1 is in service."""
    monkeypatch.setattr(releases, "LOOK_S", 0.002)
    config, clock = ServerConfig(), WallClock()
    app = App(config, clock=clock, observer=Observer(config, clock), authenticator=Authenticator(()))
    shelf, nexts, first = FakeShelf(Path("shelf")), {}, Waiter(says("I am 1"))
    halves: dict[int, int | None] = {}

    def begin(release: ModelRelease, beside: object, half: int | None) -> Next:
        halves[release.version] = half
        return nexts[release.version]

    following = Releases(shelf, (1, 0), begin)  # type: ignore[arg-type]
    front = following.front(app, make_routes(following.routes))
    app.open(first, make_model(), admission_of(AdmissionConfig(), SchedulerConfig()))
    following.follow()
    transport = httpx.ASGITransport(app=front)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        yield House(shelf, client, first, nexts, app, following, halves)
    app.in_flight.drain(0.0)
    app.close()


async def test_a_request_keeps_its_version_and_newcomers_get_the_next_one(monkeypatch: pytest.MonkeyPatch):
    async with house(monkeypatch) as here:
        second = here.add(2, model={"max_model_len": 64})
        second.loads = True
        here.first.held, here.first.scheduler = True, SchedulerConfig(policy="sjf")
        before = asyncio.create_task(here.ask())
        await until_async(lambda: here.first.live)
        here.shelf.use(2)
        while (await here.told())["starting"] != 2:  # noqa: ASYNC110  the page's own words
            await asyncio.sleep(0.002)
        assert (await here.told())["serving"] == 1
        second.loads = False
        await until_async(lambda: here.following.versions[-1].number != 1)
        assert second.scheduler.policy == "sjf"
        assert await here.ask() == ("I am 2", "2")
        assert (await here.told())["num_requests"] == [[1, 1], [2, 0]]
        assert not here.first.is_gone
        assert "maitred_generation_tokens_total 200.0" in (await here.client.get("/metrics")).text
        too_long = await here.client.post("/v1/completions", json={"prompt": "x" * 100})
        assert (too_long.status_code, too_long.headers["x-maitred-version"]) == (400, "2")
        here.first.held = False
        assert await before == ("I am 1", "1")
        await until_async(lambda: here.first.is_gone)
        page = (await here.client.get("/metrics")).text
        assert "maitred_generation_tokens_total 200.0" in page  # what the first one made is not forgotten
        assert "maitred_release_version 2.0" in page
        assert 'maitred_release_changes_total{outcome="served"} 1.0' in page


async def test_a_router_hears_the_end_of_its_events_and_comes_again_to_the_next_version(
    monkeypatch: pytest.MonkeyPatch,
):
    async with house(monkeypatch) as here:
        here.add(2, model={"revision": "other"})
        listening = asyncio.create_task(here.client.get("/fleet/events"))
        await until_async(lambda: here.app.fleet.is_on)
        here.shelf.use(2)
        told = (await listening).text  # its end comes, though the server goes on
        assert "began" in told.partition("\n")[0].lower()
        assert await here.ask() == ("I am 2", "2")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"cannot_load": OutOfMemory("the weights need 2 GiB and 1 GiB are available")}, "the weights need"),
        ({"is_wrong": CheckpointError("version 2 gives other tokens")}, "gives other tokens"),
        ({"plan": PLAN}, "memory holds 256 tokens of context, and that version has 512"),
    ],
)
async def test_a_version_that_is_not_fit_is_told_and_the_old_one_serves_on(
    fields: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with house(monkeypatch) as here:
        if "plan" in fields:
            fields = {"plan": replace(PLAN, max_model_len=256)}
        loaded = here.add(2, **fields)
        here.shelf.use(2)
        await until_async(lambda: here.following.why_refused is not None)
        told = await here.told()
        assert words in told["refused"]
        assert words in caplog.text
        assert (told["serving"], told["starting"]) == (1, None)
        assert loaded.is_gone or here.nexts[2].cannot_load is not None
        assert await here.ask() == ("I am 1", "1")
        assert 'maitred_release_changes_total{outcome="refused"} 1.0' in (await here.client.get("/metrics")).text
        here.add(3)
        here.shelf.use(3)
        await until_async(lambda: here.following.versions[-1].number != 1)
        assert await here.ask() == ("I am 3", "3")


async def test_versions_that_are_both_odd_get_two_halves_of_the_kv_tiers_and_a_third_in_flight_none(
    monkeypatch: pytest.MonkeyPatch,
):
    async with house(monkeypatch) as here:
        there = here.add(3)
        here.first.held = there.held = True
        for version in (5, 7):
            here.add(version)
        long = [asyncio.create_task(here.ask())]
        await until_async(lambda: here.first.live)
        here.shelf.use(3)
        await until_async(lambda: here.following.versions[-1].number == 3)
        long.append(asyncio.create_task(here.ask()))
        await until_async(lambda: there.live)
        here.shelf.use(5)
        await until_async(lambda: here.following.versions[-1].number == 5)
        assert here.halves == {3: 1, 5: None}
        here.first.held = there.held = False
        await asyncio.gather(*long)
        await until_async(lambda: len(here.following.versions) == 1)
        here.shelf.use(7)
        await until_async(lambda: here.following.versions[-1].number == 7)
        assert here.halves[7] == 0


async def test_a_version_that_is_no_longer_current_once_it_has_loaded_is_let_go(monkeypatch: pytest.MonkeyPatch):
    async with house(monkeypatch) as here:
        second = here.add(2)
        next_one = here.nexts[2]

        async def checked(engine: Engine) -> None:
            here.shelf.use(1)

        next_one.checked = checked  # type: ignore[method-assign]
        here.shelf.use(2)
        await until_async(lambda: second.is_gone)
        assert await here.ask() == ("I am 1", "1")

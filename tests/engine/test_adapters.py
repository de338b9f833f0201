"""Adapters of an engine: what is in memory, who waits for it, and what a restart keeps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, ConfigError
from maitred.core.request import FinishReason, RequestSpec, SamplingParams, Terms
from maitred.engine.adapter_book import AdapterBook, adapters_at_work
from maitred.engine.adapters import AdapterCache
from maitred.engine.frames import KnowAdapters
from maitred.engine.intake import make_requests
from maitred.engine.live_requests import LiveRequest
from maitred.engine.loop import HeldRequests
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.queries import AdapterFolder
from maitred.scheduler.engine_core import EngineCore
from tests.engine.worlds import BLOCK_SIZE, Wake, client_of, scripted_executor, served_model
from tests.fakes import make_samples, make_scheduler

SIZE = 10


class FakeStore:
    """An executor's adapters, by name; their bytes are as many as the file says."""

    def __init__(self) -> None:
        self.resident: dict[str, Any] = {}
        self.most_bytes = 0

    def num_bytes(self, adapter: Any) -> int:
        return int(adapter.num_bytes)

    def pack(self, adapter: Any) -> Any:
        return adapter

    def load(self, name: str, adapter: Any) -> None:
        assert name not in self.resident
        self.resident[name] = adapter
        self.most_bytes = max(self.most_bytes, sum(one.num_bytes for one in self.resident.values()))

    def unload(self, name: str) -> None:
        del self.resident[name]


def write(folder: Path, content: str = "one", num_bytes: int = SIZE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter").write_text(f"{num_bytes} {content}")
    return folder


def read(folder: Path, inside: Path | None) -> Any:
    try:
        text = (folder / "adapter").read_text()
    except OSError as error:
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    return SimpleNamespace(num_bytes=int(text.split()[0]), rank=1, digest=sha256(text.encode()).hexdigest())


class Calling:
    """In place of a core: what is to be called soon is heard of."""

    def __init__(self, hear: Callable[[], None]) -> None:
        self._hear = hear

    def call_soon(self, action: Callable[[], object]) -> None:
        self._hear()

    def follow(self, listener: object, follows: bool) -> None: ...


class World:
    """A cache that holds so many adapters; `settle` returns when the thread has read something."""

    def __init__(self, room: int, read: Callable[[Path, Path | None], Any] = read) -> None:
        self.store = FakeStore()
        self.cache = AdapterCache(self.store, read, room * SIZE)
        self._something = threading.Event()
        self.cache.begin(Calling(self._something.set))  # type: ignore[arg-type]
        self.told: dict[str, str] = {}

    def know(self, folder: Path, name: str) -> AdapterFacts:
        facts = self.cache.introduce(name, str(write(folder / name, name)))
        self.cache.know([facts])
        return facts

    def acquire(self, request_id: str, facts: AdapterFacts, place: int = 0) -> None:
        def done(error: str) -> None:
            self.told[request_id] = error

        self.cache.acquire(request_id, facts.key, done, lambda: (place,))

    def wait_for(self, request_id: str) -> str:
        while request_id not in self.told:
            assert self._something.wait(10)
            self._something.clear()
            self.cache.settle()
        return self.told[request_id]


def test_of_a_thousand_adapters_fifty_are_in_memory_and_never_more(tmp_path: Path):
    world, random = World(50), Random(1)
    every = [world.know(tmp_path, f"a{number}") for number in range(1000)]
    for number in range(400):
        world.acquire(f"r{number}", random.choice(every))
        assert world.wait_for(f"r{number}") == ""
        if number >= 20:  # so many run at once
            world.cache.release(f"r{number - 20}")
    assert world.store.most_bytes == 50 * SIZE
    assert world.cache.num_loads == world.cache.num_evictions + 50


def test_the_one_unused_for_longest_makes_room_and_none_in_use_does(tmp_path: Path):
    world = World(2)
    a, b, c = (world.know(tmp_path, name) for name in "abc")
    for request_id, facts in (("r1", a), ("r2", b)):
        world.acquire(request_id, facts)
        assert world.wait_for(request_id) == ""
    world.cache.release("r2")
    world.acquire("r3", c)
    assert world.wait_for("r3") == ""
    assert set(world.store.resident) == {a.key, c.key}
    world.acquire("r4", b)
    world.acquire("r5", a)  # is there, but waits its turn
    assert "r4" not in world.told
    assert "r5" not in world.told
    world.cache.release("r3")
    world.cache.settle()
    assert world.wait_for("r4") == ""
    assert world.told["r5"] == ""
    assert set(world.store.resident) == {a.key, b.key}


def test_room_goes_to_who_comes_first_by_the_policy_and_past_nobody(tmp_path: Path):
    world = World(1)
    a, b, c = (world.know(tmp_path, name) for name in "abc")
    world.acquire("r1", a)
    assert world.wait_for("r1") == ""
    for request_id, facts, place in (("late", b, 3), ("early", c, 1), ("same", a, 2)):
        world.acquire(request_id, facts, place)
    world.acquire("first", a, 0)  # before all who wait, and needs no room
    assert world.told == {"r1": "", "first": ""}
    world.cache.release("r1")
    world.cache.release("first")
    world.cache.settle()
    ended: list[str] = []
    for request_id in ("early", "same", "late"):
        assert world.wait_for(request_id) == ""
        ended.append(request_id)
        assert list(world.told) == ["r1", "first", *ended]
        world.cache.release(request_id)
        world.cache.settle()


def test_who_is_first_and_gives_up_lets_the_next_one_in(tmp_path: Path):
    world = World(1)
    a, b = world.know(tmp_path, "a"), world.know(tmp_path, "b")
    world.acquire("r1", a)
    assert world.wait_for("r1") == ""
    world.acquire("first", b, 1)
    world.acquire("next", a, 2)
    world.cache.release("first")
    world.cache.settle()
    assert world.told == {"r1": "", "first": "", "next": ""}, "and samples of the first one's prompt wait no more"


def test_samples_of_a_prompt_are_held_until_the_last_has_its_adapter_or_gave_up(tmp_path: Path):
    world = World(1)
    a, b = world.know(tmp_path, "a"), world.know(tmp_path, "b")
    world.acquire("r1", a)
    assert world.wait_for("r1") == ""
    held, samples = HeldRequests(lambda: None), [sample.spec for sample in make_samples("p", 3, prompt=4)]
    held.hold(samples, [partial(world.cache.acquire, sample.request_id, b.key) for sample in samples])
    held.drop("p-1")
    world.cache.release("p-1")
    assert list(held.ready()) == []
    world.cache.release("r1")
    while not (ready := list(held.ready())):
        world.cache.settle()
    assert [each.spec.request_id for each in ready] == ["p-0", "p-2"]


def test_files_that_went_or_changed_end_only_who_needs_them_again(tmp_path: Path):
    world = World(2)
    gone, changed, here = (world.know(tmp_path, name) for name in ("gone", "changed", "here"))
    (tmp_path / "gone" / "adapter").unlink()
    write(tmp_path / "changed", "other")
    for request_id, facts in (("r1", gone), ("r2", changed), ("r3", here)):
        world.acquire(request_id, facts)
    assert "adapter gone: " in world.wait_for("r1")
    assert "have changed since it was loaded" in world.wait_for("r2")
    assert world.wait_for("r3") == ""
    assert set(world.store.resident) == {here.key}
    for request_id in ("r1", "r2"):
        world.cache.release(request_id)
    assert world.cache.num_bytes == SIZE


def test_one_deleted_while_it_is_in_use_stays_until_it_makes_room(tmp_path: Path):
    world = World(1)
    facts = world.know(tmp_path, "a")
    world.acquire("r1", facts)
    assert world.wait_for("r1") == ""
    (tmp_path / "a" / "adapter").unlink()
    world.acquire("r2", facts)
    assert world.told["r2"] == ""


def test_one_that_is_forgotten_goes_with_its_last_request(tmp_path: Path):
    world = World(2)
    facts = world.know(tmp_path, "a")
    world.acquire("r1", facts)
    assert world.wait_for("r1") == ""
    world.cache.forget(facts.key)
    assert world.store.resident
    world.acquire("r2", facts)
    assert world.told["r2"] == "adapter a is not loaded any more"
    world.cache.release("r1")
    assert not world.store.resident
    assert not world.cache.num_bytes


def test_one_that_never_fits_is_refused(tmp_path: Path):
    world = World(1)
    with pytest.raises(ConfigError, match="--lora-memory-bytes"):
        world.cache.introduce("large", str(write(tmp_path / "large", num_bytes=11)))


def test_who_gave_up_while_it_was_read_holds_nothing(tmp_path: Path):
    may_read, reading = threading.Event(), threading.Event()

    def slowly(folder: Path, inside: Path | None) -> Any:
        reading.set()
        assert may_read.wait(10)
        return read(folder, inside)

    world = World(1, slowly)
    may_read.set()
    a, b = world.know(tmp_path, "a"), world.know(tmp_path, "b")
    may_read.clear()
    reading.clear()
    world.acquire("r1", a)
    assert reading.wait(10)
    world.cache.release("r1")
    world.acquire("r2", b)
    may_read.set()
    assert world.wait_for("r2") == ""
    assert set(world.store.resident) == {b.key}


# ---- behind the engine's loop


def engine(adapters: AdapterCache, **process: Any) -> Any:
    model = served_model()
    num_prompt_tokens = len(model.tokenizer.encode("Hello there"))
    core = EngineCore(
        make_scheduler(num_blocks=256, block_size=BLOCK_SIZE),
        scripted_executor(model, "Hello to you", num_prompt_tokens),
        WallClock(),
        adapters,
        wake=Wake(),
    )
    return client_of(core, adapters=adapters, **process)


def request(request_id: str, facts: AdapterFacts | None) -> RequestSpec:
    sampling = SamplingParams(max_tokens=2)
    now = WallClock().now()
    [spec] = make_requests(served_model(), "Hello there", sampling, request_id=request_id, now=now, adapter=facts)
    return spec


async def ends(client: Any, spec: RequestSpec) -> tuple[FinishReason, str | None]:
    async for progress in client.submit(spec)[0]:
        if progress.finish_reason is not None:
            return progress.finish_reason, progress.error
    raise AssertionError("no end")


async def test_others_run_while_a_request_waits_for_its_adapter(tmp_path: Path):
    may_read = threading.Event()
    may_read.set()

    def slowly(folder: Path, inside: Path | None) -> Any:
        assert may_read.wait(10)
        return read(folder, inside)

    client = engine(AdapterCache(FakeStore(), slowly, SIZE))
    try:
        facts = await client.adapters.load(AdapterFolder("a", str(write(tmp_path / "a")), None))
        may_read.clear()
        waiting = client.submit(request("waits", facts))[0]
        assert await ends(client, request("runs", None)) == (FinishReason.LENGTH, None)
        may_read.set()
        reasons = [progress.finish_reason async for progress in waiting]
        assert reasons[-1] is FinishReason.LENGTH
        assert client.state().adapter_loads == 1
    finally:
        await client.close()


async def test_a_request_whose_adapter_vanished_ends_with_the_reason_and_no_other_does(tmp_path: Path):
    client = engine(AdapterCache(FakeStore(), read, SIZE))
    try:
        facts = await client.adapters.load(AdapterFolder("a", str(write(tmp_path / "a")), None))
        (tmp_path / "a" / "adapter").unlink()
        reason, error = await ends(client, request("r1", facts))
        assert reason is FinishReason.ERROR
        assert "adapter a: " in str(error)
        assert await ends(client, request("r2", None)) == (FinishReason.LENGTH, None)
    finally:
        await client.close()


async def test_a_name_stands_for_other_bytes_for_new_requests_only(tmp_path: Path):
    store = FakeStore()
    client = engine(AdapterCache(store, read, 10 * SIZE))
    book = client.adapters
    try:
        old = await book.load(AdapterFolder("a", str(write(tmp_path / "a1", "old")), None))
        with book.using(old):
            new = await book.load(AdapterFolder("a", str(write(tmp_path / "a2", "new")), None))
            assert book.named["a"] is new
            assert new.key != old.key
            assert await ends(client, request("r1", old)) == (FinishReason.LENGTH, None)
            assert await ends(client, request("r2", new)) == (FinishReason.LENGTH, None)
        reason, error = await ends(client, request("r3", old))
        assert (reason, error) == (FinishReason.ERROR, "adapter a is not loaded any more")
        assert set(store.resident) == {new.key}
        with pytest.raises(CheckpointError):
            await book.load(AdapterFolder("a", str(tmp_path / "nothing"), None))
        assert book.named["a"] is new
    finally:
        await client.close()


async def test_an_unload_waits_for_the_last_request(tmp_path: Path):
    client = engine(AdapterCache(FakeStore(), read, SIZE))
    book = client.adapters
    try:
        facts = await book.load(AdapterFolder("a", str(write(tmp_path / "a")), None))
        with book.using(facts):
            unloading = book.unload("a")
            task = asyncio.ensure_future(unloading)
            assert await ends(client, request("r1", facts)) == (FinishReason.LENGTH, None)
            assert "a" not in book.named
            assert not task.done()
        await task
        with pytest.raises(KeyError):
            await book.unload("a")
    finally:
        await client.close()


async def test_a_new_engine_is_told_of_every_adapter_that_is_named_or_in_use():
    old, new = AdapterFacts("a", "x", "1" * 64, 1, 1), AdapterFacts("a", "x", "2" * 64, 1, 1)
    sent: list[Any] = []

    async def introduce(folder: AdapterFolder) -> AdapterFacts:
        return new

    book = AdapterBook(lambda command: not sent.append(command), introduce)
    book.begin([old])
    with book.using(old):
        await book.load(AdapterFolder("a", "x", None))
        sent.clear()
        book.tell()
        assert sent == [KnowAdapters((old, new))]
    sent.clear()
    book.tell()
    assert sent == [KnowAdapters((new,))]


async def test_who_waits_for_an_adapter_too_long_is_given_up(tmp_path: Path):
    may_read = threading.Event()
    may_read.set()

    def slowly(folder: Path, inside: Path | None) -> Any:
        assert may_read.wait(10)
        return read(folder, inside)

    client = engine(AdapterCache(FakeStore(), slowly, SIZE))
    try:
        facts = await client.adapters.load(AdapterFolder("a", str(write(tmp_path / "a")), None))
        may_read.clear()
        late = msgspec.structs.replace(request("late", facts), terms=Terms(start_by=0.0))
        assert await ends(client, late) == (FinishReason.QUEUE_TIMEOUT, None)
    finally:
        may_read.set()
        await client.close()


def test_adapters_at_work_are_told_by_name():
    facts = [AdapterFacts(name, "x", "1" * 64, 1, 1) for name in ("a", "b", "a")]
    specs = [request(f"r{number}", one) for number, one in enumerate([*facts, None])]
    lives = [LiveRequest(spec, None) for spec in specs]  # type: ignore[arg-type]
    assert adapters_at_work(lives) == ((), ("a", "b"))
    lives[2].charges = lives[2].charges._replace(first_scheduled_at=1.0)
    assert adapters_at_work(lives) == (("a",), ("a", "b"))


def test_blocks_are_shared_by_the_same_bytes_alone():
    model = served_model()
    prompt = list(range(5, 5 + 4 * BLOCK_SIZE))

    def hashes(facts: AdapterFacts | None) -> Any:
        [spec] = make_requests(model, prompt, SamplingParams(), request_id="r", now=0.0, adapter=facts)
        return list(spec.block_hashes)

    one, two = AdapterFacts("a", "x", "1" * 64, 1, 1), AdapterFacts("a", "x", "2" * 64, 1, 1)
    same = AdapterFacts("b", "y", "1" * 64, 1, 1)
    assert hashes(one) == hashes(same)
    assert len({*map(tuple, (hashes(None), hashes(one), hashes(two)))}) == 3

"""Tensors in memory that a server and its engine share: both ends in this process, and over engines that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from maitred.api.tensor.extensions import RegionPlace, SystemRegions, keep
from maitred.core.clock import WallClock
from maitred.core.errors import InvalidRequest, Overloaded
from maitred.core.request import FinishReason
from maitred.core.tensor_request import InferRequest, InferResponse, Tensor
from maitred.engine.client import EngineClient
from maitred.engine.frames import Ended, TensorsTold, decode_report, encode
from maitred.engine.tensor_memory import EngineMemory, ServerMemory
from maitred.tensor.arrays import array_of
from maitred.tensor.served_models import OPENERS, open_onnx
from tests.tensor.models import add_model, write_model
from tests.tensor.test_engine import IN_PROCESS, IN_THREAD, engine, start_of
from tests.tensor.test_local import BATCHED, request
from tests.waiting import until_async

WIDTH = 4096  # numbers of a row: 16 KiB


def row(value):
    return np.full((1, WIDTH), value, np.float32)


def write_add(repository, config=None):
    write_model(repository, "add", config=config, model=add_model(shape=("batch", "length")))


class Crossing(RuleBasedStateMachine):
    """Requests go and are answered, answers are held and let go, engines die; memory is too small for all of them."""

    def __init__(self):
        super().__init__()
        self.server = ServerMemory(128 * 1024)
        self.engine = EngineMemory(self.server.file)
        self.running, self.held, self.number = {}, {}, 0

    @rule(num_bytes=st.integers(0, 40_000))
    def ask(self, num_bytes):
        self.number += 1
        data = bytes([self.number % 251]) * num_bytes
        asked = InferRequest(request_id=str(self.number), model="m", inputs=(Tensor("x", "UINT8", (num_bytes,), data),))
        self.running[self.number] = (asked, self.server.sent(asked))

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0))
    def answer(self, at):
        number = sorted(self.running)[at % len(self.running)]
        asked, sent = self.running.pop(number)
        if (freed := self.server.freed()) is not None:
            self.engine.free(freed.offsets)
        seen = self.engine.opened(sent).inputs
        assert bytes(seen[0].data) == asked.inputs[0].data
        outputs, places = self.engine.written(seen)
        result = InferResponse(model="m", version=1, outputs=outputs)
        told = TensorsTold([Ended(str(number), result, FinishReason.STOP, places=places)])
        (ended,) = decode_report(encode(told)).news
        self.held[number] = self.server.answered(ended).result.outputs[0]
        self.server.end(sent)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0))
    def give_up(self, at):
        """Its answer comes, and has no result."""
        _, sent = self.running.pop(sorted(self.running)[at % len(self.running)])
        self.server.answered(Ended("gone", None, FinishReason.ABORT))
        self.server.end(sent)

    @precondition(lambda self: self.held)
    @rule(at=st.integers(0))
    def let_go(self, at):
        del self.held[sorted(self.held)[at % len(self.held)]]

    @rule()
    def die(self):
        """Outputs of the dead one that nobody was told of are lost with it."""
        self.engine.written((Tensor("x", "UINT8", (9000,), b"\xff" * 9000),))
        self.engine = EngineMemory(self.server.file)
        if (kept := self.server.kept()) is not None:
            self.engine.keep(kept.blocks)

    @invariant()
    def nothing_is_written_over_what_somebody_reads(self):
        for number, output in self.held.items():
            assert bytes(output.data) == bytes([number % 251]) * output.shape[0]
        for asked, sent in self.running.values():
            assert bytes(self.engine.opened(sent).inputs[0].data) == asked.inputs[0].data

    @invariant()
    def blocks_and_holes_are_all_there_is(self):
        self.server._inputs.check_invariants()
        self.engine._outputs.check_invariants()

    def teardown(self):
        for _, sent in self.running.values():
            self.server.end(sent)
        self.held.clear()
        assert self.server.num_used == 0
        if (freed := self.server.freed()) is not None:
            self.engine.free(freed.offsets)
        assert len(self.engine._outputs) == 0


TestCrossing = Crossing.TestCase
TestCrossing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_small_tensors_and_those_without_room_stay_in_the_frame():
    memory = ServerMemory(64 * 1024)
    sizes = (4096, 4097, 40_000)
    inputs = tuple(Tensor("x", "UINT8", (size,), bytes(size)) for size in sizes)
    sent = memory.sent(InferRequest(request_id="r", model="m", inputs=inputs))
    assert [place is not None for place in sent.places] == [False, True, False]
    assert [len(each.data) for each in sent.request.inputs] == [4096, 0, 40_000]
    none = ServerMemory(0)
    assert none.file is None
    assert none.sent(InferRequest(request_id="r", model="m", inputs=inputs)).places == (None,) * 3


def test_large_tensors_cross_in_memory_that_both_have_and_leave_nothing_there(tmp_path):
    write_add(tmp_path, BATCHED)

    async def ask():
        async with engine(tmp_path) as client:
            asked = [client.tensors.infer(request(f"r{at}", row(at), row(10 * at))) for at in range(4)]
            answers = await asyncio.gather(*asked)
            assert client._memory.num_used == 4
            for at, answer in enumerate(answers):
                assert np.array_equal(array_of(answer.outputs[0]), row(11 * at))
            gone = asyncio.ensure_future(client.tensors.infer(request("gone", row(1), row(1))))
            await asyncio.sleep(0)
            gone.cancel()
            await until_async(lambda: not client.tensors.num_unanswered())
            del answers, answer
            assert client._memory.num_used == 0

    asyncio.run(ask())


def test_after_a_kill_requests_run_again_and_answers_that_are_held_stay_as_they_are(tmp_path):
    write_add(tmp_path, BATCHED)

    async def ask():
        async with engine(tmp_path) as client:
            tensors = client.tensors
            four = [tensors.infer(request(f"a{at}", row(at), row(at))) for at in range(4)]
            held = await asyncio.gather(*four)
            three = [asyncio.ensure_future(tensors.infer(request(f"b{at}", row(at), row(5)))) for at in range(3)]
            await asyncio.sleep(0)
            killed = client.supervisor.pid
            os.kill(killed, signal.SIGKILL)
            await until_async(lambda: client.supervisor.ready and client.supervisor.pid != killed)
            last = await tensors.infer(request("b3", row(3), row(5)))
            again = [*await asyncio.gather(*three), last]
            assert [float(array_of(one.outputs[0])[0, -1]) for one in again] == [5, 6, 7, 8]
            for at, answer in enumerate(held):
                assert np.array_equal(array_of(answer.outputs[0]), row(2 * at))
            assert client._memory.num_used == 8
            del held, again, answer, last
            three.clear()
            await asyncio.sleep(0)  # the loop's last step had them too
            assert client._memory.num_used == 0

    asyncio.run(ask())


def test_an_engine_that_is_killed_between_its_batches_loses_no_answer_and_no_block(tmp_path):
    write_add(tmp_path)

    async def ask():
        async with engine(tmp_path) as client:
            tensors, killed = client.tensors, client.supervisor.pid
            asked = [asyncio.ensure_future(tensors.infer(request(f"r{at}", row(at), row(at)))) for at in range(40)]
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            os.kill(killed, signal.SIGKILL)
            await until_async(lambda: client.supervisor.ready and client.supervisor.pid != killed)
            for at, one in enumerate(asked):
                assert np.array_equal(array_of((await one).outputs[0]), row(2 * at))
            asked.clear()
            del one
            await asyncio.sleep(0)
            assert client._memory.num_used == 0

    asyncio.run(ask())


def test_where_there_is_no_room_tensors_are_copied_into_frames(tmp_path):
    write_add(tmp_path)

    async def ask():
        start = start_of(tmp_path, IN_PROCESS)
        tensors = replace(start.config.tensors, tensor_arena_bytes=4 * WIDTH)
        client = EngineClient(replace(start, config=replace(start.config, tensors=tensors)), WallClock())
        client.begin()
        await asyncio.to_thread(client.wait)
        client.attach(asyncio.get_running_loop())
        answer = await client.tensors.infer(request("r", row(1), row(2)))
        assert np.array_equal(array_of(answer.outputs[0]), row(3))
        assert client._memory.num_used == 0
        await client.close()

    asyncio.run(ask())


# -- regions of clients


@contextmanager
def region(num_bytes):
    memory = SharedMemory(create=True, size=num_bytes)
    try:
        yield memory
    finally:
        memory.close()
        memory.unlink()


def in_region(regions, request_id):
    """INPUT0 and INPUT1 of `add` one after another in the region `mine` of the tenant a."""
    inputs = tuple(
        Tensor(f"INPUT{at}", "FP32", (1, WIDTH), regions.view("a", "mine", at * 4 * WIDTH, 4 * WIDTH).read())
        for at in range(2)
    )
    return InferRequest(request_id=request_id, model="add", inputs=inputs)


def test_a_region_that_its_owner_made_shorter_at_any_time_fails_its_request_alone(tmp_path):
    write_add(tmp_path, BATCHED)
    regions = SystemRegions()

    async def ask():
        with region(2**17) as memory:
            numbers = np.frombuffer(memory.buf, np.float32)
            numbers[: 2 * WIDTH] = np.arange(2 * WIDTH)
            wanted = numbers[:WIDTH] + numbers[WIDTH : 2 * WIDTH]
            del numbers
            regions.register("a", "mine", memory.name, 0, 2**17)
            into = regions.view("a", "mine", 8 * WIDTH, 4 * WIDTH)
            async with engine(tmp_path) as client:
                pid = client.supervisor.pid
                waiting = asyncio.ensure_future(client.tensors.infer(in_region(regions, "r")))
                await asyncio.sleep(0)
                os.truncate(f"/dev/shm/{memory.name}", 4096)  # while it waits for others
                others = [client.tensors.infer(request(f"o{at}", row(at), row(at))) for at in range(3)]
                assert array_of((await asyncio.gather(*others))[2].outputs[0])[0, 0] == 4
                answer = (await waiting).outputs[0]
                assert np.array_equal(array_of(answer)[0], wanted)
                with pytest.raises(InvalidRequest, match="has 4096 bytes by now, and 49152 are needed"):
                    keep(answer, RegionPlace("mine", 8 * WIDTH, 4 * WIDTH), into)
                with pytest.raises(InvalidRequest, match="has 4096 bytes by now, and 16384 are needed"):
                    in_region(regions, "again")
                assert client.supervisor.pid == pid

    asyncio.run(ask())


def test_a_region_that_is_unregistered_in_use_is_there_until_its_request_has_ended():
    regions = SystemRegions()
    with region(64) as memory:
        memory.buf[:4] = b"soup"
        regions.register("a", "mine", memory.name, 0, 64)
        part = regions.view("a", "mine", 0, 4)
        regions.unregister("a")
        assert bytes(part.read()) == b"soup"
        part.write(b"salt")
        assert bytes(memory.buf[:4]) == b"salt"
        file = part.region.file
        del part
        assert not os.path.exists(f"/proc/self/fd/{file}")


def test_copies_of_regions_are_bounded_until_their_requests_end(monkeypatch):
    monkeypatch.setattr("maitred.api.tensor.extensions.MOST_HELD_BYTES", 100)
    regions = SystemRegions()
    with region(256) as memory:
        regions.register("a", "mine", memory.name, 0, 256)
        whole = regions.view("a", "mine", 0, 256).read()  # alone, it may be of any size
        with pytest.raises(Overloaded, match="256 bytes of shared memory are held for requests, and 8 more"):
            regions.view("a", "mine", 0, 8).read()
        del whole
        assert len(regions.view("a", "mine", 0, 8).read()) == 8


def mapped_at(address):
    """The file whose memory is at an address of this process, and the offset in it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in span.split("-"))
        if start <= address < end:
            return " ".join(path), address - start + int(offset, 16)
    return "", 0


@pytest.fixture
def addresses(monkeypatch):
    """Where the arrays lie that onnxruntime is given, by the name of the input."""
    seen = {}

    def open_watched(*args, **kwargs):
        loaded = open_onnx(*args, **kwargs)
        for instance in loaded.instances:
            session = instance._session

            class Watched:
                def run(self, names, feeds, session=session):
                    seen.update({name: array.__array_interface__["data"][0] for name, array in feeds.items()})
                    return session.run(names, feeds)

            instance._session = Watched()
        return loaded

    monkeypatch.setitem(OPENERS, "onnxruntime", open_watched)
    return seen


def test_the_runtime_is_given_the_very_address_in_the_arena(tmp_path, addresses):
    write_add(tmp_path)

    async def ask():
        async with engine(tmp_path, IN_THREAD) as client:
            await client.tensors.infer(request("arena", row(1), row(2)))
            found = [mapped_at(addresses[f"INPUT{at}"]) for at in range(2)]
            assert [offset for _, offset in found] == [0, 4 * WIDTH]
            assert all("memfd:maitred-tensors" in path for path, _ in found)

    asyncio.run(ask())


@pytest.mark.parametrize(
    "key",
    [
        "memfd:maitred-tensors",
        "/memfd:maitred-tensors",
        "/proc/{pid}/fd/{file}",
        "/../../proc/self/fd/{file}",
        "maitred-tensors",
        "{link}",
    ],
)
def test_no_name_leads_to_our_own_memory(key):
    memory, regions = ServerMemory(2**16), SystemRegions()
    assert not [name for name in os.listdir("/dev/shm") if "maitred-tensors" in name]
    link = Path("/dev/shm", f"link-{os.getpid()}")
    link.symlink_to(f"/proc/{os.getpid()}/fd/{memory.file}")
    try:
        with pytest.raises(InvalidRequest):
            regions.register("a", "ours", key.format(pid=os.getpid(), file=memory.file, link=link.name), 0, 4096)
    finally:
        link.unlink()

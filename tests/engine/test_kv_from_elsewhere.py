"""An engine whose requests wait for KV from elsewhere: it neither spins nor ends, and wakes when there is something."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from maitred.core.clock import WallClock
from maitred.core.request import FinishReason, RequestSpec, RequestState, SamplingParams
from maitred.engine.llm import LLM
from maitred.scheduler.engine_core import EngineCore
from tests.engine.clients import follow
from tests.engine.worlds import BLOCK_SIZE, Wake, client_of
from tests.fakes import FakeExecutor, make_scheduler, make_spec


class Awaiting(EngineCore):
    """Whoever comes waits for KV; `waits` is set then."""

    def __init__(self, executor: FakeExecutor) -> None:
        super().__init__(make_scheduler(block_size=BLOCK_SIZE), executor, WallClock(), wake=Wake())
        self.waits = threading.Event()

    def add(self, spec: RequestSpec) -> RequestState:
        request = super().add(spec)
        assert self.reserve(spec.request_id, spec.num_prompt_tokens) is not None
        self.waits.set()
        return request


async def test_the_loop_waits_for_what_comes_from_another_thread():
    executor = FakeExecutor()
    core = Awaiting(executor)
    engine = client_of(core)

    def bring() -> None:
        core.waits.wait()
        core.call_soon(partial(core.kv_arrived, "a", 12))

    bringing = threading.Thread(target=bring)
    bringing.start()
    progress = await follow(engine, make_spec("a", prompt=13, max_tokens=2))
    bringing.join()
    assert progress[-1].finish_reason is FinishReason.LENGTH
    rows = [row for plan in executor.plans for row in plan.rows]
    assert (rows[0].start, rows[0].num_tokens) == (12, 1)
    assert len(executor.plans) < 10  # it does not spin
    await engine.close()


async def test_the_loop_wakes_for_a_deadline():
    core = Awaiting(executor := FakeExecutor())
    engine = client_of(core)
    by = WallClock().now() + 0.2
    ends = [
        (await follow(engine, make_spec(name, prompt=13, **deadline)))[-1].finish_reason
        for name, deadline in {"a": {"finish_by": by}, "b": {"start_by": by}}.items()
    ]
    assert ends == [FinishReason.TIMEOUT, FinishReason.QUEUE_TIMEOUT]
    assert len(executor.plans) < 10
    assert core.stats.num_blocks_used == 0
    await engine.close()


def test_offline_nothing_ends_before_the_kv_is_here(monkeypatch: pytest.MonkeyPatch):
    with LLM(max_num_seqs=2, block_size=8) as llm:
        core = llm._open().core
        add = core.add
        bringing: list[threading.Thread] = []

        def add_and_wait(spec: RequestSpec) -> RequestState:
            request = add(spec)
            assert core.reserve(spec.request_id, spec.num_prompt_tokens) is not None
            nothing = partial(core.kv_arrived, spec.request_id, 0)
            bringing.append(threading.Thread(target=core.call_soon, args=(nothing,)))
            bringing[-1].start()
            return request

        sampling = SamplingParams(temperature=0.0, max_tokens=4)
        monkeypatch.setattr(core, "add", add_and_wait)
        waited = llm.generate([[5] * 20, [6] * 20], sampling)
        for thread in bringing:
            thread.join()
        monkeypatch.undo()
        assert len(bringing) == 2
        alone = llm.generate([[5] * 20, [6] * 20], sampling)
        assert [output.outputs[0].token_ids for output in waited] == [output.outputs[0].token_ids for output in alone]

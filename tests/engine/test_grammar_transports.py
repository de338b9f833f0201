"""Requests with a grammar over both transports: they wait outside the queue for its compilation, and survive deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import psutil
import pytest

from maitred.config import CacheConfig, EngineConfig, ModelConfig, ProcessConfig
from maitred.core.clock import WallClock
from maitred.core.request import FinishReason, RequestSpec
from maitred.core.step import RequestProgress
from maitred.engine import restarts
from maitred.engine.build import load_engine
from maitred.engine.child_process import in_child_process
from maitred.engine.client import EngineClient
from maitred.engine.engine_thread import in_thread
from maitred.engine.supervisor import Start
from maitred.scheduler.engine_core import EngineCore
from tests.engine.clients import follow, tokens
from tests.engine.grammar_worlds import BLOCK_SIZE, GRAMMARS, HOPELESS, ORDER, WORD, ask, engine, samples, serve
from tests.engine.worlds import client_of
from tests.fakes import FakeExecutor, make_scheduler, make_spec
from tests.waiting import is_gone, until, until_async

TRANSPORTS = {"thread": lambda: in_thread(load_engine), "process": in_child_process}


@asynccontextmanager
async def served_over(transport: str) -> AsyncIterator[EngineClient]:
    """The built-in model, as `grammar_worlds.engine` has it."""
    model = ModelConfig(num_threads=1, max_model_len=128)
    config = EngineConfig(model=model, cache=CacheConfig(block_size=BLOCK_SIZE))
    client = EngineClient(Start(config=config, process=ProcessConfig(), open=TRANSPORTS[transport]()), WallClock())
    await asyncio.to_thread(client.supervisor.begin)
    await asyncio.to_thread(client.supervisor.wait)
    try:
        yield client
    finally:
        await client.close()


def a_mixture() -> list[RequestSpec]:
    alike = [ask(f"r{i}", GRAMMARS[i % len(GRAMMARS)], prompt=f"Order {i}: ", seed=i) for i in range(17)]
    return [*alike, *samples("s", 3, ORDER, seed=5, temperature=1.5)]


def expected_of(specs: list[RequestSpec]) -> dict[str, tuple[list[int], FinishReason | None]]:
    with engine() as parts:
        return {name: (served.token_ids, served.finish_reason) for name, served in serve(parts, specs).items()}


def outcome(told: list[RequestProgress]) -> tuple[list[int], FinishReason | None]:
    return tokens(told), told[-1].finish_reason


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
async def test_streams_give_what_one_engine_core_gives(transport: str):
    specs = a_mixture()
    async with served_over(transport) as client:
        told = await asyncio.gather(*(follow(client, spec) for spec in specs))
        (bad,) = await follow(client, ask("bad", HOPELESS))
    assert {spec.request_id: outcome(each) for spec, each in zip(specs, told, strict=True)} == expected_of(specs)
    assert bad.finish_reason is FinishReason.ERROR
    assert "nobody" in (bad.error or "")


async def test_an_engine_killed_under_twenty_streams_costs_none_of_them_a_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    specs, killed = a_mixture(), list[psutil.Process]()
    async with served_over("process") as client:

        async def kill() -> None:
            """The engine; its worker ends with it."""
            engine_process = psutil.Process(client.supervisor._child.pid)  # type: ignore[union-attr]
            killed.extend(engine_process.children())
            os.kill(engine_process.pid, signal.SIGKILL)

        told = await asyncio.gather(follow(client, specs[0], {3: kill}), *(follow(client, spec) for spec in specs[1:]))
    assert {spec.request_id: outcome(each) for spec, each in zip(specs, told, strict=True)} == expected_of(specs)
    assert len(killed) == 1
    until(lambda: is_gone(killed[0]))


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Callable[[str], None]]] = []

    def prepare(self, grammar: str, done: Callable[[str], None]) -> None:
        self.asked.append((grammar, done))


@asynccontextmanager
async def waiting_for(compiler: SlowCompiler) -> AsyncIterator[EngineClient]:
    core = EngineCore(make_scheduler(), FakeExecutor(), WallClock())
    client = client_of(core, prepare=compiler.prepare)
    try:
        yield client
    finally:
        await client.close()


async def test_a_request_waits_for_its_grammar_and_nobody_for_the_request():
    compiler = SlowCompiler()
    async with waiting_for(compiler) as client:
        bound = asyncio.create_task(follow(client, make_spec("bound", grammar=WORD)))
        await until_async(lambda: compiler.asked)
        assert (await follow(client, make_spec("free")))[-1].finish_reason is FinishReason.LENGTH
        assert not bound.done()
        ((grammar, done),) = compiler.asked
        done("")
        assert grammar == WORD
        assert (await bound)[-1].finish_reason is FinishReason.LENGTH


async def test_a_grammar_that_cannot_be_compiled_ends_its_request_with_the_reason():
    compiler = SlowCompiler()
    async with waiting_for(compiler) as client:
        bound = asyncio.create_task(follow(client, make_spec("bound", grammar=WORD)))
        await until_async(lambda: compiler.asked)
        compiler.asked[0][1]("too large")
        (told,) = await bound
        assert (told.finish_reason, told.error) == (FinishReason.ERROR, "too large")


async def test_a_request_that_waits_for_its_grammar_can_be_aborted_and_asked_again():
    compiler = SlowCompiler()
    async with waiting_for(compiler) as client:
        bound = asyncio.create_task(follow(client, make_spec("bound", grammar=WORD)))
        await until_async(lambda: compiler.asked)
        client.abort("bound")
        assert (await bound)[-1].finish_reason is FinishReason.ABORT
        again = asyncio.create_task(follow(client, make_spec("bound", grammar=ORDER)))
        await until_async(lambda: len(compiler.asked) == 2)
        compiler.asked[0][1]("this one is not asked for any more")
        compiler.asked[1][1]("")
        assert (await again)[-1].finish_reason is FinishReason.LENGTH

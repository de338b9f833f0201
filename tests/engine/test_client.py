"""An engine in a process of its own: what happens when it is killed from outside, and who goes on with the next one."""

from __future__ import annotations

import asyncio
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from maitred.config import SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, ConfigError, EngineDead, OutOfMemory
from maitred.core.request import FinishReason, SamplingParams
from maitred.engine import child_process, restarts, supervisor
from maitred.engine.client import EngineClient
from maitred.engine.live_requests import LiveRequest
from maitred.engine.starting import StartingEngine
from tests.conftest import ROOT
from tests.engine.clients import POISON, PROMPT, ask, follow, running_client, start_of, tokens
from tests.engine.fake_child import Gate, expected
from tests.fakes import make_samples
from tests.waiting import HANGS_S, is_gone, until, until_async


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts come at once; that the pauses grow is BackOff's own test. Last words are waited for."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "LAST_LINE_S", HANGS_S)
    monkeypatch.setattr(child_process, "STOP_S", 0.3)  # one that stands at its gate will not end by itself


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Nothing goes beyond 10 tokens until a test says so."""
    return Gate(tmp_path, 10)


def pid_of(engine: EngineClient) -> int:
    child = engine.supervisor._child
    assert child is not None
    return child.pid


def killing(
    engine: EngineClient, gate: Gate, number: int = signal.SIGKILL, *, then: int = 10**9
) -> Callable[[], Awaitable[object]]:
    """Ends the engine, which waits at the gate, and opens that for the next one."""

    async def kill() -> None:
        await until_async(lambda: engine.supervisor.ready)
        before = engine.state().num_restarts
        os.kill(pid_of(engine), number)
        await until_async(lambda: engine.state().num_restarts > before or engine.supervisor.over)
        gate.open_to(then)

    return kill


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.soak)])
async def test_a_request_goes_on_token_for_token_when_its_engine_is_killed(number: int, gate: Gate, caplog):
    admitted: list[LiveRequest] = []
    async with running_client(gate.habit, on_admitted=admitted.append) as engine:
        told = await follow(engine, ask(seed=3), {10: killing(engine, gate, number)})
        assert tokens(told) == expected(PROMPT, 60, seed=3) == admitted[0].output_token_ids
        assert admitted[0].charges == told[-1].charges
        assert told[-1].timing is not None
        assert told[-1].timing.stall_s > 0, "the pause is told apart from decoding"
        state = engine.state()
        assert (state.num_restarts, state.num_resumed, state.alive) == (1, 1, True)
        assert (state.num_prompt_tokens, state.num_generated_tokens) == (6, 60), "the prompt is charged once"
    assert f"was killed by {signal.Signals(number).name}" in caplog.text


async def test_a_request_survives_more_kills_from_outside_than_an_engine_may_have_failures(gate: Gate):
    async with running_client(gate.habit, max_restarts=2) as engine:
        at = {count: killing(engine, gate, then=count + 5) for count in range(10, 25, 5)}
        assert tokens(await follow(engine, ask(), {**at, 25: killing(engine, gate)})) == expected(PROMPT, 60)
        assert engine.state().num_restarts == engine.state().num_resumed == 4


async def test_samples_of_one_prompt_go_on_each_where_it_was(gate: Gate):
    async with running_client(gate.habit) as engine:
        sampling = SamplingParams(max_tokens=400, ignore_eos=True)
        samples = make_samples("r", 3, prompt=PROMPT, max_tokens=400, sampling=sampling, seed=11)
        specs = [sample.spec for sample in samples]
        specs[1] = structs.replace(specs[1], max_tokens=5)  # has ended before the first death
        work = [asyncio.create_task(follow(engine, spec)) for spec in specs]
        limits = itertools.chain(range(10, 399), itertools.repeat(399))  # nobody else ends before it
        await until_async(lambda: gate.open_to(next(limits)) or work[1].done())
        await killing(engine, gate)()
        told = await asyncio.gather(*work)
        for index, spec in enumerate(specs):
            assert tokens(told[index]) == expected(PROMPT, spec.max_tokens, seed=11, sample_index=index)
        state = engine.state()
        assert (state.num_restarts, state.num_resumed) == (1, 2)
        assert state.num_generated_tokens == 400 + 5 + 400


async def test_a_request_that_waits_in_the_queue_is_kept_too(gate: Gate):
    scheduler = SchedulerConfig(max_num_seqs=1)
    engine = EngineClient(start_of(gate.habit, scheduler), WallClock())
    engine.start()
    first, second = ask("a"), ask("b", prompt=[9, 9, 9])
    both = await asyncio.gather(follow(engine, first, {10: killing(engine, gate)}), follow(engine, second))
    assert [tokens(told) for told in both] == [expected(PROMPT, 60), expected([9, 9, 9], 60)]
    await engine.close()


async def test_a_request_that_comes_while_there_is_no_engine_is_held(gate: Gate):
    async with running_client(gate.habit) as engine:
        engine.attach(asyncio.get_running_loop())
        gate.shut()
        os.kill(pid_of(engine), signal.SIGKILL)
        await until_async(lambda: not engine.supervisor.ready)
        state = engine.state()
        assert (state.alive, state.loading) == (False, True)
        assert "killed by SIGKILL" in (state.error or "")
        held = asyncio.create_task(follow(engine, ask()))
        await until_async(lambda: engine.state().num_waiting == 1)
        gate.open()
        assert tokens(await held) == expected(PROMPT, 60)


async def test_prompt_logprobs_are_told_once_and_logprobs_of_every_token(gate: Gate):
    async with running_client(gate.habit) as engine:
        told = await follow(engine, ask(sampling={"prompt_logprobs": 0, "logprobs": 0}), {10: killing(engine, gate)})
        assert sum(len(progress.prompt_logprobs or ()) for progress in told) == len(PROMPT) - 1
        assert sum(len(progress.logprobs or ()) for progress in told) == 60


async def test_only_what_has_no_token_yet_is_started_anew_on_an_executor_that_is_not_exact(gate: Gate):
    scheduler = SchedulerConfig(max_num_seqs=1)
    admitted: list[LiveRequest] = []
    start = start_of(f"{gate.habit},deterministic=0", scheduler)
    engine = EngineClient(start, WallClock(), on_admitted=admitted.append)
    engine.start()
    waiting = asyncio.create_task(follow(engine, ask("waiting", prompt=[9, 9, 9])))
    started = ask("started", arrived_at=-1.0)
    with pytest.raises(EngineDead, match="not go on with exactly the same tokens"):
        await follow(engine, started, {10: killing(engine, gate)})
    assert [live.finish_reason for live in admitted if live.spec is started] == [FinishReason.ERROR]
    assert tokens(await waiting) == expected([9, 9, 9], 60)
    await engine.close()


@pytest.mark.parametrize(("rule", "ends"), [("always", False), ("never", True)])
async def test_the_user_may_rule_otherwise(rule: str, ends: bool, gate: Gate):
    async with running_client(f"{gate.habit},deterministic={int(ends)}", resume=rule) as engine:
        work = follow(engine, ask(), {10: killing(engine, gate)})
        if ends:
            with pytest.raises(EngineDead, match="--resume never"):
                await work
        else:
            assert tokens(await work) == expected(PROMPT, 60)


async def test_a_request_that_kills_engines_ends_alone():
    """All four see two engines die; then they come back one by one, and only the culprit goes on killing."""
    async with running_client("die_at=3") as engine:
        good = [[2 + i] * 9 for i in range(3)]
        work = [follow(engine, ask(f"good{i}", prompt)) for i, prompt in enumerate(good)]
        *told, poisoned = await asyncio.gather(
            *work, follow(engine, ask("poison", POISON, max_tokens=400)), return_exceptions=True
        )
        assert isinstance(poisoned, EngineDead)
        assert "4 engines died while they had this request" in str(poisoned)
        assert [tokens(each) for each in told] == [expected(prompt, 60) for prompt in good]
        assert engine.state().num_restarts == 4


async def test_an_engine_that_raises_says_why(caplog):
    async with running_client("raise_at=3", resume="never") as engine:
        with pytest.raises(EngineDead, match="exit code 1: RuntimeError: the model fell over"):
            await follow(engine, ask(prompt=POISON))


async def test_an_engine_that_is_stuck_in_a_step_is_killed_and_replaced():
    async with running_client("hang_at=3", resume="never", step_timeout_s=3.0) as engine:
        with pytest.raises(EngineDead, match="it was in one step for 3 s"):
            await follow(engine, ask(prompt=POISON))
        await until_async(lambda: engine.supervisor.ready)


async def test_weights_that_changed_meanwhile_are_not_gone_on_with(gate: Gate):
    async with running_client(f"{gate.habit},other_model=1") as engine:
        with pytest.raises(EngineDead, match="the model's files changed while the server ran"):
            await follow(engine, ask(), {10: killing(engine, gate)})
        assert not engine.state().alive
        assert not engine.state().loading


async def test_an_engine_that_is_silent_is_not_healthy_and_one_that_speaks_again_is(monkeypatch):
    monkeypatch.setattr(supervisor, "SILENT_S", 1.0)
    async with running_client() as engine:
        await follow(engine, ask())
        os.kill(pid_of(engine), signal.SIGSTOP)
        await until_async(lambda: not engine.state().alive)
        assert "silent" in (engine.state().error or "")
        os.kill(pid_of(engine), signal.SIGCONT)
        await until_async(lambda: engine.state().alive)
        assert engine.state().num_restarts == 0


async def test_it_is_given_up_after_as_many_restarts_as_allowed(gate: Gate):
    async with running_client(gate.habit, max_restarts=0) as engine:
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            await follow(engine, ask(), {10: killing(engine, gate)})
        state = engine.state()
        assert (state.alive, state.loading) == (False, False)
        with pytest.raises(EngineDead, match="killed by SIGKILL"):
            await follow(engine, ask("later"))
        with pytest.raises(EngineDead):
            await engine.queue_view(offset=0, limit=10)


@pytest.mark.parametrize("reason", [FinishReason.ABORT, pytest.param(FinishReason.STOP, marks=pytest.mark.soak)])
async def test_an_abort_while_there_is_no_engine_takes_effect_at_once(reason: FinishReason, gate: Gate):
    admitted: list[LiveRequest] = []
    async with running_client(gate.habit, on_admitted=admitted.append) as engine:
        stream = engine.submit(ask(max_tokens=400))[0]
        await anext(stream)
        gate.shut()
        os.kill(pid_of(engine), signal.SIGKILL)
        await until_async(lambda: not engine.supervisor.ready)
        engine.abort("r", reason)
        told = [progress async for progress in stream]
        assert told[-1].finish_reason is reason is admitted[0].finish_reason
        gate.open()
        await until_async(lambda: engine.supervisor.ready)
        assert engine.state().num_resumed == 0


async def test_questions_are_answered_and_a_policy_outlives_its_engine(gate: Gate):
    async with running_client(gate.habit) as engine:
        assert (await engine.queue_view(offset=0, limit=10)).num_waiting == 0
        assert (await engine.live_view()).num_running == 0
        assert "vtc" in await engine.policy_names()
        config = await engine.scheduler_config()
        with pytest.raises(ConfigError, match="choose one of"):
            await engine.configure(replace(config, policy="best"))
        await engine.configure(replace(config, policy="vtc"))
        gate.shut()
        os.kill(pid_of(engine), signal.SIGKILL)
        await until_async(lambda: not engine.supervisor.ready)
        with pytest.raises(EngineDead):
            await engine.scheduler_config()
        gate.open()
        await until_async(lambda: engine.supervisor.ready)
        assert (await engine.scheduler_config()).policy == "vtc"


@pytest.mark.parametrize(
    ("habit", "kind", "message"),
    [
        ("refuse=1", CheckpointError, "there is no such model; choose another"),
        ("no_memory=1", OutOfMemory, "give less with --kv-cache-memory-bytes"),
        ("exit_at_start=1", EngineDead, "ended with exit code 7: something went wrong here, before it was ready"),
    ],
)
def test_what_keeps_the_engine_from_loading_is_raised_here(habit: str, kind: type[Exception], message: str):
    with pytest.raises(kind, match=message):
        EngineClient(start_of(habit), WallClock()).start()


def test_an_engine_can_be_stopped_without_ever_having_a_loop():
    lines: list[str] = []
    engine = StartingEngine(start_of(), on_event=lines.append).wait()
    assert lines == ["memory  none is needed"]
    assert engine.model.max_model_len == 512
    assert engine.model.chat_template is not None
    engine.replica.stop()
    engine.replica.stop()
    assert not engine.replica.state().alive


@contextmanager
def few_descriptors(num_left: int) -> Iterator[None]:
    """No more than so many can be opened meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 40, before[1]))
    try:
        with suppress(OSError):
            while True:
                held.append(os.dup(2))
        for _ in range(num_left):
            os.close(held.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("num_left", [0, pytest.param(1, marks=pytest.mark.soak), 12])
async def test_an_engine_that_dies_while_descriptors_have_run_out_comes_back(num_left: int, gate: Gate, caplog):
    """With 12 ZeroMQ finds some, and would end this process for want of the others."""
    async with running_client(gate.habit, max_restarts=10) as engine:
        request = ask()

        async def starve() -> None:
            with few_descriptors(num_left):
                os.kill(pid_of(engine), signal.SIGKILL)
                await until_async(lambda: engine.state().num_restarts >= 3)
            gate.open()

        assert tokens(await follow(engine, request, {10: starve})) == expected(PROMPT, 60)
    assert "cannot be started: [Errno 24] Too many open files" in caplog.text


async def test_whatever_hinders_a_restart_is_another_try(gate: Gate, monkeypatch):
    """A thread that the system does not give is a RuntimeError, which comes when the process is there already."""
    async with running_client(gate.habit) as engine:
        start, refused, num_children = threading.Thread.start, [], len(psutil.Process().children())

        def without_a_thread(thread: threading.Thread) -> None:
            if thread.name == "maitred-engine-exit" and len(refused) < 2:
                refused.append(thread)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", without_a_thread)
        assert tokens(await follow(engine, ask(), {10: killing(engine, gate)})) == expected(PROMPT, 60)
        assert len(refused) == 2
        assert len(psutil.Process().children()) == num_children


PARENT = """
import sys, time
from tests.engine.clients import start_of
from tests.engine.test_client import pid_of
from maitred.core.clock import WallClock
from maitred.engine.client import EngineClient
engine = EngineClient(start_of(), WallClock())
engine.start()
print(pid_of(engine), flush=True)
time.sleep(600)
"""


def test_the_child_dies_with_its_parent_however_that_ends():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait(HANGS_S)
    parent.stdout.close()
    until(lambda: is_gone(child))


async def test_signals_to_the_group_are_the_parents_affair():
    async with running_client() as engine:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(pid_of(engine), number)
        assert tokens(await follow(engine, ask())) == expected(PROMPT, 60)
        assert os.getsid(pid_of(engine)) != os.getsid(0)

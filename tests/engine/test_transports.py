"""The same stories over both transports: an engine in a thread keeps every promise that one in a process keeps."""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from msgspec import structs

from maitred.config import SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, ConfigError, EngineDead, OutOfMemory, ReadTooSlowly
from maitred.core.request import FinishReason, SamplingParams
from maitred.engine import child_process, restarts
from maitred.engine.client import EngineClient
from maitred.engine.live_requests import LiveRequest
from tests.engine.clients import POISON, PROMPT, TRANSPORTS, ask, follow, running_client, start_of, tokens
from tests.engine.fake_child import Gate, expected
from tests.fakes import make_samples
from tests.waiting import HANGS_S, is_gone, until, until_async

KIB = 1024


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restarts come at once; last words are waited for."""
    monkeypatch.setattr(restarts, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(child_process, "LAST_LINE_S", HANGS_S)


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    """Nothing goes beyond 10 tokens until a test says so."""
    return Gate(tmp_path, 10)


async def test_a_stream_gives_tokens_charges_and_timing_and_changes_nothing_it_was_given(transport: str):
    admitted: list[LiveRequest] = []
    async with running_client(transport=transport, on_admitted=admitted.append) as client:
        spec = ask(seed=7, arrived_at=WallClock().now())
        given = structs.replace(spec)
        told = await follow(client, spec)
        assert spec == given
        assert tokens(told) == expected(PROMPT, 60, seed=7) == admitted[0].output_token_ids
        last = told[-1]
        assert last.finish_reason is FinishReason.LENGTH is admitted[0].finish_reason
        assert last.timing is not None
        assert last.timing.queue_s >= 0
        assert told[0].charges is not None
        assert (told[0].charges.num_prompt_tokens, told[0].charges.num_generated_tokens) == (6, 1)
        assert last.charges is not None
        assert (last.charges.num_prompt_tokens, last.charges.num_generated_tokens) == (6, 60)
        assert admitted[0].charges == last.charges
        assert all(progress.charges is None for progress in told[1:-1])
        await until_async(lambda: client.state().num_blocks_used == 0)
        state = client.state()
        assert (state.num_prompt_tokens, state.num_generated_tokens, state.num_steps) == (6, 60, 60)
        assert state.num_finished[FinishReason.LENGTH] == 1
        (again,) = (await follow(client, ask("again", max_tokens=1)))[-1:]
        assert again.charges is not None
        assert again.charges.num_cached_tokens == 4, "the first block of the prompt"


async def test_samples_of_one_prompt_are_admitted_together_and_are_each_their_own(transport: str):
    async with running_client(transport=transport) as client:
        sampling = SamplingParams(max_tokens=40, ignore_eos=True)
        samples = make_samples("r", 3, prompt=PROMPT, max_tokens=40, sampling=sampling, seed=11)
        streams = client.submit(*(sample.spec for sample in samples))
        told = [[progress async for progress in stream] for stream in streams]
        for index in range(3):
            assert tokens(told[index]) == expected(PROMPT, 40, seed=11, sample_index=index)
        charges = [each[-1].charges for each in told]
        assert [c.num_prompt_tokens for c in charges if c is not None] == [6, 0, 0], "the prompt is charged once"
        await until_async(lambda: client.state().num_steps == 1 + 40)


async def test_an_abort_frees_every_block(transport: str, gate: Gate):
    async with running_client(f"{gate.habit},max_model_len=8000", transport=transport) as client:
        stream = client.submit(ask(max_tokens=7000))[0]
        await anext(stream)
        await stream.aclose()
        limits = itertools.count(10)  # so slowly that the abort is there before the end
        aborted = lambda: client.state().num_finished[FinishReason.ABORT] == 1  # noqa: E731
        await until_async(lambda: gate.open_to(next(limits)) or aborted())
        await until_async(lambda: client.state().num_blocks_used == 0)


IN_SOAK_BY_PROCESS = pytest.mark.parametrize("transport", ["thread", pytest.param("process", marks=pytest.mark.soak)])
"""Of deaths of a process test_client.py has the stories; here the same happens without one."""


@IN_SOAK_BY_PROCESS
async def test_who_shared_an_engine_with_one_that_kills_it_goes_on_token_for_token(transport: str, caplog):
    """Two engines raise with all four; then they come back one by one, and only the culprit goes on killing."""
    admitted: list[LiveRequest] = []
    async with running_client("raise_at=3", transport=transport, on_admitted=admitted.append) as client:
        good = [[2 + i] * 9 for i in range(3)]
        work = [follow(client, ask(f"good{i}", prompt, seed=i)) for i, prompt in enumerate(good)]
        *told, poisoned = await asyncio.gather(
            *work, follow(client, ask("poison", POISON, max_tokens=400)), return_exceptions=True
        )
        assert isinstance(poisoned, EngineDead)
        assert "RuntimeError: the model fell over" in str(poisoned)
        assert "4 engines died while they had this request" in str(poisoned)
        for index, each in enumerate(told):
            assert tokens(each) == expected(good[index], 60, seed=index)
            assert each[-1].timing is not None
            assert each[-1].timing.stall_s > 0, "the pause is told apart from decoding"
        await until_async(lambda: client.state().alive)
        state = client.state()
        assert state.num_restarts == 4
        assert state.num_resumed > 3
        assert state.num_prompt_tokens == 3 * 9 + 2, "each prompt is charged once"
        assert state.num_generated_tokens == sum(live.num_output_tokens for live in admitted)
    assert "RuntimeError: the model fell over; 4 requests wait for the next one" in caplog.text


@IN_SOAK_BY_PROCESS
async def test_prompt_logprobs_are_told_once_whatever_engines_raise(transport: str):
    async with running_client("raise_at=3", transport=transport) as client:
        work = follow(client, ask("good", sampling={"prompt_logprobs": 0, "logprobs": 0}))
        told, poisoned = await asyncio.gather(work, follow(client, ask("poison", POISON)), return_exceptions=True)
        assert isinstance(poisoned, EngineDead)
        assert not isinstance(told, BaseException)
        assert sum(len(progress.prompt_logprobs or ()) for progress in told) == len(PROMPT) - 1
        assert sum(len(progress.logprobs or ()) for progress in told) == 60


@IN_SOAK_BY_PROCESS
async def test_an_engine_that_raises_with_whatever_it_is_given_is_given_up(transport: str):
    async with running_client("raise_at=0", transport=transport, max_restarts=3) as client:
        ends = await asyncio.gather(*(follow(client, ask(f"r{i}", POISON)) for i in range(4)), return_exceptions=True)
        assert all(isinstance(end, EngineDead) for end in ends)
        assert client.supervisor.over
        state = client.state()
        assert (state.num_restarts, state.alive, state.loading) == (3, False, False)
        assert "RuntimeError: the model fell over" in (state.error or "")
        with pytest.raises(EngineDead, match="the model fell over"):
            await follow(client, ask("later"))
        with pytest.raises(EngineDead):
            await client.queue_view(offset=0, limit=10)


async def test_nothing_is_resumed_where_the_user_rules_so(transport: str):
    async with running_client("raise_at=3", transport=transport, resume="never") as client:
        with pytest.raises(EngineDead, match=r"RuntimeError: the model fell over, and .*--resume never"):
            await follow(client, ask(prompt=POISON))
        assert tokens(await follow(client, ask("next"))) == expected(PROMPT, 60), "by the next engine"


async def test_questions_are_answered_between_two_steps_and_a_policy_outlives_its_engine(transport: str):
    async with running_client("raise_at=3", transport=transport, resume="never") as client:
        assert (await client.queue_view(offset=0, limit=10)).num_waiting == 0
        assert (await client.live_view()).num_running == 0
        assert "vtc" in await client.policy_names()
        config = await client.scheduler_config()
        with pytest.raises(ConfigError, match="choose one of"):
            await client.configure(replace(config, policy="best"))
        await client.configure(replace(config, policy="vtc"))
        with pytest.raises(EngineDead):
            await follow(client, ask(prompt=POISON))
        await until_async(lambda: client.supervisor.ready)
        assert (await client.scheduler_config()).policy == "vtc"


async def test_who_waits_in_the_queue_is_seen_there(transport: str, gate: Gate):
    async with running_client(gate.habit, SchedulerConfig(max_num_seqs=1), transport=transport) as client:
        work = [asyncio.create_task(follow(client, ask(name, max_tokens=400))) for name in "ab"]
        await until_async(lambda: client.state().num_generated_tokens == 10)
        limits = itertools.count(11)  # a question is answered between two steps

        async def let_steps_pass() -> None:
            while True:
                gate.open_to(next(limits))
                await asyncio.sleep(0.01)

        passing = asyncio.create_task(let_steps_pass())
        view = await client.queue_view(offset=0, limit=10)
        passing.cancel()
        assert [entry.request_id for entry in view.waiting] == ["b"]
        gate.open()
        assert [tokens(told) for told in await asyncio.gather(*work)] == [expected(PROMPT, 400)] * 2


async def test_a_request_that_can_never_fit_ends_alone(transport: str):
    async with running_client(transport=transport) as client:
        told = await follow(client, ask("large", prompt=[1] * 9000))
        assert told[-1].finish_reason is FinishReason.ERROR
        assert "KV blocks" in (told[-1].error or "")
        assert tokens(await follow(client, ask())) == expected(PROMPT, 60)


async def test_who_does_not_read_is_ended_and_the_others_are_not(transport: str, monkeypatch):
    monkeypatch.setattr("maitred.engine.live_requests.MAX_UNREAD_BYTES", 20 * KIB)
    async with running_client("max_model_len=8000", transport=transport) as client:
        unread = client.submit(ask("unread", max_tokens=7000))[0]
        assert tokens(await follow(client, ask("read"))) == expected(PROMPT, 60)
        await until_async(lambda: client.state().num_finished[FinishReason.ABORT] == 1)
        assert unread.num_unread_bytes == 0
        with pytest.raises(ReadTooSlowly, match="KiB of tokens behind"):
            [progress async for progress in unread]
        await until_async(lambda: client.state().num_blocks_used == 0)


async def test_closing_ends_open_streams_and_the_engine(transport: str, gate: Gate):
    children, threads = psutil.Process().children(), set(threading.enumerate())
    client = EngineClient(start_of(gate.habit, transport=transport), WallClock())
    client.start()
    stream = client.submit(ask())[0]
    await anext(stream)
    gate.open()
    await client.close()
    with pytest.raises(EngineDead, match="shut down"):
        [progress async for progress in stream]
    state = client.state()
    assert (state.alive, state.loading) == (False, False)
    with pytest.raises(EngineDead, match="shut down"):
        await follow(client, ask("later"))
    until(lambda: all(is_gone(child) for child in psutil.Process().children() if child not in children))
    until(lambda: not any(t.name == "maitred-engine" for t in set(threading.enumerate()) - threads))


@pytest.mark.parametrize(
    ("habit", "kind", "message"),
    [
        ("refuse=1", CheckpointError, "there is no such model; choose another"),
        ("no_memory=1", OutOfMemory, "give less with --kv-cache-memory-bytes"),
    ],
)
def test_what_keeps_the_engine_from_loading_is_raised_here(
    transport: str, habit: str, kind: type[Exception], message: str
):
    with pytest.raises(kind, match=message):
        EngineClient(start_of(habit, transport=transport), WallClock()).start()

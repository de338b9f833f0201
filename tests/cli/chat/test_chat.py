from __future__ import annotations

import asyncio
import io
import os
import re
import signal
import stat
import sys
from asyncio.subprocess import PIPE

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from maitred.cli.chat import Conversation
from maitred.cli.chat_session import PipeTerminal, ScreenTerminal, StreamedAnswer, history_file, talk
from maitred.cli.endpoint import HttpEndpoint
from tests.cli.fake_server import FakeServer, serving
from tests.cli.running import maitred_process
from tests.waiting import HANGS_S, until_async


async def piped(
    fake: FakeServer, lines: str, conversation: Conversation | None = None, sink: io.StringIO | None = None
) -> tuple[int, str]:
    """Number of failed questions, and all that the model's side said."""
    sink = sink if sink is not None else io.StringIO()
    async with HttpEndpoint(fake.url) as endpoint:
        failed = await talk(
            endpoint, fake.model, conversation or Conversation(), PipeTerminal(io.StringIO(lines), sink)
        )
    return failed, sink.getvalue()


async def test_every_line_gets_its_streamed_answer():
    async with serving(FakeServer()) as fake:
        assert await piped(fake, "one\ntwo\n") == (0, "word0 word1 word2 word3 \n" * 2)
    assert [message["content"] for message in fake.bodies[1]["messages"]][::2] == ["one", "two"]


async def test_a_backslash_continues_the_line_and_settings_go_along():
    async with serving(FakeServer()) as fake:
        await piped(fake, "/set temperature 0\none\\\ntwo\n/exit\nnever\n")
    assert fake.bodies[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]
    assert fake.bodies[0]["temperature"] == 0.0
    assert len(fake.bodies) == 1


async def test_hostile_output_is_inert():
    async with serving(FakeServer(text_of=lambda position: "\x1b]0;owned\x07\x9b2J")) as fake:
        _, said = await piped(fake, "hello\n")
    assert said == "]0;owned2J" * 4 + "\n"


async def test_a_refusal_is_told_and_the_chat_goes_on(capsys):
    async with serving(FakeServer(refuse=lambda number: 429 if number == 0 else None)) as fake:
        failed, said = await piped(fake, "one\ntwo\n")
    assert (failed, said) == (1, "word0 word1 word2 word3 \n")
    assert "error: the server answered 429: refused with 429" in capsys.readouterr().err
    assert len(fake.bodies[1]["messages"]) == 1


async def test_an_answer_cut_in_the_middle_is_an_error_and_stays(capsys):
    conversation = Conversation()
    async with serving(FakeServer(break_stream=True)) as fake:
        failed, _ = await piped(fake, "one\n", conversation)
    assert failed == 1
    assert "error: " in capsys.readouterr().err
    assert conversation.messages[-1] == {"role": "assistant", "content": "word0 "}


async def test_ctrl_c_stops_the_answer_not_the_chat(capsys):
    conversation, sink = Conversation(), io.StringIO()

    async def interrupt() -> None:
        await until_async(lambda: "word0" in sink.getvalue())
        os.kill(os.getpid(), signal.SIGINT)

    async with serving(FakeServer(token_s=0.1)) as fake:
        task = asyncio.create_task(interrupt())
        lines = "/set max_tokens 1000\nlong one\n/set max_tokens 1\nshort\n"
        failed, said = await piped(fake, lines, conversation, sink)
        await task
    assert failed == 1
    assert "(stopped)" in capsys.readouterr().err
    assert said.endswith("word0 \n")
    assert conversation.messages[1]["content"].startswith("word0 ")


TIMING_MS = {"queue": 2.0, "schedule": 1.0, "prefill": 30.0, "decode": 380.0, "stall": 20.0, "ttft": 33.0}


async def described(fake: FakeServer, max_tokens: int) -> str:
    """What is said of an answer whose tokens all arrive in one chunk."""
    async with serving(fake), HttpEndpoint(fake.url) as endpoint:
        answer = StreamedAnswer()
        conversation = Conversation(settings={"max_tokens": max_tokens}, messages=[{"role": "user", "content": "one"}])
        async for _ in answer.stream(endpoint, conversation.request(fake.model)):
            pass
    return answer.describe().removesuffix(", cut at the length limit")


async def test_the_figures_are_the_engines_however_the_chunks_come():
    def server() -> FakeServer:
        return FakeServer(tokens_per_chunk=100, timing_ms=TIMING_MS)

    assert await described(server(), 21) == "first token 33 ms, 21 tokens, 50.0 tokens/s, 2 ms in the queue"
    assert await described(server(), 8) == "first token 33 ms, 8 tokens, 17.5 tokens/s, 2 ms in the queue"
    assert await described(server(), 7) == "first token 33 ms, 7 tokens, 2 ms in the queue"


@pytest.mark.parametrize("timing_ms", [None, {"prompt": 3}, {**TIMING_MS, "ttft": None}])
async def test_of_a_server_that_tells_no_times_there_is_no_rate(timing_ms: dict[str, float] | None):
    said = await described(FakeServer(timing_ms=timing_ms, token_s=0.001), 21)
    assert re.fullmatch(r"first text \d+ ms, 21 tokens in \d+\.\d\d s", said)
    said = await described(FakeServer(sends_usage=False), 21)
    assert re.fullmatch(r"first text \d+ ms, in \d+\.\d\d s", said)


async def test_the_process_answers_a_pipe_without_colours(tmp_path):
    async with serving(FakeServer()) as fake:
        result = await asyncio.to_thread(
            maitred_process, "chat", "--url", fake.url, stdin="hello\n", XDG_STATE_HOME=str(tmp_path)
        )
        missing = await asyncio.to_thread(maitred_process, "chat", "wrong", "--url", fake.url, stdin="hello\n")
    assert result == (0, "word0 word1 word2 word3 \n", "")
    assert missing.code == 1
    assert missing.err == "error: the server answered 404: no model wrong\n"


async def test_ctrl_c_leaves_a_chat_that_waits_for_its_pipe():
    async with serving(FakeServer()) as fake:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "maitred", "chat", "--url", fake.url, stdin=PIPE, stdout=PIPE, stderr=PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"hello\n")
        await process.stdout.readline()  # it has answered, and waits
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), timeout=HANGS_S) == 130


async def typed(keys: str) -> str | None:
    """What the screen terminal reads when `keys` are pressed."""
    with create_pipe_input() as keyboard, create_app_session(input=keyboard, output=DummyOutput()):
        keyboard.send_text(keys)
        return await asyncio.wait_for(ScreenTerminal().read(), timeout=HANGS_S)


async def test_enter_sends_alt_enter_and_backslash_begin_a_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert await typed("hello\r") == "hello"
    assert await typed("a\\\rb\x1b\rc\r") == "a\nb\nc"
    assert await typed("\x1b[A\r") == "a\nb\nc"  # history of the session before
    assert await typed("\x04") is None
    assert await typed("half\x03") == ""


@pytest.mark.parametrize("state", ["a file", "a read-only folder", "no home"])
async def test_without_a_place_for_its_history_the_chat_goes_on(tmp_path, monkeypatch, capsys, state):
    """A file where the folder should be, /proc for a file system that takes no files, and a user without a home."""
    (tmp_path / "taken").touch()
    homes = {"a file": str(tmp_path / "taken"), "a read-only folder": "/proc", "no home": "~"}
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", homes[state])
    if state == "no home":
        monkeypatch.delenv("HOME")
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert await typed("hello\r") == "hello"
    told = capsys.readouterr().out
    assert "no history is kept" in told
    assert "XDG_STATE_HOME" in told


def test_the_history_is_its_owners_alone(tmp_path):
    path = history_file({"XDG_STATE_HOME": str(tmp_path)})
    assert path == tmp_path / "maitred" / "chat_history"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

from __future__ import annotations

import asyncio
import io
import json
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

from maitred.cli.chat import COMMANDS, ChatOptions, Conversation, Next
from maitred.cli.chat_session import PipeTerminal, ScreenTerminal, StreamedAnswer, history_file, shape_of, talk
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.flags import UsageError
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


def answered(*questions: str) -> Conversation:
    conversation = Conversation()
    for question in questions:
        assert conversation.take(question).next is Next.ASK
        conversation.answered({"role": "assistant", "content": f"answer to {question}"})
    return conversation


def test_a_line_is_a_question_and_the_request_carries_all_so_far():
    conversation = answered("one")
    conversation.system = "be brief"
    conversation.take("/set temperature 0.2")
    conversation.take("two")
    request = conversation.request("m")
    assert request["temperature"] == 0.2
    assert [message["role"] for message in request["messages"]] == ["system", "user", "assistant", "user"]


def test_slashes_and_blanks():
    conversation = Conversation()
    assert conversation.take("//etc/passwd is what?").next is Next.ASK
    assert conversation.messages[-1]["content"] == "/etc/passwd is what?"

    assert Conversation().take("  \n ").next is Next.READ


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set temperature 0.5", "temperature", 0.5),
        ("/set top_k=40", "top_k", 40),
        ("/set stop a b", "stop", "a b"),
        ("/set max_tokens  7", "max_tokens", 7),
    ],
)
def test_set_reads_the_type_of_the_setting(line, name, value):
    conversation = Conversation()
    conversation.take(line)
    assert conversation.settings == {name: value}


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/hepl", "did you mean /help?"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set top_k 0.5", "must be a whole number"),
        ("/set temperature warm", "must be a number"),
        ("/set temperature", "needs a value"),
        ("/unset seed", "is not set"),
        ("/save", "needs a file name"),
        ("/save /no/such/folder/x", "choose another name"),
        ("/retry", "no question"),
    ],
)
def test_a_slip_is_told_and_changes_nothing(line, hint):
    conversation = Conversation()
    outcome = conversation.take(line)
    assert outcome.next is Next.READ
    assert hint in outcome.text
    assert conversation == Conversation()


def test_commands_show_unset_and_forget():
    conversation = answered("one")
    conversation.take("/set seed 3")
    conversation.take("/set system be kind")
    assert conversation.take("/show").text == "seed = 3\nsystem = be kind\n2 messages"
    conversation.take("/unset seed")
    conversation.take("/unset system")
    conversation.take("/reset")
    assert conversation == Conversation()

    conversation = answered("one")
    conversation.take("/set seed 3")
    assert conversation.take("/clear").next is Next.READ
    assert (conversation.messages, conversation.settings) == ([], {"seed": 3})
    assert conversation.take("/bye").next is Next.LEAVE

    text = Conversation().take("/help").text
    assert all(name in text for name in COMMANDS if name != "/quit")
    assert Conversation().take("/quit").next is Next.LEAVE


def test_retry_asks_the_last_question_anew_and_a_failed_one_is_taken_back():
    conversation = answered("one", "two")
    assert conversation.take("/retry").next is Next.ASK
    assert [message["content"] for message in conversation.messages] == ["one", "answer to one", "two"]

    conversation = answered("one")
    conversation.take("two")
    conversation.failed()
    assert len(conversation.messages) == 2


def test_save_writes_messages_or_a_transcript_and_overwrites_nothing(tmp_path):
    conversation = answered("one")
    assert "saved" in conversation.take(f"/save {tmp_path}/talk.json").text
    assert json.loads((tmp_path / "talk.json").read_text()) == conversation.messages
    conversation.take(f"/save {tmp_path}/talk.txt")
    assert (tmp_path / "talk.txt").read_text() == "user:\none\n\nassistant:\nanswer to one\n\n"
    assert "exists" in conversation.take(f"/save {tmp_path}/talk.json").text


THINKS = [{"reasoning_content": "hm, ", "reasoning": "hm, "}, {"reasoning": "\x1b[5mso"}, {"content": "Soup."}]


def call(index: int, name: str, *arguments: str) -> list[dict]:
    pieces = [{"id": "same", "function": {"name": name}}, *({"function": {"arguments": part}} for part in arguments)]
    return [{"tool_calls": [{"index": index, **piece}]} for piece in pieces]


class Listener(ScreenTerminal):
    """A screen without a keyboard: it reads what a test wrote down."""

    def __init__(self, *lines: str) -> None:
        self._lines = iter(lines)

    async def read(self) -> str | None:
        return next(self._lines, None)


async def test_thoughts_are_dim_on_a_screen_and_sent_back_apart_from_the_text(capsys):
    async with serving(FakeServer(deltas=lambda number: THINKS)) as fake, HttpEndpoint(fake.url) as endpoint:
        assert await talk(endpoint, fake.model, Conversation(), Listener("one", "two")) == 0
    told = capsys.readouterr().out
    assert told.startswith("\x1b[2mhm, \x1b[0m\x1b[2m[5mso\x1b[0m\x1b[2m\n\n\x1b[0mSoup.\n")
    answer = {"role": "assistant", "content": "Soup.", "reasoning_content": "hm, \x1b[5mso"}
    assert fake.bodies[1]["messages"][1] == answer


async def test_a_pipe_gets_the_answer_without_the_thoughts():
    async with serving(FakeServer(deltas=lambda number: THINKS)) as fake:
        assert await piped(fake, "one\n") == (0, "Soup.\n")


async def test_a_call_is_shown_and_the_next_line_is_its_result(capsys):
    calls = call(0, "get_price", '{"dish": ', '"soup"}') + call(1, "clock")
    async with serving(FakeServer(deltas=lambda number: [{"content": "5 euros."}] if number else calls)) as fake:
        failed, said = await piped(fake, "how much?\n{}\n5\nand now?\n")
    assert (failed, said) == (0, "5 euros.\n5 euros.\n")
    told = capsys.readouterr().err.splitlines()
    assert told[0] == 'calls get_price({"dish": "soup"}); what does it give?'
    assert told[1] == "calls clock({}); what does it give?"
    question, answer, *results, last = fake.bodies[1]["messages"]
    assert question["content"] == "how much?"
    assert [one["function"]["arguments"] for one in answer["tool_calls"]] == ['{"dish": "soup"}', "{}"]
    assert [(one["tool_call_id"], one["content"]) for one in [*results, last]] == [("same", "{}"), ("call_1", "5")]


async def test_a_refused_result_is_typed_again_and_a_retry_drops_half_given_ones():
    calls = call(0, "clock") + call(1, "date")
    conversation = Conversation()
    fake = FakeServer(deltas=lambda number: calls, refuse=lambda number: 400 if number == 1 else None)
    async with serving(fake):
        failed, _ = await piped(fake, "when?\nnine\nmonday\ntuesday\n", conversation)
        assert failed == 1
        assert [message["content"] for message in fake.bodies[2]["messages"][2:]] == ["nine", "tuesday"]
        await piped(fake, "ten\n/retry\n", conversation)
    assert [message["role"] for message in fake.bodies[3]["messages"]] == ["user", "assistant", "tool", "tool"]


async def test_a_call_that_broke_off_is_none():
    """Text that came before it stays."""
    deltas = [{"content": "Well"}, *call(0, "clock", '{"a')]
    conversation = Conversation()
    async with serving(FakeServer(deltas=lambda number: deltas, break_stream=True)) as fake:
        assert (await piped(fake, "when?\n", conversation))[0] == 1
    assert conversation.messages[-1] == {"role": "assistant", "content": "Well"}


def test_a_transcript_has_the_calls(tmp_path):
    conversation = Conversation()
    conversation.take("when?")
    function = {"name": "clock", "arguments": "{}"}
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
    assert conversation.answered(message) == "calls clock({}); what does it give?"
    conversation.take("nine")
    conversation.take(f"/save {tmp_path}/talk.txt")
    assert (tmp_path / "talk.txt").read_text() == "user:\nwhen?\n\nassistant:\nclock({})\n\ntool:\nnine\n\n"


async def test_the_schema_and_the_tools_of_files_go_along(tmp_path):
    (tmp_path / "schema.json").write_text('{"type": "object"}')
    (tmp_path / "tools.json").write_text('[{"type": "function"}]')
    async with serving(FakeServer()) as fake:
        flags = ("--url", fake.url, "--schema", str(tmp_path / "schema.json"), "--tools", str(tmp_path / "tools.json"))
        result = await asyncio.to_thread(maitred_process, "chat", *flags, stdin="hello\n")
    assert result.code == 0
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert (fake.bodies[0]["response_format"], fake.bodies[0]["tools"]) == (form, [{"type": "function"}])


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("schema", None, "No such file"),
        ("schema", "{", "not valid JSON"),
        ("schema", "[]", "a JSON schema is an object, this is list"),
        ("tools", "{}", "tools are an array, as the API takes them, this is dict"),
        ("tools", "\udcff", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_such_thing_is_told_before_anything_starts(tmp_path, flag, text, told):
    path = tmp_path / "shape.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=told) as raised:
        shape_of(ChatOptions(**{flag: str(path)}))
    assert str(raised.value).startswith(f"--{flag} {path}: ")

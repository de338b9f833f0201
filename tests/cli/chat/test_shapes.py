"""Thoughts, calls and schemas in the terminal."""

from __future__ import annotations

import asyncio

import pytest

from maitred.cli.chat import ChatOptions, Conversation
from maitred.cli.chat_session import ScreenTerminal, shape_of, talk
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.flags import UsageError
from tests.cli.chat.test_chat import piped
from tests.cli.fake_server import FakeServer, serving
from tests.cli.running import maitred_process

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

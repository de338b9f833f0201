from __future__ import annotations

import json

import pytest

from maitred.cli.chat import COMMANDS, Conversation, Next


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


def test_two_slashes_begin_a_question_with_one():
    conversation = Conversation()
    assert conversation.take("//etc/passwd is what?").next is Next.ASK
    assert conversation.messages[-1]["content"] == "/etc/passwd is what?"


def test_blank_lines_ask_nothing():
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


def test_unset_show_and_reset():
    conversation = answered("one")
    conversation.take("/set seed 3")
    conversation.take("/set system be kind")
    assert conversation.take("/show").text == "seed = 3\nsystem = be kind\n2 messages"
    conversation.take("/unset seed")
    conversation.take("/unset system")
    conversation.take("/reset")
    assert conversation == Conversation()


def test_the_words_of_other_chats_work_too():
    conversation = answered("one")
    conversation.take("/set seed 3")
    assert conversation.take("/clear").next is Next.READ
    assert (conversation.messages, conversation.settings) == ([], {"seed": 3})
    assert conversation.take("/bye").next is Next.LEAVE


def test_retry_asks_the_last_question_anew():
    conversation = answered("one", "two")
    assert conversation.take("/retry").next is Next.ASK
    assert [message["content"] for message in conversation.messages] == ["one", "answer to one", "two"]


def test_a_failed_question_is_taken_back():
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


def test_help_names_every_command():
    text = Conversation().take("/help").text
    assert all(name in text for name in COMMANDS if name != "/quit")
    assert Conversation().take("/quit").next is Next.LEAVE

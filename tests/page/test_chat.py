"""Talking to the model in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from maitred.model.checkpoint import BUILTIN_NAME
from tests.api.test_tenants import table_of
from tests.fakes_api import FakeReplica, RunningServer, make_model, running_server, says
from tests.page.worlds import FOREVER, page_model, serving
from tests.waiting import until

ANSWER = (
    "# Tonight\n\nWe have **soup** and *fish*, see `card.txt`:\n\n1. one\n2. two\n\n"
    "| dish | price |\n|---|--:|\n| soup | 4 |\n"
)
# a FakeReplica has none to look into, and the browser notes the answer, or that its server has gone meanwhile
NO_ENGINE = ("404", "/admin/live)")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with serving(ANSWER) as running:
        yield running


@pytest.fixture(scope="module")
def talker() -> Iterator[RunningServer]:
    with serving(FOREVER, repeats=True) as running:
        yield running


def ask(page, text: str = "What is there?") -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def test_an_answer_is_shown_as_markdown_with_its_times_and_outlives_a_reload(server, open_page, expect):
    page = open_page(server.url)
    expect(page.locator("#model")).to_have_value("tiny")
    ask(page)
    answer = page.locator(".turn.assistant")
    expect(answer.locator(".facts")).to_contain_text("to the first token")
    expect(answer.locator(".facts")).to_contain_text("tokens/s")
    expect(answer.locator(".facts")).to_contain_text(f"{len(ANSWER.encode()) + 1} tokens")
    expect(answer.locator(".facts")).to_contain_text("in the queue")
    expect(answer.locator("h3")).to_have_text("Tonight")
    expect(answer.locator("strong")).to_have_text("soup")
    expect(answer.locator("em")).to_have_text("fish")
    expect(answer.locator("code")).to_have_text("card.txt")
    expect(answer.locator("ol > li")).to_have_text(["one", "two"])
    expect(answer.locator("tbody td")).to_have_text(["soup", "4"])
    expect(answer.locator("tbody td").first).to_have_css("text-align", "left")
    expect(answer.locator("tbody td").last).to_have_css("text-align", "right")
    expect(page.locator(".turn.user")).to_have_text("What is there?")
    page.reload()
    expect(page.locator(".turn.assistant strong")).to_have_text("soup")
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


TIMING_MS = {"queue": 2.0, "schedule": 1.0, "prefill": 30.0, "decode": 380.0, "stall": 20.0, "ttft": 33.0}


FIGURES = (
    (21, TIMING_MS, r"33 ms to the first token 50 tokens/s 21 tokens 2\.0 ms in the queue"),
    (8, TIMING_MS, r"33 ms to the first token 18 tokens/s 8 tokens 2\.0 ms in the queue"),
    (7, TIMING_MS, r"33 ms to the first token 7 tokens 2\.0 ms in the queue"),
    (21, None, r"[\d.]+ m?s to the first text 21 tokens in [\d.]+ m?s"),
)


def test_figures_are_the_engines_however_the_chunks_come(server, open_page, expect):
    """The whole answer in one piece, as it may come through a proxy; no rate of few tokens, or of what nobody timed."""
    bodies = []
    for tokens, timing_ms, _ in FIGURES:
        usage = {"completion_tokens": tokens} | ({"timing_ms": timing_ms} if timing_ms else {})
        chunks = (
            {"choices": [{"delta": {"content": "all at once"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        )
        bodies.append("".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n")
    page, coming = open_page(server.url), iter(bodies)
    page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=next(coming), content_type="text/event-stream")
    )
    for number, (*_, told) in enumerate(FIGURES):
        ask(page)
        facts = page.locator(".turn.assistant .facts").nth(number)
        expect(facts.locator("span").last).to_contain_text(" in ")
        assert re.fullmatch(told, " ".join(facts.locator("span").all_inner_texts()))


def test_who_reads_further_up_stays_there_when_the_answer_ends(open_page, expect):
    replica = FakeReplica(says("a line\n\n" * 60), tokens_per_item=60)
    with running_server(replica, page_model()) as server:
        page = open_page(server.url, expected=NO_ENGINE)
        ask(page)
        facts = page.locator(".turn.assistant .facts")
        expect(facts).to_contain_text("481 tokens")
        where = "document.getElementById('log').scrollTop"
        assert page.evaluate(where) > 0
        replica.held = True
        ask(page, "More?")
        expect(page.locator(".streaming")).to_have_count(1)
        page.evaluate(f"{where} = 0")
        replica.held = False
        expect(facts.last).to_contain_text("481 tokens")
        assert page.evaluate(where) == 0


@pytest.mark.parametrize("text", ["and so on", ""])
def test_an_answer_that_a_reload_cut_says_so(talker, open_page, expect, text):
    page = open_page(talker.url)
    if not text:  # nothing of the answer comes before the reload
        page.route("**/v1/chat/completions", lambda route: None)
    ask(page)
    expect(page.locator(".streaming .text")).to_contain_text(text)
    for _ in range(2):
        page.reload()
        expect(page.locator(".turn.user")).to_have_text("What is there?")
        expect(page.locator(".turn.assistant .text")).to_contain_text(text)
        expect(page.locator(".turn.assistant .facts")).to_have_text("cut off: the page was left or reloaded")
    until(lambda: talker.replica.state().num_running == 0)


def test_that_the_server_cannot_be_reached_is_told_until_it_is_back(open_page, expect):
    with running_server(FakeReplica(says("Yes."))) as server:
        page = open_page(server.url, expected=(*NO_ENGINE, "ERR_INTERNET_DISCONNECTED"))
        expect(page.locator("#state")).to_have_text("ready")
        page.clock.install()
        page.context.set_offline(True)
        ask(page)
        expect(page.locator("#trouble")).to_have_text("The server cannot be reached.")
        expect(page.locator("#state")).to_have_text("not reachable")
        page.clock.fast_forward(3000)
        expect(page.locator("#trouble")).to_be_visible()
        page.context.set_offline(False)
        until(lambda: page.clock.fast_forward(3000) or page.locator("#trouble").is_hidden())
        expect(page.locator("#state")).to_have_text("ready")
        page.get_by_role("button", name="Send").click()  # the message went back into its field
        expect(page.locator(".turn.assistant .text")).to_have_text("Yes.")


def test_suggestions_are_made_for_the_built_in_model_alone(server, open_page, expect):
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#suggestions")).to_be_hidden()
    model = make_model(names=("another-name",), root=BUILTIN_NAME)
    with running_server(FakeReplica(says("An LLM serving system.")), model) as other:
        page = open_page(other.url, expected=NO_ENGINE)
        expect(page.locator("#suggestions")).to_be_visible()
        page.evaluate("document.getElementById('restaurant').checked = false")  # their tools are a long prompt to it
        page.get_by_role("button", name="What is maitred?").click()
        expect(page.locator(".turn.assistant .text")).to_have_text("An LLM serving system.")


def test_stopping_or_leaving_frees_the_slot_and_the_blocks(talker, open_page, expect):
    page = open_page(talker.url)
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("and so on")
    state = talker.replica.state
    until(lambda: state().num_running == 1 and state().num_blocks_used > 0)
    page.get_by_role("button", name="Stop").click()
    until(lambda: state().num_running == 0 and state().num_blocks_used == 0)
    expect(page.locator(".turn.assistant .facts")).to_contain_text("stopped by you")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    ask(page, "Go on")
    until(lambda: state().num_running == 1)
    page.keyboard.press("Escape")
    until(lambda: state().num_blocks_used == 0)
    expect(page.locator(".facts", has_text="stopped by you")).to_have_count(2)

    page = open_page(talker.url)
    ask(page)
    until(lambda: talker.replica.state().num_running == 1)
    page.close()
    until(lambda: talker.replica.state().num_blocks_used == 0)


def test_enter_during_an_answer_says_that_nothing_was_sent_and_keeps_the_message(talker, open_page, expect):
    page = open_page(talker.url)
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("and so on")
    ask(page, "One more thing")
    expect(page.locator("#busy")).to_contain_text("still being written: stop it (Escape), or wait until it ends")
    expect(page.get_by_label("Message")).to_have_value("One more thing")
    expect(page.locator(".turn.user")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator("#busy")).to_have_text("")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user").last).to_have_text("One more thing")
    page.get_by_role("button", name="Stop").click()


def test_a_new_conversation_has_nothing_of_the_answer_it_stopped(talker, open_page, expect):
    page = open_page(talker.url)
    ask(page)
    expect(page.locator(".turn.assistant .text")).to_contain_text("and so on")
    page.get_by_role("button", name="New conversation").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.reload()
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator(".turn")).to_have_count(0)


def test_what_is_set_is_what_is_asked(open_page, expect):
    replica = FakeReplica(says("Yes."))
    with running_server(replica) as server:
        page = open_page(server.url, expected=NO_ENGINE)
        page.get_by_text("Sampling and system prompt").click()
        for label, value in {
            "Temperature": "0.3",
            "Top-p": "0.9",
            "Top-k": "7",
            "Most tokens": "33",
            "Seed": "5",
        }.items():
            page.get_by_label(label, exact=True).fill(value)
        page.get_by_label("System prompt").fill("Be kind.")
        ask(page, "Hm?")
        expect(page.locator(".turn.assistant .text")).to_have_text("Yes.")
        asked = replica.submitted[0]
        sampling = asked.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, asked.max_tokens) == (0.3, 0.9, 7, 33)
        spoken = bytes(token for token in asked.prompt_token_ids if token < 256).decode()
        assert spoken == "<system>Be kind.<user>Hm?<assistant>"
        page.get_by_label("Temperature", exact=True).fill("-3")
        ask(page, "And now?")
        expect(page.get_by_role("alert").first).to_contain_text("Temperature")
        assert len(replica.submitted) == 1
        page.get_by_role("button", name="As the model has them").click()
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn.assistant")).to_have_count(2)
        until(lambda: len(replica.submitted) > 1)
        assert replica.submitted[1].sampling.temperature == 1.0


def test_a_refusal_is_told_in_words(open_page, expect):
    with running_server(FakeReplica(says("x" * 50))) as server:
        page = open_page(server.url, expected=("404", "400"))
        ask(page, "y" * 2000)
        expect(page.locator("#trouble")).to_contain_text("context")
        expect(page.get_by_label("Message")).to_have_value("y" * 2000)
        expect(page.locator(".turn")).to_have_count(0)
        ask(page, "short")
        expect(page.locator("#trouble")).to_be_hidden()
        expect(page.locator(".turn.assistant .text")).to_have_text("x" * 50)


def test_an_answer_that_breaks_off_keeps_what_came_and_says_why(open_page, expect):
    with running_server(FakeReplica(says("Half of it"), die_after=4)) as server:
        page = open_page(server.url, expected=NO_ENGINE)
        ask(page)
        expect(page.locator("#trouble")).to_contain_text("The engine stopped: out of memory.")
        expect(page.locator(".turn.assistant .text")).to_have_text("Half")
        expect(page.locator(".turn.assistant .facts")).to_contain_text("broke off")


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(open_page, expect):
    with running_server(FakeReplica(says("Hello.")), api_keys=("secret",)) as server:
        page = open_page(server.url, expected=("401", "404"))
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("alert")).to_contain_text("not valid")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Use it").click()
        expect(page.locator("#model")).to_have_value("tiny")
        expect(dialog).to_be_hidden()
        ask(page)
        expect(page.locator(".turn.assistant .text")).to_have_text("Hello.")
        page.reload()
        expect(page.locator("#model")).to_have_value("tiny")
        assert page.evaluate("Object.keys(localStorage).filter((k) => localStorage[k].includes('secret')).length") == 0
        page.get_by_role("button", name="Key").click()
        page.get_by_role("button", name="Forget it").click()
        expect(dialog).to_be_visible()
        assert page.evaluate("sessionStorage.getItem('maitred.key')") is None


def test_a_tenant_has_the_chat_and_an_administrator_the_engine_too(open_page, expect):
    tenants = SimpleNamespace(table=table_of({"guest": {}, "boss": {}}))
    with serving("Good evening.", tenants=tenants) as server:
        guest = open_page(server.url, key="guest", expected=("403",))
        ask(guest)
        expect(guest.locator(".turn.assistant .text")).to_have_text("Good evening.")
        expect(guest.locator("#state")).to_have_text("ready")
        expect(guest.locator("#engine")).to_be_hidden()
        boss = open_page(server.url, key="boss")
        expect(boss.locator("#engine")).to_be_visible()
        expect(boss.locator("#state")).to_have_text("live")


def test_the_keyboard_is_enough(server, open_page, expect):
    page = open_page(server.url)
    expect(page.locator("#model")).to_have_value("tiny")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("one line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user")).to_have_text("one line\nand another")

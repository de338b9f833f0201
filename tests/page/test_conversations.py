"""Conversations that the browser keeps, and answers asked for again."""

from __future__ import annotations

import json

import pytest

from tests.page.scripted import calls, says, scripted, thinks
from tests.page.test_chat import NO_ENGINE, ask


@pytest.fixture
def shop():
    with scripted(says("first"), says("second"), says("third")) as script:
        yield script


def said(page) -> list[str]:
    return page.locator(".turn.user, .turn.assistant .text").all_inner_texts()


def ask_and_wait(page, expect, text: str, answer: str) -> None:
    ask(page, text)
    expect(page.locator(".turn.assistant .text").last).to_have_text(answer)
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()


def shelf(page):
    """The list, opened."""
    page.get_by_role("button", name="Conversations").click()
    return page.locator("#conversations")


def test_an_answer_is_asked_for_again_from_where_it_stands(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "one", "first")
    ask_and_wait(page, expect, "two", "second")
    page.get_by_role("button", name="Answer again").first.click()
    expect(page.locator(".turn.assistant .text")).to_have_text(["third"])
    assert said(page) == ["one", "third"]
    assert shop.bodies[2]["messages"] == [{"role": "user", "content": "one"}]


def test_what_was_said_can_be_edited_and_sent_again(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "one", "first")
    ask_and_wait(page, expect, "two", "second")
    edit = page.get_by_role("button", name="Edit what you said").first
    edit.click()
    page.get_by_label("What you said, edited").press("Escape")
    assert said(page) == ["one", "first", "two", "second"]
    edit.click()
    page.get_by_label("What you said, edited").fill("uno")
    page.get_by_role("button", name="Send again", exact=True).click()
    expect(page.locator(".turn.assistant .text")).to_have_text(["third"])
    page.reload()
    assert said(page) == ["uno", "third"]


def test_an_edit_that_is_refused_changes_nothing_and_is_not_lost(open_page, expect):
    with scripted(says("first"), refuse={2: "this is too long", 3: "this too"}) as script:
        page = open_page(script.url, expected=(*NO_ENGINE, "400"))
        ask_and_wait(page, expect, "one", "first")
        page.get_by_role("button", name="Edit what you said").click()
        page.get_by_label("What you said, edited").fill("x" * 99)
        page.keyboard.press("Enter")
        expect(page.locator("#trouble")).to_have_text("This is too long.")
        expect(page.get_by_label("What you said, edited")).to_have_value("x" * 99)
        page.get_by_role("button", name="Cancel").click()
        assert said(page) == ["one", "first"]
        page.get_by_role("button", name="Answer again").click()
        expect(page.locator("#trouble")).to_have_text("This too.")
        page.reload()
        assert said(page) == ["one", "first"]


def test_conversations_are_listed_opened_and_named(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "about soup", "first")
    page.get_by_role("button", name="New conversation").click()
    ask_and_wait(page, expect, "about tea", "second")
    expect(shelf(page).get_by_role("textbox")).to_have_count(2)
    page.get_by_label("Name of about tea").fill("Tea")
    page.get_by_role("button", name="Open about soup").click()
    assert said(page) == ["about soup", "first"]
    ask_and_wait(page, expect, "more", "third")
    assert len(shop.bodies[2]["messages"]) == 3
    page.reload()
    assert said(page) == ["about soup", "first", "more", "third"]
    names = shelf(page).get_by_role("textbox")
    expect(names.nth(0)).to_have_value("about soup")  # the one that was last talked in
    expect(names.nth(1)).to_have_value("Tea")


def test_another_tab_begins_anew_and_can_open_what_the_first_said(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "one", "first")
    other = page.context.new_page()
    other.goto(shop.url)
    expect(other.locator("#welcome")).to_be_visible()
    shelf(other).get_by_role("button", name="Open one").click()
    assert said(other) == ["one", "first"]


def test_a_conversation_is_deleted_when_asked_twice(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "one", "first")
    button = shelf(page).get_by_role("button", name="Delete one")
    button.click()
    expect(button).to_have_text("Really?")
    button.click()
    expect(page.locator("#conversations-none")).to_be_visible()
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".turn")).to_have_count(0)
    assert page.evaluate("Object.keys(localStorage)") == []
    page.reload()
    expect(page.locator("#welcome")).to_be_visible()


def test_a_conversation_is_exported_as_messages_and_to_read(open_page, expect):
    answers = (thinks("hm hm", "Let me see."), [*says("I call."), *calls("clock", '{"a": "```"}')], says("Nine."))
    with scripted(*answers) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        ask_and_wait(page, expect, "Hello / there", "Let me see.")
        ask(page, "What time?")
        page.get_by_label("Result of clock").fill("nine")
        page.get_by_role("button", name="Send the result").click()
        expect(page.locator(".turn.assistant .text").last).to_have_text("Nine.")
        rows = shelf(page)
        with page.expect_download() as download:
            rows.get_by_role("button", name="JSON").click()
        assert download.value.suggested_filename == "Hello-there.json"
        exported = json.loads(download.value.path().read_text())
        assert exported["messages"][:-1] == script.bodies[2]["messages"]  # as they were sent
        assert exported["messages"][-1] == {"role": "assistant", "content": "Nine."}
        with page.expect_download() as download:
            rows.get_by_role("button", name="Markdown").click()
        assert download.value.suggested_filename == "Hello-there.md"
        text = download.value.path().read_text()
    assert text.startswith("# Hello / there\n\n## You\n\nHello / there\n\n## Answer\n\n> hmhm\n\nLet me see.\n")
    assert (
        '## Answer\n\nI call.\n\nCalls `clock`\n\n````json\n{"a": "```"}\n````\n\n## Result\n\n```\nnine\n```' in text
    )


def test_a_full_store_is_told_and_loses_nothing(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    ask_and_wait(page, expect, "one", "first")
    old = json.dumps({"name": "old", "at": 1, "turns": [{"role": "user", "content": "x" * 3_999_800}]})
    page.evaluate("(old) => localStorage.setItem('maitred.conversation.old', old)", old)
    ask_and_wait(page, expect, "two", "second")
    full = "The browser's store is full, so this is not kept: export it, or delete other conversations."
    expect(page.locator("#trouble")).to_have_text(full)
    assert said(page) == ["one", "first", "two", "second"]
    button = shelf(page).get_by_role("button", name="Delete old")
    button.click()
    button.click()
    page.get_by_role("button", name="Close").click()
    ask_and_wait(page, expect, "three", "third")
    expect(page.locator("#trouble")).to_be_hidden()
    page.reload()
    assert said(page) == ["one", "first", "two", "second", "three", "third"]


def test_without_storage_the_page_talks_and_says_that_it_keeps_nothing(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    forbid = "Object.defineProperty(window, '{}', {{ get() {{ throw new DOMException('', 'SecurityError'); }} }});"
    page.add_init_script(forbid.format("localStorage") + forbid.format("sessionStorage"))
    page.reload()
    ask_and_wait(page, expect, "one", "first")
    expect(page.locator("#trouble")).to_contain_text("This browser keeps no conversations")
    expect(shelf(page).locator("#conversations-none")).to_be_visible()


NOT_OURS = (
    "{",
    "null",
    '{"turns": 7}',
    '{"turns": [null, 1, {"role": "user"}, {"role": "assistant", "content": "yes", "calls": [1]}]}',
)


def test_what_is_kept_but_not_ours_breaks_nothing(shop, open_page, expect):
    page = open_page(shop.url, expected=NO_ENGINE)
    for number, kept in enumerate(NOT_OURS, 1):
        page.evaluate(
            "(kept) => { localStorage['maitred.conversation.x'] = kept; sessionStorage['maitred.open'] = 'x'; }", kept
        )
        page.reload()
        expect(page.locator(".turn")).to_have_count(0)
        ask_and_wait(page, expect, "one", ("first", "second", "third", "third")[number - 1])
        expect(shelf(page).get_by_role("textbox")).to_have_count(1)


def test_leaving_for_another_conversation_keeps_what_had_come(open_page, expect):
    with scripted(says("soup ") * 3, holds_after=2) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        ask(page, "one")
        expect(page.locator(".turn.assistant .text")).to_have_text("soup soup")
        page.get_by_role("button", name="New conversation").click()
        expect(page.locator(".turn")).to_have_count(0)
        shelf(page).get_by_role("button", name="Open one").click()
        expect(page.locator(".turn.assistant .facts")).to_contain_text("stopped by you")
        assert said(page) == ["one", "soup soup"]

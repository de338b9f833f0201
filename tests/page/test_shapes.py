"""Answers that are not only text: calls, thoughts, JSON; and which model gives them."""

from __future__ import annotations

import json
import re
from random import Random

import pytest

from tests.page.scripted import calls, says, scripted, thinks
from tests.page.test_chat import NO_ENGINE, ask
from tests.waiting import until
from training.menu import DISHES
from training.tools import TOOLS, result_of

SHAPE = "Schema, tools and thoughts"


def use_tools(page, own: list[dict] | None = None) -> None:
    page.get_by_text(SHAPE).click()
    page.get_by_label("The restaurant's tools").check()
    if own:
        page.get_by_label("More tools").fill(json.dumps(own))


def function(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def test_a_call_of_the_restaurants_is_run_in_the_page_and_the_answer_goes_on(open_page, expect):
    arguments = '{"items": [{"dish": "soup", "count": 2}, {"dish": "tea", "count": 1}]}'
    with scripted(calls("place_order", arguments), says("That is 13 euros.")) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        use_tools(page)
        ask(page, "Two soups and a tea")
        expect(page.locator(".turn.assistant .text").last).to_have_text("That is 13 euros.")
        card = page.get_by_role("region", name="Call of place_order")
        expect(card.locator("code")).to_have_text([arguments, '{"total": 13}'])
        page.reload()
        expect(card.locator("code").last).to_have_text('{"total": 13}')
    first, second = script.bodies
    assert first["tools"] == second["tools"] == TOOLS
    call = {"id": "call-1", "type": "function", "function": {"name": "place_order", "arguments": arguments}}
    assert second["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": '{"total": 13}'},
    ]


def test_tools_are_off_until_they_are_wanted(open_page, expect):
    with scripted(calls("get_price", '{"dish": "soup"}')) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        ask(page)
        expect(page.get_by_label("Result of get_price")).to_be_visible()  # not run: nobody asked for it
    assert [sorted(body) for body in script.bodies] == [["messages", "model", "stream", "stream_options"]]


def test_calls_at_once_go_on_when_the_reader_has_given_the_last_result(open_page, expect):
    together = calls("get_price", '{"dish": "soup"}') + calls("weather", "", index=1, call_id="call-1")
    together += calls("clock", "{}", index=2, call_id="call-3")
    with scripted(together, says("Fine.")) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        use_tools(page, [function("weather"), function("clock")])
        ask(page)
        card = page.get_by_role("region", name="Call of weather")
        page.get_by_label("Result of clock").fill("half past")
        card.get_by_role("textbox").fill("sun")
        card.get_by_role("button", name="Send the result").click()
        expect(card.locator("code").last).to_have_text("sun")
        expect(page.get_by_label("Result of clock")).to_have_value("half past")
        page.get_by_role("button", name="Send the result").click()
        expect(page.locator(".turn.assistant .text").last).to_have_text("Fine.")
    assert [tool["function"]["name"] for tool in script.bodies[0]["tools"]][-2:] == ["weather", "clock"]
    results = {m["tool_call_id"]: m["content"] for m in script.bodies[1]["messages"] if m["role"] == "tool"}
    assert results == {"call-1": '{"dish": "soup", "price": 5}', "call_1": "sun", "call-3": "half past"}
    assert script.bodies[1]["messages"][1]["tool_calls"][1]["function"]["arguments"] == "{}"


def test_a_result_that_is_refused_can_be_given_again(open_page, expect):
    with scripted(calls("weather", "{}"), [], says("Fine."), refuse={2: "the result is too long"}) as script:
        page = open_page(script.url, expected=(*NO_ENGINE, "400"))
        ask(page)
        page.get_by_label("Result of weather").fill("rain" * 9)
        page.get_by_role("button", name="Send the result").click()
        expect(page.locator("#trouble")).to_have_text("The result is too long.")
        page.get_by_label("Result of weather").fill("rain")
        page.get_by_role("button", name="Send the result").click()
        expect(page.locator(".turn.assistant .text").last).to_have_text("Fine.")
    assert script.bodies[2]["messages"][-1]["content"] == "rain"


def test_a_model_that_only_ever_calls_is_ended_by_asking_the_reader(open_page, expect):
    with scripted(calls("get_price", '{"dish": "soup"}')) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        use_tools(page)
        ask(page)
        expect(page.get_by_label("Result of get_price")).to_be_visible()
        expect(page.get_by_role("button", name="Send", exact=True)).to_be_visible()
        assert len(script.bodies) == 9


def test_who_goes_on_without_a_result_is_understood(open_page, expect):
    with scripted(calls("weather", "{}"), says("As you like.")) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        ask(page)
        expect(page.get_by_label("Result of weather")).to_be_visible()
        ask(page, "Never mind.")
        expect(page.locator(".turn.assistant .text").last).to_have_text("As you like.")
    assert script.bodies[1]["messages"][2] == {
        "role": "tool",
        "tool_call_id": "call-1",
        "content": '{"error": "no result was given"}',
    }


def test_the_page_gives_for_every_call_what_the_model_was_trained_on(open_page, expect):
    rng = Random(7)
    names = [*(dish.name for dish in DISHES), *(dish.plural.upper() for dish in DISHES), "sushi", 'a "b" é\n', 7, None]
    drawn = [("get_price", {"dish": name}) for name in names]
    for _ in range(60):
        items = [{"dish": rng.choice(names), "count": rng.choice([1, 2, 5, 0, 100, 1.5, "2", None])} for _ in range(2)]
        drawn.append(("place_order", {"items": rng.choice([items, items[:1], [], [None], "soup", None])}))
        drawn.append(("book_table", {"people": rng.randint(-1, 12), "time": rng.choice([4, 5, 7, 10, 11, "7", True])}))
    drawn += [(tool["function"]["name"], {}) for tool in TOOLS]
    with scripted(says("")) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        run = """async (drawn) => {
            const { Restaurant } = await import("/static/restaurant.js");
            const house = new Restaurant();
            await house.loaded;
            return drawn.map(([name, given]) => house.run({ name, arguments: JSON.stringify(given) }));
        }"""
        assert page.evaluate(run, drawn) == [result_of(name, given) for name, given in drawn]


def test_thoughts_are_folded_and_told_apart_from_the_answer(open_page, expect):
    with scripted(thinks("well, let me *see*", "Soup."), holds_after=2) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        page.get_by_text(SHAPE).click()
        page.get_by_label("Thoughts").select_option("on")
        ask(page)
        expect(page.locator(".thoughts summary")).to_have_text("Thinking…")
        expect(page.locator(".thinking")).to_have_text("well,let")
        expect(page.locator(".thinking")).to_be_hidden()
        script.go.set()
        expect(page.locator(".turn.assistant .text")).to_have_text("Soup.")
        expect(page.locator(".thoughts summary")).to_have_text(re.compile(r"Thought for \d"))
        expect(page.locator(".facts")).to_contain_text("2 of them thoughts")
        page.locator(".thoughts summary").click()
        expect(page.locator(".thinking")).to_have_text("well,letme*see*")
        ask(page, "Why?")
        until(lambda: len(script.bodies) == 2)
    assert script.bodies[0]["chat_template_kwargs"] == {"enable_thinking": True}
    assert script.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "Soup.",
        "reasoning_content": "well,letme*see*",
    }


def test_a_schema_is_sent_and_its_answer_shown_as_it_is(open_page, expect):
    answer = '{"__name__": "*soup*", "n": 1}'
    with scripted(says(answer), headers={"x-maitred-schema-ignored": "format"}) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        page.get_by_text(SHAPE).click()
        page.get_by_label("JSON schema").fill('{"type": "object", }')
        ask(page)
        expect(page.locator("#trouble")).to_contain_text("JSON schema of the answer: this is no JSON")
        page.get_by_label("JSON schema").fill("[1]")
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator("#trouble")).to_have_text("JSON schema of the answer: a schema is a JSON object.")
        assert not script.bodies
        page.get_by_label("JSON schema").fill('{"type": "object"}')
        page.get_by_role("button", name="Send", exact=True).click()
        expect(page.locator(".turn.assistant .text code")).to_have_text(answer)
        expect(page.locator(".turn.assistant .text .hl-attr").first).to_have_text('"__name__"')
        expect(page.locator(".facts")).to_contain_text("the schema's format ignored")
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}}
    assert script.bodies[0]["response_format"] == form


@pytest.mark.parametrize(
    "viewport", [{"width": 390, "height": 844}, pytest.param({"width": 1280, "height": 800}, marks=pytest.mark.soak)]
)
def test_the_model_that_was_picked_answers_and_stays_picked(open_page, expect, viewport):
    models = [{"id": "small"}, {"id": "large" * 30, "root": "maitred-mini"}]
    with scripted(says("Yes."), models=models) as script:
        page = open_page(script.url, expected=NO_ENGINE, viewport=viewport)
        expect(page.get_by_label("serves")).to_have_value("small")
        expect(page.locator("#suggestions")).to_be_hidden()
        page.get_by_label("serves").select_option(index=1)
        expect(page.locator("#suggestions")).to_be_visible()
        page.reload()
        expect(page.get_by_label("serves")).to_have_value("large" * 30)
        ask(page)
        expect(page.locator(".turn.assistant .text")).to_have_text("Yes.")
        assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert script.bodies[0]["model"] == "large" * 30


def test_code_is_coloured_by_its_language_and_copied_as_it_is(open_page, expect):
    code = 'def f(x):\n    return "<b>" # `'
    text = f"Look:\n\n```python\n{code}\n```\n\n```nothing\nplain\n```"
    with scripted(says(text)) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page)
        block = page.locator(".text .code").first
        expect(block.locator(".hl-keyword")).to_have_text(["def", "return"])
        expect(block.locator("code")).to_have_text(code, use_inner_text=True)
        expect(page.locator(".text .code").last.locator("code > *")).to_have_count(0)
        block.get_by_role("button", name="Copy the code").click()
        expect(block.locator(".done")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == code
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.locator(".actions .done")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_copying_works_without_a_clipboard_for_pages_and_copies_arguments_of_what_only_calls(open_page, expect):
    """As on a plain http address of another machine."""
    with scripted(says("Soup.")) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        ask(page)
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.locator(".actions .done")).to_be_visible()
        page.get_by_label("Message").press("ControlOrMeta+v")
        expect(page.get_by_label("Message")).to_have_value("Soup.")

    with scripted(calls("weather", '{"city": "Oslo"}')) as script:
        page = open_page(script.url, expected=NO_ENGINE)
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        ask(page)
        page.get_by_role("button", name="Copy the answer").click()
        expect(page.locator(".actions .done")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == '{"city": "Oslo"}'

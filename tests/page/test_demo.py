"""`maitred demo` as it is started, in a real browser: every button is pressed, and every answer goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from tests.conftest import ROOT
from tests.waiting import HANGS_S, until

GONE = ("ERR_", "503")


@pytest.fixture
def address() -> Iterator[str]:
    """URL with the administrator's key."""
    words = [sys.executable, "-m", "maitred", "demo", "--port", "0"]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        found = re.search(r"http\S+#key=\S+", process.stderr.readline())
        assert found, process.stderr.read()
        yield found[0]
        process.terminate()
        rest = process.stderr.read()
        assert process.wait(HANGS_S) == 0, rest


def test_every_button_of_the_demonstration_is_pressed_and_no_answer_fails(address, open_page, expect):
    url, key = address.split("/#key=")
    page = open_page(url, expected=("401", *GONE))
    page.goto("about:blank")
    page.goto(address)
    expect(page).to_have_url(f"{url}/")  # the key is the tab's, and not in its history

    def worker(name: str):
        return page.locator("#demo-workers tbody tr").filter(has_text=name)

    def press(words: str) -> None:
        page.get_by_role("button", name=words, exact=True).click()

    def loads() -> list[dict[str, object]]:
        answer = httpx.get(f"{url}/admin/demo", headers={"authorization": f"Bearer {key}"})
        return answer.json()["loads"]

    def all_answer() -> None:
        """Each tenant gets answers from now on, and none failed."""
        before = [load["num_done"] for load in loads()]
        until(lambda: all(load["num_done"] > done for load, done in zip(loads(), before, strict=True)))
        assert [load["error"] for load in loads()] == [None] * 3

    expect(page.locator("#stat-ready")).to_have_text("3")
    expect(worker("replica-1")).to_contain_text("prefill")
    page.get_by_role("button", name="Less documents").evaluate("button => { button.wasPressed = true; }")
    all_answer()
    row = page.locator("#demo-loads tbody tr").filter(has_text="documents")
    assert page.get_by_role("button", name="Less documents").evaluate("button => button.wasPressed"), row.inner_text()
    press("Kill replica-2")
    expect(worker("replica-2")).not_to_contain_text("ready")
    expect(worker("replica-2")).to_contain_text("ready")
    press("Freeze replica-3")
    expect(worker("replica-3")).to_contain_text("frozen")
    all_answer()
    press("Thaw replica-3")
    expect(worker("replica-3")).to_contain_text("ready")
    page.locator("#demo-policy").select_option("vtc")
    expect(page.locator("#demo-said")).to_contain_text("vtc")
    for words, rate in (
        ("More chats", "4 /s"),
        ("Less chats", "2 /s"),
        ("Less documents", "none"),
        ("More documents", "0.5 /s"),
    ):
        press(words)
        expect(page.locator("#demo-loads tbody tr").filter(has_text=words.split()[1])).to_contain_text(rate)
    all_answer()
    press("Put the fleet to sleep")
    expect(worker("replica-1")).to_contain_text("asleep")
    press("Wake the fleet")
    expect(worker("replica-1")).to_contain_text("ready")
    all_answer()

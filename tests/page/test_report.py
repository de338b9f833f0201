"""A report, and what-if on the page, in a real browser."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from random import Random
from typing import Any

import httpx
import pytest

from maitred.cli.simulation import write_report
from maitred.sim.report import column
from maitred.sim.results import Objectives
from tests.page.test_look import PHONE, lightness
from tests.sim.worlds import simulation, workload
from tests.waiting import HANGS_S

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two policies, and tenants one of whom is a hostile name; the second policy is clearly the better one."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    lengths = {"input": "uniform:4,40", "output": "uniform:2,40", "max_tokens": 40}
    world = workload(rate=400.0, num_requests=80, tenants={"a": {}, HOSTILE: {}}, classes={"all": lengths})
    columns = []
    for policy in ("fcfs", "srpt"):
        run = simulation(policy=policy, objectives=Objectives(ttft_s=0.02)).run(world.arrivals())
        waiting, kept = run.queue_length.points(), run.tickets.kept
        columns.append(column(policy, run.to_json(), run.total, queue=waiting, tickets=kept))
    write_report(str(path), "simulation", HOSTILE, {"columns": columns, "baseline": 0})
    return path.as_uri()


@pytest.fixture
def opened(browser: Any, report: str):
    """`opened(**context)`; nothing may have gone wrong, and nothing may have been asked for but the file."""
    complaints: list[str] = []
    pages = []

    def open_(**context: Any) -> Any:
        page = browser.new_context(**context).new_page()
        pages.append(page)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: complaints.extend([request.url] * (request.url != report)))
        page.goto(report)
        return page

    yield open_
    for page in pages:
        page.context.close()
    assert complaints == []


def test_a_report_on_a_phone_answers_to_the_pointer_by_day_and_night(opened, expect):
    page = opened(viewport=PHONE, color_scheme="light")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert lightness(page) > 0.5
    expect(page.locator("h1")).to_have_text("srpt serves this load best.")
    best = page.locator("#side-by-side thead th", has_text="best")
    expect(best).to_contain_text("srpt")
    expect(page.locator("#source")).to_have_text(HOSTILE)
    expect(page.locator("#tenants .group", has_text=HOSTILE)).to_have_count(1)
    assert page.locator("img").count() == 0

    curve = page.locator("#distributions .plot svg").first
    curve.hover(position={"x": 250, "y": 60})
    expect(page.locator("#tip")).to_contain_text(re.compile(r"within [\d.]+ m?s\s*fcfs: [\d.]+%\s*srpt: [\d.]+%"))
    page.locator("#lanes canvas").first.hover(position={"x": 60, "y": 30})
    expect(page.locator("#tip")).to_contain_text("prompt +")

    drawn = "document.querySelector('#lanes canvas').toDataURL()"
    before = page.evaluate(drawn)
    page.get_by_label("Until").fill("100")
    assert page.evaluate(drawn) != before
    before = page.evaluate(drawn)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert lightness(page) < 0.5
    assert page.evaluate(drawn) != before
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert lightness(page) > 0.5
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert lightness(page) < 0.5


def test_tickets_of_one_lane_do_not_overlap(opened):
    rng = Random(7)
    begins = [rng.random() * 20 for _ in range(60)]
    slots = [(begin, begin + rng.random() * rng.choice((1, 9))) for begin in begins]
    lanes = opened().evaluate("(slots) => modules.report.inLanes(slots)", slots)
    for lane in set(lanes):
        own = sorted(slot for slot, at in zip(slots, lanes, strict=True) if at == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(own))
    busiest = max(sum(a <= begin < b for a, b in slots) for begin in begins)
    assert len(set(lanes)) == busiest


def test_requests_of_the_built_in_model_are_replayed_on_one_more_engine(server, open_page, expect):
    def ask(number: int) -> int:
        body = {"model": "maitred-mini", "prompt": f"Name a colour, {number}.", "max_tokens": 60, "ignore_eos": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANGS_S)
        return answer.json()["usage"]["completion_tokens"]

    with ThreadPoolExecutor(4) as pool:  # 10 steps at least for every four of them, drafts or not
        assert set(pool.map(ask, range(48))) == {60}
    page = open_page(server.url, viewport=PHONE, expected=("400",))
    page.get_by_role("button", name="Engine").click()
    expect(page.locator("#whatif option", has_text="srpt")).to_have_count(1)
    said = page.locator("#whatif .said")
    page.get_by_label("Engines").fill("2")
    page.get_by_label("Objective").fill("ttft:soon")
    page.get_by_role("button", name="Replay").click()
    expect(said).to_contain_text("write NAME:TIME, such as ttft:200ms")
    page.get_by_label("Objective").fill("ttft:10s")
    page.get_by_role("button", name="Replay").click()
    expect(page.locator("#whatif .told")).to_contain_text("as it is")
    expect(page.locator("#whatif .basis")).to_contain_text("measured")
    expect(said).to_have_text("")
    expect(page.locator("#whatif thead").first).to_contain_text("what if")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]

"""The live view in a real browser: it shows what the engine does while it does it."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import httpx
import pytest

from maitred.engine.live_view import LiveView, live_view
from tests.cli.top.test_top import with_lanes
from tests.fakes import make_scheduler
from tests.fakes_api import FakeReplica, RunningServer, running_server
from tests.page.scripted import says, scripted
from tests.page.worlds import FOREVER, Saying, serving
from tests.waiting import until


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with serving(FOREVER, repeats=True) as running:
        yield running


@contextmanager
def live_requests(server: RunningServer, count: int, prompt: str = "soup") -> Iterator[None]:
    """So many requests that never end, until the block does."""
    payload = json.dumps({"model": "tiny", "prompt": prompt, "stream": True, "max_tokens": 150_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    try:
        for connection in connections:
            connection.sendall(head % len(payload) + payload)
        yield
    finally:
        for connection in connections:
            connection.close()


def drawing(page, name: str) -> str:
    return page.evaluate(f"document.getElementById('{name}').toDataURL()")


def test_the_view_follows_the_load(server, open_page, expect):
    page = open_page(server.url, reduced_motion="no-preference")
    expect(page.locator("#stat-batch")).to_have_text("0")
    expect(page.locator("#queue")).to_contain_text("Nobody waits")
    idle = {name: drawing(page, name) for name in ("timeline", "blocks")}
    with live_requests(server, 6):
        expect(page.locator("#stat-batch")).to_have_text("4")
        expect(page.locator("#stat-waiting")).to_have_text("2")
        expect(page.locator("#timeline-note")).to_have_text("4 slots of 4 taken")
        expect(page.locator("#queue li")).to_have_count(2)
        expect(page.locator("#queue li").first).to_contain_text("first in line: all 4 slots are taken")
        expect(page.locator("#queue li").last).to_contain_text("behind 1 other by policy fcfs")
        expect(page.locator("#tenants .tenant")).to_contain_text("everybody")
        expect(page.locator("#stat-rate")).not_to_have_text("0")
        expect(page.locator("#blocks-note")).not_to_contain_text("0 of")
        page.get_by_text("As a table").click()
        expect(page.locator("#seats tbody tr")).to_have_count(4)
        expect(page.locator("#seats tbody tr").first).to_contain_text("decode")
        for name, before in idle.items():
            until(lambda name=name, before=before: drawing(page, name) != before)  # type: ignore[misc]
    expect(page.locator("#stat-batch")).to_have_text("0")
    expect(page.locator("#stat-waiting")).to_have_text("0")
    expect(page.locator("#blocks-note")).to_contain_text("0 of 60,000 blocks in use")
    httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "tea", "max_tokens": 3})
    expect(page.locator("#p50-first_token")).not_to_have_text("–")


TILE_PLACES = "[...document.querySelectorAll('#stats > div')].map((t) => JSON.stringify(t.getBoundingClientRect()))"


@pytest.mark.parametrize("width", [390, *(pytest.param(width, marks=pytest.mark.soak) for width in (800, 1300))])
def test_tiles_stay_where_they_are_when_drafts_come(open_page, expect, width):
    drafts = 0
    with serving(FOREVER, repeats=True, num_drafts=lambda request, num_rows: drafts) as server:
        page = open_page(server.url, viewport={"width": width, "height": 800})
        if width < 1080:
            page.get_by_role("button", name="Engine").click()
        with live_requests(server, 1, prompt="x" * 4000):
            expect(page.locator("#stat-batch")).to_have_text("1")
            expect(page.locator("#stat-drafts")).to_have_text("–")
            before = page.evaluate(TILE_PLACES)
            drafts = 3
            expect(page.locator("#stat-drafts")).to_have_text("100")
            assert page.evaluate(TILE_PLACES) == before
            rights = [json.loads(place)["right"] for place in before]
            assert rights[-1] == max(rights)  # the last row is full


def test_drafts_are_shown_where_there_are_some(open_page, expect):
    with serving(FOREVER, repeats=True, num_drafts=lambda request, num_rows: 3) as drafting:
        page = open_page(drafting.url)
        with live_requests(drafting, 1, prompt="x" * 4000):
            expect(page.locator("#stat-drafts")).to_have_text("100")
            page.get_by_text("As a table").click()
            row = page.locator("#seats tbody tr")
            expect(row.locator("td").nth(8)).to_have_text(re.compile("^[1-9]"))
            expect(row.locator("td").nth(9)).to_have_text(re.compile("^[1-9]"))
            page.locator("#blocks").hover(position={"x": 5, "y": 5})
            expect(page.locator("#tip")).to_contain_text(re.compile("([1-9][0-9,]*) of \\1 drafts kept"))


def test_lines_of_the_grid_stay_thin_while_guests_wait(server, open_page, expect):
    page = open_page(server.url)
    with live_requests(server, 6):
        expect(page.locator("#stat-waiting")).to_have_text("2")
        page.evaluate(
            """() => {
                window.widths = { waits: new Set(), others: new Set() };
                const drawn = CanvasRenderingContext2D.prototype.stroke;
                CanvasRenderingContext2D.prototype.stroke = function () {
                    if (this.canvas.id === "timeline") {
                        widths[this.getLineDash().length ? "waits" : "others"].add(this.lineWidth);
                    }
                    return drawn.call(this);
                };
            }"""
        )
        expect_widths = "window.widths.waits.size && [...window.widths.others].join()"
        until(lambda: page.evaluate(expect_widths))
        assert page.evaluate(expect_widths) == "1"


def test_drawings_fit_the_page_after_a_resize_though_no_frame_comes(open_page, expect):
    with serving("Hello.") as server:
        page = open_page(server.url, expected=("503", "ERR_"), viewport={"width": 1300, "height": 900})
        expect(page.locator("#stat-batch")).to_have_text("0")
        server.replica.stop()
        expect(page.locator("#state")).to_have_text("not live")
        page.set_viewport_size({"width": 1100, "height": 700})
        stretched = """() => [...document.querySelectorAll("#engine canvas")].filter((c) => c.width !== c.clientWidth)
            .map((c) => c.id || c.getAttribute("aria-label"))"""
        until(lambda: page.evaluate(stretched) == [])
        assert page.locator("#engine canvas").count() >= 5


def test_blocks_tickets_and_seats_tell_whose_they_are(server, open_page, expect):
    page = open_page(server.url)
    with live_requests(server, 1, prompt="x" * 4000):
        expect(page.locator("#stat-batch")).to_have_text("1")
        page.locator("#blocks").hover(position={"x": 5, "y": 5})
        expect(page.locator("#tip")).to_contain_text("4000 prompt")
        page.locator("#message").hover()
        expect(page.locator("#tip")).to_be_hidden()
    page.get_by_label("Message").fill("What is there?")
    page.keyboard.press("Enter")
    page.get_by_text("As a table").click()
    expect(page.locator("#seats tbody tr")).to_contain_text("yours")
    page.get_by_role("button", name="Stop").click()


def test_the_policy_is_switched_while_requests_run(server, open_page, expect):
    page = open_page(server.url)
    with live_requests(server, 6):
        expect(page.locator("#policy")).to_have_value("fcfs")
        page.locator("#policy").select_option("srpt")
        expect(page.locator("#policy-said")).to_contain_text("From now on by srpt")
        assert httpx.get(f"{server.url}/admin/policy").json()["policy"] == "srpt"
        expect(page.locator("#queue li").last).to_contain_text("by policy srpt")
        page.locator("#message").click()
        httpx.post(f"{server.url}/admin/policy", json={"policy": "priority"})
        expect(page.locator("#policy")).to_have_value("priority")


def test_a_rush_comes_and_goes_home(server, open_page, expect):
    page = open_page(server.url)
    page.get_by_role("button", name="Rush hour").click()
    expect(page.locator("#stat-batch")).to_have_text("4")
    page.get_by_role("button", name="Send them home").click()
    until(lambda: server.replica.state().num_running == 0 and server.replica.state().num_waiting == 0)
    expect(page.get_by_role("button", name="Rush hour")).to_be_visible()


def test_nobody_is_watched_for_when_nobody_looks(server, open_page, expect):
    page = open_page(server.url)
    expect(page.locator("#state")).to_have_text("live")
    in_flight = server.server.app.in_flight
    assert in_flight.num_watched == 1
    page.close()
    until(lambda: in_flight.num_watched == 0)


def test_an_engine_that_dies_is_told_of(open_page, expect):
    with serving("Hello.") as server:
        page = open_page(server.url, expected=("503", "ERR_"))
        expect(page.locator("#state")).to_have_text("live")
        server.replica.stop()
        expect(page.locator("#live-trouble")).to_contain_text("engine")
        expect(page.locator("#state")).to_have_text("not live")
        expect(page.locator("#engine")).to_contain_class("stale")


def test_a_view_that_stands_still_is_not_called_live(server, open_page, expect):
    page = open_page(server.url)
    with live_requests(server, 1):
        expect(page.locator("#stat-batch")).to_have_text("1")
        Saying.may_step.clear()
        try:
            expect(page.locator("#live-trouble")).to_contain_text("No news from the engine for")
            expect(page.locator("#state")).to_have_text("not live")
        finally:
            Saying.may_step.set()
        expect(page.locator("#state")).to_have_text("live")
        expect(page.locator("#live-trouble")).to_be_hidden()


def test_it_stands_still_for_who_asked_for_less_motion(server, open_page, expect):
    page = open_page(server.url, reduced_motion="reduce")
    with live_requests(server, 2):
        expect(page.locator("#stat-batch")).to_have_text("2")
        assert page.evaluate("document.getAnimations().length") == 0


class LaneReplica(FakeReplica):
    """Its engine has tensor models alone."""

    async def live_view(self) -> LiveView:
        return live_view(with_lanes(make_scheduler()), 3.0)


def test_lanes_of_tensor_models_are_shown_where_there_are_any(server, open_page, expect):
    page = open_page(server.url)
    expect(page.locator("#stat-batch")).to_have_text("0")
    expect(page.locator("#lanes-card")).to_be_hidden()
    with running_server(LaneReplica()) as other:
        page = open_page(other.url, expected=("/admin/policy",))
        expect(page.locator("#lanes li")).to_have_count(2)
        first = page.locator("#lanes li").first
        expect(first).to_contain_text("resnet 1")
        expect(first).to_contain_text("3 wait (3 rows) · 2 rows run · 0.0 rows/s")
        expect(first).to_contain_text("all instances run: 2 rows on 0")


def running(id_: str, phase: str, **fields: Any) -> dict[str, Any]:
    times = {"arrived_at": 0.5, "started_at": 1.0, "first_token_at": None, "num_preemptions": 0}
    return {"id": id_, "tenant": "", "phase": phase, **times, **fields}


def frame(now: float, *requests: dict[str, Any], seats: tuple[int, ...] = (0,), waiting: Any = ()) -> dict[str, Any]:
    return {"seats": seats[: len(requests)], "engine": {"now": now, "running": requests, "waiting": list(waiting)}}


@pytest.fixture(scope="module")
def tickets(browser: Any) -> Iterator[Any]:
    """A page from which the script can be asked, with no view of an engine."""
    with scripted(says("")) as script:
        page = browser.new_page()
        page.goto(f"{script.url}/static/tickets.js")
        yield page
        page.close()


def tickets_after(page: Any, *frames: dict[str, Any]) -> list[dict[str, Any]]:
    return page.evaluate(
        """async (frames) => {
            const { Tickets } = await import("/static/tickets.js");
            const tickets = new Tickets();
            frames.forEach((frame) => tickets.take(frame));
            return [...tickets.byId.values()];
        }""",
        list(frames),
    )


def test_a_first_stay_has_the_requests_own_times(tickets):
    (ticket,) = tickets_after(
        tickets,
        frame(2.0, running("a", "prefill")),
        frame(3.0, running("a", "decode", first_token_at=2.25)),
        frame(4.0),
    )
    assert ticket["stints"] == [{"seat": 0, "from": 1.0, "decodeFrom": 2.25, "to": 4.0, "end": "done"}]


def test_a_preempted_request_waits_and_comes_back_to_another_seat(tickets):
    waits = {**running("a", "-", num_preemptions=1), "state": "preempted"}
    told = [
        frame(2.0, running("a", "decode", first_token_at=1.5)),
        frame(3.0, waiting=[waits]),
        frame(4.0, running("a", "prefill", num_preemptions=1), seats=(5,)),
        frame(4.5, running("a", "decode", num_preemptions=1), seats=(5,)),
    ]
    (ticket,) = tickets_after(tickets, *told[:2])
    assert ticket["stints"][0]["end"] == "preempted"
    assert ticket["waiting"] == {"since": 3.0, "state": "preempted", "place": 0}
    (ticket,) = tickets_after(tickets, *told)
    assert ticket["waiting"] is None
    assert ticket["stints"][1] == {"seat": 5, "from": 4.0, "decodeFrom": 4.5, "to": None, "end": None}


def test_while_nobody_looked_nothing_is_made_up(tickets):
    (ticket,) = tickets_after(tickets, frame(2.0, running("a", "decode", first_token_at=1.5)), frame(40.0))
    assert ticket["stints"][0]["to"] == 2.0


def test_two_are_never_in_one_slot_at_a_time_though_all_get_new_slots(tickets):
    """After a failover: the same requests, new slots."""
    a, b, unseen = (running(name, "decode", first_token_at=1.5) for name in "abc")
    told = [
        frame(3.0, a, b, seats=(0, 1)),
        frame(4.0, b, a, seats=(0, 1)),
        frame(5.0),
        frame(6.0, unseen, a, seats=(0, 2)),
    ]
    stints = [stint for ticket in tickets_after(tickets, *told) for stint in ticket["stints"]]
    for slot in (0, 1, 2):
        own = sorted((s["from"], s["to"] or 6.0) for s in stints if s["seat"] == slot)
        assert own
        assert all(before[1] <= after[0] for before, after in pairwise(own)), own


def test_old_tickets_go_and_another_engine_begins_anew(tickets):
    assert tickets_after(tickets, frame(2.0, running("a", "decode")), frame(3.0), frame(100.0)) == []
    (ticket,) = tickets_after(tickets, frame(500.0, running("a", "decode")), frame(2.0, running("b", "prefill")))
    assert (ticket["id"], ticket["number"]) == ("b", 1)

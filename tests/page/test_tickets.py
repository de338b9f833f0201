"""How frames become a request's stays on the timeline: the page's own code, run in the browser."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.page.worlds import serving


@pytest.fixture(scope="module")
def server():
    with serving("Good evening.") as running:
        yield running


def running(id_: str, phase: str, **fields: Any) -> dict[str, Any]:
    times = {"arrived_at": 0.5, "started_at": 1.0, "first_token_at": None, "num_preemptions": 0}
    return {"id": id_, "tenant": "", "phase": phase, **times, **fields}


def frame(now: float, *requests: dict[str, Any], seats: tuple[int, ...] = (0,), waiting: Any = ()) -> dict[str, Any]:
    return {"seats": seats[: len(requests)], "engine": {"now": now, "running": requests, "waiting": list(waiting)}}


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


def test_a_first_stay_has_the_requests_own_times(server, open_page):
    (ticket,) = tickets_after(
        open_page(server.url),
        frame(2.0, running("a", "prefill")),
        frame(3.0, running("a", "decode", first_token_at=2.25)),
        frame(4.0),
    )
    assert ticket["stints"] == [{"seat": 0, "from": 1.0, "decodeFrom": 2.25, "to": 4.0, "end": "done"}]


def test_a_preempted_request_waits_and_comes_back_to_another_seat(server, open_page):
    waits = {**running("a", "-", num_preemptions=1), "state": "preempted"}
    page = open_page(server.url)
    told = [
        frame(2.0, running("a", "decode", first_token_at=1.5)),
        frame(3.0, waiting=[waits]),
        frame(4.0, running("a", "prefill", num_preemptions=1), seats=(5,)),
        frame(4.5, running("a", "decode", num_preemptions=1), seats=(5,)),
    ]
    (ticket,) = tickets_after(page, *told[:2])
    assert ticket["stints"][0]["end"] == "preempted"
    assert ticket["waiting"] == {"since": 3.0, "state": "preempted", "place": 0}
    (ticket,) = tickets_after(page, *told)
    assert ticket["waiting"] is None
    assert ticket["stints"][1] == {"seat": 5, "from": 4.0, "decodeFrom": 4.5, "to": None, "end": None}


def test_while_nobody_looked_nothing_is_made_up(server, open_page):
    (ticket,) = tickets_after(
        open_page(server.url), frame(2.0, running("a", "decode", first_token_at=1.5)), frame(40.0)
    )
    assert ticket["stints"][0]["to"] == 2.0


def test_two_are_never_in_one_slot_at_a_time_though_all_get_new_slots(server, open_page):
    """After a failover: the same requests, new slots."""
    a, b, unseen = (running(name, "decode", first_token_at=1.5) for name in "abc")
    told = [
        frame(3.0, a, b, seats=(0, 1)),
        frame(4.0, b, a, seats=(0, 1)),
        frame(5.0),
        frame(6.0, unseen, a, seats=(0, 2)),
    ]
    stints = [stint for ticket in tickets_after(open_page(server.url), *told) for stint in ticket["stints"]]
    for slot in (0, 1, 2):
        own = sorted((s["from"], s["to"] or 6.0) for s in stints if s["seat"] == slot)
        assert own
        assert all(before[1] <= after[0] for before, after in pairwise(own)), own


def test_old_tickets_go_and_another_engine_begins_anew(server, open_page):
    page = open_page(server.url)
    assert tickets_after(page, frame(2.0, running("a", "decode")), frame(3.0), frame(100.0)) == []
    (ticket,) = tickets_after(page, frame(500.0, running("a", "decode")), frame(2.0, running("b", "prefill")))
    assert (ticket["id"], ticket["number"]) == ("b", 1)

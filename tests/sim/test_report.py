from __future__ import annotations

import itertools
import random
from pathlib import Path
from xml.etree import ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

import maitred.sim
from maitred.sim.report import axis, html_report, in_lanes, svg_report
from maitred.sim.results import SimulatedResults
from tests.sim.worlds import arrival, simulation, workload

SPANS = st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 50)), max_size=60)


def outcomes() -> dict[str, SimulatedResults]:
    world = workload(rate=300.0, num_requests=60, tenants={"a": {}, "<b>": {}})
    return {policy: simulation(policy=policy).run(world.arrivals()) for policy in ("fcfs", "srpt")}


def test_the_picture_is_well_formed_and_needs_nothing_from_elsewhere():
    svg = svg_report(outcomes(), "a & b < c")
    root = ET.fromstring(svg)
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"fcfs: slots", "srpt: slots", "requests waiting, at arrivals", "a & b < c"} <= texts
    html = html_report(outcomes(), "run")
    assert html.count("<svg") == 2
    assert "&lt;b&gt;" in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in html


def test_a_run_of_nothing_can_be_drawn():
    ET.fromstring(svg_report({"fcfs": SimulatedResults()}, "empty"))


@given(SPANS)
def test_tickets_of_one_lane_do_not_overlap(spans):
    slots = [(begin, begin + stay) for begin, stay in spans]
    lanes = in_lanes(slots)
    for i, j in itertools.combinations(range(len(slots)), 2):
        if lanes[i] == lanes[j]:
            assert slots[i][1] <= slots[j][0] or slots[j][1] <= slots[i][0]


def test_who_is_put_out_leaves_its_lane_until_it_is_back():
    arrivals = [arrival("slow", prompt=8, output=60, max_tokens=60, priority=5)]
    arrivals += [arrival(f"quick{i}", at=0.01 + 0.02 * i, output=5, priority=0) for i in range(3)]
    results = simulation(policy="priority", max_num_seqs=1).run(iter(arrivals))
    tickets = {ticket.request_id: ticket for ticket in results.tickets.kept}
    slow = tickets["slow"]
    assert slow.num_preemptions == len(slow.slots) - 1 > 0
    assert (slow.slots[0][0], slow.slots[-1][1]) == (slow.scheduled_at, slow.finished_at)
    assert all(len(tickets[f"quick{i}"].slots) == 1 for i in range(3))
    assert set(in_lanes([slot for ticket in results.tickets.kept for slot in ticket.slots])) == {0}


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_an_axis_holds_its_values_and_has_ticks(values):
    for log in (False, True):
        found = axis(values, log=log)
        assert all(-1e-9 <= found.place(value) <= 1 + 1e-9 for value in values)
        assert found.ticks()


def test_chance_comes_only_from_seeded_generators():
    """The import contract allows `random` in sim/; what may be used of it is the generator."""
    unseeded = {f"random.{name}(" for name in dir(random) if name[0].islower()}
    for path in Path(maitred.sim.__path__[0]).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [call for call in unseeded if call in text], path
        assert "Random()" not in text

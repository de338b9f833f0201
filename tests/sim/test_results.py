from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import maitred.sim
from maitred.sim.report import MAX_POINTS, column
from maitred.sim.results import Series, SimulatedResults, Sketch, jain_index
from tests.sim.worlds import arrival, simulation, workload

TIMES = st.floats(1e-5, 1e4)


@given(st.lists(TIMES, min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_a_thousandth_of_the_value_of_its_rank(values: list[float], share: float):
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    exact = sorted(values)[math.ceil(share * len(values)) - 1]
    assert sketch.quantile(share) == pytest.approx(exact, rel=1.01e-3)
    assert sketch.mean == pytest.approx(sum(values) / len(values))
    assert sketch.largest == max(values)


@given(st.lists(TIMES), st.lists(TIMES))
def test_sketches_add_up(some: list[float], others: list[float]):
    whole, part = Sketch(), Sketch()
    for value in some + others:
        whole.add(value)
    for value in others:
        part.add(value)
    joined = Sketch()
    for value in some:
        joined.add(value)
    joined.merge(part)
    assert joined.to_json()["p90"] == whole.to_json()["p90"]
    assert joined.count == whole.count


def test_sketches_of_nothing_and_fairness():
    sketch = Sketch()
    assert sketch.to_json() == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    sketch.add(0.0, times=3)
    assert sketch.to_json() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}

    assert jain_index([3, 3, 3]) == pytest.approx(1.0)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain_index([]) == 1.0


def test_memory_does_not_grow_with_the_number_of_values():
    sketch, series = Sketch(), Series()
    for i in range(200_000):
        sketch.add(1e-7 * 1.0002**i)
        series.add(i * 0.37, i % 50)
    assert len(sketch._buckets) < 17_400
    assert len(series.points()) <= Series.LIMIT
    assert max(value for _, value in series.points()) == 49


SPREAD = {"mean", "p50", "p90", "p99", "max"}
COUNTS = {"num_finished", "failed", "num_cached_tokens", "num_preemptions"}
GROUP = {"ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "goodput_rps", "slo_attainment", "jain"} | COUNTS


def test_the_json_has_exactly_the_promised_shape():
    asked = [arrival(f"r{i}", at=i * 0.001, tenant=tenant) for i, tenant in enumerate(["a", "b", ""])]
    figures = simulation().run(iter(asked)).to_json()
    assert set(figures) == GROUP | {"tenants", "utilisation"}
    assert set(figures["tenants"]) == {"a", "b", "default"}
    for part in (figures, *figures["tenants"].values()):
        assert set(part) - {"tenants", "utilisation"} == GROUP
        assert all(set(part[name]) == SPREAD for name in GROUP if name.endswith("_s"))
        assert 0 < part["jain"] <= 1
    assert figures["slo_attainment"] == 1.0

    assert SimulatedResults().to_json()["goodput_rps"] == 0.0


def test_a_report_has_the_figures_of_the_results_and_each_curve_ends_at_its_largest_value():
    lengths = {"input": "uniform:4,40", "output": "uniform:2,20", "max_tokens": 40}
    world = workload(rate=300.0, num_requests=400, tenants={"a": {}, "b": {}}, classes={"all": lengths})
    results = simulation(policy="srpt").run(world.arrivals())
    told = column(
        "srpt", results.to_json(), results.total, queue=results.queue_length.points(), tickets=results.tickets.kept
    )
    assert told["figures"] == results.to_json()
    assert len(told["tickets"]) == 400
    for measure, curve in told["curves"].items():
        assert curve[-1] == (pytest.approx(told["figures"][measure]["max"], rel=1e-3), 1.0)
        assert len(curve) <= MAX_POINTS + 1
        for share in ("p50", "p90"):
            below = [value for value, part in curve if part <= float(share[1:]) / 100]
            assert max(below) <= told["figures"][measure][share] * 1.001
    nothing = column("fcfs", SimulatedResults().to_json(), SimulatedResults().total)
    assert nothing["curves"]["ttft_s"] == []


def test_who_is_put_out_leaves_its_lane_until_it_is_back():
    arrivals = [arrival("slow", prompt=8, output=60, max_tokens=60, priority=5)]
    arrivals += [arrival(f"quick{i}", at=0.01 + 0.02 * i, output=5, priority=0) for i in range(3)]
    results = simulation(policy="priority", max_num_seqs=1).run(iter(arrivals))
    tickets = {ticket.request_id: ticket for ticket in results.tickets.kept}
    slow = tickets["slow"]
    assert slow.num_preemptions == len(slow.slots) - 1 > 0
    assert (slow.slots[0][0], slow.slots[-1][1]) == (slow.scheduled_at, slow.finished_at)
    assert all(len(tickets[f"quick{i}"].slots) == 1 for i in range(3))
    slots = sorted(slot for ticket in results.tickets.kept for slot in ticket.slots)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(slots))


def test_chance_comes_only_from_seeded_generators():
    """The import contract allows `random` in sim/; what may be used of it is the generator."""
    unseeded = {f"random.{name}(" for name in dir(random) if name[0].islower()}
    for path in Path(maitred.sim.__path__[0]).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not [call for call in unseeded if call in text], path
        assert "Random()" not in text

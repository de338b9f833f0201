from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.sim.results import Series, SimulatedResults, Sketch, jain_index
from tests.sim.worlds import arrival, simulation

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


def test_an_empty_sketch_knows_nothing_and_zero_is_a_time():
    sketch = Sketch()
    assert sketch.to_json() == {"mean": None, "p50": None, "p90": None, "p99": None, "max": None}
    sketch.add(0.0, times=3)
    assert sketch.to_json() == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_memory_does_not_grow_with_the_number_of_values():
    sketch, series = Sketch(), Series()
    for i in range(200_000):
        sketch.add(1e-7 * 1.0002**i)
        series.add(i * 0.37, i % 50)
    assert len(sketch._buckets) < 17_400
    assert len(series.points()) <= Series.LIMIT
    assert max(value for _, value in series.points()) == 49


def test_jain():
    assert jain_index([3, 3, 3]) == pytest.approx(1.0)
    assert jain_index([1, 0, 0, 0]) == pytest.approx(0.25)
    assert jain_index([]) == 1.0


SPREAD = {"mean", "p50", "p90", "p99", "max"}
COUNTS = {"num_finished", "failed", "num_cached_tokens", "num_preemptions"}
GROUP = {"ttft_s", "itl_s", "e2e_s", "queue_s", "goodput_rps", "slo_attainment", "jain"} | COUNTS


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


def test_a_run_without_requests_is_no_error():
    assert SimulatedResults().to_json()["goodput_rps"] == 0.0

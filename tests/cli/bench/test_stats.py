from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.cli.bench_session import meets, percentile, spread, summarise
from maitred.cli.load import Chunk, LoadFailure, Record
from maitred.core.errors import ConfigError
from maitred.core.objectives import parse_slo


def record(sent_s: float = 0.0, *chunks: tuple[float, int], failure: LoadFailure | None = None) -> Record:
    made = Record(0, due_s=sent_s, sent_s=sent_s, input_tokens=10, asked_tokens=5, failure=failure)
    made.chunks = [Chunk(*chunk) for chunk in chunks]
    made.output_tokens = sum(chunk.num_tokens for chunk in made.chunks)
    made.ended_s = made.chunks[-1].at_s if chunks else sent_s + 1.0
    return made


def test_the_times_of_one_request():
    one = record(1.0, (1.5, 1), (1.6, 1), (2.0, 2))
    assert one.ttft_s == 0.5
    assert one.e2e_s == 1.0
    assert one.tpot_s == pytest.approx(0.5 / 3)
    assert one.itls_s() == pytest.approx([0.1, 0.2, 0.2])
    assert one.stall_s == pytest.approx(0.4)


def test_a_request_of_one_chunk_has_no_time_between_tokens():
    one = record(0.0, (0.5, 3))
    assert (one.tpot_s, one.stall_s, one.itls_s()) == (None, None, [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_exact(values, percent):
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_a_spread_of_nothing_is_none():
    assert spread([None]) is None
    assert spread([2.0, None, 1.0]).mean == 1.5


def test_throughput_counts_from_the_first_send_to_the_last_token():
    summary = summarise([record(1.0, (2.0, 1), (3.0, 3)), record(2.0, (5.0, 4))], {})
    assert summary.duration_s == 4.0
    assert summary.requests_per_s == 0.5
    assert summary.output_tokens_per_s == 2.0
    assert summary.input_tokens_per_s == 5.0


def test_goodput_counts_requests_that_meet_every_objective():
    slos = dict([parse_slo("ttft:200ms"), parse_slo("itl:50ms")])
    good = record(0.0, (0.1, 1), (0.14, 1))
    late = record(0.0, (0.3, 1), (0.34, 1))
    jerky = record(0.0, (0.1, 1), (0.5, 1))
    failed = record(0.0, failure=LoadFailure("timeout", "x"))
    assert [meets(each, slos) for each in (good, late, jerky, failed)] == [True, False, False, False]
    summary = summarise([good, late, jerky, failed, record(0.0, (0.1, 1))], slos)
    assert (summary.num_good, summary.num_failed) == (2, 1)
    assert summary.goodput_per_s == pytest.approx(2 / 1.0)


def test_one_long_gap_among_many_tokens_meets_the_itl_objective():
    steady = [(0.1 + 0.01 * index, 1) for index in range(500)]
    one = record(0.0, *steady, (steady[-1][0] + 0.2, 1))
    assert meets(one, {"itl": 0.05})
    assert not meets(one, {"e2e": 1.0})


def test_errors_are_counted_by_kind_with_an_example():
    records = [record(0.0, failure=LoadFailure("HTTP 429", f"number {number}")) for number in range(3)]
    errors = summarise([*records, record(0.0, failure=LoadFailure("timeout", "t"))], {}).errors
    assert {kind: (error.count, error.example) for kind, error in errors.items()} == {
        "HTTP 429": (3, "number 0"),
        "timeout": (1, "t"),
    }


def test_no_records_are_a_summary_too():
    assert summarise([], {"ttft": 1.0}).goodput_per_s == 0.0


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft:200ms", ("ttft", 0.2)),
        ("e2e:2.5s", ("e2e", 2.5)),
        ("itl: 50 ms", ("itl", 0.05)),
        ("tpot:900us", ("tpot", 9e-4)),
    ],
)
def test_an_objective_has_a_name_and_a_time(text, slo):
    name, bound = parse_slo(text)
    assert (name, bound) == (slo[0], pytest.approx(slo[1]))


@pytest.mark.parametrize("text", ["ttft", "ttft:200", "ttft:fast", "latency:1s", "ttft:-1ms"])
def test_a_wrong_objective_says_how_to_write_it(text):
    with pytest.raises(ConfigError, match="write NAME:TIME, such as ttft:200ms"):
        parse_slo(text)

"""Arrival times, lengths and prompts: seeded draws with the distribution they claim."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.cli.bench_session import meets, percentile, spread, summarise
from maitred.cli.load import (
    WORD_VOCABULARY,
    WORDS,
    Chunk,
    LoadFailure,
    Record,
    Synthetic,
    TraceReplay,
    Vocabulary,
    as_text,
    read_trace,
)
from maitred.cli.simulate_inputs import read_workload
from maitred.core.errors import ConfigError
from maitred.core.objectives import parse_slo
from maitred.sim.synthetic import arrival_times, parse_length
from maitred.sim.traces import BLOCK_TOKENS


def gaps(rate: float, burstiness: float, count: int = 20_000) -> list[float]:
    times = list(itertools.islice(arrival_times(rate, burstiness, random.Random(1)), count))
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness):
    found = gaps(5.0, burstiness)
    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.pvariance(found) == pytest.approx(1 / 25 / burstiness, rel=0.1)


def test_gaps_are_exponential_and_an_infinite_rate_sends_all_at_once():
    found = gaps(2.0, 1.0)
    for at in (0.1, 0.5, 1.0):
        assert sum(gap > at for gap in found) / len(found) == pytest.approx(math.exp(-2 * at), abs=0.015)

    assert set(itertools.islice(arrival_times(math.inf, 1.0, random.Random(1)), 50)) == {0.0}


def lengths(text: str, count: int = 5000) -> list[int]:
    draw, rng = parse_length(text, "--input-len"), random.Random(1)
    return [draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution_and_are_at_least_one():
    assert set(lengths("7", 10)) == {7}
    uniform = lengths("uniform:10,20")
    assert (min(uniform), max(uniform)) == (10, 20)
    assert statistics.fmean(lengths("normal:100,10")) == pytest.approx(100, rel=0.01)
    assert statistics.median(lengths("lognormal:200,0.8")) == pytest.approx(200, rel=0.05)
    assert set(lengths("choice:8,64")) == {8, 64}
    zipf = lengths("zipf:1,100", 50_000)
    assert zipf.count(1) / zipf.count(10) == pytest.approx(10, rel=0.15)
    assert max(zipf) <= 100

    assert min(lengths("normal:1,50")) == 1


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-5", "inf", "nan", "uniform:1", "uniform:9,1", "zipf:1,1e9", "beta:1,2"]
)
def test_a_wrong_length_lists_the_forms(text):
    with pytest.raises(ConfigError, match=r"--input-len is .*; write tokens as one of N, uniform:LOW,HIGH"):
        parse_length(text, "--input-len")


def synthetic(**changes: object) -> Synthetic:
    given: dict[str, object] = {"seed": 1, "vocabulary": Vocabulary(low=100, high=1000)}
    given |= {"input_len": parse_length("32", ""), "output_len": parse_length("uniform:1,9", "")}
    return Synthetic(**(given | changes))


def first(workload: Synthetic, count: int = 20) -> list:
    return list(itertools.islice(workload.requests(), count))


def test_a_seed_is_a_load_whatever_the_rate():
    assert first(synthetic(rate=3.0)) == first(synthetic(rate=3.0))
    assert first(synthetic()) != first(synthetic(seed=2))

    slow, fast = first(synthetic(rate=1.0)), first(synthetic(rate=10.0))
    assert [r.token_ids for r in slow] == [r.token_ids for r in fast]
    assert [r.output_len for r in slow] == [r.output_len for r in fast]
    assert slow[5].due_s == pytest.approx(10 * fast[5].due_s)


def test_prompts_share_the_prefixes_that_were_asked_for_and_nothing_else():
    prompts = first(synthetic(), 200)
    assert len({tuple(request.token_ids[:16]) for request in prompts}) == 200
    assert all(100 <= token < 1000 for request in prompts for token in request.token_ids)

    prompts = first(synthetic(shared_prefix_len=48, num_prefixes=3), 100)
    assert len({tuple(request.token_ids[:48]) for request in prompts}) == 3
    assert len({tuple(request.token_ids[48:]) for request in prompts}) == 100
    assert {len(request.token_ids) for request in prompts} == {80}


def test_text_has_a_word_for_each_token():
    ids = WORD_VOCABULARY.sentence(50, random.Random(1))
    assert [WORDS.index(word) for word in as_text(ids).split()] == ids
    assert len(set(WORDS)) == len(WORDS)


def trace_file(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def line(timestamp: float, input_length: int, *hash_ids: int, output_length: int = 5) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def replay(path: str, **changes: object) -> list:
    given: dict[str, object] = {"lines": read_trace(path), "vocabulary": Vocabulary(low=0, high=900), "seed": 1}
    return list(TraceReplay(**(given | changes)).requests())


def test_times_are_milliseconds_since_the_first_line_scaled(tmp_path):
    path = trace_file(tmp_path, line(9000, 4), line(5000, 4), line(5500, 4))
    assert [request.due_s for request in replay(path)] == [0.0, 0.5, 4.0]
    assert [request.due_s for request in replay(path, rate_scale=2.0)] == [0.0, 0.25, 2.0]
    assert [request.due_s for request in replay(path, paced=False)] == [0.0, 0.0, 0.0]


def test_equal_hash_ids_give_equal_blocks_and_only_those(tmp_path):
    path = trace_file(tmp_path, line(0, 1200, 1, 2, 3), line(1, 1300, 1, 2, 4), line(2, 600, 9, 2))
    one, two, three = (request.token_ids for request in replay(path))
    shared = 2 * BLOCK_TOKENS
    assert one[:shared] == two[:shared]
    assert one[shared:1200] != two[shared:1200]
    assert three[BLOCK_TOKENS:600] == one[BLOCK_TOKENS:600]  # the block's own tokens depend on its id alone
    assert three[:BLOCK_TOKENS] != one[:BLOCK_TOKENS]
    assert [len(one), len(two), len(three)] == [1200, 1300, 600]


def test_what_no_hash_covers_is_unique(tmp_path):
    path = trace_file(tmp_path, line(0, 40), line(1, 40), line(2, BLOCK_TOKENS + 40, 1), line(3, BLOCK_TOKENS + 40, 1))
    prompts = [request.token_ids for request in replay(path)]
    assert prompts[0] != prompts[1]
    assert prompts[2][:BLOCK_TOKENS] == prompts[3][:BLOCK_TOKENS]
    assert prompts[2][BLOCK_TOKENS:] != prompts[3][BLOCK_TOKENS:]


def test_lengths_and_blocks_shrink_together(tmp_path):
    path = trace_file(tmp_path, line(0, 1024, 1, 2, output_length=100), line(1, 1024, 1, 3, output_length=0))
    one, two = replay(path, length_scale=0.1)
    assert (len(one.token_ids), one.output_len, two.output_len) == (102, 10, 1)
    assert one.token_ids[:51] == two.token_ids[:51]
    assert one.token_ids[51:] != two.token_ids[51:]


def test_an_empty_or_missing_trace_is_told(tmp_path):
    for path in (trace_file(tmp_path, ""), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="--trace"):
            read_trace(path)


@pytest.mark.parametrize("bad", ["{", line(1, 0), line(1, 1) | {"priority": -1}, line(1, 1) | {"weight": 0}])
def test_bench_refuses_the_line_that_simulate_refuses(tmp_path, bad):
    path, told = trace_file(tmp_path, line(0, 1), bad), []
    for read in (read_trace, read_workload):
        with pytest.raises(ConfigError) as caught:
            read(path)
        told.append(str(caught.value).removeprefix("--trace "))
    assert told[0] == told[1]


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

    one = record(0.0, (0.5, 3))
    assert (one.tpot_s, one.stall_s, one.itls_s()) == (None, None, [])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentiles_are_exact(values, percent):
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_nothing_has_a_summary_too():
    assert spread([None]) is None
    assert spread([2.0, None, 1.0]).mean == 1.5

    assert summarise([], {"ttft": 1.0}).goodput_per_s == 0.0


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


def test_an_objective_has_a_name_and_a_time():
    told = dict(map(parse_slo, ("ttft:200ms", "e2e:2.5s", "itl: 50 ms", "tpot:900us")))
    assert told == pytest.approx({"ttft": 0.2, "e2e": 2.5, "itl": 0.05, "tpot": 9e-4})


@pytest.mark.parametrize("text", ["ttft", "ttft:200", "ttft:fast", "latency:1s", "ttft:-1ms"])
def test_a_wrong_objective_says_how_to_write_it(text):
    with pytest.raises(ConfigError, match="write NAME:TIME, such as ttft:200ms"):
        parse_slo(text)

"""Arrival times, lengths and prompts: seeded draws with the distribution they claim."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest

from maitred.cli.load import WORD_VOCABULARY, WORDS, Synthetic, Vocabulary, as_text
from maitred.core.errors import ConfigError
from maitred.sim.synthetic import arrival_times, parse_length


def gaps(rate: float, burstiness: float, count: int = 20_000) -> list[float]:
    times = list(itertools.islice(arrival_times(rate, burstiness, random.Random(1)), count))
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness):
    found = gaps(5.0, burstiness)
    assert statistics.fmean(found) == pytest.approx(1 / 5, rel=0.05)
    assert statistics.pvariance(found) == pytest.approx(1 / 25 / burstiness, rel=0.1)


def test_poisson_gaps_are_exponential():
    found = gaps(2.0, 1.0)
    for at in (0.1, 0.5, 1.0):
        assert sum(gap > at for gap in found) / len(found) == pytest.approx(math.exp(-2 * at), abs=0.015)


def test_an_infinite_rate_sends_all_at_once():
    assert set(itertools.islice(arrival_times(math.inf, 1.0, random.Random(1)), 50)) == {0.0}


def lengths(text: str, count: int = 5000) -> list[int]:
    draw, rng = parse_length(text, "--input-len"), random.Random(1)
    return [draw(rng) for _ in range(count)]


def test_lengths_follow_their_distribution():
    assert set(lengths("7", 10)) == {7}
    uniform = lengths("uniform:10,20")
    assert (min(uniform), max(uniform)) == (10, 20)
    assert statistics.fmean(lengths("normal:100,10")) == pytest.approx(100, rel=0.01)
    assert statistics.median(lengths("lognormal:200,0.8")) == pytest.approx(200, rel=0.05)
    assert set(lengths("choice:8,64")) == {8, 64}
    zipf = lengths("zipf:1,100", 50_000)
    assert zipf.count(1) / zipf.count(10) == pytest.approx(10, rel=0.15)
    assert max(zipf) <= 100


def test_a_length_is_at_least_one():
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


def test_the_same_seed_is_the_same_load_and_another_is_not():
    assert first(synthetic(rate=3.0)) == first(synthetic(rate=3.0))
    assert first(synthetic()) != first(synthetic(seed=2))


def test_changing_the_rate_leaves_the_prompts_alone():
    slow, fast = first(synthetic(rate=1.0)), first(synthetic(rate=10.0))
    assert [r.token_ids for r in slow] == [r.token_ids for r in fast]
    assert [r.output_len for r in slow] == [r.output_len for r in fast]
    assert slow[5].due_s == pytest.approx(10 * fast[5].due_s)


def test_prompts_differ_from_the_first_block_on():
    prompts = first(synthetic(), 200)
    assert len({tuple(request.token_ids[:16]) for request in prompts}) == 200
    assert all(100 <= token < 1000 for request in prompts for token in request.token_ids)


def test_shared_prefixes_are_shared_and_the_rest_is_not():
    prompts = first(synthetic(shared_prefix_len=48, num_prefixes=3), 100)
    assert len({tuple(request.token_ids[:48]) for request in prompts}) == 3
    assert len({tuple(request.token_ids[48:]) for request in prompts}) == 100
    assert {len(request.token_ids) for request in prompts} == {80}


def test_text_has_a_word_for_each_token():
    ids = WORD_VOCABULARY.sentence(50, random.Random(1))
    assert [WORDS.index(word) for word in as_text(ids).split()] == ids
    assert len(set(WORDS)) == len(WORDS)

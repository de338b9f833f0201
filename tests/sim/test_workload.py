from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ConfigError
from maitred.sim.synthetic import SyntheticWorkload, parse_spec
from maitred.sim.traces import BLOCK_TOKENS, TraceWorkload, parse_trace
from maitred.sim.workload import block_hashes, next_turn, request_of
from tests.sim.worlds import workload


def trace(*lines: object) -> TraceWorkload:
    return TraceWorkload(
        parse_trace([line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines], "t")
    )


def line(timestamp: float = 0, input_length: int = 8, output_length: int = 4, **fields: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, **fields}


# ---- traces

IDS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(ids_a=IDS, ids_b=IDS, short_a=st.integers(0, 511), block_size=st.sampled_from([4, 16, 24, 512, 1024]))
def test_blocks_are_shared_exactly_where_the_ids_say(ids_a, ids_b, short_a, block_size):
    """Oracle: block i is shared when all ids up to the one that holds its last token are equal."""
    lengths = [len(ids_a) * BLOCK_TOKENS - short_a, len(ids_b) * BLOCK_TOKENS]
    world = trace(line(0, lengths[0], hash_ids=ids_a), line(1, lengths[1], hash_ids=ids_b))
    a, b = (request_of(arrival, block_size).block_hashes for arrival in world.arrivals())
    assert (len(a), len(b)) == tuple(length // block_size for length in lengths)
    for i in range(min(len(a), len(b))):
        needed = ((i + 1) * block_size - 1) // BLOCK_TOKENS + 1
        assert (a[i] == b[i]) == (ids_a[:needed] == ids_b[:needed])
    assert len(set(a)) == len(a)


def test_what_no_id_covers_and_what_other_tenants_ask_is_shared_with_nobody():
    world = trace(*(line(i, 1024, hash_ids=[5], tenant=tenant) for i, tenant in enumerate(["a", "a", "b"])))
    first, same, other = (request_of(arrival, 16).block_hashes for arrival in world.arrivals())
    assert first[:32] == same[:32]
    assert not set(first[32:]) & set(same)
    assert not set(first) & set(other)


def test_a_trace_is_put_in_order_begins_at_zero_and_may_go_faster():
    arrivals = list(trace(line(3000), line(1000, priority=2, tenant="x", deadline_s=5.0), line(2000)).arrivals())
    assert [arrival.at for arrival in arrivals] == [0.0, 1.0, 2.0]
    assert (arrivals[0].priority, arrivals[0].tenant, arrivals[0].deadline_s) == (2, "x", 5.0)
    assert arrivals[0].max_tokens == 1024

    lines = parse_trace([json.dumps(line(t)).encode() for t in (0, 4000)], "t")
    assert [arrival.at for arrival in TraceWorkload(lines, 4.0).arrivals()] == [0.0, 1.0]

    with pytest.raises(ConfigError, match="holds no requests"):
        parse_trace([b"\n"], "t")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (b"{oops", "t:2:"),
        (b'{"timestamp": 1, "input_length": 3}', "output_length"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 3}', "lengths are 0 and 3"),
        (b'{"timestamp": 1, "input_length": 4, "output_length": 3, "deadline_s": 0}', "deadline_s is 0"),
        (b'{"timestamp": 1, "input_length": 4, "output_length": 3, "weight": -1}', "weight is -1"),
        (b'{"timestamp": 1, "input_length": 4, "output_length": 3, "priority": -1}', "priority is -1"),
        (b'{"timestamp": "x", "input_length": 4, "output_length": 3}', "timestamp"),
    ],
)
def test_a_bad_line_is_named_by_its_number(bad: bytes, told: str):
    with pytest.raises(ConfigError, match="t:2: ") as error:
        trace(line(), bad)
    assert told in str(error.value)


# ---- descriptions


@pytest.mark.parametrize("kind", ["poisson", "gamma", "diurnal"])
def test_the_rate_is_what_was_asked_for(kind: str):
    world = workload(kind=kind, rate=20.0, burstiness=0.3, period_s=50.0, num_requests=4000)
    arrivals = list(world.arrivals())
    assert len(arrivals) == 4000
    assert len(arrivals) / arrivals[-1].at == pytest.approx(20.0, rel=0.1)
    assert all(a.at <= b.at for a, b in itertools.pairwise(arrivals))


def test_bursts_are_burstier_and_a_day_has_a_night():
    def variation(**spec: object) -> float:
        times = [arrival.at for arrival in workload(rate=10.0, num_requests=3000, **spec).arrivals()]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert variation(kind="gamma", burstiness=0.2) > 3 * variation(kind="poisson")
    tide = Counter(
        int(a.at / 50) % 2 for a in workload(kind="diurnal", rate=10, period_s=100, num_requests=4000).arrivals()
    )
    halves = [
        int((a.at % 100) // 25) in (1, 2)
        for a in workload(kind="diurnal", rate=10, period_s=100, num_requests=4000).arrivals()
    ]
    assert tide[0] > 0
    assert sum(halves) > 2 * (len(halves) - sum(halves))


def test_same_seed_same_workload_and_classes_do_not_disturb_each_other():
    def times(**spec: object) -> list[float]:
        return [arrival.at for arrival in workload(num_requests=50, **spec).arrivals()]

    assert list(workload(num_requests=50).arrivals()) == list(workload(num_requests=50).arrivals())
    assert times() != times(seed=1)
    assert times() == times(classes={"other": {"output": "uniform:1,900"}})


def test_shares_weights_and_tenants_are_drawn_as_described():
    world = workload(
        num_requests=2000,
        classes={"chat": {"share": 3}, "job": {"share": 1, "tenant": "own", "priority": 2}},
        tenants={"a": {"share": 1, "weight": 5}, "b": {"share": 1, "priority": 1}},
    )
    arrivals = list(world.arrivals())
    counts = Counter(arrival.tenant for arrival in arrivals)
    assert counts["own"] == pytest.approx(500, rel=0.2)
    assert counts["a"] == pytest.approx(counts["b"], rel=0.2)
    assert {(a.tenant, a.weight, a.priority) for a in arrivals} == {("own", 1.0, 2), ("a", 5, None), ("b", 1.0, 1)}


def test_conversations_and_shared_prefixes_share_their_blocks_and_no_others():
    world = workload(num_requests=6, classes={"chat": {"turns": 6, "input": 10, "output": 7, "prefix_tokens": 9}})
    (first,) = world.arrivals()
    turns = [first]
    while (following := next_turn(turns[-1], ended_at=0.0)) is not None:
        turns.append(following)
    assert [turn.prompt_tokens for turn in turns] == [19 + 17 * i for i in range(6)]
    assert [turn.request_id for turn in turns[:3]] == ["chat-0", "chat-0#2", "chat-0#3"]
    hashes = [block_hashes(turn, 0, turn.prompt_tokens // 4, 4) for turn in turns]
    for shorter, longer in itertools.pairwise(hashes):
        assert longer[: len(shorter)] == shorter

    world = workload(num_requests=40, classes={"chat": {"prefix_tokens": 32, "num_prefixes": 2, "input": 32}})
    hashes = [request_of(arrival, 16).block_hashes for arrival in world.arrivals()]
    assert len({tuple(h[:2]) for h in hashes}) == 2
    assert len({h[2] for h in hashes}) == 40


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"knid": "poisson"}, "did you mean kind?"),
        ({"kind": "weekly"}, "choose one of poisson, gamma, diurnal"),
        ({"rate": 0}, "rate is 0"),
        ({"rate": "fast"}, "rate is 'fast'; it must be float"),
        ({"classes": {"chat": {"inptu": 4}}}, "did you mean input?"),
        ({"classes": {"chat": {"input": "uniform:4"}}}, "classes.chat"),
        ({"classes": [1]}, "must be a mapping"),
        ({"classes": {}}, "at least one class"),
        ({"tenants": {"a": {"weight": 0}}}, "tenants.a: weight is 0"),
        ({"num_requests": True}, "num_requests is True"),
    ],
)
def test_a_slip_in_a_description_is_named(spec: dict[str, object], told: str):
    with pytest.raises(ConfigError, match="file: ") as error:
        SyntheticWorkload(parse_spec({"seed": 1, **spec}, "file: x"))
    assert told in str(error.value)


AZURE = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2024-05-10 00:00:00.009930+00:00,396,109
2023-11-16 18:15:47.1805900,4808,10
2023-11-16 18:15:48.0000000,12,0
"""
BURST = b"""\xef\xbb\xbfTimestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5,,1.5,ChatGPT,472,18,490,API log
45,1,2.5,"ChatGPT",1087,230,1317,"Conversation log, cut"
60,1,2.5,GPT-4,0,0,0,API log
"""


def test_public_csv_traces_are_read_by_their_columns_without_what_failed():
    azure, burst = (TraceWorkload(parse_trace(text.splitlines(), "t")).arrivals() for text in (AZURE, BURST))
    lengths = [(a.prompt_tokens, a.output_tokens) for a in azure]
    assert lengths == [(374, 44), (4808, 10), (396, 109)]
    assert [(a.at, a.prompt_tokens, a.output_tokens) for a in burst] == [(0.0, 472, 18), (40.0, 1087, 230)]
    first, second, _ = parse_trace(AZURE.splitlines(), "t")
    assert second.timestamp - first.timestamp == 500.0


def test_the_unit_of_time_and_the_size_of_blocks_can_be_said():
    lines = [json.dumps(line(at, 1000, hash_ids=list(range(63)))).encode() for at in (0.5, 90.25)]
    parsed = parse_trace(lines, "t", unit="s", block_tokens=16)
    first, second = TraceWorkload(parsed, block_tokens=16).arrivals()
    assert second.at == 89.75
    assert first.spans[-1].end == 63 * 16


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        (
            [line(0, 1000, hash_ids=[1, 2, 3])],
            "t:1: 3 hash_ids are 1536 tokens in blocks of 512, and input_length is 1000",
        ),
        ([line(0, 8), line(0, 8, output_length=20, max_tokens=10)], "t:2: max_tokens is 10, and output_length is 20"),
        ([BURST.replace(b"490", b"491")], "t:2: Total tokens is 491, the sum of both is 490"),
        ([BURST.replace(b"45,1", b"soon,1")], "t:3: Invalid isoformat string: 'soon'; a row needs Timestamp, Request"),
        ([BURST.replace(b",API log", b"")], "t:2: .* a row needs Timestamp, Request tokens and Response tokens"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused_with_both_numbers(lines, told):
    text = b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)
    with pytest.raises(ConfigError, match=told):
        parse_trace(text.splitlines(), "t")

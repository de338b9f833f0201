"""Batches that wait for one another, and KV without pages, around the scheduler that serves."""

from __future__ import annotations

from typing import Any

import pytest

from maitred.core.step import ScheduledRow
from maitred.sim.baselines import Baseline, shape_without_kv
from maitred.sim.results import SimulatedResults
from maitred.sim.workload import Turn
from tests.sim.worlds import arrival, simulation


def run(*arrivals: Any, batching: str = "continuous", kv_layout: str = "paged", **fields: Any) -> SimulatedResults:
    baseline = Baseline(batching=batching, kv_layout=kv_layout, batch_delay_s=0.5)
    return simulation(baseline=baseline, **fields).run(iter(arrivals))


def stays(results: SimulatedResults) -> dict[str, tuple[float, float]]:
    return {one.request_id: (round(one.scheduled_at, 3), round(one.finished_at, 3)) for one in results.tickets.kept}


def test_a_static_batch_begins_when_it_is_full_and_all_of_it_end_together():
    told = stays(
        run(
            arrival("short", 0.0, prompt=3, output=2),
            arrival("long", 1.0, prompt=9, output=12),
            arrival("late", 1.001, output=1),
            batching="static",
            max_num_seqs=2,
        )
    )
    assert told["short"][0] == told["long"][0] == 1.0
    assert told["short"][1] == told["long"][1]
    assert told["late"][0] >= told["long"][1]  # and it begins though nothing more comes


def test_a_dynamic_batch_begins_when_its_first_request_has_waited_long_enough():
    told = stays(run(arrival("a"), arrival("b", 0.25), arrival("c", 9.0), batching="dynamic", max_num_seqs=3))
    assert told["a"][0] == told["b"][0] == 0.5
    assert told["c"][0] == 9.0


def test_padding_takes_time_and_room_and_is_in_no_clients_figure():
    results = run(
        arrival("short", prompt=4, output=1), arrival("long", prompt=40, output=16), batching="static", max_num_seqs=2
    )
    alone = run(arrival("a", prompt=40, output=16), arrival("b", prompt=40, output=16), max_num_seqs=2)
    assert results.num_row_steps == alone.num_row_steps
    assert results.total.tpot_s.count == 1  # of the answer of several tokens
    assert results.total.num_tokens == 2 * 40 + 16 + 1  # a prompt is computed as padded, an answer has its own tokens


def test_batches_of_like_lengths_are_the_policys_order():
    mixed = [arrival(f"{i}", 0.0, output=(2, 30)[i % 2], max_tokens=30) for i in range(8)]
    by_arrival, by_length = (run(*mixed, batching="static", policy=policy) for policy in ("fcfs", "sjf"))
    assert by_length.duration_s < 0.7 * by_arrival.duration_s


def test_a_contiguous_reservation_holds_all_that_the_client_allows():
    many = [arrival(f"{i}", prompt=8, output=4, max_tokens=25) for i in range(6)]
    paged, contiguous = (
        simulation(baseline=Baseline(kv_layout=layout), num_blocks=16, max_num_seqs=6)
        for layout in ("paged", "contiguous")
    )
    for one in (paged, contiguous):
        one.run(iter(many))
        one.scheduler.check_invariants()
    assert contiguous.results.num_steps > paged.results.num_steps  # two at once: 8 blocks each, of 4
    assert paged.kv_waste.share < 0.25
    assert contiguous.kv_waste.share > 0.6


def test_without_a_cache_a_token_costs_all_before_it():
    decode, chunk = ScheduledRow("a", 99, 1, True), ScheduledRow("b", 0, 50, False)
    shape = shape_without_kv([decode, chunk])
    assert (shape.prefill_tokens, shape.decode_tokens, shape.context_tokens, shape.samples) == (100, 0, 0, 1)
    slow, quick = (run(arrival("a", prompt=64, output=32), kv_layout=layout) for layout in ("none", "paged"))
    assert slow.duration_s > quick.duration_s
    assert slow.num_row_steps == quick.num_row_steps


@pytest.mark.parametrize("batching", ["static", "dynamic"])
def test_conversations_and_requests_that_never_fit_end_too(batching: str):
    turn = Turn(think_s=0.1, new_tokens=4, output_tokens=3, max_tokens=8)
    talks = (arrival(f"{i}", 0.1 * i, turns=(turn,)) for i in range(5))
    results = run(arrival("huge", prompt=900), *talks, batching=batching, max_num_seqs=4)
    assert results.total.num_finished == 10
    assert results.total.failures == {"too_long": 1}

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError
from maitred.core.request import NO_TERMS, RequestSpec, RequestState
from maitred.decisions.codec import Header
from maitred.engine.traffic import ReplayAsked, Traffic, TrafficRing, WhatIf
from maitred.kv.pages import groups_of
from maitred.scheduler.engine_core import EngineCore
from maitred.sim.engine import Simulation
from maitred.sim.results import SimulatedResults
from maitred.sim.whatif import what_if
from maitred.sim.workload import chain
from tests.fakes import FakeExecutor, make_scheduler
from tests.sim.worlds import COSTS, arrival, setup

NUM_REQUESTS = 60
SLOTS, BLOCKS, BLOCK_SIZE = 4, 256, 4


def ring() -> TrafficRing:
    made = setup(max_num_seqs=SLOTS, num_blocks=BLOCKS)
    return TrafficRing(Header(made.scheduler, BLOCKS, BLOCK_SIZE, True), kv_bytes_per_token=64.0, num_layers=2)


def recorded(num_requests: int = NUM_REQUESTS, **fields: Any) -> Traffic:
    """Two tenants share an engine that is too slow for them; each has a system prompt."""
    kept, prefixes = ring(), {tenant: chain([tenant], 24) for tenant in "ab"}
    arrivals = [
        arrival(
            f"r{i}", at=0.002 * i, prompt=30, output=4 + 9 * (i % 3), tenant="ab"[i % 2], spans=prefixes["ab"[i % 2]]
        )
        for i in range(num_requests)
    ]
    world = setup(max_num_seqs=SLOTS, num_blocks=BLOCKS, **fields)
    Simulation(world, COSTS, SimulatedResults(), listener=kept).run(iter(arrivals))
    return msgspec.msgpack.decode(kept.recording(), type=Traffic)


def figures(asked: WhatIf, *engines: Traffic) -> dict[str, dict]:
    told = what_if(ReplayAsked(asked, list(engines or (recorded(),))))
    return {each["name"]: each["figures"] for each in told["columns"]}


def test_a_replay_as_it_is_gives_what_was_measured_tenant_by_tenant():
    told = figures(WhatIf())
    measured, replayed = told["measured"], told["as it is"]
    assert told["what if"] == replayed
    assert measured["num_finished"] == replayed["num_finished"] == NUM_REQUESTS
    assert measured["num_cached_tokens"] == replayed["num_cached_tokens"] > 0
    for one, other in ((measured, replayed), *((measured["tenants"][t], replayed["tenants"][t]) for t in "ab")):
        for measure in ("ttft_s", "tpot_s", "e2e_s", "queue_s"):
            assert other[measure]["mean"] == pytest.approx(one[measure]["mean"], rel=0.03), measure


def test_drafts_are_accepted_as_often_as_they_were():
    told = figures(WhatIf(), recorded(acceptance=0.7))
    plain = figures(WhatIf(), recorded())
    mean = told["measured"]["e2e_s"]["mean"]
    assert mean < 0.9 * plain["measured"]["e2e_s"]["mean"]
    assert told["as it is"]["e2e_s"]["mean"] == pytest.approx(mean, rel=0.1)


@pytest.mark.parametrize(
    "asked", [WhatIf(max_num_seqs=8), WhatIf(replicas=2), WhatIf(prefill_workers=1)], ids=["slots", "engine", "prefill"]
)
def test_more_room_shortens_the_queue(asked: WhatIf):
    told = figures(asked)
    assert told["what if"]["num_finished"] == NUM_REQUESTS
    assert told["what if"]["queue_s"]["mean"] < 0.9 * told["as it is"]["queue_s"]["mean"]
    assert 0 < told["what if"]["utilisation"] <= 1


def test_layers_with_a_window_are_replayed_with_their_pages():
    """Three of four layers look back on 8 tokens: 128 pages hold 4 requests of 48 tokens, and as whole blocks 2."""
    groups, pages = groups_of([8, 8, 8, None], 64), 128
    assert groups is not None
    paged = {"num_blocks": pages, "groups": groups, "num_pages": pages}
    world = setup(max_num_seqs=SLOTS, **paged)
    header = Header(world.scheduler, block_size=BLOCK_SIZE, enable_prefix_caching=True, **paged)
    kept = TrafficRing(header, kv_bytes_per_token=64.0, num_layers=4)
    arrivals = [arrival(f"r{i}", at=0.002 * i, prompt=40, output=8) for i in range(NUM_REQUESTS)]
    Simulation(world, COSTS, SimulatedResults(), listener=kept).run(iter(arrivals))
    engine = msgspec.msgpack.decode(kept.recording(), type=Traffic)
    told = figures(WhatIf(), engine)
    blocks = msgspec.structs.replace(header, num_blocks=pages // 4, groups=None, num_pages=0)
    whole = figures(WhatIf(), msgspec.structs.replace(engine, header=blocks))
    measured, replayed = told["measured"], told["as it is"]
    assert measured["num_finished"] == replayed["num_finished"] == NUM_REQUESTS
    assert replayed["e2e_s"]["mean"] == pytest.approx(measured["e2e_s"]["mean"], rel=0.03)
    assert whole["as it is"]["queue_s"]["mean"] > 1.2 * replayed["queue_s"]["mean"]
    apart = figures(WhatIf(prefill_workers=1), engine)["what if"]  # which exchange whole blocks
    assert apart["num_finished"] == NUM_REQUESTS


def test_another_policy_orders_anew_and_objectives_count():
    told = figures(WhatIf(policy="srpt", slo=("e2e:60ms",)))
    assert told["what if"]["e2e_s"]["mean"] < told["as it is"]["e2e_s"]["mean"]
    assert 0 < told["as it is"]["slo_attainment"] < told["what if"]["slo_attainment"] < 1


def test_engines_alike_are_replayed_as_so_many():
    told = figures(WhatIf(), recorded(), recorded())
    assert told["measured"]["num_finished"] == told["as it is"]["num_finished"] == 2 * NUM_REQUESTS


def test_only_the_minutes_asked_for_are_replayed():
    traffic = recorded()
    late = [
        msgspec.structs.replace(
            each,
            spec=msgspec.structs.replace(each.spec, arrived_at=each.spec.arrived_at + 600),
            ended_at=each.ended_at + 600,
        )
        for each in traffic.requests[:7]
    ]
    both = msgspec.structs.replace(traffic, requests=[*traffic.requests, *late])
    assert figures(WhatIf(minutes=1), both)["what if"]["num_finished"] == 7


@pytest.mark.parametrize(
    ("num_requests", "asked", "told"),
    [
        (0, WhatIf(), "no traffic yet: no request has ended"),
        (3, WhatIf(), "not enough to fit a cost model to: "),
        (NUM_REQUESTS, WhatIf(policy="fcsf"), "did you mean fcfs?"),
        (NUM_REQUESTS, WhatIf(slo=("ttft:soon",)), "ttft:200ms"),
    ],
)
def test_what_cannot_be_replayed_is_told_in_a_line(num_requests: int, asked: WhatIf, told: str):
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")) as error:
        figures(asked, recorded(num_requests))
    assert "\n" not in str(error.value)


def test_the_ring_is_bounded_and_has_no_token_text_or_key():
    kept = ring()
    EngineCore(make_scheduler(), FakeExecutor(lambda request_id, position: 1), ManualClock(), kept)
    hashes = [number.to_bytes(32, "big") for number in range(4000)]
    terms = msgspec.structs.replace(NO_TERMS, tenant="a", key_id="secret")
    for number in range(400):
        spec = RequestSpec(
            request_id=f"r{number}",
            arrived_at=float(number),
            num_prompt_tokens=3,
            max_tokens=5,
            prompt_token_ids=(77, 77, 77),
            block_hashes=hashes,
            cache_salt="salt",
            parent_id="a client chose this",
            terms=terms,
        )
        state = RequestState(spec, output_token_ids=[78, 79])
        state.first_scheduled_at = state.first_token_at = state.finished_at = float(number)
        kept.added(state, 0.0)
        kept.ended(spec.request_id)
    data = kept.recording()
    assert len(data) < 8 << 20
    told = msgspec.msgpack.decode(data, type=Traffic)
    assert told.requests[-1].ended_at == 399.0
    assert 0 < len(told.requests) < 400
    (spec, charges) = told.requests[-1].spec, told.requests[-1].charges
    assert (spec.prompt_token_ids, spec.cache_salt, spec.terms.key_id, spec.resumed) == ((), "", "", None)
    assert (spec.terms.tenant, charges.num_generated_tokens) == ("a", 2)
    assert b"secret" not in data
    assert b"chose" not in data

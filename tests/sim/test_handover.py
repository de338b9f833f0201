from __future__ import annotations

from dataclasses import replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.log import Recorder, StepRecord
from maitred.decisions.replay import first_difference
from maitred.fleet.config import FleetConfig
from maitred.fleet.disagg import HandoverConfig, Role, WorkerFacts
from maitred.sim.fleet import FleetSetup, FleetSimulation, ReplicaSetup
from maitred.sim.links import Links, SimulatedDisk, SimulatedLink, link_named
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.workload import Arrival, TokenSpan, chain
from tests.fleet.fleets import Recording
from tests.sim.worlds import COSTS, arrival, setup, workload

FAST, SLOW = SimulatedLink(1e9, 1e-5), SimulatedLink(2e4, 1e-3, is_shared=True)  # a token's KV has 100 bytes
CHATS = {
    "a": {"input": "uniform:1,120", "output": "uniform:1,12", "prefix_tokens": 8, "max_tokens": 16},
    "b": {
        "turns": "uniform:1,3",
        "input": 25,
        "output": "uniform:1,6",
        "think_s": 0.05,
        "priority": 1,
        "max_tokens": 8,
    },
}


class Logs:
    """A decision log of each engine."""

    def __init__(self) -> None:
        self.records: dict[str, list[StepRecord]] = {}

    def observer(self, name: str) -> Recorder:
        return Recorder(self.records.setdefault(name, []).append)


def one(role: str, link: SimulatedLink | None = FAST, **fields: Any) -> ReplicaSetup:
    engine = setup(**{"num_blocks": 256} | fields)
    facts = WorkerFacts(
        role=Role(role),
        costs=COSTS,
        token_budget=64,
        num_blocks=engine.num_blocks,
        block_size=4,
        bytes_per_token=100.0,
        num_layers=8,
        bandwidth=link.bandwidth if link else 0.0,
        latency_s=link.latency_s if link else 0.0,
        shares_link=link is not None and link.is_shared,
    )
    return ReplicaSetup(engine=engine, cost_model=COSTS, worker=facts)


def fleet(
    *roles: str,
    handover: str = "auto",
    link: SimulatedLink | None = FAST,
    logs: Logs | None = None,
    objectives: Objectives | None = None,
    **fields: Any,
) -> FleetSimulation:
    of_fleet = {name: fields.pop(name) for name in ("disk",) if name in fields}
    replicas = [one(role, link, **fields) for role in roles]
    asked, scheduler = HandoverConfig(handover=handover), replicas[0].engine.scheduler
    made = FleetSetup(
        config=FleetConfig(), scheduler=scheduler, replicas=replicas, handover=asked, link=link, **of_fleet
    )
    return FleetSimulation(made, SimulatedResults(objectives), listener_of=None if logs is None else logs.observer)


def short_names(asked: Arrival) -> Arrival:
    """Blocks' names that are told apart by their first eight bytes, of which logs are made."""

    def short(name: bytes) -> bytes:
        return crc32(name).to_bytes(4, "little")

    spans = tuple(TokenSpan(short(name), end) for name, end in asked.spans)
    return replace(asked, own=short(asked.own), spans=spans)


def assert_nothing_is_left(simulated: FleetSimulation, num_requests: int) -> None:
    total = simulated.results.total
    assert (total.num_finished, total.num_failed, total.num_here) == (num_requests, 0, 0)
    assert simulated.core.num_requests == 0
    simulated.core.check_invariants()
    for replica in simulated.replicas.values():
        assert replica.engine.kv_cache.num_used == 0
        replica.engine.scheduler.check_invariants()


@settings(max_examples=15)
@given(
    handover=st.sampled_from(["auto", "always"]),
    roles=st.sampled_from([("prefill", "decode"), ("mixed", "mixed"), ("prefill", "decode", "decode", "mixed")]),
    link=st.sampled_from([FAST, SLOW]),
    rate=st.sampled_from([60.0, 5000.0]),
    num_blocks=st.integers(45, 90),
    seed=st.integers(0, 5),
)
def test_every_request_ends_once_no_block_is_lost_and_every_engine_replays(
    handover, roles, link, rate, num_blocks, seed
):
    """Blocks are so few that reservations and leases are given up."""
    logs = Logs()
    simulated = fleet(*roles, handover=handover, link=link, logs=logs, num_blocks=num_blocks)
    simulated.run(map(short_names, workload(rate=rate, num_requests=30, seed=seed, classes=CHATS).arrivals()))
    assert_nothing_is_left(simulated, 30)
    header = Header(one("mixed").engine.scheduler, num_blocks, 4, enable_prefix_caching=True)
    for records in logs.records.values():
        encoder = LogEncoder(header)
        assert first_difference([encoder.start(), *map(encoder.encode, records)]) is None


def test_what_the_router_decides_is_decided_again_from_the_same_calls():
    simulated = fleet("prefill", "decode", "mixed")
    recording = Recording(simulated.core)
    simulated.run(workload(rate=800.0, num_requests=60, classes=CHATS).arrivals())
    assert any(name == "handed_over" for name, *_ in recording.calls)
    recording.assert_replays()


def test_never_is_a_fleet_that_knows_of_no_workers():
    asked = workload(rate=800.0, num_requests=120, classes=CHATS)
    with_roles = fleet("prefill", "decode", handover="never")
    with_roles.run(asked.arrivals())
    engine = one("mixed").engine
    plain = ReplicaSetup(engine=engine, cost_model=COSTS)
    alike = FleetSetup(config=FleetConfig(), scheduler=engine.scheduler, replicas=[plain] * 2)
    today = FleetSimulation(alike, SimulatedResults())
    today.run(asked.arrivals())
    assert with_roles.to_json() == today.to_json()


def test_a_handed_over_request_gets_its_first_token_from_one_worker_and_the_rest_from_the_other():
    simulated = fleet("prefill", "decode", handover="always")
    results = simulated.run(iter([arrival("r", prompt=100, output=5)]))
    prefill, decode = (simulated.replicas[f"{role}-1"].engine.scheduler.stats for role in ("prefill", "decode"))
    assert (prefill.num_generated_tokens, decode.num_generated_tokens) == (1, 4)
    assert simulated.to_json()["handovers"] == {"moved": 1}
    assert simulated.to_json()["kv_transfer_bytes"] == 96 * 100  # whole blocks, but for the last token's
    assert results.total.itl_s.count == 4


def test_a_transfer_is_hidden_behind_the_prompt_but_for_its_last_layer():
    link = SimulatedLink(1e6, 0.0)
    simulated = fleet("prefill", "decode", handover="always", link=link)
    simulated.run(iter([arrival("r", prompt=200, output=5)]))
    sent_s = 196 * 100 / link.bandwidth
    waited_s = simulated.to_json()["handover_wait_s"]["mean"]
    last_chunk_s = (196 - 192) * 100 / link.bandwidth
    assert waited_s < sent_s
    assert waited_s >= last_chunk_s / 8


def test_transfers_at_once_share_the_link():
    link = SimulatedLink(1e5, 0.0)
    waits = []
    for count in (1, 4):
        simulated = fleet("prefill", "decode", handover="always", link=link)
        simulated.run(iter([arrival(f"r{i}", prompt=60, output=3) for i in range(count)]))
        waits.append(simulated.to_json()["handover_wait_s"]["max"])
    assert waits[1] > 1.5 * waits[0]


def test_a_returning_conversation_finds_its_kv_on_disk():
    def asked() -> list[Any]:
        own = {"own": b"conversation"}
        others = [arrival(f"x{i}", at=1.0 + i * 0.1, prompt=150, output=2) for i in range(20)]  # take the pool's blocks
        return [arrival("c#1", prompt=160, output=8, **own), *others, arrival("c#2", at=20.0, prompt=180, **own)]

    disk = SimulatedDisk(max_blocks=4000)
    with_disk, without = fleet("mixed", num_blocks=64, link=None, disk=disk), fleet("mixed", num_blocks=64, link=None)
    results = with_disk.run(iter(asked()))
    assert_nothing_is_left(with_disk, 22)
    assert with_disk.to_json()["kv_tier_hit_tokens"] == {
        "disk": 164
    }  # 160 of the prompt, 7 of the answer, whole blocks
    assert results.num_cached_tokens == without.run(iter(asked())).num_cached_tokens + 164


def test_a_full_disk_forgets_the_least_recently_used_chain_from_its_end():
    disk = SimulatedDisk(max_blocks=3)
    disk.store([b"a1", b"a2"])
    disk.store([b"b1", b"b2"])
    assert (disk.num_known([b"a1", b"a2"]), disk.num_known([b"b1", b"b2"])) == (1, 2)


def test_a_prefix_is_fetched_from_the_worker_that_has_it():
    spans = chain(["system"], 640)
    first = arrival("first", prompt=700, output=400, max_tokens=512, spans=spans)
    rest = [arrival(f"r{i}", at=0.8 + i * 1e-4, prompt=700, spans=spans) for i in range(6)]
    slow = SimulatedLink(1e8, 1e-5)
    simulated = fleet("mixed", "mixed", link=slow, num_blocks=1024, max_num_seqs=4)
    simulated.run(iter([first, *rest]))
    assert_nothing_is_left(simulated, 7)
    assert simulated.to_json()["kv_tier_hit_tokens"].get("peer", 0) >= 600


def test_tickets_tell_of_hand_overs():
    simulated = fleet("prefill", "decode", handover="always", link=SLOW)
    results = simulated.run(iter([arrival("r", prompt=100, output=5)]))
    assert pytest.approx(results.tickets.kept[0].moves[0][1], abs=0.1) == results.tickets.kept[0].slots[1][0]


PORTS = SimulatedLink(100.0, 0.0)


def ends(links: Links) -> list[float]:
    """When flows run dry, one after another."""
    found = []
    while (at := links.next_at) is not None:
        found += [at] * len(links.advance(at))
    return found


def test_a_transfer_alone_gets_all_of_the_link():
    links = Links(PORTS)
    links.send(links.open("a", "b"), 200, 1.0)
    assert ends(links) == [pytest.approx(3.0)]


def test_two_that_share_a_port_get_half_each_and_the_longer_one_all_when_it_is_alone():
    links = Links(PORTS)
    links.send(links.open("a", "b"), 100, 0.0)
    links.send(links.open("a", "c"), 300, 0.0)
    assert ends(links) == [pytest.approx(2.0), pytest.approx(4.0)]


def test_transfers_between_others_are_in_nobodys_way_unless_all_share_one_link():
    for link, expected in ((PORTS, [1.0, 1.0]), (SimulatedLink(100.0, 0.0, is_shared=True), [2.0, 2.0])):
        links = Links(link)
        links.send(links.open("a", "b"), 100, 0.0)
        links.send(links.open("c", "d"), 100, 0.0)
        assert ends(links) == [pytest.approx(at) for at in expected]


def test_bytes_may_join_a_flow_and_a_flow_may_be_cut():
    links = Links(PORTS)
    first, second = links.open("a", "b"), links.open("a", "c")
    links.send(first, 100, 0.0)
    links.send(second, 1000, 0.0)
    links.send(first, 50, 1.0)
    links.cut(second, 2.0)
    assert ends(links) == [pytest.approx(2.5)]
    assert second.left == 0.0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10_000), st.integers(0, 2), st.integers(3, 5)), min_size=1))
def test_a_port_never_carries_more_than_it_can(sends):
    links = Links(PORTS)
    for at, num_bytes, sender, receiver in sorted(sends):
        while links.next_at is not None and links.next_at <= at:
            links.advance(links.next_at)
        links.send(links.open(str(sender), str(receiver)), num_bytes, at)
    last = max(ends(links))
    by_sender = [sum(n for _, n, s, _ in sends if s == sender) for sender in range(3)]
    by_receiver = [sum(n for _, n, _, r in sends if r == receiver) for receiver in range(3, 6)]
    assert last >= max([*by_sender, *by_receiver]) / 100.0 * 0.999
    assert last <= max(at for at, *_ in sends) + sum(n for _, n, *_ in sends) / 100.0 * 1.001


def test_a_link_has_a_name_or_a_rate():
    assert link_named("none") is None
    assert link_named("100MB/s") == SimulatedLink(1e8, 200e-6, is_shared=True)

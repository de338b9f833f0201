"""Tenants' terms and the server's door in the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from maitred.config import AdmissionConfig
from maitred.cost_model import CostModel
from maitred.errors import ConfigError
from maitred.gate.admission import AdmissionController
from maitred.sim.results import Results
from maitred.sim.simulator import Simulation
from maitred.sim.terms import WorkloadUnderTerms
from maitred.sim.traces import TraceLine, TraceWorkload
from maitred.sim.workload import Arrival
from maitred.tenancy.tenant import Tenant, TenantTable, read_tenants
from tests.sim.worlds import COSTS, arrival, setup, workload


def terms(**tenants: dict[str, object]) -> TenantTable:
    return read_tenants({"tenants": tenants}, "t.yaml")


def under(table: TenantTable | None, *lines: TraceLine, server: AdmissionConfig | None = None) -> list[Arrival]:
    given = None if table is None else table.tenants
    return list(WorkloadUnderTerms(TraceWorkload(list(lines)), given, server or AdmissionConfig()).arrivals())


def line(tenant: str, **fields: object) -> TraceLine:
    return TraceLine(timestamp=0, input_length=8, output_length=4, tenant=tenant, **fields)  # type: ignore[arg-type]


def test_what_a_request_leaves_open_is_its_tenants():
    table = terms(gold={"tier": "priority", "weight": 4, "ttft_slo_s": 2, "queue_timeout_s": 3, "timeout_s": 9})
    (plain, own) = under(table, line("gold"), line("gold", priority=7, ttft_slo_s=0.5, deadline_s=20))
    assert (plain.priority, plain.weight, plain.ttft_slo_s) == (0, 4, 2)
    assert (plain.start_within_s, plain.deadline_s) == (3, 9)
    assert (own.priority, own.ttft_slo_s, own.deadline_s) == (7, 0.5, 9)


def test_a_priority_is_kept_in_the_tenants_range():
    table = terms(cheap={"tier": "flex", "priorities": [2, 5]})
    asked = under(table, line("cheap"), line("cheap", priority=0), line("cheap", priority=9))
    assert [arrival.priority for arrival in asked] == [2, 2, 5]


def test_the_servers_time_limits_hold_for_everybody():
    server = AdmissionConfig(ttft_objective_s=1, queue_timeout_s=2, request_timeout_s=3)
    (nobody,) = under(terms(gold={}), line(""), server=server)
    assert (nobody.ttft_slo_s, nobody.start_within_s, nobody.deadline_s) == (1, 2, 3)


def test_a_tenant_without_terms_is_an_error_that_names_request_and_tenants():
    with pytest.raises(ConfigError, match=r"request t0 is of tenant 'silver'.*gold"):
        under(terms(gold={}), line("silver"))


def test_without_a_file_the_workloads_own_tenants_stay_as_they_are():
    described = workload(tenants={"a": {"concurrency": 1, "weight": 2}}, num_requests=2)
    kept = WorkloadUnderTerms(described, None)
    assert kept.tenants["a"].limits.concurrency == 1
    assert [(a.priority, a.weight) for a in kept.arrivals()] == [(None, 2), (None, 2)]


def refused(door: AdmissionConfig, arrivals: list[Arrival], policy: str = "fcfs") -> dict[str, int]:
    world = setup(max_num_seqs=1, policy=policy)
    controller = AdmissionController(door, max_num_seqs=1, priority_first=policy == "priority")
    results = Simulation(world, COSTS, Results(), admission=controller).run(iter(arrivals))
    assert results.total.num_finished + results.total.num_failed == len(arrivals)
    assert controller.num_inside == 0
    return dict(results.total.failures)


def test_the_door_turns_away_what_is_over_its_caps():
    at_once = [arrival(f"r{i}") for i in range(6)]
    assert refused(AdmissionConfig(max_queued_requests=2), at_once) == {"requests": 4}
    assert refused(AdmissionConfig(max_queued_tokens=16), at_once) == {"tokens": 4}
    assert refused(AdmissionConfig(max_queued_by_priority={"0": 3}), at_once) == {"class": 3}
    assert refused(AdmissionConfig(), at_once) == {}


def test_the_less_urgent_are_shed_for_the_more_urgent():
    arrivals = [*(arrival(f"low{i}", priority=5) for i in range(2)), arrival("high", priority=0)]
    assert refused(AdmissionConfig(max_queued_requests=2), arrivals) == {"shed": 1}


def test_an_objective_refuses_who_would_be_late():
    slow = CostModel(fixed_s=0.1)
    arrivals = [arrival(f"r{i}", at=0.05 * i, output=10) for i in range(60)]
    door = AdmissionConfig(ttft_objective_s=2.0)
    under_door = WorkloadUnderTerms(_Listed(arrivals), None, door)
    controller = AdmissionController(door, max_num_seqs=2)
    simulation = Simulation(setup(max_num_seqs=2), slow, Results(), admission=controller)
    total = simulation.run(under_door.arrivals()).total
    assert total.failures["objective"] > 30
    assert total.num_finished > 5
    assert total.ttft_s.largest < 2.0


class _Listed:
    """A workload of just these."""

    tenants: Mapping[str, Tenant] = {}

    def __init__(self, arrivals: list[Arrival]) -> None:
        self._arrivals = arrivals

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

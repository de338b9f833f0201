"""The gate in the simulator: tenants' terms, and whom admission turns away or sheds."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from maitred.config import AdmissionConfig
from maitred.core.cost_model import CostModel
from maitred.core.errors import ConfigError
from maitred.core.request import RequestSpec
from maitred.gate.admission import AdmissionController
from maitred.sim.engine import Simulation
from maitred.sim.results import SimulatedResults
from maitred.sim.traces import TraceLine, TraceWorkload
from maitred.sim.workload import Arrival, of_known_tenants
from maitred.tenancy.tenant import Tenant, read_tenants
from tests.sim.worlds import COSTS, PlanKeeper, arrival, setup, workload


def asked(terms: Mapping[str, object], **fields: object) -> RequestSpec:
    """What the simulator's scheduler is given of a request that a trace tells of."""
    given = read_tenants({"tenants": {"acme": terms}}, "t.yaml").tenants
    line = TraceLine(timestamp=0, input_length=8, output_length=4, tenant="acme", **fields)  # type: ignore[arg-type]
    seen = SpecKeeper()
    workload = TraceWorkload([line])
    Simulation(setup(num_blocks=512), COSTS, SimulatedResults(), tenants=given, listener=seen).run(workload.arrivals())
    (spec,) = seen.specs
    return spec


class SpecKeeper(PlanKeeper):
    """Notes what the scheduler was given."""

    def __init__(self) -> None:
        super().__init__()
        self.specs: list[RequestSpec] = []

    def added(self, request: object, now: float) -> None:
        self.specs.append(request.spec)  # type: ignore[attr-defined]


def test_what_a_trace_leaves_open_is_its_tenants():
    gold = {"tier": "priority", "weight": 4, "ttft_slo_s": 2, "queue_timeout_s": 3, "timeout_s": 9}
    plain = asked(gold).terms
    own = asked(gold, priority=7, ttft_slo_s=0.5, deadline_s=20).terms
    assert (plain.priority, plain.weight, plain.ttft_slo_s) == (0, 4, 2)
    assert (plain.start_by, plain.finish_by) == (3, 9)
    assert (own.priority, own.ttft_slo_s, own.finish_by) == (7, 0.5, 9)


def test_a_priority_that_a_server_would_refuse_is_the_nearest_that_is_granted():
    cheap = {"tier": "flex", "priorities": [2, 5]}
    assert [asked(cheap, priority=priority).terms.priority for priority in (None, 0, 9)] == [2, 2, 5]


def test_what_a_trace_allows_is_no_tenants_default():
    assert asked({"default_max_tokens": 2, "tokens_per_minute": 5000}).max_tokens == 1024


def test_a_tenant_without_terms_is_an_error_that_names_request_and_tenants():
    (gold,) = TraceWorkload([TraceLine(timestamp=0, input_length=8, output_length=4, tenant="silver")]).arrivals()
    with pytest.raises(ConfigError, match=r"request t0 is of tenant 'silver'.*gold"):
        list(of_known_tenants(iter([gold]), {"gold": Tenant(name="gold")}))


def test_without_a_file_the_workloads_own_tenants_stay_as_they_are():
    described = workload(tenants={"a": {"concurrency": 1, "weight": 2}}, num_requests=1)
    assert described.tenants["a"].limits.concurrency == 1
    seen = SpecKeeper()
    Simulation(setup(num_blocks=1024), COSTS, SimulatedResults(), tenants=described.tenants, listener=seen).run(
        described.arrivals()
    )
    assert [(spec.terms.tenant, spec.terms.priority, spec.terms.weight) for spec in seen.specs] == [("a", 0, 2)]


def refused(config: AdmissionConfig, arrivals: list[Arrival], policy: str = "fcfs") -> dict[str, int]:
    world = setup(max_num_seqs=1, policy=policy)
    controller = AdmissionController(config, max_num_seqs=1, priority_first=policy == "priority")
    results = Simulation(world, COSTS, SimulatedResults(), admission=controller).run(iter(arrivals))
    assert results.total.num_finished + results.total.num_failed == len(arrivals)
    assert controller.num_inside == 0
    return dict(results.total.failures)


def test_admission_turns_away_what_is_over_its_caps():
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
    config = AdmissionConfig(ttft_objective_s=2.0)
    controller = AdmissionController(config, max_num_seqs=2)
    simulation = Simulation(setup(max_num_seqs=2), slow, SimulatedResults(), admission=controller)
    total = simulation.run(iter(arrivals)).total
    assert total.failures["objective"] > 30
    assert total.num_finished > 5
    assert total.ttft_s.largest < 2.0

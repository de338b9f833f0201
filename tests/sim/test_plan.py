"""Plans against what a calculation by hand says of small worlds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import pytest

from maitred.config import SchedulerConfig
from maitred.core.cost_model import CostModel, StepShape
from maitred.core.errors import ConfigError
from maitred.fleet.disagg import Role
from maitred.sim.devices import DEVICES, MODELS, SimulatedTarget, device_named, num_kv_blocks, roofline
from maitred.sim.engine import EngineSetup
from maitred.sim.layouts import PlannedDevice, PlanTerms
from maitred.sim.links import SimulatedLink
from maitred.sim.plan import PlanGoal, Planner
from maitred.sim.results import GroupResults, Objectives
from maitred.sim.synthetic import SyntheticWorkload, WorkloadSpec, parse_spec
from maitred.sim.workload import Demand, chain
from tests.sim.worlds import arrival

KV_BYTES = 1e5
# a prompt of 100 tokens takes 100 ms, a step of decoding 10 ms however many requests are in it
COSTS = CostModel(weights_s=10e-3, prefill_token_s=1e-3)


def candidate(name: str = "one", costs: CostModel = COSTS, *, devices: int = 1, price: float = 0.0) -> PlannedDevice:
    target = SimulatedTarget(name, costs, lambda cache, seqs: 1000, 2048, KV_BYTES, num_devices=devices)
    return PlannedDevice(name, target, price)


def planner(*candidates: PlannedDevice, output: int = 8, tell: Any = lambda text: None, **wanted: Any) -> Planner:
    spec: WorkloadSpec = parse_spec(
        {"num_requests": 2000, "classes": {"all": {"input": 100, "output": output}}}, "test"
    )
    slo = wanted.pop("slo", {"ttft_s": 1.0})
    terms = PlanTerms(
        demand=Demand(SyntheticWorkload(spec)),
        objectives=Objectives(**slo),
        link=SimulatedLink(10e9, 1e-5),
        engine=EngineSetup(scheduler=SchedulerConfig(policy="fcfs"), num_blocks=1),
    )
    wanted = {"max_num_seqs": 64, "token_budget": 2048} | wanted
    return Planner(PlanGoal(**wanted), terms, candidates, tell)


def test_a_prompt_of_100_ms_25_times_a_second_takes_three_workers():
    found = planner(candidate(), output=1, rate=25.0, modes=("aggregated",)).search()
    outcome = found.best["aggregated"]
    assert [group.count for group in outcome.layout.groups] == [3]
    assert outcome.rate == 25.0
    assert outcome.attainment >= 0.9
    assert found.num_simulations > 0


def test_the_highest_rate_of_three_workers_is_nearly_thirty_prompts_of_100_ms():
    outcome = planner(candidate(), output=1, num_devices=3, modes=("aggregated",)).search().best["aggregated"]
    assert outcome.layout.num_devices == 3
    assert 24 < outcome.rate <= 30


def test_prompts_go_apart_where_they_break_the_pace_of_answers():
    """An answer takes 30 ms, and one prompt beside it breaks its pace. Mixed, 7 requests of 130 ms a second must find
    a worker of their own nine times in ten: Erlang's B of 0.91 is 0.057 on 3 workers and 0.178 on 2. Apart, one worker
    computes 7 prompts a second, and one answers."""
    slo, modes = {"ttft_s": 1.0, "tpot_s": 15e-3}, ("aggregated", "disaggregated")
    search = planner(candidate(), output=4, slo=slo, rate=7.0, modes=modes)
    found = search.search()
    apart, together = found.best["disaggregated"], found.best["aggregated"]
    assert {group.role: group.count for group in apart.layout.groups} == {Role.PREFILL: 1, Role.DECODE: 1}
    assert together.layout.num_devices == 3
    assert search.score(apart) < search.score(together)
    # 7 prompts of 100 tokens a second are 70 MB of KV
    assert found.pays_from is not None
    assert 7 * 100 * KV_BYTES < found.pays_from < 2e9


def test_the_cheaper_device_wins_where_cost_is_asked_and_the_faster_one_where_devices_are():
    fast = candidate("fast", CostModel(weights_s=10e-3, prefill_token_s=0.5e-3), price=5.0)
    slow = candidate("slow", COSTS, price=1.0)

    def chosen(minimise: str) -> str:
        search = planner(fast, slow, output=1, rate=16.0, modes=("aggregated",), minimise=minimise)
        (group,) = search.search().best["aggregated"].layout.groups
        return f"{group.count} {group.candidate.name}"

    assert (chosen("devices"), chosen("cost")) == ("1 fast", "2 slow")


def test_of_equal_devices_the_plan_is_that_with_more_good_requests():
    search = planner(candidate(), output=1, rate=12.0, modes=("aggregated",))
    outcome = search.search().best["aggregated"]
    quicker = replace(outcome, attainment=outcome.attainment - 0.05, figures=GroupResults())
    assert search.score(outcome) < search.score(quicker)


def test_equal_seeds_give_equal_plans():
    def figures() -> list[tuple[str, float, float]]:
        found = planner(candidate(), output=2, rate=12.0, modes=("hybrid",)).search()
        return [(each.layout.label, each.attainment, each.latency_s) for each in found.tried]

    assert figures() == figures() != []


def test_what_no_layout_meets_is_told_with_the_best_value():
    found = planner(candidate(), slo={"ttft_s": 0.05}, rate=1.0, modes=("aggregated",)).search()
    assert not found.best
    assert found.nearest["ttft"] == (pytest.approx(0.1, rel=0.02), "one")
    found = planner(candidate(), slo={"tpot_s": 5e-3}, rate=1.0, modes=("aggregated",)).search()
    assert found.nearest["tpot"] == (pytest.approx(0.01, rel=0.02), "one")
    assert sum(found.rejected.values()) == 1


def test_a_search_that_is_cut_keeps_the_best_so_far():
    def interrupted(text: str) -> None:
        if text.startswith("aggregated"):
            raise KeyboardInterrupt

    search = planner(candidate(), output=1, rate=25.0, tell=interrupted)
    with pytest.raises(KeyboardInterrupt):
        search.search()
    assert search.plan.best["aggregated"].layout.num_devices == 3


def test_shared_prefixes_and_turns_take_no_arithmetic():
    class Conversations:
        tenants: ClassVar[dict[str, Any]] = {}

        def arrivals(self):
            for number in range(4):
                yield arrival(f"r{number}", at=float(number), prompt=100, output=10, spans=chain(["system"], 80))

    demand = Demand(Conversations())
    assert demand.fresh == [20, 20, 20, 100]
    assert (demand.mean_prompt, demand.longest) == (100, 110)
    stretched = demand.at(rate=8.0, num_requests=4)
    assert stretched[-1].at == pytest.approx(4 / 8)


def test_devices_side_by_side_pay_for_what_they_tell_each_other():
    shape, one, eight = MODELS["llama-3.1-70b"], DEVICES["h100"], device_named("h100x8")
    step = StepShape(rows=64, decode_tokens=64, samples=64)
    alone_s, together_s = (roofline(device, shape).step_s(step) for device in (one, eight))
    sent_s = 64 * 2 * 80 * 8192 * 2 * (7 / 8) * 2 / (450e9 * 0.75)
    own = one.step_s + 64 * one.row_s
    assert together_s == pytest.approx(own + (alone_s - own) / 8 + 2 * 80 * one.hop_s + sent_s)


def test_latent_attention_is_kept_by_each_tensor_parallel_device_and_once_with_experts_apart():
    shape = MODELS["deepseek-v3"]
    tensor, experts = (num_kv_blocks(device_named(name), shape, 16) for name in ("h200x16", "h200x16ep"))
    free = 0.9 * 16 * 141e9 - 671e9
    assert tensor == int(free / (16 * shape.kv_bytes_per_token * 16))
    assert 8 * tensor < experts < 16 * tensor, "what is read by every token is there 16 times"
    with pytest.raises(ConfigError, match="choose another"):
        num_kv_blocks(DEVICES["h100"], shape, 16)

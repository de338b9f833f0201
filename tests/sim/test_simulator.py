from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import AdmissionConfig
from maitred.core.clock import ManualClock
from maitred.core.cost_model import Band, CostModel, Slowness, shape_of
from maitred.core.errors import ConfigError
from maitred.core.request import RequestSpec, RequestState
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.decisions.codec import Header, LogEncoder, read_log
from maitred.decisions.log import Recorder
from maitred.decisions.replay import first_difference
from maitred.gate.admission import AdmissionController
from maitred.policy.policies import POLICIES
from maitred.scheduler.engine_core import EngineCore, StepListener
from maitred.sim.engine import Simulation
from maitred.sim.fit import measured_steps, read_run
from maitred.sim.profile import Jitter
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.traces import TraceLine, TraceWorkload
from maitred.sim.workload import Arrival, Turn, of_known_tenants
from maitred.tenancy.tenant import Tenant, read_tenants
from tests.fakes import make_request, make_scheduler
from tests.sim.worlds import COSTS, Calls, PlanKeeper, arrival, setup, simulation, workload

MIXED = {
    "a": {"input": "uniform:1,60", "output": "uniform:1,12", "prefix_tokens": 8, "max_tokens": 16},
    "b": {"turns": "uniform:1,3", "input": 5, "output": "uniform:1,6", "think_s": 0.05, "priority": 1, "max_tokens": 8},
}


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    predictor=st.sampled_from(["oracle", "max_tokens", "quantile", "adversarial"]),
    rate=st.sampled_from([1.0, 60.0, 5000.0]),
    kind=st.sampled_from(["poisson", "gamma", "diurnal"]),
    num_blocks=st.integers(40, 80),
    seed=st.integers(0, 5),
)
def test_every_request_ends_once_and_nothing_is_left(policy, predictor, rate, kind, num_blocks, seed):
    world = workload(rate=rate, kind=kind, burstiness=0.3, period_s=5, num_requests=40, seed=seed, classes=MIXED)
    simulated = simulation(policy=policy, predictor=predictor, num_blocks=num_blocks)
    results = simulated.run(world.arrivals())
    total = results.total
    assert total.num_finished == 40
    assert total.num_failed == 0
    assert total.queue_s.count == total.num_finished
    assert total.num_here == 0
    assert not simulated.scheduler.has_work
    simulated.scheduler.check_invariants()
    assert total.busy_s <= results.duration_s + 1e-9


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_slot_is_idle_while_somebody_waits(policy: str):
    keeper = PlanKeeper()
    simulation(policy=policy, listener=keeper).run(iter([arrival(f"r{i}", output=6) for i in range(12)]))
    assert [len(plan.rows) for plan in keeper.plans[1:12]] == [4] * 11


def test_a_lone_request_takes_what_the_cost_model_says():
    results = simulation().run(iter([arrival("r", at=2.0, prompt=8, output=4)]))
    first_s, other_s = 1e-3 + 8e-5, 1e-3 + 1e-4
    assert results.total.ttft_s.largest == pytest.approx(first_s)
    assert results.total.itl_s.mean == pytest.approx(other_s)
    assert results.total.itl_s.count == 3
    assert results.total.e2e_s.largest == pytest.approx(first_s + 3 * other_s)
    assert results.duration_s == pytest.approx(first_s + 3 * other_s)


def test_who_comes_during_a_step_is_in_the_next_one():
    keeper = PlanKeeper()
    simulation(listener=keeper).run(iter([arrival("first"), arrival("second", at=5e-4)]))
    assert [row.request_id for row in keeper.plans[0].rows] == ["first"]
    assert {row.request_id for row in keeper.plans[1].rows} == {"first", "second"}


def test_the_next_turn_comes_after_a_pause_and_finds_the_conversation_in_the_cache():
    turn = Turn(think_s=1.0, new_tokens=4, output_tokens=2, max_tokens=16)
    keeper = PlanKeeper()
    results = simulation(listener=keeper).run(iter([arrival("chat", prompt=8, output=4, turns=(turn,))]))
    assert results.total.num_finished == 2
    (second,) = [new for plan in keeper.plans for new in plan.new_requests if new.request_id == "chat#2"]
    assert second.spec.num_prompt_tokens == 8 + 4 + 4
    # positions 0..10 were computed, the last token of the answer was not: two full blocks
    assert results.num_cached_tokens == 8
    (answered_at,) = [ended for (_, ended), plan in zip(keeper.times, keeper.plans, strict=True) if plan.step == 3]
    asked_at = min(began for (began, _), plan in zip(keeper.times, keeper.plans, strict=True) if plan.step == 4)
    assert asked_at - answered_at == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    model = CostModel(fixed_s=1e-3, jitter=(Band(1.0, (0.5, 1.0, 3.0)),), between_s=1e-4, gap_jitter=(0.0, 2.0))

    def run(seed: int) -> dict:
        simulated = Simulation(setup(), model, SimulatedResults(), jitter=Jitter(model, Random(seed)))
        return simulated.run(workload(num_requests=30, classes=MIXED).arrivals()).to_json()

    assert run(1) == run(1)
    assert run(1) != run(2)


UNSTEADY = CostModel(
    fixed_s=1e-3,
    decode_token_s=1e-4,
    group_s=1e-5,
    between_s=1e-4,
    jitter=(Band(1.6e-3, (0.5, 1.0, 3.0)),),
    gap_jitter=(0.0, 2.0),
)
LONG = {
    "a": {"input": "uniform:1,60", "output": "uniform:1,70", "prefix_tokens": 8, "max_tokens": 70},
    "b": {"turns": "uniform:1,3", "input": 5, "output": "uniform:1,40", "think_s": 0.05, "max_tokens": 40},
}


@pytest.mark.parametrize("rate", [20.0, 200.0])
@pytest.mark.parametrize("num_blocks", [40, 400])
def test_steps_that_only_decode_are_taken_many_at_a_time_with_the_results_of_single_ones(num_blocks, rate):
    def run(listener: StepListener | None) -> tuple[SimulatedResults, int]:
        engine, results = setup(num_blocks=num_blocks), SimulatedResults(Objectives(itl_s=2e-3))
        simulated = Simulation(engine, UNSTEADY, results, jitter=Jitter(UNSTEADY, Random(1)), listener=listener)
        calls = Calls(simulated.scheduler.schedule)
        simulated.scheduler.schedule = calls
        return simulated.run(workload(rate=rate, num_requests=60, classes=LONG).arrivals()), calls.num

    (many, num_plans), (single, num_steps) = run(None), run(StepListener())
    assert many.to_json() == single.to_json()
    assert many.tickets.kept == single.tickets.kept
    assert num_plans < 0.9 * num_steps


def test_what_could_never_run_fails_and_ends_its_conversation_while_the_others_go_on():
    results = simulation(num_blocks=8).run(iter([arrival("large", prompt=900), arrival("small", at=1.0)]))
    assert (results.total.num_finished, results.total.failures) == (1, {"too_long": 1})
    assert results.total.slo_attainment == 0.5

    turn = Turn(think_s=1.0, new_tokens=4, output_tokens=2, max_tokens=16)
    results = simulation(num_blocks=8).run(iter([arrival("chat", prompt=900, turns=(turn, turn))]))
    assert (results.total.num_finished, results.total.num_failed) == (0, 1)


def test_deadlines_are_kept_as_the_engine_keeps_them():
    late = arrival("late", output=400, max_tokens=400, deadline_s=0.01)
    results = simulation(num_blocks=200).run(iter([late, arrival("other", at=0.001)]))
    assert (results.total.num_finished, results.total.num_failed) == (1, 1)


def test_objectives_decide_what_is_good():
    asked = [arrival("short", output=2), arrival("long", output=30, max_tokens=30)]
    assert simulation(objectives=Objectives(e2e_s=0.01)).run(iter(asked)).total.num_good == 1
    assert simulation(objectives=Objectives(ttft_s=1e-9)).run(iter(asked)).total.num_good == 0
    assert simulation(objectives=Objectives(itl_s=0.00125)).run(iter(asked)).total.num_good == 2
    asked[1] = arrival("long", output=300, max_tokens=300)  # 1 slow gap of 299 is allowed, 1 of 1 is not
    assert simulation(objectives=Objectives(itl_s=0.00115), num_blocks=100).run(iter(asked)).total.num_good == 1


# ---- against the live loop


class TimedExecutor:
    """Answers at once, and turns the clock as a machine with these costs would."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        if plan.rows:
            self._clock.advance(COSTS.step_s(shape_of(plan.rows)))
        return ModelOutput(tuple(SampledRow(row.request_id, (7,)) for row in plan.rows if row.samples))

    def close(self) -> None: ...


def live_request(asked: Arrival) -> RequestState:
    return make_request(
        asked.request_id,
        prompt=asked.prompt_tokens,
        max_tokens=asked.output_tokens,
        arrived_at=asked.at,
        priority=asked.terms.priority,
        predicted_output_tokens=float(asked.output_tokens),
    )


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_plans_equal_those_of_a_live_loop_and_of_the_replay_of_its_log(policy: str):
    arrivals = [
        arrival(f"r{i}", at=i * 0.002, prompt=3 + i * 7 % 50, output=2 + i % 9, max_tokens=2 + i % 9, priority=i % 3)
        for i in range(40)
    ]
    records: list = []
    clock, keeper = ManualClock(), PlanKeeper()
    live = make_scheduler(policy=policy, num_blocks=64, max_num_seqs=4)
    core = EngineCore(live, TimedExecutor(clock), clock, Recorder(records.append))
    pending = list(arrivals)
    while pending or core.has_work:
        if not core.has_work:
            clock.advance(max(0.0, pending[0].at - clock.now()))
        while pending and pending[0].at <= clock.now():
            core.add(live_request(pending.pop(0)).spec)
        core.step()

    encoder = LogEncoder(Header(live.config, 64, 4, True))
    frames = [encoder.start(0), *(encoder.encode(record) for record in records)]
    assert first_difference(frames) is None
    _, steps = read_log(frames)
    listed = list(steps)
    recorded = read_run(listed)
    again = Simulation(setup(policy=policy, num_blocks=64), COSTS, SimulatedResults(), listener=keeper)
    results = again.run(iter(recorded.arrivals))
    assert [plan.rows for plan in keeper.plans] == [step.plan.rows for step in listed]
    assert results.num_preemptions == recorded.results.num_preemptions
    measured = list(measured_steps(listed))
    assert all(step.step_s == pytest.approx(COSTS.step_s(step.shape)) for step in measured)


def test_a_recorded_run_has_the_figures_of_the_simulation_it_was_made_of():
    records: list = []
    asked = [arrival(f"r{i}", at=i * 0.003, prompt=10 + i, output=3 + i % 5) for i in range(20)]
    simulated = Simulation(setup(), COSTS, SimulatedResults(), listener=Recorder(records.append))
    results = simulated.run(iter(asked))
    encoder = LogEncoder(Header(setup().scheduler, 64, 4, True))
    _, steps = read_log([encoder.start(0), *(encoder.encode(record) for record in records)])
    recorded = read_run(steps).results.to_json()
    for name, value in results.to_json()["ttft_s"].items():
        assert recorded["ttft_s"][name] == pytest.approx(value, rel=1e-2)
    assert recorded["e2e_s"]["max"] == pytest.approx(results.to_json()["e2e_s"]["max"])
    assert recorded["goodput_rps"] == pytest.approx(results.to_json()["goodput_rps"])


def test_a_slow_machine_takes_longer_as_it_is_told_at_each_step():
    """One request: a step with its prompt of 8 tokens, then three of a token each."""

    def end_of(slowness: Slowness | None) -> float:
        at = None if slowness is None else lambda now: slowness
        results = Simulation(setup(), COSTS, SimulatedResults(), slowness=at).run(iter([arrival("r", output=4)]))
        return results.ended_at

    prompts_s, rest_s = 8 * COSTS.prefill_token_s, 4 * COSTS.fixed_s + 3 * COSTS.decode_token_s
    assert end_of(None) == pytest.approx(prompts_s + rest_s)
    assert end_of(Slowness(prompts=3.0)) == pytest.approx(3 * prompts_s + rest_s)
    assert end_of(Slowness(rest=2.0)) == pytest.approx(prompts_s + 2 * rest_s)

    asked = []

    def slowness(now: float) -> Slowness:
        asked.append(now)
        return Slowness(rest=2.0 if now > 0 else 1.0)

    Simulation(setup(), COSTS, SimulatedResults(), slowness=slowness).run(iter([arrival("r", output=3)]))
    first_s = COSTS.fixed_s + 8 * COSTS.prefill_token_s
    assert asked == pytest.approx([0.0, first_s, first_s + 2 * (COSTS.fixed_s + COSTS.decode_token_s)])


def test_drafts_that_are_accepted_save_steps_and_those_that_are_not_cost_next_to_nothing():
    def results(acceptance: float | None) -> SimulatedResults:
        engine = setup(acceptance=acceptance, num_blocks=256)
        run = Simulation(engine, CostModel(weights_s=0.01, decode_token_s=1e-4), SimulatedResults())
        return run.run(iter([arrival(f"r{i}", at=0.0, output=200) for i in range(2)]))

    without, right, wrong = results(None), results(1.0), results(0.0)
    assert right.num_steps < without.num_steps / 4
    assert right.num_accepted_drafts == right.num_drafts > 0
    assert wrong.busy_s < 1.03 * without.busy_s
    assert wrong.num_accepted_drafts == 0
    assert (without.num_drafts, "num_drafts" in without.to_json()) == (0, False)
    assert right.to_json()["num_drafts"] == right.num_drafts


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


def test_a_trace_leaves_to_its_tenants_what_is_theirs():
    gold = {"tier": "priority", "weight": 4, "ttft_slo_s": 2, "queue_timeout_s": 3, "timeout_s": 9}
    plain = asked(gold).terms
    own = asked(gold, priority=7, ttft_slo_s=0.5, deadline_s=20).terms
    assert (plain.priority, plain.weight, plain.ttft_slo_s) == (0, 4, 2)
    assert (plain.start_by, plain.finish_by) == (3, 9)
    assert (own.priority, own.ttft_slo_s, own.finish_by) == (7, 0.5, 9)

    cheap = {"tier": "flex", "priorities": [2, 5]}
    assert [asked(cheap, priority=priority).terms.priority for priority in (None, 0, 9)] == [2, 2, 5]

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


def test_admission_turns_away_what_is_over_its_caps_and_sheds_the_less_urgent():
    at_once = [arrival(f"r{i}") for i in range(6)]
    assert refused(AdmissionConfig(max_queued_requests=2), at_once) == {"requests": 4}
    assert refused(AdmissionConfig(max_queued_tokens=16), at_once) == {"tokens": 4}
    assert refused(AdmissionConfig(max_queued_by_priority={"0": 3}), at_once) == {"class": 3}
    assert refused(AdmissionConfig(), at_once) == {}

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


def test_a_batch_beside_a_load_is_told_apart_costs_the_load_little_and_has_the_rest() -> None:
    chat = {"input": "8", "output": "20", "max_tokens": 64}
    load = {"rate": 20.0, "num_requests": 60, "classes": {"chat": chat}}
    night = {"background": 40, "input": "24", "output": "30", "max_tokens": 64}
    alone = simulation(max_num_seqs=8, num_blocks=200).run(workload(**load).arrivals())
    both = workload(**load | {"classes": {"chat": chat, "night": night}})
    beside = simulation(max_num_seqs=8, num_blocks=200).run(both.arrivals())
    assert beside.tenants.keys() == {"default", "default (background)"}
    assert beside.tenants["default (background)"].num_finished == 40
    assert beside.total.num_finished == 60, "totals are of the others"
    without, with_batch = alone.total, beside.total
    assert (with_batch.itl_s.quantile(0.99) or 1.0) <= 1.051 * (without.itl_s.quantile(0.99) or 0.0)
    assert (with_batch.ttft_s.quantile(0.99) or 1.0) <= 1.1 * (without.ttft_s.quantile(0.99) or 0.0) + 0.03
    assert beside.tenants["default (background)"].e2e_s.largest < 3.0

"""What is particular to each policy; what all have in common is in test_conformance."""

from __future__ import annotations

from dataclasses import fields
from random import Random
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.core.request import RequestState
from maitred.policy.parameters import Range, make_policy, parameters_of
from maitred.policy.policies import MIN_COUNTERS_TO_PRUNE, POLICIES, VirtualTokenCounters, heeding_priority, policy_for
from maitred.policy.policy import GroupRule, KVNeed, Policy, UsedQuanta, arrival_term, by_arrival
from maitred.policy.queue import MIN_DEAD_ENTRIES, RequestQueue
from maitred.scheduler.notes import PreemptionCause
from maitred.scheduler.planning import PlanBuilder, preempt
from tests.fakes import make_request, make_scheduler
from tests.scheduler.running import Run, tokens_by_request


def in_order(policy: str, *requests: RequestState, **settings: object) -> list[str]:
    """In the policy's order, all waiting."""
    scheduler = make_scheduler(policy=policy, num_blocks=10_000, **settings)
    for request in requests:
        scheduler.add(request, 0.0)
    return [request.request_id for request in scheduler.waiting]


def test_sjf_puts_the_short_first_until_the_long_one_has_aged():
    long = make_request("long", prompt=100, max_tokens=100, predicted_output_tokens=100.0)
    soon = make_request("soon", prompt=100, max_tokens=100, predicted_output_tokens=10.0, arrived_at=1.0)
    late = make_request("late", prompt=100, max_tokens=100, predicted_output_tokens=10.0, arrived_at=2.0)
    # 180 tokens of difference are 1.8 s of age
    assert in_order("sjf", late, long, soon, ageing_tokens_per_s=100.0) == ["soon", "long", "late"]


@pytest.mark.parametrize("policy", ["sjf", "srpt", "interactive"])
@pytest.mark.parametrize("said", [float("nan"), float("inf"), -1e9, 1e300])
def test_a_mad_prediction_stays_between_one_token_and_max_tokens(policy: str, said: float):
    made = policy_for(SchedulerConfig(policy=policy))
    request = make_request(prompt=10, max_tokens=50, predicted_output_tokens=said)
    low = make_request(prompt=10, max_tokens=50, predicted_output_tokens=1.0)
    assert made.order(low)[0] <= made.order(request)[0] <= made.overtaken_until(request)


def test_srpt_takes_the_slot_of_one_with_more_to_do_and_not_near_its_end():
    long = make_request("long", max_tokens=60)
    run = Run(make_scheduler(policy="srpt", max_num_seqs=1, predictor="max_tokens", ageing_tokens_per_s=1.0), long)
    run.steps(3)
    run.add(make_request("short", max_tokens=2, arrived_at=3.0))
    assert [row.request_id for row in run.step().rows] == ["short"]
    run.steps(56)
    assert long.num_preemptions == 1
    run.add(make_request("other", max_tokens=2, arrived_at=run.now))
    run.to_end()
    assert long.num_preemptions == 1  # few tokens were left: to compute its past again would have cost more


def test_srpt_gives_a_preempted_request_the_place_of_what_remains():
    request = make_request(prompt=10, max_tokens=50, predicted_output_tokens=50.0)
    policy = policy_for(SchedulerConfig(policy="srpt"))
    assert policy.resumed is not None
    before = policy.order(request)
    request.output_token_ids = list(range(30))
    assert policy.resumed(request) < before


def test_interactive_orders_by_tier_then_by_length():
    requests = [
        make_request("batch", priority=1, max_tokens=1),
        make_request("essay", priority=0, max_tokens=500),
        make_request("chat", priority=0, max_tokens=5, arrived_at=1.0),
    ]
    assert in_order("interactive", *requests) == ["chat", "essay", "batch"]


def test_round_robin_goes_round():
    requests = [make_request(name, max_tokens=9, arrived_at=i / 10) for i, name in enumerate("abc")]
    run = Run(make_scheduler(policy="rr", max_num_seqs=1, quantum_tokens=4), *requests)
    turns_taken, num_used = [], []
    while run.scheduler.has_work:
        turns_taken.append(next(iter(tokens_by_request(run.step()))))
        num_used += [used.num_used for used in run.scheduler.order.policy.quanta.values()]
    turns = "".join(name for i, name in enumerate(turns_taken) if i == 0 or turns_taken[i - 1] != name)
    assert turns == "abcabc"
    assert max(num_used) == 1


def test_a_quantum_smaller_than_what_is_computed_again_still_gets_on():
    requests = [make_request(prompt=30, max_tokens=12, arrived_at=i / 10) for i in range(2)]
    scheduler = make_scheduler(policy="rr", max_num_seqs=1, quantum_tokens=1, enable_prefix_caching=False)
    run = Run(scheduler, *requests)
    run.to_end(limit=200)
    assert all(r.num_preemptions > 5 for r in requests)


def test_a_quantum_ends_nothing_while_there_is_room():
    requests = [make_request(max_tokens=20, arrived_at=i / 10) for i in range(3)]
    run = Run(make_scheduler(policy="rr", max_num_seqs=3, quantum_tokens=2), *requests)
    run.steps(15)
    assert run.scheduler.order.policy.quanta == {}


def test_mlfq_joins_by_prompt_sinks_by_quanta_and_rises_with_age():
    policy = policy_for(SchedulerConfig(policy="mlfq", quantum_tokens=10, mlfq_levels=4, ageing_s=5.0))

    def level(request: RequestState) -> float:
        return policy.terms(request)["level_s"] / 5.0

    assert [level(make_request(prompt=n)) for n in (1, 10, 11, 20, 21, 40, 41, 1000)] == [0, 0, 1, 1, 2, 2, 3, 3]
    request = make_request(prompt=5, max_tokens=100)
    assert policy.quantum_end is not None
    assert policy.quantum_end(request) == 10
    request.num_computed_tokens, policy.quanta[request.request_id] = 10, UsedQuanta(1, 7.0)
    assert (level(request), policy.quantum_end(request)) == (1, 30)
    newcomers = [make_request(prompt=5, arrived_at=at) for at in (11.9, 12.1)]
    assert sorted([*newcomers, request], key=policy.order) == [newcomers[0], request, newcomers[1]]


def test_mlfq_lets_a_newcomer_of_a_higher_level_in():
    long = make_request("long", max_tokens=60)
    run = Run(make_scheduler(policy="mlfq", max_num_seqs=1, quantum_tokens=8), long)
    run.steps(3)
    run.add(make_request("first", arrived_at=3.0, max_tokens=1))
    assert [row.request_id for row in run.step().rows] == ["first"]  # long has used up its quantum
    run.to_end()
    assert long.num_preemptions == 1


def test_edf_goes_by_objective_and_least_slack_takes_the_prefill_off():
    long = make_request("long", prompt=100, ttft_slo_s=1.1)
    short = make_request("short", prompt=10, ttft_slo_s=1.0)
    assert in_order("edf", long, short) == ["short", "long"]
    assert in_order("least_slack", long, short, prefill_tokens_per_s=100.0) == ["long", "short"]


def test_an_earlier_deadline_takes_the_slot_of_a_prefill_but_not_of_one_who_has_its_first_token():
    relaxed = make_request("relaxed", prompt=40, ttft_slo_s=60.0, max_tokens=9)
    scheduler = make_scheduler(policy="edf", max_num_seqs=1, max_num_batched_tokens=8)
    run = Run(scheduler, relaxed)
    run.steps(2)
    run.add(make_request("pressing", arrived_at=2.0, ttft_slo_s=0.5))
    assert run.step().rows[0].request_id == "pressing"
    while relaxed.first_token_at is None:
        run.step()
    run.add(make_request("again", arrived_at=run.now, ttft_slo_s=0.5))
    run.to_end()
    assert relaxed.num_preemptions == 1


@pytest.mark.parametrize("policy", ["edf", "least_slack"])
def test_no_deadline_is_before_arrival_or_more_than_an_hour_after(policy: str):
    made = policy_for(SchedulerConfig(policy=policy))
    for slo in (-5.0, 0.0, 1e12, float("inf")):
        request = make_request(prompt=10, arrived_at=100.0, ttft_slo_s=slo)
        assert 100.0 <= made.overtaken_until(request) <= 3700.0
    assert made.overtaken_until(make_request(arrived_at=100.0, start_by=101.0, priority=9)) <= 101.0


def test_lpm_moves_those_up_whose_prompt_has_entered_the_cache_and_down_when_it_has_left():
    prefix = list(range(40))
    scheduler = make_scheduler(policy="lpm", max_num_seqs=1, num_blocks=16, ageing_tokens_per_s=1.0)
    run = Run(scheduler, make_request("first", prompt=[*prefix, 1], max_tokens=1))
    run.add(make_request("other", prompt=20, max_tokens=1, arrived_at=1.0))
    run.add(make_request("alike", prompt=[*prefix, 2], max_tokens=1, arrived_at=2.0))
    assert [r.request_id for r in scheduler.waiting] == ["first", "other", "alike"]
    run.step()
    run.scheduler.order.begin_step()
    assert [r.request_id for r in scheduler.waiting] == ["alike", "other"]
    assert scheduler.terms("alike") == {"arrived_at_s": 2.0, "cached_prefix_s": -30.0}  # 40 tokens, at most ageing_s
    for block in list(run.scheduler.kv_cache._cache.hashes):
        run.scheduler.kv_cache._cache.forget(block)
    assert scheduler.order.head() is not None
    assert [r.request_id for r in scheduler.waiting] == ["other", "alike"]
    run.to_end()


def conversation(cached: int, new: int, other: int, block_size: int = 4, **settings: object) -> Run:
    """A turn of a chat whose first `cached` tokens are in the cache, and another's first turn of `other`; not begun."""
    told, num_blocks = list(range(1000, 1000 + cached + new)), (cached + new + other) // block_size * 2
    shape = {"block_size": block_size, "num_blocks": num_blocks, "max_num_batched_tokens": 512}
    run = Run(make_scheduler(max_num_seqs=1, **shape, **settings))
    run.add(make_request("before", prompt=told[: cached + 1], max_tokens=1, block_size=block_size))
    run.to_end()
    late = {"max_tokens": 9, "arrived_at": run.now, "block_size": block_size}
    run.add(make_request("fresh", prompt=other, **late), make_request("turn", prompt=told, **late))
    return run


@pytest.mark.parametrize("policy", ["sjf", "srpt", "interactive"])
def test_what_is_cached_costs_nothing_so_a_long_chats_next_turn_goes_before_a_shorter_fresh_prompt(policy: str):
    run = conversation(cached=8000, new=50, other=500, block_size=16, policy=policy)
    assert [r.request_id for r in run.scheduler.waiting] == ["turn", "fresh"]
    for block in list(run.scheduler.kv_cache._cache.hashes):
        run.scheduler.kv_cache._cache.forget(block)
    head = run.scheduler.order.head()
    assert head is not None
    assert head.request_id == "fresh"  # what left the cache has to be computed again
    run.to_end()


@pytest.mark.parametrize("policy", ["sjf", "srpt", "interactive"])
def test_kv_blocks_count_by_their_weight_cached_or_not(policy: str):
    run = conversation(cached=800, new=50, other=500, policy=policy, policy_args={"kv_block_weight": 10.0})
    assert [r.request_id for r in run.scheduler.waiting] == ["fresh", "turn"]
    needs = run.scheduler.order.policy.kv_needs
    assert needs is not None
    assert needs["turn"] == KVNeed(num_cached=800, num_cached_blocks=200, num_blocks=215, max_blocks=215)
    run.to_end()
    assert needs == {}


@pytest.mark.parametrize("policy", ["sjf", "interactive"])
def test_a_preempted_request_keeps_its_key_whatever_of_it_is_cached(policy: str):
    request = make_request("r", prompt=[7] * 40, max_tokens=20)
    run = Run(make_scheduler(policy=policy), request)
    run.steps(2)
    before = run.scheduler.order.keys["r"]
    builder = PlanBuilder(run.scheduler.config.token_budget, run.now)
    preempt(run.scheduler._state, request, builder, PreemptionCause.LIMITS)
    run.scheduler.order.begin_step()
    assert run.scheduler.order.head() is request
    assert run.scheduler.order.keys["r"] == before


def test_lpm_scores_a_bounded_number_in_a_step():
    prefix = list(range(40))
    scheduler = make_scheduler(policy="lpm", max_num_seqs=1, num_blocks=400, max_num_batched_tokens=64)
    run = Run(scheduler, make_request("first", prompt=[*prefix, 1], max_tokens=1))
    for i in range(200):
        scheduler.add(make_request(f"w{i:03}", prompt=[*prefix, i], max_tokens=1, arrived_at=1.0 + i), 1.0)
    run.step()
    kv_needs = scheduler.order.policy.kv_needs
    assert kv_needs is not None
    for expected in (32, 64, 96):
        run.scheduler.order.begin_step()
        assert sum(kv_needs[r.request_id].num_cached > 0 for r in scheduler.waiting) == expected


def test_vtc_serves_in_proportion_to_weight():
    scheduler = make_scheduler(policy="vtc", max_num_seqs=2, num_blocks=200)
    run = Run(scheduler)
    for i in range(40):
        for tenant, weight in (("light", 1.0), ("heavy", 3.0)):
            scheduler.add(make_request(f"{tenant}{i:02}", tenant=tenant, weight=weight), 0.0)
    run.steps(80)
    ended = [told.request_id for told in run.progress if told.finish_reason is not None]
    light, heavy = (sum(name.startswith(tenant) for name in ended) for tenant in ("light", "heavy"))
    assert 2.4 < heavy / light < 3.6


def test_vtc_lifts_a_tenant_that_comes_back_so_that_nobody_saves_up():
    counters = VirtualTokenCounters(2.0)
    busy, idle = make_request("b", prompt=100, tenant="busy"), make_request("i", prompt=1, tenant="idle")
    counters.on_queued(busy)
    counters.on_started(busy)
    busy.first_scheduled_at = 0.0
    assert counters.rank("busy")[0] == 100.0
    counters.on_queued(make_request("b2", tenant="busy"))
    counters.on_queued(idle)
    assert counters.rank("idle")[0] == 100.0
    assert counters.rank("busy") < counters.rank("idle")  # of equals, who joined first


def test_vtc_charges_a_prompt_once_and_each_output_token_with_its_weight():
    scheduler = make_scheduler(policy="vtc", max_num_seqs=1)
    run = Run(scheduler, make_request("a", prompt=8, max_tokens=3, tenant="t", weight=2.0))
    assert scheduler.terms("a")["counter_tokens"] == 0.0
    run.step()
    assert scheduler.terms("a")["counter_tokens"] == (8 + 2) / 2
    run.to_end()
    assert scheduler.order.policy.groups is not None
    assert scheduler.order.policy.groups.rank("t")[0] == (8 + 3 * 2) / 2


def test_vtc_forgets_tenants_that_would_be_lifted_anyway():
    counters, chooser = VirtualTokenCounters(2.0), Random(0)
    for i in range(5000):
        request = make_request(f"r{i}", prompt=chooser.randint(1, 9), tenant=f"t{i}")
        counters.on_queued(request)
        counters.on_started(request)
    assert len(counters._counters) <= 2 * MIN_COUNTERS_TO_PRUNE
    assert len(counters._lowest) <= MIN_COUNTERS_TO_PRUNE


def test_a_tenant_that_is_forgotten_while_it_runs_may_be_forgotten_again():
    counters = VirtualTokenCounters(2.0)
    runs_on = make_request("runs on", tenant="a")
    counters.on_queued(runs_on)
    counters.on_started(runs_on)
    counters._floor = 1e6
    counters._prune()
    assert "a" not in counters._counters
    runs_on.num_computed_tokens = runs_on.num_tokens
    counters.on_scheduled(runs_on, 1)
    assert counters.rank("a")[0] == 1e6 + 2.0  # as if it had been lifted
    counters._floor = 2e6
    counters._prune()
    assert "a" not in counters._counters


def test_changing_only_limits_keeps_what_a_policy_knows_of_service_given():
    scheduler = make_scheduler(policy="vtc")
    Run(scheduler, make_request(tenant="t")).to_end()
    rule = scheduler.order.policy.groups
    scheduler.configure(SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=9, policy="vtc"))
    assert scheduler.order.policy.groups is rule
    assert rule is not None
    assert rule.rank("t")[0] > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_terms_are_told_of_those_that_are_here(policy: str):
    scheduler = make_scheduler(policy=policy)
    scheduler.add(make_request("a", arrived_at=3.0, priority=1), 3.0)
    assert scheduler.terms("a")["arrived_at_s"] == 3.0
    assert scheduler.terms("gone") == {}


@pytest.mark.parametrize("field", ["ageing_s", "ageing_tokens_per_s", "output_token_weight", "prefill_tokens_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_parameters_that_no_order_can_be_made_of_are_refused(field: str, value: float):
    with pytest.raises(ConfigError, match=f"{field} is"):
        SchedulerConfig(**{field: value})


def wait_under_rr(num_before: int, num_slots: int, prompt: int, budget: int, quantum: int) -> float:
    """Steps from arrival to the first token of one that finds `num_before` before it, none of which has begun."""
    scheduler = make_scheduler(
        policy="rr",
        num_blocks=10_000,
        max_num_seqs=num_slots,
        max_num_batched_tokens=budget,
        quantum_tokens=quantum,
        enable_prefix_caching=False,
    )
    run = Run(scheduler, *(make_request(f"{i:02}", prompt=prompt, max_tokens=100) for i in range(num_before)))
    run.add(last := make_request("last", prompt=prompt, max_tokens=1, arrived_at=0.5))
    while last.first_token_at is None:
        run.step()
    return run.now


@pytest.mark.parametrize(
    ("num_before", "num_slots", "prompt"), [(1, 1, 8), (1, 5, 40), (4, 1, 40), (4, 2, 1), (11, 2, 8), (11, 5, 1)]
)
def test_round_robins_wait_is_quanta_side_by_side_and_prompts_one_after_another(num_before, num_slots, prompt):
    quantum, budget = 6, 8
    prompt_steps = -(-prompt // (budget - num_slots + 1))  # a budget that decoding requests have their part of
    waited = wait_under_rr(num_before, num_slots, prompt, budget, quantum)
    assert waited <= (num_before / num_slots + 1) * quantum + (num_before + 1) * prompt_steps


def test_prompts_are_not_computed_side_by_side_under_round_robin():
    """As if each slot had a budget of its own, the wait would be shorter than it is."""
    num_before, num_slots, prompt, budget, quantum = 10, 5, 40, 8, 6
    waited = wait_under_rr(num_before, num_slots, prompt, budget, quantum)
    assert waited > (num_before / num_slots + 1) * (quantum + prompt / budget)


@pytest.mark.parametrize(
    ("num_blocks", "expected"),
    [
        (10_000, 2 * (2 * 2000 + 2 * 64 * 10)),  # outputs are short: each of the 64 yields all of its 10 tokens
        (2, 2 * (2 * 2000 + 2 * (32 + 16 + 10 + 8 + 6 + 5 + 4 + 4 + 3 + 3))),  # the pool holds 32 tokens
    ],
)
def test_vtcs_bound_is_less_where_the_longest_output_or_the_kv_pool_bounds_what_is_to_come(num_blocks, expected):
    gap = policy_for(SchedulerConfig(policy="vtc", output_token_weight=2.0)).max_service_gap
    assert gap is not None
    assert gap(2000, 10, 64, num_blocks * 16) == expected
    assert gap(8, 2, 1, 10_000) == 2 * max(8, 2 * (8 + 2))  # the paper's, where that is less


def tips_first(
    config: SchedulerConfig,
    *,
    tip_s: Annotated[float, Range(0.0, 600.0)] = 60.0,
    guests: int = 4,
    by: Literal["sum", "share"] = "sum",
    ageing_s: float,
) -> Policy:
    def effective_arrival(request: Any) -> float:
        return request.arrived_at + tip_s * (request.priority > 0)

    return Policy(
        source="a restaurant",
        bound="tip_s",
        order=lambda r: (effective_arrival(r), r.request_id),
        overtaken_until=effective_arrival,
        terms=arrival_term,
    )


THIRD: dict[str, Any] = {"tips_first": tips_first}


def config(**args: Any) -> SchedulerConfig:
    return SchedulerConfig(policy="tips_first", policy_args=args)


def test_a_factory_declares_its_parameters_and_arguments_are_those_given_or_defaults():
    declared = parameters_of(tips_first)
    assert list(declared) == ["tip_s", "guests", "by", "ageing_s"]
    assert [p.allowed for p in declared.values()] == [
        "from 0 to 600",
        "an integer",
        "one of sum, share",
        "from 0.001 to 1e+09",
    ]

    made = policy_for(SchedulerConfig(policy="tips_first", ageing_s=7.0, policy_args={"tip_s": 5}), THIRD)
    assert made.arguments == {"tip_s": 5.0, "guests": 4, "by": "sum", "ageing_s": 7.0}

    by_setting = policy_for(SchedulerConfig(policy="mlfq", quantum_tokens=9, ageing_s=3.0))
    by_argument = policy_for(SchedulerConfig(policy="mlfq", policy_args={"quantum_tokens": 9, "ageing_s": 3}))
    assert by_argument.arguments == by_setting.arguments == {"quantum_tokens": 9, "mlfq_levels": 6, "ageing_s": 3.0}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"tips": 5.0}, r"tips_first has no argument 'tips' \(did you mean tip_s\?\); choose from tip_s, guests"),
        ({"tip_s": 601.0}, "policy argument tip_s is 601.0; it must be from 0 to 600"),
        ({"tip_s": float("nan")}, "policy argument tip_s is nan; it must be from 0 to 600"),
        ({"tip_s": "much"}, "policy argument tip_s is 'much'; it must be a number"),
        ({"tip_s": True}, "policy argument tip_s is True; it must be a number"),
        ({"guests": 1.5}, "policy argument guests is 1.5; it must be an integer"),
        ({"by": "sun"}, "policy argument by is 'sun'; choose one of sum, share"),
        ({"ageing_s": 0.0}, "policy argument ageing_s is 0.0; it must be from 0.001"),
    ],
)
def test_what_a_policy_has_no_use_for_is_refused_with_the_choices(args: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        policy_for(config(**args), THIRD)


def test_parameters_that_a_policy_does_not_have_or_could_not_be_given_are_refused():
    with pytest.raises(ConfigError, match="the policy fcfs has no argument 'ageing_s'; it has none"):
        policy_for(SchedulerConfig(policy_args={"ageing_s": 1.0}))

    def odd(config: SchedulerConfig, *, tables: list[int]) -> Policy:
        raise AssertionError("is not asked")

    with pytest.raises(ConfigError, match="parameter 'tables' of the policy is declared list"):
        parameters_of(odd)


@pytest.mark.parametrize("name", POLICIES)
def test_every_parameter_of_ours_without_a_default_is_a_setting(name: str):
    settings = {field.name for field in fields(SchedulerConfig)}
    open_ones = {p.name for p in parameters_of(POLICIES[name]).values() if p.default is None}
    assert open_ones <= settings
    assert (
        make_policy(POLICIES[name], SchedulerConfig(policy=name)).arguments.keys()
        == parameters_of(POLICIES[name]).keys()
    )


def test_a_policy_says_whether_it_heeds_priority():
    assert heeding_priority() == ["priority", "interactive", "edf", "least_slack"]
    assert policy_for(config(), THIRD).heeds_priority  # of another's nobody knows better than itself


class Served(GroupRule):
    """A group for each tenant; the least served is next."""

    def __init__(self) -> None:
        self.service: dict[str, float] = {}

    def group_of(self, request: RequestState) -> str:
        return request.tenant

    def rank(self, group: str) -> tuple[float, ...]:
        return (self.service.get(group, 0.0),)


def push(queue: RequestQueue, **fields: object) -> RequestState:
    request = make_request(**fields)
    queue.push(request, by_arrival(request))
    return request


def test_a_removed_request_is_passed_over_and_an_empty_queue_has_no_next():
    queue = RequestQueue()
    assert (queue.peek(), len(queue)) == (None, 0)
    with pytest.raises(IndexError):
        queue.pop()

    queue = RequestQueue()
    push(queue, request_id="a", arrived_at=1.0)
    queue.remove("a")
    again = push(queue, request_id="a", arrived_at=1.0)
    assert queue.pop() is again
    assert queue.peek() is None


def test_removed_entries_do_not_pile_up():
    queue = RequestQueue()
    push(queue, arrived_at=0.0)
    for i in range(10 * MIN_DEAD_ENTRIES):
        queue.remove(push(queue, arrived_at=1.0 + i).request_id)
    assert queue._num_entries <= 2 * MIN_DEAD_ENTRIES


@settings(deadline=None)
@given(chooser=st.randoms(use_true_random=False), num_acts=st.integers(1, 150))
def test_the_queue_agrees_with_sorting_all_of_it_each_time(chooser: Random, num_acts: int):
    rule = Served()
    queue, waiting = RequestQueue(rule), list[RequestState]()

    def place(request: RequestState) -> tuple[object, ...]:
        return (rule.rank(request.tenant), request.tenant, by_arrival(request))

    for _ in range(num_acts):
        act = chooser.choice(["push", "push", "pop", "remove", "serve"])
        if act == "push":
            waiting.append(push(queue, arrived_at=chooser.randint(0, 5), tenant=chooser.choice("abc")))
        elif act == "pop" and waiting:
            first = min(waiting, key=place)
            assert queue.pop() is first
            waiting.remove(first)
        elif act == "remove" and waiting:
            queue.remove(waiting.pop(chooser.randrange(len(waiting))).request_id)
        elif act == "serve":
            tenant = chooser.choice("abc")
            rule.service[tenant] = rule.service.get(tenant, 0.0) + chooser.randint(-2, 3)
            queue.note_rank(tenant)
        waiting.sort(key=place)
        assert queue.in_order() == waiting
        assert queue.peek() is (waiting[0] if waiting else None)
        assert len(queue) == len(waiting)
        assert sorted(r.request_id for r in queue) == sorted(r.request_id for r in waiting)

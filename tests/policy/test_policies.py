from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any

import pytest

from maitred.config import SchedulerConfig
from maitred.core.request import RequestState, RequestStatus
from maitred.policy.policies import POLICIES
from maitred.policy.policy import GroupRule, Policy, UsedQuanta, arrival_term, by_arrival
from tests.fakes import make_request, make_scheduler, token_at
from tests.scheduler.running import Run, tokens_by_request


def test_fcfs_serves_in_order_of_arrival_whatever_the_priority():
    requests = [make_request(arrived_at=float(i), priority=9 - i) for i in range(4)]
    run = Run(make_scheduler(max_num_seqs=1), *reversed(requests))
    run.to_end()
    assert sorted(requests, key=lambda r: r.first_scheduled_at or 0.0) == requests


def test_an_urgent_request_overtakes_and_takes_the_slot_of_a_less_urgent_one():
    slow = make_request("slow", max_tokens=9, priority=2, arrived_at=0.0)
    urgent = make_request("urgent", max_tokens=3, priority=0, arrived_at=1.0)
    run = Run(make_scheduler(max_num_seqs=1, policy="priority"), slow)
    run.steps(2)
    run.add(urgent)
    plan = run.step()
    assert [row.request_id for row in plan.rows] == ["urgent"]
    assert plan.forgotten_request_ids == ("slow",)
    assert slow.status is RequestStatus.WAITING
    run.to_end()
    assert slow.output_token_ids == [token_at("slow", i) for i in range(8, 17)]
    assert slow.num_preemptions == 1


def test_equal_priority_never_preempts_for_a_slot():
    first, second = make_request(arrived_at=1.0, max_tokens=9), make_request(arrived_at=0.0)
    run = Run(make_scheduler(max_num_seqs=1, policy="priority"), first)
    run.step()
    run.add(second)
    run.to_end()
    assert first.num_preemptions == 0


def test_of_several_the_least_urgent_is_preempted_and_no_more_than_needed():
    requests = [make_request(f"p{p}", priority=p, max_tokens=30, arrived_at=0.0) for p in (1, 3, 2)]
    run = Run(make_scheduler(max_num_seqs=3, policy="priority"), *requests)
    run.steps(2)
    run.add(make_request("urgent", arrived_at=0.0))
    run.step()
    assert [r.request_id for r in requests if r.num_preemptions] == ["p3"]


def test_an_urgent_request_that_lacks_blocks_takes_them_from_less_urgent_ones():
    low = make_request("low", prompt=12, max_tokens=12, priority=1, arrived_at=0.0)
    high = make_request("high", prompt=16, priority=0, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=6, policy="priority"), low)
    run.steps(2)
    run.add(high)
    assert [row.request_id for row in run.step().rows] == ["high"]
    run.to_end()


def test_blocks_that_a_victim_shares_or_the_urgent_one_would_reuse_do_not_count_as_room():
    peer = make_request("peer", prompt=16, max_tokens=12, priority=0, arrived_at=0.0)
    low = make_request("low", prompt=4, max_tokens=12, priority=1, arrived_at=0.0)
    large = make_request("large", prompt=20, priority=0, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=8, policy="priority"), peer, low)
    run.steps(2)
    run.add(large)
    run.step()
    assert low.num_preemptions == 0
    run.to_end()

    peer = make_request("peer", prompt=16, max_tokens=12, priority=0, arrived_at=0.0)
    low = make_request("low", prompt=[*peer.spec.prompt_token_ids, 1], max_tokens=12, priority=1, arrived_at=0.0)
    run = Run(make_scheduler(num_blocks=8, policy="priority"), peer)
    run.step()
    run.add(low)
    run.steps(2)
    run.add(make_request("large", prompt=16, priority=0, arrived_at=1.0))  # low alone would give 1 of its 5 blocks
    run.step()
    assert low.num_preemptions == 0
    run.to_end()

    peer = make_request("peer", prompt=6, max_tokens=3, priority=0, arrived_at=0.0)
    low = make_request("low", prompt=17, max_tokens=3, priority=1, arrived_at=0.0)
    run = Run(make_scheduler(num_blocks=8, policy="priority"), peer, low)
    run.steps(2)
    run.add(make_request("high", prompt=[*low.spec.prompt_token_ids[:8], *range(20)], max_tokens=1, arrived_at=1.0))
    run.step()
    assert low.num_preemptions == 0
    run.to_end()


def test_long_prompts_under_way_let_the_urgent_by_and_go_on_in_order():
    long = make_request("long", prompt=60, priority=1, arrived_at=0.0)
    run = Run(make_scheduler(max_num_batched_tokens=8, policy="priority"), long)
    run.steps(2)
    run.add(make_request("urgent", prompt=6, arrived_at=2.0))
    assert tokens_by_request(run.step()) == {"urgent": 6, "long": 2}
    run.add(make_request("peer", prompt=6, priority=1, arrived_at=3.0))
    assert tokens_by_request(run.step()) == {"urgent": 1, "long": 7}
    run.to_end()
    assert long.num_preemptions == 0

    first = make_request("first", prompt=60, priority=1, arrived_at=0.0)
    run = Run(make_scheduler(max_num_batched_tokens=8, policy="priority"), first)
    run.step()
    run.add(make_request("urgent", prompt=20, arrived_at=2.0))
    assert [tokens_by_request(plan) for plan in run.steps(3)] == [
        {"urgent": 8},
        {"urgent": 8},
        {"urgent": 4, "first": 4},
    ]
    run.to_end()


def test_blocks_that_the_urgent_one_shares_with_its_victim_count_once():
    """Its hit is 2 of the victim's 5 blocks: 4 more are needed, 3 come from the victim and 1 is free."""
    low = make_request("low", prompt=17, max_tokens=3, priority=1, arrived_at=0.0)
    run = Run(make_scheduler(num_blocks=6, policy="priority"), low)
    run.steps(2)
    high = make_request("high", prompt=[*low.spec.prompt_token_ids[:8], *range(16)], max_tokens=1, arrived_at=1.0)
    run.add(high)
    assert [row.request_id for row in run.step().rows] == ["high"]
    assert high.num_cached_tokens == 8
    run.to_end()


def test_having_waited_long_enough_outweighs_priority_and_keeps_the_slot():
    patient = make_request("patient", priority=1, arrived_at=0.0)
    later = make_request("later", priority=0, arrived_at=10.5)
    soon = make_request("soon", priority=0, arrived_at=9.5)
    scheduler = make_scheduler(policy="priority", ageing_s=10.0)
    for request in (later, patient, soon):
        scheduler.add(request, 11.0)
    assert scheduler.waiting == (soon, patient, later)

    aged = make_request("aged", priority=1, arrived_at=0.0, max_tokens=20)
    run = Run(make_scheduler(max_num_seqs=1, policy="priority", ageing_s=10.0), aged)
    run.step()
    run.add(make_request(priority=0, arrived_at=10.5))
    run.to_end()
    assert aged.num_preemptions == 0


def test_changing_the_policy_reorders_those_who_wait_and_loses_none():
    requests = [make_request(arrived_at=float(i), priority=3 - i) for i in range(4)]
    run = Run(make_scheduler(max_num_seqs=1), *requests)
    run.step()
    run.scheduler.set_policy("priority")
    assert run.scheduler.waiting == tuple(reversed(requests[1:]))
    run.to_end()
    assert all(r.finished for r in requests)


# -- The seam: anybody's policy is an entry too.


@dataclass
class LeastServed(GroupRule):
    """Fair share by tokens: each tenant a group, ranked by what it has had (VTC, arXiv:2401.00588, in essence)."""

    service: dict[str, float] = field(default_factory=dict)
    num_finished: int = 0

    def group_of(self, request: RequestState) -> str:
        return request.tenant

    def rank(self, group: str) -> tuple[float, ...]:
        return (self.service.get(group, 0.0),)

    def on_scheduled(self, request: RequestState, num_tokens: int) -> None:
        self.service[request.tenant] = self.service.get(request.tenant, 0.0) + num_tokens

    def on_finished(self, request: RequestState) -> None:
        self.num_finished += 1


def _of_another(**parts: Any) -> Policy:
    stated = {"source": "a test", "bound": "none", "overtaken_until": lambda r: inf, "terms": arrival_term}
    return Policy(**{"order": by_arrival, **stated, **parts})


def _sliced(config: SchedulerConfig) -> Policy:
    quanta: dict[str, UsedQuanta] = {}
    return _of_another(
        order=lambda r: (quanta[r.request_id].num_used if r.request_id in quanta else 0, *by_arrival(r)),
        quanta=quanta,
        quantum_end=lambda r: max(r.num_computed_tokens, r.num_prompt_tokens) + 12,
    )


def _fair_share(config: SchedulerConfig) -> Policy:
    return _of_another(groups=LeastServed())


def _newest_victim(config: SchedulerConfig) -> Policy:
    return _of_another(victim=lambda r: (-r.num_output_tokens, r.request_id))


OTHERS = {"sliced": _sliced, "fair": _fair_share, "victim": _newest_victim}


@pytest.fixture(autouse=True)
def _others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in OTHERS.items():
        monkeypatch.setitem(POLICIES, name, make)


@pytest.mark.parametrize("name", [*POLICIES, *OTHERS])
@pytest.mark.parametrize("seed", range(2))
def test_under_every_policy_everybody_finishes_with_the_right_tokens(name: str, seed: int):
    chooser = Random(seed)
    scheduler = make_scheduler(num_blocks=12, max_num_seqs=3, max_num_batched_tokens=12, policy=name)
    requests = [
        make_request(
            prompt=chooser.randint(1, 20),
            max_tokens=chooser.randint(1, 20),
            arrived_at=float(i // 3),
            priority=chooser.randint(0, 2),
            tenant=chooser.choice("abc"),
        )
        for i in range(15)
    ]
    run = Run(scheduler)
    for i, request in enumerate(requests):
        run.add(request)
        run.steps(i % 3)
    run.to_end()
    for r in requests:
        assert r.output_token_ids == [token_at(r.request_id, r.num_prompt_tokens + i) for i in range(r.max_tokens)]
    assert run.scheduler.stats.num_blocks_used == 0


def test_a_quantum_gives_the_slot_to_those_who_wait():
    long, short = make_request("long", max_tokens=40, arrived_at=0.0), make_request("short", arrived_at=1.0)
    run = Run(make_scheduler(max_num_seqs=1, policy="sliced"), long, short)
    run.to_end()
    assert short.finished_at is not None
    assert long.finished_at is not None
    assert short.finished_at < long.finished_at
    assert long.num_preemptions == 1  # nobody waits any more, so its next quantum has no end


def test_groups_decide_who_is_served_and_are_told_of_service_and_of_the_end():
    greedy = [make_request(f"greedy{i}", tenant="greedy", arrived_at=float(i)) for i in range(3)]
    modest = make_request("modest", tenant="modest", arrived_at=9.0)
    run = Run(make_scheduler(max_num_seqs=1, policy="fair"), *greedy, modest)
    run.to_end()
    order = sorted([*greedy, modest], key=lambda r: r.first_scheduled_at or 0.0)
    assert [r.request_id for r in order] == ["greedy0", "modest", "greedy1", "greedy2"]

    scheduler = make_scheduler(policy="fair")
    Run(scheduler, make_request(prompt=8, max_tokens=3, tenant="a"), make_request(tenant="b")).to_end()
    rule = scheduler.order.policy.groups
    assert isinstance(rule, LeastServed)
    assert (rule.service, rule.num_finished) == ({"a": 10, "b": 11}, 2)


def test_a_victim_rule_decides_who_is_preempted_for_blocks():
    old = make_request("old", prompt=8, max_tokens=9, arrived_at=0.0)
    new = make_request("new", prompt=8, max_tokens=9, arrived_at=1.0)
    run = Run(make_scheduler(num_blocks=6, policy="victim"), old)
    run.step()
    run.add(new)
    run.to_end()
    assert new.num_preemptions == 1

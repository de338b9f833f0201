"""Loads of tensor requests at random: what happens to `Lanes` and, told of it, to `SlowLanes`."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from maitred.config import SchedulerConfig
from maitred.core.errors import InvalidRequest, ModelNotFound, Overloaded
from maitred.core.request import FinishReason, RequestStatus
from maitred.core.step import RequestProgress
from maitred.core.tensor_request import (
    Batch,
    BatchOutcome,
    BatchRules,
    Instance,
    LaneKey,
    QueueRules,
    TensorRequest,
    TensorSpec,
)
from maitred.policy.order import ServiceOrder
from maitred.policy.parameters import make_policy
from maitred.policy.policies import POLICIES
from maitred.policy.policy import GroupRule, Policy, Queued, Rank, arrival_term, by_arrival
from maitred.scheduler.lanes import Lanes
from tests.fakes import with_terms
from tests.scheduler.slow_lanes import SlowLanes

CONFIG = SchedulerConfig(ageing_s=5.0, ageing_tokens_per_s=4.0, default_ttft_slo_s=3.0, prefill_tokens_per_s=8.0)


class FewestRunning(GroupRule):
    """A rule whose ranks fall: the tenant that has fewest requests here is next."""

    def __init__(self) -> None:
        self._num_here: dict[str, int] = {}

    def group_of(self, request: Queued) -> str:
        return request.tenant

    def rank(self, group: str) -> Rank:
        return (self._num_here.get(group, 0),)

    def on_started(self, request: Queued) -> None:
        self._num_here[request.tenant] = self._num_here.get(request.tenant, 0) + 1

    def on_finished(self, request: Queued) -> None:
        self._num_here[request.tenant] = self._num_here.get(request.tenant, 0) - 1


def fewest_running(config: SchedulerConfig) -> Policy:
    return Policy(
        source="a test",
        bound="none",
        order=by_arrival,
        overtaken_until=lambda request: request.arrived_at,
        terms=arrival_term,
        groups=FewestRunning(),
    )


MAKERS = {**POLICIES, "fewest_running": fewest_running}


def make_tensor(request_id: str = "t0", model: str = "m", *, bucket: str = "", **fields: Any) -> TensorRequest:
    lane = LaneKey(model, 1, bucket)
    return TensorRequest(TensorSpec(request_id=request_id, lane=lane, **with_terms({"arrived_at": 0.0, **fields})))


def policy_named(name: str) -> Policy:
    return make_policy(MAKERS[name], replace(CONFIG, policy=name))


def draw_rules(dice: Random) -> BatchRules:
    most = dice.choice([0, 1, 4, 8, 8])
    levels = dice.choice([0, 0, 3])
    return BatchRules(
        max_batch_size=most,
        dynamic=dice.random() < 0.9,
        preferred_sizes=tuple(dice.sample(range(1, most + 1), dice.randint(0, 2))) if most > 2 else (),
        delay_s=dice.choice([0.0, 0.5, 2.0]),
        auto_delay=dice.random() < 0.15,
        preserve_ordering=dice.random() < 0.2,
        num_levels=levels,
        default_level=2 if levels else 0,
        queue=draw_queue(dice),
        level_queues=((1, draw_queue(dice)),) if levels else (),
        instances=tuple(draw_instance(dice) for _ in range(dice.randint(1, 3))),
        machine_share=dice.choice([0.25, 1.0]),
    )


def draw_queue(dice: Random) -> QueueRules:
    return QueueRules(
        max_size=dice.choice([0, 0, 5]),
        timeout_s=dice.choice([0.0, 1.0, 4.0]),
        delays=dice.random() < 0.5,
        allow_override=dice.random() < 0.5,
    )


def draw_instance(dice: Random) -> Instance:
    names = dice.sample(["R1", "R2"], dice.choice([0, 0, 1, 2]))
    return Instance(resources=tuple((name, dice.randint(1, 3)) for name in names), weight=dice.randint(0, 3))


class LaneWorld:
    """Everything that happens, at random; `check` compares after each step."""

    def __init__(self, policy: str, seed: int) -> None:
        self.dice, self.now = Random(seed), 0.0
        self.llm_has_rows = False
        self.order: ServiceOrder[TensorRequest] = ServiceOrder(policy_named(policy))
        share = self.dice.choice([0.1, 0.5, 1.0])
        self.lanes = Lanes(self.order, lambda: self.llm_has_rows, share)
        self.slow = SlowLanes(policy_named(policy), share)
        self.num_requests = 0
        self.copies: dict[str, TensorRequest] = {}  # the slow one's
        self.ended: dict[str, FinishReason] = {}
        self.batches: list[Batch] = []
        self.answers: dict[str, list[str]] = {}  # tenant -> ids, as they were told
        for number in range(self.dice.randint(1, 4)):
            self.load(number)

    def load(self, number: int) -> None:
        rules = draw_rules(self.dice)
        self.lanes.load(f"m{number}", 1, rules)
        self.slow.load((f"m{number}", 1), rules)

    def step(self) -> None:
        acts = [self.add] * 8 + [self.complete] * 4 + [self.wait] * 3 + [self.abort, self.toggle_llm]
        acts += [self.swap, self.reload] if self.dice.random() < 0.3 else []
        self.dice.choice(acts)()
        self.dispatch()

    def add(self) -> None:
        """One, or many to one model."""
        model = self.dice.randint(0, 3)
        for _ in range(self.dice.choice([1, 1, 1, 6])):
            self.add_one(model)

    def add_one(self, model_number: int) -> None:
        dice, number = self.dice, self.num_requests
        self.num_requests += 1
        fields = {
            "num_rows": dice.choice([1, 1, 1, 2, 3]),
            "work": dice.choice([0.1, 1.0, 5.0]),
            "level": dice.randint(0, 4),
            "timeout_s": dice.choice([None, 0.5, 3.0]),
            "priority": dice.randint(0, 2),
            "tenant": f"t{dice.randint(0, 2)}",
            "weight": 1.0 + dice.randint(0, 1),
            "ttft_slo_s": dice.choice([None, 0.0, 2.0]),
            "start_by": dice.choice([None] * 8 + [self.now + 3.0]),
            "finish_by": dice.choice([None] * 8 + [self.now + 2.0]),
        }
        model, bucket = f"m{model_number}", dice.choice(["", "", "a"])
        one, other = (
            make_tensor(f"r{number:04d}", model, bucket=bucket, **{"arrived_at": self.now, **fields}) for _ in range(2)
        )
        try:
            self.lanes.add(one, self.now)
        except (InvalidRequest, ModelNotFound, Overloaded):
            return
        self.copies[one.request_id] = other
        self.slow.add(other, self.now)

    def complete(self) -> None:
        if self.lanes.batches:
            batch = self.dice.choice(self.lanes.batches)
            some = tuple((name, "it failed") for name in batch.request_ids[:1]) if self.dice.random() < 0.1 else ()
            lost = self.dice.random() < 0.15
            outcome = BatchOutcome(compute_us=self.dice.randint(0, 900_000), errors=some, lost=lost)
            told = self.lanes.completed(batch, outcome, self.now)
            again = {one.request_id for one in self.lanes.requests if one.status is RequestStatus.WAITING}
            self.slow.completed(batch.number, outcome, set(batch.request_ids) - again)
            self.take(told)

    def wait(self) -> None:
        """To the moment of which it was told, or some way; before that moment nothing may go."""
        at = self.lanes.next_wake(self.now)
        passed = self.dice.choice([0.1, 0.5, 1.5])
        if at is not None and self.dice.random() < 0.7:
            if at > self.now and self.dice.random() < 0.3:
                assert self.slow.dispatch((self.now + at) / 2) == ()
            self.now = at
        else:
            self.now += passed

    def abort(self) -> None:
        if self.lanes.requests:
            request = self.dice.choice(self.lanes.requests)
            told = self.lanes.finish(request.request_id, FinishReason.ABORT, self.now)
            self.take([told] if told is not None else [])

    def toggle_llm(self) -> None:
        self.llm_has_rows = self.slow.llm_has_rows = not self.llm_has_rows

    def swap(self) -> None:
        name, share = self.dice.choice(sorted(MAKERS)), self.dice.choice([0.1, 0.5])
        self.order = ServiceOrder(policy_named(name))
        self.lanes.reorder(self.order, share)
        self.slow.reorder(policy_named(name), share)

    def reload(self) -> None:
        number = self.dice.randint(0, 3)
        if self.dice.random() < 0.5:
            self.load(number)
        elif (f"m{number}", 1) in self.slow.models:
            self.lanes.unload(f"m{number}", 1)
            self.slow.unload((f"m{number}", 1))

    def dispatch(self) -> None:
        self.take(self.lanes.expire(self.now))
        batches = self.lanes.dispatch(self.now)
        assert batches == self.slow.dispatch(self.now)
        self.batches += batches
        assert self.lanes.dispatch(self.now) == ()
        at = self.lanes.next_wake(self.now)
        assert at is None or at > self.now
        self.lanes.check_invariants()

    def take(self, told: list[RequestProgress]) -> None:
        for progress in told:
            assert progress.request_id not in self.ended
            assert progress.finish_reason is not None
            self.ended[progress.request_id] = progress.finish_reason
            request = self.copies[progress.request_id]
            self.answers.setdefault(f"{request.spec.lane.model} {request.tenant}", []).append(progress.request_id)
            self.slow.end(request)

    def drain(self) -> None:
        """Nothing more comes; all that is here ends."""
        self.llm_has_rows = self.slow.llm_has_rows = False
        for _ in range(20 * self.num_requests + 20):
            if not self.lanes.requests:
                return
            self.complete()
            at = self.lanes.next_wake(self.now)
            self.now = self.now if at is None or self.lanes.batches else at
            self.dispatch()
        raise AssertionError(f"{len(self.lanes.requests)} requests never end")

"""Conformance worlds: small seeded loads in which `conformance` watches a policy, a step at a time. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any, TypeVar

from msgspec import structs

from maitred.config import SchedulerConfig
from maitred.core.request import RequestSpec, RequestState, SamplingParams, Terms
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher
from maitred.policy.policies import fcfs
from maitred.policy.policy import Policy, PolicyFactory
from maitred.scheduler.reservations import ReservedBlocks
from maitred.scheduler.scheduler import Scheduler

T = TypeVar("T")

Execute = Callable[[SchedulerOutput], ModelOutput]
Bring = Callable[[Sequence[int], RequestState, int], object]
"""(blocks, request, position): writes KV of the request's tokens from there on, which came from elsewhere."""

CHECKED, OTHER = "checked", "other"  # names under which a world's scheduler knows the policy, and fcfs


def answer(plan: SchedulerOutput) -> ModelOutput:
    """An executor in a line: every row that samples gets a token."""
    return ModelOutput(tuple(SampledRow(row.request_id, (7,)) for row in plan.rows if row.samples))


class Dice:
    """Random numbers that are a function of their seed (splitmix64; Steele, Lea, Flood, OOPSLA 2014)."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def between(self, low: int, high: int) -> int:
        """`low` and `high` included."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        return low + (z ^ (z >> 31)) % (high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.between(1, 100) <= percent

    def choose(self, choices: Sequence[T]) -> T:
        return choices[self.between(0, len(choices) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A load and the room for it. A step takes a second."""

    seed: int = 0
    num_requests: int = 20
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 16
    num_blocks: int = 24
    block_size: int = 2
    num_tenants: int = 3
    num_priorities: int = 3
    longest_prompt: int = 16
    longest_output: int = 8
    arrivals_percent: int = 60  # chance of another arrival before a step, asked again after each
    samples_percent: int = 20  # chance that one comes as several samples
    aborts_percent: int = 2  # chance of an abort before a step
    kv_percent: int = 0  # chance that KV comes from elsewhere before a step, or is waited for, held or released
    enable_prefix_caching: bool = True

    @property
    def config(self) -> SchedulerConfig:
        """Parameters as small as the world, so that everything comes into play within a few steps."""
        return SchedulerConfig(
            policy=CHECKED,
            predictor="max_tokens",
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=max(self.max_num_batched_tokens, self.max_num_seqs),
            ageing_s=5.0,
            ageing_tokens_per_s=4.0,
            quantum_tokens=3,
            mlfq_levels=4,
            default_ttft_slo_s=3.0,
            prefill_tokens_per_s=8.0,
        )


def scenario_of(seed: int) -> Scenario:
    """Any world, by number: tight and roomy, calm and overloaded, with and without prefix cache."""
    dice = Dice(seed)
    block_size = dice.between(1, 4)
    longest = dice.between(4, 24)
    return Scenario(
        seed=seed,
        num_requests=dice.between(4, 30),
        max_num_seqs=dice.between(1, 6),
        max_num_batched_tokens=dice.between(2, 24),
        num_blocks=-(-2 * longest // block_size) + dice.between(0, 40),
        block_size=block_size,
        num_tenants=dice.between(1, 4),
        num_priorities=dice.between(1, 4),
        longest_prompt=longest,
        longest_output=dice.between(1, longest),
        arrivals_percent=dice.between(15, 85),
        aborts_percent=dice.choose([0, 0, 5]),
        enable_prefix_caching=dice.chance(75),
        kv_percent=90 if seed % 3 == 2 else 0,
    )


@dataclass(slots=True, eq=False)
class Moment:
    """A step of a world, just planned."""

    world: World
    plan: SchedulerOutput
    places_before: dict[str, tuple[str, tuple[Any, ...]]]  # id -> (group, key) of those that waited or ran
    quanta_before: dict[str, int]
    started: list[RequestState] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)


class World:
    """A scheduler under the checked policy, and the load of a scenario."""

    def __init__(
        self,
        make: PolicyFactory,
        scenario: Scenario,
        execute: Execute = answer,
        bring: Bring = lambda blocks, request, start: None,
    ) -> None:
        self.scenario, self.dice, self.now = scenario, Dice(scenario.seed ^ 0x5EED), 0.0
        self._execute, self._bring = execute, bring
        self._hasher = TokenHasher(scenario.block_size, "conformance")
        self.kv_cache = KVCacheManager(
            num_blocks=scenario.num_blocks,
            block_size=scenario.block_size,
            hasher=self._hasher,
            enable_prefix_caching=scenario.enable_prefix_caching,
        )
        policies: dict[str, PolicyFactory] = {CHECKED: make, OTHER: fcfs}
        self.scheduler = Scheduler(scenario.config, self.kv_cache, policies=policies)
        self.requests: dict[str, RequestState] = {}  # all there ever were
        self.num_finished = 0
        self._coming: dict[str, ReservedBlocks] = {}  # KV from elsewhere, by request
        self.num_arrived = self.num_given_up = 0  # of reservations
        self.plans: list[SchedulerOutput] = []

    @property
    def policy(self) -> Policy:
        return self.scheduler.order.policy

    def group_of(self, request: RequestState) -> str:
        rule = self.policy.groups
        return rule.group_of(request) if rule is not None else ""

    def place(self, request: RequestState) -> tuple[str, tuple[Any, ...]]:
        return self.group_of(request), self.scheduler.order.keys[request.request_id]

    def num_quanta(self, request: RequestState) -> int:
        used = self.policy.quanta.get(request.request_id)
        return 0 if used is None else used.num_used

    def arrive(self) -> None:
        """Let as many arrive as the scenario wants before this step, and perhaps an abort."""
        scenario, dice = self.scenario, self.dice
        while len(self.requests) < scenario.num_requests and dice.chance(scenario.arrivals_percent):
            for request in self.draw_samples():
                self.add(request)
        living = [*self.scheduler.waiting, *self.scheduler.running, *self.scheduler.waiting_for_kv]
        if living and dice.chance(scenario.aborts_percent):
            self.scheduler.abort(dice.choose(living).request_id, self.now)
            self._note_given_up()
            self.num_finished += 1
        if scenario.kv_percent and dice.chance(scenario.kv_percent):
            acts = [self._reserve] * 3 + [self._kv_arrives] * 2 + [self._hold, self._release]
            dice.choose(acts)()

    def _reserve(self) -> None:
        for request in self.scheduler.waiting[: self.dice.between(0, 3)]:
            num_tokens = self.dice.between(0, request.num_tokens)
            reserved = self.scheduler.reserve(request.request_id, num_tokens, self.now)
            if reserved is not None:
                self._coming[request.request_id] = reserved

    def _kv_arrives(self) -> None:
        """Let KV arrive: all of it, or the beginning, or nothing."""
        if self._coming:
            request_id = self.dice.choose(sorted(self._coming))
            start, _, blocks = self._coming.pop(request_id)
            blocks = blocks[: self.dice.between(0, len(blocks))]
            self._bring(blocks, self.requests[request_id], start)
            num_tokens = start + len(blocks) * self.scenario.block_size
            came = self.scheduler.kv_arrived(request_id, num_tokens, self.now)
            assert came, f"the reservation of {request_id} is lost"
            self.num_arrived += bool(blocks)

    def _hold(self) -> None:
        request = self.dice.choose(list(self.requests.values())) if self.requests else None
        if request is not None:
            self.scheduler.hold(f"lease {self.dice.between(0, 2)}", request.block_hashes, self.now)

    def _release(self) -> None:
        self.scheduler.release(f"lease {self.dice.between(0, 2)}", self.now)

    def end_leases(self) -> None:
        for number in range(3):
            self.scheduler.release(f"lease {number}", self.now)

    def _note_given_up(self) -> None:
        for request_id in self.scheduler.given_up.request_ids:
            del self._coming[request_id]
            self.num_given_up += 1

    def draw_samples(self) -> list[RequestState]:
        """A request, or several samples of its prompt."""
        spec = self.draw_request().spec
        if not self.dice.chance(self.scenario.samples_percent):
            return [RequestState(spec)]
        first = structs.replace(spec, parent_id=spec.request_id)
        others = [self._sample_of(first, index) for index in range(1, self.dice.between(2, 4))]
        return [RequestState(sample) for sample in (first, *others)]

    def draw_request(self) -> RequestState:
        scenario, dice = self.scenario, self.dice
        tenant = dice.between(0, scenario.num_tenants - 1)
        max_tokens = dice.between(1, scenario.longest_output)
        return self.make_request(
            prompt=dice.between(1, scenario.longest_prompt),
            max_tokens=max_tokens,
            family=dice.between(0, 2) if dice.chance(60) else None,
            terms=Terms(
                priority=dice.between(0, scenario.num_priorities - 1),
                tenant=f"t{tenant}",
                weight=1.0 + tenant % 2,
                ttft_slo_s=dice.choose([None, None, 0.0, 2.0, 9.0]),
            ),
            predicted_output_tokens=self._draw_prediction(max_tokens),
        )

    def _draw_prediction(self, max_tokens: int) -> float:
        """Draw whatever a predictor may say, right and wrong."""
        return self.dice.choose([float(max_tokens), 1.0, 1e9, -3.0, float("nan")])

    def _sample_of(self, first: RequestSpec, index: int) -> RequestSpec:
        return structs.replace(
            first,
            request_id=f"{first.request_id}.{index}",
            sample_index=index,
            predicted_output_tokens=self._draw_prediction(first.max_tokens),
        )

    def make_request(self, *, prompt: int, max_tokens: int, family: int | None = None, **fields: Any) -> RequestState:
        """Prompts of one family begin alike; the others are like no other."""
        number = len(self.requests)
        tokens = [family if family is not None else 1000 + number] * prompt
        spec = RequestSpec(
            request_id=f"r{number:05d}",
            prompt_token_ids=tokens,
            sampling=SamplingParams(max_tokens=max_tokens),
            arrived_at=self.now,
            num_prompt_tokens=prompt,
            max_tokens=max_tokens,
            block_hashes=self._hasher.hash_prompt(tokens),
            **fields,
        )
        return RequestState(spec)

    def add(self, request: RequestState) -> None:
        self.requests[request.request_id] = request
        self.scheduler.add(request, self.now)

    def step(self) -> Moment:
        """Plans; `carry_out` does the rest of the step."""
        scheduler = self.scheduler
        before = [*scheduler.waiting, *scheduler.running]
        moment = Moment(
            world=self,
            places_before={r.request_id: self.place(r) for r in before},
            quanta_before={r.request_id: self.num_quanta(r) for r in before},
            plan=scheduler.schedule(self.now),
        )
        self._note_given_up()
        self.plans.append(moment.plan)
        forgotten = dict.fromkeys(moment.plan.forgotten_request_ids)
        waiting = scheduler.waiting
        moment.started = [self.requests[new.request_id] for new in moment.plan.new_requests]
        moment.preempted = [r for r in waiting if r.request_id in forgotten]
        return moment

    def carry_out(self, moment: Moment) -> None:
        output = self._execute(moment.plan)
        self.now += 1.0
        progress = self.scheduler.update(moment.plan, output, self.now)
        self.num_finished += sum(1 for told in progress if told.finish_reason is not None)

    def swap(self) -> None:
        """Change to another policy and back, between two steps."""
        self.scheduler.configure(replace(self.scheduler.config, policy=OTHER))
        self.scheduler.configure(replace(self.scheduler.config, policy=CHECKED))

    @property
    def max_steps(self) -> int:
        """More than enough for all requests one after another, each quantum computed anew without a prefix cache."""
        work = sum(r.num_prompt_tokens + (1 + r.max_tokens) * 4 for r in self.requests.values())
        return 100 + 10 * work


class ServiceMeter:
    """Service given to each tenant, counted from the plans and not by the policy."""

    def __init__(self, num_tenants: int, output_weight: float) -> None:
        self._output_weight = output_weight
        self._given = {f"t{number}": 0.0 for number in range(num_tenants)}
        self._lowest = dict.fromkeys(combinations(self._given, 2), 0.0)  # difference, of each pair, so far
        self._highest = dict(self._lowest)
        self._known: dict[str, int] = {}  # tokens computed of each request: what is computed again is no new service

    @property
    def widest(self) -> float:
        """Return the widest gap over every stretch of time and any two tenants."""
        return max(self._highest[pair] - self._lowest[pair] for pair in self._lowest)

    def read(self, plan: SchedulerOutput, requests: Mapping[str, RequestState]) -> None:
        """`requests` are all there ever were, by id."""
        for row in plan.rows:
            request = requests[row.request_id]
            start = max(row.start, self._known.get(row.request_id, 0))
            end = max(start, row.start + row.num_tokens)
            self._known[row.request_id] = end
            num_input = max(0, min(end, request.num_prompt_tokens) - start)
            tokens = num_input + self._output_weight * row.samples
            self._given[request.tenant] += tokens / request.weight
        for pair in self._lowest:
            difference = self._given[pair[0]] - self._given[pair[1]]
            self._lowest[pair] = min(self._lowest[pair], difference)
            self._highest[pair] = max(self._highest[pair], difference)

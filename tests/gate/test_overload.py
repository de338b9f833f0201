"""At ten times the load it can carry, a server does as much good as at its capacity, and is in time for those let in.

In simulated time, so that the machine that runs the tests makes no difference; `benchmarks/bench_servers.py overload`
is the same with a real engine and HTTP.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from maitred.config import AdmissionConfig
from maitred.core.clock import ManualClock
from maitred.core.errors import Overloaded
from maitred.core.request import FinishReason, RequestState
from maitred.core.step import ModelOutput, RequestProgress, SchedulerOutput
from maitred.gate.admission import admission_of
from maitred.gate.gate import Ask, Gate, Lease
from maitred.scheduler.engine_core import EngineCore
from maitred.tenancy.caller import anybody
from tests.fakes import FakeExecutor, make_scheduler, make_spec

OBJECTIVE_S = 1.0
CAPACITY = 21.0  # requests/s, with the lengths of overloading.py: see the first test


def make_server(seed: int = 1, **fields: object) -> OverloadedServer:
    policy = str(fields.pop("policy", "fcfs"))
    config = AdmissionConfig(**{"ttft_objective_s": OBJECTIVE_S, **fields})  # type: ignore[arg-type]
    return OverloadedServer(config, seed=seed, policy=policy)


def test_the_capacity_is_what_the_other_tests_take_it_for():
    server = make_server(ttft_objective_s=None, max_queued_requests=64)
    assert len(server.run(10 * CAPACITY, 30.0).ended) / 30.0 == pytest.approx(CAPACITY, rel=0.1)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (2, 3))])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ten_times_the_load_does_as_much_good_and_keeps_the_objective(policy: str, seed: int):
    at_capacity = make_server(seed, policy=policy).run(CAPACITY, 30.0)
    overloaded = make_server(seed, policy=policy).run(10 * CAPACITY, 30.0)
    assert overloaded.goodput(OBJECTIVE_S) >= 0.9 * at_capacity.goodput(OBJECTIVE_S)
    assert overloaded.goodput(OBJECTIVE_S) >= 0.8 * CAPACITY * 30.0
    for outcome in (at_capacity, overloaded):
        assert outcome.p99_ttft_s <= OBJECTIVE_S


def test_a_load_it_can_carry_is_let_in_and_one_without_admission_is_late():
    outcome = make_server().run(0.6 * CAPACITY, 60.0)
    assert outcome.num_refused <= 0.01 * outcome.num_offered
    assert outcome.p99_ttft_s <= OBJECTIVE_S
    outcome = make_server(ttft_objective_s=None, max_queued_requests=100_000).run(3 * CAPACITY, 20.0)
    assert outcome.goodput(OBJECTIVE_S) < 0.2 * CAPACITY * 20.0


def test_it_recovers_at_once_when_the_load_is_over():
    server = make_server()
    server.run(10 * CAPACITY, 20.0)
    after = server.run(0.5 * CAPACITY, 5.0)
    assert after.num_refused == 0
    assert after.p99_ttft_s <= OBJECTIVE_S


def test_a_machine_that_slows_down_lets_in_less_and_stays_in_time():
    server = make_server()
    server.run(3 * CAPACITY, 30.0)
    server.machine.slowness = 3.0
    server.run(3 * CAPACITY, 5.0)  # it notices
    outcome = server.run(3 * CAPACITY, 60.0)
    assert outcome.p99_ttft_s <= 1.25 * OBJECTIVE_S
    assert outcome.goodput(OBJECTIVE_S) >= 0.75 * CAPACITY / 3.0 * 60.0


def test_the_urgent_get_in_and_the_others_are_shed_for_them():
    server = make_server(max_queued_requests=8)
    outcome = server.run(5 * CAPACITY, 30.0, priority=lambda random: 0 if random.random() < 0.1 else 1)
    assert FinishReason.SHED in outcome.ended
    assert outcome.goodput(OBJECTIVE_S) >= 0.7 * CAPACITY * 30.0


def test_retry_after_is_how_long_it_takes_to_serve_those_turned_away():
    outcome = make_server().run(3 * CAPACITY, 10.0)
    assert all(1.0 <= s <= 120.0 for s in outcome.retry_after_s)
    # twice the capacity is turned away, and once the capacity could have been served meanwhile: 10 s of work
    assert outcome.retry_after_s[-1] == pytest.approx(10.0, rel=0.5)


NUM_SEQS = 16
BLOCK_SIZE = 16


class Machine(FakeExecutor):
    """A step costs 10 ms, 0.2 ms for each token and 0.5 ms for each row."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self._clock = clock
        self.slowness = 1.0

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self._clock.advance(self.slowness * (0.010 + 0.0002 * plan.num_tokens + 0.0005 * len(plan.rows)))
        return super().execute(plan)


@dataclass
class Outcome:
    """Of the requests that arrived in a span of time."""

    num_offered: int = 0
    num_refused: int = 0
    ttft_s: list[float] = field(default_factory=list)  # of those let in that got a token, in order
    ended: list[FinishReason] = field(default_factory=list)
    retry_after_s: list[float] = field(default_factory=list)

    def goodput(self, objective_s: float) -> int:
        return sum(ttft <= objective_s for ttft in self.ttft_s)

    @property
    def p99_ttft_s(self) -> float:
        return sorted(self.ttft_s)[int(0.99 * len(self.ttft_s))]


class OverloadedServer:
    """Feed it a rate of arrivals for a while; time goes on from where it stood."""

    def __init__(self, config: AdmissionConfig, *, policy: str = "fcfs", seed: int = 1, blocks: int = 4096) -> None:
        self.clock = ManualClock()
        self.machine = Machine(self.clock)
        scheduler = make_scheduler(
            num_blocks=blocks, block_size=BLOCK_SIZE, max_num_seqs=NUM_SEQS, max_num_batched_tokens=256, policy=policy
        )
        self.core = EngineCore(scheduler, self.machine, self.clock)
        self.gate = Gate(admission_of(config, scheduler.config))
        self._caller = anybody()
        self._random = Random(seed)
        self._num = 0
        self._requests: dict[str, tuple[RequestState, Outcome, Lease]] = {}

    def capacity(self) -> float:
        """Requests per second when all is full: a step has a token for each slot, and the prompts' share."""
        step_s = 0.010 + NUM_SEQS * 0.0007
        return 1.0 / (1.5 * 24 * step_s / NUM_SEQS + 64 * 0.0002)

    def run(self, rate: float, duration_s: float, **fields: object) -> Outcome:
        """Poisson arrivals; prompts of about 64 tokens, answers of about 32."""
        outcome, until = Outcome(), self.clock.now() + duration_s
        next_at = self.clock.now() + self._random.expovariate(rate)
        while self.clock.now() < until or self.core.has_work:
            if not self.core.has_work and next_at > self.clock.now():
                self.clock.advance(min(next_at, until) - self.clock.now() if next_at < until else 0.0)
            while next_at <= self.clock.now() and next_at < until:
                self._arrive(next_at, outcome, fields)
                next_at += self._random.expovariate(rate)
            if self.core.has_work:
                self._step()
            elif next_at >= until:
                break
        return outcome

    def _arrive(self, at: float, outcome: Outcome, fields: dict[str, object]) -> None:
        self._num += 1
        outcome.num_offered += 1
        spec = make_spec(
            f"r{self._num}",
            **{  # type: ignore[arg-type]
                "prompt": self._random.randint(8, 120),
                "max_tokens": 1 + min(int(self._random.expovariate(1 / 32)), 200),
                "arrived_at": at,
                "block_size": BLOCK_SIZE,
                **{name: value(self._random) if callable(value) else value for name, value in fields.items()},
            },
        )
        try:
            lease = self.gate.enter(self._caller, Ask(priority=spec.terms.priority), at)
            (spec,), shed = self.gate.admit(lease, [spec], at)
        except Overloaded as error:
            outcome.num_refused += 1
            outcome.retry_after_s.append(error.retry_after_s)
            return
        self._requests[spec.request_id] = (self.core.add(spec), outcome, lease)
        ended = [
            self.core.finish(request_id, FinishReason.SHED) for request_id in shed if not self._started(request_id)
        ]
        self._tell([progress for progress in ended if progress is not None], at)

    def _started(self, request_id: str) -> bool:
        return self._requests[request_id][0].first_scheduled_at is not None

    def _step(self) -> None:
        self._tell(self.core.step(), self.clock.now())

    def _tell(self, progress: list[RequestProgress], now: float) -> None:
        self.gate.progressed(progress, self.core.num_queued, now)
        for item in progress:
            if item.finish_reason is not None:
                request, outcome, lease = self._requests.pop(item.request_id)
                lease.end(request.num_tokens)
                outcome.ended.append(item.finish_reason)
                if request.first_token_at is not None:
                    outcome.ttft_s.append(request.first_token_at - request.arrived_at)

"""Predictors: what each knows, how little it may cost, and that a wrong one cannot do harm."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import SchedulerConfig
from maitred.core.clock import ManualClock
from maitred.core.errors import ConfigError
from maitred.core.request import FinishReason, RequestState
from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.log import Recorder, StepRecord
from maitred.decisions.replay import first_difference
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.policy.predictor import (
    NUM_FEATURES,
    PREDICTORS,
    Adversarial,
    MaxTokens,
    Oracle,
    Predictor,
    Quantile,
    Ranker,
    bounded_prediction,
    predictor_named,
    prompt_features,
)
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.scheduler import Scheduler
from maitred.testing.conformance import STEP_PROPERTIES
from maitred.testing.conformance_world import Scenario, World, scenario_of
from tests.fakes import MODEL, FakeExecutor, make_request, make_scheduler, make_spec
from tests.scheduler.running import Run

SHORT = "What is the time in {}?"
LONG = "Write a long story about {}, please."
PLACES = ("Rome", "Paris", "a small town", "the sea", "winter")


def ended(length: int, *, text: str = "", **fields: object) -> RequestState:
    """A request that generated `length` tokens."""
    given = {"prompt": 20, "max_tokens": 1000, "features": prompt_features(text), **fields}
    request = make_request(**given)  # type: ignore[arg-type]
    request.output_token_ids = [7] * length
    return request


def chats(count: int, seed: int = 1) -> list[RequestState]:
    """Half short questions, half stories; the lengths within a kind are drawn at random."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        is_long = rng.random() < 0.5
        text = (LONG if is_long else SHORT).format(rng.choice(PLACES))
        made.append(ended(1 + min(999, int(rng.lognormvariate(5.5 if is_long else 2.5, 0.4))), text=text))
    return made


def pairwise_accuracy(predictor: Predictor, requests: list[RequestState], skip: int) -> float:
    """Of pairs of unequal length, the share put in order; each is predicted before it is observed. Ties count half."""
    told = []
    for request in requests:
        told.append((bounded_prediction(predictor, request), request.num_output_tokens))
        predictor.observe(request)
    pairs = [(a, b) for i, a in enumerate(told[skip:]) for b in told[skip:][:i] if a[1] != b[1]]
    return sum(0.5 if a[0] == b[0] else (a[0] < b[0]) == (a[1] < b[1]) for a, b in pairs) / len(pairs)


def test_the_ranker_learns_from_words_what_lengths_alone_do_not_tell():
    requests = chats(400)
    assert pairwise_accuracy(MaxTokens(), requests, 200) == 0.5
    assert pairwise_accuracy(Quantile(), requests, 200) < 0.6
    assert pairwise_accuracy(Ranker(), requests, 200) > 0.7  # 0.5 within a kind, 1 between: 0.75 is all there is


def test_the_oracle_is_never_wrong_and_the_adversary_nearly_always():
    requests = chats(200)
    assert pairwise_accuracy(Oracle(lambda r: r.num_output_tokens), requests, 0) == 1.0
    assert pairwise_accuracy(Adversarial(lambda r: r.num_output_tokens), requests, 0) < 0.25


def test_the_ranker_forgets_what_is_no_longer_true():
    ranker = Ranker()
    for request in chats(300):
        ranker.observe(request)
    for _ in range(300):
        ranker.observe(ended(400, text=SHORT.format("Rome")))
        ranker.observe(ended(10, text=LONG.format("Rome")))
    assert ranker.predict(ended(0, text=SHORT.format("Rome"))) > ranker.predict(ended(0, text=LONG.format("Rome")))


def test_quantile_knows_tenant_and_prompt_length_and_falls_back_step_by_step():
    predictor = Quantile()
    assert predictor.predict(ended(0, max_tokens=77)) == 77
    for _ in range(Quantile.MIN_SEEN):
        predictor.observe(ended(10, tenant="a", prompt=20))
        predictor.observe(ended(300, tenant="a", prompt=400, max_tokens=1000))
    assert predictor.predict(ended(0, tenant="a", prompt=25)) == 10
    assert predictor.predict(ended(0, tenant="a", prompt=300)) == 300
    assert predictor.predict(ended(0, tenant="a", prompt=90)) in (10, 300), "the tenant's whole history"
    assert predictor.predict(ended(0, tenant="stranger")) in (10, 300), "everybody's history"
    assert predictor.predict(ended(0, tenant="a", prompt=300, max_tokens=5)) == 5


def test_quantile_keeps_a_bounded_history_and_forgets_the_oldest():
    predictor = Quantile()
    for tenant in range(3 * Quantile.MAX_HISTORIES):
        predictor.observe(ended(3, tenant=str(tenant)))
    assert len(predictor._histories) <= Quantile.MAX_HISTORIES
    for _ in range(Quantile.CAPACITY):
        predictor.observe(ended(50, tenant="t"))
    assert predictor.predict(ended(0, tenant="t")) == 50


def test_answers_cut_at_max_tokens_do_not_pull_a_prediction_down():
    ranker = Ranker()
    for _ in range(100):
        ranker.observe(ended(500, text=LONG.format("Rome")))
    weights = list(ranker._weights)
    ranker.observe(ended(5, text=LONG.format("Rome"), max_tokens=5))
    assert ranker._weights == weights


@pytest.mark.parametrize("name", sorted(PREDICTORS))
@given(st.integers(1, 10**6), st.text(max_size=60), st.text(max_size=8))
def test_every_prediction_is_a_length_the_request_may_have(name: str, max_tokens: int, text: str, tenant: str):
    predictor = predictor_named(name, lambda request: 3.0)
    request = ended(1, text=text, max_tokens=max_tokens, tenant=tenant)
    for _ in range(40):
        assert 1.0 <= bounded_prediction(predictor, request) <= max_tokens
        predictor.observe(request)


@given(st.one_of(st.text(max_size=3000), st.lists(st.integers(0, 2**31), max_size=300)))
def test_features_are_always_as_many_and_small(prompt: str | list[int]):
    features = prompt_features(prompt)
    assert len(features) == NUM_FEATURES
    assert all(0.0 <= x <= 1.5 for x in features)


def test_features_tell_what_was_asked_for():
    assert prompt_features("Is it?")[0] == 1.0
    assert prompt_features("It is.")[0] == 0.0
    assert prompt_features("In 500 words")[1] > prompt_features("in 20 words")[1] > prompt_features("in words")[1] == 0
    assert prompt_features("x " * 1000 + "tell me") == prompt_features("x " * 100_000 + "tell me"), (
        "only the end counts"
    )


def test_a_prediction_and_its_lesson_cost_little_however_long_the_text():
    text = "You are a helpful assistant. " * 2000 + "Please write a story about a cat in 300 words, and say why."
    requests, ranker = chats(300), Ranker()
    costs = []
    for request in requests:
        started = time.thread_time()
        told = ended(request.num_output_tokens, text=text)
        ranker.predict(told)
        ranker.observe(told)
        costs.append(time.thread_time() - started)
    assert sorted(costs)[len(costs) // 4] < 2e-3  # forty times what it takes


def test_two_that_saw_the_same_say_the_same():
    one, other = Ranker(), Ranker()
    for request in chats(100):
        one.observe(request)
        other.observe(request)
    assert [one.predict(r) for r in chats(50, 2)] == [other.predict(r) for r in chats(50, 2)]


def test_an_unknown_name_lists_the_choices_and_the_oracle_needs_a_simulation():
    with pytest.raises(ConfigError, match="adversarial, max_tokens, oracle, quantile, ranker"):
        predictor_named("crystal-ball")
    with pytest.raises(ConfigError, match="simulation"):
        predictor_named("oracle")


class Spy:
    """Says 3, and notes what it is told."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def predict(self, request: RequestState) -> float:
        return 3.0

    def observe(self, request: RequestState) -> None:
        self.seen.append((request.request_id, request.num_output_tokens))


def test_the_scheduler_asks_once_and_tells_only_of_ends_that_were_the_models():
    spy, plain = Spy(), make_scheduler()
    scheduler = Scheduler(plain.config, plain.kv_cache, predictor=spy)
    whole, gone, known = make_request("whole"), make_request("gone"), make_request("known", predicted_output_tokens=9.0)
    run = Run(scheduler, whole, gone, known)
    assert (whole.predicted_output_tokens, known.predicted_output_tokens) == (3.0, 9.0)
    run.step()
    scheduler.finish("gone", FinishReason.ABORT, run.now)
    scheduler.finish("known", FinishReason.STOP, run.now)  # a stop string
    run.to_end()
    assert spy.seen == [("known", 1), ("whole", 4)]


def test_the_predictor_can_be_changed_while_it_runs():
    scheduler = make_scheduler()
    run = Run(scheduler, make_request("a", max_tokens=20))
    scheduler.configure(replace(scheduler.config, predictor="max_tokens"))
    run.add(make_request("b", max_tokens=21))
    assert [r.predicted_output_tokens for r in scheduler.waiting] == [20, 21]
    with pytest.raises(ConfigError):
        scheduler.configure(replace(scheduler.config, predictor="oracle"))
    assert scheduler.config.predictor == "max_tokens"


def test_a_replay_uses_the_recorded_predictions():
    """The log has no features, so a fresh predictor would say something else."""

    def ends_at_seed(request: RequestState) -> FinishReason | None:
        return FinishReason.STOP if request.num_output_tokens >= request.spec.seed else None

    clock = ManualClock()
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, policy="sjf", predictor="ranker")
    kv_cache = KVCacheManager(num_blocks=64, block_size=4, hasher=TokenHasher(4, MODEL), enable_prefix_caching=True)
    records: list[StepRecord] = []
    core = EngineCore(Scheduler(config, kv_cache, ends_at_seed), FakeExecutor(), clock, Recorder(records.append))
    predicted = set()
    for number, chat in enumerate(chats(80)):
        spec = make_spec(
            f"q{number}",
            max_tokens=40,
            seed=1 + chat.num_output_tokens % 15,
            arrived_at=clock.now(),
            features=chat.spec.features,
        )
        request = core.add(spec)
        predicted.add(request.predicted_output_tokens)
        clock.advance(0.01)
        for _ in range(4):
            core.step()
    while core.has_work:
        core.step()
    encoder = LogEncoder(Header(config, 64, 4, enable_prefix_caching=True))
    assert len(predicted) > 10, "it learned"
    assert first_difference([encoder.start(), *map(encoder.encode, records)]) is None


STEP_S = 1.0  # of a world


class Liar:
    """The worst for those that wait: whoever comes later is said to be shorter, whatever the truth."""

    def __init__(self) -> None:
        self._num_asked = 0

    def predict(self, request: RequestState) -> float:
        self._num_asked += 1
        return request.max_tokens / self._num_asked

    def observe(self, request: RequestState) -> None:
        """Incorrigible."""


WRONG = {
    "adversarial": lambda: predictor_named("adversarial", lambda request: float(request.max_tokens)),
    "liar": Liar,
    "ranker": lambda: predictor_named("ranker"),
    "quantile": lambda: predictor_named("quantile"),
}


class PredictedWorld(World):
    """Its requests bring no prediction, so that the scheduler asks."""

    def __init__(self, make: PolicyFactory, scenario: Scenario, predictor: Predictor) -> None:
        super().__init__(make, scenario)
        self.scheduler._predictor = predictor

    def add(self, request: RequestState) -> None:
        request.predicted_output_tokens = None
        super().add(request)
        assert request.predicted_output_tokens is not None
        assert 1.0 <= request.predicted_output_tokens <= request.max_tokens


@pytest.mark.parametrize("predictor", sorted(WRONG))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_breaks_a_promise(policy: str, predictor: str):
    for seed in range(2):
        scenario = scenario_of(seed)
        world = PredictedWorld(POLICIES[policy], scenario, WRONG[predictor]())
        while world.scheduler.has_work or len(world.requests) < scenario.num_requests:
            world.arrive()
            moment = world.step()
            for name, holds in STEP_PROPERTIES.items():
                assert holds(moment) is None, f"{name}, seed {seed}, step {moment.plan.step}: {holds(moment)}"
            world.carry_out(moment)
            assert len(world.plans) <= world.max_steps, f"seed {seed}: no end in sight"


@pytest.mark.parametrize("predictor", sorted(WRONG))
@pytest.mark.parametrize("policy", ["sjf", "srpt", "interactive"])
def test_a_long_request_finishes_however_short_the_others_are_said_to_be(policy: str, predictor: str):
    """At twice what can be served, with newcomers for ever; after the time it states, nobody overtakes it."""
    world = PredictedWorld(POLICIES[policy], Scenario(max_num_seqs=2, num_blocks=200), WRONG[predictor]())
    victim = world.make_request(prompt=8, max_tokens=8)
    world.add(victim)
    until = world.policy.overtaken_until(victim)
    for _ in range(300 + 8 * int(until / STEP_S)):
        for _ in range(2):
            world.add(world.make_request(prompt=1, max_tokens=2))
        world.carry_out(world.step())
        if victim.finished:
            return
    raise AssertionError(f"not done long after {until}")


def test_the_liar_is_one():
    liar, world = Liar(), World(POLICIES["sjf"], Scenario())
    said = [bounded_prediction(liar, world.make_request(prompt=1, max_tokens=100)) for _ in range(5)]
    assert said == sorted(said, reverse=True)

"""A wrong predictor costs speed and breaks no bound: every policy keeps every property under each of them."""

from __future__ import annotations

import pytest

from maitred.core.request import RequestState
from maitred.policy.policies import POLICIES
from maitred.policy.policy import PolicyFactory
from maitred.policy.predictor import Predictor, bounded_prediction, predictor_named
from maitred.testing.conformance import STEP_PROPERTIES
from maitred.testing.conformance_world import Scenario, World, scenario_of

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


PREDICTORS = {
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


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_policy_breaks_a_promise(policy: str, predictor: str):
    for seed in range(2):
        scenario = scenario_of(seed)
        world = PredictedWorld(POLICIES[policy], scenario, PREDICTORS[predictor]())
        while world.scheduler.has_work or len(world.requests) < scenario.num_requests:
            world.arrive()
            moment = world.step()
            for name, holds in STEP_PROPERTIES.items():
                assert holds(moment) is None, f"{name}, seed {seed}, step {moment.plan.step}: {holds(moment)}"
            world.carry_out(moment)
            assert len(world.plans) <= world.max_steps, f"seed {seed}: no end in sight"


@pytest.mark.parametrize("predictor", sorted(PREDICTORS))
@pytest.mark.parametrize("policy", ["sjf", "srpt", "interactive"])
def test_a_long_request_finishes_however_short_the_others_are_said_to_be(policy: str, predictor: str):
    """At twice what can be served, with newcomers for ever; after the time it states, nobody overtakes it."""
    world = PredictedWorld(POLICIES[policy], Scenario(max_num_seqs=2, num_blocks=200), PREDICTORS[predictor]())
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

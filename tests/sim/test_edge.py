from __future__ import annotations

from random import Random

import pytest

from maitred.sim.engine import Simulation
from maitred.sim.fit import fit_edge
from maitred.sim.profile import EdgeModel, EdgeSample
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.workload import Turn
from tests.sim.worlds import COSTS, PlanKeeper, arrival, setup

EDGE = EdgeModel(fixed_s=3e-3, prompt_token_s=2e-6, output_token_s=2e-5)


def samples(edge: EdgeModel, *, slow_share: float = 0.0, count: int = 200) -> list[EdgeSample]:
    rng = Random(1)
    found = []
    for _ in range(count):
        prompt, gaps = rng.choice((7, 44, 175, 550)) + rng.randrange(4), rng.choice((0, 16))
        times = 8.0 if rng.random() < slow_share else rng.uniform(0.9, 1.1)
        found.append(EdgeSample(prompt, times * edge.first_token_s(prompt), gaps, times * gaps * edge.output_token_s))
    return found


def test_a_fit_finds_the_edge_though_some_requests_met_a_machine_that_was_busy():
    edge, error = fit_edge(samples(EDGE, slow_share=0.15))
    assert edge.fixed_s == pytest.approx(EDGE.fixed_s, rel=0.1)
    assert edge.first_token_s(550) == pytest.approx(EDGE.first_token_s(550), rel=0.1)
    assert edge.output_token_s == pytest.approx(EDGE.output_token_s, rel=0.05)
    assert error < 0.1


def test_requests_that_are_not_alike_leave_an_error():
    """What grows with the square of a prompt is in no term."""
    bent = [sample._replace(first_token_s=1e-4 + 1e-7 * sample.prompt_tokens**2) for sample in samples(EDGE)]
    assert fit_edge(bent).error > 0.2


def test_clients_see_the_engines_times_and_the_edge_and_the_engine_decides_as_without():
    asked = [arrival(f"r{i}", at=1e-3 * i, prompt=8 * (1 + i), output=2 + i) for i in range(6)]
    alone, behind = PlanKeeper(), PlanKeeper()
    plain = Simulation(setup(), COSTS, SimulatedResults(), listener=alone).run(iter(asked)).total
    edged = Simulation(setup(), COSTS, SimulatedResults(edge=EDGE), listener=behind).run(iter(asked)).total
    assert behind.plans == alone.plans
    assert behind.times == alone.times
    first_s = sum(EDGE.first_token_s(a.prompt_tokens) for a in asked) / len(asked)
    whole_s = sum(EDGE.whole_s(a.prompt_tokens, a.output_tokens) for a in asked) / len(asked)
    assert edged.ttft_s.mean == pytest.approx(plain.ttft_s.mean + first_s)
    assert edged.itl_s.mean == pytest.approx(plain.itl_s.mean + EDGE.output_token_s)
    assert edged.e2e_s.mean == pytest.approx(plain.e2e_s.mean + whole_s)
    assert edged.queue_s.mean == plain.queue_s.mean


def test_objectives_are_the_clients():
    asked = [arrival("r", prompt=8, output=2)]
    bound = Objectives(ttft_s=2e-3)  # the engine alone takes 1.08 ms
    assert Simulation(setup(), COSTS, SimulatedResults(bound)).run(iter(asked)).total.slo_attainment == 1.0
    assert Simulation(setup(), COSTS, SimulatedResults(bound, EDGE)).run(iter(asked)).total.slo_attainment == 0.0


def test_a_client_that_thinks_begins_when_it_has_the_answer():
    turn = Turn(think_s=1.0, new_tokens=4, output_tokens=2, max_tokens=16)
    asked = arrival("chat", prompt=8, output=4, turns=(turn,))
    plain = Simulation(setup(), COSTS, SimulatedResults()).run(iter([asked]))
    edged = Simulation(setup(), COSTS, SimulatedResults(edge=EDGE)).run(iter([asked]))
    assert edged.duration_s == pytest.approx(plain.duration_s + EDGE.whole_s(8, 4))

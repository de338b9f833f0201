from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.cost_model import CostModel, StepShape, shape_of
from maitred.core.errors import ConfigError
from maitred.core.step import ScheduledRow
from maitred.sim.devices import DEVICES, MODELS, device_named, num_kv_blocks, roofline
from maitred.sim.engine import Simulation
from maitred.sim.fit import TERMS, MeasuredStep, fit_edge, fit_steps, nonnegative_least_squares
from maitred.sim.profile import EdgeModel, EdgeSample, Jitter, Profile, decode_profile, encode_profile
from maitred.sim.results import Objectives, SimulatedResults
from maitred.sim.workload import Turn
from tests.sim.worlds import COSTS, PlanKeeper, arrival, setup

TRUE = CostModel(
    fixed_s=2e-3, row_s=5e-5, prefill_token_s=9e-5, decode_token_s=0.0, context_token_s=6e-7, prefill_attention_s=1e-7,
    group_s=3e-4, between_s=1e-4, between_row_s=5e-6,
)  # fmt: skip


def shapes(rng: Random, count: int) -> list[StepShape]:
    found = []
    for _ in range(count):
        rows = [ScheduledRow("d", rng.randrange(1, 1500), 1, True) for _ in range(rng.randrange(0, 32))]
        rows += [
            ScheduledRow("p", rng.randrange(0, 800), rng.randrange(2, 400), rng.random() < 0.5)
            for _ in range(rng.randrange(0, 3) or not rows)
        ]
        found.append(shape_of(rows))
    return found


def steps(seed: int, count: int = 600, noise: float = 0.0) -> list[MeasuredStep]:
    rng = Random(seed)
    return [
        MeasuredStep(s, TRUE.step_s(s) * (1 + noise * (rng.random() - 0.5)), TRUE.gap_s(s.rows))
        for s in shapes(rng, count)
    ]


def test_a_fit_finds_the_coefficients_that_the_steps_were_made_of():
    fit = fit_steps(steps(1), steps(2))
    assert fit.mape < 0.005
    for name in ("fixed_s", "prefill_token_s", "context_token_s", "prefill_attention_s", "group_s"):
        assert getattr(fit.cost_model, name) == pytest.approx(getattr(TRUE, name), rel=0.05), name
    assert fit.cost_model.between_s == pytest.approx(TRUE.between_s, rel=0.02)
    assert fit.cost_model.between_row_s == pytest.approx(TRUE.between_row_s, rel=0.02)
    assert sum(term.share for term in fit.terms.values()) == pytest.approx(1.0)


def test_a_machine_that_stops_now_and_then_does_not_bend_the_fit():
    rng = Random(3)
    noisy = [step._replace(step_s=step.step_s * 6) if rng.random() < 0.05 else step for step in steps(1, noise=0.1)]
    fit = fit_steps(noisy, steps(2))
    assert fit.mape < 0.02
    assert abs(fit.bias) < 0.02
    assert all(term.standard_error_s >= 0 for term in fit.terms.values())
    assert set(fit.terms) == set(TERMS)


def test_jitter_gives_back_the_spread_that_was_measured():
    rng = Random(4)
    wide = [step._replace(step_s=step.step_s * rng.uniform(0.8, 1.4)) for step in steps(1, 2000)]
    model = fit_steps(wide, wide).cost_model
    jitter = Jitter(model, Random(0))
    modelled = [model.step_s(step.shape) for step in wide]
    drawn = sorted(jitter.step_s(t) / t for t in modelled)
    real = sorted(step.step_s / t for step, t in zip(wide, modelled, strict=True))
    for share in (0.05, 0.5, 0.95):
        assert drawn[int(share * 2000)] == pytest.approx(real[int(share * 2000)], rel=0.03)
    assert sum(drawn) == pytest.approx(sum(real), rel=0.02)


@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=4, max_size=20), st.data())
def test_least_squares_are_not_negative_and_no_neighbour_is_better(rows, data):
    targets = data.draw(st.lists(st.floats(0, 10), min_size=len(rows), max_size=len(rows)))
    found = nonnegative_least_squares(rows, targets)

    def loss(c: list[float]) -> float:
        return sum(
            (sum(x * w for x, w in zip(row, c, strict=True)) - y) ** 2 for row, y in zip(rows, targets, strict=True)
        )

    assert min(found) >= 0
    for j in range(3):
        for moved in (found[j] + 0.01, max(0.0, found[j] - 0.01)):
            assert loss(found) <= loss([*found[:j], moved, *found[j + 1 :]]) + 1e-6


def test_the_shape_of_a_step_has_drafts_as_decode_and_the_weights_as_a_floor():
    rows = [ScheduledRow("a", 9, 1, True), ScheduledRow("b", 500, 1, True), ScheduledRow("c", 4, 3, False)]
    shape = StepShape(3, 3, 2, 10 + 501 + 7, 3 * 4 + 6, 2, groups=3)
    assert shape_of(rows) == shape
    assert shape.tokens == 5

    rows = [ScheduledRow("a", 9, 5, True, num_drafts=4), ScheduledRow("b", 4, 6, True, num_drafts=3)]
    assert shape_of(rows) == StepShape(2, 3, 1 + 7, 14 + 10, 3 * 4 + 6, 2 + 7, groups=2)

    model = CostModel(weights_s=1e-3, prefill_token_s=1e-5, decode_token_s=1e-5)
    assert model.step_s(StepShape(rows=1, decode_tokens=1)) == pytest.approx(1e-3)
    assert model.step_s(StepShape(rows=1, prefill_tokens=500)) == pytest.approx(5e-3)


def test_a_profile_survives_its_file_and_damage_is_told():
    fit = fit_steps(steps(1, 300, noise=0.2), steps(2, 300))
    profile = Profile(
        model="m", machine="x", executor="torch", cost_model=fit.cost_model, max_model_len=64, kv_bytes_per_token=8,
        kv_memory_bytes=4096, terms=fit.terms,
    )  # fmt: skip
    assert decode_profile(encode_profile(profile), "f") == profile
    with pytest.raises(ConfigError, match="is this a device profile"):
        decode_profile(b"{}", "f")


# ---- datasheets


@pytest.mark.parametrize("device", sorted(DEVICES))
def test_a_datasheet_gives_a_roofline(device: str):
    small = MODELS["llama-3.2-1b"]
    model = roofline(DEVICES[device], small)
    decode, prefill = StepShape(1, 0, 1, 100, 0, 1, 1), StepShape(1, 8192, 0, 8192, 8192**2 // 2, 1, 1)
    assert model.step_s(decode) < model.step_s(prefill)
    assert num_kv_blocks(DEVICES[device], small, 16) > 0
    assert DEVICES[device].source


def test_an_h100_decodes_an_8b_model_about_as_fast_as_published():
    """16 GB of weights at three quarters of 3.35 TB/s are 6.4 ms a token; public figures are 6 to 8 ms."""
    model = roofline(DEVICES["h100"], MODELS["llama-3.1-8b"])
    assert 5.5e-3 < model.step_s(StepShape(1, 0, 1, 500, 0, 1, 1)) < 8e-3


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


def test_requests_draw_the_edges_spread_by_their_names():
    edge, _ = fit_edge(samples(EDGE, slow_share=0.25))
    assert edge.jitter[-1] == pytest.approx(8.0, rel=0.1)
    drawn = [edge.first_token_s(100, f"r{i}") / edge.first_token_s(100) for i in range(1000)]
    assert sum(times > 2 for times in drawn) == pytest.approx(250, abs=50)
    assert edge.first_token_s(100, "r7") == edge.first_token_s(100, "r7")
    assert edge.whole_s(100, 1, "r7") == edge.first_token_s(100, "r7")


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


@pytest.mark.parametrize(
    ("name", "kv_values"),
    [  # of a token in all layers
        ("qwen3-30b-a3b", 48 * 2 * 4 * 128),
        ("qwen3-235b-a22b", 94 * 2 * 4 * 128),
        ("glm-4.5-air", 46 * 2 * 8 * 128),
        ("glm-4.5", 92 * 2 * 8 * 128),
        ("gpt-oss-120b", 36 * 2 * 8 * 64),
        ("deepseek-v3", 61 * 576),
        ("mixtral-8x7b", 32 * 2 * 8 * 128),
    ],
)
def test_the_parts_of_a_mixture_of_experts_add_up_to_what_its_card_says(name: str, kv_values: int):
    shape = MODELS[name]
    dense = shape.num_parameters - shape.expert_parameters
    active = dense + shape.expert_parameters * shape.experts_per_token / shape.experts
    assert 0 < dense < 0.06 * shape.num_parameters
    assert shape.num_active_parameters == pytest.approx(active, rel=0.15)  # an embedding may be counted, or not
    assert shape.kv_bytes_per_token == 2 * kv_values


def test_a_batch_reads_the_experts_that_its_tokens_are_sent_to():
    shape, device = MODELS["qwen3-30b-a3b"], DEVICES["h100"]
    model = roofline(device, shape)
    bandwidth = device.bandwidth * device.bandwidth_efficiency
    dense = shape.num_parameters - shape.expert_parameters
    for tokens, share in ((1, 8 / 128), (32, 1 - (1 - 8 / 128) ** 32), (512, 1.0)):
        read_s = 2 * (dense + share * shape.expert_parameters) / bandwidth
        assert model.tokens_s(0, tokens) == pytest.approx(read_s, rel=1e-6)


def test_layers_with_a_window_read_and_keep_no_more_than_it():
    shape, device = MODELS["gemma-3-27b"], device_named("h100x2")
    model, per_token = roofline(device, shape), shape.kv_bytes_per_token / 62
    bandwidth = 2 * device.bandwidth * device.bandwidth_efficiency

    def context_s(tokens: int) -> float:
        return model.step_s(StepShape(1, 0, 1, tokens, 0, 1, 1)) - model.step_s(StepShape(1, 0, 1, 0, 0, 1, 1))

    assert context_s(1000) == pytest.approx(1000 * 62 * per_token / bandwidth)
    assert context_s(100_000) == pytest.approx((100_000 * 10 + 1024 * 52) * per_token / bandwidth)
    blocks = num_kv_blocks(device, shape, 16, max_num_seqs=8)
    kept = blocks * 16 * 10 * per_token + 8 * 1024 * 52 * per_token
    assert kept == pytest.approx(0.9 * 2 * device.memory_bytes - shape.weight_bytes, rel=0.01)
    assert blocks > 5 * num_kv_blocks(device, shape, 16)

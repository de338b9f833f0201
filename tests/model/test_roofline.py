"""Floors of steps: bytes over bandwidth, operations over peak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.model import roofline as machine
from maitred.model.roofline import (
    KVFormat,
    Machine,
    Row,
    WeightFormat,
    critical_batch,
    floor_s,
    last_level_cache_bytes,
    measure,
    query_key_pairs,
    settled,
    step_work,
    token_budget,
)
from maitred.model.spec import DecoderSpec, LayerSpec

MACHINE = Machine(80e9, {"float32": 0.5e12, "bfloat16": 0.96e12, "int8": 2.0e12})
# Qwen3-0.6B
SPEC = DecoderSpec(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    layers=(LayerSpec(),) * 28,
    max_position_embeddings=40_960,
    norm_eps=1e-6,
    tied_embeddings=True,
    attention_scale=128**-0.5,
)
BF16, INT8, INT4 = WeightFormat("bfloat16"), WeightFormat("int8"), WeightFormat("int4")
KV = KVFormat("bfloat16")


def decode(batch: int, context: int) -> list[Row]:
    return [Row(context - 1, 1)] * batch


def num_bytes(weights: WeightFormat, rows: list[Row]) -> float:
    return sum(op.num_bytes for op in step_work(SPEC, rows, weights, KV))


def test_a_decode_step_reads_every_weight_once_and_each_requests_keys_and_values():
    assert num_bytes(BF16, decode(1, 1)) == pytest.approx(1.19e9, rel=0.01)
    assert num_bytes(INT8, decode(1, 1)) == pytest.approx(0.60e9, rel=0.01)
    one, many = num_bytes(INT8, decode(1, 576)), num_bytes(INT8, decode(32, 576))
    assert many - one == 31 * 576 * 114_688


def test_int4_has_a_scale_and_a_minimum_for_32_and_a_wider_output_matrix():
    assert INT4.bytes_of(1, 64) == 32 + 2 * 4
    assert WeightFormat("q4_k", per_weight=0.7).bytes_of(2, 10) == 14
    (head,) = [op for op in step_work(SPEC, decode(1, 1), INT4, KV) if op.name == "lm_head"]
    assert head.num_bytes == INT8.bytes_of(SPEC.vocab_size, SPEC.hidden_size)


def test_one_request_is_held_by_bandwidth_and_a_long_prompt_by_arithmetic():
    assert floor_s(step_work(SPEC, decode(1, 512), INT8, KV), MACHINE) == pytest.approx(
        num_bytes(INT8, decode(1, 512)) / MACHINE.stream_bytes_per_s
    )
    prefill = list(step_work(SPEC, [Row(0, 2048)], BF16, KV))
    assert sum(op.num_ops for op in prefill if op.name not in ("attention", "lm_head")) / 2048 == pytest.approx(
        0.88e9, rel=0.01
    )
    assert floor_s(prefill[:-1], MACHINE) == pytest.approx(sum(op.num_ops for op in prefill[:-1]) / 0.96e12)


def test_only_rows_that_sample_need_the_output_matrix():
    names = [op.name for op in step_work(SPEC, [Row(0, 256, samples=False)], BF16, KV)]
    assert "lm_head" not in names


def test_a_window_bounds_what_attention_reads():
    windowed = replace(SPEC, layers=(LayerSpec(window=128),) * 28)
    read = [op for op in step_work(windowed, decode(1, 4096), INT8, KV) if op.name == "attention"]
    assert all(op.num_bytes == 128 * 2 * 8 * 256 for op in read)


@given(start=st.integers(0, 40), num_tokens=st.integers(1, 40), window=st.none() | st.integers(1, 50))
def test_pairs_are_counted_as_the_mask_lets_them_through(start: int, num_tokens: int, window: int | None):
    seen = [min(p + 1, window or p + 1) for p in range(start, start + num_tokens)]
    assert query_key_pairs(Row(start, num_tokens), window) == sum(seen)


def test_the_critical_batch_is_where_reading_and_computing_take_as_long():
    batch = critical_batch(INT8, MACHINE)
    assert batch == pytest.approx(2.0e12 / (2 * 80e9), rel=0.01)
    assert critical_batch(INT4, MACHINE) < batch


def test_at_the_token_budget_computing_takes_about_four_times_as_long_as_reading():
    slow_memory = replace(MACHINE, stream_bytes_per_s=MACHINE.stream_bytes_per_s / 10)
    for each in (MACHINE, slow_memory):
        budget = token_budget(INT8, each)
        assert budget % 64 == 0
        assert abs(budget - 4 * critical_batch(INT8, each)) <= 32
    assert token_budget(INT8, slow_memory) > token_budget(INT8, MACHINE) >= 64


def settle(rates: Iterator[float], preemptions: Iterator[int], limit: int = 10) -> tuple[float, bool, int]:
    """The best, whether repeats agreed, and how many there were, on a clock that counts the repeats."""
    seen: list[float] = []

    def probe() -> float:
        seen.append(next(rates))
        return seen[-1]

    found = settled(probe, until=limit, now=lambda: len(seen), preemptions=preemptions.__next__)
    return *found, len(seen)


def test_three_repeats_that_agree_are_enough():
    assert settle(iter([96.0, 100.0, 99.0]), repeat(0)) == (100.0, True, 3)


def test_repeats_go_on_until_the_best_three_agree():
    assert settle(iter([10.0, 100.0, 0.01, 60.0, 97.0, 50.0, 98.0]), repeat(0)) == (100.0, True, 7)


def test_repeats_that_never_agree_are_told_with_the_best_of_them():
    assert settle(map(float, count(1)), repeat(0), limit=8) == (8.0, False, 8)


def test_repeats_into_which_others_cut_prove_nothing_however_much_they_agree():
    assert settle(repeat(50.0), count(), limit=6) == (50.0, False, 6)


def test_a_machine_that_is_too_slow_for_three_repeats_is_not_called_busy():
    assert settle(repeat(1.0), repeat(0), limit=1) == (1.0, True, 1)


def test_this_machine_is_measured_within_its_time_cache_and_all(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "LIMIT_S", 0.7)
    monkeypatch.setattr(machine, "last_level_cache_bytes", lambda: 2**20)
    monkeypatch.setattr(machine, "STREAM_BYTES", 2**24)
    measured, large = measure(1, model_bytes=2**19), measure(1, model_bytes=2**21)
    assert measured.machine.stream_bytes_per_s > 1e8
    for name, ops in measured.machine.peak_ops_per_s.items():
        assert ops > 1e6
        assert measured.registers_ops_per_s[name] > 1e6
    assert measured.cache_bytes_per_s is not None
    assert measured.machine_of_model.stream_bytes_per_s == measured.cache_bytes_per_s
    assert large.cache_bytes_per_s is None
    assert large.machine_of_model == large.machine


def test_the_last_level_cache_is_the_systems_word(tmp_path: Path):
    for index, (level, size) in enumerate([("1", "32K"), ("1", "32K"), ("3", "32768K"), ("2", "1024K")]):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "level").write_text(f"{level}\n")
        (folder / "size").write_text(f"{size}\n")
    assert last_level_cache_bytes(tmp_path) == 32 * 2**20
    assert last_level_cache_bytes(tmp_path / "none") is None

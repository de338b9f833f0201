"""A host's figures: repeats until they agree, or the word that the machine is busy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path

import pytest

from maitred.model import roofline as machine
from maitred.model.roofline import last_level_cache_bytes, measure, settled


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

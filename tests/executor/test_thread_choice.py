"""The number of threads follows what steps take: fewer where that is faster, all again when the machine is free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.executor.native import SILENCE_S, ThreadChoice, other_numbers

StepS = Callable[[int, int], float]
"""(threads, tokens) -> s"""


def quiet(num_threads: int, num_tokens: int = 1) -> float:
    """A step that is held by memory: a second thread is worth 80% of the first."""
    return 0.018 * (1 + num_tokens / 64) / (1 + 0.8 * (num_threads - 1))


@dataclass
class Machine:
    """Runs steps with as many threads as the choice wants, and notes what it did."""

    num_cores: int
    step_s: StepS
    now: float = 100.0
    used: list[int] = field(default_factory=list)
    told: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choice = ThreadChoice(self.num_cores)

    def run(self, seconds: float, tokens: Callable[[], int] = lambda: 1) -> float:
        """Steps for at least so long; how much longer they took than with the best fixed number."""
        began_at, best = self.now, dict.fromkeys(range(1, self.num_cores + 1), 0.0)
        while self.now < began_at + seconds:
            num_tokens, num_threads = tokens(), self.choice.num_threads
            for number in best:
                best[number] += self.step_s(number, num_tokens)
            ended_at = self.now + self.step_s(num_threads, num_tokens)
            news = self.choice.took(num_tokens, num_tokens, self.now, ended_at)
            self.used.append(num_threads)
            self.told += [news] if news is not None else []
            self.now = ended_at
        return (self.now - began_at) / min(best.values()) - 1


def with_a_core_taken(taken: int, *, all_threads: int) -> StepS:
    """Whoever needs the last `taken` cores is stalled by some time slices, in four steps of five."""
    stalls = Random(0)

    def step_s(num_threads: int, num_tokens: int) -> float:
        stalled = num_threads > all_threads - taken and stalls.random() < 0.8
        return quiet(num_threads, num_tokens) + (0.024 if stalled else 0.0)

    return step_s


def best_of(machine: Machine) -> int:
    return max(set(machine.used[-40:]), key=machine.used[-40:].count)


def test_a_quiet_machine_keeps_all_threads_and_loses_a_hundredth_to_trials():
    machine = Machine(2, quiet)
    assert machine.run(120) < 0.01
    assert 1 in machine.used, "fewer were tried"
    assert (best_of(machine), machine.told) == (2, [])


@pytest.mark.parametrize("num_cores", [2, 4, 8])
def test_a_core_that_is_taken_after_a_long_quiet_is_noticed_within_a_second(num_cores: int):
    machine = Machine(num_cores, quiet)
    machine.run(120)
    machine.step_s = with_a_core_taken(1, all_threads=num_cores)
    machine.run(1.2)
    assert min(machine.used[-20:]) < num_cores


def test_where_a_core_is_taken_fewer_threads_are_used_and_all_again_when_it_is_free():
    machine = Machine(2, with_a_core_taken(1, all_threads=2))
    machine.run(2)
    assert (best_of(machine), machine.told) == (1, [1])
    assert machine.run(60) < 0.03
    machine.step_s = quiet
    machine.run(12)
    assert (best_of(machine), machine.told) == (2, [1, 2])


@pytest.mark.parametrize("taken", [1, 3, 5])
def test_of_eight_cores_those_that_are_free_are_used(taken: int):
    machine = Machine(8, with_a_core_taken(taken, all_threads=8))
    machine.run(60)
    assert best_of(machine) == 8 - taken
    assert machine.told[-1] == 8 - taken


def test_steps_are_held_against_their_like_only():
    """A trial that falls on the long steps of prompts says nothing against it, and nothing for it on short ones."""
    machine, random = Machine(2, quiet), Random(1)
    assert machine.run(60, lambda: random.choice([1, 1, 2, 32, 128])) < 0.015
    assert (best_of(machine), machine.told) == (2, [])


def test_steps_that_have_no_like_decide_nothing():
    machine, lengths = Machine(2, with_a_core_taken(1, all_threads=2)), Random(1)
    machine.run(30, lambda: lengths.randint(1, 100_000))
    assert set(machine.used) == {2}


def test_a_trial_among_steps_that_are_all_unlike_ends_after_a_few():
    machine = Machine(2, quiet)
    machine.run(1, lambda: 8)
    while machine.choice.num_threads == 2:
        machine.run(0.001, lambda: 8)
    sizes = iter(range(16, 4000, 100))
    while machine.choice.num_threads == 1:
        machine.run(0.001, lambda: next(sizes))
    assert next(sizes) <= 16 + 100 * 6


def test_what_was_measured_before_a_silence_does_not_count():
    machine = Machine(2, with_a_core_taken(1, all_threads=2))
    for _ in range(300):
        machine.run(0.001)
        machine.now += SILENCE_S + 0.1
    assert set(machine.used) == {2}


def test_one_thread_is_never_tried_against_anything():
    machine = Machine(1, quiet)
    machine.run(30)
    assert set(machine.used) == {1}


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), worth=st.floats(0.0, 1.0), step_s=st.floats(0.002, 0.3))
def test_whatever_the_machine_the_choice_takes_little_longer_than_the_best_fixed_number(
    seed: int, worth: float, step_s: float
):
    """Noise of a tenth and now and then a stall; a second thread is worth something, or costs something."""
    random = Random(seed)

    def noisy(num_threads: int, num_tokens: int) -> float:
        pace = 1.4 - worth if num_threads > 1 else 1.0
        return step_s * pace * random.uniform(0.95, 1.05) + (0.01 if random.random() < 0.01 else 0.0)

    machine = Machine(2, noisy)
    machine.run(5 + 20 * step_s)
    assert machine.run(max(30.0, 300 * step_s)) < 0.08


@pytest.mark.parametrize(("present", "others"), [(8, [4, 7]), (7, [3, 6, 8]), (2, [1, 3, 8]), (1, [2, 8])])
def test_neighbours_half_and_all_are_tried(present: int, others: list[int]):
    assert other_numbers(present, 8) == others

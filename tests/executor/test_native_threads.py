"""Threads that are bound keep to one processor each, only where there is one for each, and as long as all are used."""

from __future__ import annotations

import os
import threading

import pytest

from maitred.executor.native_plan import bind_threads
from maitred.kernels import _native

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinities")


def bound(num_threads: int, cpus: set[int]) -> tuple[bool, set[int]]:
    """Whether a pool's threads were bound, and the processors of their caller then: on a thread that is thrown away."""
    told: list[tuple[bool, set[int]]] = []

    def call() -> None:
        os.sched_setaffinity(0, cpus)
        told.append((bind_threads(_native.ThreadPool(num_threads)), os.sched_getaffinity(0)))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return told[0]


def test_as_many_threads_as_processors_are_bound_and_the_caller_to_the_first():
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cpus) < 2:
        pytest.skip("one processor")
    assert bound(2, cpus) == (True, {min(cpus)})


def test_fewer_threads_than_processors_stay_free():
    cpus = os.sched_getaffinity(0)
    if len(cpus) < 2:
        pytest.skip("one processor")
    assert bound(len(cpus) - 1 or 1, cpus) == (False, cpus)


def test_one_thread_stays_free():
    cpus = {min(os.sched_getaffinity(0))}
    assert bound(1, cpus) == (False, cpus)


def test_fewer_threads_than_were_bound_may_run_anywhere_until_all_are_used_again():
    cpus = set(sorted(os.sched_getaffinity(0))[:2])
    if len(cpus) < 2:
        pytest.skip("one processor")
    places: list[set[int]] = []

    def call() -> None:
        os.sched_setaffinity(0, cpus)
        threads = _native.ThreadPool(2)
        bind_threads(threads)
        for number in (1, 2):
            threads.use(number)
            places.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert places == [cpus, {min(cpus)}]


@pytest.mark.parametrize("number", [0, 4])
def test_no_more_threads_are_used_than_there_are(number: int):
    threads = _native.ThreadPool(3)
    with pytest.raises(ValueError, match=f"{number} threads; it takes 1 to 3"):
        threads.use(number)
    assert threads.num_used == 3


def test_a_processor_that_is_not_there_is_not_taken():
    assert _native.ThreadPool(1).bind([-1]) is False
    assert _native.ThreadPool(1).bind([]) is False

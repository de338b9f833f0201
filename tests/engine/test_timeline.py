"""Phases of a start add up to the whole, also those of another process within one."""

from __future__ import annotations

import time

import pytest

from maitred.core.clock import ManualClock
from maitred.engine.timeline import Timeline, process_age_s


def test_phases_follow_one_another_and_add_up():
    clock = ManualClock(100.0)
    timeline = Timeline(clock, age_s=0.5)
    for phase, seconds in (("command", 0.25), ("weights", 2.0), ("command", 0.25)):
        clock.advance(seconds)
        timeline.end(phase)
    assert timeline.phases == {"command": 1.0, "weights": 2.0}
    assert list(timeline.phases) == ["command", "weights"]
    assert timeline.total_s == 3.0


def test_another_timeline_fits_in_and_what_is_around_it_has_a_name():
    clock = ManualClock()
    timeline = Timeline(clock)
    clock.advance(2.0)
    timeline.end_nested({"checkpoint": 0.25, "weights": 1.0}, "engine_process")
    assert timeline.phases == {"checkpoint": 0.25, "weights": 1.0, "engine_process": 0.75}
    clock.advance(1.0)
    timeline.end("server")
    assert timeline.total_s == 3.0


def test_the_line_for_people_names_what_took_long():
    clock = ManualClock()
    timeline = Timeline(clock)
    for phase, seconds in (("plan", 0.004), ("weights", 1.5), ("program", 0.004)):
        clock.advance(seconds)
        timeline.end(phase)
    assert timeline.describe() == "started in 1.51 s: weights 1.50, others 0.01"


def test_a_start_over_its_budget_names_its_longest_phase():
    clock = ManualClock()
    timeline = Timeline(clock)
    for phase, seconds in (("plan", 4.0), ("weights", 30.0), ("program", 6.0)):
        clock.advance(seconds)
        timeline.end(phase)
    assert timeline.over(40.0) is None
    assert timeline.over(30.0) == "slow start: 40.00 s, over --start-budget-s 30; weights took 30.00 s"


def test_the_age_of_this_process_is_more_than_what_it_spent_and_goes_on():
    first = process_age_s()
    if first == 0.0:
        pytest.skip("this system does not tell when a process began")
    assert first >= time.thread_time() - 0.02  # its beginning is told in hundredths
    assert process_age_s() >= first

"""When to start again, when to call it stuck, and how to say why it died."""

from __future__ import annotations

import pytest

from maitred.engine.restarts import FAILURE, MAX_DELAY_S, STEADY_S, BackOff, Watchdog, cause_of_death, is_own_fault
from maitred.engine.supervisor import SILENT_S

TICK_S = 0.25


def test_the_first_restart_is_at_once_and_the_pauses_double_up_to_a_limit():
    backoff = BackOff(max_restarts=12)
    delays = [backoff.died(0.0) for _ in range(13)]
    assert delays[:5] == [0.0, 0.5, 1.0, 2.0, 4.0]
    assert delays[11] == MAX_DELAY_S
    assert delays[12] is None
    assert backoff.num_restarts == 12


def test_an_engine_that_lived_ends_the_row():
    backoff = BackOff(max_restarts=2)
    assert [backoff.died(1.0), backoff.died(STEADY_S), backoff.died(0.0), backoff.died(0.0)] == [0.0, 0.0, 0.5, None]


def test_no_restarts_at_all():
    assert BackOff(max_restarts=0).died(1e9) is None


def test_deaths_that_came_from_outside_are_borne_longer_but_not_for_ever():
    backoff = BackOff(max_restarts=2)
    delays = [backoff.died(0.0, own_fault=False) for _ in range(2 * FAILURE + 1)]
    assert delays == [0.0] * FAILURE + [0.5] * FAILURE + [None]


def test_a_found_cause_ends_the_row():
    backoff = BackOff(max_restarts=2)
    assert [backoff.died(0.0), backoff.died(0.0)] == [0.0, 0.5]
    backoff.found_cause()
    assert [backoff.died(0.0), backoff.died(0.0), backoff.died(0.0)] == [0.0, 0.5, None]


@pytest.mark.parametrize(
    ("returncode", "stuck", "out_of_memory", "own"),
    [
        (-11, False, False, True),  # SIGSEGV
        (-6, False, False, True),  # SIGABRT
        (1, False, False, True),
        (0, False, False, True),  # nobody told it to stop
        (-9, False, False, False),
        (-9, True, False, True),
        (-9, False, True, True),
        (-15, False, False, False),
        (-1, False, False, False),
    ],
)
def test_a_signal_that_somebody_sent_is_no_evidence(returncode: int, stuck: bool, out_of_memory: bool, own: bool):
    assert is_own_fault(returncode, stuck=stuck, out_of_memory=out_of_memory) is own


def test_a_silent_engine_is_told_within_three_seconds_of_its_last_heartbeat():
    watchdog = Watchdog(TICK_S)
    watchdog.tick(0.0)
    watchdog.beat(1, True)  # just after a tick
    ticks = 0
    while watchdog.silent_s < SILENT_S:
        ticks += 1
        watchdog.tick(ticks * TICK_S)
    assert ticks * TICK_S < 3.0


def test_where_the_watcher_itself_comes_late_the_engine_may_too():
    """A machine with far more to do than it has cores: ticks come four times too late, and beats with them."""
    watchdog = Watchdog(TICK_S)
    watchdog.beat(1, True)
    run(watchdog, 8, step_s=4 * TICK_S)  # eight seconds
    assert watchdog.silent_s < SILENT_S


def run(watchdog: Watchdog, ticks: int, step_s: float = TICK_S, start: float = 0.0) -> None:
    for tick in range(ticks + 1):
        watchdog.tick(start + tick * step_s)


def test_silence_counts_from_the_first_heartbeat_on():
    watchdog = Watchdog(TICK_S)
    run(watchdog, 100)
    assert watchdog.silent_s == 0.0
    watchdog.beat(0, False)
    run(watchdog, 8, start=25.0)
    assert watchdog.silent_s == pytest.approx(2.0)
    watchdog.beat(0, False)
    assert watchdog.silent_s == 0.0


def test_a_round_that_does_not_end_is_stuck_and_an_idle_engine_is_not():
    for busy, stuck_s in ((True, 5.0), (False, 0.0)):
        watchdog = Watchdog(TICK_S)
        watchdog.tick(0.0)
        watchdog.beat(7, busy)
        for tick in range(1, 22):
            watchdog.tick(tick * TICK_S)
            watchdog.beat(7, busy)
        assert watchdog.stuck_s == pytest.approx(stuck_s)


def test_an_engine_that_steps_is_not_stuck():
    watchdog = Watchdog(TICK_S)
    for tick in range(40):
        watchdog.beat(tick, True)
        watchdog.tick(tick * TICK_S)
    assert watchdog.stuck_s == 0.0


def test_time_in_which_the_watcher_itself_did_not_run_is_nobodys_fault():
    watchdog = Watchdog(TICK_S)
    watchdog.beat(1, True)
    watchdog.tick(0.0)
    watchdog.tick(3600.0)
    watchdog.beat(1, True)
    watchdog.tick(7200.0)
    assert watchdog.silent_s <= 2 * TICK_S
    assert watchdog.stuck_s <= 4 * TICK_S


@pytest.mark.parametrize(
    ("returncode", "words", "told"),
    [
        (-11, None, "was killed by SIGSEGV"),
        (-9, None, "was killed by SIGKILL (by hand, or for want of memory)"),
        (-7, None, "was killed by SIGBUS (a file that it read was cut short meanwhile: is the model's whole?)"),
        (-6, "terminate called\n after throwing", "was killed by SIGABRT: terminate called after throwing"),
        (1, "RuntimeError: no", "ended with exit code 1: RuntimeError: no"),
        (0, None, "ended with exit code 0"),
        (-250, None, "was killed by signal 250"),
    ],
)
def test_the_cause_is_one_line(returncode: int, words: str | None, told: str):
    assert cause_of_death(returncode, words) == told

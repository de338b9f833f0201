from __future__ import annotations

from itertools import pairwise
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from maitred.cluster.disagg import HandoverConfig, Role, WorkerLoad
from maitred.cluster.roles import TURN_BACK_S, RoleSwitching
from tests.cluster.workers import worker

PROMISED = HandoverConfig(ttft_s=1.0, tpot_s=0.012)


def split(num_prefill: int, num_decode: int, rows: int = 0, queued: float = 0.0) -> list[WorkerLoad]:
    prefill = [worker(f"p{i}", "prefill", queued_tokens=queued / num_prefill) for i in range(num_prefill)]
    each = rows // num_decode
    return prefill + [
        worker(f"d{i}", "decode", rows=each, context_tokens=each * 1000, free_blocks=4096 - each * 63)
        for i in range(num_decode)
    ]


def decided(workers: list[WorkerLoad], prompts_s: float, seconds: int = 5) -> list[tuple[str, Role]]:
    switching = RoleSwitching(PROMISED)
    made = [switching.decide(workers, prompts_s, float(at)) for at in range(seconds)]
    return [switch for switch in made if switch is not None]


def test_an_idle_decode_worker_helps_with_prompts_and_the_other_way_round():
    assert decided(split(1, 3, rows=3), prompts_s=1.8) == [("d0", Role.PREFILL)]
    assert decided(split(3, 1, rows=120), prompts_s=0.1) == [("p0", Role.DECODE)]


def test_the_last_of_a_role_stays():
    assert decided(split(3, 1, rows=2), prompts_s=9.0) == []
    assert decided(split(1, 3, rows=300), prompts_s=0.0) == []


def test_nobody_moves_for_a_moment_nor_while_there_is_no_need():
    assert decided(split(1, 3, rows=3), prompts_s=1.8, seconds=2) == []
    assert decided(split(2, 2, rows=8), prompts_s=0.3) == []


@given(st.floats(0.0, 3.0), st.integers(0, 400), st.integers(0, 2**16), st.integers(1, 5))
def test_a_steady_load_sees_at_most_one_switch_in_thirty_seconds(prompts_s, rows, seed, num_prefill):
    """After the roles have settled; load is as noisy as arrivals are."""
    rng, switching, times = Random(seed), RoleSwitching(PROMISED), []
    for at in range(300):
        noisy = max(0.0, prompts_s * rng.gauss(1.0, 0.15)), max(0, round(rows * rng.gauss(1.0, 0.15)))
        switch = switching.decide(split(num_prefill, 6 - num_prefill, noisy[1]), noisy[0], float(at))
        if switch is not None:
            num_prefill += 1 if switch[1] is Role.PREFILL else -1
            times.append(float(at))
        assert 1 <= num_prefill <= 5
    settled = [at for at in times if at >= TURN_BACK_S]
    assert all(later - at >= TURN_BACK_S for at, later in pairwise(settled))

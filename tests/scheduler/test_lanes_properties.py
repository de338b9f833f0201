"""Whatever happens, the lanes send the batches that a slow obvious scheduler would, and everybody comes to an end."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.scheduler.lane_worlds import MAKERS, LaneWorld


@pytest.mark.parametrize("policy", MAKERS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 120))
@example(seed=200054, num_steps=120)  # under "fewest_running": a batch changes whose turn it is
@example(seed=7781, num_steps=41)  # under "priority": a model's next head, while the share beside the LLM is used up
def test_the_batches_are_those_of_a_scheduler_that_sorts_everything(policy: str, seed: int, num_steps: int):
    world = LaneWorld(policy, seed)
    for _ in range(num_steps):
        world.step()
    world.drain()
    assert len(world.ended) == len(world.copies)
    assert not world.lanes.batches


def test_the_worlds_reach_what_they_are_to_watch():
    worlds = [LaneWorld("vtc", seed) for seed in range(30)]
    for world in worlds:
        for _ in range(80):
            world.step()
        world.drain()
    batches = [batch for world in worlds for batch in world.batches]
    assert sum(len(batch.request_ids) > 1 for batch in batches) > 100
    assert {reason.value for world in worlds for reason in world.ended.values()} == {
        "stop",
        "error",
        "abort",
        "queue_timeout",
        "timeout",
    }

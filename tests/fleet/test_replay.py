"""A log of what went into a core gives the same actions when it is played again, and tells when it does not."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.fleet.core import ClusterCore
from maitred.fleet.fleet_request import Failure, FailureKind, Usage
from maitred.fleet.record import Header, Recorder
from maitred.fleet.replay import Replayed, replay, split
from maitred.fleet.replicas import Report
from tests.fleet.fleets import Driver, facts, make_core


def recorded_day() -> bytes:
    """A little of everything."""
    frames: list[bytes] = []
    fleet = Driver(make_core(tiers={"near": {"spill_after_s": 1.0}}, policy="vtc"))
    fleet.core.recorder = Recorder(fleet.core.config, fleet.core.scheduler, frames.append)
    for name in "ab":
        fleet.do(fleet.core.joined(facts(name, has_beats=True), 0.0))
    fleet.do(fleet.core.reported("a", Report(stored=[2**64 - 1, 5], num_in_flight=1), 0.1))
    for i in range(8):
        fleet.arrive(f"r{i}", keys=(2**64 - 1, 5, i), tenant=f"t{i % 2}", ttft_slo_s=1.0, start_by=5.0)
    fleet.core.progressed("r0", 2, 0.2)
    fleet.do(fleet.core.configured(SchedulerConfig(policy="vtc", output_token_weight=3.0), fleet.now))
    fleet.end("r0", Usage(num_prompt_tokens=90, num_output_tokens=2))
    fleet.fail("r1", Failure(FailureKind.RESET, message="connection refused"))
    fleet.wait(9.0)
    fleet.do(fleet.core.left("a", fleet.now, returns=True))
    fleet.do(fleet.core.aborted("r7", fleet.now))
    return b"".join(frames)


def test_the_same_calls_give_the_same_actions():
    steps = list(replay(split(recorded_day())))
    assert len(steps) > 15
    assert all(step.agrees for step in steps)
    answers = {"progressed", "ended", "failed", "aborted"}
    assert {"joined", "reported", "configured", "arrived", "tick", "left", *answers} == {step.method for step in steps}
    arrival = next(step for step in steps if step.method == "arrived")
    assert arrival.arguments[0].keys == (2**64 - 1, 5, 0)
    assert isinstance(arrival, Replayed)


def test_another_balance_is_told_where_it_differs():
    def under_another(header: Header) -> ClusterCore:
        return ClusterCore(replace(header.config, balance="least_load"), header.scheduler)

    steps = list(replay(split(recorded_day()), under_another))
    assert not all(step.agrees for step in steps)


def test_a_log_cut_short_is_replayed_as_far_as_it_goes():
    log = recorded_day()
    whole = list(split(log))
    assert list(split(log[:-3])) == whole[:-1]


def test_what_is_no_log_is_refused():
    with pytest.raises(ConfigError, match="no log of a fleet"):
        next(replay([b"nonsense"]))
    with pytest.raises(ConfigError, match="no log of a fleet"):
        next(replay([]))
    header = next(iter(split(recorded_day())))
    newer = msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(header, type=Header), version=99))
    with pytest.raises(ConfigError, match="version 99"):
        next(replay([newer]))

"""The host's share of a request's time: counted from its first step, split at its first token, told at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from maitred.core.request import FinishReason
from maitred.core.step import RequestProgress, RequestTiming
from maitred.scheduler.engine_core import HostShares

TIMING = RequestTiming(queue_s=1.0, prefill_s=2.0, decode_s=3.0, ttft_s=3.0)


def new(request_id: str) -> Any:
    return SimpleNamespace(request_id=request_id)


def ended(request_id: str, *tokens: int) -> RequestProgress:
    return RequestProgress(request_id, tokens, finish_reason=FinishReason.STOP, timing=TIMING)


def test_parts_still_add_up_and_the_first_tokens_time_stays():
    shares = HostShares()
    shares.started([new("a")], 10.0)
    shares.told([RequestProgress("a", (7,))], 10.5)
    (last,) = shares.told([ended("a", 8)], 10.7)
    timing = last.timing
    assert timing is not None
    assert (timing.prefill_s, timing.decode_s) == (1.5, pytest.approx(2.8))
    assert timing.schedule_s == pytest.approx(0.7)
    assert timing.total_s == pytest.approx(TIMING.total_s)
    assert timing.ttft_s == TIMING.ttft_s


def test_one_that_is_in_a_step_again_goes_on_counting_from_the_first():
    shares = HostShares()
    shares.started([new("a")], 10.0)
    shares.started([new("a")], 11.0)
    (last,) = shares.told([ended("a", 8)], 11.5)
    assert last.timing is not None
    assert last.timing.schedule_s == pytest.approx(1.5)


def test_one_that_ended_without_a_token_had_its_share_in_prefill():
    shares = HostShares()
    shares.started([new("a")], 10.0)
    (last,) = shares.told([ended("a")], 10.25)
    assert last.timing is not None
    assert (last.timing.prefill_s, last.timing.decode_s) == (1.75, 3.0)


def test_one_that_was_in_no_step_has_none():
    (last,) = HostShares().told([ended("a")], 99.0)
    assert last.timing == TIMING


def test_a_part_never_falls_below_nothing():
    shares = HostShares()
    shares.started([new("a")], 0.0)
    (last,) = shares.told([ended("a", 8)], 50.0)
    assert last.timing is not None
    assert last.timing.prefill_s == 0.0
    assert last.timing.total_s == pytest.approx(TIMING.total_s)

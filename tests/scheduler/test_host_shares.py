"""The host's share of a request's time: counted from its first step, split at its first token, told at its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from maitred.core.request import FinishReason
from maitred.core.step import RequestProgress, RequestTiming
from maitred.scheduler.engine_core import HostShares

TIMING = RequestTiming(queue_s=1.0, prefill_s=2.0, decode_s=3.0, ttft_s=3.0)


class Shares:
    """Host shares of an engine whose host has taken so long by then."""

    def __init__(self) -> None:
        self._shares, self._core = HostShares(), SimpleNamespace(host_s=0.0)
        self._shares.begin(self._core)  # type: ignore[arg-type]

    def scheduled(self, request_id: str, host_s: float) -> None:
        self._core.host_s = host_s
        self._shares.scheduled(SimpleNamespace(new_requests=[SimpleNamespace(request_id=request_id)]))  # type: ignore[arg-type]

    def told(self, progress: RequestProgress, host_s: float) -> RequestTiming:
        self._core.host_s, told = host_s, [progress]
        self._shares.told(told)
        return told[0].timing or TIMING


def ended(request_id: str, *tokens: int) -> RequestProgress:
    return RequestProgress(request_id, tokens, finish_reason=FinishReason.STOP, timing=TIMING)


def test_parts_still_add_up_and_the_first_tokens_time_stays():
    shares = Shares()
    shares.scheduled("a", 10.0)
    shares.told(RequestProgress("a", (7,)), 10.5)
    timing = shares.told(ended("a", 8), 10.7)
    assert (timing.prefill_s, timing.decode_s) == (1.5, pytest.approx(2.8))
    assert timing.schedule_s == pytest.approx(0.7)
    assert timing.total_s == pytest.approx(TIMING.total_s)
    assert timing.ttft_s == TIMING.ttft_s


def test_one_that_is_in_a_step_again_goes_on_counting_from_the_first():
    shares = Shares()
    shares.scheduled("a", 10.0)
    shares.scheduled("a", 11.0)
    assert shares.told(ended("a", 8), 11.5).schedule_s == pytest.approx(1.5)


def test_one_that_ended_without_a_token_had_its_share_in_prefill():
    shares = Shares()
    shares.scheduled("a", 10.0)
    timing = shares.told(ended("a"), 10.25)
    assert (timing.prefill_s, timing.decode_s) == (1.75, 3.0)


def test_one_that_was_in_no_step_has_none():
    assert Shares().told(ended("a"), 99.0) == TIMING


def test_a_part_never_falls_below_nothing():
    shares = Shares()
    shares.scheduled("a", 0.0)
    timing = shares.told(ended("a", 8), 50.0)
    assert timing.prefill_s == 0.0
    assert timing.total_s == pytest.approx(TIMING.total_s)

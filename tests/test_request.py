"""SamplingParams: what its users write for nothing, and the refusals. Timing: parts that add up."""

from __future__ import annotations

from typing import Any

import pytest

from maitred import SamplingParams
from maitred.core.errors import InvalidRequest
from maitred.scheduler.timing import resumed, timing_of
from tests.fakes import make_request


def test_one_stop_string_and_none_are_written_as_users_of_vllm_do():
    assert SamplingParams(stop="end").stop == ("end",)
    nothing: Any = None
    params = SamplingParams(stop=nothing, bad_words=nothing, stop_token_ids=nothing)
    assert params == SamplingParams()


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("max_new_tokens", "here it is max_tokens"),
        ("do_sample", "here it is temperature, of which 0 is greedy"),
        ("temprature", "did you mean temperature?"),
    ],
)
def test_a_parameter_of_another_library_is_answered_with_ours(name: str, told: str):
    with pytest.raises(TypeError, match=f"no argument {name!r}") as caught:
        SamplingParams(**{name: 1})  # type: ignore[arg-type]
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("stop", 3, "stop is 3; it must be a list"),
        ("stop", [3], r"stop is \[3\]; it must be strings"),
        ("stop", ["a"] * 65, "stop has 65 strings; at most 64"),
        ("stop_token_ids", 3, "stop_token_ids is 3; it must be a list"),
        ("temperature", -1, "temperature is -1; it must be from 0.0 to 100.0"),
        ("temperature", float("nan"), "temperature is nan"),
        ("temperature", "hot", "temperature is 'hot'; it must be a number"),
        ("n", 1.5, "n is 1.5; it must be an integer"),
        ("max_tokens", True, "max_tokens is True; it must be an integer"),
        ("top_p", None, "top_p is None; it must be a number"),
        ("repetition_penalty", 0, "repetition_penalty is 0"),
        ("repetition_penalty", 5e-324, "repetition_penalty is 5e-324; it must be from 0.01 to 100"),
        ("repetition_penalty", None, "repetition_penalty is None; it must be a number"),
        ("stop", [""], "stop holds an empty string"),
        ("bad_words", [""], "bad_words holds an empty word"),
        ("bad_words", "soup", "bad_words must be a list"),
    ],
)
def test_a_value_that_cannot_work_is_refused_with_its_field(field: str, value: Any, message: str):
    with pytest.raises(InvalidRequest, match=message) as refused:
        SamplingParams(**{field: value})
    assert refused.value.param == field


def test_time_spent_preempted_is_a_part_of_its_own():
    request = make_request(prompt=4, arrived_at=0.0)
    request.first_scheduled_at = 1.0
    request.stalled_at = 2.0
    resumed(request, 5.0)  # before its first token
    request.first_token_at = 6.0
    request.stalled_at = 8.0
    now = timing_of(request, 9.0)
    assert (now.queue_s, now.prefill_s, now.decode_s, now.stall_s) == (1.0, 2.0, 2.0, 4.0)
    resumed(request, 10.0)
    resumed(request, 10.0)
    request.finished_at = 11.0
    timing = timing_of(request, 99.0)
    assert (timing.prefill_s, timing.decode_s, timing.stall_s) == (2.0, 3.0, 5.0)
    assert timing.total_s == 11.0
    assert timing.ttft_s == 6.0

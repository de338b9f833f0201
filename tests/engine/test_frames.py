"""A request crosses to another process and back without losing anything that a scheduler or a sampler looks at."""

from __future__ import annotations

import pickle
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import CheckpointError, EngineDead
from maitred.core.replica import DraftCounts
from maitred.core.request import (
    Charges,
    FinishReason,
    Pooling,
    RequestSpec,
    ResumePoint,
    SamplingParams,
    Terms,
    ThinkingLimit,
    prompt_of_each,
    prompt_told_once,
)
from maitred.core.step import RequestProgress, RequestTiming, TokenLogprobs
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.engine.frames import (
    WRONG_FRAME,
    Begin,
    Figures,
    Stepped,
    Submit,
    decode_command,
    decode_report,
    encode,
    error_of,
)

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
times = st.floats(0, 1e9)
sampling_fields: dict[str, st.SearchStrategy] = {
    "n": st.integers(1, 128),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 1000),
    "min_p": st.floats(0, 1),
    "repetition_penalty": st.floats(0.01, 100),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "logit_bias": st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    "allowed_token_ids": st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
    "bad_words": st.lists(st.text(min_size=1, max_size=5), max_size=2),
    "stop": st.lists(st.text(min_size=1, max_size=5), max_size=2),
    "stop_token_ids": token_ids,
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "max_tokens": st.integers(1, 100),
    "min_tokens": st.integers(0, 1),
    "logprobs": st.none() | st.integers(0, 20),
    "prompt_logprobs": st.none() | st.integers(0, 20),
    "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
    "skip_special_tokens": st.booleans(),
    "structured_outputs": st.none() | st.builds(StructuredOutputsParams, regex=st.text(min_size=1, max_size=5)),
}
charges = st.builds(
    Charges,
    num_prompt_tokens=st.integers(0, 9),
    num_cached_tokens=st.integers(0, 9),
    num_generated_tokens=st.integers(0, 9),
    num_preemptions=st.integers(0, 9),
    first_scheduled_at=st.none() | times,
    first_token_at=st.none() | times,
    num_draft_tokens=st.integers(0, 9),
    num_accepted_tokens=st.integers(0, 9),
    num_rows=st.integers(0, 9),
    compute_us=st.integers(0, 9),
)
resume_points = st.builds(
    ResumePoint,
    output_token_ids=token_ids,
    charges=charges,
    last_token_at=st.none() | times,
    stalled_at=st.none() | times,
    stalled_prefill_s=times,
    stalled_decode_s=times,
)
terms_fields: dict[str, st.SearchStrategy] = {
    "priority": st.integers(0, 3),
    "tenant": st.text(max_size=5),
    "weight": st.floats(0.1, 10),
    "ttft_slo_s": st.none() | times,
    "start_by": st.none() | times,
    "finish_by": st.none() | times,
    "background": st.booleans(),
    "key_id": st.text(max_size=5),
}
spec_fields: dict[str, st.SearchStrategy] = {
    "request_id": st.text(max_size=20),
    "arrived_at": times,
    "num_prompt_tokens": st.integers(0, 10**6),
    "max_tokens": st.integers(1, 10**6),
    "prompt_token_ids": token_ids,
    "sampling": st.builds(SamplingParams, **sampling_fields),
    "block_hashes": st.lists(st.binary(min_size=32, max_size=32), max_size=3),
    "seed": st.integers(0, 2**63 - 1),
    "sample_index": st.integers(0, 127),
    "parent_id": st.none() | st.text(max_size=20),
    "terms": st.builds(Terms, **terms_fields),
    "features": st.lists(st.floats(-1, 1), max_size=3).map(tuple),
    "predicted_output_tokens": st.none() | times,
    "cache_salt": st.text(max_size=5),
    "eos_token_ids": token_ids.map(tuple),
    "bad_word_token_ids": st.lists(token_ids.map(tuple), max_size=2).map(tuple),
    "grammar": st.text(max_size=20),
    "thinking": st.none()
    | st.builds(
        ThinkingLimit,
        num_tokens=st.integers(0, 10**6),
        begin=token_ids.map(tuple),
        end=token_ids.map(tuple),
        opened=st.booleans(),
    ),
    "prediction_token_ids": token_ids,
    "kv_from": st.lists(st.text(max_size=9), max_size=2).map(tuple),
    "kv_only": st.booleans(),
    "adapter": st.text(max_size=5),
    "resumed": st.none() | resume_points,
    "pooling": st.none()
    | st.builds(
        Pooling, task=st.text(max_size=9), all_tokens=st.booleans(), whole=st.booleans(), second_from=st.integers(0, 99)
    ),
}
specs = st.builds(RequestSpec, **spec_fields)


@given(specs)
def test_the_samples_of_a_prompt_arrive_as_they_left(spec: RequestSpec):
    """Every field crosses: what is submitted is what the other side gets; the prompt crosses once."""
    samples = [spec, replace(spec, request_id="another", sample_index=1, resumed=None)]
    frame = decode_command(encode(Submit(prompt_told_once(samples))))
    assert isinstance(frame, Submit)
    for sent, came in zip(samples, prompt_of_each(frame.specs), strict=True):
        for name in RequestSpec.__struct_fields__:
            assert _plain(getattr(came, name)) == _plain(getattr(sent, name)), name
    assert encode(frame) == encode(Submit(prompt_told_once(samples)))
    assert not frame.specs[1].prompt_token_ids


def test_the_requests_that_cross_differ_in_every_field():
    """Else the test before would not see a field that is dropped."""
    assert set(spec_fields) == set(RequestSpec.__struct_fields__)
    assert set(terms_fields) == set(Terms.__struct_fields__)
    assert set(sampling_fields) == {field.name for field in fields(SamplingParams)}


def _plain(value: object) -> object:
    """Sequences may change their type on the way, and nothing else."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, SamplingParams):
        return {part.name: _plain(getattr(value, part.name)) for part in fields(value)}
    if isinstance(value, ResumePoint):
        return {name: _plain(getattr(value, name)) for name in ResumePoint.__struct_fields__}
    return value


def test_progress_arrives_as_it_left():
    logprobs = (TokenLogprobs((5, 6), (-0.5, float("-inf")), (1, 2)),)
    timing = RequestTiming(
        queue_s=0.1, prefill_s=0.2, decode_s=0.3, stall_s=0.4, schedule_s=0.05, ttft_s=0.35, num_preemptions=4
    )
    progress = [
        RequestProgress("a", (5,), logprobs, None, None, None, None, Charges(9, 8, 1, 0, 1.5, 2.5, 6, 4)),
        RequestProgress("b", (), None, logprobs, FinishReason.STOP, "###", None, Charges(9, 4, 7, 2), timing),
        RequestProgress("c", (), None, None, FinishReason.ERROR, 7, "logits are NaN", Charges(), timing),
    ]
    numbers = {name: number for number, name in enumerate(Figures.__struct_fields__) if name.startswith("num_")}
    figures = Figures(**numbers, drafts=DraftCounts(3, 9, [3, 2, 0]), prefill_tokens_per_s=1.5, decode_tokens_per_s=2.5)
    assert decode_report(encode(Stepped(progress, 3, figures))) == Stepped(progress, 3, figures)
    assert decode_report(encode(Stepped([], 3, None))) == Stepped([], 3, None)


def test_a_whole_configuration_arrives_as_it_left():
    config = EngineConfig(
        model=ModelConfig(model="x", generation_config={"temperature": 0.5, "top_k": None}),
        scheduler=SchedulerConfig(policy="vtc"),
    )
    assert decode_command(encode(Begin(config, ("a", "b"), 20))) == Begin(config, ("a", "b"), 20)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_refused(data: bytes):
    for decode in (decode_command, decode_report):
        try:
            frame = decode(data)
        except WRONG_FRAME:
            continue
        assert isinstance(frame, msgspec.Struct)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"a": 1}),
        encode(["Submit"]),
        encode(["Abort", "r", "no such reason"]),
        encode(["Begin", {"scheduler": {"max_num_seqs": -1}}, [], 0]),
        encode(["Nothing"]),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_frame_is_refused(data: bytes):
    for decode in (decode_command, decode_report):
        with pytest.raises(WRONG_FRAME):
            decode(data)


def test_an_error_keeps_its_kind_where_both_sides_know_it():
    assert type(error_of("CheckpointError", "no")) is CheckpointError
    assert type(error_of("OSError", "no")) is EngineDead

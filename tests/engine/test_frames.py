"""A request crosses to another process and back without losing anything that a scheduler or a sampler looks at."""

from __future__ import annotations

import pickle
from dataclasses import fields

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.engine.frames import (
    WRONG_FRAME,
    Begin,
    Stepped,
    Submit,
    decode_command,
    decode_report,
    encode,
    error_of,
    request_of,
    submit_of,
)
from maitred.errors import CheckpointError, EngineDead
from maitred.request import FinishReason, RequestState, RequestTiming, SamplingParams
from maitred.step import RequestProgress, TokenLogprobs

KEPT_HERE = {"key_id", "predicted_output_tokens"}  # the ledger's, and the other side's own
OF_A_STEP = {
    *("status", "num_computed_tokens", "block_table", "host_block_table", "num_swapped_tokens", "finish_reason"),
    *("stop_reason", "error", "num_quanta", "quantum_ended_at", "cached_prefix_tokens", "finished_at"),
    "stalled_at",
}

token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=20)
times = st.floats(0, 1e9)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.01, 1),
    repetition_penalty=st.floats(0.01, 100),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 10**6), st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 10**6), min_size=1, max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2),
    bad_words=st.lists(st.text(min_size=1, max_size=5), max_size=2),
    stop_token_ids=token_ids,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    logprobs=st.none() | st.integers(0, 20),
    max_tokens=st.integers(1, 100),
)
requests = st.builds(
    RequestState,
    request_id=st.text(max_size=20),
    prompt_token_ids=token_ids,
    sampling=samplings,
    arrived_at=times,
    num_prompt_tokens=st.just(0),
    max_tokens=st.integers(1, 10**6),
    seed=st.integers(0, 2**63 - 1),
    sample_index=st.integers(0, 127),
    parent_id=st.none() | st.text(max_size=20),
    tenant=st.text(max_size=5),
    start_by=st.none() | times,
    features=st.lists(st.floats(-1, 1), max_size=3).map(tuple),
    bad_word_token_ids=st.lists(token_ids.map(tuple), max_size=2).map(tuple),
    block_hashes=st.lists(st.binary(min_size=32, max_size=32), max_size=3),
    output_token_ids=token_ids,
    first_token_at=st.none() | times,
)


@given(requests)
def test_a_request_arrives_as_it_left(request: RequestState):
    request.num_prompt_tokens = len(request.prompt_token_ids)
    frame = decode_command(encode(submit_of(request)))
    assert isinstance(frame, Submit)
    arrived = request_of(frame)
    for field in fields(RequestState):
        if field.name in KEPT_HERE:
            continue
        sent, got = getattr(request, field.name), getattr(arrived, field.name)
        if field.name == "sampling":
            for part in fields(SamplingParams):
                assert _plain(getattr(sent, part.name)) == _plain(getattr(got, part.name)), part.name
        else:
            assert sent == got, field.name


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_every_field_of_a_request_crosses_or_is_known_not_to():
    told = set(Submit.__struct_fields__) | {"num_prompt_tokens"}
    assert {field.name for field in fields(RequestState)} == told | KEPT_HERE | OF_A_STEP


def test_progress_arrives_as_it_left():
    logprobs = (TokenLogprobs((5, 6), (-0.5, float("-inf")), (1, 2)),)
    timing = RequestTiming(
        queue_s=0.1, prefill_s=0.2, decode_s=0.3, stall_s=0.4, schedule_s=0.05, ttft_s=0.35, num_preemptions=4
    )
    progress = [
        RequestProgress("a", (5,), logprobs, None, None, None, None, 16),
        RequestProgress("b", (), None, logprobs, FinishReason.STOP, "###", None, 0, timing),
        RequestProgress("c", (), None, None, FinishReason.ERROR, 7, "logits are NaN", 0, timing),
    ]
    assert decode_report(encode(Stepped(progress, 3, [], None))) == Stepped(progress, 3, [], None)


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

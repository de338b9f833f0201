"""What a router keeps of a stream: text for the client and tokens for the next replica, never one without the other."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.told import (
    MAX_LINE_BYTES,
    USAGE,
    BrokenFrame,
    ResumeRequest,
    StreamHead,
    ToldFrame,
    ToldSample,
    ToldTokens,
    ToldUsage,
    frame,
    head_line,
    usage_header,
    usage_in,
)

HEAD = StreamHead("chatcmpl-1", 1700000000, "rev native", (11, 12), (16, 16))
KEEP_ALIVE = b": keep-alive\n\n"


def text_of(index: int, tokens: list[int]) -> bytes:
    """What the client gets for tokens; nothing for odd ones, as if they were half a character."""
    shown = [token for token in tokens if token % 2 == 0]
    return b"".join(b'data: {"index":%d,"text":"\\n\\n%d"}\n\n' % (index, token) for token in shown)


Write = tuple[int, list[int]]
WRITES = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 99), max_size=3)), min_size=1, max_size=12)


def stream(writes: list[Write], silences: set[int]) -> bytes:
    """Of a replica, comments of silence between."""
    written = [frame([ToldSample(index, tokens)], text_of(index, tokens)) for index, tokens in writes]
    return head_line(HEAD) + b"".join(
        (KEEP_ALIVE if at in silences else b"") + write for at, write in enumerate(written)
    )


@given(WRITES, st.sets(st.integers(0, 11)), st.data())
def test_wherever_a_stream_is_cut_the_client_has_the_text_of_the_tokens_that_were_told(writes, silences, draw):
    sent = stream(writes, silences)
    cut = draw.draw(st.integers(0, len(sent)))
    ends = sorted(draw.draw(st.lists(st.integers(0, cut), max_size=6)))
    told, relayed = ToldTokens(), b""
    for begin, end in zip([0, *ends], [*ends, cut], strict=True):
        relayed += told.feed(sent[begin:end])
    told.broke_off()
    kept: dict[int, list[int]] = {}
    if told.head is not None:
        asked = msgspec.json.decode(told.resume_body("/v1/completions", b'{"prompt":"a"}'), type=ResumeRequest)
        assert asked.head == HEAD
        kept = {sample.index: sample.token_ids for sample in asked.samples}
    relayed = relayed.replace(KEEP_ALIVE, b"")
    for index in range(3):
        mine = b"".join(line + b"\n\n" for line in relayed.split(b"\n\n") if b'"index":%d,' % index in line)
        assert mine == text_of(index, kept.get(index, []))
    assert told.num_tokens == sum(map(len, kept.values()))
    if cut == len(sent):
        assert told.num_tokens == sum(len(tokens) for _, tokens in writes)


def test_a_body_goes_on_as_it_came():
    body = '{"prompt": "é\\u00e9 \\n",  "seed":1}'.encode()
    told = ToldTokens()
    told.feed(head_line(HEAD) + frame([ToldSample(0, [5], num_cached_tokens=3)], b"data: 1\n\n"))
    told.feed(frame([ToldSample(0, [6, 7], ended=True)], b"data: 2\n\n") + head_line(HEAD))
    asked = told.resume_body("/v1/completions", body, age_s=2.0, ttft_s=1.0)
    assert body in asked
    assert json.loads(asked)["samples"] == [{"index": 0, "token_ids": [5, 6, 7], "ended": True, "num_cached_tokens": 3}]


def test_a_stream_without_tokens_begins_anew_with_another_head():
    told = ToldTokens()
    assert not told.can_resume
    told.feed(head_line(HEAD))
    other = msgspec.structs.replace(HEAD, seeds=(1, 2))
    told.feed(head_line(other))
    assert told.head == other
    assert told.can_resume
    told.feed(frame([ToldSample(0, [1])], b""))
    told.feed(head_line(HEAD))
    assert told.head == other


def test_what_is_no_frame_is_not_believed():
    frames = (
        b'{"num_bytes":-9,"samples":[]}',
        b'{"num_bytes":0,"samples":[{"index":0,"token_ids":[2147483648]}]}',
        b'{"num_bytes":0,"samples":[],"usage":[1,0,-1]}',
    )
    wrong = (b"nonsense\n", b"1" * (MAX_LINE_BYTES + 1), *(each + b"\n" for each in frames))
    for sent in (b": resume {}\n", *(b": tokens " + each for each in wrong)):
        with pytest.raises(BrokenFrame):
            ToldTokens().feed(sent)
        told, good = ToldTokens(), frame([ToldSample(0, [1])], b"data: 1\n\n")
        assert told.feed(good + sent) == b"data: 1\n\n"
        assert told.num_tokens == 1
        with pytest.raises(BrokenFrame):
            told.feed(b"")


def test_usage_in_a_header_is_four_numbers_that_an_answer_can_have():
    usage = ToldUsage(5, 2, 7, 2**40)
    assert usage_in([usage_header(usage)]) == usage
    for value in (
        b"1,2",
        b"1,2,3,4,5",
        b"1,2,3,-4",
        b"-1,0,1",
        b"1,0,2147483648",
        b"1,0," + b"9" * 5000,
        b"a,b,c",
        b"\xff,1,1",
        b"",
    ):
        assert usage_in([(USAGE, value)]) is None


def test_the_end_of_a_stream_is_of_its_last_tokens():
    end = b"data: [DONE]\n\n"
    sent = frame([ToldSample(0, [9], ended=True)], b"data: last\n\n", len(end)) + end
    told = ToldTokens()
    assert told.feed(sent[:-3]) == b""
    assert told.num_tokens == 0
    assert told.feed(sent[-3:]) == b"data: last\n\n" + end
    assert msgspec.json.decode(sent[len(b": tokens ") : sent.index(b"\n")], type=ToldFrame).num_bytes == 12 + len(end)

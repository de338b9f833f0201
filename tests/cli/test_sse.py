from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from maitred.cli.endpoint import DONE, SSEParser

STREAM = b': keep-alive\n\ndata: {"a": 1}\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\n'
EVENTS = [b'{"a": 1}', b"one\ntwo", DONE]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8), st.booleans())
def test_events_do_not_depend_on_where_the_bytes_were_cut(cuts, carriage_returns):
    stream = STREAM.replace(b"\n", b"\r\n") if carriage_returns else STREAM
    edges = [0, *sorted(cuts), len(stream)]
    parser = SSEParser()
    pieces = [stream[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in parser.feed(piece)] == EVENTS


def test_an_event_counts_once_it_is_whole():
    parser = SSEParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [b"x"]

"""A log that nobody reads: its writers go on, what found no room is counted, and the reader hears of it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from maitred.api.http.logs import MAX_KEPT_CHARS, LogStream
from tests.waiting import HANGS_S, until

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)
    os.close(writer)


def test_what_is_written_is_read_in_order(pipe):
    reader, writer = pipe
    stream = LogStream(writer)
    for text in ("one\n", "tw", "o", "\nthree\n\udc80", "\n"):
        stream.write(text)
    assert stream.drain(HANGS_S)
    assert os.read(reader, 1000) == b"one\ntwo\nthree\n\\udc80\n"
    assert stream.num_dropped == 0


def test_a_line_that_is_not_whole_is_seen_when_its_writer_flushes(pipe):
    reader, writer = pipe
    stream = LogStream(writer)
    stream.write("packing: 50%")
    stream.flush()
    assert os.read(reader, 1000) == b"packing: 50%"


def test_nobody_waits_for_a_reader_that_does_not_read_and_it_hears_what_it_missed(pipe, caplog):
    reader, writer = pipe
    stream = LogStream(writer)
    num_lines = 3 * MAX_KEPT_CHARS // len(LINE)
    for _ in range(num_lines):
        stream.write(LINE)
    assert not stream.drain(0.01)
    num_dropped = stream.num_dropped
    assert num_lines / 2 < num_dropped < num_lines
    num_read = 0
    while num_read < (num_lines - num_dropped) * len(LINE):
        num_read += len(os.read(reader, 1 << 16))
    until(lambda: f"{num_dropped} of its lines were dropped" in caplog.text)
    stream.write("and on\n")
    assert os.read(reader, 1000) == b"and on\n"
    assert stream.num_dropped == num_dropped


def test_a_reader_that_left_is_no_error(pipe):
    reader, writer = pipe
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, reader)  # the pipe has no reader any more
    os.close(null)
    stream = LogStream(writer)
    stream.write("lost\n")
    assert stream.drain(HANGS_S)
    assert stream.num_dropped == 1

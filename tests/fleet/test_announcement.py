from __future__ import annotations

import os

import pytest

from maitred.fleet.launch import MAX_LINE_BYTES, AnnouncementReader, Listening, Loaded, announce


def test_announcements_come_whole_out_of_any_pieces():
    reading, writing = os.pipe()
    announce(writing, Listening("http://127.0.0.1:1", 7))
    announce(writing, Loaded({"weights": 0.5}))
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        sent = stream.read()
    reader = AnnouncementReader()
    came = [news for byte in sent for news in reader.feed(bytes([byte]))]
    assert came == [Listening("http://127.0.0.1:1", 7), Loaded({"weights": 0.5})]


@pytest.mark.parametrize("wrong", [b"hello\n", b'{"type":"Listening"}\n', b"x" * (MAX_LINE_BYTES + 1)])
def test_what_is_no_announcement_is_said_to_be_none(wrong: bytes):
    with pytest.raises(ValueError, match=r"announcement|a line of more than"):
        AnnouncementReader().feed(wrong)


def test_a_launcher_that_is_gone_needs_no_news():
    reading, writing = os.pipe()
    os.close(reading)
    announce(writing, Loaded({}))
    os.close(writing)

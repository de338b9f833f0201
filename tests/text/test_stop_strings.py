"""The stop string matcher against searching the whole text."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.text.detokenizer import StopResult, StopStringMatcher

few = st.text(alphabet="ab👍", max_size=30)
stops = st.lists(st.text(alphabet="ab👍", min_size=1, max_size=6), max_size=5)


def slow_find(text: str, stop: list[str]) -> tuple[str, str] | None:
    """(text before it, stop string) of the first to be complete, the longest of several."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stop if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return None


def slow_hold(text: str, stop: list[str]) -> int:
    """The most characters at the end that could still become a stop string."""
    return max((n for s in stop for n in range(len(s)) if n <= len(text) and text.endswith(s[:n])), default=0)


@settings(max_examples=500, deadline=None)
@given(few, stops, st.lists(st.integers(0, 30), max_size=8), st.booleans())
def test_any_pieces_give_what_the_whole_text_gives(text: str, stop: list[str], cuts: list[int], include: bool):
    matcher = StopStringMatcher(stop, include=include)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    shown, stopped = "", None
    for start, end in itertools.pairwise(bounds):
        result = matcher.push(text[start:end])
        shown += result.text
        stopped = stopped or result.stopped
        if stopped is None:
            assert shown == text[: end - slow_hold(text[:end], stop)]
    shown += matcher.flush()
    found = slow_find(text, stop)
    if found is None:
        assert (shown, stopped) == (text, None)
    else:
        assert (shown, stopped) == (found[0] + (found[1] if include else ""), found[1])


def test_a_stop_string_is_found_across_pieces_and_never_shown_in_part():
    matcher = StopStringMatcher(["</end>"])
    assert matcher.push("one <") == StopResult("one ", None)
    assert matcher.push("/en") == StopResult("", None)
    assert matcher.push("d>two") == StopResult("", "</end>")
    assert matcher.flush() == ""


def test_what_was_held_back_is_shown_when_it_becomes_something_else():
    matcher = StopStringMatcher(["</end>"])
    matcher.push("one </en")
    assert matcher.push("t") == StopResult("</ent", None)


def test_only_the_part_that_can_still_match_is_held():
    matcher = StopStringMatcher(["aab"])
    assert matcher.push("aa") == StopResult("", None)
    assert matcher.push("a") == StopResult("a", None)
    assert matcher.push("b") == StopResult("", "aab")


def test_the_first_complete_stop_string_wins_and_of_equals_the_longest():
    assert StopStringMatcher(["abcd", "bc"]).push("xabcd") == StopResult("xa", "bc")
    assert StopStringMatcher(["c", "bc", "abc"]).push("xabc") == StopResult("x", "abc")


def test_a_stop_string_may_be_included():
    assert StopStringMatcher(["\n\n"], include=True).push("a\n\nb") == StopResult("a\n\n", "\n\n")


def test_after_a_stop_there_is_no_more_text():
    matcher = StopStringMatcher(["x"])
    matcher.push("ax")
    assert matcher.push("more") == StopResult("", "x")


def test_without_stop_strings_text_passes():
    matcher = StopStringMatcher([])
    assert matcher.push("text") == StopResult("text", None)
    assert matcher.flush() == ""


@pytest.mark.parametrize("stop", ["a" * 5000 + "b", "ab" * 2500 + "a!"])
def test_long_stop_strings_over_a_long_text_take_linear_time(stop: str):
    matcher = StopStringMatcher([stop])
    text = stop[:-1] * 20  # always nearly there
    began = time.thread_time()
    shown = "".join(matcher.push(character).text for character in text[:100_000:1])
    assert shown + matcher.flush() == text[:100_000]
    assert time.thread_time() - began < 30

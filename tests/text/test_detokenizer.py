"""Streamed text against decoding everything at once, for every kind of tokenizer."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maitred.text.detokenizer import Detokenizer, StopResult, StopStringMatcher
from maitred.text.tokenizer import Tokenizer
from tests.text.kinds import KINDS, byte_level, llama_2

kinds = pytest.mark.parametrize("kind", KINDS)
texts = st.text(max_size=40) | st.text(alphabet="hi theab.,é你👍🏽e\u0301\u200d▁<s>\n", max_size=40)


@st.composite
def cut_lists(draw: st.DrawFn, ids: list[int]) -> list[list[int]]:
    cuts = sorted(draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    return [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]


def stream(detokenizer: Detokenizer, pieces: Sequence[Sequence[int]]) -> str:
    return "".join(detokenizer.push(piece) for piece in pieces) + detokenizer.flush()


@kinds
@settings(max_examples=50, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_pieces_of_any_tokens_join_to_the_decoded_whole(kind: str, data: st.DataObject, skip: bool):
    tokenizer = KINDS[kind]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25))
    pieces = data.draw(cut_lists(ids))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    assert stream(detokenizer, pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@kinds
@settings(max_examples=50, deadline=None)
@given(text=texts)
def test_one_token_at_a_time_shows_only_what_stays(kind: str, text: str):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer)
    shown = ""
    for token in ids:
        piece = detokenizer.push([token])
        shown += piece
        assert whole.startswith(shown)
        assert not piece.endswith("\ufffd") or "\ufffd" in whole
    assert shown + detokenizer.flush() == whole


@kinds
@settings(max_examples=50, deadline=None)
@given(text=texts, data=st.data(), skip=st.booleans())
def test_after_a_prompt_the_pieces_are_what_the_output_adds(kind: str, text: str, data: st.DataObject, skip: bool):
    tokenizer = KINDS[kind]()
    ids = tokenizer.encode(text)
    assume("\ufffd" not in tokenizer.decode(ids))
    cut = data.draw(st.integers(0, len(ids)))
    added = stream(Detokenizer(tokenizer, prompt_token_ids=ids[:cut], skip_special_tokens=skip), [ids[cut:]])
    prompt_text = tokenizer.decode(ids[:cut], skip_special_tokens=skip).rstrip("\ufffd")
    assert prompt_text + added == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", ["llama_2", "gemma", "unigram"])
@pytest.mark.parametrize("cut", [2, 65, 66])
def test_a_run_of_bytes_is_read_from_its_beginning_however_long_it_is(kind: str, cut: int):
    tokenizer = KINDS[kind]()
    text = "\x80" + "0" * 200
    ids = tokenizer.encode(text)
    added = stream(Detokenizer(tokenizer, prompt_token_ids=ids[:cut]), [ids[cut:]])
    assert tokenizer.decode(ids[:cut]).rstrip("\ufffd") + added == tokenizer.decode(ids)
    assert added
    assert "\ufffd" not in added


def test_an_unfinished_character_is_given_at_the_end_as_a_replacement():
    for tokenizer in (byte_level(), llama_2()):
        ids = tokenizer.encode("a你好")[:-1] if tokenizer.byte_level else [*tokenizer.encode("a"), 1 + 0xE5]
        detokenizer = Detokenizer(tokenizer)
        before = detokenizer.push(ids)
        assert "\ufffd" not in before
        assert detokenizer.flush() == "\ufffd"


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_without_one():
    tokenizer = llama_2()
    hi = tokenizer.token_id("▁hi")
    assert hi is not None
    assert Detokenizer(tokenizer, prompt_token_ids=tokenizer.encode("a")).push([hi]) == " hi"
    assert Detokenizer(tokenizer).push([hi]) == "hi"
    bos = tokenizer.bos_token_id
    assert bos is not None
    assert Detokenizer(tokenizer, prompt_token_ids=[bos]).push([hi]) == "hi"


def test_a_flushed_stream_can_go_on():
    for kind in ("byte_level", "llama_2"):
        tokenizer = KINDS[kind]()
        detokenizer = Detokenizer(tokenizer)
        ids = tokenizer.encode("hi the cat")
        first = detokenizer.push(ids[:2]) + detokenizer.flush()
        assert first + detokenizer.push(ids[2:]) + detokenizer.flush() == "hi the cat"


@kinds
@pytest.mark.parametrize("text", ["hi ab. ", "你好吗", "   ", "\x01"])
def test_time_is_linear_in_the_tokens(kind: str, text: str, monkeypatch: pytest.MonkeyPatch):
    """Counts the tokens given to decode; a byte run without end, blanks and unknown characters included."""
    tokenizer = KINDS[kind]()
    decoded = 0
    original = Tokenizer.decode

    def counting(self: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        nonlocal decoded
        decoded += len(ids)
        return original(self, ids, skip_special_tokens=skip_special_tokens)

    ids = tokenizer.encode(text * 2000)[:2000]
    monkeypatch.setattr(Tokenizer, "decode", counting)
    detokenizer = Detokenizer(tokenizer)
    for token in ids:
        detokenizer.push([token])
    detokenizer.flush()
    assert decoded <= 12 * len(ids) + 100


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


@settings(max_examples=75, deadline=None)
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


def test_a_stop_string_is_found_across_pieces_never_shown_in_part_and_ends_the_text():
    matcher = StopStringMatcher(["</end>"])
    assert matcher.push("one <") == StopResult("one ", None)
    assert matcher.push("/en") == StopResult("", None)
    assert matcher.push("d>two") == StopResult("", "</end>")
    assert matcher.flush() == ""

    matcher = StopStringMatcher(["x"])
    matcher.push("ax")
    assert matcher.push("more") == StopResult("", "x")


@pytest.mark.parametrize("stop", ["a" * 5000 + "b", "ab" * 2500 + "a!"])
def test_long_stop_strings_over_a_long_text_take_linear_time(stop: str):
    matcher = StopStringMatcher([stop])
    text = stop[:-1] * 20  # always nearly there
    began = time.thread_time()
    shown = "".join(matcher.push(character).text for character in text[:100_000:1])
    assert shown + matcher.flush() == text[:100_000]
    assert time.thread_time() - began < 30

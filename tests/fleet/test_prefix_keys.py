"""Prefix keys: equal beginnings have equal keys, whatever follows, and unlike salts, models and tools have none."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.prefix_keys import MAX_KEYS, NO_KEYS, PIECE_BYTES, prefix_keys, read_body


def keys_of(messages, salt="", **fields):
    return prefix_keys(read_body(json.dumps({"model": "m", "messages": messages, **fields}).encode()), salt)


def user(text):
    return {"role": "user", "content": text}


def shared(left, right):
    """How many of the first keys are the same."""
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


@given(st.lists(st.text(max_size=900), min_size=1, max_size=6), st.text(max_size=900))
def test_a_conversation_that_grows_keeps_all_its_keys(texts, more):
    before = keys_of([user(text) for text in texts])
    after = keys_of([user(text) for text in [*texts, more]])
    assert after.keys[: len(before.keys)] == before.keys
    assert len(after.keys) > len(before.keys)


def test_keys_part_with_the_first_piece_that_differs():
    left, right = user("a" * 1000), user("a" * 600 + "b" * 400)
    num_shared = shared(keys_of([left]).keys, keys_of([right]).keys)
    assert num_shared == (len('{"role": "user", "content": "') + 600) // PIECE_BYTES


@given(st.lists(st.binary(max_size=700), min_size=1, max_size=4))
def test_ends_are_bytes_of_the_messages(texts):
    messages = [user(text.decode("latin-1")) for text in texts]
    found = keys_of(messages)
    assert found.ends[-1] == sum(len(json.dumps(message)) for message in messages)
    assert all(0 < end - start <= PIECE_BYTES for start, end in zip((0, *found.ends), found.ends, strict=False))
    assert len(found.keys) == len(found.ends)


@pytest.mark.parametrize(
    "other",
    [
        {"salt": "b"},
        {"model": "n"},
        {"tools": [{"type": "function"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"cache_salt": "x"},
    ],
)
def test_who_differs_in_what_comes_before_the_messages_shares_no_key(other):
    messages = [user("hello"), user("again")]
    assert not set(keys_of(messages, salt="a").keys) & set(keys_of(messages, **{"salt": "a", **other}).keys)


def test_what_does_not_change_the_prompt_does_not_change_the_keys():
    assert keys_of([user("hello")], temperature=1, n=3) == keys_of([user("hello")], stream=True)


def test_a_text_is_cut_every_so_many_bytes():
    found = prefix_keys(read_body(b'{"prompt": "' + b"x" * 1000 + b'"}'))
    assert found.ends == (256, 512, 768, 1002)


@pytest.mark.parametrize("first", ["x" * 1000, 'a "quoted" text, [not] a list', list(range(500))])
def test_several_prompts_have_the_keys_of_the_first(first):
    def keys(prompt):
        return prefix_keys(read_body(json.dumps({"prompt": prompt}).encode()))

    assert keys([first, "another"]) == keys([first]) == keys(first) != NO_KEYS
    assert keys(["x"] * 70_000) == NO_KEYS, "too many to be told apart"


def test_there_are_at_most_so_many_keys():
    one = keys_of([user("x" * 2 * MAX_KEYS * PIECE_BYTES)])
    many = keys_of([user("x")] * (MAX_KEYS + 1))
    assert len(one.keys) == len(many.keys) == len(one.ends) == MAX_KEYS


def test_without_a_prompt_there_are_no_keys():
    assert prefix_keys(read_body(b'{"input": "x"}')) == NO_KEYS

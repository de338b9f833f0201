"""Prefix keys: equal beginnings have equal keys, whatever follows, and unlike salts, models and tools have none."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.prefix_keys import MAX_KEYS, NO_KEYS, PIECE_BYTES, RoutedBody, prefix_keys, read_asked, read_body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def test_what_the_router_needs_is_read_and_the_rest_skipped():
    read = read_body(
        b'{"model": "m", "stream": true, "max_tokens": 7, "messages": [ {"a": 1} ], "logit_bias": {"1": 2}}'
    )
    assert (read.model, read.stream, read.max_tokens) == ("m", True, 7)
    assert bytes(read.messages) == b'[ {"a": 1} ]'  # as it stands


def test_a_whole_number_with_a_point_is_an_integer_as_replicas_take_it():
    assert read_body(b'{"max_tokens": 20.0, "n": 2.5}') == RoutedBody(max_tokens=20)


def test_a_field_of_the_wrong_type_is_as_if_it_were_not_there():
    read = read_body(b'{"model": "m", "n": "many", "messages": [1], "user": 5, "temperature": 1}')
    assert (read.model, read.n, read.user, read.temperature) == ("m", None, None, 1.0)
    assert bytes(read.messages) == b"[1]"


def test_tritons_generate_is_read_by_the_names_of_completions():
    body = (
        b'{"text_input": "Hi", "parameters": {"max_tokens": 9, "n": 3, "stream": true}, "n": 2,'
        b' "sampling_parameters": "{\\"temperature\\": \\"0.5\\", \\"n\\": 4}"}'
    )
    read = read_asked("/v2/models/a/b/versions/1/generate", body)
    assert (read.model, read.stream, read.max_tokens, read.n, read.temperature) == ("a/b", False, 9, 4, 0.5)
    assert prefix_keys(read).keys == prefix_keys(read_body(b'{"model": "a/b", "prompt": "Hi"}')).keys
    assert read_asked("/v2/models/m/generate_stream", b'{"text_input": "Hi"}').stream
    assert read_asked("/v2/models/m/infer", body) == read_body(body)
    for wrong in (b"", b"[]", b'{"parameters": 5, "sampling_parameters": "{"}'):
        assert read_asked("/v2/models/m/generate", wrong) == RoutedBody(model="m", stream=False)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b'{"model": "\xff"}', b"[" * 100_000, b'{"messages": ' + b"[" * 100_000]
)
def test_what_is_no_object_is_an_empty_request(body):
    assert read_body(body) == RoutedBody()


@pytest.mark.parametrize("messages", [b'"x"', b"{}", b"[1, 2]", b"3", b"null", b"[" + b"[]," * 70_000 + b"[]]"])
def test_messages_that_are_no_list_of_messages_have_keys_too(messages):
    assert prefix_keys(read_body(b'{"messages": ' + messages + b"}")).keys


@given(
    st.binary() | st.dictionaries(st.sampled_from(RoutedBody.__struct_fields__), JSON).map(json.dumps).map(str.encode)
)
def test_no_body_breaks_it(body):
    prefix_keys(read_body(body))


def test_a_number_that_takes_long_is_read_once_however_often_a_large_body_has_it():
    """400,000 of these would take 3 s, in which a router does nothing else."""
    body = b'{"n": 2, "prompt": "a", ' + b'"temperature":1e300,' * 400_000 + b'"temperature": 0.5}'
    began = time.thread_time()
    read = read_body(body)
    assert time.thread_time() - began < 0.5
    assert (read.n, read.temperature, bytes(read.prompt)) == (2, 0.5, b'"a"')


def test_half_a_surrogate_pair_breaks_nothing():
    prefix_keys(read_body(b'{"model": "\\ud800", "prompt": "\\ud800"}'))


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

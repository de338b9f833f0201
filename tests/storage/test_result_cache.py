"""The result cache: what is kept, for whom, for how long, and what a client may say of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from maitred.storage.result_cache import (
    ENTRY_BYTES,
    MAX_SHARE,
    CacheControl,
    CachedAnswer,
    ResultCache,
    cache_control,
    is_exact,
    is_fresh,
    packed,
    result_key,
    unpacked,
    without_comments,
)

JSON = b"application/json"
KEY = bytes(32)


def answer(body: bytes = b"{}", stored_at: float = 0.0) -> CachedAnswer:
    return CachedAnswer(JSON, body, stored_at)


def test_only_exact_requests_have_a_key_of_tenant_revision_path_and_body():
    assert all(is_exact(*case) for case in [(0, None), (0.0, None), (1.0, 7), (None, 0)])
    assert not any(is_exact(*case) for case in [(None, None), (0.01, None)])
    base = {"path": "/v1/completions", "tenant": "a", "revision": "r"}
    keys = {
        result_key(b"x", **base),
        result_key(b"x ", **base),
        *(result_key(b"x", **(base | {name: "other"})) for name in base),
        result_key(b"x", path="/v1/completions", tenant="", revision="ar"),
    }
    assert len(keys) == 6


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3000), st.booleans()), max_size=60))
def test_it_never_holds_more_than_its_bytes_and_forgets_the_least_recently_used(steps):
    cache, order = ResultCache(12_000, 100.0), []
    for number, size, is_looked_up in steps:
        key = number.to_bytes(1, "little")
        if is_looked_up:
            if cache.find(key, 0.0) is not None:
                order.remove(key)
                order.append(key)
        else:
            cache.keep(key, answer(bytes(size)))
            order = [k for k in order if k != key] + [key] * (size <= cache.max_answer_bytes)
        cache.check_invariants()
        order = order[len(order) - len(cache) :]
        assert all(cache.find(k, 0.0) is not None for k in order)


def test_an_answer_is_found_until_its_time_is_over_and_one_too_large_never():
    cache = ResultCache(MAX_SHARE * (ENTRY_BYTES + 10), 5.0)
    cache.keep(KEY, answer(bytes(10), stored_at=1.0))
    assert cache.find(KEY, 5.9) is not None
    assert cache.find(KEY, 6.0) is None
    assert cache.num_bytes == 0
    cache.keep(KEY, answer(bytes(11), stored_at=1.0))
    assert cache.find(KEY, 1.0) is None


def test_cache_control_is_read_as_the_rfc_has_it_and_events_lose_their_comments():
    assert cache_control(None) == cache_control(b"max-stale, x=1") == CacheControl(False, None)
    assert cache_control(b"No-Store") == CacheControl(no_store=True)
    assert cache_control(b"no-cache, max-age=60").max_age_s == 0
    assert cache_control(b'max-age="60"').max_age_s == 60
    assert cache_control(b"max-age=soon").max_age_s == cache_control(b"max-age=-1").max_age_s == 0
    assert is_fresh(answer(), cache_control(b"max-age=60"), 59.0)
    assert not is_fresh(answer(), cache_control(b"max-age=60"), 60.0)
    assert not is_fresh(answer(), cache_control(b"no-cache"), 0.0)
    events = b": keep-alive\n\n: tokens 0 1\ndata: a: b\n\n: keep-alive\n\ndata: [DONE]\n\n"
    assert without_comments(events) == b"data: a: b\n\ndata: [DONE]\n\n"
    assert without_comments(b"data: x\n: tokens 1 2\n\n") == b"data: x\n\n"


def test_what_others_kept_is_whole_and_for_this_key_or_is_nothing():
    told = ((b"x-a", b"b"),)
    sent = packed(KEY, answer(b"body", stored_at=7.0)._replace(told=told), unix_now=1000.0, now=10.0)
    assert unpacked(KEY, sent, 1005.0, 50.0) == CachedAnswer(JSON, b"body", 50.0 - 8.0, told)
    assert unpacked(bytes([1]) * 32, sent, 1005.0, 50.0) is None
    assert all(
        unpacked(KEY, sent[:i] + bytes([sent[i] ^ 1]) + sent[i + 1 :], 0.0, 0.0) is None for i in range(len(sent))
    )
    assert unpacked(KEY, b"", 0.0, 0.0) is unpacked(KEY, sent[:-1], 0.0, 0.0) is None

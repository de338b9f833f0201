"""Consistent hashing: few keys move on a rescale, and shares follow the weights."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.balance import HashRing, hash_of

KEYS = [hash_of(f"key {i}") for i in range(2000)]


def make_ring(**weights: float) -> HashRing:
    ring = HashRing()
    ring.set_weights(weights)
    return ring


def owners(ring: HashRing, names: str) -> list[str | None]:
    return [ring.owner(key, set(names)) for key in KEYS]


@given(count=st.integers(1, 8))
def test_a_newcomer_takes_its_share_and_no_key_moves_between_the_others(count: int):
    names = "abcdefghi"[: count + 1]
    ring = make_ring(**dict.fromkeys(names[:-1], 1.0))
    before = owners(ring, names)
    ring.set_weights(dict.fromkeys(names, 1.0))
    moved = [after for last, after in zip(before, owners(ring, names), strict=True) if last != after]
    assert set(moved) <= {names[-1]}
    assert len(moved) / len(KEYS) == pytest.approx(1 / (count + 1), rel=0.5)


def test_who_leaves_takes_no_key_but_its_own():
    ring = make_ring(a=1.0, b=1.0, c=1.0)
    before = owners(ring, "abc")
    ring.set_weights({"a": 1.0, "c": 1.0})
    assert all(last in ("b", now) for last, now in zip(before, owners(ring, "ac"), strict=True))


def test_who_is_passed_over_keeps_all_other_keys_where_they_are():
    ring = make_ring(a=1.0, b=1.0, c=1.0)
    before, without = owners(ring, "abc"), owners(ring, "ac")
    assert all(last in ("b", now) for last, now in zip(before, without, strict=True))
    assert len(set(without)) == 2


def test_shares_follow_the_weights():
    counts = Counter(owners(make_ring(a=1.0, b=3.0), "ab"))
    assert counts["b"] / counts["a"] == pytest.approx(3.0, rel=0.35)


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=5))
def test_a_ring_is_the_same_whatever_was_on_it_before(history: list[dict[str, float]]):
    ring = HashRing()
    for weights in history:
        ring.set_weights(weights)
    assert owners(ring, "abcd")[:200] == owners(make_ring(**history[-1]), "abcd")[:200]


def test_an_empty_ring_has_no_owners():
    assert make_ring().owner(5, {"a"}) is None

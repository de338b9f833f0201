from __future__ import annotations

from hashlib import sha256
from itertools import combinations
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.kv.prefix_cache import PrefixCache, TokenHasher, hash_blocks, root_hash
from tests.fakes import make_request

ROOT = root_hash("model")


def test_only_full_blocks_have_hashes():
    assert [len(hash_blocks(range(n), 4, ROOT)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_the_chain_is_sha256_of_the_parent_and_little_endian_tokens():
    first = sha256(ROOT + pack("<2I", 5, 70_000)).digest()
    second = sha256(first + pack("<2I", 7, 8)).digest()
    assert hash_blocks([5, 70_000, 7, 8], 2, ROOT) == [first, second]


def test_roots_differ_by_model_and_by_salt_and_do_not_run_together():
    roots = [root_hash("model"), root_hash("model", "salt"), root_hash("other", "salt"), root_hash("models", "alt")]
    assert all(a != b for a, b in combinations(roots, 2))


@given(a=st.lists(st.integers(0, 2), max_size=12), b=st.lists(st.integers(0, 2), max_size=12), size=st.integers(1, 4))
def test_hashes_are_equal_exactly_as_far_as_prefixes_are(a: list[int], b: list[int], size: int):
    pairs = zip(hash_blocks(a, size, ROOT), hash_blocks(b, size, ROOT), strict=False)
    for i, (of_a, of_b) in enumerate(pairs, 1):
        assert (of_a == of_b) == (a[: i * size] == b[: i * size])


@given(num_prompt=st.integers(1, 10), num_output=st.integers(0, 10), size=st.integers(1, 4), known=st.integers(0, 10))
def test_hashes_extended_step_by_step_are_those_of_the_whole(num_prompt: int, num_output: int, size: int, known: int):
    request = make_request(prompt=num_prompt, block_size=size, cache_salt="salt")
    request.output_token_ids = list(range(num_output))
    whole = hash_blocks([*request.spec.prompt_token_ids, *range(num_output)], size, root_hash("m", "salt"))
    request.block_hashes = whole[:known]
    request.block_hashes.extend(TokenHasher(size, "m")(request, len(whole)))
    assert request.block_hashes[: len(whole)] == whole


def test_the_longest_cached_prefix_is_found():
    cache, hashes = PrefixCache(), hash_blocks(range(12), 4, ROOT)
    cache.register(hashes[0], 7)
    cache.register(hashes[2], 9)
    assert cache.find(hashes) == [7]
    cache.register(hashes[1], 8)
    assert cache.find(hashes) == [7, 8, 9]
    cache.forget(8)
    assert cache.find(hashes) == [7]
    cache.check_invariants()


def test_of_two_blocks_with_equal_contents_the_first_keeps_the_name():
    cache = PrefixCache()
    cache.register(b"x", 1)
    cache.register(b"x", 2)
    cache.forget(2)
    assert cache.find([b"x"]) == [1]


def test_a_findable_block_that_is_rewritten_is_our_bug():
    cache = PrefixCache()
    cache.register(b"x", 1)
    with pytest.raises(AssertionError, match="rewritten"):
        cache.register(b"y", 1)

"""Changes are differences: whoever applies all that was taken has what there is, and no event is kept twice."""

from __future__ import annotations

from hashlib import sha256
from itertools import combinations
from random import Random
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import RequestState, SamplingParams
from maitred.core.step import BlockCopy
from maitred.kv.manager import BlockPool, KVCacheManager, PrefixHit
from maitred.kv.prefix_cache import Changes, PrefixCache, TokenHasher, hash_blocks, root_hash
from tests.fakes import MODEL, make_request, make_samples

# -- block pool


def test_blocks_are_handed_out_least_recently_freed_first():
    pool = BlockPool(3, kept={0, 1, 2})
    a, b, c = pool.take(3)
    for block in (b, c, a):
        pool.release(block)
    assert pool.take(3) == [b, c, a]


def test_a_block_that_nobody_can_find_again_is_handed_out_before_those_that_can_be_hit():
    pool = BlockPool(4, kept={0, 1})
    pool.take(4)
    for block in (0, 2, 1, 3):
        pool.release(block)
    assert pool.free_blocks == (3, 2, 0, 1)


def test_a_block_that_background_requests_alone_had_is_handed_out_before_others_that_can_be_hit():
    pool = BlockPool(4, kept={0, 1, 2})
    pool.take(4)
    pool.share(1)
    pool.release(0)
    pool.release(1)
    for block in (3, 2, 1):
        pool.release(block, background=True)
    assert pool.free_blocks == (3, 2, 0, 1)


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    (block,) = pool.take(1)
    pool.share(block)
    pool.release(block)
    assert (pool.num_used, pool.num_free) == (1, 1)
    pool.release(block)
    assert (pool.num_used, pool.num_free) == (0, 2)


def test_a_free_block_that_is_hit_leaves_the_free_queue():
    pool = BlockPool(2, kept={0, 1})
    pool.share(1)
    assert pool.free_blocks == (0,)
    pool.check_invariants()


def test_a_block_released_too_often_is_our_bug():
    with pytest.raises(AssertionError, match="block 0 released"):
        BlockPool(1).release(0)


@settings(deadline=None)
@given(chooser=st.randoms(use_true_random=False), num_acts=st.integers(1, 100))
def test_the_pool_agrees_with_a_list_of_free_blocks(chooser: Random, num_acts: int):
    """Oracle: a plain list in hand-out order, and a list with one entry for each holding."""
    num_blocks = chooser.randint(1, 8)
    kept = {block for block in range(num_blocks) if chooser.random() < 0.5}
    pool, free, held = BlockPool(num_blocks, kept), list(range(num_blocks)), list[int]()
    for _ in range(num_acts):
        act = chooser.choice(["take", "share", "release"])
        if act == "take" and free:
            count = chooser.randint(1, len(free))
            taken, free = free[:count], free[count:]
            assert pool.take(count) == taken
            held += taken
        elif act == "share":
            block = chooser.randrange(num_blocks)
            pool.share(block)
            held.append(block)
            free = [b for b in free if b != block]
        elif act == "release" and held:
            block = held.pop(chooser.randrange(len(held)))
            pool.release(block)
            if block not in held:
                free = [*free, block] if block in kept else [block, *free]
        assert pool.free_blocks == tuple(free)
        assert pool.ref_counts == [held.count(block) for block in range(num_blocks)]
        pool.check_invariants()


# -- changes


@given(st.sets(st.integers(0, 6)), st.lists(st.one_of(st.integers(0, 6), st.none())), st.integers(1, 4))
def test_what_was_told_and_what_is_left_make_what_there_is(held, flips, most):
    """A number comes or goes; None takes some of the changes."""
    changes, told = Changes(held), set()
    held = set(held)
    for flip in [*flips, *[None] * 20]:
        if flip is None:
            stored, removed = changes.take(most)
            assert len(stored) + len(removed) <= most
            assert told.isdisjoint(stored)
            assert told.issuperset(removed)
            told = (told - set(removed)) | set(stored)
        elif flip in held:
            held.discard(flip)
            changes.removed(flip)
        else:
            held.add(flip)
            changes.stored(flip)
        assert len(changes) == len(held ^ told)
    assert told == held


# -- prefix cache


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


# -- manager


def make_manager(num_blocks: int = 8, block_size: int = 4, **fields: bool) -> KVCacheManager:
    hasher = TokenHasher(block_size, MODEL)
    return KVCacheManager(num_blocks=num_blocks, block_size=block_size, hasher=hasher, **fields)


def compute(kv: KVCacheManager, request: RequestState) -> None:
    """Admits a request and computes all it knows."""
    start = request.num_computed_tokens
    if not request.block_table:
        hit = kv.find_prefix(request)
        assert kv.admit(request, hit) is not None
        start = hit.num_tokens
    kv.commit(request, start, request.num_tokens)
    request.num_computed_tokens = request.num_tokens


def test_a_request_is_given_blocks_for_all_its_known_tokens():
    kv, request = make_manager(), make_request(prompt=9)
    allocation = kv.admit(request, kv.find_prefix(request))
    assert allocation is not None
    assert allocation.new_block_ids == tuple(request.block_table)
    assert len(request.block_table) == kv.num_used == 3


def test_when_blocks_are_lacking_nothing_changes():
    kv, request = make_manager(num_blocks=2), make_request(prompt=9)
    hit = kv.find_prefix(request)
    assert kv.num_blocks_short(request, hit) == 1
    assert kv.admit(request, hit) is None
    assert (kv.num_used, request.block_table) == (0, [])


def test_a_prompt_that_begins_alike_shares_full_blocks():
    kv = make_manager()
    first = make_request(prompt=[1, 2, 3, 4, 5, 6, 7, 8, 9])
    second = make_request(prompt=[1, 2, 3, 4, 5, 6, 7, 8, 0, 0])
    compute(kv, first)
    compute(kv, second)
    assert second.block_table[:2] == first.block_table[:2]
    assert kv.num_used == 4
    kv.check_invariants([first, second])


def test_the_last_token_is_always_computed():
    kv, prompt = make_manager(), list(range(8))
    compute(kv, make_request(prompt=prompt))
    assert kv.find_prefix(make_request(prompt=prompt)).num_tokens == 4
    assert kv.find_prefix(make_request(prompt=[*prompt, 8])).num_tokens == 8


def test_unlike_salts_never_share():
    kv, prompt = make_manager(), list(range(9))
    compute(kv, make_request(prompt=prompt, cache_salt="alice"))
    assert kv.find_prefix(make_request(prompt=prompt, cache_salt="bob")).num_tokens == 0
    assert kv.find_prefix(make_request(prompt=prompt)).num_tokens == 0
    assert kv.find_prefix(make_request(prompt=prompt, cache_salt="alice")).num_tokens == 8


def test_a_request_for_prompt_logprobs_does_not_read_the_cache_but_fills_it():
    kv, prompt = make_manager(), list(range(9))
    asks = make_request(prompt=prompt, sampling=SamplingParams(prompt_logprobs=1))
    compute(kv, asks)
    assert kv.find_prefix(asks).num_tokens == 0
    assert kv.find_prefix(make_request(prompt=prompt)).num_tokens == 8


def test_without_prefix_caching_nothing_is_found():
    kv, prompt = make_manager(enable_prefix_caching=False), list(range(9))
    compute(kv, make_request(prompt=prompt))
    assert kv.find_prefix(make_request(prompt=prompt)).num_tokens == 0
    assert kv.num_cached == 0


def test_a_chain_is_evicted_from_its_end():
    kv = make_manager(num_blocks=4)
    first = make_request(prompt=list(range(16)))
    compute(kv, first)
    kv.free(first)
    compute(kv, make_request(prompt=[99, 98, 97, 96, 95]))  # takes two blocks
    assert kv.find_prefix(make_request(prompt=[*range(16), 0])).num_tokens == 8


def test_a_hit_block_is_not_evicted_for_the_same_request():
    kv = make_manager(num_blocks=3)
    first = make_request(prompt=list(range(4)))
    compute(kv, first)
    kv.free(first)
    longer = make_request(prompt=[*range(4), *range(50, 58)])
    hit = kv.find_prefix(longer)
    assert kv.admit(longer, hit) is not None
    assert longer.block_table[0] == hit.blocks[0]
    kv.check_invariants([longer])


def test_free_blocks_that_are_hit_do_not_count_twice():
    kv = make_manager(num_blocks=3)
    first = make_request(prompt=list(range(8)))
    compute(kv, first)
    kv.free(first)
    too_long = make_request(prompt=[*range(8), *range(50, 57)])
    assert kv.num_blocks_short(too_long, kv.find_prefix(too_long)) == 1
    assert kv.admit(too_long, kv.find_prefix(too_long)) is None


def test_a_fork_shares_the_prompt_and_copies_its_partly_filled_last_block():
    kv = make_manager()
    source, target = make_samples("p", 2, prompt=6)
    compute(kv, source)
    hit = kv.fork(source, target)
    assert hit == PrefixHit(tuple(source.block_table), 5, forked=True)
    allocation = kv.admit(target, hit)
    assert allocation is not None
    assert target.block_table[0] == source.block_table[0]
    assert target.block_table[1] != source.block_table[1]
    assert allocation.copies == (BlockCopy(source.block_table[1], target.block_table[1]),)
    assert target.num_computed_tokens == 5
    kv.check_invariants([source, target])


def test_a_fork_at_a_block_boundary_copies_nothing():
    kv = make_manager()
    source, target = make_samples("p", 2, prompt=9)
    compute(kv, source)
    allocation = kv.admit(target, kv.fork(source, target))
    assert allocation is not None
    assert allocation.copies == ()
    assert target.block_table[:2] == source.block_table[:2]


def test_a_shared_block_about_to_be_written_is_replaced():
    kv = make_manager()
    source, target = make_samples("p", 2, prompt=6)
    compute(kv, source)
    shared = source.block_table[1]
    target.block_table, target.num_computed_tokens = list(source.block_table), 6
    for block in target.block_table:
        kv._pool.share(block)  # a fork that has not written yet
    allocation = kv.allocate(source, 1)
    assert allocation is not None
    replacement = source.block_table[1]
    assert allocation.replaced_blocks == ((1, replacement),)
    assert allocation.copies == (BlockCopy(shared, replacement),)
    assert target.block_table[1] == shared
    kv.check_invariants([source, target])


def test_copy_on_write_needs_a_free_block():
    kv = make_manager(num_blocks=2)
    source, target = make_samples("p", 2, prompt=6)
    compute(kv, source)
    assert kv.num_blocks_short(target, kv.fork(source, target)) == 1
    assert kv.admit(target, kv.fork(source, target)) is None


@settings(deadline=None)
@given(chooser=st.randoms(use_true_random=False), num_acts=st.integers(1, 60))
def test_hits_are_those_of_a_brute_force_search(chooser: Random, num_acts: int):
    """Oracle: what each block holds, as the tuple of all tokens up to its end; a search looks at every block."""
    size, num_blocks = chooser.randint(1, 3), chooser.randint(2, 12)
    kv = make_manager(num_blocks, size)
    holds: dict[int, tuple[int, ...]] = {}  # registered contents, for as long as nobody rewrote the block
    running: list[RequestState] = []
    for _ in range(num_acts):
        if running and chooser.random() < 0.5:
            kv.free(running.pop(chooser.randrange(len(running))))
        else:
            length = chooser.randint(1, num_blocks * size)
            request = make_request(prompt=[chooser.randint(0, 1) for _ in range(length)], block_size=size)
            hit = kv.find_prefix(request)
            prompt, expected = tuple(request.spec.prompt_token_ids), 0
            while expected + size < length and prompt[: expected + size] in holds.values():
                expected += size
            assert hit.num_tokens == expected
            assert all(holds[block] == prompt[: (i + 1) * size] for i, block in enumerate(hit.blocks))
            if kv.admit(request, hit) is None:
                continue
            running.append(request)
            for block in request.block_table[len(hit.blocks) :]:
                holds.pop(block, None)
            kv.commit(request, hit.num_tokens, length)
            for i, block in enumerate(request.block_table[: length // size]):
                if prompt[: (i + 1) * size] not in holds.values():
                    holds[block] = prompt[: (i + 1) * size]
        assert kv.num_cached == len(holds)
        kv.check_invariants(running)

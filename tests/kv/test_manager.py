from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import RequestState, SamplingParams
from maitred.core.step import BlockCopy
from maitred.kv.manager import KVCacheManager, PrefixHit
from maitred.kv.prefix_cache import TokenHasher
from tests.fakes import MODEL, make_request, make_samples


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

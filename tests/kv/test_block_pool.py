from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.kv.manager import BlockPool


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

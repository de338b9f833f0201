"""First fit over one stretch of memory, against a map of its lines."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.engine.tensor_memory import ALIGNMENT, Arena

START, LINES = 4 * ALIGNMENT, 24
OPERATIONS = st.lists(st.tuples(st.sampled_from(["allocate", "free"]), st.integers(0, 6 * ALIGNMENT)), max_size=60)


def first_fit(used, lines):
    """The slow way: the first line from which so many are free."""
    fits = (at for at in range(LINES - lines + 1) if used.isdisjoint(range(at, at + lines)))
    return next(fits, None)


@given(OPERATIONS)
def test_blocks_lie_where_the_slow_way_puts_them_and_nothing_is_lost(operations):
    arena, blocks = Arena(START, START + LINES * ALIGNMENT + 7), {}
    for operation, number in operations:
        if operation == "allocate":
            lines = -(-max(1, number) // ALIGNMENT)
            used = {line for block in blocks.values() for line in block}
            at, start = first_fit(used, lines), arena.allocate(number)
            assert start == (None if at is None else START + at * ALIGNMENT)
            if at is not None:
                blocks[start] = range(at, at + lines)
        elif blocks:
            start = sorted(blocks)[number % len(blocks)]
            arena.free(start)
            del blocks[start]
        arena.check_invariants()
        assert len(arena) == len(blocks)
    for start in blocks:
        arena.free(start)
    arena.check_invariants()
    assert arena.allocate(LINES * ALIGNMENT) == START


def test_a_block_can_be_taken_where_it_is_and_nobody_else_gets_it():
    arena = Arena(0, 4 * ALIGNMENT)
    arena.take(ALIGNMENT, 100)
    arena.check_invariants()
    assert [arena.allocate(ALIGNMENT) for _ in range(3)] == [0, 3 * ALIGNMENT, None]
    with pytest.raises(AssertionError):
        arena.take(2 * ALIGNMENT, 1)


def test_an_arena_of_nothing_gives_nothing():
    assert Arena(0, 0).allocate(1) is None

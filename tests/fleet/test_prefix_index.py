"""The index says of each replica what its cache holds, after any events, and as a walk down the keys would."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.fleet.prefix_index import ForeignHistory, Hit, PrefixIndex

NUM_REPLICAS = 4
CHAINS = [
    [depth if depth < fork else 100 * tail + depth for depth in range(12)]
    for tail, fork in enumerate([3, 3, 7, 1, 0], 1)
]


def walked(caches, keys, mask):
    """The slow obvious way: by replica, how many of the first keys are there."""
    depths = {}
    for bit, cache in enumerate(caches):
        if mask >> bit & 1:
            depth = next((i for i, key in enumerate(keys) if key not in cache), len(keys))
            depths[depth] = depths.get(depth, 0) | 1 << bit
    return [Hit(depth, bits) for depth, bits in sorted(depths.items(), reverse=True) if depth]


class Fleet(RuleBasedStateMachine):
    """Replicas whose caches hold chains from their beginnings, and tell of what comes and goes."""

    def __init__(self):
        super().__init__()
        self.index = PrefixIndex()
        self.caches = [set() for _ in range(NUM_REPLICAS)]

    @rule(bit=st.integers(0, NUM_REPLICAS - 1), chain=st.sampled_from(CHAINS), depth=st.integers(0, 12))
    def stores(self, bit, chain, depth):
        self.caches[bit] |= set(chain[:depth])
        self.index.stored(bit, chain[:depth])

    @rule(bit=st.integers(0, NUM_REPLICAS - 1), chain=st.sampled_from(CHAINS), depth=st.integers(0, 12))
    def evicts(self, bit, chain, depth):
        gone = set(chain[depth:])
        gone |= {key for other in CHAINS for i, key in enumerate(other) if gone & set(other[: i + 1])}
        self.caches[bit] -= gone
        self.index.removed(bit, gone)

    @rule(bit=st.integers(0, NUM_REPLICAS - 1))
    def breaks(self, bit):
        self.caches[bit].clear()
        self.index.forgot(bit)

    @rule(chain=st.sampled_from(CHAINS), mask=st.integers(0, 2**NUM_REPLICAS - 1))
    def is_asked(self, chain, mask):
        assert self.index.hits(chain, mask) == walked(self.caches, chain, mask)

    @invariant()
    def holds_what_the_caches_hold(self):
        self.index.check_invariants()
        assert self.index.num_keys == len(set().union(*self.caches))
        assert [self.index.num_keys_of(bit) for bit in range(NUM_REPLICAS)] == [len(each) for each in self.caches]


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=20), st.integers(0, 40))
def test_any_depths_are_found(depths, num_keys):
    index = PrefixIndex()
    for bit, depth in enumerate(depths):
        index.stored(bit, range(depth))
    caches = [set(range(depth)) for depth in depths]
    assert index.hits(range(num_keys), 2**20 - 1) == walked(caches, range(num_keys), 2**20 - 1)


def test_what_is_removed_twice_or_was_never_there_is_no_matter():
    index = PrefixIndex()
    index.stored(0, [1, 2])
    index.removed(0, [2, 3])
    index.removed(1, [1])
    index.removed(0, [2])
    assert index.hits([1, 2], 0b11) == [Hit(1, 0b1)]
    index.check_invariants()


def make_history(max_keys=100):
    index = PrefixIndex()
    return index, ForeignHistory(index, max_keys)


def chain(name, num_keys=10):
    return [1000 * name + depth for depth in range(num_keys)]


def test_what_was_sent_is_found_there():
    index, history = make_history()
    history.sent(1, chain(1))
    assert index.hits([*chain(1), 5], 0b11) == [Hit(10, 0b10)]


def test_the_least_recently_used_is_forgotten_first_and_a_chain_from_its_end():
    index, history = make_history(max_keys=25)
    for name in (1, 2, 1, 3):
        history.sent(0, chain(name))
    assert [index.hits(chain(name), 1) for name in (1, 2, 3)] == [[Hit(10, 1)], [Hit(5, 1)], [Hit(10, 1)]]


def test_a_miss_that_usage_tells_makes_all_older_ones_forgotten():
    index, history = make_history()
    for name in (1, 2, 3):
        history.sent(0, chain(name))
    expected = history.sent(0, chain(2))
    history.told(0, expected, cached_tokens=0, prompt_tokens=640)
    assert [len(index.hits(chain(name), 1)) for name in (1, 2, 3)] == [0, 1, 1]  # 2 is there again


def test_a_server_that_was_seen_to_forget_is_believed_to_hold_less():
    index, history = make_history()
    for name in range(8):
        history.sent(0, chain(name))
    history.told(0, history.sent(0, chain(1)), cached_tokens=0, prompt_tokens=640)
    for name in range(20, 30):
        history.sent(0, chain(name))
    assert index.num_keys_of(0) < 80


def test_usage_as_expected_changes_nothing():
    index, history = make_history()
    history.sent(0, chain(1))
    history.sent(0, chain(2))
    history.told(0, history.sent(0, chain(2)), cached_tokens=600, prompt_tokens=640)
    assert index.num_keys == 20


def test_another_server_is_not_concerned():
    index, history = make_history()
    history.sent(0, chain(1))
    history.sent(1, chain(1))
    history.forgot(0)
    assert index.hits(chain(1), 0b11) == [Hit(10, 0b10)]


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 12), st.integers(0, 12)), max_size=60),
    st.integers(1, 40),
)
def test_a_server_never_has_a_key_without_those_before_it_nor_more_than_its_share(requests, max_keys):
    index, history = make_history(max_keys)
    for bit, name, num_keys, num_cached in requests:
        keys = [0, 1, 2, *chain(name + 1, num_keys)]
        expected = history.sent(bit, keys)
        history.told(bit, expected, cached_tokens=min(num_cached, len(keys)), prompt_tokens=len(keys))
        index.check_invariants()
        assert index.num_keys_of(bit) <= max_keys
        for known in range(1, 7):
            keys = [0, 1, 2, *chain(known, 12)]
            held = [key in index._keys.get(bit, ()) for key in keys]
            assert held == sorted(held, reverse=True)

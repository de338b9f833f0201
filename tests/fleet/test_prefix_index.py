"""The index says of each replica what its cache holds, after any events, and as a walk down the keys would."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.fleet.prefix_index import Hit, PrefixIndex

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

"""A replica's keys: stored while their block, or that of any key behind them, can be found; told to whoever listens."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from maitred.fleet import stored_keys
from maitred.fleet.stored_keys import KeyBlock, StoredKeys

BLOCKS = [b"a", b"b", b"c", b"d", b"e", b"f"]
# chains of a trie: a key is its path, so that equal keys have equal beginnings
CHAINS = [(0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 4), (0, 5, 6), (7, 8)]


def told(changes, known):
    stored, removed = changes.take(10**6)
    assert known.isdisjoint(stored)
    assert known.issuperset(removed)
    return (known - set(removed)) | set(stored)


class Replica(RuleBasedStateMachine):
    """Blocks come and go, requests tell which key ends where, routers come and go."""

    def __init__(self):
        super().__init__()
        self.keys = StoredKeys()
        self.cached = set()
        self.routers = []

    @rule(chain=st.sampled_from(CHAINS), ends=st.lists(st.sampled_from([None, *BLOCKS]), min_size=4, max_size=4))
    def a_request_comes(self, chain, ends):
        self.keys.note([KeyBlock(key, block) for key, block in zip(chain, ends, strict=False)])

    @rule(stored=st.sets(st.sampled_from(BLOCKS)), removed=st.sets(st.sampled_from(BLOCKS)))
    def blocks_change(self, stored, removed):
        removed = (removed & self.cached) - stored
        stored = stored - self.cached
        self.keys.blocks_changed(stored, removed)
        self.cached = (self.cached - removed) | stored

    @rule()
    def the_engine_dies(self):
        self.keys.forgot()
        self.cached.clear()

    @rule()
    def a_router_comes(self):
        self.routers.append((self.keys.listen(), set()))

    @rule()
    def a_router_leaves(self):
        if self.routers:
            self.keys.leave(self.routers.pop(0)[0])

    @invariant()
    def every_router_knows_what_is_stored(self):
        self.keys.check_invariants()
        self.routers = [(changes, told(changes, known)) for changes, known in self.routers]
        assert all(known == self.keys.stored for _, known in self.routers)

    @invariant()
    def who_has_a_key_has_those_before_it(self):
        for chain in CHAINS:
            held = [key in self.keys.stored for key in chain]
            assert held == sorted(held, reverse=True)


TestReplica = Replica.TestCase
TestReplica.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_key_is_told_when_its_block_is_there_whichever_comes_first():
    keys = StoredKeys()
    keys.blocks_changed([b"a"], [])
    keys.note([KeyBlock(1, b"a"), KeyBlock(2, b"b")])
    assert keys.stored == {1}
    keys.blocks_changed([b"b"], [])
    assert keys.stored == {1, 2}
    keys.blocks_changed([], [b"b"])
    assert keys.stored == {1}


def test_a_key_before_the_first_full_block_is_stored_with_those_behind_it():
    keys = StoredKeys()
    keys.note([KeyBlock(1, None), KeyBlock(2, b"a")])
    assert keys.stored == set()
    keys.blocks_changed([b"a"], [])
    assert keys.stored == {1, 2}


def test_a_block_that_comes_back_brings_its_key_back():
    keys = StoredKeys()
    keys.note([KeyBlock(1, b"a")])
    for stored, removed in (([b"a"], []), ([], [b"a"]), ([b"a"], [])):
        keys.blocks_changed(stored, removed)
    assert keys.stored == {1}


def test_memory_is_bounded_however_many_forms_a_prompt_has(monkeypatch):
    monkeypatch.setattr(stored_keys, "MAX_AWAITED", 20)
    keys = StoredKeys()
    keys.blocks_changed([b"a", b"b"], [])
    for form in range(1000):
        keys.note([KeyBlock(10 * form + 1, b"a"), KeyBlock(10 * form + 2, b"b"), KeyBlock(10 * form + 3, b"never")])
    keys.check_invariants()
    assert len(keys._keys) < 20 + 3 * 2 * stored_keys.MAX_PER_BLOCK
    assert len(keys._by_block) < 4

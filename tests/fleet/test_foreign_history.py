"""What is thought of a server's cache when it tells nothing: what was sent, until usage or age says otherwise."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.fleet.prefix_index import ForeignHistory, Hit, PrefixIndex


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

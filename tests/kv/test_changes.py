"""Changes are differences: whoever applies all that was taken has what there is, and no event is kept twice."""

from hypothesis import given
from hypothesis import strategies as st

from maitred.kv.prefix_cache import Changes


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

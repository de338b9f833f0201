from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import ConfigError
from maitred.sim.links import Links, SimulatedLink, link_named

PORTS = SimulatedLink(100.0, 0.0)


def ends(links: Links) -> list[float]:
    """When flows run dry, one after another."""
    found = []
    while (at := links.next_at) is not None:
        found += [at] * len(links.advance(at))
    return found


def test_a_transfer_alone_gets_all_of_the_link():
    links = Links(PORTS)
    links.send(links.open("a", "b"), 200, 1.0)
    assert ends(links) == [pytest.approx(3.0)]


def test_two_that_share_a_port_get_half_each_and_the_longer_one_all_when_it_is_alone():
    links = Links(PORTS)
    links.send(links.open("a", "b"), 100, 0.0)
    links.send(links.open("a", "c"), 300, 0.0)
    assert ends(links) == [pytest.approx(2.0), pytest.approx(4.0)]


def test_transfers_between_others_are_in_nobodys_way_unless_all_share_one_link():
    for link, expected in ((PORTS, [1.0, 1.0]), (SimulatedLink(100.0, 0.0, is_shared=True), [2.0, 2.0])):
        links = Links(link)
        links.send(links.open("a", "b"), 100, 0.0)
        links.send(links.open("c", "d"), 100, 0.0)
        assert ends(links) == [pytest.approx(at) for at in expected]


def test_bytes_may_join_a_flow_and_a_flow_may_be_cut():
    links = Links(PORTS)
    first, second = links.open("a", "b"), links.open("a", "c")
    links.send(first, 100, 0.0)
    links.send(second, 1000, 0.0)
    links.send(first, 50, 1.0)
    links.cut(second, 2.0)
    assert ends(links) == [pytest.approx(2.5)]
    assert second.left == 0.0


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(1, 10_000), st.integers(0, 2), st.integers(3, 5)), min_size=1))
def test_a_port_never_carries_more_than_it_can(sends):
    links = Links(PORTS)
    for at, num_bytes, sender, receiver in sorted(sends):
        while links.next_at is not None and links.next_at <= at:
            links.advance(links.next_at)
        links.send(links.open(str(sender), str(receiver)), num_bytes, at)
    last = max(ends(links))
    by_sender = [sum(n for _, n, s, _ in sends if s == sender) for sender in range(3)]
    by_receiver = [sum(n for _, n, _, r in sends if r == receiver) for receiver in range(3, 6)]
    assert last >= max([*by_sender, *by_receiver]) / 100.0 * 0.999
    assert last <= max(at for at, *_ in sends) + sum(n for _, n, *_ in sends) / 100.0 * 1.001


def test_a_link_has_a_name_or_a_rate():
    assert link_named("none") is None
    assert link_named("100MB/s") == SimulatedLink(1e8, 200e-6, is_shared=True)
    with pytest.raises(ConfigError, match="did you mean tcp"):
        link_named("tpc")

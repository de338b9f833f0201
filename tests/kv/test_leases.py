"""Leases and the order of pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.kv.leases import Front, LeaseBook, Readable, Refusal, Span


def test_a_lease_is_over_when_nobody_has_renewed_it() -> None:
    book = LeaseBook(30.0)
    book.offer("a", 4, Readable(4), now=0.0)
    book.offer("b", 4, Readable(4), now=0.0)
    book.renew("a", now=20.0)
    assert book.expired(now=29.9) == []
    assert book.expired(now=30.0) == ["b"]
    assert book.in_force("a", now=49.9).num_blocks == 4
    with pytest.raises(Refusal, match="expired") as refused:
        book.in_force("a", now=50.0)  # at once, whether or not somebody has looked for leases that are over
    assert refused.value.reason == "no_lease"


def test_a_prefill_that_goes_on_keeps_its_lease_and_tells_more() -> None:
    book = LeaseBook(30.0)
    book.offer("a", 8, Readable(0), now=0.0)
    book.grow("a", Readable(0, end_block=4), now=25.0, num_layers_written=lambda: 3)
    assert book.in_force("a", now=40.0).readable_now() == Readable(0, 4, 3)
    book.grow("a", Readable(4), now=50.0)
    assert book.renew("a", now=60.0).readable_now() == Readable(4)
    assert book.end("a")
    assert not book.end("a")
    book.grow("a", Readable(8), now=60.0)
    assert len(book) == 0


@given(st.data())
def test_each_layer_of_each_block_is_sent_once_and_only_when_it_can_be_read(data: st.DataObject) -> None:
    num_layers, unit = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    first_layer, first = data.draw(st.integers(0, num_layers - 1)), data.draw(st.integers(0, 3))
    end = first + unit * data.draw(st.integers(1, 6))
    most = data.draw(st.integers(unit, 12))
    whole = Span(first_layer, num_layers, first, end)
    sender, receiver = Front(whole, unit), Front(whole, unit)
    sent: set[tuple[int, int]] = set()
    readable = Readable(0)
    while not sender.is_done:
        span = sender.due(readable, most)
        if span is None:  # the prefill goes on: more layers of a chunk, or its end and the next one
            if readable.num_layers < num_layers and readable.end_block:
                readable = readable._replace(num_layers=readable.num_layers + 1)
            else:
                done = max(readable.num_blocks, readable.end_block)
                readable = Readable(done, done + data.draw(st.integers(1, 7)))
            continue
        cells = {(layer, block) for layer in span.layers for block in span.blocks}
        assert not cells & sent
        assert len(cells) == span.num_cells <= most
        assert all(block < readable.end_of(layer) for layer, block in cells)
        assert len(span.blocks) % unit == 0
        sent |= cells
        sender.take(span)
        receiver.take(span)
        through = min(sum((layer, block) in sent for block in whole.blocks) for layer in whole.layers)
        assert sender.num_blocks == receiver.num_blocks == through
    assert len(sent) == whole.num_cells
    assert receiver.is_done


@pytest.mark.parametrize(
    "span",
    [
        Span(0, 3, 2, 4),  # a layer that was not asked for
        Span(1, 3, 4, 6),  # a gap
        Span(1, 3, 2, 8),  # past the end
        Span(1, 3, 2, 3),  # part of a unit
        Span(1, 1, 2, 4),
        Span(1, 3, 4, 2),
        Span(-1, 3, 2, 4),
        Span(1, 4, 2, 4),
    ],
)
def test_a_piece_out_of_turn_is_refused(span: Span) -> None:
    front = Front(Span(1, 3, 2, 6), unit=2)
    with pytest.raises(Refusal, match="turn it was not"):
        front.take(span)
    front.take(Span(1, 3, 2, 4))
    assert front.num_blocks == 2

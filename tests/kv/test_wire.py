"""Leases and the order of pieces."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.kv.leases import Front, LeaseBook, Readable, Refusal, Span
from maitred.kv.wire import agree, layout_of
from tests.conftest import ROOT
from tests.kv.worlds import make_layout

# -- leases


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


# -- compat


# another thread decodes a layout while msgspec, in the first, asks what Agreed is made of
TWO_FIRST_CONTACTS = """
import msgspec, sys, threading
from maitred.kv.wire import Agreed, layout_of
from tests.kv.worlds import make_layout

def meanwhile(frame, event, arg):
    if frame.f_code.co_name == "get_class_annotations" and frame.f_locals["obj"] is Agreed:
        thread = threading.Thread(target=layout_of, args=(told,))
        thread.start()
        thread.join()

told = msgspec.msgpack.encode(make_layout())
sys.settrace(meanwhile)
layout_of(told)
"""


@pytest.mark.parametrize(
    "unlike",
    [
        {"revision": "xyz"},
        {"positions": "yarn 4"},
        {"kv_dtype": "float32"},
        {"num_layers": 5},
        {"num_kv_heads": 4},
        {"weight_dtype": "int8"},
        {"executor": "torch"},
        {"isa": "amx"},
    ],
)
def test_another_model_rope_or_numerics_is_refused_with_both_sides_named(unlike: dict[str, Any]) -> None:
    (name, theirs), own = *unlike.items(), make_layout()
    with pytest.raises(Refusal) as refused:
        agree(own, make_layout(**unlike), receives=True)
    assert refused.value.reason == "unlike"
    assert f"{name} is {getattr(own.agreed, name)!r} here, {theirs!r} there" in str(refused.value)


@pytest.mark.parametrize(
    ("theirs", "ours", "blocks", "pulled"),
    [
        (16, 16, range(3, 9), range(3, 9)),
        (16, 32, range(1, 4), range(2, 8)),
        (32, 16, range(3, 9), range(1, 4)),  # a block of theirs that holds one of ours is taken whole
        (32, 16, range(4), range(2)),
        (32, 16, range(5), range(2)),  # and its second half may not be there yet
        (48, 32, range(7), range(4)),
    ],
)
def test_blocks_of_another_size_are_pulled_in_whole_units(theirs: int, ours: int, blocks: range, pulled: range) -> None:
    terms = agree(make_layout(block_size=ours), make_layout(block_size=theirs), receives=True)
    assert terms.pulled(blocks) == pulled
    assert len(pulled) % terms.unit == 0


@pytest.mark.parametrize("encoded", [b"", b"\x80", b"cos\nsystem", b"\xff" * 40])
def test_what_is_no_layout_is_refused(encoded: bytes) -> None:
    with pytest.raises(Refusal) as refused:
        layout_of(encoded)
    assert refused.value.reason == "garbage"


def test_first_contacts_in_two_threads_at_once_do_not_end_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", TWO_FIRST_CONTACTS], check=False, cwd=ROOT)
    assert done.returncode == 0

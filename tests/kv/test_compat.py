"""What two workers must have alike, and what is converted."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from maitred.kv.leases import Refusal
from maitred.kv.wire import agree, layout_of
from tests.conftest import ROOT
from tests.kv.worlds import make_layout

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

"""What a body has besides its struct's fields is what a look at every key finds, in small bodies and in large ones."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Raw, UnsetType

from maitred.api.http.bodies import SMALL_BYTES, BodyDecoder


class Options(msgspec.Struct):
    fast: bool | None = None


class Item(msgspec.Struct):
    text: str


class Order(msgspec.Struct, kw_only=True):
    name: str
    items: list[Item] = []
    options: Options | None = None
    told: Options | UnsetType = UNSET
    either: str | list[int] | None = None
    kept: Raw | UnsetType = UNSET


DECODER = BodyDecoder(Order, ("later", "never"))
PAD = "x" * SMALL_BYTES
NAMES = ("later", "never", "nmae", "x y", 'a"b', "ä", "", "items.x", "options.fast")
values = st.sampled_from([None, True, 1, 0.5, "", "null", [], {}, {"name": 1}])
options = st.dictionaries(st.sampled_from(["fast", "slow", 'a"b']), st.sampled_from([None, True, False]))
orders = st.builds(
    lambda order, others: order | others,
    st.fixed_dictionaries(
        {"name": st.sampled_from(["a", PAD])},
        optional={
            "items": st.lists(st.fixed_dictionaries({"text": st.just("a")}, optional={"more": values}), max_size=2),
            "options": st.none() | options,
            "told": options,
            "either": st.sampled_from([None, "a", [1]]),
            "kept": values,
        },
    ),
    st.dictionaries(st.sampled_from(NAMES), values),
)


@given(orders)
def test_every_other_field_is_found_and_the_body_is_as_if_there_were_none(order: dict[str, Any]):
    body = json.dumps(order).encode()
    sent = DECODER.decode(body)
    own = {name: value for name, value in order.items() if name in Order.__struct_fields__}
    assert as_plain(sent.body) == as_plain(msgspec.json.decode(json.dumps(own), type=Order))
    assert {name: msgspec.json.decode(value) for name, value in sent.refused.items()} == {
        name: order[name] for name in ("later", "never") if name in order
    }
    assert sorted(sent.unknown) == sorted(unknown_in(order))


def unknown_in(order: dict[str, Any]) -> list[str]:
    """The slow way."""
    expected = {*Order.__struct_fields__, "later", "never"}
    nested = [(name, order.get(name) or {}) for name in ("options", "told")]
    return [
        *(name for name, value in order.items() if name not in expected and value is not None),
        *(f"{at}.{name}" for at, of in nested for name, value in of.items() if name != "fast" and value is not None),
    ]


def as_plain(order: Order) -> Any:
    return msgspec.json.decode(msgspec.json.encode(order))


def test_the_fields_of_what_a_list_holds_are_not_looked_through():
    assert DECODER.decode(b'{"name":"a","items":[{"text":"b","more":1}]}').unknown == ()


def test_of_a_field_that_is_there_twice_the_last_counts():
    for pad in ("", PAD):
        sent = DECODER.decode(b'{"later":1,"name":"","later":2,"other":1,"name":"%b","other":2}' % pad.encode())
        assert (sent.body.name, bytes(sent.refused["later"]), sent.unknown) == (pad, b"2", ("other",))

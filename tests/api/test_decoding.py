"""What is long is decoded in pieces: the same values, the same complaints, and no piece that takes long."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.api.dialects.openai.refusals import ChatAsSent, CompletionAsSent
from maitred.api.http import decoding
from maitred.api.http.decoding import PIECE_BYTES, Pieces, decode, decode_json
from maitred.api.http.outline import Outline
from maitred.errors import InvalidRequest

SMALL_PIECE = 16  # bytes; every text of these tests then is long
texts = st.text(st.sampled_from('\\"/nu\n\x00d83x \u00e9\u6f22\U0001f600'), max_size=40)
integers = st.lists(st.integers(-3, 10**6), max_size=20)
anything = st.recursive(
    st.one_of(texts, st.integers(-9, 9), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
parts = st.fixed_dictionaries({"type": texts}, optional={"text": texts | anything, "more": anything})
messages = st.fixed_dictionaries(
    {"role": texts, "content": st.one_of(texts, st.lists(parts, max_size=4), anything)},
    optional={"name": texts, "tool_calls": anything, "more": anything},
)
bodies = st.fixed_dictionaries(
    {"model": texts, "messages": st.lists(messages, max_size=5) | anything},
    optional={"stop": st.lists(texts, max_size=4) | texts, "stop_token_ids": integers | anything, "user": anything},
)
VALUES = [
    (str, texts),
    (list[int], integers),
    (list[int], st.lists(st.integers(0, 9) | anything, max_size=12)),
    (list[list[int]], st.lists(integers, max_size=4)),
    (list[str], st.lists(texts, max_size=6)),
    (ChatAsSent, bodies),
]


def at_once(pieces: Pieces[Any]) -> Any:
    while True:
        try:
            next(pieces)
        except StopIteration as made:
            return made.value


def in_small_pieces(sent: bytes, kind: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "PIECE_BYTES", SMALL_PIECE)
        return at_once(decode(sent, kind))


@given(st.sampled_from(VALUES).flatmap(lambda pair: st.tuples(st.just(pair[0]), pair[1])), st.booleans(), st.data())
def test_in_pieces_a_value_is_what_it_is_in_one(case, is_ascii, data):
    kind, value = case
    sent = msgspec.json.encode(value)
    if is_ascii:
        sent = escaped(sent)
    if data.draw(st.booleans(), "damaged"):
        at = data.draw(st.integers(0, len(sent)))
        sent = (
            sent[:at] + data.draw(st.sampled_from([b"", b"1", b'"', b",", b"]", b"{", b"\\", b"\xc3"])) + sent[at + 1 :]
        )
    try:
        msgspec.json.decode(sent, type=msgspec.Raw)  # as a field's raw value is: it has been found
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    try:
        expected = decode_json(sent, msgspec.json.Decoder(kind))
    except InvalidRequest:
        with pytest.raises(InvalidRequest):
            in_small_pieces(sent, kind)
    else:
        assert msgspec.json.encode(in_small_pieces(sent, kind)) == msgspec.json.encode(expected)


def escaped(sent: bytes) -> bytes:
    """The same JSON, with an escape, or two, for every character that is not ASCII."""
    return "".join(
        char if char < "\x80" else "".join(f"\\u{unit:04x}" for unit in memoryview(char.encode("utf-16-le")).cast("H"))
        for char in sent.decode()
    ).encode()


@pytest.mark.parametrize("num_before", range(14))
@pytest.mark.parametrize(
    "char", ["\\ud83d\\ude00", "\\\\", "\\n", "\\u6f22", "\u00e9", "\u6f22", "\U0001f600", "\\\\\\ud83d\\ude00"]
)
def test_no_cut_goes_through_a_character(char, num_before):
    sent = b'"%b"' % (b"x" * num_before + char.encode() * 20)
    assert in_small_pieces(sent, str) == msgspec.json.decode(sent)


WRONG = {
    "messages[3].content[1].text": (
        ChatAsSent,
        b'{"model":"a","messages":[%b{"role":"user","content":[{"type":"text"},{"type":"text","text":3}]}]}'
        % (b'{"role":"user","content":"hello"},' * 3),
    ),
    "messages[2].role": (ChatAsSent, b'{"model":"a","messages":[%b{}]}' % (b'{"role":"user","content":"hello"},' * 2)),
    "messages": (ChatAsSent, b'{"model":"a","messages":{"role":"user"}}'),
    "prompt": (CompletionAsSent, b'{"model":"a","stop_token_ids":[1,2,3]}'),
    "stop_token_ids[9]": (
        ChatAsSent,
        b'{"model":"a","messages":[],"stop_token_ids":[%b"a,b"]}' % (b"1000, " * 9),
    ),
    "[7]": (list[int], b"[%b1.5]" % (b"1000," * 7)),
    "[3][4]": (list[list[int]], b"[%b[1,2,3,4,[]]]" % (b"[1,2,3],[1000,2,3,4,5],[]," * 1)),
}


@pytest.mark.parametrize("param", WRONG)
def test_a_complaint_names_the_same_place(param):
    kind, sent = WRONG[param]
    with pytest.raises(InvalidRequest) as whole:
        decode_json(sent, msgspec.json.Decoder(kind))
    with pytest.raises(InvalidRequest) as pieces:
        in_small_pieces(sent, kind)
    assert whole.value.param == pieces.value.param == param
    assert str(whole.value) == str(pieces.value)


def test_a_number_that_is_longer_than_a_piece_is_no_number():
    with pytest.raises(InvalidRequest, match="seed is a number of 1048577 characters"):
        at_once(decode(b'{"model":"a","prompt":"a","seed":%b}' % (b"1" * (PIECE_BYTES + 1)), CompletionAsSent))


LONG = {
    "text": (str, b'"%b"' % (b"\\n" * 2 * PIECE_BYTES)),
    "texts": (list[str], b"[%b]" % b",".join([b'"%b"' % (b"\\n" * PIECE_BYTES)] * 4 + [b'"a"'] * 500_000)),
    "integers": (list[int], b"[%b1]" % (b"300," * PIECE_BYTES)),
    "lists": (list[list[int]], b"[%b[1]]" % ((b"[%b1]," % (b"300," * 2000)) * 500)),
    "messages": (
        ChatAsSent,
        b'{"model":"a","messages":[%b{"role":"user","content":"%b"}]}'
        % (b'{"role":"user","content":"hello"},' * 90_000, b"\\n" * PIECE_BYTES),
    ),
    "parts": (
        ChatAsSent,
        b'{"model":"a","messages":[{"role":"user","content":[%b{"type":"text","text":"%b"}]}]}'
        % (b'{"type":"text","text":"hello"},' * 90_000, b"\\n" * PIECE_BYTES),
    ),
    "user": (ChatAsSent, b'{"model":"a","messages":[],"user":"%b"}' % (b"\\n" * 2 * PIECE_BYTES)),
}


@pytest.mark.parametrize("name", LONG)
def test_only_finding_the_parts_of_a_long_value_sees_more_of_it_than_a_piece(name, monkeypatch):
    kind, sent = LONG[name]
    sizes: list[int] = []

    def noted(piece: bytes | memoryview, decoder: msgspec.json.Decoder[Any], **more: Any) -> Any:
        found = decode_json(piece, decoder, **more)
        if not is_finding(decoder.type):
            sizes.append(len(piece))
        return found

    monkeypatch.setattr(decoding, "decode_json", noted)
    assert at_once(decode(sent, kind)) == decode_json(sent, msgspec.json.Decoder(kind))
    assert max(sizes) <= 1.1 * PIECE_BYTES  # the commas between a piece's items come on top
    assert len(sizes) >= len(sent) // PIECE_BYTES


def is_finding(kind: Any) -> bool:
    return kind == list[msgspec.Raw] or getattr(kind, "__name__", "").endswith("Undecoded")


@given(anything, st.lists(st.integers(0, 200)))
def test_what_stands_outside_of_texts_is_counted_wherever_the_pieces_end(value, cuts):
    sent = msgspec.json.encode(value)
    outline = Outline()
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), len(sent)], strict=True):
        outline.add(sent[start:stop])
    assert (outline.num_items, outline.num_keys) == commas_and_colons(value)


def commas_and_colons(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [commas_and_colons(item) for item in (value.values() if isinstance(value, dict) else value)]
    num_colons = len(value) if isinstance(value, dict) else 0
    return max(0, len(value) - 1) + sum(pair[0] for pair in inner), num_colons + sum(pair[1] for pair in inner)

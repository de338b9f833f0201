"""Finds the literals around the parts of probe calls in a text: the format that the text was written in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from maitred.text.answer_format import CallFormat, PairsFormat, Pieces, Slot, Text
from maitred.text.probes import KEYS, PROBES, ProbeCall, shared_prefix, to_tag

_DECODER = json.JSONDecoder()


class _Core(NamedTuple):
    """A call in a text, without the literals around it."""

    start: int
    end: int
    kind: Literal["json", "name_json", "pairs"]
    arguments: tuple[int, int]  # from and to; in `pairs` from the first key to the end of the last value


def read_calls(write: Callable[[Sequence[ProbeCall]], str | None]) -> CallFormat | None:
    """The format in which `write` writes calls; None for one that is none of the three forms."""
    first = PROBES[0]
    text = write(PROBES)
    cores = None if text is None else _cores(text, PROBES)
    if text is None or cores is None:
        text = write((first,))
        cores = None if text is None else _cores(text, (first,))
    if text is None or cores is None:
        return None
    pieces = [_pieces(text, core, probe) for core, probe in zip(cores, PROBES, strict=False)]
    call, index_from = _with_index(pieces[0], pieces[-1])
    parts = _split(text[: cores[0].start], text[cores[0].end : cores[-1].start], text[cores[-1].end :])
    if len(cores) == 1:
        parts = _Split("", text[: cores[0].start], "", text[cores[0].end :], "")
    parts = _without_first_space(parts)
    if call is None or (not parts.before.strip() and not parts.begin.strip() and cores[0].kind != "json"):
        return None  # nothing tells that a call begins
    found = CallFormat(
        kind=cores[0].kind,
        begin=_text(parts.before),
        call_begin=_text(parts.begin),
        call=call,
        call_end=_text(parts.end),
        separator=_text(parts.separator),
        end=_text(parts.after),
        several=len(cores) > 1,
        index_from=index_from,
    )
    if found.kind == "json":
        return _with_keys(found, text[cores[0].start : cores[0].end], first)
    return _with_pairs(found, text, cores, parts) if found.kind == "pairs" else found


def _cores(text: str, probes: Sequence[ProbeCall]) -> list[_Core] | None:
    cores: list[_Core] = []
    for probe in probes:
        core = _core(text, probe, cores[-1].end if cores else 0)
        if core is None or (cores and core.kind != cores[0].kind):
            return None
        cores.append(core)
    return cores


def _core(text: str, probe: ProbeCall, since: int) -> _Core | None:
    name_at = text.find(probe.name, since)
    if name_at < 0:
        return None
    starts = [at for part in (probe.name, probe.id) if (at := text.find(part, since)) >= 0]
    opening = text.rfind("{", since, name_at)
    value, end = _json_at(text, opening)
    if isinstance(value, dict) and probe.name in value.values() and probe.arguments in value.values():
        return _Core(opening, end, "json", _arguments_in(text, probe, opening))
    arguments = _arguments_in(text, probe, name_at)
    if arguments[1] > 0:
        return _Core(min(starts), arguments[1], "name_json", arguments)
    places = [name_at]
    for part in (KEYS[0], probe.values[0], KEYS[1], str(probe.values[1])):
        places.append(text.find(part, places[-1]))
        if places[-1] < 0:
            return None
    end = places[-1] + len(str(probe.values[1]))
    return _Core(min(starts), end, "pairs", (places[1], end))


def _arguments_in(text: str, probe: ProbeCall, since: int) -> tuple[int, int]:
    at = text.find("{", since)
    while at >= 0:
        value, end = _json_at(text, at)
        if value == probe.arguments:
            return at, end
        at = text.find("{", at + 1)
    return 0, 0


def _json_at(text: str, at: int) -> tuple[Any, int]:
    if at < 0:
        return None, 0
    try:
        return _DECODER.raw_decode(text, at)
    except ValueError:
        return None, 0


def _pieces(text: str, core: _Core, probe: ProbeCall) -> Pieces:
    slot = Slot.PAIRS if core.kind == "pairs" else Slot.ARGUMENTS
    before = _named(text[core.start : core.arguments[0]], probe)
    after = _named(text[core.arguments[1] : core.end], probe)
    return (*before, slot, *after)


def _named(text: str, probe: ProbeCall) -> Iterator[str | Slot]:
    slots = {probe.name: Slot.NAME, probe.id: Slot.ID}
    pieces: list[str] = re.split(f"({probe.name}|{probe.id})", text)
    yield from (slots.get(piece, piece) for piece in pieces if piece)


def _with_index(first: Pieces, last: Pieces) -> tuple[Pieces | None, int]:
    """Pieces in which a number that counts the calls is a slot, and with what it begins."""
    if len(first) != len(last):
        return None, 0
    found: list[Any] = []
    index_from = 0
    for one, other in zip(first, last, strict=True):
        if one == other:
            found.append(one)
            continue
        ones, others = re.split(r"(\d+)", str(one)), re.split(r"(\d+)", str(other))
        if len(ones) != len(others) or not isinstance(one, str):
            return None, 0
        for here, there in zip(ones, others, strict=True):
            if here == there:
                found.append(here)
            elif here.isdigit() and there.isdigit() and int(there) == int(here) + 1:
                found.append(Slot.INDEX)
                index_from = int(here)
            else:
                return None, 0
    return tuple(piece for piece in found if piece), index_from


def _with_keys(found: CallFormat, text: str, probe: ProbeCall) -> CallFormat:
    value = json.loads(text)
    keys = {json.dumps(inner, sort_keys=True): key for key, inner in value.items()}
    return replace(
        found,
        name_key=keys[json.dumps(probe.name)],
        arguments_key=keys[json.dumps(probe.arguments, sort_keys=True)],
        id_key=keys.get(json.dumps(probe.id)),
    )


def _with_pairs(found: CallFormat, text: str, cores: Sequence[_Core], parts: _Split) -> CallFormat | None:
    """`call` then ends with the literal behind the last value, which `call_end` was read with."""
    probe, core = PROBES[0], cores[0]
    inner = text[core.arguments[0] : core.arguments[1]]
    text_at, key_at = inner.index(probe.values[0]), inner.index(KEYS[1])
    value_begin = inner[len(KEYS[0]) : text_at]
    other_begin = inner[key_at + len(KEYS[1]) : -len(str(probe.values[1]))]
    between = inner[text_at + len(probe.values[0]) : key_at]
    quote = value_begin.removeprefix(other_begin) if value_begin.startswith(other_begin) else ""
    if quote:
        if quote in "'\"" or not between.startswith(quote):
            return None  # a language's own literals, which no form has
        value_begin, between = other_begin, between.removeprefix(quote)
    slot_at = found.call.index(Slot.PAIRS)
    head = found.call[slot_at - 1] if slot_at and isinstance(found.call[slot_at - 1], str) else ""
    pair = _split(str(head), between, parts.end)
    pairs = PairsFormat(
        key_begin=_text(pair.begin),
        value_begin=_text(value_begin),
        value_end=_text(pair.end),
        separator=_text(pair.separator),
        quote=_text(quote),
        value_begin_of={} if quote or value_begin == other_begin else _other_types(_text(other_begin)),
    )
    if not (pair.end or quote) or any(key in literal for key in KEYS for literal in pair):
        return None  # nothing tells where a value ends, or each key's literals are others
    kept = found.call[: slot_at - 1] if head else found.call[:slot_at]
    call = (*kept, *_text(pair.before), Slot.PAIRS)
    return replace(found, call=call, call_end=_text(pair.after), pairs=pairs)


def _other_types(begin: Text) -> dict[str, Text]:
    return dict.fromkeys(("integer", "number", "boolean", "null", "array", "object"), begin)


class _Split(NamedTuple):
    """`before begin X end, joined by separator, after`."""

    before: str
    begin: str
    separator: str
    end: str
    after: str


def _split(before: str, between: str, after: str) -> _Split:
    """Return the common begin and end of two things X written as `before X between X after`; no tag is cut."""
    low = len(between) - len(shared_prefix(before[::-1], between[::-1]))
    high = len(shared_prefix(between, after))
    if low <= high:  # also what they share by chance
        low = high = max((at for at in range(low, min(high, len(between) - 1) + 1) if between[at] in "<["), default=low)
    else:
        high = to_tag(between, high)
        closed = re.match(r"[^<\[]*[>\]]", between[low:])
        low += len(closed[0]) if closed else 0
    begin, end = between[low:], between[:high]
    return _Split(before[: len(before) - len(begin)], begin, between[high:low], end, after[len(end) :])


def _without_first_space(parts: _Split) -> _Split:
    """White space before a first call is not the call's; before the others it separates them."""
    if parts.before:
        return parts._replace(before=parts.before.lstrip())
    space = parts.begin[: len(parts.begin) - len(parts.begin.lstrip())]
    return parts._replace(begin=parts.begin.lstrip(), separator=parts.separator + space)


def _text(text: str) -> Text:
    return (text,) if text else ()

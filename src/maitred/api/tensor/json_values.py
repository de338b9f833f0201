"""Tensors in the JSON of bodies, and in that of answers.

A decoder or an encoder of JSON has the interpreter to itself until it is done, in whatever thread. So a large body is
bounded before anything is made of it, its lists of numbers are decoded in pieces, and large answers are written so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from maitred.api.http.bodies import check_num_texts
from maitred.core.errors import InvalidRequest
from maitred.tensor.arrays import MOST_DIMS
from maitred.tensor.instance import NUMPY_TYPES

MOST_ITEMS = 128 * 1024  # that are no lists of numbers: decoded in one call, in at most 0.1 s, all of it 1e300
PIECE_BYTES = 32 * 1024  # at most 4 ms
PIECE_VALUES = 8 * 1024
_LEAST_BYTES = 64  # of a list that is worth being apart

_KINDS: Mapping[str, str] = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # of arrays of JSON, by a tensor's
_DECODERS: Mapping[str, msgspec.json.Decoder[Any]] = {
    "b": msgspec.json.Decoder(list[bool]),
    "i": msgspec.json.Decoder(list[int]),
    "u": msgspec.json.Decoder(list[int]),
    "f": msgspec.json.Decoder(list[float]),
}
_any = msgspec.json.Decoder(msgspec.Raw)
_OPENS = re.compile(rb"\s*:\s*(?=\[)")
_TO_SPACES = bytes.maketrans(b"[],", b"   ")
_NO_MARKS = bytes(set(range(256)) - set(b"[],"))
_SLOW = (b"e", b"E", b"N", b"I")  # msgspec takes 20 us for 1e300, and no NaN
_APART = ""  # the key of the object that stands for a list of numbers
TextOf = Callable[[str, Any], bytes]  # of an input's name and an element


@dataclass(frozen=True, slots=True)
class Numbers:
    """A list of numbers, nested or not, as it stands in a body."""

    text: bytes


def loaded(body: bytes, names: Iterable[str]) -> Any:
    """A large body, where lists of numbers under one of `names` are `Numbers`. Raises InvalidRequest for one that has
    too much else, ValueError and RecursionError for what is no JSON.
    """
    check_num_texts(body)
    told = [
        json.dumps(name, ensure_ascii=ascii).encode("utf-8", "replace") for name in names for ascii in (True, False)
    ]
    rest, lists = _parted(body, set(told))
    num_items = sum(map(rest.count, (b",", b"[", b"{")))
    if num_items > MOST_ITEMS:
        raise InvalidRequest(
            f"the body has {num_items} values in JSON beside long lists of numbers, and may have {MOST_ITEMS}; "
            "send them in binary, or numbers by columns",
            code="too_many_items",
        )

    def restored(found: dict[str, Any]) -> Any:
        place = found.get(_APART)
        return lists.pop(place, found) if len(found) == 1 and isinstance(place, int) else found  # each once

    return json.loads(rest, object_hook=restored)


def _parted(body: bytes, keys: set[bytes]) -> tuple[bytes, dict[int, Numbers]]:
    """The body with an object in the place of each list of numbers under one of `keys`, and those lists by its number.

    A list without texts and objects stands between two quotes; the one before it ends its key, as no text may be there.
    """
    parts: list[bytes] = []
    lists: dict[int, Numbers] = {}
    kept = 0
    before, at = 0, body.find(b'"')
    while at >= 0:
        after = body.find(b'"', at + 1)
        end = after if after >= 0 else len(body)
        is_key = end - at > _LEAST_BYTES and body[before : at + 1] in keys and body[before - 1 : before] != b"\\"
        opens = _OPENS.match(body, at + 1, end) if is_key else None
        if opens is not None:
            start, brace = opens.end(), body.find(b"}", opens.end(), end)
            text = body[start : body.rfind(b"]", start, end if brace < 0 else brace) + 1]
            if len(text) > _LEAST_BYTES and text.count(b"[") == text.count(b"]"):
                parts += [body[kept:start], b'{"%s":%d}' % (_APART.encode(), len(lists))]
                kept, lists[len(lists)] = start + len(text), Numbers(text)
        before, at = at, after
    return b"".join((*parts, body[kept:])), lists


def array_of_json(name: str, data_type: str, values: Any, text_of: TextOf) -> np.ndarray:
    """Numbers where all are numbers, texts as bytes, BF16 as its bits. Raises InvalidRequest, which names the input."""
    if isinstance(values, list) and any(isinstance(each, Numbers) for each in values):
        rows = [array_of_json(name, data_type, each, text_of) for each in values]
        if any(row.shape != rows[0].shape for row in rows):
            raise InvalidRequest(f"input {name!r} has rows of unlike shapes", param=name)
        return np.stack(rows)
    kind = NUMPY_TYPES[data_type]
    try:
        if isinstance(values, Numbers):
            flat, shape = _flat_numbers(name, data_type, values, text_of), _shape(values.text)
            return flat.reshape(shape if flat.size else (*shape[:-1], 0))
        if kind.hasobject:
            return _texts(name, np.array(values, object), text_of)
        if data_type == "TYPE_BF16":
            return _bits(np.array(values, np.float32))
        found = np.array(values)
        if found.size and found.dtype.kind not in _KINDS[kind.kind]:
            raise ValueError(f"its values are not all of {kind}")
        with np.errstate(over="ignore"):
            cast = found.astype(kind)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(f"input {name!r} is no array of {kind}: {error}", param=name) from None
    if kind.kind in "iu" and not np.array_equal(cast, found):
        raise InvalidRequest(f"input {name!r} has a number that is no {kind}", param=name)
    return cast


def flat_of_json(name: str, data_type: str, values: Any, text_of: TextOf) -> np.ndarray:
    """Values as `array_of_json` has them, in row-major order however they are nested, for Triton counts the shape."""
    if isinstance(values, Numbers):
        return _flat_numbers(name, data_type, values, text_of)
    found: list[Any] = []
    nested = [iter(values)]
    while nested:
        for each in nested[-1]:
            if isinstance(each, list):
                nested.append(iter(each))
                break
            found.append(each)
        else:
            nested.pop()
    return array_of_json(name, data_type, found, text_of)


def _flat_numbers(name: str, data_type: str, numbers: Numbers, text_of: TextOf) -> np.ndarray:
    is_bf16 = data_type == "TYPE_BF16"
    kind = np.dtype(np.float32) if is_bf16 else NUMPY_TYPES[data_type]
    try:
        if kind.hasobject:
            return np.array([text_of(name, 0) for piece in _pieces(numbers.text) if piece != b"[]"], object)
        with np.errstate(over="ignore"):
            found = np.concatenate([_piece(piece, kind) for piece in _pieces(numbers.text)])
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"input {name!r} is no array of {kind}: {error}", param=name) from None
    return _bits(found) if is_bf16 else found


def _pieces(text: bytes) -> Iterator[bytes]:
    """Numbers of the text as flat lists in JSON. A piece is checked within the brackets that are open around it."""
    at, depth = 0, 0
    while at < len(text):
        comma = text.find(b",", at + PIECE_BYTES)
        end = comma if comma >= 0 else len(text)
        piece, around = text[at:end], depth
        depth += piece.count(b"[") - piece.count(b"]")
        is_cut_well = comma < 0 or (depth > 0 and piece.rstrip()[-1:] != b"[")  # a comma stands between two elements
        if not is_cut_well or (at and piece.lstrip()[:1] == b"]"):
            raise ValueError("it is no list in JSON")
        plain = piece.replace(b"-Infinity", b"0").replace(b"Infinity", b"0").replace(b"NaN", b"0")
        _any.decode(b"[" * around + plain + b"]" * depth)
        yield b"[" + b",".join(piece.translate(_TO_SPACES).split()) + b"]"
        at = end + 1


def _piece(piece: bytes, kind: np.dtype) -> np.ndarray:
    if kind.kind == "f" and any(sign in piece for sign in _SLOW):
        return np.array(msgspec.convert(json.loads(piece), list[float]), kind)
    return np.array(_DECODERS[kind.kind].decode(piece), kind)


def _shape(text: bytes) -> tuple[int, ...]:
    """Shape of lists in lists. Raises ValueError unless those of a depth are equally long."""
    marks = text.translate(None, delete=_NO_MARKS)
    depth = len(marks) - len(marks.lstrip(b"["))
    if depth > MOST_DIMS:
        raise ValueError(f"it has {depth} dimensions, and may have {MOST_DIMS}")
    sizes: list[int] = []
    inner = b""  # the marks of one element
    for level in range(1, depth + 1):
        num_bytes = marks.find(b"]" * level) + level - (depth - level)  # of the first list of this level
        sizes.insert(0, (num_bytes - 1) // (len(inner) + 1))
        inner = b"[" + ((inner + b",") * sizes[0])[:-1] + b"]"
    if inner != marks:
        raise ValueError("its lists are not equally long")
    return tuple(sizes)


def _bits(array: np.ndarray) -> np.ndarray:
    """Upper halves of float32 values: BF16."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def _texts(name: str, array: np.ndarray, text_of: TextOf) -> np.ndarray:
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [text_of(name, value) for value in array.reshape(-1)]
    return texts


# ---- answers


def encoded(told: Any) -> bytes:
    """NaN and infinities are written as such, as clients of Triton and TF Serving read them."""
    return json.dumps(told, separators=(",", ":")).encode()


def json_of_array(array: np.ndarray, write: Callable[[np.ndarray], bytes] | None = None) -> bytes:
    """Lists in lists, written in pieces; `write` makes JSON of one that is no array of numbers."""
    write = write or _json_of_numbers
    if array.size <= PIECE_VALUES:
        return write(array)
    rows = max(1, PIECE_VALUES * len(array) // array.size)
    if array.ndim > 1 and array[0].size > PIECE_VALUES:
        return b"[" + b",".join(json_of_array(row, write) for row in array) + b"]"
    return b"[" + b",".join(write(array[at : at + rows])[1:-1] for at in range(0, len(array), rows)) + b"]"


def _json_of_numbers(array: np.ndarray) -> bytes:
    is_finite = array.dtype.kind != "f" or np.isfinite(array).all()
    return msgspec.json.encode(array.tolist()) if is_finite else encoded(array.tolist())

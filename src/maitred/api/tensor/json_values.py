"""Arrays out of the lists of a JSON body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from maitred.errors import InvalidRequest
from maitred.tensor.instance import NUMPY_TYPES

_KINDS: Mapping[str, str] = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # of arrays of JSON, by a tensor's
TextOf = Callable[[str, Any], bytes]  # of an input's name and an element


def array_of_json(name: str, data_type: str, values: Any, text_of: TextOf) -> np.ndarray:
    """Numbers where all are numbers, texts as bytes, BF16 as its bits. Raises InvalidRequest, which names the input."""
    kind = NUMPY_TYPES[data_type]
    try:
        if kind.hasobject:
            return _texts(name, np.array(values, object), text_of)
        if data_type == "TYPE_BF16":
            return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
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


def _texts(name: str, array: np.ndarray, text_of: TextOf) -> np.ndarray:
    texts = np.empty(array.shape, object)
    texts.reshape(-1)[:] = [text_of(name, value) for value in array.reshape(-1)]
    return texts

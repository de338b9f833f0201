"""Fields whose decoding a client could make expensive: kept raw, measured, then decoded."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, UnsetType

from maitred.api.dialects.openai.schemas import Prediction, SentTokenIds
from maitred.api.generate.dialect import Prompt
from maitred.api.http.bodies import decode_json
from maitred.api.http.errors import shortened
from maitred.core.errors import InvalidRequest

T = TypeVar("T")
MAX_OBJECT_BYTES = 64 * 1024
MAX_PROMPTS = 1024
MAX_LISTED = 1_000_000  # items of a prompt that is a list; so many token ids take 25 ms to decode

MAX_PREDICTION_BYTES = 2**20

_PREDICTION = msgspec.json.Decoder(Prediction)
_ANY = msgspec.json.Decoder(dict[str, Any])
_VALUE = msgspec.json.Decoder(Any)
_UNREAD = msgspec.json.Decoder(dict[str, Raw])
_STRINGS = msgspec.json.Decoder(dict[str, str])
_BIASES = msgspec.json.Decoder(dict[int, float])
_TEXT = msgspec.json.Decoder(str)
_TEXTS = msgspec.json.Decoder(list[str])
_TOKENS = msgspec.json.Decoder(SentTokenIds)
_TOKEN_LISTS = msgspec.json.Decoder(list[SentTokenIds])
_FIRST_ITEM = re.compile(rb"\[\s*(.)")


def any_object(raw: Raw | UnsetType, name: str) -> dict[str, Any] | None:
    """An object of whatever; None when absent or null."""
    return _object(raw, name, _ANY)


def check_object(raw: Raw | UnsetType, name: str) -> None:
    """Check that the field, if present, is an object; its content is not used."""
    _object(raw, name, _UNREAD)


def string_map(raw: Raw | UnsetType, name: str) -> dict[str, str] | None:
    return _object(raw, name, _STRINGS)


def token_biases(raw: Raw | UnsetType, name: str) -> dict[int, float] | None:
    return _object(raw, name, _BIASES)


def any_value(raw: Raw | UnsetType, name: str, most: int) -> Any:
    """Whatever was sent, of at most so many bytes; None when absent or null."""
    return _object(raw, name, _VALUE, most)


def _object(
    raw: Raw | UnsetType, name: str, decoder: msgspec.json.Decoder[T], most: int = MAX_OBJECT_BYTES
) -> T | None:
    if isinstance(raw, UnsetType):
        return None
    sent = bytes(raw)
    if sent == b"null":
        return None
    if len(sent) > most:
        raise InvalidRequest(f"{name} has {len(sent)} bytes; at most {most}", param=name)
    return decode_json(sent, decoder, at=name)


def predicted_text(raw: Raw | UnsetType) -> str:
    """Text of a prediction; empty when absent or null. Raises InvalidRequest."""
    prediction = _object(raw, "prediction", _PREDICTION, MAX_PREDICTION_BYTES)
    if prediction is None:
        return ""
    parts = prediction.content if isinstance(prediction.content, list) else []
    for at, kind, known in [
        ("prediction.type", prediction.type, "content"),
        *((f"prediction.content[{i}].type", part.type, "text") for i, part in enumerate(parts)),
    ]:
        if kind != known:
            raise InvalidRequest(f"{at} is {shortened(repr(kind))}; it must be {known!r}", param=at)
    return prediction.content if isinstance(prediction.content, str) else "".join(part.text or "" for part in parts)


def prompts_of(
    raw: Raw, *, at: str = "prompt", max_listed: int = MAX_LISTED, max_prompts: int = MAX_PROMPTS
) -> list[Prompt]:
    """One text, one list of token ids, or a list of either; the first item says which. `at` is the field.

    `max_listed` bounds the tokens of all lists together; it counts commas, which texts have too.
    """
    sent = bytes(raw)
    if sent.startswith(b'"'):
        return [decode_json(sent, _TEXT, at=at)]
    found = _FIRST_ITEM.match(sent)
    if found is None:
        raise InvalidRequest(f"{at} must be a text, a list of token ids, or a list of either", param=at)
    num_listed = sent.count(b",") + 1
    if num_listed > max_listed:
        text = f"{at} has about {num_listed} items; at most {max_listed}"
        raise InvalidRequest(text, param=at, code="too_many_items")
    prompts: list[Prompt]
    if found[1] == b"[":
        _check_count(sent.count(b"[") - 1, at, max_prompts)  # all of them structure: there are only numbers inside
        prompts = [*decode_json(sent, _TOKEN_LISTS, at=at)]
    elif found[1] == b'"':
        prompts = [*decode_json(sent, _TEXTS, at=at)]
    else:
        tokens = decode_json(sent, _TOKENS, at=at)
        prompts = [tokens] if tokens else []
    _check_count(len(prompts), at, max_prompts)
    return prompts


def _check_count(num_prompts: int, at: str, most: int) -> None:
    if not 1 <= num_prompts <= most:
        raise InvalidRequest(f"{at} has {num_prompts} prompts; it must have 1 to {most}", param=at)

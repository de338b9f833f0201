"""Text files of a model folder that can be read without the tokenizer or Jinja."""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from maitred.errors import CheckpointError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file. Raises CheckpointError when it is broken."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no file; copy it again from where the model came from")
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again from where the model came from") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token ... -> text, as transformers reads them: tokenizer_config.json before the older map."""
    return {
        **named_tokens(read_json(folder / "special_tokens_map.json")),
        **named_tokens(read_json(folder / "tokenizer_config.json")),
    }


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The named tokens of one file; each is a string, or an object with `content`."""
    found = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def read_chat_template(folder: Path) -> str | None:
    """The text of the model's template, or None.

    chat_template.jinja goes before `chat_template` in tokenizer_config.json (a string, or a list of named ones, of
    which `default` is taken), and that before the older chat_template.json.
    """
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None
    for name in ("tokenizer_config.json", "chat_template.json"):
        source = _template_in(read_json(folder / name).get("chat_template"))
        if source is not None:
            return source
    return None


def _template_in(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        named = {entry["name"]: entry["template"] for entry in value if isinstance(entry, dict)}
        return named.get("default") or next(iter(named.values()), None)
    return None


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] | None = None


def added_token_id(tokenizer_file: Path, text: str) -> int | None:
    """The id of a token that tokenizer.json adds to its vocabulary, or None; a fiftieth of reading all of the file."""
    try:
        found = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerFile).added_tokens or []
    except (OSError, msgspec.DecodeError):
        return None  # who reads all of it says what is wrong
    return next((token.id for token in found if token.content == text), None)

"""Text files of a model folder that can be read without the tokenizer or Jinja."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, Required, TypedDict

import msgspec

from maitred.errors import CheckpointError

_CONFIG = "tokenizer_config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file. Raises CheckpointError when it is broken."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(f"{path} is no file; copy it again from where the model came from")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again from where the model came from") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def read_named_tokens(folder: Path) -> dict[str, str]:
    """bos_token, eos_token ... -> text, as transformers reads them: tokenizer_config.json before the older map."""
    found: dict[str, str] = {}
    for path in (folder / "special_tokens_map.json", folder / _CONFIG):
        config = read_json(path)
        for name in NAMED_TOKENS:
            token = _field(path, config, name, str | AddedTokenFields | None)
            if token is not None:
                found[name] = token if isinstance(token, str) else token["content"]
    return found


class AddedTokenFields(TypedDict, total=False):
    """An added token as tokenizer_config.json describes one."""

    content: Required[str]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


def read_configured_tokens(folder: Path) -> list[AddedTokenFields]:
    """`added_tokens_decoder` of tokenizer_config.json, in id order. Raises CheckpointError."""
    path = folder / _CONFIG
    found = _field(path, read_json(path), "added_tokens_decoder", dict[int, AddedTokenFields] | None) or {}
    return [token for _, token in sorted(found.items())]


def _field(path: Path, config: dict[str, Any], name: str, kind: Any) -> Any:
    """Raises CheckpointError, which names file and field, where the field is of another kind."""
    try:
        return msgspec.convert(config.get(name), kind, str_keys=True)
    except msgspec.ValidationError as error:
        told = str(error).replace("`$", f"`{name}")
        raise CheckpointError(f"{path}: {name}: {told}; copy it again from where the model came from") from None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def read_chat_template(folder: Path) -> str | dict[str, str] | None:
    """The text of the model's template, those of several by name, or None.

    chat_template.jinja, which is `default`, and additional_chat_templates/NAME.jinja go before `chat_template` in
    tokenizer_config.json (a string, or a list of named ones), and that before the older chat_template.json.
    """
    more = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {"default": folder / "chat_template.jinja", **{path.stem: path for path in more}}
    found: Any = {name: _text_of(path) for name, path in files.items() if path.is_file()}
    for path in (folder / _CONFIG, folder / "chat_template.json"):
        if not found:
            found = _field(path, read_json(path), "chat_template", str | list[_NamedTemplate] | None)
            found = {each.name: each.template for each in found} if isinstance(found, list) else found
    return found["default"] if isinstance(found, dict) and found.keys() == {"default"} else found or None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


class AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[AddedToken] | None = None


def added_token_id(tokenizer_file: Path, text: str) -> int | None:
    """The id of a token that tokenizer.json adds to its vocabulary, or None; a fiftieth of reading all of the file."""
    try:
        found = msgspec.json.decode(tokenizer_file.read_bytes(), type=_TokenizerFile).added_tokens or []
    except (OSError, msgspec.DecodeError):
        return None  # who reads all of it says what is wrong
    return next((token.id for token in found if token.content == text), None)

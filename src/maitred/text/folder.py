"""Reads the small text files of a model folder that tokenizer and chat template share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maitred.errors import CheckpointError

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or an empty one when there is no such file. Raises CheckpointError when it is broken."""
    try:
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

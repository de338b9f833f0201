"""Vocabularies: which token each id is, read off tokenizer.json without making the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from maitred.errors import CheckpointError
from maitred.text.folder import AddedToken


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] = []


def vocabulary_difference(tokenizer_file: Path, other_file: Path) -> str | None:
    """What the first says otherwise than the second, for people; None where each id that both know is one token.

    Raises CheckpointError for a file that is no tokenizer.
    """
    text, other_text = tokenizer_file.read_bytes(), other_file.read_bytes()
    if text == other_text:
        return None
    tokens, other_tokens = _tokens(text, tokenizer_file), _tokens(other_text, other_file)
    differing = sorted(i for i in tokens.keys() & other_tokens.keys() if tokens[i] != other_tokens[i])
    if not differing:
        return None
    first = differing[0]
    return (
        f"of its {len(tokens):,} token ids and the other's {len(other_tokens):,}, {len(differing):,} are other tokens, "
        f"as {first} is: {tokens[first]!r} and {other_tokens[first]!r}"
    )


def _tokens(text: bytes, path: Path) -> dict[int, str]:
    try:
        file = msgspec.json.decode(text, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    vocab = file.model.vocab
    listed = enumerate(piece for piece, _ in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
    return dict(listed) | {token.id: token.content for token in file.added_tokens}

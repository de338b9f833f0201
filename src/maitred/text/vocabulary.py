"""Vocabularies: which token each id is, read off tokenizer.json or a GGUF file without making the tokenizer."""

from __future__ import annotations

import filecmp
from pathlib import Path
from typing import Any

import msgspec

from maitred.errors import CheckpointError
from maitred.model.gguf_file import is_gguf
from maitred.text.folder import AddedToken, gguf_metadata


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[Any] = {}


class _File(msgspec.Struct):
    model: _Model
    added_tokens: list[AddedToken] = []


def vocabulary_difference(tokenizer_file: Path, other_file: Path) -> str | None:
    """Return the first difference of two vocabularies, in words; None where each id that both know is one token.

    Raises CheckpointError for a file that is no tokenizer.
    """
    if filecmp.cmp(tokenizer_file, other_file, shallow=False):
        return None
    tokens, other_tokens = _tokens(tokenizer_file), _tokens(other_file)
    differing = sorted(i for i in tokens.keys() & other_tokens.keys() if tokens[i] != other_tokens[i])
    if not differing:
        return None
    first = differing[0]
    return (
        f"of its {len(tokens):,} token ids and the other's {len(other_tokens):,}, {len(differing):,} are other tokens, "
        f"as {first} is: {tokens[first]!r} and {other_tokens[first]!r}"
    )


def _tokens(path: Path) -> dict[int, str]:
    if is_gguf(path):
        with gguf_metadata(path) as metadata:
            return dict(enumerate(metadata.get("tokenizer.ggml.tokens", [])))
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is no tokenizer: {error}") from None
    vocab = file.model.vocab
    listed = enumerate(piece for piece, _ in vocab) if isinstance(vocab, list) else ((i, t) for t, i in vocab.items())
    return dict(listed) | {token.id: token.content for token in file.added_tokens}

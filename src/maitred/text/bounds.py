"""Characters per token at most: a bound that refuses hopeless prompts before they are tokenised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers

# Most code points in a canonical decomposition (U+1F82 has 4), so NFC makes one of at most 4. The same holds for NFKC:
# its output is the composition of what NFKD gave, and NFKD gives at least one code point for each.
_MOST_COMPOSED = 4
_KEEPING_NORMALIZERS = frozenset({"Prepend", "NFD", "NFKD", "Lowercase", "ByteLevel"})
_KEEPING_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})


def byte_alphabet() -> list[str]:
    """The character by which byte-level BPE writes each of the 256 bytes, by byte.

    Printable Latin-1 stands for itself, the other 68 bytes take U+0100 and on, in order (GPT-2's bytes_to_unicode).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def longest_text_of_a_token(
    inner: tokenizers.Tokenizer, description: Mapping[str, Any], vocabulary: Iterable[str]
) -> int | None:
    """Most characters (code points) of input that become one token; None when no bound is certain.

    `description` is the parsed tokenizer.json, `vocabulary` every token's text. The bound is the longest token, times
    what normalising may shrink, and holds only where no character is ever dropped: every step must be known to keep
    them, and unknown characters must become bytes, or one token each.
    """
    shrink = _normalizer_shrink(description.get("normalizer"))
    if shrink is None or not _pre_tokenizer_keeps(description.get("pre_tokenizer")):
        return None
    added = description.get("added_tokens") or []
    if any(token["lstrip"] or token["rstrip"] for token in added):  # such a token swallows any run of spaces
        return None
    if not _model_keeps(description):
        return None
    normalize = inner.normalizer.normalize_str if inner.normalizer is not None else str
    longest_added = max((len(normalize(token["content"])) for token in added), default=0)
    return shrink * max(max(map(len, vocabulary), default=1), longest_added) or None


def _normalizer_shrink(normalizer: Mapping[str, Any] | None) -> int | None:
    """Return how many characters may become one; None when some may vanish, or the kind is not known to keep them."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        shrink = 1
        for part in normalizer["normalizers"]:
            factor = _normalizer_shrink(part)
            if factor is None:
                return None
            shrink *= factor
        return shrink
    if kind == "Replace" and "String" in normalizer["pattern"]:
        new, old = normalizer["content"], normalizer["pattern"]["String"]
        return -(-len(old) // len(new)) if new and old else None
    if kind in ("NFC", "NFKC"):
        return _MOST_COMPOSED
    return 1 if kind in _KEEPING_NORMALIZERS else None


def _pre_tokenizer_keeps(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_pre_tokenizer_keeps(part) for part in pre_tokenizer["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _KEEPING_PRE_TOKENIZERS


def _model_keeps(description: Mapping[str, Any]) -> bool:
    """Return whether the model gives at least one token for each unknown character."""
    model = description["model"]
    if model["type"] == "BPE":
        vocab = model["vocab"]
        if _has_byte_level(description) and all(character in vocab for character in byte_alphabet()):
            return True
        if model.get("byte_fallback") and _has_all_bytes(vocab):
            return True
        return model.get("unk_token") in vocab and not model.get("fuse_unk")
    if model["type"] == "Unigram":  # it fuses unknown characters into one token
        return bool(model.get("byte_fallback")) and _has_all_bytes({piece for piece, _ in model["vocab"]})
    return False  # WordPiece and WordLevel make one unknown token of a whole word


def _has_all_bytes(vocab: Mapping[str, int] | set[str]) -> bool:
    return all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _has_byte_level(description: Mapping[str, Any]) -> bool:
    def holds(part: Mapping[str, Any] | None) -> bool:
        if part is None:
            return False
        return part["type"] == "ByteLevel" or any(
            holds(inner) for inner in (*part.get("normalizers", ()), *part.get("pretokenizers", ()))
        )

    return holds(description.get("normalizer")) or holds(description.get("pre_tokenizer"))

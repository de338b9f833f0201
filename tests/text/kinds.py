"""Small tokenizers of every kind that models come with, built by hand so that each token is known."""

from __future__ import annotations

import functools
from collections.abc import Callable

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from maitred.text.tokenizer import Tokenizer, byte_alphabet

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
SPECIALS = [AddedToken(text, special=True, normalized=False) for text in ("<s>", "</s>", "<pad>")]
PLAIN = [AddedToken("<tool>", normalized=False), AddedToken("🔧🔧", normalized=False)]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["hi", "the", "cat", "é", "你", "ab", ".", ",", "a", "b", "n't", "don"]


def _finish(inner: tokenizers.Tokenizer, plain: list[AddedToken] = PLAIN) -> Tokenizer:
    inner.add_special_tokens(SPECIALS)
    inner.add_tokens(plain)
    return Tokenizer(inner, NAMED)


def byte_level() -> Tokenizer:
    """GPT-2, Llama 3, Qwen: bytes as characters; tokens may end inside a character."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("ð", "Ł"), ("ðŁ", "ĳ"), ("Ã", "©"), ("Ġ", "Ġ"), ("ä", "½")]
    pieces = [*byte_alphabet(), *(left + right for left, right in merges)]
    inner = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return _finish(inner, [*PLAIN, AddedToken("éé", normalized=False), AddedToken("x y", normalized=False)])


def byte_level_nfc() -> Tokenizer:
    """Qwen: NFC first, which makes one character of several."""
    tokenizer = byte_level()
    inner = tokenizers.Tokenizer.from_str(tokenizer._inner.to_str())
    inner.normalizer = normalizers.NFC()
    return Tokenizer(inner, NAMED)


def byte_level_and_more() -> Tokenizer:
    """A ByteLevel decoder among others, so that no token's bytes can be taken as they are."""
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("hi", "ho")])
    return Tokenizer(inner, NAMED)


def _sentencepiece(decoder: object, normalizer: object) -> tokenizers.Tokenizer:
    merges = [("h", "i"), ("▁", "hi"), ("▁", "a"), ("a", "b"), ("▁", "▁"), ("▁", "é")]
    characters = ["▁", "h", "i", "a", "b", "é", "你", ".", ",", "\u0301"]
    pieces = ["<unk>", *BYTES, *characters, *(left + right for left, right in merges)]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    inner = tokenizers.Tokenizer(model)
    inner.normalizer, inner.decoder = normalizer, decoder
    return inner


def llama_2() -> Tokenizer:
    """Llama 2, Mistral: byte fallback, and a first space that is dropped again."""
    return _finish(
        _sentencepiece(
            decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            ),
            normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        )
    )


def gemma() -> Tokenizer:
    """Gemma: byte fallback, spaces as they are."""
    return _finish(
        _sentencepiece(
            decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
            normalizers.Replace(" ", "▁"),
        )
    )


def unigram() -> Tokenizer:
    """Unigram with Metaspace and byte fallback."""
    pieces = ["<unk>", *BYTES, "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    inner = tokenizers.Tokenizer(
        models.Unigram([(piece, -float(len(BYTES) - len(piece))) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return _finish(inner)


def unigram_unknown() -> Tokenizer:
    """T5: Unigram that makes one unknown token of any run of unknown characters."""
    pieces = ["<unk>", "▁", *WORDS, *(f"▁{word}" for word in WORDS)]
    inner = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return _finish(inner)


def wordpiece() -> Tokenizer:
    """BERT: words with spaces put back between them, and taken away before punctuation."""
    pieces = ["[UNK]", *WORDS, *(f"##{word}" for word in WORDS)]
    inner = tokenizers.Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece(cleanup=True)
    return _finish(inner)


def word_suffix() -> Tokenizer:
    """The first BPE (GPT, CLIP): words end in </w>."""
    pieces = ["<unk>", *WORDS, *(f"{word}</w>" for word in WORDS)]
    inner = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", end_of_word_suffix="</w>")
    )
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.decoder = decoders.BPEDecoder()
    return _finish(inner)


def word_level() -> Tokenizer:
    """No decoder at all: tokens joined by spaces."""
    pieces = ["<unk>", *WORDS]
    inner = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return _finish(inner)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    kind.__name__: functools.cache(kind)
    for kind in (
        byte_level,
        byte_level_nfc,
        byte_level_and_more,
        llama_2,
        gemma,
        unigram,
        unigram_unknown,
        wordpiece,
        word_suffix,
        word_level,
    )
}

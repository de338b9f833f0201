"""The model's tokenizer: text to token ids and back, and what one token stands for."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken

from maitred.core.errors import CheckpointError, InvalidRequest, TooManyTokens
from maitred.text.folder import gguf_metadata, read_configured_tokens, read_named_tokens
from maitred.text.marks import MarkedText, Marks

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


_BYTE_OF = {character: byte for byte, character in enumerate(byte_alphabet())}


class Tokenizer:
    """A Hugging Face `tokenizers` tokenizer. Threads may share it: what is added later is a cache."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        named_tokens: Mapping[str, str] | None = None,
        description: dict[str, Any] | None = None,
    ) -> None:
        """`description` is what `inner.to_str()` says, but for merges, where that is known."""
        inner.no_truncation()
        inner.no_padding()
        self._inner = inner
        if description is None:
            description = msgspec.json.decode(inner.to_str())  # half of json's time
        decoders = _decoder_types(description.get("decoder"))
        self._ids = _vocabulary(inner, description)
        self._added: dict[int, AddedToken] = inner.get_added_tokens_decoder()
        self.vocab_size = max(self._ids.values(), default=-1) + 1
        """Smallest number that no token id reaches, added tokens included."""
        self.without_row: dict[int, str] = {}
        """Tokens that the model cannot read, by id: see `limit_to`."""
        self.special_token_ids = frozenset(id_ for id_, token in self._added.items() if token.special)
        named = named_tokens or {}
        self.bos_token_id = self._ids.get(named.get("bos_token", ""))
        self.eos_token_id = self._ids.get(named.get("eos_token", ""))
        self.pad_token_id = self._ids.get(named.get("pad_token", ""))
        self.max_chars_per_token = longest_text_of_a_token(inner, description, self._ids)
        """Most characters of a text that one token can stand for; None where nothing is certain."""
        self.byte_level = decoders == ["ByteLevel"]
        """Decoding is joining the bytes of the tokens, and nothing else."""
        self.splits_characters = "ByteLevel" in decoders
        """A token may hold part of a UTF-8 character without being a byte token."""
        self._byte_fallback = "ByteFallback" in decoders
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes
        self._decoder_bytes: dict[int, bytes] = {}  # cache of decoder_bytes
        self._context_id = self._find_context_id()
        self._reader: _MarkReader | None = None  # for the marks of the text that was read last

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Tokenizer of a folder or a GGUF file. Raises CheckpointError with the remedy when it is missing or broken."""
        if folder.is_file():
            from maitred.text.gguf_tokenizer import tokenizer_of  # noqa: PLC0415

            with gguf_metadata(folder) as metadata:
                return cls(*tokenizer_of(metadata))
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(_no_tokenizer(folder))
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(
                f"{path} cannot be read: {error}; copy it again, or upgrade the package `tokenizers`"
            ) from None
        _add_configured_tokens(inner, folder)
        return cls(inner, read_named_tokens(folder))

    def limit_to(self, num_rows: int) -> None:
        """Refuse tokens for which the model's embedding, of `num_rows`, has no row."""
        if self.vocab_size > num_rows:
            self.without_row = {token_id: text for text, token_id in self._ids.items() if token_id >= num_rows}
            self.vocab_size = num_rows

    def encode(self, text: str, *, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Raises InvalidRequest for text that is not Unicode (lone surrogates) and for tokens without a row,
        TooManyTokens when there are over `most`, which is told before there is a list of them: making one takes the
        GIL for as long. Spans of a MarkedText are read as plain text.
        """
        if isinstance(text, MarkedText):
            ids = self._reader_of(text.marks).encode(text, add_special_tokens)
            if most is not None and len(ids) > most:
                raise TooManyTokens(len(ids), most)
            return self._with_rows(ids)
        _check_unicode(text)
        # which releases the GIL, as `tokenizers` does for batches only
        (encoding,) = self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if most is not None and len(encoding) > most:
            raise TooManyTokens(len(encoding), most)
        return self._with_rows(encoding.ids)

    def encode_whole(
        self, text: str, second: str | None = None, *, most: int, cuts: bool = False, add_special_tokens: bool = True
    ) -> tuple[list[int], int]:
        """Tokens of one text, or of two as the tokenizer joins them, and where those begin that are of the second type
        (0: none are). `cuts`: the last text is cut until all are `most`; special tokens stay.

        Raises TooManyTokens, also where the first of two leaves no room, and InvalidRequest as `encode`.
        """
        texts = [text] if second is None else [text, second]
        for each in texts:
            _check_unicode(each)
        if not cuts and (least := sum(map(self.min_tokens, texts))) > most:
            raise TooManyTokens(least, most)
        parts = self._inner.encode_batch([str(each) for each in texts], add_special_tokens=False)
        num_added = self._inner.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        total, last = num_added + sum(map(len, parts)), parts[-1]
        if total > most:
            if not cuts or total - len(last) >= most:
                raise TooManyTokens(total, most)
            last.truncate(len(last) - (total - most))
        pair = parts[1] if second is not None else None
        whole = self._inner.post_process(parts[0], pair, add_special_tokens=add_special_tokens)
        return self._with_rows(whole.ids), next((at for at, kind in enumerate(whole.type_ids) if kind), 0)

    def _with_rows(self, ids: list[int]) -> list[int]:
        """Raises InvalidRequest."""
        if self.without_row and max(ids, default=0) >= self.vocab_size:
            first = next(token_id for token_id in ids if token_id >= self.vocab_size)
            raise InvalidRequest(
                f"the text has token {first} ({self.without_row[first]!r}), and the model's embedding has rows for 0 "
                f"to {self.vocab_size - 1} alone; leave that token out"
            )
        return ids

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The texts of the tokens beside the vocabulary, each with whether it is special."""
        return {token.content: token.special for token in self._added.values()}

    def _reader_of(self, marks: Marks) -> _MarkReader:
        reader = self._reader
        if reader is None or reader.marks is not marks:
            reader = self._reader = _MarkReader(self._inner, self._added, marks)
        return reader

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Exactly what `tokenizers` gives; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        text: str = self._inner.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text that the token adds, its leading space included; U+FFFD for parts of characters."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 that the token adds; part of a character for some tokens, empty for unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def token_id(self, text: str) -> int | None:
        """The id of the token written exactly so in the vocabulary, as `<|im_end|>`, if the model can read it."""
        token_id = self._ids.get(text)
        return None if token_id in self.without_row else token_id

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` certainly has, from its length alone."""
        if self.max_chars_per_token is None:
            return 0
        return -(-len(text) // self.max_chars_per_token)

    def is_byte_token(self, token_id: int) -> bool:
        """Return whether the token is one byte of a SentencePiece byte fallback, written <0xNN>."""
        return self._byte_fallback and _fallback_byte(self._inner.id_to_token(token_id)) is not None

    def is_shown(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether decoding gives any text for the token."""
        if skip_special_tokens and token_id in self.special_token_ids:
            return False
        return self._inner.id_to_token(token_id) is not None

    def decoder_bytes(self, token_id: int) -> bytes:
        """The bytes a ByteLevel decoder makes of the token: as `tokenizers` does it, for added tokens too.

        It takes each character as the name of a byte, and the token's own UTF-8 if any character names none. So an
        added token in Latin-1 letters decodes wrongly there, and must here, or stream and whole text would differ.
        """
        known = self._decoder_bytes.get(token_id)
        if known is None:
            known = self._decoder_bytes[token_id] = self._find_decoder_bytes(token_id)
        return known

    def _find_decoder_bytes(self, token_id: int) -> bytes:
        written = self._inner.id_to_token(token_id)
        if written is None:
            return b""
        try:
            return bytes(_BYTE_OF[character] for character in written)
        except KeyError:
            return written.encode()

    def _find_bytes(self, token_id: int) -> bytes:
        written: str | None = self._inner.id_to_token(token_id)
        if written is None:
            return b""
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if self.splits_characters:
            return self.decoder_bytes(token_id)
        byte = _fallback_byte(written) if self._byte_fallback else None
        if byte is not None:
            return bytes([byte])
        # Decoders treat the first token apart (no leading space), so let another come first.
        before = [] if self._context_id is None else [self._context_id]
        both = self.decode([*before, token_id], skip_special_tokens=False)
        return both[len(self.decode(before, skip_special_tokens=False)) :].encode()

    def _find_context_id(self) -> int | None:
        plain = (t for text, t in self._ids.items() if text.isalnum() and t not in self._added)
        return next((t for t in plain if self.decode([t], skip_special_tokens=False)), None)


class _OfFile(msgspec.Struct):
    """Parts of a tokenizer.json."""

    added_tokens: list[dict[str, Any]] = []
    truncation: Any = None
    padding: Any = None


def whole_json(folder: Path) -> str:
    """A tokenizer.json that is all that `Tokenizer.from_folder` reads, for other readers of that format; the file
    itself where no other says more, since reading 130,000 tokens takes a second. Raises CheckpointError as that does.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        text = path.read_bytes()
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            file = msgspec.json.decode(text, type=_OfFile)
            named = {token["content"] for token in read_configured_tokens(folder)}
            missing = named - {token["content"] for token in file.added_tokens}
            if not missing and file.truncation is None and file.padding is None:
                return text.decode()
    whole: str = Tokenizer.from_folder(folder)._inner.to_str()
    return whole


class _MarkReader:
    """A tokenizer with other, unguessable names for marks: the template's marks are written so, and a client's stay
    letters. One text is read as a whole, so that the text around a mark is split as ever.

    `encode_special_tokens` would take all marks for letters, the template's too, and only those that are special.
    """

    def __init__(self, inner: tokenizers.Tokenizer, added: Mapping[int, AddedToken], marks: Marks) -> None:
        self.marks = marks
        self._inner = tokenizers.Tokenizer(inner.model)  # which is shared, not copied
        for part in ("normalizer", "pre_tokenizer", "post_processor"):
            if getattr(inner, part) is not None:
                setattr(self._inner, part, getattr(inner, part))
        secret = "".join(chr(0xE000 + secrets.randbelow(6400)) for _ in range(16))  # 202 bits, of private use
        self._names = {mark: f"{secret}{chr(0xF0000 + number)}" for number, mark in enumerate(marks.texts)}
        tokens = [token for _, token in sorted(added.items())]
        names = [self._names.get(token.content, token.content) for token in tokens]
        self._inner.add_tokens([AddedToken(name, **_flags(token)) for name, token in zip(names, tokens, strict=True)])
        self._ids: dict[int | None, int] = {  # where this one's differ
            self._inner.token_to_id(name): token_id for name, token_id in zip(names, sorted(added), strict=True)
        }
        self._leaks = {self._inner.model.token_to_id(mark) for mark in marks.texts} - {None}

    def encode(self, text: MarkedText, add_special_tokens: bool) -> list[int]:
        """Raises InvalidRequest where the model itself makes a token of a mark's letters."""
        _check_unicode(text)
        named = "".join(
            piece if is_clients else self.marks.pattern.sub(lambda found: self._names[found[0]], piece)
            for piece, is_clients in text.parts()
        )
        (encoding,) = self._inner.encode_batch_fast([named], add_special_tokens=add_special_tokens)
        # what the post-processor adds has its own number, and is no leak
        masked = list(zip(encoding.ids, encoding.special_tokens_mask, strict=True))
        if self._leaks and any(token in self._leaks and not is_added for token, is_added in masked):
            raise InvalidRequest("the messages hold a special token, which this tokenizer cannot read as letters")
        return [token if is_added else self._ids.get(token, token) for token, is_added in masked]


def _flags(token: AddedToken) -> dict[str, bool]:
    return {name: getattr(token, name) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}


def _no_tokenizer(folder: Path) -> str:
    if (folder / "tokenizer.model").is_file() or list(folder.glob("*.tiktoken")):
        return (
            f"{folder} has no tokenizer.json, only a tokenizer in an older format; convert it once with "
            f'`python -c "from transformers import AutoTokenizer as T; '
            f"T.from_pretrained('{folder}').save_pretrained('{folder}')\"` (needs transformers and sentencepiece)"
        )
    return f"{folder} has no tokenizer.json; copy it there from where the model came from"


def _add_configured_tokens(inner: tokenizers.Tokenizer, folder: Path) -> None:
    """Tokens that only tokenizer_config.json names, in id order, as transformers adds them when it loads the folder."""
    for token in read_configured_tokens(folder):
        if inner.token_to_id(token["content"]) is None:
            inner.add_tokens([AddedToken(**token)])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"character {error.start} of the text is {text[error.start]!r}, half of a surrogate pair; "
            "send valid Unicode"
        ) from None


def _vocabulary(inner: tokenizers.Tokenizer, description: Mapping[str, Any]) -> dict[str, int]:
    """Return the result of `get_vocab`, which takes longer than all the rest where there are 150,000 tokens."""
    vocab = description["model"]["vocab"]
    if not isinstance(vocab, dict):  # Unigram has a list
        whole: dict[str, int] = inner.get_vocab(with_added_tokens=True)
        return whole
    return vocab | {token["content"]: token["id"] for token in description.get("added_tokens") or ()}


def _decoder_types(decoder: Mapping[str, Any] | None) -> list[str]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [name for part in decoder["decoders"] for name in _decoder_types(part)]
    return [decoder["type"]]


def _fallback_byte(written: str | None) -> int | None:
    if written is None or len(written) != len("<0xNN>") or not (written.startswith("<0x") and written.endswith(">")):
        return None
    try:
        return int(written[3:5], 16)
    except ValueError:
        return None

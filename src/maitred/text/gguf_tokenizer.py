"""A GGUF file's vocabulary -> the same tokenizer in the library `tokenizers`, and back from a folder's.

As llama.cpp reads it (`src/llama-vocab.cpp` of llama-cpp-python 0.3.36): how a text is split before pairs are merged,
which tokens are found whole, what is put before and after.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from maitred.core.errors import CheckpointError
from maitred.text.folder import (
    GGUF_AGAIN,
    gguf_key_of,
    gguf_named_tokens,
    gguf_token_ids,
    read_chat_template,
    read_named_tokens,
)

# Each pattern of a rule splits what those before it left.
_ENDINGS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_NO_LOWER, _NO_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = (rf"{_BEFORE}{_NO_LOWER}*{_NO_UPPER}+", rf"{_BEFORE}{_NO_LOWER}+{_NO_UPPER}*")

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",)
_DIGITS_FIRST = (r"\p{N}", *_GPT2)
_LLAMA3 = (rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN2 = (rf"{_ENDINGS}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_QWEN35 = (rf"{_ENDINGS}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",)
_TEKKEN = (rf"{'|'.join(_CASED)}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",)
_GPT4O = (
    rf"{'|'.join(f'{word}{_ENDINGS}?' for word in _CASED)}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *_GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *_GPT2, "[0-9][0-9][0-9]")
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
# the cased letters of some version of Unicode, without Armenian's and Georgian's small ones
_DEEPSEEK_CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-"
    "ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-"
    "ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_DEEPSEEK_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*" rf"|{_SPACES}",
)


class Rule(NamedTuple):
    patterns: tuple[str, ...]
    whole_pieces: bool = False  # a piece that is a token is one, whatever merges make of it
    adds_bos: bool = False  # where the file does not say


RULES = {
    **dict.fromkeys(("default",), Rule(_DEFAULT)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "mellum", "gigachat", "exaone4", "jais", "trillion", "roberta-bpe"),
        Rule(_GPT2),
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Rule(_DIGITS_FIRST),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Rule(_LLAMA3)),
    "glm4": Rule(_LLAMA3, whole_pieces=True),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Rule(_LLAMA3, whole_pieces=True, adds_bos=True),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), Rule(_QWEN2)),
    "qwen35": Rule(_QWEN35),
    "deepseek-llm": Rule(_DEEPSEEK_LLM),
    "deepseek-coder": Rule(_DEEPSEEK_CODER),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), Rule(_DEEPSEEK_V3)),
    "falcon": Rule(_FALCON),
    "tekken": Rule(_TEKKEN, whole_pieces=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Rule(_GPT4O)),
}

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # types of tokens
_SPACE = "▁"


class _Vocabulary:
    """Tokens as the metadata describe them, checked. Raises CheckpointError that names the key."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self.metadata = metadata
        self.is_gemma4 = metadata["tokenizer.ggml.model"] == "gemma4"
        tokens = self._list("tokens", str)
        if not tokens:
            raise CheckpointError(f"the file holds no tokenizer (key tokenizer.ggml.tokens is missing); {GGUF_AGAIN}")
        self.tokens = [text or f"[EMPTY_{number}]" for number, text in enumerate(tokens)]
        self.ids = dict(zip(self.tokens, range(len(self.tokens)), strict=True))
        if len(self.ids) != len(self.tokens):
            twice = next(text for number, text in enumerate(self.tokens) if self.ids[text] != number)
            raise CheckpointError(f"token {twice!r} stands twice in the file's vocabulary; {GGUF_AGAIN}")
        self.types = self._list("token_type", int, len(tokens)) or [1] * len(tokens)
        self.named = gguf_token_ids(metadata)

    def _list(self, name: str, kind: type | tuple[type, ...], count: int = 0) -> list[Any]:
        """Empty where the key is missing."""
        values = self.metadata.get(f"tokenizer.ggml.{name}", [])
        if not isinstance(values, list) or (values and not isinstance(values[0], kind)) or 0 < len(values) < count:
            raise CheckpointError(
                f"key tokenizer.ggml.{name} is no list of {count or 'the'} tokens' values; {GGUF_AGAIN}"
            )
        return values

    def added_tokens(self) -> list[tuple[int, AddedToken]]:
        """Added tokens that are found whole, before the rest of a text is split."""
        name = str(self.metadata.get("general.name", "")).lower()
        swallows = "phi-3" in name or "phi3" in name  # the white space behind; no file says so
        keeps = {"<unk>", "<s>", "<|endoftext|>"}
        special = {
            i for i in (self.named.get(name) for name in ("bos_token", "eos_token", "eot_token")) if i is not None
        }
        found = []
        for number, kind in enumerate(self.types):
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) or number in special:
                text, is_special = self.tokens[number], kind != _USER_DEFINED or number in special
                rstrip = swallows and text not in keeps
                found.append((number, AddedToken(text, rstrip=rstrip, normalized=False, special=is_special)))
        return found

    def merges(self) -> list[tuple[str, str]]:
        """Pairs, the first merged first."""
        merges: dict[tuple[str, ...], None] = dict.fromkeys(tuple(m.split(" ")) for m in self._list("merges", str))
        if not merges or any(len(pair) != 2 for pair in merges):
            raise CheckpointError(f"key tokenizer.ggml.merges is no list of pairs; {GGUF_AGAIN}")
        return list(merges)  # type: ignore[arg-type]

    def merges_by_score(self) -> list[tuple[str, str]]:
        """Return every pair that makes a token, by the token's score. Of equal scores the longer token is first, and of
        one token the pair with the longer left part: so runs of spaces, which all have one score, grow from the left.
        """
        tokens, scores = self.tokens, self._list("scores", (float, int), len(self.tokens))
        if not scores:
            raise CheckpointError(f"the file's tokens have no scores (key tokenizer.ggml.scores); {GGUF_AGAIN}")
        is_part = [kind not in (_UNKNOWN, _CONTROL, _BYTE) for kind in self.types]
        parts = set(compress(tokens, is_part))
        ordered = sorted(compress(range(len(tokens)), is_part), key=lambda i: len(tokens[i]), reverse=True)
        ordered.sort(key=scores.__getitem__, reverse=True)
        return [
            (left, right)
            for text in map(tokens.__getitem__, ordered)
            for k in range(len(text) - 1, 0, -1)
            if (right := text[k:]) in parts and (left := text[:k]) in parts  # the rarer one first
        ]


def tokenizer_of(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, Any]]:
    """The tokenizer, its named tokens, and its description as in a tokenizer.json, without merges.

    Raises CheckpointError, with the remedy, for a kind that is not known and for what does not fit together.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind in ("bert", "t5"):
        return _of_encoder(_Vocabulary(metadata), kind)
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(
            f"tokenizers of kind {kind!r} are not supported, gpt2, llama, gemma4, bert and t5 are; choose another model"
        )
    vocabulary = _Vocabulary(metadata)
    inner, merges = _byte_level(vocabulary) if kind == "gpt2" else _sentencepiece(vocabulary)
    description: dict[str, Any] = msgspec.json.decode(inner.to_str())  # quick while the model is empty
    rules = {name: description["model"][name] for name in ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")}
    try:
        inner.model = models.BPE(vocabulary.ids, merges, **rules)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"the file's merges do not fit its tokens: {error}; {GGUF_AGAIN}") from None
    added = vocabulary.added_tokens()
    inner.add_tokens([token for _, token in added])
    if metadata.get("tokenizer.ggml.pre") == "roberta-bpe":
        _surround(inner, vocabulary, 2)
    description["model"]["vocab"] = vocabulary.ids
    description["added_tokens"] = [
        {"id": number, "content": token.content, "lstrip": False, "rstrip": token.rstrip} for number, token in added
    ]
    return inner, gguf_named_tokens(metadata, vocabulary.tokens), description


def _of_encoder(vocabulary: _Vocabulary, kind: str) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[str, Any]]:
    """WordPiece, whose tokens a file writes with a mark before those that begin words, and Unigram as XLM-R's."""
    metadata, named, tokens = vocabulary.metadata, vocabulary.named, list(vocabulary.tokens)
    if kind == "bert":
        for number, token in enumerate(tokens):
            if vocabulary.types[number] != _CONTROL and not (token.startswith("[") and token.endswith("]")):
                tokens[number] = token[1:] if token.startswith(_SPACE) else f"##{token}"
        unknown = tokens[named.get("unk_token", 100)]
        ids = {token: number for number, token in enumerate(tokens)}
        inner = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown, max_input_chars_per_word=100))
        inner.normalizer, inner.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        inner.decoder = decoders.WordPiece()
    else:
        scores = vocabulary._list("scores", (float, int), len(tokens))
        inner = tokenizers.Tokenizer(models.Unigram(list(zip(tokens, scores, strict=True)), named.get("unk_token", 3)))
        charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
        if charsmap:
            inner.normalizer = normalizers.Precompiled(bytes(charsmap))
        scheme = "always" if metadata.get("tokenizer.ggml.add_space_prefix", True) else "never"
        words = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme=scheme)]
        inner.pre_tokenizer = pre_tokenizers.Sequence(words)
        inner.decoder = decoders.Metaspace()
    inner.add_tokens([AddedToken(tokens[n], normalized=False, special=True) for n in dict.fromkeys(named.values())])
    _surround(inner, vocabulary, 1 if kind == "bert" else 2)
    return inner, {name: tokens[number] for name, number in named.items()}, msgspec.json.decode(inner.to_str())


def _surround(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary, num_between: int) -> None:
    """Put an encoder's texts between two special tokens, and between those of a pair one more (BERT, which tells their
    types apart) or two (RoBERTa, XLM-R)."""
    named, tokens = vocabulary.named, vocabulary.tokens
    ends = named.get("cls_token", named.get("bos_token")), named.get("sep_token", named.get("eos_token"))
    if None in ends:
        raise CheckpointError(f"keys of the tokens before and after a text are missing (cls, sep); {GGUF_AGAIN}")
    (first, last), second = (tokens[number] for number in ends if number is not None), ":1" * (num_between == 1)
    inner.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *[last] * num_between, f"$B{second}", f"{last}{second}"],
        special_tokens=[(first, ends[0]), (last, ends[1])],
    )


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, list[tuple[str, str]]]:
    """GPT-2's kind: a text is split by patterns, and each piece's bytes are merged."""
    name = vocabulary.metadata.get("tokenizer.ggml.pre", "default")
    rule = RULES.get(name)
    if rule is None:
        raise CheckpointError(
            f"pre-tokenizer {name!r} is not supported, which are {', '.join(RULES)}; choose another model"
        )
    inner = tokenizers.Tokenizer(models.BPE(ignore_merges=rule.whole_pieces))
    inner.pre_tokenizer = _splits(rule)
    inner.decoder = decoders.ByteLevel()
    _add_ends(inner, vocabulary, rule.adds_bos)
    return inner, vocabulary.merges()


def _splits(rule: Rule) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, list[tuple[str, str]]]:
    """Characters of the whole text are merged by score, of Gemma 4 those between line ends by a list of pairs; those
    that are no token become bytes."""
    unknown = vocabulary.named.get("unk_token")
    text = None if unknown is None else vocabulary.tokens[unknown]
    inner = tokenizers.Tokenizer(models.BPE(unk_token=text, fuse_unk=False, byte_fallback=True))
    spaces = normalizers.Replace(" ", _SPACE)
    steps: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.metadata.get("tokenizer.ggml.add_space_prefix", not vocabulary.is_gemma4):
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        inner.normalizer = spaces
    inner.decoder = decoders.Sequence(steps)
    _add_ends(inner, vocabulary, adds_bos=True)
    if not vocabulary.is_gemma4:
        return inner, vocabulary.merges_by_score()
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("\n+"), "isolated")
    return inner, vocabulary.merges()


def _add_ends(inner: tokenizers.Tokenizer, vocabulary: _Vocabulary, adds_bos: bool) -> None:
    """Tokens before and after a text, where the file wants them."""
    wanted = {"bos": adds_bos, "eos": False}
    for name, default in wanted.items():
        wanted[name] = bool(vocabulary.metadata.get(f"tokenizer.ggml.add_{name}_token", default))
    wanted["bos"] |= vocabulary.is_gemma4  # whatever its first files say
    found = {name: vocabulary.named.get(f"{name}_token") for name, is_added in wanted.items() if is_added}
    if missing := [name for name, number in found.items() if number is None]:
        raise CheckpointError(
            f"key tokenizer.ggml.{missing[0]}_token_id is missing, and is added to texts; {GGUF_AGAIN}"
        )
    ids = {name: (vocabulary.tokens[number], number) for name, number in found.items() if number is not None}
    if ids:
        around = [[ids["bos"][0]] if "bos" in ids else [], ["$A"], [ids["eos"][0]] if "eos" in ids else []]
        inner.post_processor = processors.TemplateProcessing(
            single=[piece for part in around for piece in part], special_tokens=list(ids.values())
        )


PROBE = (
    "It's I'LL 1 12 123 1234567 x²  two   three\t\ttabs \n\n  lines\r\n\tif (a!=b) {return c/d;} //end\n'hello'world "
    "naïve CamelCase HTTPServer Ωmega Привет 中文字符，日本語テキスト。 한국어 العربية हिन्दी ไทย 🎉🎉 $5+<=>^~|`x` "
)
"""Text that the rules of splitting cut differently."""


def metadata_of_tokenizer(folder: Path, text: str, num_rows: int) -> dict[str, Any]:
    """Keys of a folder's tokenizer, a byte-level BPE with `text` as its whole tokenizer.json, and its chat template;
    `num_rows` have a token each. What keys cannot say (tokens that strip spaces) is found by reading them back. Raises
    CheckpointError for other kinds.
    """
    file, inner = msgspec.json.decode(text), tokenizers.Tokenizer.from_str(text)
    model, added, split = file["model"], file.get("added_tokens") or [], inner.pre_tokenizer
    is_bpe = model["type"] == "BPE" and (file.get("decoder") or {}).get("type") == "ByteLevel" and split is not None
    whole, pieces = bool(model.get("ignore_merges")), split.pre_tokenize_str(PROBE) if is_bpe else []
    rules = (name for name, rule in RULES.items() if rule.whole_pieces == whole)
    name = next((name for name in rules if _splits(RULES[name]).pre_tokenize_str(PROBE) == pieces), None)
    if name is None:
        why = "texts are split by no known rule" if is_bpe else f"{model['type']}, and byte-level BPE is what can be"
        raise CheckpointError(f"{folder}: no GGUF file describes its tokenizer ({why}); leave out --to gguf")
    tokens, types = [f"[PAD{number}]" for number in range(num_rows)], [_UNUSED] * num_rows
    kinds = {token["content"]: _CONTROL if token["special"] else _USER_DEFINED for token in added}
    ids = model["vocab"] | {token["content"]: token["id"] for token in added}
    for token, number in ids.items():
        if number < num_rows:
            tokens[number], types[number] = token, kinds.get(token, _NORMAL)
    named = {each: ids[token] for each, token in read_named_tokens(folder).items() if token in ids}
    whole_ids, plain_ids = (inner.encode("a", add_special_tokens=has_ends).ids for has_ends in (True, False))
    found: dict[str, Any] = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": types}
    found["merges"] = [each if isinstance(each, str) else " ".join(each) for each in model["merges"]]
    for end, place in (("bos", 0), ("eos", -1)):
        found[f"add_{end}_token"] = whole_ids != plain_ids and whole_ids[place] == named.get(f"{end}_token")
    templates = read_chat_template(folder) or {}
    templates = {"default": templates} if isinstance(templates, str) else templates
    return {
        **{f"tokenizer.ggml.{key}": value for key, value in found.items()},
        **{gguf_key_of(each): number for each, number in named.items()},
        **{f"tokenizer.chat_template.{each}".removesuffix(".default"): text for each, text in templates.items()},
    }

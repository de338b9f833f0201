"""Pieces that a text is split into before pairs of its bytes are merged, by the pre-tokenizer's name in GGUF files.

Names and rules are those of llama.cpp's `src/llama-vocab.cpp`, as of llama-cpp-python 0.3.36. Each pattern of a rule
splits what those before it left.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Rule(NamedTuple):
    patterns: tuple[str, ...]
    whole_pieces: bool = False  # a piece that is a token is one, whatever merges make of it
    adds_bos: bool = False  # where the file does not say


RULES = {
    **dict.fromkeys(("default",), Rule(_DEFAULT)),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "mpt", "mellum", "gigachat", "exaone4", "jais", "trillion"), Rule(_GPT2)
    ),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
        Rule(_DIGITS_FIRST),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Rule(_LLAMA3)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Rule(_LLAMA3, whole_pieces=True, adds_bos=True),
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), Rule(_QWEN2)),
    "qwen35": Rule(_QWEN35),
    "deepseek-llm": Rule(_DEEPSEEK_LLM),
    "deepseek-coder": Rule(_DEEPSEEK_CODER),
    "falcon": Rule(_FALCON),
    "tekken": Rule(_TEKKEN, whole_pieces=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), Rule(_GPT4O)),
}

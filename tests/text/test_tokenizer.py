"""The tokenizer: loading, ids, bytes of tokens, and the bound on how few tokens a text can have."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from maitred.core.errors import CheckpointError, InvalidRequest
from maitred.text.tokenizer import Tokenizer, byte_alphabet, whole_json
from tests.text.kinds import KINDS, byte_level, gemma, llama_2, unigram, unigram_unknown, word_level, wordpiece
from tests.waiting import joined

kinds = pytest.mark.parametrize("kind", KINDS)
texts = st.text(max_size=60) | st.text(alphabet="hi theab.,é你👍e\u0301\u0307\u1f82\u0345 \n", max_size=60)


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> None:
    tokenizer._inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


# --- loading ----------------------------------------------------------------------------------------------------------


def test_a_folder_gives_tokenizer_and_named_tokens(tmp_path: Path):
    save(byte_level(), tmp_path, bos_token="<s>", eos_token={"content": "</s>", "special": True}, pad_token=None)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_token_id == tokenizer.token_id("<s>")
    assert tokenizer.eos_token_id == tokenizer.token_id("</s>")
    assert tokenizer.pad_token_id is None
    assert tokenizer.special_token_ids == {tokenizer.token_id(t) for t in ("<s>", "</s>", "<pad>")}
    assert tokenizer.encode("hi the") == byte_level().encode("hi the")


def test_the_older_map_is_read_too_and_byte_order_marks_are_no_part_of_a_file(tmp_path: Path):
    save(byte_level(), tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}', encoding="utf-8")
    assert Tokenizer.from_folder(tmp_path).eos_token_id == byte_level().eos_token_id

    save(byte_level(), tmp_path, eos_token="</s>")
    path = tmp_path / "tokenizer_config.json"
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert Tokenizer.from_folder(tmp_path).eos_token_id == byte_level().eos_token_id


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path):
    first = byte_level().vocab_size
    added = {str(first): {"content": "<|new|>", "special": True, "lstrip": False}, "0": {"content": "!"}}
    save(byte_level(), tmp_path, added_tokens_decoder=added)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("a<|new|>")[-1] == tokenizer.token_id("<|new|>") == first
    assert tokenizer.vocab_size == first + 1
    assert first in tokenizer.special_token_ids


@pytest.mark.parametrize("beside", [{}, {"0": {"content": "<|new|>", "special": True}}], ids=["alone", "with config"])
def test_the_json_of_a_folder_makes_the_tokenizer_of_the_folder(tmp_path: Path, beside: dict[str, object]):
    save(byte_level(), tmp_path, added_tokens_decoder=beside)
    whole, own = tokenizers.Tokenizer.from_str(whole_json(tmp_path)), Tokenizer.from_folder(tmp_path)
    assert whole.get_vocab(with_added_tokens=True) == own._inner.get_vocab(with_added_tokens=True)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path):
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(tokenizers.Tokenizer.from_str(whole_json(tmp_path)).encode("abcdef").ids) == 6

    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=8)
    inner.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("abcdef")) == 6


def test_a_folder_without_tokenizer_says_what_to_do(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no tokenizer.json; copy it"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(CheckpointError, match=r"older format; convert it once with .*save_pretrained"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "Nonsense"}}'])
def test_a_broken_tokenizer_names_the_file(tmp_path: Path, content: str):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_config_names_the_file(tmp_path: Path, content: str):
    save(byte_level(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, r"added_tokens_decoder: Expected `int`, got `str`"),
        ({"added_tokens_decoder": {"9": {"special": True}}}, r"added_tokens_decoder: .* required field `content`"),
        ({"added_tokens_decoder": {"9": "<a>"}}, r"added_tokens_decoder: Expected `object`, got `str`"),
        ({"added_tokens_decoder": [1]}, r"added_tokens_decoder: Expected `object \| null`, got `array`"),
        (
            {"added_tokens_decoder": {"9": {"content": "a", "lstrip": "no"}}},
            r".* at `added_tokens_decoder\[...\].lstrip`",
        ),
        ({"eos_token": 5}, r"eos_token: Expected .*got `int`"),
        ({"bos_token": {"content": None}}, r"bos_token: Expected `str`, got `null` - at `bos_token.content`"),
    ],
)
def test_a_broken_entry_is_one_line_with_file_and_field(tmp_path: Path, config: dict[str, object], told: str):
    save(byte_level(), tmp_path, **config)
    with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json: {told}") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)


# --- ids and text -----------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(texts)
def test_ids_equal_those_of_transformers(text: str):
    transformers = pytest.importorskip("transformers")
    for tokenizer in (byte_level(), llama_2()):
        theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._inner)
        assert tokenizer.encode(text) == theirs.encode(text)


def test_half_a_surrogate_pair_is_the_clients_fault():
    with pytest.raises(InvalidRequest, match=r"character 1 of the text is '\\ud800'"):
        byte_level().encode("a\ud800")


@kinds
def test_vocab_size_is_over_every_id(kind: str):
    tokenizer = KINDS[kind]()
    assert tokenizer.token_bytes(tokenizer.vocab_size - 1) != b""
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_threads_may_share_a_tokenizer():
    tokenizer = llama_2()
    expected = tokenizer.encode("hi ab 你好 " * 50)
    wrong = []

    def work() -> None:
        for _ in range(30):
            if tokenizer.encode("hi ab 你好 " * 50) != expected or tokenizer.token_text(expected[3]) == "":
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert not wrong


# --- one token --------------------------------------------------------------------------------------------------------


def test_the_byte_alphabet_is_that_of_tokenizers():
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(set(byte_alphabet())) == 256
    for byte in range(128):
        (token,) = byte_level().encode(chr(byte))
        assert byte_level().token_bytes(token) == bytes([byte])


@pytest.mark.parametrize("make", [byte_level, gemma])
@settings(max_examples=50, deadline=None)
@given(text=texts)
def test_the_bytes_of_the_tokens_join_to_the_text(make: object, text: str):
    tokenizer = make()  # type: ignore[operator]
    ids = tokenizer.encode(text.replace("▁", ""))
    if "\ufffd" not in tokenizer.decode(ids):  # an added token in Latin-1 letters does not decode as it is written
        assert b"".join(map(tokenizer.token_bytes, ids)).decode() == tokenizer.decode(ids)


def test_a_token_shows_what_it_adds_leading_space_and_partial_characters_included():
    tokenizer = llama_2()
    for written, text, data in (
        ("▁hi", " hi", b" hi"),
        ("hi", "hi", b"hi"),
        ("<0xE4>", "\ufffd", b"\xe4"),
        ("<0x41>", "A", b"A"),
        ("</s>", "</s>", b"</s>"),
        ("🔧🔧", "🔧🔧", "🔧🔧".encode()),
    ):
        token = tokenizer.token_id(written)
        assert token is not None
        assert (tokenizer.token_text(token), tokenizer.token_bytes(token)) == (text, data)
    token = byte_level().token_id("ä½")
    assert token is not None
    assert byte_level().token_bytes(token) == b"\xe4\xbd"
    assert byte_level().token_text(token) == "\ufffd"

    token = wordpiece().token_id("##cat")
    assert token is not None
    assert wordpiece().token_text(token) == "cat"
    token = wordpiece().token_id("cat")
    assert token is not None
    assert wordpiece().token_text(token) == " cat"


# --- the bound --------------------------------------------------------------------------------------------------------


@kinds
@settings(max_examples=50, deadline=None)
@given(text=texts, times=st.integers(1, 4))
def test_min_tokens_is_never_too_many(kind: str, text: str, times: int):
    tokenizer = KINDS[kind]()
    assert tokenizer.min_tokens(text * times) <= len(tokenizer.encode(text * times, add_special_tokens=False))


def test_the_bound_is_the_longest_token_where_nothing_is_lost():
    assert byte_level().max_chars_per_token == len("<tool>")
    assert llama_2().max_chars_per_token == len("<tool>") + 1  # the space put before it
    assert unigram().max_chars_per_token == len("<tool>")
    assert gemma().max_chars_per_token == len("<tool>")
    assert gemma().min_tokens("x" * 600) == 100
    assert KINDS["byte_level_nfc"]().max_chars_per_token == 4 * len("<tool>")


@pytest.mark.parametrize("make", [wordpiece, word_level, unigram_unknown])
def test_there_is_no_bound_where_one_unknown_token_may_stand_for_anything(make: object):
    tokenizer = make()  # type: ignore[operator]
    assert tokenizer.max_chars_per_token is None
    assert tokenizer.min_tokens("x" * 1000) == 0


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.Strip(),
        normalizers.StripAccents(),
        normalizers.BertNormalizer(),
        normalizers.Replace(tokenizers.Regex(" {2,}"), " "),
        normalizers.Replace("a", ""),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    ],
    ids=str,
)
def test_there_is_no_bound_where_normalising_may_drop_text(normalizer: object):
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.normalizer = normalizer
    assert Tokenizer(inner).max_chars_per_token is None


@pytest.mark.parametrize(
    "pre_tokenizer",
    [pre_tokenizers.Whitespace(), pre_tokenizers.Split(" ", "removed"), pre_tokenizers.CharDelimiterSplit(" ")],
    ids=str,
)
def test_there_is_no_bound_where_splitting_drops_text(pre_tokenizer: object):
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizer, pre_tokenizers.ByteLevel()])
    assert Tokenizer(inner).max_chars_per_token is None


def test_there_is_no_bound_where_an_added_token_swallows_spaces_or_unknown_bytes_vanish():
    inner = tokenizers.Tokenizer.from_str(byte_level()._inner.to_str())
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    assert len(inner.encode(" " * 1000 + "<mask>").ids) == 1
    assert Tokenizer(inner).max_chars_per_token is None

    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert inner.encode("xyz").ids == []
    assert Tokenizer(inner).max_chars_per_token is None

"""A model's text is read once, when somebody needs it, and what can be known without it is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import CheckpointError
from maitred.engine.planning import _tokenizers_eos
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.folder import added_token_id, read_chat_template, read_named_tokens, vocabulary_difference
from maitred.text.parts import FolderText
from maitred.text.tokenizer import Tokenizer
from tests.waiting import HANGS_S, joined


def test_nothing_is_read_before_it_is_asked_for_and_then_once():
    reads: list[Path] = []

    def read(folder: Path) -> Tokenizer:
        reads.append(folder)
        return Tokenizer.from_folder(folder)

    text = FolderText(BUILTIN_FOLDER, read_chat_template(BUILTIN_FOLDER), read)
    assert reads == []
    assert text.tokenizer is text.tokenizer
    assert text.chat_template is text.chat_template
    assert reads == [BUILTIN_FOLDER]


def test_threads_that_ask_at_once_share_one_reading():
    asked = threading.Barrier(4, timeout=HANGS_S)
    reads: list[Path] = []
    found: list[Tokenizer] = []

    def read(folder: Path) -> Tokenizer:
        reads.append(folder)
        return Tokenizer.from_folder(folder)

    text = FolderText(BUILTIN_FOLDER, None, read)

    def ask() -> None:
        asked.wait()
        found.append(text.tokenizer)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    joined(*threads)
    assert len(reads) == 1
    assert len(set(map(id, found))) == 1
    assert text.chat_template is None


def test_a_template_that_is_broken_is_told_by_whoever_reads_it():
    with pytest.raises(CheckpointError, match="the chat template has an error in line 1"):
        FolderText(BUILTIN_FOLDER, "{% if %}").read()


def test_an_added_token_is_found_without_the_tokenizer(tmp_path: Path):
    name = read_named_tokens(BUILTIN_FOLDER)["eos_token"]
    file = BUILTIN_FOLDER / "tokenizer.json"
    assert added_token_id(file, name) == Tokenizer.from_folder(BUILTIN_FOLDER).eos_token_id
    assert added_token_id(file, "no such token") is None
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    assert added_token_id(broken, name) is None


def test_an_engine_that_is_built_has_not_loaded_what_reads_text():
    words = "import sys, maitred.engine.child as c; c.import_engine(); print([m for m in sys.modules if m in {}])"
    heavy = {"tokenizers", "jinja2", "asyncio", "starlette", "torch"}
    said = subprocess.run(
        [sys.executable, "-c", words.format(heavy)], capture_output=True, text=True, check=True, timeout=HANGS_S
    )
    assert json.loads(said.stdout.replace("'", '"')) == []


def test_the_end_token_of_an_unusual_tokenizer_is_found_by_reading_it_whole(tmp_path: Path):
    """One that is in the vocabulary but not among the added tokens."""
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "e"}))
    file = folder / "tokenizer.json"
    assert added_token_id(file, "e") is None
    assert _tokenizers_eos(file) == Tokenizer.from_folder(folder).eos_token_id is not None


BUILTIN = BUILTIN_FOLDER / "tokenizer.json"


def written(path: Path, change: Any) -> Path:
    description = json.loads(BUILTIN.read_bytes())
    change(description)
    path.write_text(json.dumps(description))
    return path


def test_what_is_around_the_vocabulary_and_tokens_that_only_one_knows_are_no_difference(tmp_path: Path):
    other = written(tmp_path / "other.json", lambda d: d.update(post_processor=None))
    assert other.read_bytes() != BUILTIN.read_bytes()
    assert vocabulary_difference(other, BUILTIN) is None

    added = {"id": 1_000_000, "content": "<more>"}
    assert vocabulary_difference(written(tmp_path / "o", lambda d: d["added_tokens"].append(added)), BUILTIN) is None


def test_ids_of_other_tokens_are_counted_and_the_first_is_named(tmp_path: Path):
    def swap(description: dict[str, Any]) -> None:
        vocab = description["model"]["vocab"]
        by_id = {token_id: token for token, token_id in vocab.items()}
        vocab[by_id[700]], vocab[by_id[900]] = 900, 700

    difference = vocabulary_difference(written(tmp_path / "o", swap), BUILTIN)
    assert difference is not None
    assert "2 are other tokens, as 700 is:" in difference


def test_a_vocabulary_may_be_a_list(tmp_path: Path):
    pieces = [["a", 0.0], ["b", -1.0]]
    paths = [tmp_path / "list", tmp_path / "dict"]
    paths[0].write_text(json.dumps({"model": {"vocab": pieces}}))
    paths[1].write_text(json.dumps({"model": {"vocab": {"b": 1, "c": 0}}}))
    assert vocabulary_difference(paths[0], paths[1]) == (
        "of its 2 token ids and the other's 2, 1 are other tokens, as 0 is: 'a' and 'c'"
    )


def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path):
    (tmp_path / "o").write_text("[]")
    with pytest.raises(CheckpointError, match="is no tokenizer"):
        vocabulary_difference(tmp_path / "o", BUILTIN)

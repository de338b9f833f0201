"""Two tokenizers are of one vocabulary while every id that both know is the same token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import BUILTIN_FOLDER
from maitred.text.folder import vocabulary_difference

BUILTIN = BUILTIN_FOLDER / "tokenizer.json"


def written(path: Path, change: Any) -> Path:
    description = json.loads(BUILTIN.read_bytes())
    change(description)
    path.write_text(json.dumps(description))
    return path


def test_what_is_around_the_vocabulary_does_not_count(tmp_path: Path):
    other = written(tmp_path / "other.json", lambda d: d.update(post_processor=None))
    assert other.read_bytes() != BUILTIN.read_bytes()
    assert vocabulary_difference(other, BUILTIN) is None


def test_a_token_that_only_one_knows_is_no_difference(tmp_path: Path):
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

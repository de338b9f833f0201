"""The tokenizer that is read ahead is the one that reading it later would have given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from maitred.core.errors import CheckpointError
from maitred.engine.served_model import TextAhead
from maitred.model.checkpoint import BUILTIN_FOLDER


def test_the_built_in_models_tokenizer_is_read_ahead():
    ahead = TextAhead(None)
    tokenizer = ahead.tokenizer(BUILTIN_FOLDER)
    assert tokenizer.decode(tokenizer.encode("A table for two")) == "A table for two"
    assert ahead.tokenizer(BUILTIN_FOLDER) is tokenizer


@pytest.mark.parametrize("model", ["owner/name", "no/such/folder"])
def test_what_is_no_folder_is_read_when_its_folder_is_known(model: str):
    assert TextAhead(model).tokenizer(BUILTIN_FOLDER).vocab_size > 0


def test_a_broken_tokenizer_is_an_error_for_whoever_asks(tmp_path: Path):
    folder = tmp_path / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        TextAhead(str(folder)).tokenizer(folder)

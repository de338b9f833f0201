"""A tokenizer with more tokens than the embedding has rows, as of Gemma 3's text models: no id ends the engine."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from maitred import LLM, SamplingParams
from maitred.core.errors import InvalidRequest
from maitred.core.structured_outputs import StructuredOutputsParams
from maitred.engine.output import CompletionOutput
from maitred.model.checkpoint import BUILTIN_FOLDER

SHORT = SamplingParams(temperature=0.0, max_tokens=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "rows"
    shutil.copytree(BUILTIN_FOLDER, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    rows = json.loads((folder / "config.json").read_text())["vocab_size"]
    config["added_tokens_decoder"] = {
        str(rows): {"content": "<|tool|>", "special": True},
        str(rows + 1): {"content": "<extra_0>", "special": False},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), dtype="float32", num_threads=1, max_model_len=128) as llm:
        yield llm


def test_the_start_tells_of_them_and_texts_with_one_are_refused(folder, caplog):
    with caplog.at_level(logging.WARNING), LLM(str(folder), dtype="float32", num_threads=1, max_model_len=128) as llm:
        rows = llm.model.vocab_size
        assert f"2 tokens of the tokenizer have no row in the model's embedding of {rows:,} rows" in caplog.text
        refused = f"has token {rows} .* has rows for 0 to {rows - 1} alone"
        with pytest.raises(InvalidRequest, match=refused):
            llm.generate("Hello <|tool|> there", SHORT)
        with pytest.raises(InvalidRequest, match=f"has token {rows + 1} "):
            llm.chat([{"role": "user", "content": "Hello <extra_0>"}], SHORT)
        assert llm.chat([{"role": "user", "content": "Hello <|tool|>"}], SHORT)[0].outputs, "a special one is letters"


def test_a_grammar_brings_no_such_token_and_one_that_names_one_is_at_fault(llm):
    rows = llm.model.vocab_size

    def answer(grammar: str) -> CompletionOutput:
        shape = StructuredOutputsParams(grammar=grammar)
        asked = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=shape)
        return llm.generate("a", asked)[0].outputs[0]

    letters = answer('start: "a <extra_0> b"')
    assert letters.text == "a <extra_0> b"
    assert all(token < rows for token in letters.token_ids)
    for named in ("<|tool|>", f"<[{rows}]>"):
        assert (answer(f'start: "a" {named} "b"').error or "").startswith("the grammar cannot be used: ")
    (after,) = llm.generate("The bill", SHORT)
    assert len(after.outputs[0].token_ids) == 6

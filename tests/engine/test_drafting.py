"""Who drafts for an engine: what lies beside the model, what was asked for, and what cannot be."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from maitred.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from maitred.core.errors import ConfigError
from maitred.engine.build import build_parts
from maitred.engine.memory import MemoryPlan
from maitred.model.checkpoint import BUILTIN_FOLDER
from tests.fakes import make_request
from tests.model.heads import make_head, make_mtp_checkpoint

DRAFT = BUILTIN_FOLDER.with_name(f"{BUILTIN_FOLDER.name}-draft")


def told(model: Path | None, **speculative: str) -> list[str]:
    """The lines of an engine's start."""
    config = EngineConfig(
        model=ModelConfig(model=str(model) if model is not None else None, num_threads=1),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=2),
        speculative=SpeculativeConfig(**speculative),
    )
    lines: list[str] = []
    build_parts(config, on_event=lines.append).close()
    return lines


def drafts_line(lines: list[str]) -> str:
    (line,) = (line for line in lines if line.startswith("drafts  at most"))
    return line


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The built-in model, with nothing beside it."""
    return Path(shutil.copytree(BUILTIN_FOLDER, tmp_path / "model"))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A head of the built-in model."""
    return make_head(tmp_path / "head", BUILTIN_FOLDER)


def other_vocabulary(folder: Path) -> Path:
    shutil.copytree(DRAFT, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    return folder


def test_the_built_in_model_drafts_with_its_draft_and_its_memory_is_planned():
    lines = told(None, speculative="draft")
    assert drafts_line(lines).startswith("drafts  at most 5 a step, by maitred-mini-draft: ")
    assert any("are the draft model's" in line for line in lines)


def test_the_built_in_model_drafts_with_its_head_unless_told_otherwise():
    assert drafts_line(told(None)).startswith("drafts  at most 5 a step, by maitred-mini-mtp: ")


def test_a_model_alone_drafts_from_its_own_tokens(model: Path):
    assert drafts_line(told(model)) == "drafts  at most 5 a step, by ngram"
    with pytest.raises(ConfigError, match="beside model there is no model-draft; name a draft model"):
        told(model, speculative="draft")


def test_a_folder_beside_the_model_is_its_draft(model: Path):
    shutil.copytree(DRAFT, model.with_name("model-draft"))
    assert ", by model-draft: " in drafts_line(told(model))
    assert ", by maitred-mini-draft: " in drafts_line(told(model, speculative_model=str(DRAFT)))


@pytest.mark.parametrize("speculative", ["draft", "mtp"])
def test_beside_a_drafter_windows_keep_what_they_see(model: Path, head: Path, speculative: str):
    """Where all layers have a window, a head's would be the only one that sees all tokens: blocks are whole then."""
    shutil.copytree(DRAFT, model.with_name("model-draft"))
    shutil.copytree(head, model.with_name("model-mtp"))
    config = json.loads((model / "config.json").read_text())
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
    (model / "config.json").write_text(json.dumps(config | mistral))
    alone, _ = _said(model, "off")
    text, memory = _said(model, speculative)
    assert text == alone
    assert (memory.pages is not None) == (speculative == "draft")
    if memory.pages is not None:
        assert memory.draft is not None
        assert memory.num_blocks > memory.num_pages  # the draft model keeps all tokens
        drafts = memory.num_blocks * memory.draft.bytes_per_block
        assert memory.kv_bytes == memory.num_pages * memory.pages.bytes_per_page + drafts <= 2**25


def _said(model: Path, speculative: str) -> tuple[list[int], MemoryPlan]:
    config = EngineConfig(
        model=ModelConfig(model=str(model), num_threads=1, max_model_len=256),
        cache=CacheConfig(block_size=16, kv_cache_memory_bytes=2**25),
        scheduler=SchedulerConfig(max_num_seqs=2),
        speculative=SpeculativeConfig(speculative=speculative),
    )
    parts = build_parts(config)
    request = make_request(prompt=list(range(300, 380)), max_tokens=40, block_size=16)
    parts.core.add(request.spec)
    said: list[int] = []
    while parts.core.has_work:
        said += [token for progress in parts.core.step() for token in progress.new_token_ids]
    parts.close()
    return said, parts.memory_plan


def test_a_draft_of_another_vocabulary_is_refused_where_it_was_asked_for_and_else_told(model: Path):
    beside = other_vocabulary(model.with_name("model-draft"))
    numbers = "a vocabulary of 999 tokens and model one of 1,536"
    lines = told(model)
    assert any(line.startswith(f"drafts  not by {beside}: ") and numbers in line for line in lines)
    assert drafts_line(lines).endswith("by ngram")
    for asked in ({"speculative": "draft"}, {"speculative_model": str(beside)}):
        with pytest.raises(ConfigError, match=numbers):
            told(model, **asked)


def test_a_draft_model_that_is_not_there_is_refused(model: Path):
    with pytest.raises(ConfigError, match="nowhere"):
        told(model, speculative_model=str(model / "nowhere"))


def test_a_head_beside_the_model_comes_before_a_draft_and_its_memory_is_planned(model: Path, head: Path):
    shutil.copytree(DRAFT, model.with_name("model-draft"))
    shutil.copytree(head, model.with_name("model-mtp"))
    lines = told(model)
    assert ", by model-mtp: " in drafts_line(lines)
    assert any("of weights are the head's, and a layer of each block" in line for line in lines)
    assert ", by model-draft: " in drafts_line(told(model, speculative="draft"))
    assert ", by head: " in drafts_line(told(model, speculative_model=str(head)))


def test_a_head_of_another_model_is_refused_where_it_was_asked_for_and_else_told(model: Path):
    beside = make_head(model.with_name("model-mtp"), BUILTIN_FOLDER, layer={"vocab_size": 999})
    numbers = "a vocabulary of 999 tokens, and the model has a vocabulary of 1,536 tokens"
    lines = told(model)
    assert any(line.startswith(f"drafts  not by {beside}: ") and numbers in line for line in lines)
    assert drafts_line(lines).endswith("by ngram")
    for asked in ({"speculative": "mtp"}, {"speculative_model": str(beside)}):
        with pytest.raises(ConfigError, match=numbers):
            told(model, **asked)


def test_one_kind_is_not_taken_for_another(model: Path, head: Path):
    with pytest.raises(ConfigError, match="there is no model-mtp, nor an MTP layer in it; name a head by"):
        told(model, speculative="mtp")
    with pytest.raises(ConfigError, match="speculative is 'draft', and head is a head; ask for mtp, or auto"):
        told(model, speculative="draft", speculative_model=str(head))
    with pytest.raises(ConfigError, match="is 'mtp', and maitred-mini-draft is a draft model; ask for draft, or auto"):
        told(model, speculative="mtp", speculative_model=str(DRAFT))


def test_an_mtp_layer_in_the_checkpoint_drafts_and_its_memory_is_planned(tmp_path: Path):
    model = make_mtp_checkpoint("glm4_moe", tmp_path / "model")
    for wanted in ("auto", "mtp"):
        lines = told(model, speculative=wanted)
        assert ", by model: the MTP layer of its checkpoint, weights" in drafts_line(lines)
        assert any("of weights are the head's, and a layer of each block" in line for line in lines)
    assert not any("MTP" in line for line in told(model, speculative="off"))
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.enorm.weight"]
    save_file(tensors, model / "model.safetensors")
    lines = told(model)
    gone = "1 tensors of the MTP layer of Glm4MoeForCausalLM are missing from the weights: model.layers.2.enorm.weight"
    assert any(line.startswith(f"drafts  not by its MTP layer: {gone}") for line in lines)
    assert drafts_line(lines).endswith("by ngram")
    with pytest.raises(ConfigError, match=gone):
        told(model, speculative="mtp")

"""Heads in folders: both layouts say the same, and what cannot draft for a model is refused with both numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maitred.core.errors import CheckpointError, ConfigError
from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.head import is_head, open_head
from maitred.model.spec import QKNorm
from maitred.model.weight_map import head_map
from tests.model.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.model.heads import TAPS, make_head

DRAFT_IDS = np.array([3, 4, 9, 100, 271])
LAYOUTS = ("speculators", "specforge")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    folder = make_checkpoint("llama", tmp_path_factory.mktemp("models") / "served")
    with open_checkpoint(str(folder)) as checkpoint:
        yield checkpoint


def opened(tmp_path: Path, served: Checkpoint, **settings: Any) -> Any:
    return open_head(make_head(tmp_path / "head", served.folder, **settings), served)


def shapes_of(head: Any) -> dict[str, list[tuple[int, ...]]]:
    """Of the tensors behind each parameter; every one has the shape that the map says."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for source in head_map(head.spec, head.tensor_names()):
        assert head.tensor(source.tensor).shape == source.shape, source
        found.setdefault(source.parameter, []).append(source.shape)
    return found


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_both_layouts_hold_the_same_head(tmp_path: Path, served: Checkpoint, draft_ids: np.ndarray | None):
    one, other = (opened(tmp_path / layout, served, layout=layout, draft_ids=draft_ids) for layout in LAYOUTS)
    assert one.spec.taps == other.spec.taps == TAPS
    assert one.spec.num_embeddings == other.spec.num_embeddings == VOCAB_SIZE
    assert one.spec.decoder.layers == other.spec.decoder.layers
    assert shapes_of(one) == shapes_of(other)
    for head in (one, other):
        if draft_ids is None:
            assert head.draft_to_target is None
        else:
            assert head.draft_to_target.tolist() == draft_ids.tolist()
            assert shapes_of(head)["output.weight"] == [(len(draft_ids), 72)]


def test_a_head_without_an_embedding_has_the_models_and_its_identity(tmp_path: Path, served: Checkpoint):
    head = opened(tmp_path, served)
    model = served.tensor("model.embed_tokens.weight")
    assert head.tensor("embed_tokens.weight").data == model.data
    assert head.borrowed == {"embedding"}
    own = opened(tmp_path / "own", served, own_embedding=True)
    assert not own.borrowed
    assert own.tensor("embed_tokens.weight").data != model.data
    assert own.tensor_names().count("embed_tokens.weight") == 1

    folder = make_head(tmp_path / "head", served.folder)
    tuned = make_checkpoint("llama", tmp_path / "tuned", seed=1)
    with open_checkpoint(str(tuned)) as other:
        assert open_head(folder, served).identity != open_head(folder, other).identity


def test_the_norms_of_a_head_are_read(tmp_path: Path, served: Checkpoint):
    flags = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True}
    head = opened(tmp_path, served, family="qwen3", layer={"attention_bias": False}, **flags)
    spec = head.spec
    assert (spec.norms_taps, spec.norms_each_tap, spec.norms_residual, spec.norms_state) == (True, False, True, True)
    assert spec.decoder.qk_norm is QKNorm.PER_HEAD
    assert shapes_of(head)["taps_norm.weight"] == [(3 * 72,)]
    each = opened(tmp_path / "each", served, fc_norm=True)
    assert [shapes_of(each)[f"tap_norms.{i}.weight"] for i in range(3)] == [[(72,)]] * 3


def test_a_head_that_names_no_layers_reads_those_that_its_package_reads_if_the_model_is_deep_enough(tmp_path: Path):
    model = make_checkpoint("llama", tmp_path / "deep", num_hidden_layers=8)
    unsaid: dict[str, dict[str, Any]] = {
        "speculators": {"eagle_aux_hidden_state_layer_ids": None},
        "specforge": {"eagle_config": None},
    }
    with open_checkpoint(str(model)) as deep:
        for layout in LAYOUTS:
            folder = make_head(tmp_path / layout, model, layout=layout, **unsaid[layout])
            assert open_head(folder, deep).spec.taps == (2, 4, 5)

    model = make_checkpoint("llama", tmp_path / "shallow", num_hidden_layers=4)
    folder = make_head(tmp_path / "head", model, eagle_aux_hidden_state_layer_ids=None)
    with (
        open_checkpoint(str(model)) as shallow,
        pytest.raises(CheckpointError, match=r"after layers 2, 2, 1 .* left out.* a model of 4 layers"),
    ):
        open_head(folder, shallow)


def test_a_folder_is_a_heads_by_its_config(tmp_path: Path, served: Checkpoint):
    for layout in LAYOUTS:
        assert is_head(open_checkpoint(str(make_head(tmp_path / layout, served.folder, layout=layout))).config)
    assert not is_head(served.config)


OTHER_MODELS = {
    "a vocabulary of 300 tokens, and the model has a vocabulary of 272 tokens": {"vocab_size": 300},
    "states of 36 values, and the model has states of 72 values": {"hidden_size": 36, "head_dim": 18},
    "1 heads of keys and values, and the model has 2": {"num_key_value_heads": 1},
    "heads of 36 values, and the model has heads of 18": {"head_dim": 36},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("numbers", OTHER_MODELS)
def test_a_head_of_another_model_is_refused_with_both_numbers(tmp_path, served, layout, numbers):
    with pytest.raises(ConfigError, match=f"the head head is not for served: it .*{numbers}"):
        opened(tmp_path, served, layout=layout, layer=OTHER_MODELS[numbers])


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "heads of kind 'dflash' are not supported; the supported ones are 'eagle3'": {"speculators_model_type": "dflash"},
    "the head's layer is one of 'qwen3_next'; the supported ones are llama, qwen3": {"family": "qwen3_next"},
    "it has 2 layers; those of 1 are": {"layer": {"num_hidden_layers": 2}},
    "a sliding window of 8 tokens": {"layer": {"layer_types": ["sliding_attention"], "sliding_window": 8}},
    "it reads states of 96 values and has 72 itself": {"target_hidden_size": 96},
    "it has both norm_before_fc and fc_norm": {"norm_before_fc": True, "fc_norm": True},
    "after layers 1, 3, 4 .* a model of 3 layers": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
    r"eagle_aux_hidden_state_layer_ids is \[\]": {"eagle_aux_hidden_state_layer_ids": []},
    "after layers 1, 1, 3": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]},
    "does not describe a head: .* wrong type": {"eagle_config": [1, 2]},
    "has no transformer_layer_config": {"transformer_layer_config": None},
    "no number 'vocab_size'": {"layer": {"vocab_size": None}},
    "activation 'relu' is not supported": {"layer": {"hidden_act": "relu"}},
}


@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_name(tmp_path: Path, served: Checkpoint, reason: str):
    with pytest.raises(CheckpointError, match=reason):
        opened(tmp_path, served, **UNSUPPORTED[reason])


def test_specforges_kinds_are_refused_by_name(tmp_path: Path, served: Checkpoint):
    with pytest.raises(CheckpointError, match="use_aux_hidden_state is false"):
        opened(tmp_path, served, layout="specforge", eagle_config={"use_aux_hidden_state": False})
    with pytest.raises(CheckpointError, match="heads of kind 'LlamaForCausalLMEagle' are not supported"):
        opened(tmp_path, served, layout="specforge", architectures=["LlamaForCausalLMEagle"])


BROKEN_VOCABULARIES: dict[str, dict[str, Any]] = {
    "drafts 5 of 272 tokens, and has no tensor d2t": {"d2t": None},
    "head head leads to token 272, and the model has 272": {"d2t": np.array([0, 0, 0, 0, 268])},
    "head head leads to token -1, and the model has 272": {"d2t": np.array([-1, 0, 0, 0, 0])},
    r"d2t of the head head has shape \[4\] of I64, and should have \[5\]": {"d2t": np.zeros(4, dtype=np.int64)},
    r"d2t of the head head has shape \[5\] of F32": {"d2t": np.zeros(5, dtype=np.float32)},
    r"t2d of the head head has shape \[271\] of BOOL, and should have \[272\]": {"t2d": np.zeros(271, dtype=bool)},
    "t2d marks 0 tokens and d2t leads to 5, of which 0": {"t2d": np.zeros(272, dtype=bool)},
}


@pytest.mark.parametrize("reason", BROKEN_VOCABULARIES)
def test_a_vocabulary_that_leads_nowhere_is_refused(tmp_path: Path, served: Checkpoint, reason: str):
    with pytest.raises(CheckpointError, match=reason):
        opened(tmp_path, served, draft_ids=DRAFT_IDS, tensors=BROKEN_VOCABULARIES[reason])


def test_missing_and_surplus_tensors_are_named(tmp_path: Path, served: Checkpoint):
    def mapped(name: str, **settings: Any) -> None:
        head = opened(tmp_path / name, served, **settings)
        head_map(head.spec, head.tensor_names())

    nothing = np.zeros(1, dtype=np.float32)
    mapped("copies", tensors={"verifier_norm.weight": nothing, "verifier_lm_head.weight": nothing})
    with pytest.raises(CheckpointError, match=r"1 tensors of Eagle3Speculator are missing.*: lm_head\.weight"):
        mapped("missing", tensors={"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"missing from the weights: midlayer\.mlp\.down_proj\.weight"):
        mapped("forge", layout="specforge", tensors={"midlayer.mlp.down_proj.weight": None})
    with pytest.raises(CheckpointError, match=r"1 tensors that Eagle3Speculator .* no place for: mask_hidden"):
        mapped("surplus", tensors={"mask_hidden": nothing})

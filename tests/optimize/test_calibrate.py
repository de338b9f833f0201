"""The walk over a model's layers computes what the whole decoder does, and goes on where it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from maitred.model.checkpoint import Checkpoint, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import load_torch_decoder
from maitred.optimize.calibrate import LINEARS, CalibratedLayer, layer_state, walk_layers
from tests.executor.torch_worlds import dense_attend
from tests.model.checkpoints import make_checkpoint

DOCUMENTS = [[3, 5, 7, 9, 11, 2, 4], [1], list(range(20, 60))]


def halve_the_way_down(layer: CalibratedLayer) -> Mapping[str, torch.Tensor]:
    counts = dict.fromkeys(LINEARS, 0)

    def count(name: str, x_TK: torch.Tensor) -> None:
        assert x_TK.shape[1] == layer.module.get_submodule(name).in_features
        counts[name] += len(x_TK)

    layer.observe(count)
    assert set(counts.values()) == {sum(map(len, DOCUMENTS))}
    layer.module.get_submodule("down").weight.mul_(0.5)
    return {"index": torch.tensor(layer.index)}


def whole_decoders_states(checkpoint: Checkpoint) -> torch.Tensor:
    """States before the norm, of all documents, where every layer's way down is halved."""
    decoder = load_torch_decoder(spec_from_config(checkpoint.config), checkpoint)
    for layer in decoder.layers:
        layer.down.weight.mul_(0.5)
    decoder.norm = torch.nn.Identity()
    attend = dense_attend(decoder.spec)
    return torch.cat([decoder(torch.tensor(ids), torch.arange(len(ids)), attend) for ids in DOCUMENTS])


@pytest.mark.parametrize("family", ["llama_tied", "gemma2", "qwen2_window", "olmo2"])
def test_outputs_of_changed_layers_are_those_of_the_whole_decoder(family: str, tmp_path: Path):
    with open_checkpoint(str(make_checkpoint(family, tmp_path / "parent"))) as parent:
        found = walk_layers(parent, DOCUMENTS, halve_the_way_down, state=tmp_path / "state")
        torch.testing.assert_close(found, whole_decoders_states(parent), rtol=1e-4, atol=1e-5)


def test_a_walk_that_ended_goes_on_with_the_layer_that_it_was_at(tmp_path: Path):
    seen = list[int]()

    def end_at_the_second(layer: CalibratedLayer) -> Mapping[str, torch.Tensor]:
        seen.append(layer.index)
        if seen == [0, 1]:
            raise KeyboardInterrupt
        return halve_the_way_down(layer)

    with open_checkpoint(str(make_checkpoint("llama_tied", tmp_path / "parent"))) as parent:
        with pytest.raises(KeyboardInterrupt):
            walk_layers(parent, DOCUMENTS, end_at_the_second, state=tmp_path / "state")
        found = walk_layers(parent, DOCUMENTS, end_at_the_second, state=tmp_path / "state")
        torch.testing.assert_close(found, whole_decoders_states(parent), rtol=1e-4, atol=1e-5)
    assert seen[:3] == [0, 1, 1]
    assert layer_state(tmp_path / "state", 0)["index"] == 0

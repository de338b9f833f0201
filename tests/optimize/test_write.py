"""What is written is an ordinary folder, that transformers reads as we do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from maitred.optimize.write import child_config, layer_changes, save_decoder
from maitred.text.tokenizer import Tokenizer
from tests.model.checkpoints import load_reference, make_checkpoint
from tests.model.gguf_models import TOKEN_TYPES, TOKENS, random_tensors, write_gguf
from tests.model.test_torch_decoder import assert_close, logits_of, random_tokens


def without_layer(folder: str, layer: int, out: Path) -> TorchDecoder:
    """The model without one of its layers, written to `out`."""
    with open_checkpoint(folder) as parent:
        whole = load_torch_decoder(spec_from_config(parent.config), parent)
        kept = [index for index in range(whole.spec.num_layers) if index != layer]
        changes = layer_changes(parent, kept)
        child = TorchDecoder(spec_from_config(child_config(parent, changes)))
        child.load_state_dict({**whole.state_dict(), **{
            f"layers.{new}.{name}": value
            for new, old in enumerate(kept)
            for name, value in whole.layers[old].state_dict().items()
        }}, strict=False)  # fmt: skip
        save_decoder(child, parent, out, changes)
    return child


@pytest.mark.parametrize("family", ["llama_tied", "qwen2_window", "gemma3", "phi3", "smollm3", "olmo2"])
def test_a_child_with_a_layer_less_is_read_by_transformers_as_by_us(family: str, tmp_path: Path):
    parent = make_checkpoint(family, tmp_path / "parent")
    child = without_layer(str(parent), 1, tmp_path / "child")
    tokens = random_tokens(40)
    assert_close(logits_of(child, tokens), load_reference(tmp_path / "child")(tokens[None]).logits[0].detach())
    assert (tmp_path / "child/tokenizer.json").read_bytes() == (parent / "tokenizer.json").read_bytes()


def test_a_gguf_parent_becomes_a_folder_with_its_tokenizer(tmp_path: Path):
    folder = make_checkpoint("gemma3", tmp_path / "for its config")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": 272}
    gguf = write_gguf(tmp_path / "parent.gguf", "gemma3", config, random_tensors(config), **{
        "tokenizer__ggml__pre": "gpt-2", "tokenizer__ggml__merges": ["a b"], "tokenizer__chat_template": "{{ 1 }}",
        "tokenizer__ggml__tokens": [*TOKENS, "ab"], "tokenizer__ggml__token_type": [*TOKEN_TYPES, 1],
    })  # fmt: skip
    child = without_layer(str(gguf), 0, tmp_path / "child")
    tokens = random_tokens(30)
    assert_close(logits_of(child, tokens), load_reference(tmp_path / "child")(tokens[None]).logits[0].detach())
    one, two = (Tokenizer.from_folder(path) for path in (gguf, tmp_path / "child"))
    assert one.encode("ab<|im_end|>") == two.encode("ab<|im_end|>")
    assert json.loads((tmp_path / "child/tokenizer_config.json").read_text())["chat_template"] == "{{ 1 }}"


def test_a_config_of_another_shape_than_the_weights_is_refused(tmp_path: Path):
    with open_checkpoint(str(make_checkpoint("llama", tmp_path / "parent"))) as parent:
        decoder = TorchDecoder(spec_from_config(parent.config))
        with pytest.raises(CheckpointError, match="would describe"):
            save_decoder(decoder, parent, tmp_path / "child", {"intermediate_size": 50})

"""The decoder equals Hugging Face transformers, family by family, on random weights."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import QKNorm, parameter_shapes
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder
from tests.executor.torch_worlds import dense_attend
from tests.model.checkpoints import FAMILIES, VOCAB_SIZE, load_reference, make_checkpoint

LONGER_THAN_ALL = 90  # over every window and every original context, within every context

torch.set_num_threads(1)


def load(folder: Path, max_model_len: int | None = None) -> TorchDecoder:
    with open_checkpoint(str(folder)) as checkpoint:
        return load_torch_decoder(spec_from_config(checkpoint.config), checkpoint, max_model_len=max_model_len)


def logits_of(decoder: TorchDecoder, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden = decoder(token_ids, torch.arange(len(token_ids)), dense_attend(decoder.spec))
        return decoder.logits(hidden)


def reference_logits(folder: Path, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return load_reference(folder)(token_ids[None]).logits[0]


def random_tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert theirs.std() > 0.05  # a test on all-equal logits would prove nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_parameters_equal_transformers(family: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path)
    decoder, tokens = load(folder), random_tokens(LONGER_THAN_ALL)
    assert_close(logits_of(decoder, tokens), reference_logits(folder, tokens))
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    assert shapes == parameter_shapes(decoder.spec)
    reference = load_reference(folder)
    buffers = ("correction_bias", "layer_scalar")
    more = sum(b.numel() for name, b in reference.named_buffers() if name.endswith(buffers))
    spec = decoder.spec
    more += sum(spec.at(i).kv_width * spec.hidden_size for i, layer in enumerate(spec.layers) if layer.keys_as_values)
    assert spec.num_parameters() == reference.num_parameters() + more


@pytest.mark.parametrize("family", ["llama", "llama_llama3", "llama_yarn", "gemma3", "phi3_longrope"])
def test_logits_equal_transformers_at_far_positions(family: str, tmp_path: Path) -> None:
    """Where one unit in the last place of a frequency is 0.01 radians."""
    folder = make_checkpoint(family, tmp_path, max_position_embeddings=131_072)
    decoder, tokens, positions = load(folder), random_tokens(40), torch.arange(40) + 120_000
    with torch.inference_mode():
        ours = decoder.logits(decoder(tokens, positions, dense_attend(decoder.spec)))
        theirs = load_reference(folder)(tokens[None], position_ids=positions[None]).logits[0]
    assert_close(ours, theirs)


def test_ropes_that_look_at_the_served_context_equal_transformers(tmp_path: Path):
    folder = make_checkpoint("llama_dynamic", tmp_path, max_position_embeddings=32)
    tokens = random_tokens(70)
    assert_close(logits_of(load(folder), tokens[:32]), reference_logits(folder, tokens[:32]))
    assert_close(logits_of(load(folder, max_model_len=70), tokens), reference_logits(folder, tokens))

    folder = make_checkpoint("phi3_longrope", tmp_path / "long")
    tokens = random_tokens(16)
    short = logits_of(load(folder, max_model_len=16), tokens)
    assert_close(short, reference_logits(folder, tokens))
    assert (short - logits_of(load(folder), tokens)).abs().max() > 1e-2  # its own context takes the long ones


@pytest.mark.parametrize("family", ["llama_dynamic", "phi3_longrope"])
def test_what_follows_never_changes_the_logits_of_a_prefix(family: str, tmp_path: Path) -> None:
    """Unlike transformers, where a text that outgrows the original context changes its rope."""
    decoder = load(make_checkpoint(family, tmp_path, max_position_embeddings=32), max_model_len=64)
    tokens = random_tokens(60)
    torch.testing.assert_close(logits_of(decoder, tokens)[:10], logits_of(decoder, tokens[:10]), atol=1e-5, rtol=1e-5)


def test_tokens_of_many_positions_in_any_order_are_independent(tmp_path: Path) -> None:
    """Positions are per token: a ragged batch is a concatenation, and attention is the caller's."""
    decoder = load(make_checkpoint("gemma3", tmp_path))
    tokens, positions = random_tokens(12), torch.arange(12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))

    def own_value(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return q + k.repeat_interleave(2, dim=1) + v.repeat_interleave(2, dim=1)

    with torch.inference_mode():
        straight, shuffled = decoder(tokens, positions, own_value), decoder(tokens[order], positions[order], own_value)
    torch.testing.assert_close(straight[order], shuffled)


def test_shards_and_one_file_give_the_same_weights(tmp_path: Path) -> None:
    one = make_checkpoint("gemma3", tmp_path / "one")
    many = make_checkpoint("gemma3", tmp_path / "many", max_shard_size="40KB")
    assert len(list(many.glob("*.safetensors"))) > 3
    assert_same_weights(load(one), load(many))


def assert_same_weights(one: TorchDecoder, other: TorchDecoder) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, theirs[name]), name


def test_a_tied_model_ignores_an_output_matrix_in_the_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint("llama_tied", tmp_path)
    tied = load(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(VOCAB_SIZE, 72)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(9)
    save_file(tensors, folder / "model.safetensors")
    assert_same_weights(tied, load(folder))


def test_weights_of_a_multimodal_gemma3_are_found_in_both_forms(tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file, save_file

    folder = make_checkpoint("gemma3", tmp_path)
    text = load(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": config}
    (folder / "config.json").write_text(json.dumps(config))
    for prefix in ("language_model.model.", "model.language_model."):
        renamed = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
        renamed["vision_tower.vision_model.embeddings.weight"] = torch.zeros(3)
        save_file(renamed, folder / "model.safetensors")
        assert_same_weights(text, load(folder))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16])
def test_half_precision_files_load_in_either_dtype(stored: torch.dtype, tmp_path: Path) -> None:
    from tests.model.checkpoints import make_model

    model = make_model("qwen2").to(stored)
    model.save_pretrained(tmp_path)
    decoder, tokens = load(tmp_path), random_tokens(40)
    assert_close(logits_of(decoder, tokens), reference_logits(tmp_path, tokens))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        half = load_torch_decoder(decoder.spec, checkpoint, dtype=torch.bfloat16)
    assert half.embedding.weight.dtype is torch.bfloat16
    logits = logits_of(half, tokens)
    assert logits.dtype is torch.float32
    exact = logits_of(decoder, tokens)
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


def test_progress_reaches_the_weights_bytes(tmp_path: Path) -> None:
    folder, seen = make_checkpoint("llama", tmp_path), []
    with open_checkpoint(str(folder)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
        load_torch_decoder(spec, checkpoint, progress=lambda done, total: seen.append((done, total)))
        assert seen[-1] == (checkpoint.weight_bytes, checkpoint.weight_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"intermediate_size": 99},
            r"down_proj.weight has shape \[72, 100\], config.json asks for \[72, 99\].*safetensors",
        ),
        ({"output_bias": True}, r"3 tensors .* are missing .*layers.0.self_attn.o_proj.bias"),
        ({"tied_embeddings": True, "qkv_bias": True}, r"9 tensors .* are missing"),
        ({"qk_norm": QKNorm.PER_HEAD}, r"6 tensors .* are missing .*q_norm.weight"),
    ],
)
def test_weights_that_do_not_fit_the_config_are_refused_by_name(change, message, tmp_path):
    with open_checkpoint(str(make_checkpoint("llama", tmp_path))) as checkpoint:
        spec = replace(spec_from_config(checkpoint.config), **change)
        with pytest.raises(CheckpointError, match=message):
            load_torch_decoder(spec, checkpoint)


def test_weights_without_a_place_are_refused_by_name(tmp_path: Path) -> None:
    with open_checkpoint(str(make_checkpoint("llama_bias", tmp_path))) as checkpoint:
        spec = replace(spec_from_config(checkpoint.config), mlp_bias=False)
        with pytest.raises(CheckpointError, match=r"9 tensors .* no place for: model.layers.0.mlp.down_proj.bias"):
            load_torch_decoder(spec, checkpoint)


shapes = st.fixed_dictionaries(
    {
        "num_key_value_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "head_dim": st.integers(1, 12).map(lambda n: 2 * n),
        "hidden_multiple": st.integers(1, 9),
        "intermediate_size": st.integers(1, 50),
        "num_hidden_layers": st.integers(1, 2),
        "tie_word_embeddings": st.booleans(),
        "attention_bias": st.booleans(),
        "mlp_bias": st.booleans(),
        "sequence": st.integers(1, 20),
    }
)


@settings(max_examples=12, deadline=None)
@given(shapes)
def test_any_even_head_size_and_any_hidden_size_equal_transformers(shape: dict[str, int]) -> None:
    heads = shape.pop("group") * shape["num_key_value_heads"]
    hidden = heads * shape.pop("hidden_multiple")  # transformers wants a multiple; we do not
    tokens = random_tokens(shape.pop("sequence"))
    with tempfile.TemporaryDirectory() as name:
        folder = make_checkpoint("llama", Path(name), num_attention_heads=heads, hidden_size=hidden, **shape)
        ours, theirs = logits_of(load(folder), tokens), reference_logits(folder, tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)

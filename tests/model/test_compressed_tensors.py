"""Folders of compressed-tensors show GGML's blocks of equal values, and what is not computed is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.packed import float32_values
from maitred.optimize.rounding import Form, round_to_nearest
from maitred.optimize.write import packed
from tests.model.checkpoints import make_checkpoint

NAME = "model.layers.1.mlp.down_proj"
ROWS, WIDTH = 72, 128


def with_a_linear(tmp_path: Path, parts: dict[str, torch.Tensor], **config: Any) -> Path:
    """A model one of whose linears is stored so."""
    folder = make_checkpoint("llama", tmp_path / "model", intermediate_size=WIDTH)
    weights = load_file(folder / "model.safetensors")
    del weights[f"{NAME}.weight"]
    save_file(weights | {f"{NAME}.{part}": tensor for part, tensor in parts.items()}, folder / "model.safetensors")
    plain = json.loads((folder / "config.json").read_text())
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized", **config}
    (folder / "config.json").write_text(json.dumps({**plain, "quantization_config": told}))
    return folder


def parts_of(form: Form) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    rounded = round_to_nearest(form, weights)
    return packed(rounded), rounded.values()


@pytest.mark.parametrize(
    ("form", "scale_dtype", "shown"),
    [
        (Form(4, 32, True), torch.bfloat16, "Q4_0"),
        (Form(4, 128, True), torch.float16, "Q4_0"),
        (Form(4, 32, False), torch.float16, "Q4_1"),
        (Form(4, None, False), torch.bfloat16, "Q4_1"),
        (Form(8, None, True), torch.bfloat16, "Q8_0"),
        (Form(8, 32, True), torch.float32, "Q8_0"),
        (Form(8, 64, False), torch.float16, "F32"),
        (Form(4, 16, True), torch.float16, "F32"),
    ],
)
def test_integers_become_blocks_of_equal_values(form: Form, scale_dtype: torch.dtype, shown: str, tmp_path: Path):
    parts, values = parts_of(form)
    parts["weight_scale"] = parts["weight_scale"].to(scale_dtype)
    with open_checkpoint(str(with_a_linear(tmp_path, parts))) as checkpoint:
        name = f"{NAME}.weight"
        assert name in checkpoint.tensor_names()
        assert checkpoint.dtype_of(name) == shown
        raw = checkpoint.tensor(name)
        assert raw.shape == (ROWS, WIDTH)
        np.testing.assert_array_equal(float32_values(raw, name), values.numpy())


def test_a_scale_that_is_no_float16_is_not_rounded(tmp_path: Path):
    parts, _ = parts_of(Form(4, 32, True))
    parts["weight_scale"] = parts["weight_scale"].float() * 1.0001
    with open_checkpoint(str(with_a_linear(tmp_path, parts))) as checkpoint:
        assert checkpoint.dtype_of(f"{NAME}.weight") == "F32"


def test_a_zero_whose_minimum_is_no_float16_takes_eight_bits(tmp_path: Path):
    parts, _ = parts_of(Form(4, 32, False))
    scale = parts["weight_scale"] = (parts["weight_scale"].float() * 1.001).half()
    with open_checkpoint(str(with_a_linear(tmp_path, parts))) as checkpoint:
        raw = checkpoint.tensor(f"{NAME}.weight")
        assert raw.dtype == "Q8_0"
        blocks = np.frombuffer(raw.data, [("d", "<f2"), ("q", "i1", 32)])
        np.testing.assert_array_equal(blocks["d"].reshape(ROWS, -1), scale.numpy())


def test_int8_without_packing_is_read_as_well(tmp_path: Path):
    codes = torch.randint(-127, 128, (ROWS, WIDTH), dtype=torch.int8)
    scale = torch.full((ROWS, 1), 0.5, dtype=torch.bfloat16)
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    groups = {"group_0": {"weights": {"num_bits": 8}, "input_activations": inputs}}
    folder = with_a_linear(
        tmp_path, {"weight": codes, "weight_scale": scale}, format="int-quantized", config_groups=groups
    )
    with open_checkpoint(str(folder)) as checkpoint:
        raw = checkpoint.tensor(f"{NAME}.weight")
        np.testing.assert_array_equal(float32_values(raw, NAME), codes.numpy() * np.float32(0.5))


def activations(**changes: Any) -> dict[str, Any]:
    return {
        "config_groups": {"group_0": {"input_activations": {"num_bits": 8, "type": "int", "dynamic": True} | changes}}
    }


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"format": "float-quantized"}, "format 'float-quantized'"),
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (activations(dynamic=False), "activations 8-bit int, of scales that were measured before"),
        (activations(type="float"), "activations 8-bit float"),
        ({"quant_method": "awq"}, "quantised (awq), which is not supported yet"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], what: str, tmp_path: Path):
    from maitred.model.families import spec_from_config

    parts, _ = parts_of(Form(4, 32, True))
    with (
        pytest.raises(CheckpointError) as refused,
        open_checkpoint(str(with_a_linear(tmp_path, parts, **config))) as it,
    ):
        spec_from_config(it.config)
    assert what in str(refused.value)


def test_parts_of_other_bits_are_refused_with_their_shapes(tmp_path: Path):
    parts, _ = parts_of(Form(4, 32, True))
    parts["weight_packed"] = parts["weight_packed"][:, :12].contiguous()  # 3 bits
    with pytest.raises(CheckpointError, match=rf"linear {NAME} of shape \[72, 128\] as .*weight_packed \[72, 12\]"):
        open_checkpoint(str(with_a_linear(tmp_path, parts)))

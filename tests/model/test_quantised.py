"""Quantised folders show blocks of equal values, whatever the format; what is not computed is refused by name.

Each format is written here as its paper and its repository say, beside the values that it stands for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.packed import float32_values
from maitred.optimize.rounding import Form, round_to_nearest
from maitred.optimize.write import packed
from tests.executor.native_worlds import load_native
from tests.executor.test_families_parity import Served, check_against_reference, serve
from tests.model.checkpoints import load_reference, make_checkpoint

NAME = "model.layers.1.mlp.down_proj"
ROWS, WIDTH = 72, 128
Made = tuple[dict[str, Tensor], dict[str, Any], Tensor]  # parts, quantization_config, values


def with_a_linear(
    tmp_path: Path, parts: dict[str, Tensor], quantised: dict[str, Any] | None = None, **config: Any
) -> Path:
    """A model one of whose linears is stored so."""
    folder = make_checkpoint("llama", tmp_path / "model", intermediate_size=WIDTH)
    weights = load_file(folder / "model.safetensors")
    del weights[f"{NAME}.weight"]
    named = {f"{NAME}{'' if part[0] in '._' else '.'}{part}": tensor.contiguous() for part, tensor in parts.items()}
    save_file(weights | named, folder / "model.safetensors")
    plain = json.loads((folder / "config.json").read_text())
    told = quantised or {"quant_method": "compressed-tensors", "format": "pack-quantized", **config}
    (folder / "config.json").write_text(json.dumps({**plain, "quantization_config": told}))
    return folder


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(bits: int, group: int, dtype: torch.dtype = torch.float16, centred: bool = False) -> tuple[Tensor, ...]:
    """Codes [N, K], scales and zeros [N, G], one channel of the scales an outlier."""
    generator = torch.Generator().manual_seed(bits + group)
    groups = WIDTH // group
    codes = torch.randint(0, 1 << bits, (ROWS, WIDTH), generator=generator)
    scale = (torch.rand(ROWS, groups, generator=generator) * 0.02 + 1e-3).to(dtype)
    scale[5] *= 40
    zero = torch.randint(1, 1 << bits, (ROWS, groups), generator=generator)
    return codes, scale, torch.full_like(zero, 1 << bits - 1) if centred else zero


def values_of(codes: Tensor, scale: Tensor, zero: Tensor, group: Tensor) -> Tensor:
    return (codes - zero[:, group]).float() * scale.float()[:, group]


def words(codes: Tensor, bits: int) -> Tensor:
    """Along the last dimension, the first code in a word's lowest bits."""
    per_word = 32 // bits
    shifted = codes.long().view(*codes.shape[:-1], -1, per_word) << bits * torch.arange(per_word)
    return shifted.sum(-1).to(torch.int64).to(torch.int32)


def gptq(bits: int, group: int, *, act_order: bool = False, centred: bool = False, v2: bool = False) -> Made:
    size = WIDTH if group == -1 else group
    codes, scale, zero = integers(bits, size, centred=centred)
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(WIDTH)
    g_idx = torch.empty(WIDTH, dtype=torch.int32)
    g_idx[order] = (torch.arange(WIDTH) // size).int()
    parts = {
        "qweight": words(codes.T.reshape(WIDTH * bits // 32, -1, ROWS).transpose(1, 2), bits)[..., 0],
        "qzeros": words((zero if v2 else zero - 1).T, bits),
        "scales": scale.T,
        "g_idx": g_idx,
        "bias": torch.zeros(ROWS),  # AutoGPTQ's, in linears that have none
    }
    told = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": act_order}
    told["checkpoint_format"] = "gptq_v2" if v2 else "gptq"
    return parts, told, values_of(codes, scale, zero, g_idx)


def awq(group: int = 32) -> Made:
    codes, scale, zero = integers(4, group)
    values = values_of(codes, scale, zero, torch.arange(WIDTH) // group)
    told = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    woven = [
        words(each.T.reshape(-1, ROWS // 8, 8)[..., order].reshape(len(each.T), ROWS), 4) for each in (codes, zero)
    ]
    return {"qweight": woven[0], "qzeros": woven[1], "scales": scale.T}, told, values


def packed_with_zeros(bits: int, group: int, dtype: torch.dtype) -> Made:
    codes, scale, zero = integers(bits, group)
    scale = (scale * 2.0**14).round().clamp(64, 127) / 2.0**14  # 7 bits, whose products with a zero are float16s
    values = values_of(codes, scale, zero, torch.arange(WIDTH) // group)
    zeros = words(zero.T, bits).T
    parts = {"weight_packed": words(codes, bits), "weight_scale": scale.to(dtype), "weight_zero_point": zeros}
    told = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    return parts | {"weight_shape": torch.tensor([ROWS, WIDTH])}, told, values


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"weights": weights, "input_activations": {"num_bits": 8, "type": "int", "dynamic": False}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def int8(dtype: torch.dtype, factor: float = 1.0) -> Made:
    codes, scale, zero = integers(8, WIDTH, torch.float32, centred=True)
    scale = (scale * factor).to(dtype)
    parts = {"weight": (codes - 128).to(torch.int8), "weight_scale": scale, "input_scale": torch.ones(1)}
    return parts, compressed("int-quantized", num_bits=8), values_of(codes, scale, zero, torch.zeros(WIDTH).long())


def fp8(scale: Tensor, end: str = "weight_scale", told: dict[str, Any] | None = None) -> Made:
    weight = (random(ROWS, WIDTH) * 60).to(torch.float8_e4m3fn)
    weight[0, :16] = torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn)  # subnormals
    rows = scale.float()
    if scale.dim() == 2 and scale.shape[0] not in (1, ROWS):
        size = told["weight_block_size"]  # type: ignore[index]
        rows = rows.repeat_interleave(size[0], 0)[:ROWS].repeat_interleave(size[1], 1)[:, :WIDTH]
    parts = {"weight": weight, end: scale, "input_scale": torch.ones(())}
    return parts, told or compressed("float-quantized", num_bits=8, type="float"), weight.float() * rows


def blocks_of(*size: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": list(size), "modules_to_not_convert": ["lm_head"]}


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def mxfp4() -> Made:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (ROWS, WIDTH), generator=generator)
    exponent = torch.randint(115, 130, (ROWS, WIDTH // 32), generator=generator)
    packed_codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = E2M1[codes & 7] * torch.where(codes < 8, 1.0, -1.0) * (2.0 ** (exponent - 127)).repeat_interleave(32, 1)
    return (
        {"weight_packed": packed_codes, "weight_scale": exponent.to(torch.uint8)},
        compressed("mxfp4-pack-quantized"),
        values,
    )


def nf4(nested: bool) -> Made:
    table, codes = random(16).sort().values, torch.randint(0, 16, (ROWS * WIDTH,))
    absmax = torch.rand(ROWS * WIDTH // 64)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [ROWS, WIDTH]}
    parts = {"weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None], "weight.quant_map": table}
    if nested:
        small, map_256, outer = torch.randint(0, 256, absmax.shape).to(torch.uint8), random(256), torch.rand(1)
        absmax = map_256[small.long()] * outer + 0.25
        state |= {"nested_blocksize": 256, "nested_offset": 0.25}
        parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": map_256, "weight.absmax": small}
    else:
        parts["weight.absmax"] = absmax
    parts["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    values = table[codes].view(-1, 64) * absmax[:, None]
    return parts, {"quant_method": "bitsandbytes", "load_in_4bit": True}, values.view(ROWS, WIDTH).bfloat16().float()


def bitsandbytes_int8() -> Made:
    codes, most = torch.randint(-127, 128, (ROWS, WIDTH)).to(torch.int8), torch.rand(ROWS) + 0.5
    parts = {"weight": codes, "SCB": most, "weight_format": torch.zeros((), dtype=torch.uint8)}
    return parts, {"quant_method": "bitsandbytes", "load_in_8bit": True}, codes.float() * (most / 127)[:, None]


POWERS = 2.0 ** torch.arange(-6, 6).view(3, 4)
FORMATS: dict[str, tuple[Callable[[], Made], str]] = {
    "gptq 4 bits": (lambda: gptq(4, 32, centred=True), "Q4_0"),
    "gptq 4 bits v2": (lambda: gptq(4, 64, centred=True, v2=True), "Q4_0"),
    "gptq 4 bits with zeros": (lambda: gptq(4, 128), "Q4_Z"),
    "gptq 4 bits with zeros v2": (lambda: gptq(4, 32, v2=True), "Q4_Z"),
    "gptq 4 bits a row": (lambda: gptq(4, -1), "Q4_Z"),
    "gptq 8 bits": (lambda: gptq(8, 64, centred=True), "Q8_0"),
    "gptq 8 bits with zeros": (lambda: gptq(8, 32), "Q8_Z"),
    "gptq 4 bits in act-order": (lambda: gptq(4, 32, act_order=True), "Q4_Z"),
    "gptq 8 bits in act-order": (lambda: gptq(8, 32, act_order=True, centred=True), "Q8_0"),
    "gptq groups of 16": (lambda: gptq(4, 16, act_order=True), "F32"),
    "awq gemm": (awq, "Q4_Z"),
    "packed 4 bits with zeros": (lambda: packed_with_zeros(4, 32, torch.float16), "Q4_1"),
    "packed 4 bits a row with zeros": (lambda: packed_with_zeros(4, WIDTH, torch.bfloat16), "Q4_1"),
    "packed 8 bits with zeros": (lambda: packed_with_zeros(8, 64, torch.float16), "Q8_Z"),
    "int8, scales in bfloat16": (lambda: int8(torch.bfloat16), "Q8_0"),
    "int8, small scales": (lambda: int8(torch.bfloat16, 1e-5), "Q8_W"),
    "int8, scales in float32": (lambda: int8(torch.float32), "Q8_W"),
    "fp8 a tensor": (lambda: fp8(torch.tensor(0.013)), "F8_128"),
    "fp8 a channel": (lambda: fp8(torch.rand(ROWS, 1).bfloat16()), "F8_128"),
    "fp8 in blocks": (lambda: fp8(torch.rand(2, 1), "weight_scale_inv", blocks_of(64, 128)), "F8_128"),
    "fp8 in small blocks": (lambda: fp8(torch.rand(3, 4), "weight_scale_inv", blocks_of(32, 32)), "F32"),
    "fp8, powers of two": (lambda: fp8(POWERS, "weight_scale_inv", blocks_of(32, 32)), "BF16"),
    "mxfp4": (mxfp4, "MXFP4"),
    "nf4": (lambda: nf4(nested=False), "BF16"),
    "nf4, nested": (lambda: nf4(nested=True), "BF16"),
    "bitsandbytes int8": (bitsandbytes_int8, "Q8_W"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FORMATS)
def test_a_format_shows_its_values_exactly(kind: str, tmp_path: Path):
    make, shown = FORMATS[kind]
    parts, told, values = make()
    with open_checkpoint(str(with_a_linear(tmp_path, parts, told))) as checkpoint:
        name = f"{NAME}.weight"
        assert not [each for each in checkpoint.tensor_names() if each.startswith(NAME) and each != name]
        assert checkpoint.dtype_of(name) == shown
        assert checkpoint.shape_of(name) == (ROWS, WIDTH)
        np.testing.assert_allclose(float32_values(checkpoint.tensor(name), name), values.numpy(), rtol=2e-7, atol=0)


def parts_of(form: Form) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    rounded = round_to_nearest(form, weights)
    return packed(rounded), rounded.values()


@pytest.mark.parametrize(
    ("form", "scale_dtype", "shown"),
    [
        (Form(4, 32, True), torch.bfloat16, "Q4_0"),
        (Form(4, 128, True), torch.float16, "Q4_0"),
        (Form(8, None, True), torch.bfloat16, "Q8_0"),
        (Form(8, 32, True), torch.float32, "Q8_0"),
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


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        ({"transform_config": {"config_groups": {}}}, "transform_config"),
        ({"quant_method": "aqlm"}, "config.json: the weights are quantised by aqlm, which is not computed here"),
        ({"quant_method": "awq"}, r"quantised by awq, and no tensor is named as there (.qweight, .scales)"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(config: dict[str, Any], what: str, tmp_path: Path):
    parts, _ = parts_of(Form(4, 32, True))
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(str(with_a_linear(tmp_path, parts, **config)))
    assert what in str(refused.value)


@pytest.mark.parametrize(
    ("kind", "changes", "what"),
    [
        (
            "gptq 4 bits",
            {"qzeros": None},
            f"{NAME}.qzeros is missing beside g_idx [128], qweight [16, 72], scales [4, 72]",
        ),
        ("gptq 4 bits", {"scales": torch.ones(3, ROWS)}, f"{NAME} has the parts .*groups that do not divide"),
        ("gptq 4 bits", {"qweight": torch.zeros(12, ROWS).int()}, f"{NAME} has codes of 3 bits"),
        ("awq gemm", {"qweight": torch.zeros(16, ROWS).int()}, f"{NAME} has the parts qweight"),
        ("int8, scales in bfloat16", {"weight_scale": torch.ones(ROWS, 3)}, "groups that do not divide"),
        ("fp8 in blocks", {"weight_scale_inv": None}, f"{NAME}.weight_scale_inv is missing beside weight"),
        ("fp8 in blocks", {"weight_scale_inv": torch.ones(2, 2)}, "weight_scale_inv [2, 2]"),
        ("mxfp4", {"weight_scale": torch.ones(ROWS, 3, dtype=torch.uint8)}, "groups that do not divide"),
        ("nf4", {"weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)}, "has a quant_state"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_file_and_shapes(
    kind: str, changes: dict[str, Tensor | None], what: str, tmp_path: Path
):
    parts, told, _ = FORMATS[kind][0]()
    parts = {name: tensor for name, tensor in (parts | changes).items() if tensor is not None}
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(str(with_a_linear(tmp_path, parts, told)))
    assert "model.safetensors: " in str(refused.value)
    assert all(text in str(refused.value) for text in what.split(".*"))


def test_a_file_that_is_shortened_meanwhile_ends_with_a_sentence(tmp_path: Path):
    parts, told, _ = gptq(4, 32)
    folder = with_a_linear(tmp_path, parts, told)
    with open_checkpoint(str(folder)) as checkpoint:
        with (folder / "model.safetensors").open("r+b") as file:
            file.truncate(4096)
        with pytest.raises(CheckpointError, match=r"model.safetensors changed while it was read .* start again"):
            checkpoint.tensor(f"{NAME}.weight")


@pytest.mark.parametrize("kind", ["gptq 4 bits in act-order", "awq gemm", "fp8 in blocks", "mxfp4", "nf4"])
def test_a_quantised_model_serves_as_transformers_does_the_values(kind: str, tmp_path: Path):
    parts, told, values = FORMATS[kind][0]()
    folder = with_a_linear(tmp_path, parts, told)
    reference = load_reference(make_checkpoint("llama", tmp_path / "plain", intermediate_size=WIDTH))
    reference.get_parameter(f"{NAME}.weight").data.copy_(values)
    for dtype in ("float32", "auto"):  # expanded, and in the file's own codes, which meet rows of fewer bits
        native = load_native(folder, num_blocks=65, block_size=4, num_threads=1, dtype=dtype)
        served = serve(native)
        native.close()
        if dtype == "float32":
            check_against_reference(served, reference)
        else:
            assert error_of(served, reference) < 0.02


def test_latent_layers_in_fp8_turn_a_part_of_kv_b_proj_and_keep_the_other(tmp_path: Path):
    sizes = {"kv_lora_rank": WIDTH, "qk_nope_head_dim": 10, "v_head_dim": 8}  # 4 heads of those: ROWS
    folder = make_checkpoint("deepseek_v3", tmp_path, **sizes)
    name, weights = "model.layers.1.self_attn.kv_b_proj.weight", load_file(folder / "model.safetensors")
    parts, told, values = fp8(torch.rand(3, 1) * 0.002, "weight_scale_inv", blocks_of(32, 128))
    weights |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
    reference = load_reference(folder)
    reference.get_parameter(name).data.copy_(values)
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": told}))
    for dtype in ("float32", "auto"):
        native = load_native(folder, num_blocks=65, block_size=4, num_threads=1, dtype=dtype)
        held = {w.name: str(w.format) for w in native.runner.program.weights if "layers.1.latent." in w.name}
        served = serve(native)
        native.close()
        if dtype == "float32":
            check_against_reference(served, reference)
        else:
            assert (held["layers.1.latent.absorb"], held["layers.1.latent.expand"]) == ("bfloat16", "fp8")
            assert error_of(served, reference) < 0.02


def error_of(served: Served, reference: Any) -> float:
    """Squared error of the prompts' logits, as a share of their variance."""
    prompts = {request.request_id: request.spec.prompt_token_ids for request in served.requests}
    wanted, found = [], []
    for name, start, logits in served.chunks:
        prompt = prompts[name]
        if start + len(logits) <= len(prompt):
            with torch.inference_mode():
                wanted.append(reference(torch.tensor([prompt])).logits[0, start : start + len(logits)])
            found.append(logits)
    return float((torch.cat(found) - torch.cat(wanted)).square().mean() / torch.cat(wanted).var())

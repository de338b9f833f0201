"""Routed experts in checkpoints: every form that their tensors come in, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from maitred.core.errors import CheckpointError
from maitred.model.families import spec_from_config
from maitred.model.roofline import KVFormat, Row, WeightFormat, experts_touched, step_work
from maitred.model.spec import RoutedSpec
from maitred.model.torch_decoder import route
from tests.model.checkpoints import make_checkpoint
from tests.model.test_torch_decoder import assert_same_weights, load


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(told))
    return folder


def fused(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """One tensor for all experts of a layer, as transformers 5 holds them."""
    found, experts = {}, dict[str, dict[int, dict[str, torch.Tensor]]]()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts\.)(\d+)\.(\w+)_proj\.weight", name):
            experts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            found[name] = tensor
    for prefix, by_number in experts.items():
        each = [by_number[number] for number in sorted(by_number)]
        found[f"{prefix}gate_up_proj"] = torch.stack([torch.cat((e["gate"], e["up"])) for e in each])
        found[f"{prefix}down_proj"] = torch.stack([e["down"] for e in each])
    return found


def test_one_tensor_an_expert_and_one_for_all_give_the_same_weights(tmp_path: Path):
    apart, together = (make_checkpoint("glm4_moe", tmp_path / name) for name in ("apart", "together"))
    tensors = tensors_of(apart)
    assert any(".experts.3.gate_proj." in name for name in tensors)
    write(together, fused(tensors))
    assert_same_weights(load(apart), load(together))


E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4(rows: int, width: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Experts [5, rows, width]: blocks and scales as gpt-oss has them, and their values."""
    codes = torch.randint(0, 16, (5, rows, width // 32, 32), generator=generator)
    scales = torch.randint(120, 124, (5, rows, width // 32), generator=generator)
    values = E2M1[codes] * torch.exp2(scales.float() - 127)[..., None]
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks.to(torch.uint8), scales.to(torch.uint8), values.flatten(2)


def test_gpt_oss_experts_in_mxfp4_are_those_that_transformers_writes_transposed(tmp_path: Path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 5}
    packed, plain = (make_checkpoint("gpt_oss", tmp_path / name, **sizes) for name in ("packed", "plain"))
    of_packed, of_plain = tensors_of(packed), tensors_of(plain)
    generator = torch.Generator().manual_seed(1)
    for name in [name for name in of_plain if name.endswith(("gate_up_proj", "down_proj"))]:
        width, rows = of_plain[name].shape[1:]
        blocks, scales, values = mxfp4(rows, width, generator)
        of_plain[name] = values.transpose(1, 2)
        del of_packed[name]
        of_packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    write(plain, of_plain)
    write(packed, of_packed, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert_same_weights(load(plain), load(packed))


def test_layers_that_only_draft_and_parts_that_read_pictures_are_left_out(tmp_path: Path):
    folder = make_checkpoint("glm4_moe", tmp_path)
    before, tensors = load(folder), tensors_of(folder)
    for name in ("model.layers.3.eh_proj.weight", "model.visual.blocks.0.attn.qkv.weight"):
        tensors[name] = torch.zeros(4, 4)
    write(folder, tensors, num_nextn_predict_layers=1)
    assert_same_weights(before, load(folder))
    write(folder, tensors, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"1 tensors .* no place for: model.layers.3.eh_proj.weight"):
        load(folder)


def test_the_text_part_of_a_multimodal_checkpoint_is_known_by_its_model_type(tmp_path: Path):
    folder = make_checkpoint("ministral3", tmp_path)
    text = load(folder)
    config = {"text_config": json.loads((folder / "config.json").read_text()), "model_type": "mistral3"}
    tensors = {name.replace("model.", "model.language_model.", 1): each for name, each in tensors_of(folder).items()}
    write(folder, tensors | {"model.vision_tower.patch_conv.weight": torch.zeros(3)}, **config,
          architectures=["Mistral3ForConditionalGeneration"])  # fmt: skip
    assert_same_weights(text, load(folder))


def test_missing_and_doubled_experts_are_named(tmp_path: Path):
    folder = make_checkpoint("qwen3_moe", tmp_path)
    tensors = tensors_of(folder)
    gone = "model.layers.0.mlp.experts.7.up_proj.weight"
    write(folder, {name: tensor for name, tensor in tensors.items() if name != gone})
    with pytest.raises(CheckpointError, match=f"1 tensors of Qwen3MoeForCausalLM are missing .*{re.escape(gone)}"):
        load(folder)
    write(folder, tensors | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(9, 72, 72)})
    with pytest.raises(CheckpointError, match=r"no place for: model.layers.0.mlp.experts.gate_up_proj"):
        load(folder)
    write(folder, tensors, num_experts=8)
    with pytest.raises(CheckpointError, match=r"9 tensors|experts\.8\."):
        load(folder)


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("glm4_moe", {"scoring_func": "tanh"}, "scoring_func 'tanh'"),
        ("glm4_moe", {"n_group": 5}, "2 of 5 groups of 12 experts"),
        ("deepseek_v2", {"norm_topk_prob": True}, "topk_method 'greedy' and norm_topk_prob True"),
        ("qwen3_moe", {"num_experts_per_tok": 10}, "10 of 9 eligible experts"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
    ],
)
def test_routers_that_are_not_known_or_do_not_fit_are_refused(
    family: str, changes: dict[str, object], told: str, tmp_path: Path
):
    config = json.loads((make_checkpoint(family, tmp_path) / "config.json").read_text())
    with pytest.raises(CheckpointError, match=told):
        spec_from_config(config | changes)


def test_of_equal_scores_the_lower_numbers_expert_is_chosen():
    weights_TE = route(RoutedSpec(num_experts=6, num_active=2, width=1), torch.zeros(3, 6), None)
    assert (weights_TE > 0).nonzero()[:, 1].tolist() == [0, 1] * 3


def test_a_step_reads_the_experts_that_its_tokens_have(tmp_path: Path):
    spec = spec_from_config(json.loads((make_checkpoint("mixtral", tmp_path) / "config.json").read_text()))
    routed = spec.layers[0].routed
    assert routed is not None
    assert experts_touched(routed, 1) == pytest.approx(2)
    assert experts_touched(routed, 1000) == pytest.approx(5)
    one, many = (
        {work.name: work for work in step_work(spec, [Row(9, n)], WeightFormat("float32"), KVFormat("float32"))}
        for n in (1, 1000)
    )
    assert one["experts.down"].num_bytes == pytest.approx(2 * 4 * 72 * 100)
    assert many["experts.down"].num_bytes == pytest.approx(5 * 4 * 72 * 100)
    assert many["experts.gate_up"].num_ops == 1000 * 2 * 2.0 * 200 * 72
    assert spec.num_active_parameters() == spec.num_parameters() - 3 * 3 * 3 * 72 * 100

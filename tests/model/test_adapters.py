"""LoRA folders: what is read of them, and what is refused, with the tensor and the shapes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from maitred.core.errors import CheckpointError
from maitred.model.adapters import read_adapter
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from tests.model.adapters import random_tensors, write_adapter

RANK = 4
Q = "base_model.model.model.layers.1.self_attn.q_proj.lora_"


def a_spec(architecture: str = "LlamaForCausalLM", **changes: Any) -> DecoderSpec:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return spec_from_config(
        {"architectures": [architecture], "num_key_value_heads": 2, "vocab_size": 50, **sizes, **changes}
    )


def read(folder: Path, spec: DecoderSpec | None = None, **options: Any) -> Any:
    return read_adapter(folder, spec or a_spec(), **{"max_rank": 64} | options)


def a_folder(folder: Path, changed: dict[str, Any] | None = None, **config: Any) -> Path:
    """Of rank 4 on every linear; `changed` tensors are put in place of others, None takes one out."""
    tensors = {name: t for name, t in (random_tensors(a_spec(), RANK) | (changed or {})).items() if t is not None}
    return write_adapter(folder, tensors, rank=RANK, **config)


def test_matrices_lie_where_the_models_own_rows_do(tmp_path: Path):
    tensors = random_tensors(a_spec(), RANK)
    adapter = read(write_adapter(tmp_path, tensors, rank=RANK, lora_alpha=12))
    assert set(adapter.tensors) == {
        f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("qkv", "attention_output", "gate_up", "down")
    }
    q, k, v = adapter.tensors["layers.1.qkv.weight"]
    assert [(part.row, part.a.shape, part.b.shape) for part in (q, k, v)] == [
        (0, (4, 32), (32, 4)),
        (32, (4, 32), (16, 4)),
        (48, (4, 32), (16, 4)),
    ]
    assert [part.row for part in adapter.tensors["layers.0.gate_up.weight"]] == [0, 48]
    assert np.array_equal(q.a, tensors[f"{Q}A.weight"])
    assert np.array_equal(q.b, tensors[f"{Q}B.weight"] * np.float32(3.0))
    assert (adapter.rank, len(adapter.digest)) == (4, 64)
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_a_fused_checkpoints_matrices_are_one_each(tmp_path: Path):
    spec = a_spec("Phi3ForCausalLM")
    adapter = read(write_adapter(tmp_path, random_tensors(spec, RANK), rank=RANK), spec)
    [qkv] = adapter.tensors["layers.0.qkv.weight"]
    [gate_up] = adapter.tensors["layers.0.gate_up.weight"]
    assert (qkv.row, qkv.b.shape, gate_up.row, gate_up.b.shape) == (0, (64, 4), 0, (96, 4))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_a_language_model_within_another_has_its_own_prefix(prefix: str, tmp_path: Path):
    tensors = {
        name.replace("base_model.model.model.", f"base_model.model.{prefix}"): tensor
        for name, tensor in random_tensors(a_spec(), RANK).items()
    }
    config = {
        "target_modules": [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            f"{prefix}layers.0.mlp.down_proj",
            "layers.1.mlp.down_proj",
        ]
    }
    assert len(read(write_adapter(tmp_path, tensors, rank=RANK, **config)).tensors) == 8


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_half_and_double_precision_are_read(dtype: Any, tmp_path: Path):
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors(a_spec(), RANK).items()}
    adapter = read(write_adapter(tmp_path, tensors, rank=RANK))
    assert np.array_equal(adapter.tensors["layers.1.qkv.weight"][0].a, tensors[f"{Q}A.weight"].astype(np.float32))


def test_bfloat16_is_read(tmp_path: Path):
    folder, tensors = a_folder(tmp_path), random_tensors(a_spec(), RANK)
    rounded = {name: torch.from_numpy(tensor).bfloat16() for name, tensor in tensors.items()}
    save_file(rounded, folder / "adapter_model.safetensors")
    assert np.array_equal(read(folder).tensors["layers.1.qkv.weight"][0].a, rounded[f"{Q}A.weight"].float().numpy())


def test_the_digest_covers_both_files(tmp_path: Path):
    first = read(a_folder(tmp_path / "a")).digest
    assert read(a_folder(tmp_path / "b")).digest == first
    assert read(a_folder(tmp_path / "c", lora_alpha=9)).digest != first
    assert read(a_folder(tmp_path / "d", {f"{Q}A.weight": np.ones((RANK, 32), np.float32)})).digest != first


NAN = np.full((RANK, 32), np.nan, np.float32)
EMBEDDING = {
    "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((RANK, 50), np.float32),
    "base_model.model.model.embed_tokens.lora_embedding_B": np.ones((32, RANK), np.float32),
}
HEAD = {
    "base_model.model.lm_head.lora_A.weight": np.ones((RANK, 32), np.float32),
    "base_model.model.lm_head.lora_B.weight": np.ones((50, RANK), np.float32),
}
EXPERT = {
    f"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_{side}.weight": np.ones(shape, np.float32)
    for side, shape in (("A", (RANK, 32)), ("B", (48, RANK)))
}
MAGNITUDE = {"base_model.model.model.layers.1.self_attn.q_proj.lora_magnitude_vector": np.ones(32, np.float32)}
BAD_TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "rank": ({f"{Q}A.weight": np.ones((3, 32), np.float32)}, r"q_proj.lora_A.weight has shape \[3, 32\], .* \[4, 32\]"),
    "width": (
        {f"{Q}A.weight": np.ones((4, 31), np.float32)},
        r"q_proj.lora_A.weight has shape \[4, 31\], .* \[4, 32\]",
    ),
    "rows": ({f"{Q}B.weight": np.ones((64, 4), np.float32)}, r"q_proj.lora_B.weight has shape \[64, 4\], .* \[32, 4\]"),
    "dims": ({f"{Q}B.weight": np.ones(32, np.float32)}, r"q_proj.lora_B.weight has shape \[32\], .* \[32, 4\]"),
    "empty": ({f"{Q}B.weight": np.ones((0,), np.float32)}, r"q_proj.lora_B.weight has shape \[0\], .* \[32, 4\]"),
    "partner": ({f"{Q}B.weight": None}, r"q_proj.lora_A.weight has no partner"),
    "missing": ({f"{Q}A.weight": None, f"{Q}B.weight": None}, r"layers.1.self_attn.q_proj has no tensors"),
    "nan": ({f"{Q}A.weight": NAN}, r"q_proj.lora_A.weight has values that are not finite"),
    "inf": ({f"{Q}B.weight": np.full((32, 4), np.inf, np.float32)}, r"lora_B.weight has values that are not"),
    "huge": ({f"{Q}A.weight": np.full((4, 32), 3.4e38, np.float32)}, r"lora_A.weight has values that are not finite"),
    "integers": ({f"{Q}A.weight": np.ones((4, 32), np.int32)}, r"lora_A.weight is of type I32"),
    "embedding": (EMBEDDING, r"embed_tokens.lora_embedding_A is no lora_A or lora_B of a dense linear"),
    "head": (HEAD, r"lm_head.lora_A.weight is no lora_A or lora_B of a dense linear"),
    "expert": (EXPERT, r"experts.0.up_proj.lora_A.weight is no lora_A"),
    "dora": (MAGNITUDE, r"lora_magnitude_vector is no lora_A"),
    "layer": ({f"{Q.replace('1', '7')}A.weight": np.ones((4, 32), np.float32)}, r"layers.7.* is no lora_A"),
    "bias": ({f"{Q}B.bias": np.ones(32, np.float32)}, r"lora_B.bias is no lora_A"),
}


@pytest.mark.parametrize("fault", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused(fault: str, tmp_path: Path):
    changed, message = BAD_TENSORS[fault]
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    with pytest.raises(CheckpointError, match=message):
        read(a_folder(tmp_path, changed, target_modules=targets))


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "dora": ({"use_dora": True}, "use_dora is true; adapters with that are not served"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \[\"lm_head\"\]"),
    "bias": ({"bias": "all"}, 'bias is "all"'),
    "lora bias": ({"lora_bias": True}, "lora_bias is true"),
    "transposed": ({"fan_in_fan_out": True}, "fan_in_fan_out is true"),
    "kind": ({"peft_type": "IA3"}, 'peft_type is "IA3"; only LORA'),
    "rank": ({"r": 65}, r"rank 65; 1 to 64 are served \(--max-lora-rank\)"),
    "no rank": ({"r": 0}, "rank 0; 1 to 64"),
    "rank pattern": ({"rank_pattern": {"q_proj": 128}}, "rank 128; 1 to 64"),
    "rank type": ({"r": "4"}, 'r is "4"; it must be a number'),
    "rank of true": ({"r": True}, "r is true; it must be a number"),
    "alpha": ({"lora_alpha": None}, "lora_alpha is null; it must be a number"),
    "infinite alpha": ({"lora_alpha": float("inf")}, "lora_alpha is Infinity; it must be a number"),
    "patterns": ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .* it must be an object"),
    "slow pattern": ({"alpha_pattern": {"(a+)+b": 1}}, "could take too long to match"),
    "bad pattern": ({"alpha_pattern": {"(": 1}}, "is no regular expression"),
    "rslora": ({"use_rslora": "yes"}, "use_rslora is .* it must be true or false"),
    "pissa": ({"init_lora_weights": "pissa"}, 'init_lora_weights is "pissa"; it changes the model\'s own weights'),
    "parameters": ({"target_parameters": ["w"]}, "target_parameters"),
    "tokens": ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    "later key": ({"some_new_thing": 3}, "some_new_thing is 3; adapters with that are not served"),
    "no targets": ({"target_modules": None}, "target_modules is null; it must name modules"),
    "targets": ({"target_modules": [1]}, "target_modules is .*it must be a list of names"),
    "layers": ({"layers_to_transform": [0.5]}, "layers_to_transform is"),
    "layers left out": ({"layers_to_transform": [0]}, "layers.1.self_attn.q_proj has tensors, and is not among"),
    "layers' name": ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, 'layers_pattern is "h"; only layers'),
    "unknown target": ({"target_modules": ["q_proj", "c_attn"]}, "target_modules names c_attn; the dense linears of"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names lm_head"),
    "excluded": ({"exclude_modules": ["q_proj"]}, "layers.0.self_attn.q_proj has tensors, and is not among"),
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_what_is_not_served_is_refused_by_its_key(fault: str, tmp_path: Path):
    config, message = BAD_CONFIGS[fault]
    with pytest.raises(CheckpointError, match=message):
        read(a_folder(tmp_path, **config))


def test_training_settings_do_not_matter_and_targets_may_be_a_pattern(tmp_path: Path):
    assert read(a_folder(tmp_path, target_modules=r".*\.(q|k|v|o|gate|up|down)_proj")).rank == RANK

    config = {
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "peft_version": "0.21.2",
        "use_dora": False,
        "loftq_config": {},
        "modules_to_save": None,
    }
    assert read(a_folder(tmp_path, **config)).rank == RANK


@pytest.mark.parametrize("content", ["", "[1]", "{", "[" * 100_000, '{"r": 1, "peft_type": "LORA"}', "\xff"])
def test_a_config_that_is_none_is_refused(content: str, tmp_path: Path):
    folder = a_folder(tmp_path)
    (folder / "adapter_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json"):
        read(folder)


def _header(**entry: Any) -> bytes:
    header = json.dumps({f"{Q}A.weight": {"dtype": "F32", "shape": [4, 32], "data_offsets": [0, 512]} | entry}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(512)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04",
        b"\xff" * 64,
        _header(shape=["4", 32]),
        _header(shape=[-4, -32]),
        _header(shape=[4, 32.0]),
        _header(data_offsets=[-512, 0]),
        _header(data_offsets=[512, 0]),
        _header(data_offsets=[0, 513]),
        _header(data_offsets=[0]),
        _header(shape=[4, 31]),
        _header(dtype=["F32"]),
    ],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path):
    folder = a_folder(tmp_path)
    (folder / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        read(folder)


def test_a_folder_that_lacks_a_file_or_has_a_pickle_or_is_none_is_refused(tmp_path: Path):
    folder = a_folder(tmp_path)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"only as pickle \(adapter_model.bin\)"):
        read(folder)

    folder = a_folder(tmp_path / "a")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match=r"adapter_config.json cannot be read \(No such file"):
        read(folder)
    with pytest.raises(CheckpointError, match="there is no folder"):
        read(tmp_path / "b")

    with pytest.raises(CheckpointError, match="there is no folder xxx"):
        read_adapter(Path("x" * 5000), spec_from_config(open_checkpoint(None).config), max_rank=64)


def test_a_file_larger_than_any_adapter_and_a_pipe_are_not_read(tmp_path: Path):
    folder = a_folder(tmp_path)
    with (folder / "adapter_model.safetensors").open("r+b") as file:
        file.truncate(2**40)  # takes no room
    with pytest.raises(CheckpointError, match="has 1,099,511,627,776 bytes; of an adapter for this model"):
        read(folder)

    folder = a_folder(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="is no regular file"):
        read(folder)


def test_links_are_followed_within_the_folder_and_lead_nowhere_outside(tmp_path: Path):
    outside, allowed = a_folder(tmp_path / "outside"), tmp_path / "allowed"
    inside = a_folder(allowed / "inside")
    assert read(inside, inside=allowed).rank == RANK
    (allowed / "folder").symlink_to(outside)
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for folder in (allowed / "folder", inside):
        assert read(folder).rank == RANK
        with pytest.raises(CheckpointError, match="is outside the folder that adapters may be loaded from"):
            read(folder, inside=allowed)

    folder = a_folder(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (snapshot / name).symlink_to(folder / name)
    assert read(snapshot, inside=tmp_path).rank == RANK


def _append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" ")


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    other.rename(path)


@pytest.mark.parametrize("change", [_append, _replace, Path.unlink])
@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_file_that_changes_under_the_reader_is_refused(name: str, change: Any, tmp_path: Path, monkeypatch: Any):
    folder = a_folder(tmp_path)
    parse = json.loads

    def while_it_is_read(content: Any) -> Any:
        monkeypatch.undo()
        change(folder / name)
        return parse(content)

    monkeypatch.setattr("maitred.model.adapters.json.loads", while_it_is_read)
    with pytest.raises(CheckpointError, match=f"{name} changed while it was read"):
        read(folder)

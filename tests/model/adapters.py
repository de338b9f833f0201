"""LoRA adapters made on the spot, by PEFT itself or tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import linear_sources


def make_peft(model: Any, folder: Path, *, seed: int = 0, **config: Any) -> Any:
    """PEFT's model with a random adapter, which is saved in `folder` too. `config` is LoraConfig's."""
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear"} | config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                std = parameter.shape[1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    adapted.save_pretrained(folder)
    return adapted.eval()


def random_tensors(spec: DecoderSpec, rank: int, *, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """A and B of every linear, named as PEFT names them."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, source in linear_sources(spec).items():
        num_rows, width = source.shape
        prefix = f"base_model.model.model.{name}.lora_"
        tensors[f"{prefix}A.weight"] = random.standard_normal((rank, width), dtype=np.float32) * width**-0.5
        tensors[f"{prefix}B.weight"] = random.standard_normal((num_rows, rank), dtype=np.float32) * rank**-0.5
    return tensors


def write_adapter(folder: Path, tensors: Mapping[str, NDArray[np.float32]], *, rank: int, **config: Any) -> Path:
    """A folder as PEFT saves it; `config` are keys of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({name.split(".lora_")[0].rsplit(".", 1)[1] for name in tensors if ".lora_" in name})
    keys = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(keys))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder

"""Small random heads for the models of `checkpoints.py`, in a folder as `speculators` or SpecForge lays it out, and
models whose checkpoint has an MTP layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.model.checkpoints import make_checkpoint

INTERMEDIATE_SIZE = 44
TAPS = (1, 2, 3)

Tensors = dict[str, Any]


def make_head(
    folder: Path,
    model: Path,
    *,
    layout: str = "speculators",
    family: str = "llama",
    draft_ids: np.ndarray | None = None,
    own_embedding: bool = False,
    layer: dict[str, Any] | None = None,
    tensors: Tensors | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a float32 head for the model in the folder `model`.

    `draft_ids` are the tokens that it can draft, all where None; `layer`, `config` and `tensors` replace what would be
    written, None in `tensors` leaves one out. As the packages do, only SpecForge writes a vocabulary that is no other.
    """
    served = json.loads((model / "config.json").read_text())
    num_drafted = served["vocab_size"] if draft_ids is None else len(draft_ids)
    described = _layer_config(served, family) | (layer or {})
    settings = {"draft_vocab_size": num_drafted, **config}
    weights = _weights(described, settings, layout, own_embedding, seed)
    if draft_ids is not None or layout == "specforge":
        weights |= vocabulary(np.arange(num_drafted) if draft_ids is None else draft_ids, served["vocab_size"])
    weights = {name: value for name, value in (weights | (tensors or {})).items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(value) for name, value in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_CONFIGS[layout](described, settings)))
    return folder


MTP_NAMES = {
    "glm": ("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "qwen": ("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"),
}


def make_mtp_checkpoint(
    family: str, folder: Path, *, layout: str = "glm", predicts: bool = False, **overrides: Any
) -> Path:
    """Write a model whose last layer is an MTP layer. One that `predicts` says what the model does: both then say what
    follows the last token alone, whatever was before."""
    make_checkpoint(family, folder, **overrides)
    config = json.loads((folder / "config.json").read_text())
    layer, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    own, theirs = f"model.layers.{layer}.", f"model.layers.{layer}." if layout == "glm" else "mtp."
    at = theirs + ("" if layout == "glm" else "layers.0.")
    tensors = {name.replace(own, at): each for name, each in load_file(folder / "model.safetensors").items()}
    random = np.random.default_rng(5)
    joins, *norms = MTP_NAMES[layout]
    tensors[f"{theirs}{joins}.weight"] = random.standard_normal((hidden, 2 * hidden), np.float32) / hidden**0.5
    for name in norms:
        tensors[f"{theirs}{name}.weight"] = 1 + 0.2 * random.standard_normal(hidden, np.float32)
    if layout == "glm":
        for name, copy in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
            tensors[f"{theirs}{name}.weight"] = tensors[f"{copy}.weight"].copy()
    if predicts:
        parts = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
        tensors |= {name: np.zeros_like(each) for name, each in tensors.items() if name.endswith(parts)}
        tensors[f"{theirs}{joins}.weight"] = np.eye(hidden, 2 * hidden, dtype=np.float32)
        tensors[f"{theirs}{norms[0]}.weight"] = np.full(hidden, layout == "glm", np.float32)
        tensors[f"{theirs}{norms[2]}.weight"] = tensors["model.norm.weight"]
    config |= {"num_hidden_layers": layer, "num_nextn_predict_layers": 1}
    if types := config.get("layer_types"):
        config["layer_types"] = types[:layer]
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def vocabulary(draft_ids: np.ndarray, num_tokens: int) -> Tensors:
    """`d2t` says how much more a token's id is in the model, `t2d` which of the model's tokens are there."""
    marks = np.zeros(num_tokens, dtype=np.bool_)
    marks[draft_ids] = True
    return {"d2t": (draft_ids - np.arange(len(draft_ids))).astype(np.int64), "t2d": marks}


def _layer_config(served: dict[str, Any], family: str) -> dict[str, Any]:
    keys = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    head_dim = served.get("head_dim") or served["hidden_size"] // served["num_attention_heads"]
    return {key: served[key] for key in keys} | {
        "model_type": family,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }


def _speculators_config(layer: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    settings = {"eagle_aux_hidden_state_layer_ids": list(TAPS), **settings}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": None},
        },
        "transformer_layer_config": layer,
        **settings,
    }


def _specforge_config(layer: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}}
    return {"architectures": ["LlamaForCausalLMEagle3"], "tie_word_embeddings": False} | layer | taps | settings


_CONFIGS = {"speculators": _speculators_config, "specforge": _specforge_config}


def _weights(layer: dict[str, Any], settings: dict[str, Any], layout: str, own_embedding: bool, seed: int) -> Tensors:
    """Large enough that norms and positions all matter."""
    hidden, inner, head_dim = layer["hidden_size"], layer["intermediate_size"], layer["head_dim"]
    q, kv = layer["num_attention_heads"] * head_dim, layer["num_key_value_heads"] * head_dim
    at = "layers.0." if layout == "speculators" else "midlayer."
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(TAPS) * hidden),
        f"{at}hidden_norm.weight": (hidden,),
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}self_attn.q_proj.weight": (q, 2 * hidden),
        f"{at}self_attn.k_proj.weight": (kv, 2 * hidden),
        f"{at}self_attn.v_proj.weight": (kv, 2 * hidden),
        f"{at}self_attn.o_proj.weight": (hidden, q),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (settings["draft_vocab_size"], hidden),
    }
    if layer.get("attention_bias"):
        widths = {"q": q, "k": kv, "v": kv, "o": hidden}
        shapes |= {f"{at}self_attn.{name}_proj.bias": (width,) for name, width in widths.items()}
    if layer.get("mlp_bias"):
        widths = {"gate": inner, "up": inner, "down": hidden}
        shapes |= {f"{at}mlp.{name}_proj.bias": (width,) for name, width in widths.items()}
    if layer["model_type"] == "qwen3":
        shapes |= {f"{at}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if settings.get("norm_before_fc"):
        shapes["input_norm.weight"] = (len(TAPS) * hidden,)
    if settings.get("fc_norm"):
        shapes |= {f"fc_norm.{index}.weight": (hidden,) for index in range(len(TAPS))}
    if own_embedding:
        shapes["embed_tokens.weight"] = (layer["vocab_size"], hidden)
    random = np.random.default_rng(seed)
    return {name: _random(random, name, shape) for name, shape in shapes.items()}


def _random(random: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = random.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return noise * np.float32(0.3) if name.endswith("bias") else 1 + np.float32(0.2) * noise
    return noise * np.float32(0.2 if "embed" in name else 1.5 * shape[1] ** -0.5)

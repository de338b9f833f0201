"""Heads: the MTP layer that a model's checkpoint carries, and folders beside the model, with an EAGLE-3 head as the
package `speculators` 0.9 or SpecForge writes it.

Both packages' folders hold one decoder layer and what surrounds it. They differ in the layer's name
(`weight_map.HEAD_LAYERS`), in where config.json describes it, and in how they count the layers of the model whose
output the head reads:

- `speculators` (`speculators_model_type`; the layer under `transformer_layer_config`): after how many layers;
- SpecForge (`LlamaForCausalLMEagle3`; the layer at the top): `eagle_config` names the layer, from 0, so one less.

Where a config does not say, both mean the states after 2, after half, and after all but 3 of the layers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace as struct_replace
from numpy.typing import NDArray

from maitred.core.errors import CheckpointError, ConfigError
from maitred.model.checkpoint import Checkpoint, RawTensor
from maitred.model.families import spec_from_config
from maitred.model.fusions import (
    attention,
    decoder_layer,
    fused,
    linears,
    logits,
    matrix,
    mlp,
    part_of,
    prepare,
    vector,
)
from maitred.model.program import (
    HIDDEN,
    TAKEN,
    TAPS,
    Add,
    Columns,
    Embed,
    Formats,
    Linear,
    Norm,
    Op,
    Part,
    Program,
    Take,
    Weight,
)
from maitred.model.spec import DecoderSpec, HeadSpec
from maitred.model.weight_map import PREFIXES, weight_map

SPECFORGE = "LlamaForCausalLMEagle3"
EMBEDDING = "embed_tokens.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"

Config = Mapping[str, Any]

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_INTEGERS: dict[str, Any] = {"I64": np.int64, "I32": np.int32, "BOOL": np.uint8}
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}


class HeadCheckpoint(Checkpoint):
    """An open head's folder, which offers the served model's embedding as its own where it has none."""

    def __init__(self, folder: Path, served: Checkpoint, name: str) -> None:
        super().__init__(folder, name)
        self._served = served
        self._borrowed = "" if EMBEDDING in self._file_of else embedding_tensor(served)
        model = spec_from_config(served.config)
        self.spec: HeadSpec = head_spec(self.config, model.num_layers)
        _check_beside(self.spec, model, f"the head {self.name} is not for {served.name}")
        self.draft_to_target: NDArray[np.int32] | None = _draft_to_target(self)
        """The served model's id of each token that the head can draft; None where the ids are the same."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint with its tensors."""
        return self

    @property
    def borrowed(self) -> frozenset[str]:
        """Weights that are the served model's: the embedding, where the folder has none."""
        return frozenset({"embedding"} if self._borrowed else ())

    @cached_property
    def identity(self) -> str:
        own = super().identity
        return hashlib.sha256((own + self._served.identity).encode()).hexdigest() if self._borrowed else own

    def tensor_names(self) -> tuple[str, ...]:
        return (*super().tensor_names(), *([EMBEDDING] if self._borrowed else []))

    def tensor(self, name: str) -> RawTensor:
        return self._served.tensor(self._borrowed) if self._borrows(name) else super().tensor(name)

    def dtype_of(self, name: str) -> str:
        return self._served.dtype_of(self._borrowed) if self._borrows(name) else super().dtype_of(name)

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._served.shape_of(self._borrowed) if self._borrows(name) else super().shape_of(name)

    def file_of(self, name: str) -> Path:
        return self._served.file_of(self._borrowed) if self._borrows(name) else super().file_of(name)

    def _borrows(self, name: str) -> bool:
        return bool(self._borrowed) and name == EMBEDDING


def open_head(folder: Path, served: Checkpoint, name: str | None = None) -> HeadCheckpoint:
    """Open a head beside the model that it drafts for, which has to stay open as long; `name` is None for the folder's.

    Raises CheckpointError for what is no head, or one that is not supported, and ConfigError, with both numbers, for a
    head of another model.
    """
    return HeadCheckpoint(folder, served, name or folder.resolve().name)


class MtpLayer(NamedTuple):
    """A head among the tensors of the served model's checkpoint, whose embedding and output matrix it has."""

    checkpoint: Checkpoint
    spec: HeadSpec
    draft_to_target: None = None
    borrowed: frozenset[str] = frozenset({"embedding", "output"})


def mtp_layer(checkpoint: Checkpoint) -> MtpLayer | None:
    """Return the MTP layer that a model's checkpoint carries, the first of several; it is like the last layer, with
    attention. Raises CheckpointError where tensors are missing.
    """
    model = spec_from_config(checkpoint.config)
    layer = model.num_layers
    alike = replace(model.layers[model.kv_layers[-1]], mlp=model.layers[-1].mlp)
    decoder = replace(model, layers=(*model.layers, alike))
    spec = HeadSpec(decoder=decoder, taps=(layer,), num_embeddings=model.vocab_size, layer=layer)
    return MtpLayer(checkpoint, spec) if weight_map(spec, checkpoint.tensor_names()) else None


def is_head(config: Config) -> bool:
    """Return whether this is the config.json of a head, supported or not, and not of a draft model."""
    names = config.get("architectures") or []
    return "speculators_model_type" in config or any("eagle" in str(name).lower() for name in names)


def head_spec(config: Config, num_layers: int) -> HeadSpec:
    """Return the head that config.json describes, beside a model of `num_layers` layers.

    Raises CheckpointError, naming what is not supported.
    """
    try:
        return _describe(config, num_layers)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"config.json does not describe a head: a value has the wrong type or is missing "
            f"({type(error).__name__}: {error})"
        ) from error


def _describe(config: Config, num_layers: int) -> HeadSpec:
    layer = _layer_config(config)
    _check_supported(config, layer)
    num_embeddings, num_drafted = layer.get("vocab_size"), config.get("draft_vocab_size")
    decoder = spec_from_config(
        {
            **layer,
            "num_hidden_layers": 1,
            "vocab_size": num_drafted if num_embeddings and num_drafted else num_embeddings,
            "tie_word_embeddings": False,  # it has an output of its own, whatever the model's is
        }
    )
    return HeadSpec(
        decoder=replace(decoder, architecture=_name_of(config)),
        taps=_taps(config, num_layers),
        num_embeddings=int(layer["vocab_size"]),
        norms_taps=bool(config.get("norm_before_fc")),
        norms_each_tap=bool(config.get("fc_norm")),
        norms_residual=bool(config.get("norm_before_residual")),
        norms_state=bool(config.get("norm_output")),
    )


def _name_of(config: Config) -> str:
    names = config.get("architectures") or [config.get("speculators_model_type")]
    return str(names[0])


def _layer_config(config: Config) -> dict[str, Any]:
    """The layer, as config.json of a model describes its layers."""
    kind = config.get("speculators_model_type")
    if kind is None and _name_of(config) == SPECFORGE:
        return {**config, "architectures": ["LlamaForCausalLM"], **_NO_BIASES}
    if kind != "eagle3":
        raise CheckpointError(
            f"heads of kind {kind or _name_of(config)!r} are not supported; the supported ones are 'eagle3' as "
            f"speculators writes it, and {SPECFORGE!r} of SpecForge"
        )
    layer = config.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise CheckpointError(f"the head's config.json has no transformer_layer_config; it has {layer!r}")
    family = layer.get("model_type", "qwen3")  # as the package reads one without
    if family not in _FAMILIES:
        raise CheckpointError(f"the head's layer is one of {family!r}; the supported ones are {', '.join(_FAMILIES)}")
    return {**layer, "architectures": [_FAMILIES[family]]}


def _check_supported(config: Config, layer: Config) -> None:
    """Raises CheckpointError for what such a head may have and is not computed here."""
    own, read = layer.get("hidden_size"), config.get("target_hidden_size")
    num_layers, window = layer.get("num_hidden_layers", 1), layer.get("sliding_window")
    slides = layer.get("use_sliding_window") or "sliding_attention" in (layer.get("layer_types") or ())
    takes_taps = (config.get("eagle_config") or {}).get("use_aux_hidden_state", True)
    reasons = (
        (num_layers != 1, f"it has {num_layers} layers; those of 1 are"),
        (slides, f"its layer sees a sliding window of {window} tokens; those that see all are"),
        (read not in (None, own), f"it reads states of {read} values and has {own} itself; those of one width are"),
        (config.get("norm_before_fc") and config.get("fc_norm"), "it has both norm_before_fc and fc_norm; one is"),
        (not takes_taps, "use_aux_hidden_state is false; those that read several layers are"),
    )
    for holds, reason in reasons:
        if holds:
            raise CheckpointError(f"this head is not supported: {reason}")


def _taps(config: Config, num_layers: int) -> tuple[int, ...]:
    """Return the layers after which taps are taken. Raises CheckpointError for layers that the model does not have."""
    named, indices = config.get(LAYER_IDS), (config.get("eagle_config") or {}).get(LAYER_IDS)
    if named is None and indices is not None:
        named = [index + 1 for index in indices]
    taps = (2, num_layers // 2, num_layers - 3) if named is None else tuple(named)
    if not taps or not all(type(tap) is int and 0 <= tap <= num_layers for tap in taps) or len({*taps}) != len(taps):
        where = f"{LAYER_IDS} is left out" if named is None else f"{LAYER_IDS} is {named}"
        raise CheckpointError(
            f"the head reads the model after layers {', '.join(map(str, taps))} ({where}), and they must be different "
            f"ones of a model of {num_layers} layers"
        )
    return taps


def _check_beside(spec: HeadSpec, model: DecoderSpec, told: str) -> None:
    """Raises ConfigError where it was made for another model; its keys and values lie in a layer of the model's."""
    own = spec.decoder
    sizes = (
        ("reads", "a vocabulary of {:,} tokens", spec.num_embeddings, model.vocab_size),
        ("reads", "states of {} values", own.hidden_size, model.hidden_size),
        ("keeps", "{} heads of keys and values", own.num_kv_heads, model.num_kv_heads),
        ("keeps", "heads of {} values", own.head_dim, model.head_dim),
    )
    for verb, what, mine, others in sizes:
        if mine != others:
            raise ConfigError(f"{told}: it {verb} {what.format(mine)}, and the model has {what.format(others)}")


def embedding_tensor(served: Checkpoint) -> str:
    """Return the embedding's name in a model's checkpoint."""
    names = set(served.tensor_names())
    return next((f"{p}{EMBEDDING}" for p in PREFIXES if f"{p}{EMBEDDING}" in names), f"{PREFIXES[0]}{EMBEDDING}")


def _draft_to_target(head: HeadCheckpoint) -> NDArray[np.int32] | None:
    """`d2t` says by how much each token's id is more in the model. Raises CheckpointError where it cannot be so."""
    num_drafted, num_tokens = head.spec.decoder.vocab_size, head.spec.num_embeddings
    if "d2t" not in head.tensor_names():
        if num_drafted != num_tokens:
            raise CheckpointError(
                f"the head {head.name} drafts {num_drafted:,} of {num_tokens:,} tokens, and has no tensor d2t that "
                f"says which; copy its folder again"
            )
        return None
    ids = _integers(head, "d2t", num_drafted) + np.arange(num_drafted)
    if not ((ids >= 0) & (ids < num_tokens)).all():
        raise CheckpointError(
            f"tensor d2t of the head {head.name} leads to token {int(ids.min() if ids.min() < 0 else ids.max())}, and "
            f"the model has {num_tokens:,}; copy its folder again"
        )
    _check_marked(head, ids, num_tokens)
    is_same = num_drafted == num_tokens and bool((ids == np.arange(num_tokens)).all())
    return None if is_same else ids.astype(np.int32)


def _check_marked(head: HeadCheckpoint, ids: NDArray[np.int64], num_tokens: int) -> None:
    """Check that `t2d`, where there is one, marks the tokens that `d2t` leads to; unset vocabularies do not."""
    if "t2d" not in head.tensor_names():
        return
    marked = np.flatnonzero(_integers(head, "t2d", num_tokens))
    num_both = len(np.intersect1d(marked, ids))
    if not num_both == len(marked) == len(ids):
        raise CheckpointError(
            f"the head {head.name} has two vocabularies: t2d marks {len(marked):,} tokens and d2t leads to "
            f"{len(ids):,}, of which {num_both:,} are the same; copy its folder again"
        )


def _integers(head: HeadCheckpoint, name: str, length: int) -> NDArray[np.int64]:
    raw = head.tensor(name)
    if raw.dtype not in _INTEGERS or raw.shape != (length,):
        raise CheckpointError(
            f"tensor {name} of the head {head.name} has shape {list(raw.shape)} of {raw.dtype}, and should have "
            f"[{length}] of {', '.join(_INTEGERS)}"
        )
    return np.frombuffer(raw.data, dtype=_INTEGERS[raw.dtype]).astype(np.int64)


_BOTH = "both"  # token and state, side by side


def compile_head(spec: HeadSpec, formats: Formats, pool_layer: int) -> Program:
    """Compile the head; its keys and values are those of `pool_layer`. Raises KernelError without a kernel."""
    lowered = _lowered_mtp(spec, formats) if spec.layer else _lowered(spec, formats, pool_layer)
    return struct_replace(fused(spec.decoder, formats, list(lowered)), head=spec)


def _lowered_mtp(spec: HeadSpec, formats: Formats) -> Iterator[Op]:
    """In the order of the tensors [embedding, state] that GLM-4.5, DeepSeek and Qwen have."""
    decoder, hidden = spec.decoder, spec.decoder.hidden_size
    embedding = matrix("embedding", spec.num_embeddings, hidden, formats.of("embedding.weight", 0))
    yield Columns(TAPS, HIDDEN, hidden, norm=vector("norm", hidden))
    yield Embed("embedded", embedding, decoder.embedding_scale)
    yield Columns("embedded", _BOTH, hidden, norm=vector("token_norm", hidden))
    yield Columns(HIDDEN, _BOTH, hidden, first=hidden, norm=vector("state_norm", hidden))
    yield from linears(_BOTH, [(HIDDEN, 0, hidden)], "fc", 2 * hidden, formats, False)
    yield from decoder_layer(decoder, formats, spec.layer)
    yield Take(HIDDEN, TAKEN)
    yield Columns(TAKEN, TAKEN, hidden, norm=vector("head_norm", hidden))
    yield from logits(decoder, formats, TAKEN)


def _lowered(spec: HeadSpec, formats: Formats, pool_layer: int) -> Iterator[Op]:
    decoder, hidden = spec.decoder, spec.decoder.hidden_size
    yield from _state(spec, formats)
    yield Embed("embedded", matrix("embedding", spec.num_embeddings, hidden, formats.head), 1.0)
    yield Columns("embedded", _BOTH, hidden, norm=vector("layers.0.attention_norm", hidden))
    norm = vector("layers.0.hidden_norm", hidden)
    if spec.norms_residual:
        yield Columns(HIDDEN, HIDDEN, hidden, norm=norm)
    yield Columns(HIDDEN, _BOTH, hidden, first=hidden, norm=None if spec.norms_residual else norm)
    yield from attention(decoder, formats, 0, _BOTH, 2 * hidden, pool_layer)
    yield Add("part", HIDDEN, 1.0)
    yield from part_of(decoder, "layers.0.mlp", mlp(decoder, formats, "layers.0.", decoder.intermediate_size))
    yield Take(HIDDEN, TAKEN)
    if spec.norms_state:
        yield Columns(TAKEN, TAKEN, hidden, norm=vector("norm", hidden))
    else:
        yield Norm(TAKEN, "normed", vector("norm", hidden))
    yield from logits(decoder, formats, TAKEN if spec.norms_state else "normed")


def _state(spec: HeadSpec, formats: Formats) -> Iterator[Op]:
    """HIDDEN, of the taps."""
    hidden, width = spec.decoder.hidden_size, spec.tap_width
    if spec.norms_each_tap:
        for index in range(len(spec.taps)):
            first = index * hidden
            yield Columns(TAPS, TAPS, hidden, first, first, vector(f"tap_norms.{index}", hidden))
    if spec.norms_taps:
        yield Norm(TAPS, TAPS, vector("taps_norm", width))
    yield prepare(TAPS, width, formats.linears)
    part = Part(parameter="fc.weight", first=0, rows=hidden)
    yield Linear("operand", HIDDEN, Weight(name="fc", parts=(part,), width=width, format=formats.linears))

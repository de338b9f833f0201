"""Worlds for the native executor's tests: the weights of a torch decoder in the native library."""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.executor.native import NativeExecutor
from maitred.executor.native_plan import NativePlan, plan_native_executor
from maitred.executor.native_program import NativeProgram
from maitred.model.checkpoint import RawTensor, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.spec import DecoderSpec
from maitred.model.weight_map import WeightSource, weight_map
from tests.kernels.test_block_formats import stored_rows


class Narrow:
    """A program whose ranks share so many bytes for adapters (`native_lora.AdapterRunner`)."""

    def __init__(self, runner: NativeProgram, num_bytes: int) -> None:
        assert runner.adapter_memory is not None
        self.adapted, self.adapter_memory = runner.adapted, runner.adapter_memory[:num_bytes]
        self.load_adapter, self.unload_adapter = runner.load_adapter, runner.unload_adapter
        self.release_adapter_memory = runner.release_adapter_memory


BLOCK_TYPES = {
    "blocks of 32": ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_Z", "Q8_Z", "Q8_W"),
    "super-blocks": ("Q4_K", "Q5_K", "Q6_K", "F16", "BF16", "F8_128"),
}
_PARTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head")


class DecoderCheckpoint:
    """The parameters of a `TorchDecoder`, as a checkpoint with stacked matrices has them; with `types`, as a GGUF file
    of such tensors: in the first layer q, k and v are alike, and so are gate and up, in all others none are."""

    name, path, identity, dtype = "in memory", "in memory", "", "float32"

    def __init__(self, decoder: Any, types: tuple[str, ...] = ()) -> None:
        self.gguf = "in memory" if types else None
        self.has_formats = bool(types)
        self._types, self.expanded = types, ""
        self.spec: DecoderSpec = replace(decoder.spec, fused_weights=not (types or decoder.spec.output_gate))
        self._parameters = dict(decoder.named_parameters())
        self._sources: dict[str, list[WeightSource]] = {}
        for source in weight_map(self.spec, Everything()):
            self._sources.setdefault(source.tensor, []).append(source)

    def tensor_names(self) -> tuple[str, ...]:
        return tuple(self._sources)

    def tensor(self, name: str) -> RawTensor:
        source: WeightSource = self._sources[name][0]
        values = np.zeros(source.shape, np.float32)
        for each in self._sources[name]:  # of a tensor that several parameters have rows of
            rows = self._parameters[each.parameter].detach().float().numpy() - each.offset
            for piece in each.pieces():
                each.take(values, piece)[...] = rows[piece.row : piece.row + piece.num_rows]
        stored = stored_rows(kind := self.dtype_of(name), values, seed=zlib.crc32(name.encode()))
        return RawTensor(kind, source.shape, memoryview(stored).cast("B"))

    def dtype_of(self, name: str) -> str:
        if not self._types or len(self._sources[name][0].shape) == 1 or name.endswith(".gate.weight"):
            return "F32"
        part = next(i for i, part in enumerate(_PARTS) if part in name)
        alike = (0, 0, 0, 1, 2, 2, 3, 4, 4) if ".layers.0." in name else range(9)
        return self._types[alike[part] % len(self._types)]

    def shape_of(self, name: str) -> tuple[int, ...]:
        return self._sources[name][0].shape

    def order_of(self, name: str) -> str:
        return ""

    def check_unchanged(self) -> None: ...

    def file_of(self, name: str) -> Path:
        return Path("in memory")


class Everything:
    """A set of names that has them all, and tells none."""

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


def make_native(
    decoder: Any,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_host_blocks: int = 0,
    num_state_slots: int = 0,
    **changes: Any,
) -> NativeExecutor:
    """`changes` are fields of ModelConfig, SchedulerConfig and NativeExecutor; `blocks` names types of a GGUF file."""
    checkpoint: Any = DecoderCheckpoint(decoder, BLOCK_TYPES.get(changes.pop("blocks", ""), ()))
    on_logits, groups = changes.pop("on_logits", None), changes.pop("groups", None)
    plan = native_plan(checkpoint, checkpoint.spec, block_size=block_size, **changes)
    plan, spec = plan.in_groups(groups) if groups is not None else plan, checkpoint.spec
    executor = plan.build(
        num_blocks=num_blocks,
        max_model_len=spec.max_position_embeddings,
        num_host_blocks=num_host_blocks,
        num_state_slots=num_state_slots,
    )
    executor.on_logits = on_logits
    return executor


def load_native(
    folder: Path, *, num_blocks: int, max_model_len: int = 128, num_state_slots: int = 0, **changes: Any
) -> NativeExecutor:
    with open_checkpoint(str(folder)) as checkpoint:
        plan = native_plan(checkpoint, spec_from_config(checkpoint.config), **changes)
        return plan.build(num_blocks=num_blocks, max_model_len=max_model_len, num_state_slots=num_state_slots)


def native_plan(
    checkpoint: Any,
    spec: DecoderSpec,
    *,
    block_size: int = 4,
    isa: str | None = None,
    max_tokens: int | None = None,
    max_logits: int | None = None,
    taps: tuple[int, ...] = (),
    num_drafts: int = 0,
    **model: Any,
) -> NativePlan:
    """A plan in float32 on one thread, unless told otherwise."""
    config = ModelConfig(**{"dtype": "float32", "num_threads": 1, "weight_cache": "off"} | model)
    plan = plan_native_executor(
        config,
        checkpoint,
        spec,
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(),
        num_threads=1,
        taps=taps,
        num_drafts=num_drafts,
    )
    asked = {"isa": isa, "max_tokens": max_tokens, "max_logits": max_logits}
    return replace(plan, **{name: value for name, value in asked.items() if value is not None})


def nan_embedding(decoder: Any, token_id: int) -> Any:
    """The decoder, with NaN for the embedding of one token."""
    with torch.no_grad():
        decoder.embedding.weight[token_id] = float("nan")
    return decoder

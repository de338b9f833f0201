"""Devices by their datasheet, models by their shape, and the roofline cost model that follows from the two.

Peaks are for dense bfloat16 unless a row says otherwise. `efficiency` is how much of a peak serving gets in practice:
0.5 to 0.6 of arithmetic and 0.7 to 0.8 of bandwidth are what published serving kernels get; they are assumptions, not
measurements, and `maitred profile` replaces them on a machine one has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from maitred.config import DEFAULT_TOKEN_BUDGET
from maitred.core.cost_model import CostModel, native_token_budget
from maitred.core.errors import ConfigError
from maitred.model.spec import DecoderSpec

T = TypeVar("T")
GB, TFLOPS = 1e9, 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder, as far as its cost depends on it."""

    name: str
    num_parameters: float
    """All weights that a step reads, at large batch every expert of a mixture."""
    num_active_parameters: float
    """Weights that multiply one token; the embedding table, which is only looked up, is not among them."""
    num_layers: int
    q_width: int
    """Query heads x head size."""
    kv_width: int
    """Key/value heads x head size."""
    context: int
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        return 2 * self.num_layers * self.kv_width * self.bytes_per_kv


def shape_of_decoder(name: str, spec: DecoderSpec, bytes_per_value: float = 2.0) -> ModelShape:
    parameters = spec.num_parameters()
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    return ModelShape(
        name=name,
        num_parameters=parameters,
        num_active_parameters=parameters - looked_up,
        num_layers=spec.num_layers,
        q_width=spec.q_width,
        kv_width=spec.kv_width,
        context=spec.max_position_embeddings,
        bytes_per_weight=bytes_per_value,
        bytes_per_kv=bytes_per_value,
    )


def _dense(name: str, billions: float, layers: int, q_width: int, kv_width: int, context: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_parameters=billions * 1e9,
        num_active_parameters=billions * 1e9,
        num_layers=layers,
        q_width=q_width,
        kv_width=kv_width,
        context=context,
    )


# From the models' config.json on the Hugging Face hub.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("llama-3.2-1b", 1.24, 16, 2048, 512, 131_072),
        _dense("llama-3.1-8b", 8.03, 32, 4096, 1024, 131_072),
        _dense("llama-3.1-70b", 70.6, 80, 8192, 1024, 131_072),
        _dense("qwen3-0.6b", 0.6, 28, 2048, 1024, 40_960),
        _dense("qwen3-32b", 32.8, 64, 8192, 1024, 40_960),
        ModelShape(
            name="mixtral-8x7b",
            num_parameters=46.7e9,
            num_active_parameters=12.9e9,
            num_layers=32,
            q_width=4096,
            kv_width=1024,
            context=32_768,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one host."""

    name: str
    peak_flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second of the memory that holds weights and KV."""
    memory_bytes: float
    source: str
    step_s: float = 0.3e-3
    """Host and launch overhead of a step, with graphs captured."""
    row_s: float = 3e-6
    """Host work for each row: the scheduler's and the sampler's."""
    compute_efficiency: float = 0.55
    bandwidth_efficiency: float = 0.75
    token_budget: int = DEFAULT_TOKEN_BUDGET
    """Tokens of a step unless another number is given."""


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            peak_flops=312 * TFLOPS,
            bandwidth=2039 * GB,
            memory_bytes=80 * GB,
            source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM, 2021",
        ),
        Device(
            name="h100",
            peak_flops=989 * TFLOPS,
            bandwidth=3350 * GB,
            memory_bytes=80 * GB,
            source="NVIDIA H100 Tensor Core GPU datasheet, SXM5 (1,979 TFLOPS with sparsity), 2023",
        ),
        Device(
            name="h200",
            peak_flops=989 * TFLOPS,
            bandwidth=4800 * GB,
            memory_bytes=141 * GB,
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM, 2023",
        ),
        Device(
            name="mi300x",
            peak_flops=1307 * TFLOPS,
            bandwidth=5300 * GB,
            memory_bytes=192 * GB,
            source="AMD Instinct MI300X data sheet, 2023",
            compute_efficiency=0.45,
        ),
        Device(
            name="tpu-v5e",
            peak_flops=197 * TFLOPS,
            bandwidth=819 * GB,
            memory_bytes=16 * GB,
            source="Google Cloud TPU v5e documentation, one chip, 2023",
        ),
        Device(
            name="cpu",
            peak_flops=0.15 * TFLOPS,
            bandwidth=20 * GB,
            memory_bytes=16 * GB,
            source="one AVX-512 server core: 2.4 GHz x 64 float32 operations a cycle, two channels' share of DDR4-3200",
            step_s=1.5e-3,
            row_s=10e-6,
            compute_efficiency=0.5,
            token_budget=native_token_budget(1),
        ),
    )
}


def roofline(device: Device, model: ModelShape) -> CostModel:
    """Seconds from bytes and operations: 2 operations a weight and token, 4 a query-key pair and value of q_width."""
    flops = device.peak_flops * device.compute_efficiency
    bandwidth = device.bandwidth * device.bandwidth_efficiency
    token_s = 2 * model.num_active_parameters / flops
    return CostModel(
        fixed_s=device.step_s,
        row_s=device.row_s,
        weights_s=model.weight_bytes / bandwidth,
        prefill_token_s=token_s,
        decode_token_s=token_s,
        context_token_s=model.kv_bytes_per_token / bandwidth,
        prefill_attention_s=4 * model.num_layers * model.q_width / flops,
    )


def num_kv_blocks(device: Device, model: ModelShape, block_size: int) -> int:
    """Return the blocks that fit beside the weights and a tenth for activations. Raises ConfigError for no room."""
    free = 0.9 * device.memory_bytes - model.weight_bytes
    blocks = int(free / (model.kv_bytes_per_token * block_size))
    if blocks < 1:
        raise ConfigError(
            f"{model.name} has {model.weight_bytes / GB:.0f} GB of weights, {device.name} has "
            f"{device.memory_bytes / GB:.0f} GB; choose another of {', '.join(DEVICES)}"
        )
    return blocks


def device_named(name: str) -> Device:
    """Raises ConfigError that lists the choices."""
    return _named(name, DEVICES, "--device", "or give the file of a profile (maitred profile -o FILE)")


def model_named(name: str) -> ModelShape:
    """Raises ConfigError that lists the choices."""
    return _named(name, MODELS, "--model", "or give a folder with a config.json")


def _named(name: str, choices: Mapping[str, T], flag: str, otherwise: str) -> T:
    if name in choices:
        return choices[name]
    near = get_close_matches(name.lower(), choices, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(f"{flag} is {name!r}{hint}; choose one of {', '.join(choices)}, {otherwise}")

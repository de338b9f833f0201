"""Devices by their datasheet, models by their shape, and the roofline cost model that follows from the two.

Peaks are for dense bfloat16 unless a row says otherwise. `efficiency` is how much of a peak serving gets in practice:
0.5 to 0.6 of arithmetic and 0.7 to 0.8 of bandwidth are what published serving kernels get; they are assumptions, not
measurements, and `maitred profile` replaces them on a machine one has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from maitred.config import DEFAULT_TOKEN_BUDGET
from maitred.core.cost_model import CostModel, native_token_budget
from maitred.core.errors import ConfigError
from maitred.model.spec import DecoderSpec

T = TypeVar("T")
GB, TFLOPS = 1e9, 1e12
MOST_DEVICES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Shape of a decoder, as far as its cost depends on it."""

    name: str
    num_parameters: float
    """All weights, which a step of many tokens reads."""
    num_active_parameters: float
    """Weights that multiply one token; the embedding table, which is only looked up, is not among them."""
    num_layers: int
    q_width: int
    """Query heads x head size; of latent attention the mean of what meets keys and what comes of it."""
    kv_width: int
    """Key/value heads x head size; of latent attention half of what a layer keeps of a token."""
    context: int
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    expert_parameters: float = 0.0
    """Weights of routed experts, among `num_parameters`."""
    experts: int = 0
    experts_per_token: int = 0
    windowed_layers: int = 0
    window: int = 0
    state_bytes: float = 0.0
    """Of a request in recurrent layers, which are not among `num_layers`."""

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of a token that every layer keeps: one within the window."""
        return 2 * self.num_layers * self.kv_width * self.bytes_per_kv

    @property
    def full_layers(self) -> int:
        return self.num_layers - self.windowed_layers


def shape_of_decoder(name: str, spec: DecoderSpec, bytes_per_value: float = 2.0) -> ModelShape:
    parameters, windows = spec.num_parameters(), [layer.window for layer in spec.layers if layer.window is not None]
    looked_up = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    return ModelShape(
        name=name,
        num_parameters=parameters,
        num_active_parameters=parameters - looked_up,
        num_layers=len(spec.kv_layers),
        q_width=(spec.q_width + spec.attended_width) // 2,
        kv_width=spec.kv_width // 2 if spec.latent else spec.kv_width,
        context=spec.max_position_embeddings,
        bytes_per_weight=bytes_per_value,
        bytes_per_kv=bytes_per_value,
        windowed_layers=len(windows),
        window=max(windows, default=0),
        state_bytes=spec.state_bytes_per_slot,
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


def _routed(
    name: str,
    billions: float,
    active: float,
    layers: int,
    q_width: int,
    kv_width: int,
    context: int,
    experts: tuple[int, int, int, int],
    **more: Any,
) -> ModelShape:
    """`experts`: layers that have some, their number in each, those of a token, and the weights of one."""
    routed_layers, number, per_token, weights = experts
    routed: dict[str, Any] = {"expert_parameters": float(routed_layers * number * weights), "experts": number}
    more |= {"num_active_parameters": active * 1e9, "experts_per_token": per_token, **routed}
    return replace(_dense(name, billions, layers, q_width, kv_width, context), **more)  # fmt: skip


# Shapes are of config.json, totals of the cards, as far as they were at hand: GLM-4.5's stand in the GLM-5 report's
# table 1, Gemma 3 27B's in transformers' conversion script, DeepSeek-V3's and gpt-oss's are defaults of transformers'
# config classes; Qwen3's mixtures and GLM-4.5-Air are not checked against their files, and add up to their names within
# 15%. DeepSeek's queries meet 576 values of a token and get 512 of them.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("llama-3.2-1b", 1.24, 16, 2048, 512, 131_072),
        _dense("llama-3.1-8b", 8.03, 32, 4096, 1024, 131_072),
        _dense("llama-3.1-70b", 70.6, 80, 8192, 1024, 131_072),
        _dense("qwen3-0.6b", 0.6, 28, 2048, 1024, 40_960),
        _dense("qwen3-32b", 32.8, 64, 8192, 1024, 40_960),
        replace(_dense("gemma-3-27b", 27.0, 62, 4096, 2048, 131_072), windowed_layers=52, window=1024),
        _routed("mixtral-8x7b", 46.7, 12.9, 32, 4096, 1024, 32_768, (32, 8, 2, 3 * 4096 * 14_336)),
        _routed("qwen3-30b-a3b", 30.5, 3.3, 48, 4096, 512, 40_960, (48, 128, 8, 3 * 2048 * 768)),
        _routed("qwen3-235b-a22b", 235.0, 22.0, 94, 8192, 512, 40_960, (94, 128, 8, 3 * 4096 * 1536)),
        _routed("glm-4.5-air", 106.0, 12.0, 46, 12_288, 1024, 131_072, (45, 128, 8, 3 * 4096 * 1408)),
        _routed("glm-4.5", 355.0, 32.0, 92, 12_288, 1024, 131_072, (89, 160, 8, 3 * 5120 * 1536)),
        _routed(
            "gpt-oss-120b", 116.8, 5.1, 36, 4096, 512, 131_072, (36, 128, 4, 3 * 2880 * 2880),
            windowed_layers=18, window=128, bytes_per_weight=4.25 / 8,
        ),
        _routed(
            "deepseek-v3", 671.0, 37.0, 61, 128 * (576 + 512) // 2, 576 // 2, 163_840, (58, 256, 8, 3 * 7168 * 2048),
            bytes_per_weight=1.0,
        ),
    )
}  # fmt: skip


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
        row_s=device.row_s + 2 * model.state_bytes / bandwidth,  # read and written
        weights_s=(model.num_parameters - model.expert_parameters) * model.bytes_per_weight / bandwidth,
        experts_s=model.expert_parameters * model.bytes_per_weight / bandwidth,
        experts_missed=1 - model.experts_per_token / model.experts if model.experts else 0.0,
        prefill_token_s=token_s,
        decode_token_s=token_s,
        context_token_s=model.kv_bytes_per_token / bandwidth * model.full_layers / model.num_layers,
        prefill_attention_s=4 * model.full_layers * model.q_width / flops,
        window=model.window,
        window_token_s=model.kv_bytes_per_token / bandwidth * model.windowed_layers / model.num_layers,
        window_attention_s=4 * model.windowed_layers * model.q_width / flops,
    )


def num_kv_blocks(
    device: Device, model: ModelShape, block_size: int, max_num_seqs: int = 0, num_state_slots: int = 0
) -> int:
    """Return the blocks that fit beside the weights and a tenth for activations, where layers with a window keep that
    of `max_num_seqs` requests at most. Raises ConfigError for no room."""
    free = 0.9 * device.memory_bytes - model.weight_bytes - num_state_slots * model.state_bytes
    per_token = model.kv_bytes_per_token
    windowed = max_num_seqs * model.window * per_token * model.windowed_layers / model.num_layers
    if 0 < windowed < free * model.windowed_layers / model.num_layers:  # so much is kept, whatever contexts are
        free, per_token = free - windowed, per_token * model.full_layers / model.num_layers
    blocks = int(free / (per_token * block_size))
    if blocks < 1:
        raise ConfigError(
            f"{model.name} has {model.weight_bytes / GB:.0f} GB of weights, {device.name} has "
            f"{device.memory_bytes / GB:.0f} GB; choose another of {', '.join(DEVICES)}"
        )
    return blocks


def device_named(name: str) -> Device:
    """A device, or N of them side by side as NAMExN, whose shares of a step end together and meet for nothing: a bound.
    Raises ConfigError that lists the choices."""
    one, _, number = name.rpartition("x")
    if one in DEVICES and number.isdigit() and 1 <= int(number) <= MOST_DEVICES:
        each, count = DEVICES[one], int(number)
        together = {key: count * getattr(each, key) for key in ("peak_flops", "bandwidth", "memory_bytes")}
        return replace(each, name=name, **together)
    return _named(
        name, DEVICES, "--device", "several as h100x8, or give the file of a profile (maitred profile -o FILE)"
    )


def model_named(name: str) -> ModelShape:
    """Raises ConfigError that lists the choices."""
    return _named(name, MODELS, "--model", "or give a folder with a config.json")


def _named(name: str, choices: Mapping[str, T], flag: str, otherwise: str) -> T:
    if name in choices:
        return choices[name]
    near = get_close_matches(name.lower(), choices, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ConfigError(f"{flag} is {name!r}{hint}; choose one of {', '.join(choices)}, {otherwise}")

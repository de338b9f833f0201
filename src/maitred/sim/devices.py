"""Devices by their datasheet, models by their shape, and the roofline cost model that follows from the two.

Peaks are for dense bfloat16 unless a row says otherwise. `efficiency` is how much of a peak serving gets in practice:
0.5 to 0.6 of arithmetic and 0.7 to 0.8 of bandwidth (memory's and links') are what published serving kernels get; they
are assumptions, not measurements, and `maitred profile` replaces them on a machine one has.

Several devices are one worker in two ways. Tensor parallel: each has a part of every matrix, and two all-reduces a
layer move 2 (N - 1) / N of a token's hidden values through each device's link; keys and values are kept more than once
where there are more devices than key heads. Expert parallel: each has a part of the experts, all of the other weights,
and the attention of its own requests (data parallel); two all-to-alls a routed layer move a token to its experts and
back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, TypeVar

from maitred.config import DEFAULT_TOKEN_BUDGET, CacheConfig
from maitred.core.cost_model import CostModel, native_token_budget
from maitred.core.errors import ConfigError
from maitred.kv.pages import KVGroups, groups_of
from maitred.model.spec import DecoderSpec
from maitred.sim.profile import EdgeModel

T = TypeVar("T")
GB, TFLOPS = 1e9, 1e12
MOST_DEVICES = 1024


class DoesNotFit(ConfigError):
    """The model's weights leave no room on the device."""


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
    hidden: int
    kv_heads: int
    """Heads of keys and values, over which devices share them; latent attention has one."""
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0
    expert_parameters: float = 0.0
    """Weights of routed experts, among `num_parameters`."""
    experts: int = 0
    experts_per_token: int = 0
    routed_layers: int = 0
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

    @property
    def groups(self) -> KVGroups | None:
        """Groups of layers, where some have a window."""
        return groups_of([self.window] * self.windowed_layers + [None] * self.full_layers, self.context)


def shape_of_decoder(name: str, spec: DecoderSpec, bytes_per_value: float = 2.0) -> ModelShape:
    parameters, windows = spec.num_parameters(), [layer.window for layer in spec.layers if layer.window is not None]
    looked_up = spec.vocab_size * (
        spec.num_layers * spec.per_layer_width + (not spec.tied_embeddings) * spec.hidden_size
    )
    routed = [layer.routed for layer in spec.layers if layer.routed is not None]
    return ModelShape(
        name=name,
        num_parameters=parameters,
        num_active_parameters=spec.num_active_parameters() - looked_up,
        num_layers=len(spec.kv_layers),
        q_width=(spec.q_width + spec.attended_width) // 2,
        kv_width=spec.kv_values_per_token() // (2 * len(spec.kv_layers)),
        context=spec.max_position_embeddings,
        hidden=spec.hidden_size,
        kv_heads=spec.num_kv_heads,
        bytes_per_weight=bytes_per_value,
        bytes_per_kv=bytes_per_value,
        expert_parameters=3.0 * spec.hidden_size * sum(each.num_experts * each.width for each in routed),
        experts=max((each.num_experts for each in routed), default=0),
        experts_per_token=max((each.num_active for each in routed), default=0),
        routed_layers=len(routed),
        windowed_layers=len(windows),
        window=max(windows, default=0),
        state_bytes=spec.state_bytes_per_slot,
    )


def _dense(
    name: str, billions: float, layers: int, hidden: int, q_width: int, kv: tuple[int, int], context: int
) -> ModelShape:
    """`kv`: heads of keys and values, and the values of one."""
    return ModelShape(
        name=name,
        num_parameters=billions * 1e9,
        num_active_parameters=billions * 1e9,
        num_layers=layers,
        q_width=q_width,
        kv_width=kv[0] * kv[1],
        context=context,
        hidden=hidden,
        kv_heads=kv[0],
    )


def _routed(
    name: str,
    billions: float,
    active: float,
    layers: int,
    hidden: int,
    q_width: int,
    kv: tuple[int, int],
    context: int,
    experts: tuple[int, int, int, int],
    **more: Any,
) -> ModelShape:
    """`experts`: layers that have some, their number in each, those of a token, and the width of one."""
    routed_layers, number, per_token, width = experts
    more |= {
        "num_active_parameters": active * 1e9,
        "expert_parameters": float(routed_layers * number * 3 * hidden * width),
        "experts": number,
        "experts_per_token": per_token,
        "routed_layers": routed_layers,
    }
    return replace(_dense(name, billions, layers, hidden, q_width, kv, context), **more)


# Shapes are of config.json, totals of the cards, as far as they were at hand: GLM-4.5's stand in the GLM-5 report's
# table 1, Gemma 3 27B's in transformers' conversion script, DeepSeek-V3's and gpt-oss's are defaults of transformers'
# config classes; Qwen3's mixtures and GLM-4.5-Air are not checked against their files, and add up to their names within
# 15%. DeepSeek's queries meet 576 values of a token and get 512 of them.
MODELS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        _dense("llama-3.2-1b", 1.24, 16, 2048, 2048, (8, 64), 131_072),
        _dense("llama-3.1-8b", 8.03, 32, 4096, 4096, (8, 128), 131_072),
        _dense("llama-3.1-70b", 70.6, 80, 8192, 8192, (8, 128), 131_072),
        _dense("qwen3-0.6b", 0.6, 28, 1024, 2048, (8, 128), 40_960),
        _dense("qwen3-32b", 32.8, 64, 5120, 8192, (8, 128), 40_960),
        replace(_dense("gemma-3-27b", 27.0, 62, 5376, 4096, (16, 128), 131_072), windowed_layers=52, window=1024),
        _routed("mixtral-8x7b", 46.7, 12.9, 32, 4096, 4096, (8, 128), 32_768, (32, 8, 2, 14_336)),
        _routed("qwen3-30b-a3b", 30.5, 3.3, 48, 2048, 4096, (4, 128), 40_960, (48, 128, 8, 768)),
        _routed("qwen3-235b-a22b", 235.0, 22.0, 94, 4096, 8192, (4, 128), 40_960, (94, 128, 8, 1536)),
        _routed("glm-4.5-air", 106.0, 12.0, 46, 4096, 12_288, (8, 128), 131_072, (45, 128, 8, 1408)),
        _routed("glm-4.5", 355.0, 32.0, 92, 5120, 12_288, (8, 128), 131_072, (89, 160, 8, 1536)),
        _routed(
            "gpt-oss-120b", 116.8, 5.1, 36, 2880, 4096, (8, 64), 131_072, (36, 128, 4, 2880),
            windowed_layers=18, window=128, bytes_per_weight=4.25 / 8,
        ),
        _routed(
            "deepseek-v3", 671.0, 37.0, 61, 7168, 128 * (576 + 512) // 2, (1, 576 // 2), 163_840, (58, 256, 8, 2048),
            bytes_per_weight=1.0,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one host; with `count` several of them as one worker."""

    name: str
    peak_flops: float
    """Operations per second."""
    bandwidth: float
    """Bytes per second of the memory that holds weights and KV."""
    memory_bytes: float
    source: str
    link_bandwidth: float
    """Bytes per second from one device to its neighbours, each way."""
    idle_w: float
    """Watts while it waits, and `power_w` in a step, which is the most it may draw."""
    power_w: float
    hop_s: float = 6e-6
    """Launch and latency of a collective; 4 to 6 us are measured for 2 to 8 H100 (sgl-project/sglang pull 2904)."""
    count: int = 1
    splits_experts: bool = False
    step_s: float = 0.3e-3
    """Host and launch overhead of a step, with graphs captured."""
    row_s: float = 3e-6
    """Host work for each row: the scheduler's and the sampler's."""
    compute_efficiency: float = 0.55
    bandwidth_efficiency: float = 0.75
    token_budget: int = DEFAULT_TOKEN_BUDGET
    """Tokens of a step unless another number is given."""


# Idle power: 80 W is measured on an H200 (Alice GPU energy benchmark, 2026); the others' are 11 to 15% of their most,
# as an assumption. The TPU's power is published nowhere and assumed, as are the figures of the processor's core.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device(
            name="a100",
            peak_flops=312 * TFLOPS,
            bandwidth=2039 * GB,
            memory_bytes=80 * GB,
            link_bandwidth=300 * GB,
            idle_w=55,
            power_w=400,
            source="NVIDIA A100 Tensor Core GPU datasheet, 80 GB SXM (600 GB/s NVLink both ways), 2021",
        ),
        Device(
            name="h100",
            peak_flops=989 * TFLOPS,
            bandwidth=3350 * GB,
            memory_bytes=80 * GB,
            link_bandwidth=450 * GB,
            idle_w=80,
            power_w=700,
            source="NVIDIA H100 Tensor Core GPU datasheet, SXM5 (1,979 TFLOPS with sparsity, 900 GB/s NVLink), 2023",
        ),
        Device(
            name="h200",
            peak_flops=989 * TFLOPS,
            bandwidth=4800 * GB,
            memory_bytes=141 * GB,
            link_bandwidth=450 * GB,
            idle_w=80,
            power_w=700,
            source="NVIDIA H200 Tensor Core GPU datasheet, SXM (900 GB/s NVLink both ways), 2023",
        ),
        Device(
            name="b200",
            peak_flops=2250 * TFLOPS,
            bandwidth=8000 * GB,
            memory_bytes=180 * GB,
            link_bandwidth=900 * GB,
            idle_w=140,
            power_w=1000,
            source="NVIDIA HGX B200 datasheet (4.5 PFLOPS with sparsity, 1.8 TB/s NVLink both ways), 2025",
        ),
        Device(
            name="mi300x",
            peak_flops=1307 * TFLOPS,
            bandwidth=5300 * GB,
            memory_bytes=192 * GB,
            link_bandwidth=448 * GB,
            idle_w=110,
            power_w=750,
            source="AMD Instinct MI300X data sheet (seven Infinity Fabric links of 128 GB/s both ways), 2023",
            compute_efficiency=0.45,
        ),
        Device(
            name="tpu-v5e",
            peak_flops=197 * TFLOPS,
            bandwidth=819 * GB,
            memory_bytes=16 * GB,
            link_bandwidth=200 * GB,
            idle_w=60,
            power_w=220,
            source="Google Cloud TPU v5e documentation, one chip (400 GB/s between chips both ways), 2023",
        ),
        Device(
            name="cpu",
            peak_flops=0.15 * TFLOPS,
            bandwidth=20 * GB,
            memory_bytes=16 * GB,
            link_bandwidth=5 * GB,
            idle_w=3,
            power_w=10,
            source="one AVX-512 server core: 2.4 GHz x 64 float32 operations a cycle, two channels' share of DDR4-3200",
            step_s=1.5e-3,
            row_s=10e-6,
            compute_efficiency=0.5,
            token_budget=native_token_budget(1),
        ),
    )
}


@dataclass(frozen=True, slots=True)
class SimulatedTarget:
    """Target of a simulation: a model on a device, or on several as one worker."""

    label: str
    cost_model: CostModel
    num_blocks: Callable[[CacheConfig, int], int]
    """(cache, max_num_seqs) -> KV blocks."""
    token_budget: int
    """Tokens of a step where nobody asks for another number."""
    kv_bytes_per_token: float
    num_layers: int = 1
    edge: EdgeModel = field(default_factory=EdgeModel)
    doubt: str | None = None
    """Why its times are not to be relied on, if so."""
    num_devices: int = 1
    idle_w: float = 0.0
    """Watts of all its devices while they wait, and in a step; 0 where they are not known."""
    power_w: float = 0.0
    state_bytes: float = 0.0
    """Of a request's recurrent states."""
    groups: KVGroups | None = None
    """Of layers, where some have a window."""
    num_pages: Callable[[CacheConfig, int, int], int] = lambda cache, max_num_seqs, ahead: 0
    """(cache, max_num_seqs, tokens of a step) -> pages, where there are groups."""
    context: int = 0

    def num_state_slots(self, cache: CacheConfig, max_num_seqs: int) -> int:
        return num_state_slots(cache, max_num_seqs, self.state_bytes)

    def watts(self, busy: float) -> float:
        """Watts at a share of the time in steps, each of which is taken to draw the most."""
        return self.idle_w + min(1.0, busy) * (self.power_w - self.idle_w)


def num_state_slots(cache: CacheConfig, max_num_seqs: int, state_bytes: float) -> int:
    """Slots as the engine has them where memory lasts: one a request, and as many snapshots unless told otherwise."""
    if not state_bytes:
        return 0
    asked = cache.state_cache_memory_bytes
    num_snapshots = max_num_seqs if asked is None else int(asked / state_bytes)
    return max_num_seqs + num_snapshots * cache.enable_prefix_caching


def roofline(device: Device, model: ModelShape) -> CostModel:
    """Seconds from bytes and operations: 2 operations a weight and token, 4 a query-key pair and value of q_width."""
    count = device.count
    flops = count * device.peak_flops * device.compute_efficiency
    bandwidth = count * device.bandwidth * device.bandwidth_efficiency
    token_s = 2 * model.num_active_parameters / flops
    # weights that every token meets are read by each device where experts alone are apart
    readers = count if device.splits_experts else 1
    kv_s = model.kv_bytes_per_token * _kv_copies(device, model) / bandwidth
    exchanges, values = _exchanges(device, model)
    return CostModel(
        fixed_s=device.step_s + exchanges * device.hop_s,
        row_s=device.row_s + 2 * model.state_bytes / bandwidth,  # read and written
        weights_s=(model.num_parameters - model.expert_parameters) * model.bytes_per_weight * readers / bandwidth,
        experts_s=model.expert_parameters * model.bytes_per_weight / bandwidth,
        experts_missed=1 - model.experts_per_token / model.experts if model.experts else 0.0,
        prefill_token_s=token_s,
        decode_token_s=token_s,
        exchange_token_s=2 * values / (device.link_bandwidth * device.bandwidth_efficiency),
        context_token_s=kv_s * model.full_layers / model.num_layers,
        prefill_attention_s=4 * model.full_layers * model.q_width / flops,
        window=model.window,
        window_token_s=kv_s * model.windowed_layers / model.num_layers,
        window_attention_s=4 * model.windowed_layers * model.q_width / flops,
    )


def _kv_copies(device: Device, model: ModelShape) -> float:
    """How often several devices keep a token's keys and values: once, while each has a head of its own."""
    return 1.0 if device.splits_experts else max(1.0, device.count / model.kv_heads)


def _exchanges(device: Device, model: ModelShape) -> tuple[float, float]:
    """(collectives of a step, values of 2 bytes that a token sends through each device's link)."""
    others = (device.count - 1) / device.count
    if device.count == 1:
        return 0.0, 0.0
    if device.splits_experts:
        copies = min(model.experts_per_token, device.count)
        sent = 2 * model.routed_layers * model.hidden * copies * others / device.count
        return 2.0 * model.routed_layers, sent
    return 2.0 * model.num_layers, 2 * model.num_layers * model.hidden * 2 * others


def num_kv_blocks(
    device: Device, model: ModelShape, block_size: int, max_num_seqs: int = 0, num_state_slots: int = 0
) -> int:
    """Return the blocks that fit beside the weights and a tenth for activations, where layers with a window keep that
    of `max_num_seqs` requests at most. Raises ConfigError for no room."""
    memory = device.count * device.memory_bytes
    again = (device.count - 1) * (model.num_parameters - model.expert_parameters) if device.splits_experts else 0.0
    free = 0.9 * memory - model.weight_bytes - again * model.bytes_per_weight - num_state_slots * model.state_bytes
    per_token = model.kv_bytes_per_token * _kv_copies(device, model)
    windowed = max_num_seqs * model.window * per_token * model.windowed_layers / model.num_layers
    if 0 < windowed < free * model.windowed_layers / model.num_layers:  # so much is kept, whatever contexts are
        free, per_token = free - windowed, per_token * model.full_layers / model.num_layers
    blocks = int(free / (per_token * block_size))
    if blocks < 1:
        raise DoesNotFit(
            f"{model.name} has {model.weight_bytes / GB:.0f} GB of weights, {device.name} has "
            f"{memory / GB:.0f} GB; choose another of {', '.join(DEVICES)}, or several as h100x8"
        )
    return blocks


def device_named(name: str) -> Device:
    """A device, or N of them as one worker: NAMExN tensor parallel, NAMExNep expert parallel. Raises ConfigError that
    lists the choices."""
    one, _, number = name.removesuffix("ep").rpartition("x")
    if one in DEVICES and number.isdigit() and 1 <= int(number) <= MOST_DEVICES:
        return replace(DEVICES[one], name=name, count=int(number), splits_experts=name.endswith("ep"))
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

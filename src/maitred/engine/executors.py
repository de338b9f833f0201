"""The executor that carries out the plans: native on a CPU, PyTorch on a GPU or for what the native one cannot."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from maitred.config import EngineConfig
from maitred.core.errors import ConfigError, KernelError
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.memory import usable_cores
from maitred.engine.timeline import OnPhase
from maitred.executor.grammar import Grammars
from maitred.executor.state import Proposer, SwapBandwidth
from maitred.kv.layout import BlockIO, CellLayout, LayerIO
from maitred.kv.pages import KVGroups
from maitred.model.checkpoint import Checkpoint
from maitred.model.spec import DecoderSpec

SMALL_MODEL_PARAMETERS = 30_000_000
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""One of these is there where PyTorch can see a GPU; without, nobody waits a second for the import of PyTorch."""


OnLost = Callable[[str, int], None]
"""A process that computed with the engine's ended: why in words, and its exit code, minus the signal that killed it."""


class BuiltExecutor(Protocol):
    """`step.Executor`, and what only its builder asks of it."""

    grammars: Grammars | None
    proposer: Proposer | None
    pooler: Any  # an `executor.pooling.Pooler`, set by the engine's builder
    threads: Any  # a `_native.ThreadPool`, where it has one
    on_logits: Any  # told the logits of every position of every step, where it is set

    def execute(self, plan: SchedulerOutput) -> ModelOutput: ...

    def measure_swap(self) -> SwapBandwidth | None: ...

    def is_one_run(self, plan: SchedulerOutput) -> bool:
        """Whether the model runs once for this plan, so that its layers are written once each, in order."""

    def block_io(self) -> BlockIO: ...

    @property
    def groups(self) -> KVGroups | None: ...

    @property
    def num_kv_layers(self) -> int:
        """Number of layers in the pool; a draft head's is one of them."""

    def layer_io(self, layout: CellLayout) -> LayerIO: ...

    def close(self) -> None: ...


class ExecutorPlan(Protocol):
    """Needs of an executor, known before any of it is allocated."""

    @property
    def name(self) -> str: ...

    @property
    def device_name(self) -> str: ...

    @property
    def on_gpu(self) -> bool: ...

    @property
    def isa(self) -> str: ...

    @property
    def dtype_name(self) -> str: ...

    @property
    def kv_dtype_name(self) -> str: ...

    @property
    def token_budget(self) -> int:
        """Default for the tokens of a step."""
        ...

    @property
    def weights_bytes(self) -> int: ...

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that engines of one model have in memory once."""
        ...

    @property
    def num_threads(self) -> int | None:
        """Threads of each rank; None is PyTorch's own choice."""
        ...

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def bytes_per_page(self) -> int: ...

    @property
    def bytes_per_state_slot(self) -> int:
        """Of recurrent layers; 0 where there are none."""
        ...

    @property
    def groups(self) -> KVGroups | None:
        """Groups of layers, where blocks consist of pages."""
        ...

    def in_groups(self, groups: KVGroups) -> ExecutorPlan: ...

    def available_bytes(self, host_available_bytes: int) -> int: ...

    def describe(self) -> str: ...

    def build(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        on_phase: OnPhase = ...,
        on_packed: Callable[[int, int], None] | None = ...,
        on_lost: OnLost | None = ...,
    ) -> BuiltExecutor: ...


def plan_executor(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    tell: Callable[[str], None],
    taps: tuple[int, ...] = (),
    *,
    needs_all: bool = False,
) -> ExecutorPlan:
    """auto: PyTorch where it sees a GPU; else native, and PyTorch again, with the reason told, for what that lacks.

    `taps` are numbers of layers after which a head reads along, which the native executor alone lets it; `needs_all`
    that vectors are made of the last states of all tokens, likewise.
    Raises ConfigError when the executor that was asked for cannot serve this model, or none can.
    """
    check_threads(config.model.num_threads)
    wanted, has_ranks = config.model.executor, config.model.tensor_parallel > 1
    if spec.module is not None and (
        wanted == "native" or has_ranks or (config.model.max_model_len or 0) > spec.max_position_embeddings
    ):
        raise ConfigError(
            f"{spec.architecture} has no native row; transformers' module runs on the torch executor, in one process "
            f"and for {spec.max_position_embeddings} tokens: leave out --executor, --tensor-parallel or --max-model-len"
        )
    if spec.encoder is not None and (wanted == "torch" or has_ranks or config.model.device == "cuda"):
        raise ConfigError(
            f"{spec.architecture} is an encoder, which runs on the native executor, on a CPU and in one process: leave "
            "out --executor, --device or --tensor-parallel"
        )
    takes_torch = spec.encoder is None and wanted == "auto" and _wants_gpu(config.model.device)
    if wanted == "torch" or spec.module is not None or takes_torch:
        if has_ranks:
            raise ConfigError("tensor_parallel is the native executor's; leave it out, or choose --executor native")
        if config.share.num_engines > 1 and _wants_gpu(config.model.device):
            raise ConfigError(
                "several workers share processors, not a GPU; start a server for each GPU (CUDA_VISIBLE_DEVICES) "
                "behind maitred route, or add --device cpu"
            )
        return _plan_torch(config, checkpoint, spec)
    try:
        return _plan_native(config, checkpoint, spec, tell, taps, needs_all)
    except KernelError as error:
        if wanted == "native" or spec.encoder is not None or not _has_torch() or _integers(config) or has_ranks:
            raise ConfigError(str(error)) from error
        tell(f"torch   takes over: {error}")
        return _plan_torch(config, checkpoint, spec)


def _plan_native(
    config: EngineConfig,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    tell: Callable[[str], None],
    taps: tuple[int, ...],
    needs_all: bool,
) -> ExecutorPlan:
    if importlib.util.find_spec("maitred.kernels._native") is None:
        raise KernelError("the native library was not built; install maitred from a wheel, or with a C++17 compiler")
    from maitred.executor.native_plan import plan_native_executor  # noqa: PLC0415  numpy, and the library itself

    num_ranks = config.model.tensor_parallel
    num_threads = max(1, own_threads(config, spec) // num_ranks)
    num_all = num_ranks * (config.model.num_threads or num_threads)
    if num_ranks > 1 and num_all > usable_cores():
        tell(f"ranks   {num_all} threads in all on {usable_cores()} cores: each step waits for time slices")
    return plan_native_executor(
        config.model,
        checkpoint,
        spec,
        cache=config.cache,
        scheduler=config.scheduler,
        num_threads=num_threads,
        num_drafts=config.speculative.num_drafts,
        taps=taps,
        needs_all=needs_all,
    )


def _plan_torch(config: EngineConfig, checkpoint: Checkpoint, spec: DecoderSpec) -> ExecutorPlan:
    if not _has_torch():
        raise ConfigError("the torch executor needs PyTorch; install it with: pip install 'maitred[torch]'")
    from maitred.executor.torch import plan_torch_executor  # noqa: PLC0415  a second, and gigabytes

    return plan_torch_executor(
        config.model, checkpoint, spec, block_size=config.cache.block_size, num_threads=own_threads(config, spec)
    )


def _integers(config: EngineConfig) -> bool:
    """Whether number formats were asked for that PyTorch's executor has not."""
    return config.model.dtype in ("int8", "int4") or config.model.kv_dtype in ("int8", "int4")


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def _wants_gpu(device: str) -> bool:
    if device != "auto":
        return device == "cuda"
    if not _has_torch() or not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return False
    from maitred.executor.torch import resolve_device  # noqa: PLC0415

    return resolve_device("auto").type == "cuda"


def check_threads(asked: int | None) -> None:
    """Raises ConfigError for more than there are cores: threads that share one wait for each other's time slices."""
    cores = usable_cores()
    if asked is not None and asked > cores:
        raise ConfigError(
            f"num_threads is {asked}, and this process may use {cores} physical core{'s' if cores > 1 else ''}; "
            f"ask for {cores} or less, or leave it out"
        )


def own_threads(config: EngineConfig, spec: DecoderSpec) -> int:
    """Default threads of an engine that shares the cores with others."""
    return min(useful_threads(spec), max(1, usable_cores() // config.share.num_engines))


def useful_threads(spec: DecoderSpec) -> int:
    """A small model's operations take microseconds, and a second thread makes them wait for each other.

    At 4 M parameters a native step takes 0.3 ms on one thread. On two it takes as much at best, and on a machine with
    other work, where one of the two often has no core, 40 ms (PyTorch: 2.4 and 155 ms).
    """
    is_small = spec.num_parameters() < SMALL_MODEL_PARAMETERS and spec.encoder is None  # whose steps are whole texts
    return 1 if is_small else usable_cores()

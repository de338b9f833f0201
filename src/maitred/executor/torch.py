"""The reference executor: one ragged batch of PyTorch operations a step, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from maitred.config import DEFAULT_TOKEN_BUDGET, ModelConfig
from maitred.core.errors import ConfigError, KernelError
from maitred.core.step import ModelOutput, SampledRow, SchedulerOutput, TokenLogprobs
from maitred.executor import torch_kv
from maitred.executor.batch import TorchBatch, build_batch, stale_slots, unwritten_slots
from maitred.executor.grammar import Grammars
from maitred.executor.pooling import Pooler, PoolingRow, StepStates
from maitred.executor.rows import (
    PROMPT_LOGPROBS_CHUNK,
    follow_grammars,
    keep,
    prompt_tokens_due,
    report,
    wait_for_masks,
    with_drafts,
)
from maitred.executor.sampler import SampledToken, sample_rows, token_logprobs
from maitred.executor.state import HeldRequest, PageTables, Proposer, RowWork, SwapBandwidth, take_plan
from maitred.executor.torch_attention import FlashAttention, GatherAttention, flash_refusal, reads_block_tables
from maitred.kv.layout import CellLayout, HostLayers, LayerIO, in_model_order
from maitred.kv.pages import KVGroups
from maitred.model.checkpoint import Checkpoint
from maitred.model.spec import DecoderSpec
from maitred.model.torch_decoder import TorchDecoder, load_torch_decoder

if TYPE_CHECKING:
    from maitred.model.transformers_module import ModuleDecoder

SMALL_WEIGHTS_BYTES = 2**30  # in float32

# (request id, first position, logits [n, V] of positions first ..)
OnLogits = Callable[[str, int, torch.Tensor], None]


class TorchExecutor:
    """Carries out plans (`step.Executor`). Not thread-safe: one thread calls `execute`.

    `on_logits`, for tests and evaluation, may be set to be given the logits of every position of every step.
    `num_threads` is PyTorch's number of threads during a step. PyTorch keeps one such number for the process, so it
    is set when a step begins and put back when it ends; None leaves it alone.
    """

    deterministic = False
    """PyTorch's sums depend on the batch's shape, in the last bits."""

    def __init__(
        self,
        decoder: TorchDecoder | ModuleDecoder,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        num_threads: int | None = None,
        num_host_blocks: int = 0,
        on_logits: OnLogits | None = None,
        groups: KVGroups | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """`num_blocks` are pages where there are `groups`."""
        spec = decoder.spec
        self.on_logits = on_logits
        self.device = device
        self.vocab_size = spec.vocab_size
        self._decoder = decoder
        self._block_size = block_size
        self._num_threads = num_threads
        self._states: dict[str, HeldRequest] = {}
        self.grammars: Grammars | None = None  # for requests with one; set by the engine's builder
        self.pool = torch_kv.TorchKVPool(
            torch_kv.pool_shape(
                spec, num_blocks=num_blocks, block_size=block_size, num_layers=groups.size if groups else None
            ),
            device=device,
            dtype=kv_dtype,
        )
        self._recurrent = torch_kv.TorchStates(spec, num_state_slots, device=device) if spec.has_state else None
        self._pages = PageTables(groups) if groups is not None else None
        self._host = torch_kv.TorchHostPool(self.pool, num_host_blocks) if num_host_blocks else None
        self.pooler: Pooler | None = None  # for requests that pool; likewise
        self.proposer: Proposer | None = None  # never one: drafts are refused before anything is loaded
        self.threads: object = None
        self._attention: GatherAttention | FlashAttention
        if flash_refusal(spec, device=device, dtype=dtype, kv_dtype=kv_dtype) is None:
            self._attention = FlashAttention(spec, self.pool, device=device, pages=self._pages)
        else:
            self._attention = GatherAttention(spec, self.pool, device=device, dtype=dtype, pages=self._pages)

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        with torch.inference_mode(), torch_threads(self._num_threads):
            works = self._take_plan(plan)
            if not works:
                return ModelOutput(())
            batch = build_batch(works, self._block_size)
            hidden_TD = self._decoder.forward(
                torch.as_tensor(batch.token_ids, device=self.device),
                torch.as_tensor(batch.positions, device=self.device),
                self._attention.prepare(batch),
                recur=self._recurrent.prepare(batch) if self._recurrent is not None else None,
            )
            if self.on_logits is not None:
                self._show_logits(self.on_logits, batch, hidden_TD)
            return ModelOutput(tuple(self._collect(batch, hidden_TD)))

    def measure_swap(self) -> SwapBandwidth | None:
        """Measure how fast blocks go to the host and back; None without host blocks. New executors only."""
        with torch.inference_mode(), torch_threads(self._num_threads):
            return self._host.measure() if self._host is not None else None

    def block_io(self) -> torch_kv.TorchBlocks:
        """Blocks as bytes, for other threads."""
        return torch_kv.TorchBlocks(self.pool)

    def is_one_run(self, plan: SchedulerOutput) -> bool:
        """Return whether the model runs once for the plan (`LayerIO.progress`): always."""
        return True

    @property
    def groups(self) -> KVGroups | None:
        """Groups of layers, where blocks consist of pages."""
        return self._pages.groups if self._pages is not None else None

    @property
    def num_kv_layers(self) -> int:
        return len(self.groups.places) if self.groups is not None else self.pool.shape.num_layers

    def layer_io(self, layout: CellLayout) -> LayerIO:
        """Blocks as bytes layer by layer, for other threads."""
        if self.device.type == "cpu":
            return in_model_order(HostLayers(self.pool.as_bytes(), layout, lambda: self.pool.progress), self.groups)
        return in_model_order(torch_kv.TorchLayers(self.pool, layout), self.groups)

    def close(self) -> None:
        """Drop states, pool and weights."""
        self._states.clear()
        if self.grammars is not None:
            self.grammars.close()
        self._host = None
        del self._attention, self.pool, self._decoder

    def _take_plan(self, plan: SchedulerOutput) -> list[RowWork]:
        """Take in all of the plan but the computing: each row's block table too, and what of it must be cleared."""
        copy = self.pool.copy_blocks if self._pages is None else self._pages.take(plan, self.pool.copy_blocks)
        works = take_plan(plan, self._states, self.vocab_size, copy, self._host, self.grammars)
        works = with_drafts(works, None, self.vocab_size, 0)  # there are no drafts here
        for work in works:
            if work.state.adapter:
                raise KernelError(
                    f"request {work.row.request_id} asks for adapter {work.state.adapter}, which the torch executor "
                    f"does not have; --executor native does"
                )
        if self._recurrent is not None:
            self._recurrent.take(plan)
        changed = [work for work in works if work.state.take_blocks(work.row)]
        if self._pages is None:
            stale = unwritten_slots(changed, self._block_size)
        else:  # what is masked is read in all of the last block
            stale = stale_slots(works, self._block_size, self._pages)
        if stale.size:
            self.pool.clear(torch.as_tensor(stale, device=self.device))
        return works

    def _collect(self, batch: TorchBatch, hidden_TD: torch.Tensor) -> Iterator[SampledRow]:
        """Sample, and report in the plan's order the rows that have something to say."""
        sampled = self._sample(batch, hidden_TD)
        self._pool(batch, hidden_TD, sampled)
        for row in np.argsort(batch.order).tolist():
            work = batch.works[row]
            prompt_logprobs = self._prompt_logprobs(batch, row, hidden_TD)
            reported = report(work, sampled.get(row), prompt_logprobs)
            if reported is not None:
                yield reported

    def _sample(self, batch: TorchBatch, hidden_TD: torch.Tensor) -> dict[int, SampledToken]:
        """Batch row -> its token, for rows that sample; the token is now part of the request's state."""
        rows = [i for i, work in enumerate(batch.works) if work.row.samples and work.state.pooling is None]
        if not rows:
            return {}
        last_token_R = batch.first_tokens[rows] + batch.num_tokens[rows] - 1
        logits_RV = self._logits(hidden_TD[torch.as_tensor(last_token_R, device=self.device)])
        states = [batch.works[i].state for i in rows]
        has_masks = wait_for_masks(states, self.grammars, is_patient=self._recurrent is not None)
        sampled = sample_rows(logits_RV, [state.sampler for state in states])
        tokens = {i: keep(state, token, has_masks) for i, state, token in zip(rows, states, sampled, strict=True)}
        follow_grammars(batch.works, tokens, self.grammars)
        return tokens

    def _pool(self, batch: TorchBatch, hidden_TD: torch.Tensor, tokens: dict[int, SampledToken]) -> None:
        """Put vectors of prompts that end into `tokens`, by batch row."""
        pooling = [
            PoolingRow(i, work.state, work.row.start, first, work.row.num_tokens, work.row.samples)
            for i, (work, first) in enumerate(zip(batch.works, batch.first_tokens.tolist(), strict=True))
            if work.state.pooling is not None
        ]
        if pooling and self.pooler is not None:
            states = StepStates(
                all_states=lambda: _floats(hidden_TD),
                last_states=lambda tokens: _floats(hidden_TD[list(tokens)]),
                more_logits=lambda tokens: self._logits(hidden_TD[list(tokens)]),
                most=PROMPT_LOGPROBS_CHUNK,
            )
            self.pooler.pool(pooling, states, tokens)

    def _prompt_logprobs(
        self, batch: TorchBatch, row: int, hidden_TD: torch.Tensor
    ) -> tuple[TokenLogprobs, ...] | None:
        """Return logprobs of prompt positions start + 1 .. start + num_tokens, from the logits before each; None if
        undue.
        """
        next_tokens = prompt_tokens_due(batch.works[row])
        if not next_tokens:
            return None
        num_top = batch.works[row].state.prompt_logprobs or 0
        first = int(batch.first_tokens[row])
        found: list[TokenLogprobs] = []
        for offset in range(0, len(next_tokens), PROMPT_LOGPROBS_CHUNK):
            tokens = next_tokens[offset : offset + PROMPT_LOGPROBS_CHUNK]
            logits_nV = self._logits(hidden_TD[first + offset : first + offset + len(tokens)])
            pairs = zip(logits_nV, tokens, strict=True)
            found += [token_logprobs(logits_V, token, num_top) for logits_V, token in pairs]
        return tuple(found)

    def _logits(self, hidden_TD: torch.Tensor) -> NDArray[np.float32]:
        return _floats(self._decoder.logits(hidden_TD))

    def _show_logits(self, on_logits: OnLogits, batch: TorchBatch, hidden_TD: torch.Tensor) -> None:
        for (row, _, _), first in zip(batch.works, batch.first_tokens.tolist(), strict=True):
            on_logits(row.request_id, row.start, self._decoder.logits(hidden_TD[first : first + row.num_tokens]))


def _floats(values: torch.Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found


@contextmanager
def torch_threads(num_threads: int | None) -> Iterator[None]:
    """Let PyTorch compute on so many threads meanwhile; None leaves it its own."""
    before = torch.get_num_threads()
    if num_threads is None or num_threads == before:
        yield
        return
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchPlan:
    """Memory plan of the executor, known before any of it is allocated."""

    spec: DecoderSpec
    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    num_threads: int | None
    groups: KVGroups | None = None  # of layers, where blocks consist of pages

    name = "torch"
    isa = ""  # its own choice
    mapped_bytes = 0  # each process has weights of its own

    @property
    def device_name(self) -> str:
        return str(self.device)

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype_name(self) -> str:
        return _name(self.dtype)

    @property
    def kv_dtype_name(self) -> str:
        return _name(self.kv_dtype)

    @property
    def token_budget(self) -> int:
        """Tokens of a step unless another number is given."""
        return DEFAULT_TOKEN_BUDGET

    @property
    def weights_bytes(self) -> int:
        return self.spec.num_parameters() * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        return torch_kv.kv_bytes_per_block(self.spec, self.block_size, self.kv_dtype.itemsize)

    @property
    def bytes_per_page(self) -> int:
        """Bytes of what the pool counts: blocks, or pages of a group of layers."""
        if self.groups is None:
            return self.bytes_per_block
        return self.bytes_per_block // len(self.spec.kv_layers) * self.groups.size

    @property
    def bytes_per_state_slot(self) -> int:
        return self.spec.state_bytes_per_slot

    def in_groups(self, groups: KVGroups) -> TorchPlan:
        return replace(self, groups=groups)

    def available_bytes(self, host_available_bytes: int) -> int:
        """Free memory where weights and cache will lie: the GPU's, or the host's as given."""
        if self.device.type != "cuda":
            return host_available_bytes
        free, _ = torch.cuda.mem_get_info(self.device)
        return free

    def describe(self) -> str:
        """A line for the terminal."""
        refusal = flash_refusal(self.spec, device=self.device, dtype=self.dtype, kv_dtype=self.kv_dtype)
        if refusal is not None:
            attention = "gather and SDPA" + (f" ({refusal})" if self.device.type == "cuda" else "")
        elif reads_block_tables(self.block_size):
            attention = "flash with block tables"
        else:
            attention = "flash over gathered blocks (block_size 256 avoids the copy)"
        threads = f", {self.num_threads} threads" if self.device.type == "cpu" and self.num_threads else ""
        return (
            f"torch   {self.device}{threads}, weights {_name(self.dtype)}, KV cache {_name(self.kv_dtype)}, "
            f"attention by {attention}"
        )

    def build(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        on_phase: Callable[[str, str], None] = lambda phase, summary: None,
        on_packed: Callable[[int, int], None] | None = None,  # nothing is packed
        on_lost: Callable[[str, int], None] | None = None,  # and no thread helps
    ) -> TorchExecutor:
        """Load the weights and allocate the pool. Raises CheckpointError or OutOfMemory."""
        load: Any = load_torch_decoder
        if self.spec.module is not None:
            from maitred.model.transformers_module import load_module as load  # noqa: PLC0415  two seconds
        decoder = load(self.spec, self.checkpoint, device=self.device, dtype=self.dtype, max_model_len=max_model_len)
        on_phase("weights", "")
        return TorchExecutor(
            decoder,
            num_blocks=num_blocks,
            block_size=self.block_size,
            device=self.device,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            num_threads=self.num_threads,
            num_host_blocks=num_host_blocks,
            groups=self.groups,
            num_state_slots=num_state_slots,
        )


def plan_torch_executor(
    config: ModelConfig, checkpoint: Checkpoint, spec: DecoderSpec, *, block_size: int, num_threads: int | None = None
) -> TorchPlan:
    """Settle device and number formats. Raises ConfigError for what this executor cannot do."""
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, checkpoint.dtype, device, num_parameters=spec.num_parameters())
    return TorchPlan(
        spec=spec,
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, dtype),
        block_size=block_size,
        num_threads=config.num_threads or num_threads,
    )


def resolve_device(name: str) -> torch.device:
    """auto, cpu or cuda; auto takes a GPU when PyTorch sees one."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("device is cuda, and PyTorch sees no GPU; choose auto or cpu, or install a CUDA build of it")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(name: str, checkpoint_dtype: str, device: torch.device, *, num_parameters: int) -> torch.dtype:
    """Weights and activations. `checkpoint_dtype` is a name such as bfloat16.

    auto, on a GPU: the checkpoint's, bfloat16 for a GGUF file's block types. On a CPU: bfloat16 if that is its format,
    the processor multiplies it (AVX512-BF16, AMX) and the model is not small; else float32. PyTorch's `F.linear` was
    then as fast for one row and 2 to 5 times as fast from 8 rows on, on half the memory. A small model gains less than
    a third of a step, and keeps float32 because bfloat16 logits tie so often that the batch's shape shows in the text.
    """
    if name in ("int8", "int4"):
        raise ConfigError(
            f"dtype is {name}, which only the native executor computes; choose auto, bfloat16 or float32 here"
        )
    if name != "auto":
        return _DTYPES[name]
    own = _DTYPES.get(checkpoint_dtype, torch.float32 if checkpoint_dtype == "float64" else torch.bfloat16)
    if device.type == "cuda":
        return own
    small = num_parameters * torch.float32.itemsize <= SMALL_WEIGHTS_BYTES
    return own if own == torch.bfloat16 and not small and _cpu_multiplies_bfloat16() else torch.float32


def resolve_kv_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """KV cache; auto is the compute dtype."""
    if name in ("int8", "int4"):
        raise ConfigError(
            f"kv_dtype is {name}, which only the native executor has; choose auto, bfloat16 or float32 here"
        )
    return dtype if name == "auto" else _DTYPES[name]


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _cpu_multiplies_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

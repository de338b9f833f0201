"""Memory and threads of the native executor, settled before anything is allocated; and its number formats."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.cost_model import native_token_budget
from maitred.core.errors import ConfigError, KernelError
from maitred.core.step import TokenLogprobs
from maitred.executor.native import NativeExecutor, NativeHostPool, ThreadChoice
from maitred.executor.native_lora import NativeAdapters
from maitred.executor.native_program import ALONE, NativeProgram, Place, most_logits
from maitred.executor.ranks import (
    PROCESS_BYTES,
    SPARE_BYTES,
    Begin,
    OnLost,
    RankConfig,
    Ranks,
    bind_rank,
    processors_of_ranks,
)
from maitred.executor.sampler import SampledToken, uniform
from maitred.executor.sampler_state import RequestSampler
from maitred.executor.state import PageTables, StateSlots
from maitred.kernels import _native
from maitred.kernels.kv_pool import LARGEST_HEAD, make_kv_pool
from maitred.kernels.sampler import FAULTS, NO_LOGPROBS, Sampled, Sampler
from maitred.kv.pages import KVGroups
from maitred.model.checkpoint import Checkpoint
from maitred.model.fusions import compile_program
from maitred.model.gguf_file import HELD_AS, WIDENED
from maitred.model.packaged import default_folder
from maitred.model.packed import OnPacked, plan_weights, total_bytes
from maitred.model.packed_cache import WeightCache, load_weights
from maitred.model.program import ROUTERS, TAPS, Columns, Format, Formats, Program
from maitred.model.shares import own_program
from maitred.model.spec import DecoderSpec, HeadSpec, NormPlacement
from maitred.model.weight_map import OTHER_SENSES, weight_map


class NativeSampler:
    """Samples on the threads of `pool`, a _native.ThreadPool; one call at a time."""

    def __init__(self, pool: Any, *, isa: str = "auto") -> None:
        self._sampler = Sampler(pool, isa=isa)

    def sample_rows(self, logits_RV: NDArray[np.float32], samplers: Sequence[RequestSampler]) -> list[SampledToken]:
        """Sample as `sampler.sample_rows`: a token for each of R rows, which may be overwritten; the caller appends."""
        assert logits_RV.shape[0] == len(samplers), (logits_RV.shape, len(samplers))
        logits_RV = np.asarray(logits_RV, dtype=np.float32)
        if logits_RV.strides[1] != logits_RV.itemsize or not logits_RV.flags.writeable:
            logits_RV = np.array(logits_RV, order="C")
        sampled = self._sampler.sample(
            logits_RV,
            np.array([_settings(sampler) for sampler in samplers], dtype=np.float64).reshape(-1, 5),
            [sampler.changes() if sampler.changes_logits else None for sampler in samplers],
            np.array([_num_top(sampler) for sampler in samplers], dtype=np.int32),
        )
        tokens = zip(sampled.tokens.tolist(), sampled.faults.tolist(), samplers, strict=True)
        return [_outcome(sampled, row, *token) for row, token in enumerate(tokens)]


def _settings(sampler: RequestSampler) -> tuple[float, float, float, float, float]:
    p = sampler.sampling
    if p.greedy:
        return (0.0, 0.0, 1.0, 0.0, 0.0)
    share = uniform(sampler.seed, sampler.sample_index, sampler.position)
    return (p.temperature, p.top_k, p.top_p, p.min_p, share)


def _num_top(sampler: RequestSampler) -> int:
    num_top = sampler.sampling.logprobs
    return NO_LOGPROBS if num_top is None else num_top


def _outcome(sampled: Sampled, row: int, token_id: int, fault: int, sampler: RequestSampler) -> SampledToken:
    if fault:
        return SampledToken(0, error=FAULTS[fault])
    num_top = sampler.sampling.logprobs
    if num_top is None:
        return SampledToken(token_id)
    num_top = min(num_top, sampler.vocab_size)
    ids = (token_id, *sampled.top_ids[row, :num_top].tolist())
    ranks = (int(sampled.ranks[row]), *range(1, num_top + 1))
    return SampledToken(token_id, TokenLogprobs(ids, tuple(sampled.logprobs[row, : num_top + 1].tolist()), ranks))


Stored = tuple[tuple[int, Format], ...]


class PagePlace(NamedTuple):
    """Place of a layer in a page: its K/V heads and their size, its bytes from one to the other."""

    num_kv_heads: int
    head_dim: int
    offset: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NativePlan:
    """Plan of memory as `executor.torch.TorchPlan`, for the native library."""

    program: Program
    checkpoint: Checkpoint
    kv_dtype: str
    block_size: int
    num_threads: int
    isa: str
    max_tokens: int
    max_logits: int
    bind_threads: bool = False
    choose_threads: bool = False  # fewer of them where measured steps are faster so
    num_ranks: int = 1  # processes, each with its share of the weights and so many threads
    rank_config: RankConfig
    weight_cache: WeightCache | None = None
    groups: KVGroups | None = None  # of layers, where blocks consist of pages
    num_drafts: int = 0  # of a request in a step, at most

    name = "native"
    device_name = "cpu"
    on_gpu = False

    @property
    def spec(self) -> DecoderSpec:
        return self.program.spec

    @property
    def num_pool_layers(self) -> int:
        """A head's is one more."""
        return len(self.spec.kv_layers) + any(isinstance(op, Columns) and op.target == TAPS for op in self.program.ops)

    @property
    def dtype_name(self) -> str:
        formats = self.program.formats
        return str(formats if formats.stored else formats.linears)

    @property
    def kv_dtype_name(self) -> str:
        return self.kv_dtype

    @property
    def token_budget(self) -> int:
        return self.max_tokens

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights of all ranks."""
        return sum(plan.num_bytes for rank in range(self.num_ranks) for plan in plan_weights(self._program_of(rank)))

    @property
    def mapped_bytes(self) -> int:
        """Bytes of weights that processes which serve the same have in memory once."""
        cache = self.weight_cache
        sizes = (total_bytes(plan_weights(self._program_of(rank))) for rank in range(self.num_ranks))
        return sum(size for size in sizes if size >= cache.min_bytes) if cache is not None else 0

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one KV block over all layers."""
        return replace(self, groups=None).bytes_per_page

    @property
    def bytes_per_page(self) -> int:
        """Bytes of what the pool counts: blocks, or pages of a group of layers."""
        return max(place.end for place in self._page())

    def _page(self) -> list[PagePlace]:
        """Where each layer is, a head's last, in a block, or in a page of its group."""
        spec, ends, found = self.spec, Counter[int](), list[PagePlace]()
        heads = [*spec.kv_heads, *[(spec.num_kv_heads, spec.head_dim)] * (self.num_pool_layers - len(spec.kv_heads))]
        for index, (number, size) in enumerate(heads):
            group = self.groups.places[index][0] if self.groups is not None else 0
            num_bytes = int(_native.kv_bytes_per_block(num_layers=1, **self._pool_settings(number, size)))
            found.append(PagePlace(number, size, ends[group], ends[group] + num_bytes))
            ends[group] += num_bytes
        return found

    def _pool_settings(self, num_kv_heads: int, head_dim: int) -> dict[str, Any]:
        sizes = {"block_size": self.block_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        return {"dtype": self.kv_dtype, "latent_dim": self.spec.latent_rank, **sizes}

    @property
    def bytes_per_state_slot(self) -> int:
        """With the inputs of tokens that are not certain, beside each layer's state."""
        layers = [layer.recurrent for layer in self.spec.layers if layer.recurrent is not None]
        pending = sum(layer.num_channels + 2 * layer.num_value_heads for layer in layers)
        return self.spec.state_bytes_per_slot + 4 * (1 + self.num_drafts) * pending

    def in_groups(self, groups: KVGroups) -> NativePlan:
        return replace(self, groups=groups)

    @property
    def buffers(self) -> list[tuple[str, int]]:
        """Name and bytes of what the program holds besides weights and KV cache."""
        spec = self.spec
        deltas = [layer.recurrent for layer in spec.layers if layer.recurrent is not None]
        kinds = [spec.at(spec.kv_layers[spec.kv_heads.index(heads)]) for heads in dict.fromkeys(spec.kv_heads)]
        widest = max(kind.q_width for kind in kinds)
        rows = {
            "residual stream": spec.hidden_size,
            "queries, keys and values": sum(kind.qkv_width for kind in kinds) - (spec.kv_width if spec.latent else 0),
            "queries made ready": 2 * widest,
            "attention": sum(kind.attended_width for kind in kinds),
            "gate times up": sum(spec.mlp_widths),
            "inputs of recurrent layers": max((delta.input_width for delta in deltas), default=0),
            "what they give": max((delta.value_width for delta in deltas), default=0),
            "inputs of all layers": 2 * spec.num_layers * spec.per_layer_width,
            "prepared rows": max(spec.hidden_size, widest, *spec.mlp_widths),
        }
        if (latent := spec.latent) is not None:
            queries = spec.num_heads * latent.query_dim
            rows["latent values and queries"] = latent.head_dim + queries + latent.query_rank
            rows["attention, multiplied back"] = spec.num_heads * latent.value_dim
        if spec.norm_placement is not NormPlacement.PRE:
            beside = any(layer.routed is not None and layer.routed.beside_dense for layer in spec.layers)
            rows["a part before its norm"] = spec.hidden_size * (3 if beside else 1)
        sizes = {
            f"{name} [{self.max_tokens} x {width}]": 4 * self.max_tokens * width
            for name, width in rows.items()
            if width
        }
        if (experts := expert_buffer_values(spec, self.max_tokens)) is not None:
            sizes["rows of experts"] = 4 * experts
        if spec.encoder is None:
            sizes[f"logits [{self.max_logits} x {spec.vocab_size}]"] = 4 * self.max_logits * spec.vocab_size
        return list(sizes.items())

    @property
    def buffer_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.buffers)

    def available_bytes(self, host_available_bytes: int) -> int:
        """Free memory for weights and cache, out of the host's as given."""
        return max(host_available_bytes - self.buffer_bytes - (self.num_ranks - 1) * PROCESS_BYTES, 0)

    def describe(self) -> str:
        """A line for the terminal."""
        formats = self.program.formats
        up_to = "up to " if self.choose_threads and self.num_threads > 1 else ""
        ranks = f"{self.num_ranks} ranks of " if self.num_ranks > 1 else ""
        return (
            f"native  {self.isa}, {ranks}{up_to}{self.num_threads} thread{'s' if self.num_threads > 1 else ''}, "
            f"weights {formats}{self._widened()}{self._left_out()}, KV cache {self.kv_dtype}, "
            f"{len(self.program.ops)} operations a step"
        )

    def _widened(self) -> str:
        """Types of a file that are held in a larger format."""
        names = self.checkpoint.tensor_names() if self.program.formats.stored else ()
        found = {self.checkpoint.dtype_of(name) for name in names}
        told = [f"{dtype} {how} {HELD_AS[dtype]}" for dtype, how in WIDENED.items() if dtype in found]
        told += [self.checkpoint.expanded] if names and self.checkpoint.expanded else []
        return f" ({', '.join(told)})" if told else ""

    def _left_out(self) -> str:
        """Tensors of the parts of a multimodal model that read pictures and sounds."""
        count = sum(bool(OTHER_SENSES.search(name)) for name in self.checkpoint.tensor_names())
        return f" without {count} tensors of pictures and sounds" if count else ""

    def build(
        self,
        *,
        num_blocks: int,
        max_model_len: int,
        num_host_blocks: int = 0,
        num_state_slots: int = 0,
        on_phase: Callable[[str, str], None] = lambda phase, summary: None,
        on_packed: OnPacked | None = None,
        on_lost: OnLost | None = None,
    ) -> NativeExecutor:
        """Load the weights and allocate the pool, of so many blocks, or pages where there are groups. Raises
        CheckpointError, OutOfMemory or KernelError.

        `on_phase` is told of each phase as it ends, and what happened in it; `on_packed` how many bytes of weights are
        packed, and of how many, while that lasts; `on_lost` of a rank that ended by itself, after which steps raise.
        """
        with ExitStack() as undo:
            ranks, place = None, ALONE
            if self.num_ranks > 1:
                ranks = self._start_ranks(num_blocks, num_state_slots, max_model_len, on_lost)
                undo.callback(ranks.close)
                place = ranks.place
            threads = _native.ThreadPool(self.num_threads)
            pool = self.make_pool(num_blocks, place)
            on_phase("kv_pool", "")
            runner, summary = self.load(
                threads,
                pool,
                max_model_len=max_model_len,
                num_state_slots=num_state_slots,
                on_packed=on_packed,
                place=place,
            )
            if ranks is not None:
                ranks.wait(place.team.num_taken)
                summary = f"{self.num_ranks} ranks, of which the first {summary}"
            on_phase("weights", summary)
            host = NativeHostPool(pool, num_host_blocks, threads) if num_host_blocks else None
            sample_rows = NativeSampler(threads, isa=self.isa).sample_rows
            if ranks is not None:
                bind_rank(threads, ranks.cpus)
            elif self.bind_threads:
                bind_threads(threads)
            on_phase("program", "")
            undo.pop_all()
        executor = NativeExecutor(
            runner,
            pool,
            sample_rows,
            block_size=self.block_size,
            host=host,
            threads=threads,
            choice=ThreadChoice(self.num_threads) if self.choose_threads else None,
            ranks=ranks,
            adapters=NativeAdapters(runner),
            pages=PageTables(self.groups) if self.groups is not None else None,
            states=StateSlots() if self.spec.has_state else None,
        )
        if ranks is not None:
            weakref.finalize(executor, ranks.close)  # of one that is dropped, as when what comes next fails
        return executor

    def make_pool(self, num_blocks: int, place: Place = ALONE) -> Any:
        """A `_native.KVPool`. Raises OutOfMemory."""
        spec, is_uneven = self.spec, self.spec.is_uneven
        return make_kv_pool(
            num_layers=self.num_pool_layers if self.groups is None else self.groups.size,
            num_blocks=num_blocks,
            page_bytes=self.bytes_per_page if is_uneven else 0,
            places=[each[:3] for each in self._page()] if is_uneven else [],
            team=place.team,
            **self._pool_settings(spec.num_kv_heads, spec.head_dim),
        )

    def load(
        self,
        threads: Any,
        pool: Any,
        *,
        max_model_len: int,
        num_state_slots: int = 0,
        on_packed: OnPacked | None = None,
        place: Place = ALONE,
    ) -> tuple[NativeProgram, str]:
        """The program with a rank's weights, and where those came from. Raises CheckpointError."""
        program = self._program_of(place.rank) if place.num_ranks > 1 else self.program
        loaded = load_weights(
            program, self.checkpoint, threads, isa=self.isa, cache=self.weight_cache, on_packed=on_packed
        )
        runner = NativeProgram(
            self.program,
            loaded.weights,
            pool,
            threads,
            max_tokens=self.max_tokens,
            max_logits=self.max_logits,
            max_model_len=max_model_len,
            isa=self.isa,
            place=place,
            layers=layer_places(self.spec, self.groups),
            num_state_slots=num_state_slots,
            num_pending=1 + self.num_drafts,
        )
        return runner, loaded.summary

    def _program_of(self, rank: int) -> Program:
        return own_program(self.program, rank, self.num_ranks) if self.num_ranks > 1 else self.program

    def _start_ranks(self, num_blocks: int, num_state_slots: int, max_model_len: int, on_lost: OnLost | None) -> Ranks:
        """The other ranks, which load while this one does."""
        begin = Begin(
            config=self.rank_config,
            num_ranks=self.num_ranks,
            num_threads=self.num_threads,
            memory_bytes=num_blocks * self.bytes_per_page
            + 2 * (self.buffer_bytes + num_state_slots * self.bytes_per_state_slot)
            + SPARE_BYTES,
            num_blocks=num_blocks,
            num_state_slots=num_state_slots,
            groups=self.groups,
            max_model_len=max_model_len,
            cpus=processors_of_ranks(self.num_ranks, self.num_threads) if self.bind_threads else (),
        )
        return Ranks(begin, on_lost)


def layer_places(spec: DecoderSpec, groups: KVGroups | None) -> list[tuple[int, int]]:
    """Group and number of each layer in the pool, a head's last; of unlike layers each has a number of its own. Empty
    where blocks are whole."""
    places = groups.places if groups is not None else ()
    return [(group, index if spec.is_uneven else layer) for index, (group, layer) in enumerate(places)]


def expert_buffer_values(spec: DecoderSpec, max_tokens: int) -> int | None:
    """Values that routed layers gather in a pass: each pair of a row and an expert made ready, before and behind down.
    None without routed layers."""
    routed = [layer.routed for layer in spec.layers if layer.routed is not None]
    if not routed:
        return None
    pairs: int = min(max_tokens, _native.EXPERT_PASS) * max(each.num_active for each in routed)
    width = max(each.width for each in routed)
    return pairs * (max(width, spec.hidden_size) + width + spec.hidden_size)


def plan_native_executor(
    config: ModelConfig,
    checkpoint: Checkpoint,
    spec: DecoderSpec,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    num_threads: int,
    num_drafts: int = 0,
    taps: tuple[int, ...] = (),
    needs_all: bool = False,
) -> NativePlan:
    """Settle number formats and compile; `num_drafts` are a request's in a step, at most, each with logits. `taps` are
    numbers of layers after which a head reads along (`head.HeadSpec`), `needs_all` is `compile_program`'s.

    Raises KernelError for a model that this executor cannot express, ConfigError for settings that cannot be.
    """
    if config.device == "cuda":
        raise ConfigError("the native executor runs on a CPU; choose --device cpu or auto, or --executor torch")
    if (largest := max(size for _, size in spec.kv_heads)) > LARGEST_HEAD:
        raise KernelError(f"heads of {largest} values; the native executor takes up to {LARGEST_HEAD}")
    if spec.latent and config.kv_dtype in ("int8", "int4"):
        raise KernelError(f"latent keys are kept in float32 or bfloat16; choose one by --kv-dtype ({config.kv_dtype})")
    isa, threads, num_ranks = default_isa(), config.num_threads or num_threads, config.tensor_parallel
    budget = native_token_budget(threads * num_ranks, tiles=isa == "amx")
    program = compile_program(
        spec,
        resolve_formats(config, checkpoint.dtype, isa, stored_formats(checkpoint, spec)),
        taps,
        needs_all=needs_all,
    )
    plan_weights(program)  # raises for a matrix that no kernel takes
    return NativePlan(
        program=program,
        checkpoint=checkpoint,
        kv_dtype=resolve_kv_dtype(config.kv_dtype, program.formats.linears.dtype),
        block_size=cache.block_size,
        num_threads=threads,
        isa=isa,
        max_tokens=scheduler.settled(budget).token_budget,
        max_logits=most_logits(
            spec.vocab_size if spec.encoder is None else 1, scheduler.max_num_seqs * (1 + num_drafts)
        ),
        bind_threads=config.bind_threads == "on",
        choose_threads=config.num_threads is None and num_ranks == 1,
        num_ranks=num_ranks,
        rank_config=RankConfig(
            path=str(checkpoint.path),
            identity=checkpoint.identity,
            model=config,
            cache=cache,
            scheduler=scheduler,
            num_drafts=num_drafts,
            taps=taps,
            needs_all=needs_all,
        ),
        weight_cache=weight_cache(config),
        num_drafts=num_drafts,
    )


def bind_threads(threads: _native.ThreadPool) -> bool:
    """Bind each thread to a processor, the caller's too; return False where there are not as many, or none may be
    chosen.

    Two threads that meet 200 times a step on one processor wait for a time slice each time, which is what happens for a
    while whenever a third one, such as the server's, was given the other.
    """
    if not hasattr(os, "sched_getaffinity"):
        return False
    cpus = sorted(os.sched_getaffinity(0))
    return 1 < threads.num_threads == len(cpus) and bool(threads.bind(cpus))


def weight_cache(config: ModelConfig) -> WeightCache | None:
    if config.weight_cache == "off":
        return None
    folder = default_folder() if config.weight_cache == "auto" else Path(config.weight_cache).expanduser()
    if folder is None:
        return None
    return WeightCache(folder=folder, max_bytes=config.weight_cache_max_bytes)


def resolve_formats(
    config: ModelConfig, checkpoint_dtype: str, isa: str, stored: Mapping[str, Stored] = MappingProxyType({})
) -> Formats:
    """Linears, and embedding with output matrix; `stored` has the formats that a GGUF file gives (`Formats.stored`).

    auto keeps those. Of other files it is bfloat16 where the processor multiplies it and the checkpoint has no more to
    give, else float32. Half the bytes and twice the products of float32 halve a step, and on the built-in model not one
    answer differs. int4 is q4_1: a scale and a minimum for each 32 weights, fitted by least squares, or the file's own
    codes where it has them.
    """
    dtype, head = config.dtype, config.lm_head_dtype
    if dtype == "auto" and not stored:
        half = checkpoint_dtype in ("bfloat16", "float16") and isa in ("avx512", "amx")
        dtype = "bfloat16" if half else "float32"
    outputs = stored.get("output.weight", stored.get("embedding.weight"))
    if head == "auto" and dtype in ("auto", "int4") and outputs is not None:
        head = outputs[0][1].dtype
    elif head == "auto":
        head = "int8" if dtype == "int4" else dtype
    if dtype != "auto":
        return Formats(linears=_format(dtype), head=_format(head))
    asked = () if config.lm_head_dtype == "auto" else ("embedding.weight", "output.weight")
    kept = {name: parts for name, parts in stored.items() if name not in asked}
    most = Counter(format for parts in kept.values() for _, format in parts).most_common(1)
    return Formats(linears=_format(most[0][0].dtype), head=_format(head), stored=kept)


def stored_formats(checkpoint: Checkpoint, spec: DecoderSpec | HeadSpec) -> dict[str, Stored]:
    """`Formats.stored` where matrices have formats of their own (GGUF files, quantised folders); of others none."""
    if not checkpoint.has_formats:
        return {}
    found: dict[str, list[tuple[int, Format]]] = {}
    for source in weight_map(spec, checkpoint.tensor_names()):
        if source.is_matrix and not source.parameter.endswith(ROUTERS):
            dtype, order = checkpoint.dtype_of(source.tensor), checkpoint.order_of(source.tensor)
            if source.is_turned and dtype not in ("F32", "F16", "BF16"):  # blocks go along rows
                dtype, order = "BF16", ""
            # Rows of embeddings are read as they are there, and experts share their rows.
            if order and (source.parameter in ("embedding.weight", "output.weight") or ".experts." in source.parameter):
                dtype, order = "F32", ""
            format = Format(dtype=HELD_AS.get(dtype, dtype), order=order)
            found.setdefault(source.parameter, []).extend((piece.row, format) for piece in source.pieces())
    return {parameter: tuple(_runs(sorted(parts, key=_row))) for parameter, parts in found.items()}


def _row(part: tuple[int, Format]) -> int:
    return part[0]


def _runs(parts: Sequence[tuple[int, Format]]) -> Iterator[tuple[int, Format]]:
    """The first of each run of parts in one format."""
    for before, part in zip([None, *parts], parts, strict=False):
        if before is None or before[1] != part[1]:
            yield part


def _format(dtype: str) -> Format:
    return Format(dtype="q4_1" if dtype == "int4" else dtype)


def resolve_kv_dtype(name: str, dtype: str) -> str:
    """auto is float32 beside float32 weights, else bfloat16."""
    if name != "auto":
        return name
    return "float32" if dtype == "float32" else "bfloat16"


def default_isa() -> str:
    """MAITRED_ISA, else the best this processor has. Raises ConfigError for one that is not available."""
    try:
        return str(_native.default_isa())
    except ValueError as error:
        raise ConfigError(f"MAITRED_ISA: {error}") from None

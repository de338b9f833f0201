"""A draft model in the native library: its program, its pool, and chains of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.executor.native_plan import NativePlan, plan_native_executor
from maitred.executor.native_program import Int32s, NativeProgram
from maitred.executor.ragged import RaggedStep, running_sums
from maitred.kernels import _native
from maitred.kernels.sampler import FAULTS, Sampler
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.packed import OnPacked
from maitred.model.spec import DecoderSpec
from maitred.speculative.draft import ChainEnd, DraftModel, DraftTokens, Piece
from maitred.speculative.proposer import SamplerSettings
from maitred.text.folder import vocabulary_difference

_MASK_64 = 2**64 - 1


class NativeDraftRunner:
    """Runs a draft model (`speculative.draft.DraftRunner`)."""

    def __init__(self, program: NativeProgram, pool: Any, sampler: Sampler, *, max_positions: int) -> None:
        """`pool` is the `_native.KVPool` that the program writes."""
        self._program, self._pool, self._sampler = program, pool, sampler
        self.max_tokens = program.max_tokens
        self.max_rows = min(program.max_tokens, program.max_logits)
        self.max_positions = max_positions
        self.num_blocks = int(pool.num_blocks)

    def compute(self, pieces: Sequence[Piece]) -> None:
        self._program.run(step_of(pieces), ())

    def chain(self, pieces: Sequence[Piece], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        return chain_rows(self._program, self._sampler, pieces, ends)

    def close(self) -> None:
        self._program.close()
        del self._program, self._pool, self._sampler


def plan_draft(
    config: ModelConfig,
    served: Checkpoint,
    checkpoint: Checkpoint,
    *,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    num_threads: int,
) -> NativePlan:
    """Settle formats and memory of a draft model, `checkpoint`, beside the served one; on as many threads at most.

    Raises ConfigError for another vocabulary, and as `plan_native_executor` does.
    """
    spec = spec_from_config(checkpoint.config)
    _check_vocabulary(served, spec_from_config(served.config), checkpoint, spec)
    alone = replace(config, tensor_parallel=1)  # rank 0 makes drafts up by itself
    plan = plan_native_executor(
        alone, checkpoint, spec, cache=cache, scheduler=scheduler, num_threads=config.num_threads or num_threads
    )
    return replace(plan, num_threads=min(plan.num_threads, num_threads))


def draft_proposer(
    plan: NativePlan, threads: Any, *, num_blocks: int, max_model_len: int, on_packed: OnPacked | None = None
) -> tuple[DraftModel, str]:
    """The draft model, loaded, and where its weights came from; blocks and context are the served model's.

    `threads` are the executor's, a `_native.ThreadPool`; a smaller model has one of its own.
    Raises CheckpointError or OutOfMemory.
    """
    if plan.num_threads < threads.num_threads:
        threads = _native.ThreadPool(plan.num_threads)
    pool = plan.make_pool(num_blocks)
    context = min(max_model_len, plan.spec.max_position_embeddings)
    program, summary = plan.load(threads, pool, max_model_len=context, on_packed=on_packed)
    runner = NativeDraftRunner(program, pool, Sampler(threads, isa=plan.isa), max_positions=context)
    return DraftModel(runner, block_size=plan.block_size), summary


def chain_rows(
    program: NativeProgram,
    sampler: Sampler,
    pieces: Sequence[Piece],
    ends: Sequence[ChainEnd],
    *,
    ahead: int = 0,
    vocabulary: Int32s | None = None,
) -> list[DraftTokens]:
    """A chain of the program's steps; tokens of the pieces stand `ahead` of the positions that they are computed at."""
    firsts = [piece.start + len(piece.token_ids) + ahead for piece in pieces]
    made = program.chain(
        sampler,
        step_of(pieces),
        np.array([end.num_tokens for end in ends], dtype=np.int32),
        np.array([_settings(end.settings) for end in ends], dtype=np.float64),
        np.array([_sequence(end.settings, first) for end, first in zip(ends, firsts, strict=True)], dtype=np.uint64),
        vocabulary,
    )
    rows = zip(made.tokens.tolist(), made.counts.tolist(), made.faults.tolist(), strict=True)
    return [DraftTokens(tokens[:count], FAULTS[fault]) for tokens, count, fault in rows]


def _check_vocabulary(served: Checkpoint, served_spec: DecoderSpec, checkpoint: Checkpoint, spec: DecoderSpec) -> None:
    """Raises ConfigError where a token id would be another token to the draft model."""
    if spec.vocab_size != served_spec.vocab_size:
        raise ConfigError(
            f"the draft model {checkpoint.name} has a vocabulary of {spec.vocab_size:,} tokens and {served.name} "
            f"one of {served_spec.vocab_size:,}; drafts need the same"
        )
    if checkpoint.gguf is None and not (checkpoint.folder / "tokenizer.json").is_file():
        return  # as with a head trained for the served model: the size has to do
    difference = vocabulary_difference(checkpoint.tokenizer_file(), served.tokenizer_file())
    if difference is not None:
        raise ConfigError(f"the draft model {checkpoint.name} has another vocabulary than {served.name}: {difference}")


def step_of(pieces: Sequence[Piece]) -> RaggedStep:
    num_tokens = [len(piece.token_ids) for piece in pieces]
    first_tokens = running_sums(num_tokens)
    starts = np.array([piece.start for piece in pieces], dtype=np.int32) - first_tokens[:-1]
    positions = np.arange(first_tokens[-1], dtype=np.int32) + np.repeat(starts, num_tokens)
    return RaggedStep(
        token_ids=np.concatenate([piece.token_ids for piece in pieces], dtype=np.int32, casting="unsafe"),
        positions=positions,
        first_tokens=first_tokens,
        block_tables=np.concatenate([piece.block_ids for piece in pieces], dtype=np.int32, casting="unsafe"),
        first_blocks=running_sums([len(piece.block_ids) for piece in pieces]),
    )


def _settings(sampler: SamplerSettings) -> tuple[float, float, float, float]:
    p = sampler.sampling
    return (0.0, 0.0, 1.0, 0.0) if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)


def _sequence(settings: SamplerSettings, position: int) -> tuple[int, int, int]:
    """Return the sequence that `sampler.uniform` draws with for the token at the position."""
    return settings.seed & _MASK_64, settings.sample_index & _MASK_64, position

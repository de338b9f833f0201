"""The native executor: a plan becomes one call of the compiled program, on a CPU and without PyTorch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.core.step import BlockCopy, ModelOutput, SampledRow, SchedulerOutput, TokenLogprobs
from maitred.executor.grammar import Grammars
from maitred.executor.native_lora import NativeAdapters, refuse
from maitred.executor.rows import (
    PROMPT_LOGPROBS_CHUNK,
    accepted,
    follow_grammars,
    keep,
    num_checked,
    prompt_tokens_due,
    report,
    samplers_of,
    wait_for_masks,
    with_drafts,
)
from maitred.executor.sampler import SampledToken, token_logprobs
from maitred.executor.sampler_state import RequestSampler
from maitred.executor.state import ComputedRows, HeldRequest, Proposer, RowWork, SwapBandwidth, take_plan
from maitred.kernels import _native
from maitred.kernels.kv_pool import HostBlocks
from maitred.kv.layout import CellLayout, NativeLayers

_MEASURED_BLOCKS = 64
_REPEATS = 3


class NativeHostPool:
    """`num_blocks` whole blocks of `pool` (a `_native.KVPool`), copied by `threads` (a `_native.ThreadPool`)."""

    def __init__(self, pool: Any, num_blocks: int, threads: Any) -> None:
        self._blocks = HostBlocks(pool, num_blocks, threads)
        self._most = min(_MEASURED_BLOCKS, num_blocks, pool.num_blocks)

    def copy_out(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the pool to the host."""
        if copies:
            self._blocks.copy_out([copy.source for copy in copies], [copy.target for copy in copies])

    def copy_in(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the host to the pool."""
        if copies:
            self._blocks.copy_in([copy.source for copy in copies], [copy.target for copy in copies])

    def measure(self) -> SwapBandwidth:
        """Times copies of some blocks, out and in; the best of a few. The pool must hold nothing of worth."""
        copies = [BlockCopy(i, i) for i in range(self._most)]
        num_bytes = self._most * self._blocks.bytes_per_block
        out_s = min(_timed(lambda: self.copy_out(copies)) for _ in range(_REPEATS))
        in_s = min(_timed(lambda: self.copy_in(copies)) for _ in range(_REPEATS))
        return SwapBandwidth(num_bytes / out_s, num_bytes / in_s)


def _timed(copy: Callable[[], None]) -> float:
    started = time.perf_counter()
    copy()
    return max(time.perf_counter() - started, 1e-9)


Int32s = NDArray[np.int32]


class Slice(NamedTuple):
    """Tokens [start, start + num_tokens) of a row; `samples` when the row does, with its last token and drafts in
    it.
    """

    row: int  # its place in the plan
    work: RowWork
    start: int
    num_tokens: int
    samples: bool

    @property
    def num_sampled(self) -> int:
        """Positions that are sampled: its last ones."""
        return 1 + len(self.work.drafts) if self.samples else 0


@dataclass(slots=True)
class RaggedStep:
    """Rows as `StepRows` of the native library points to them; T tokens of R slices."""

    token_ids: Int32s  # [T]
    positions: Int32s  # [T]
    first_tokens: Int32s  # [R + 1]
    block_tables: Int32s  # block ids of slice 0, then of slice 1, ...
    first_blocks: Int32s  # [R + 1]
    adapters: Int32s | None = None  # [R] slots, -1 for none; None where no row has one


def cut(works: Sequence[RowWork], max_tokens: int, skipped: Container[int] = ()) -> list[list[Slice]]:
    """Passes of at most `max_tokens` tokens each, in the rows' order, without the rows that are `skipped`.

    A last known token and its drafts share one.
    """
    passes: list[list[Slice]] = [[]]
    room = max_tokens
    for index, work in enumerate(works):
        if index in skipped:
            continue
        start, end = work.row.start, work.row.start + work.row.num_tokens
        while start < end:
            if room == 0:
                passes.append([])
                room = max_tokens
            count = min(room, end - start)
            together = end - 1 - work.row.num_drafts
            if together < start + count < end:
                count = together - start
                if count == 0:
                    passes.append([])
                    room = max_tokens
                    continue
            passes[-1].append(Slice(index, work, start, count, work.row.samples and start + count == end))
            start += count
            room -= count
    return passes if passes[0] else []


def ragged_step(slices: Sequence[Slice], block_size: int) -> RaggedStep:
    """Block tables already hold this step's blocks."""
    num_tokens = [piece.num_tokens for piece in slices]
    tables = [piece.work.state.blocks.array[: -(-(piece.start + piece.num_tokens) // block_size)] for piece in slices]
    first_tokens = running_sums(num_tokens)
    total = int(first_tokens[-1])
    starts = [piece.start for piece in slices]
    if total == len(slices):  # one token each
        tokens = [piece.work.state.tokens.array[piece.start] for piece in slices]
        token_ids, positions = np.array(tokens, dtype=np.int32), np.array(starts, dtype=np.int32)
    else:
        token_ids = np.empty(total, dtype=np.int32)
        positions = np.arange(total, dtype=np.int32)
        for piece, first in zip(slices, first_tokens.tolist(), strict=False):
            end = first + piece.num_tokens
            known = piece.work.state.tokens.array[piece.start : piece.start + piece.num_tokens]
            token_ids[first : first + len(known)] = known
            if piece.samples and piece.work.drafts:
                token_ids[first + len(known) : end] = piece.work.drafts
            positions[first:end] += piece.start - first
    return RaggedStep(
        token_ids=token_ids,
        positions=positions,
        first_tokens=first_tokens,
        block_tables=np.concatenate(tables, dtype=np.int32, casting="unsafe"),
        first_blocks=running_sums([len(table) for table in tables]),
    )


def running_sums(counts: Sequence[int]) -> Int32s:
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return sums


logger = logging.getLogger(__name__)
Logits = NDArray[np.float32]

# (request id, first position, logits [n, V] of positions first ..)
OnLogits = Callable[[str, int, Logits], None]

SampleRows = Callable[[Logits, Sequence[RequestSampler]], list[SampledToken]]


class Runner(Protocol):
    """The compiled program; `kernels.program.NativeProgram` is one."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of one call."""

    @property
    def max_logits(self) -> int:
        """Most rows of logits of one call."""

    @property
    def vocab_size(self) -> int: ...

    def run(self, step: RaggedStep, logits_tokens: Sequence[int]) -> Logits:
        """Compute the step and [len(logits_tokens), V] logits of those tokens; a view, good until the next call."""

    def more_logits(self, logits_tokens: Sequence[int]) -> Logits:
        """The same of other tokens of the step that ran last."""

    @property
    def taps(self) -> NDArray[np.float32] | None:
        """[max_tokens, width] of the step that ran last, for a head; None of a program without."""

    def close(self) -> None: ...


class ThreadNumbers(Protocol):
    """Choice of the number of threads of a step; `thread_choice.ThreadChoice` is one."""

    @property
    def num_threads(self) -> int: ...

    def took(self, num_tokens: int, num_rows: int, began_at: float, ended_at: float) -> int | None:
        """Told of a step (times in s); a number of threads when people should know of it."""


class RankGroup(Protocol):
    """Processes that compute with us; `ranks.Ranks` is one."""

    def close(self) -> None: ...


class NativeExecutor:
    """Carries out plans (`step.Executor`). Not thread-safe: one thread calls `execute`.

    `on_logits`, for tests, may be set to be given the logits of every position of every step.
    """

    deterministic = True
    """The same request gives the same bits whatever shares its steps."""

    def __init__(
        self,
        runner: Runner,
        pool: Any,
        sample_rows: SampleRows,
        *,
        block_size: int,
        host: NativeHostPool | None = None,
        on_logits: OnLogits | None = None,
        threads: Any = None,
        choice: ThreadNumbers | None = None,
        ranks: RankGroup | None = None,
        adapters: NativeAdapters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pool` is the `_native.KVPool` that the runner writes, `threads` the `_native.ThreadPool` of which `choice`
        decides how many take part; without it all do; `ranks` the processes that run the program too. `clock` tells
        seconds.
        """
        self.on_logits = on_logits
        self.vocab_size = runner.vocab_size
        self.pool = pool
        self.runner = runner
        self._sample_rows = sample_rows
        self.adapters = adapters
        self.grammars: Grammars | None = None  # for requests with one; set by the engine's builder
        self.proposer: Proposer | None = None  # of drafts; set by the engine's builder
        self.on_taps: Callable[[ComputedRows], None] | None = None  # told of what steps computed; likewise
        self._block_size = block_size
        self._states: dict[str, HeldRequest] = {}
        self._host = host
        self.threads, self.choice, self._clock = threads, choice, clock
        self._ranks = ranks

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        planned = self._take_plan(plan)
        if not planned:
            return ModelOutput(())
        drafting_at = self._clock()
        works = planned
        if any(work.row.num_drafts for work in planned):
            works = with_drafts(planned, self.proposer, self.vocab_size, self.runner.max_tokens - 1, self.grammars)
        tokens: dict[int, SampledToken] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        began_at = self._clock()
        refused = refuse(works, self.adapters) if any(work.state.adapter for work in works) else {}
        for slices in cut(works, self.runner.max_tokens, skipped=refused):
            self._run(slices, tokens, prompts)
        self._settle_blocks(planned)
        tokens |= refused
        if self.grammars is not None and self.grammars.is_used:
            follow_grammars(works, tokens, self.grammars)
        if self.choice is not None:
            num_tokens = sum(work.row.num_tokens for work in works)
            self._choose_threads(self.choice, num_tokens, len(works), began_at)
        draft_s = began_at - drafting_at if works is not planned else 0.0
        return ModelOutput(tuple(self._reports(works, tokens, prompts)), draft_s=draft_s)

    def is_one_run(self, plan: SchedulerOutput) -> bool:
        """Return whether the program runs once for the plan (`LayerIO.progress`); runs of a head do not count."""
        return plan.num_tokens <= self.runner.max_tokens

    def measure_swap(self) -> SwapBandwidth | None:
        """Measure how fast blocks go to the host and back; None without host blocks. New executors only."""
        return self._host.measure() if self._host is not None else None

    def block_io(self) -> NativeBlocks:
        """Blocks as bytes, for other threads; ranks share the pool's memory."""
        return NativeBlocks(self.pool)

    @property
    def num_kv_layers(self) -> int:
        return int(self.pool.num_layers)

    def layer_io(self, layout: CellLayout) -> NativeLayers:
        """The same, layer by layer."""
        return NativeLayers(self.pool, layout)

    def close(self) -> None:
        """Drop states, pool, weights and threads."""
        self._states.clear()
        if self.grammars is not None:
            self.grammars.close()
        if self.proposer is not None:
            self.proposer.close()
        self._host = None
        if self._ranks is not None:
            self._ranks.close()
        self.runner.close()
        self.adapters = self.on_taps = None
        del self.runner, self.pool, self._sample_rows, self.threads

    def _choose_threads(self, choice: ThreadNumbers, num_tokens: int, num_rows: int, began_at: float) -> None:
        """Choose the threads of the next step, by the time of this one."""
        news, most = choice.took(num_tokens, num_rows, began_at, self._clock()), self.threads.num_threads
        self.threads.use(choice.num_threads)
        if news == most:
            logger.warning("all %d threads are used again: steps are faster so", most)
        elif news is not None:
            logger.warning(
                "%d of %d threads are used: steps are faster so, since other work has processors; more again when they "
                "are free (--num-threads %d keeps them all)",
                news,
                most,
                most,
            )

    def _take_plan(self, plan: SchedulerOutput) -> list[RowWork]:
        """Take in all of the plan but the computing; return each row's block table."""
        works = take_plan(plan, self._states, self.vocab_size, self.pool, self._host, self.grammars, self.proposer)
        for work in works:
            work.state.take_blocks(work.row)
        return works  # what others left in unwritten slots is never read, so nothing is cleared

    def _run(
        self, slices: Sequence[Slice], tokens: dict[int, SampledToken], prompts: dict[int, list[TokenLogprobs]]
    ) -> None:
        """Run the program once; return the wanted logits."""
        step = ragged_step(slices, self._block_size)
        names = [piece.work.state.adapter for piece in slices]
        if self.adapters is not None and any(names):
            step.adapters = self.adapters.slots(names)
        sampling = [piece for piece in slices if piece.samples]
        ends = step.first_tokens[1:].tolist()
        wanted = [
            token for piece, end in zip(slices, ends, strict=True) for token in range(end - piece.num_sampled, end)
        ]
        logits_RV = self.runner.run(step, wanted[: self.runner.max_logits])
        self._sample(sampling, wanted, logits_RV, tokens)
        for piece, first in zip(slices, step.first_tokens.tolist(), strict=False):
            self._add_prompt_logprobs(piece, first, prompts)
        if self.on_logits is not None:
            self._show_logits(self.on_logits, slices, step)
        if self.on_taps is not None and self.runner.taps is not None:
            states = [piece.work.state for piece in slices]
            starts, counts = [piece.start for piece in slices], [piece.num_tokens for piece in slices]
            self.on_taps(ComputedRows(states, starts, counts, self.runner.taps[: len(step.token_ids)].copy()))

    def _sample(
        self, slices: Sequence[Slice], wanted: Sequence[int], logits_RV: Logits, tokens: dict[int, SampledToken]
    ) -> None:
        """A token for each, and for each of its drafts that is right; they are now part of the request's state.

        `logits_RV` are those of the first of the `wanted` tokens.
        """
        if not slices:
            return
        has_masks = True
        if self.grammars is not None and self.grammars.is_used:
            has_masks = wait_for_masks([piece.work.state for piece in slices], self.grammars)
        samplers = [
            sampler
            for piece in slices
            for sampler in (samplers_of(piece.work) if piece.work.drafts else (piece.work.state.sampler,))
        ]
        sampled, most = self._sample_rows(logits_RV, samplers[: len(logits_RV)]), self.runner.max_logits
        for first in range(most, len(wanted), most):
            logits_RV = self.runner.more_logits(wanted[first : first + most])
            sampled += self._sample_rows(logits_RV, samplers[first : first + most])
        first = 0
        for piece in slices:
            state = piece.work.state
            if not piece.work.drafts:
                tokens[piece.row] = keep(state, sampled[first], has_masks)
                first += 1
                continue
            num_drafts = num_checked(piece.work, has_masks)
            found = accepted(piece.work.drafts[:num_drafts], sampled[first : first + 1 + num_drafts])
            first += piece.num_sampled
            kept = [keep(state, token, has_masks) for token in found]
            tokens[piece.row] = kept[-1]._replace(before=tuple(kept[:-1]))

    def _settle_blocks(self, planned: Sequence[RowWork]) -> None:
        """Settle the blocks of rows with planned drafts, as the scheduler does."""
        for row, state, _ in planned:
            if row.num_drafts:
                state.settle_blocks(max(row.start + row.num_known, state.tokens.size - 1), self._block_size)

    def _add_prompt_logprobs(self, piece: Slice, first: int, prompts: dict[int, list[TokenLogprobs]]) -> None:
        """Add the logprobs of prompt positions start + 1 .. start + num_tokens, each from the logits before it."""
        state = piece.work.state
        if state.prompt_logprobs is None:
            return
        row = piece.work.row._replace(start=piece.start, num_tokens=piece.num_tokens)
        next_tokens = prompt_tokens_due(RowWork(row, state))
        chunk = min(PROMPT_LOGPROBS_CHUNK, self.runner.max_logits)
        for offset in range(0, len(next_tokens), chunk):
            due = next_tokens[offset : offset + chunk]
            logits_nV = self.runner.more_logits(range(first + offset, first + offset + len(due)))
            prompts.setdefault(piece.row, []).extend(
                token_logprobs(logits_V, token, state.prompt_logprobs)
                for logits_V, token in zip(logits_nV, due, strict=True)
            )

    def _reports(
        self, works: Sequence[RowWork], tokens: dict[int, SampledToken], prompts: dict[int, list[TokenLogprobs]]
    ) -> Iterator[SampledRow]:
        for index, work in enumerate(works):
            found = prompts.get(index)
            reported = report(work, tokens.get(index), tuple(found) if found is not None else None)
            if reported is not None:
                yield reported

    def _show_logits(self, on_logits: OnLogits, slices: Sequence[Slice], step: RaggedStep) -> None:
        for piece, first in zip(slices, step.first_tokens.tolist(), strict=False):
            for offset in range(0, piece.num_tokens, self.runner.max_logits):
                count = min(self.runner.max_logits, piece.num_tokens - offset)
                logits_nV = self.runner.more_logits(range(first + offset, first + offset + count))
                on_logits(piece.work.row.request_id, piece.start + offset, logits_nV.copy())


class NativeBlocks:
    """Whole KV blocks of the pool as bytes, for threads beside a step. A block is a row of `bytes_per_block`.

    Only for blocks that no step writes meanwhile; the GIL is released.
    """

    def __init__(self, pool: _native.KVPool) -> None:
        self.bytes_per_block: int = pool.bytes_per_block
        self._pool = pool
        self._caller = _native.ThreadPool(1)  # copies are made in the thread that asks for them

    def read(self, blocks: Sequence[int], into: memoryview) -> None:
        """Raises KernelError for a block that is not there, or another number of bytes."""
        self._copy(self._pool.read_blocks, blocks, into)

    def write(self, blocks: Sequence[int], rows: memoryview) -> None:
        """Raises KernelError for a block that is not there, or another number of bytes."""
        self._copy(self._pool.write_blocks, blocks, rows)

    def _copy(self, copy: Any, blocks: Sequence[int], rows: memoryview) -> None:
        if len(rows) != len(blocks) * self.bytes_per_block:
            raise KernelError(f"{len(rows)} bytes for {len(blocks)} blocks of {self.bytes_per_block}")
        if blocks:
            array = np.frombuffer(rows, np.uint8).reshape(len(blocks), self.bytes_per_block)
            try:
                copy(list(blocks), array, list(range(len(blocks))), self._caller)
            except (IndexError, ValueError) as error:
                raise KernelError(str(error)) from None

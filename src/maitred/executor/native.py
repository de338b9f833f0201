"""The native executor: a plan becomes one call of the compiled program, on a CPU and without PyTorch."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.core.step import BlockCopy, ModelOutput, SampledRow, SchedulerOutput, TokenLogprobs
from maitred.executor.grammar import Grammars
from maitred.executor.native_lora import NativeAdapters, refuse
from maitred.executor.native_program import NativeProgram, RaggedStep, running_sums
from maitred.executor.pooling import Pooler, PoolingRow, StepStates
from maitred.executor.ranks import Ranks
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
from maitred.executor.state import (
    ComputedRows,
    HeldRequest,
    PageTables,
    Proposer,
    RowWork,
    StateSlots,
    SwapBandwidth,
    take_plan,
)
from maitred.kernels import _native
from maitred.kernels.kv_pool import HostBlocks
from maitred.kv.layout import CellLayout, LayerIO, NativeLayers, in_model_order
from maitred.kv.pages import KVGroups

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
        """Positions that are sampled, if any are: its last ones."""
        return 1 + len(self.work.drafts)


def cut(works: Sequence[RowWork], max_tokens: int, skipped: Container[int] = ()) -> list[list[Slice]]:
    """Passes of at most `max_tokens` tokens each, in the rows' order, without the rows that are `skipped`.

    A last known token and its drafts share one.
    """
    passes: list[list[Slice]] = [[]]
    room = max_tokens
    for index, work in enumerate(works):
        if index in skipped:
            continue
        _, start, num_tokens, samples, _, _, num_drafts = work.row
        end = start + num_tokens
        together = end - 1 - num_drafts
        while start < end:
            if room == 0:
                passes.append([])
                room = max_tokens
            count = min(room, end - start)
            if together < start + count < end:
                count = together - start
                if count == 0:
                    passes.append([])
                    room = max_tokens
                    continue
            passes[-1].append(Slice(index, work, start, count, samples and start + count == end))
            start += count
            room -= count
    return passes if passes[0] else []


def ragged_step(slices: Sequence[Slice], block_size: int, pages: PageTables | None = None) -> RaggedStep:
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
    blocks = np.concatenate(tables, dtype=np.int32, casting="unsafe")
    return RaggedStep(
        token_ids=token_ids,
        positions=positions,
        first_tokens=first_tokens,
        block_tables=blocks if pages is None else pages.of(blocks).ravel(),
        first_blocks=running_sums([len(table) for table in tables]),
    )


logger = logging.getLogger(__name__)
Logits = NDArray[np.float32]

# (request id, first position, logits [n, V] of positions first ..)
OnLogits = Callable[[str, int, Logits], None]

SampleRows = Callable[[Logits, Sequence[RequestSampler]], list[SampledToken]]


LOST_S, WON_S = 0.03, 0.1  # of a trial's steps: several time slices of another process; more to be believed
WON_STEPS = 4
LOST = 1.25  # a trial ends as soon as its steps take so many times what steps like them take
WON = 0.95  # another number is taken where they take less than this
LIKE_STEPS, MAX_UNLIKE_STEPS = 3, 4  # unlike: more than like ones, in a trial that tells nothing
MAX_RECENT = 64  # steps with the present number
SILENCE_S = 1.0  # what came before it tells nothing of the machine now
SLOWED_S, SLOWED = 0.1, 1.5  # steps for so long that take so many times what their like did: others want the cores now
FIRST_WAIT_S = 0.25  # of steps
WAITS, MAX_DOUBLINGS = 4, 4  # 64 trials' time between two: where a trial takes twice the time, it costs under 1%


class ThreadedShape(NamedTuple):
    """Steps of one shape take about the same time with one number of threads."""

    tokens: int  # in eighths of an octave
    rows: int  # in quarters


@dataclass(slots=True)
class _Trial:
    num_threads: int
    num_steps: int = 0
    num_unlike: int = 0
    spent_s: float = 0.0
    took_s: float = 0.0  # by steps whose like is known
    usual_s: float = 0.0  # what these take with the present number


class ThreadChoice:
    """Decides by measured steps, given one after the other; needs no clock.

    A trial takes another number for some steps. Its first step is not counted: threads awake and move then. A number
    that was just taken is tried against others soon, and each time that it stays the wait for the next trial doubles.
    Where steps become much slower, as when another model begins to be asked, what was measured before is forgotten.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._present = self._told = most
        self._recent: deque[tuple[ThreadedShape, float]] = deque(maxlen=MAX_RECENT)  # steps with the present number
        self._trial: _Trial | None = None
        self._wait_s, self._waited_s = FIRST_WAIT_S, 0.0  # of steps
        self._took_s = self._like_s = 0.0  # by the last steps, and by their like before
        self._num_stayed = 0
        self._ended_at = 0.0

    @property
    def num_threads(self) -> int:
        """Return the number of threads for the next step."""
        return self._trial.num_threads if self._trial is not None else self._present

    def took(self, num_tokens: int, num_rows: int, began_at: float, ended_at: float) -> int | None:
        """Takes in a step with `num_threads`; another number when it has proven itself, for people to be told."""
        if self._most == 1:
            return None
        if began_at > self._ended_at + SILENCE_S:
            self._recent.clear()
            self._trial = None
        self._ended_at = ended_at
        shape, seconds = ThreadedShape(round(8 * log2(num_tokens)), round(4 * log2(num_rows))), ended_at - began_at
        if self._trial is not None:
            return self._tried(self._trial, shape, seconds)
        if self._has_slowed(shape, seconds):
            self._recent.clear()
            self._wait_s, self._waited_s, self._num_stayed = FIRST_WAIT_S, 0.0, 0
        self._recent.append((shape, seconds))
        self._waited_s += seconds
        if self._waited_s >= self._wait_s and self._usual_s(shape) is not None:
            others = other_numbers(self._present, self._most)
            self._trial = _Trial(others[self._num_stayed % len(others)])
        return None

    def _has_slowed(self, shape: ThreadedShape, seconds: float) -> bool:
        usual_s = self._usual_s(shape)
        if usual_s is None:
            return False
        self._took_s += seconds
        self._like_s += usual_s
        if self._took_s < SLOWED_S:
            return False
        slowed = self._took_s > SLOWED * self._like_s
        self._took_s = self._like_s = 0.0
        return slowed

    def _tried(self, trial: _Trial, shape: ThreadedShape, seconds: float) -> int | None:
        trial.spent_s += seconds
        trial.num_steps += 1
        if trial.num_steps == 1:
            return None
        usual_s = self._usual_s(shape)
        if usual_s is None:
            trial.num_unlike += 1
        else:
            trial.took_s += seconds
            trial.usual_s += usual_s
        num_like = trial.num_steps - 1 - trial.num_unlike
        lost = trial.took_s >= max(LOST_S, LOST * trial.usual_s)
        if lost or trial.num_unlike == num_like + MAX_UNLIKE_STEPS or (trial.took_s >= WON_S and num_like >= WON_STEPS):
            return self._end(trial, won=num_like >= WON_STEPS and trial.took_s < WON * trial.usual_s)
        return None

    def _end(self, trial: _Trial, *, won: bool) -> int | None:
        self._trial, self._waited_s = None, 0.0
        if won:
            self._present, self._num_stayed = trial.num_threads, 0
            self._recent.clear()
        else:
            self._num_stayed += 1
        self._wait_s = max(FIRST_WAIT_S, WAITS * trial.spent_s * 2 ** min(self._num_stayed, MAX_DOUBLINGS))
        if won or self._present == self._told:
            return None
        self._told = self._present
        return self._present

    def _usual_s(self, shape: ThreadedShape) -> float | None:
        """Mean, since a stall in one of ten steps is what counts; None where too few are known."""
        like = [seconds for other, seconds in self._recent if other == shape]
        return sum(like) / len(like) if len(like) >= LIKE_STEPS else None


def other_numbers(present: int, most: int) -> list[int]:
    """Return the numbers to be tried in turn: one thread more or less, half of them, all."""
    return sorted({n for n in (present - 1, present // 2, present + 1, most) if 1 <= n <= most} - {present})


class NativeExecutor:
    """Carries out plans (`step.Executor`). Not thread-safe: one thread calls `execute`.

    `on_logits`, for tests and evaluation, may be set to be given the logits of every position of every step.
    """

    deterministic = True
    """The same request gives the same bits whatever shares its steps."""

    def __init__(
        self,
        runner: NativeProgram,
        pool: Any,
        sample_rows: SampleRows,
        *,
        block_size: int,
        host: NativeHostPool | None = None,
        on_logits: OnLogits | None = None,
        threads: Any = None,
        choice: ThreadChoice | None = None,
        ranks: Ranks | None = None,
        adapters: NativeAdapters | None = None,
        pages: PageTables | None = None,
        states: StateSlots | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pool` is the `_native.KVPool` that the runner writes, `threads` the `_native.ThreadPool` of which `choice`
        decides how many take part; without it all do; `ranks` the processes that run the program too. `pages` are where
        blocks are not whole, `states` where layers are recurrent. `clock` tells seconds.
        """
        self.on_logits = on_logits
        self.vocab_size = runner.vocab_size
        self.pool = pool
        self.runner = runner
        self._sample_rows = sample_rows
        self.adapters = adapters
        self.grammars: Grammars | None = None  # for requests with one; set by the engine's builder
        self.proposer: Proposer | None = None  # of drafts; set by the engine's builder
        self.pooler: Pooler | None = None  # for requests that pool; likewise
        self.on_taps: Callable[[ComputedRows], None] | None = None  # told of what steps computed; likewise
        self._block_size = block_size
        self._states: dict[str, HeldRequest] = {}
        self._host = host
        self.threads, self.choice, self._clock = threads, choice, clock
        self._ranks = ranks
        self.pages = pages
        self._slots = states

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        planned = self._take_plan(plan)
        if not planned:
            return ModelOutput(())
        drafting_at = self._clock()
        works, drafting = planned, [work for work in planned if work.row.num_drafts]
        if drafting:
            works = with_drafts(planned, self.proposer, self.vocab_size, self.runner.max_tokens - 1, self.grammars)
        tokens: dict[int, SampledToken] = {}
        prompts: dict[int, list[TokenLogprobs]] = {}
        began_at = self._clock()
        refused = refuse(works, self.adapters) if [work for work in works if work.state.adapter] else {}
        for slices in cut(works, self.runner.max_tokens, skipped=refused):
            self._run(slices, tokens, prompts)
        for row, state, _ in drafting:  # as the scheduler does
            state.settle_blocks(max(row.start + row.num_known, state.tokens.size - 1), self._block_size)
        tokens |= refused
        if self.grammars is not None and self.grammars.is_used:
            follow_grammars(works, tokens, self.grammars)
        if self.choice is not None:
            num_tokens = sum([work.row.num_tokens for work in works])
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
    def groups(self) -> KVGroups | None:
        """Groups of layers, where blocks consist of pages."""
        return self.pages.groups if self.pages is not None else None

    @property
    def num_kv_layers(self) -> int:
        return len(self.groups.places) if self.groups is not None else int(self.pool.num_layers)

    def layer_io(self, layout: CellLayout) -> LayerIO:
        """The same, layer by layer."""
        return in_model_order(NativeLayers(self.pool, layout), self.groups)

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
        self.adapters = self.on_taps = self.pooler = None
        del self.runner, self.pool, self._sample_rows, self.threads

    def _choose_threads(self, choice: ThreadChoice, num_tokens: int, num_rows: int, began_at: float) -> None:
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
        copy = self.pool.copy_blocks if self.pages is None else self.pages.take(plan, self.pool.copy_blocks)
        works = take_plan(plan, self._states, self.vocab_size, copy, self._host, self.grammars, self.proposer)
        for work in works:
            work.state.take_blocks(work.row)
        if self._slots is not None:
            self._slots.take(plan, self.runner.copy_states)
        return works  # what others left in unwritten slots is never read, so nothing is cleared

    def _run(
        self, slices: Sequence[Slice], tokens: dict[int, SampledToken], prompts: dict[int, list[TokenLogprobs]]
    ) -> None:
        """Run the program once; return the wanted logits."""
        step = ragged_step(slices, self._block_size, self.pages)
        if self.adapters is not None and any(names := [piece.work.state.adapter for piece in slices]):
            step.adapters = self.adapters.slots(names)
        if self._slots is not None:
            self._add_states(self._slots, slices, step)
        sampling = [piece for piece in slices if piece.samples and piece.work.state.pooling is None]
        firsts = step.first_tokens.tolist()
        pooling = [
            PoolingRow(piece.row, piece.work.state, piece.start, first, piece.num_tokens, piece.samples)
            for piece, first in zip(slices, firsts, strict=False)
            if piece.work.state.pooling is not None
        ]
        if pooling and self.pooler is not None:
            self.pooler.tell_types(pooling, step.token_ids)
        wanted = [
            token
            for piece, end in zip(slices, firsts[1:], strict=True)
            if piece.samples and piece.work.state.pooling is None
            for token in range(end - piece.num_sampled, end)
        ]
        logits_RV = self.runner.run(step, wanted[: self.runner.max_logits])
        self._sample(sampling, wanted, logits_RV, tokens)
        if pooling and self.pooler is not None:  # else the scheduler hears that there is no answer
            runner = self.runner
            left = StepStates(lambda: runner.all_states, runner.last_states, runner.more_logits, runner.max_logits)
            self.pooler.pool(pooling, left, tokens)
        for piece, first in zip(slices, firsts, strict=False):
            if piece.work.state.prompt_logprobs is not None:
                self._add_prompt_logprobs(piece, first, prompts)
        if self.on_logits is not None:
            self._show_logits(self.on_logits, slices, step)
        if self.on_taps is not None and self.runner.taps is not None:
            states = [piece.work.state for piece in slices]
            starts, counts = [piece.start for piece in slices], [piece.num_tokens for piece in slices]
            self.on_taps(ComputedRows(states, starts, counts, self.runner.taps[: len(step.token_ids)].copy()))

    def _add_states(self, slots: StateSlots, slices: Sequence[Slice], step: RaggedStep) -> None:
        """What becomes of the slices' states: the last known token of a row that a grammar may postpone is not certain,
        and drafts are not."""
        rows, saves = [], []
        for index, (_, work, start, num_tokens, samples) in enumerate(slices):
            unsure = len(work.drafts) + (work.state.grammar is not None) if samples else 0
            rows.append(slots.advance(work, start, num_tokens - unsure, unsure))
            saves += [(index, *save) for save in slots.saves(work, start, num_tokens)]
        step.states = np.array(rows, dtype=np.int32)
        step.saves = np.array(saves, dtype=np.int32) if saves else None

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

    def _add_prompt_logprobs(self, piece: Slice, first: int, prompts: dict[int, list[TokenLogprobs]]) -> None:
        """Add the logprobs of prompt positions start + 1 .. start + num_tokens, each from the logits before it."""
        state = piece.work.state
        assert state.prompt_logprobs is not None
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

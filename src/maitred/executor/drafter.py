"""Drafter: a draft model, or a head of the served model, samples what the served model may say next.

Drafts are guesses, which the served model checks: penalties, masks and forced tokens are left out. The two differ in
what they read. A draft model is a smaller model of the same vocabulary (`KnownTokens`); a head is one layer beside the
served model that reads what that computed, its taps (`WaitingTaps`).
Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192;
Li et al., EAGLE-3, 2025, arXiv:2503.01840.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace as struct_replace

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.executor.native import NativeExecutor
from maitred.executor.native_plan import (
    NativePlan,
    expert_buffer_values,
    layer_places,
    plan_native_executor,
    stored_formats,
)
from maitred.executor.native_program import Int32s, NativeProgram, RaggedStep, most_logits, running_sums
from maitred.executor.sampler_state import RequestSampler
from maitred.executor.state import ComputedRows, DraftAsk, HeldRequest, Ints, Proposer, TapRows
from maitred.kernels import _native
from maitred.kernels.sampler import FAULTS, Sampler
from maitred.model.checkpoint import Checkpoint
from maitred.model.families import spec_from_config
from maitred.model.head import HeadCheckpoint, MtpLayer, compile_head
from maitred.model.packed import OnPacked, PackedWeights, plan_weights, total_bytes
from maitred.model.packed_cache import load_weights
from maitred.model.program import Embed, Linear, Program
from maitred.model.spec import DecoderSpec
from maitred.text.folder import vocabulary_difference

logger = logging.getLogger(__name__)
WAITING_BYTES = 64 * 2**20
"""Bytes of taps, at most."""
KEPT = 32
"""Steps without a draft, after which a request keeps the taps of so many last positions: drafts are then as often right
as with all taps, and the next trial of drafts has that much to catch up with.
"""
_LOGGED = 16
"""Steps after which their taps are dealt out to the requests together."""
_POSITIVE = 2**63 - 1
_MASK_64 = 2**64 - 1
_INDEX_BITS = 24  # blocks of one request


class DraftPiece(NamedTuple):
    """Tokens of a request that follow each other, to be computed."""

    token_ids: Ints
    start: int  # position of the first
    block_ids: Ints  # the block table, as far as it will be written
    taps: TapRows | None = None  # for a head: of the positions from `start` on, one before each token's


class ChainEnd(NamedTuple):
    """How far a chain goes on from a piece, and its settings of drawing."""

    num_tokens: int
    settings: RequestSampler


class DraftTokens(NamedTuple):
    tokens: list[int]
    fault: str | None  # why they are fewer than were wanted


class DraftRunner:
    """Runs a drafter's program, of a model over its own pool, or of a head over the served one."""

    def __init__(
        self,
        program: NativeProgram,
        sampler: Sampler,
        *,
        max_positions: int,
        num_blocks: int = 0,
        vocabulary: Int32s | None = None,
    ) -> None:
        """`vocabulary` has the served model's token of each that a head may say; None where they are the same."""
        self._program, self._sampler, self._vocabulary = program, sampler, vocabulary
        self.table_of: Callable[[Ints], Ints] = lambda blocks: blocks
        """Makes block tables of blocks: of their pages, where a head's layer lies in a group."""
        self.max_tokens = program.max_tokens  # of a pass
        self.max_rows = min(program.max_tokens, program.max_logits)  # pieces of a chain
        self.max_positions = max_positions
        self.num_blocks = num_blocks

    def compute(self, pieces: Sequence[DraftPiece]) -> None:
        """K and V of these tokens."""
        self._give_taps(pieces)
        self._program.run(_step_of(pieces, self.table_of), ())

    def chain(self, pieces: Sequence[DraftPiece], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        """The same, then sample the token after each piece, compute it, and so on; the last one is not computed."""
        ahead = self._give_taps(pieces)
        firsts = [piece.start + len(piece.token_ids) + ahead for piece in pieces]
        made = self._program.chain(
            self._sampler,
            _step_of(pieces, self.table_of),
            np.array([end.num_tokens for end in ends], dtype=np.int32),
            np.array([_settings(end.settings) for end in ends], dtype=np.float64),
            np.array([_sequence(end.settings, first) for end, first in zip(ends, firsts, strict=True)], np.uint64),
            self._vocabulary,
        )
        rows = zip(made.tokens.tolist(), made.counts.tolist(), made.faults.tolist(), strict=True)
        return [DraftTokens(tokens[:count], FAULTS[fault]) for tokens, count, fault in rows]

    def close(self) -> None:
        self._program.close()
        del self._program, self._sampler

    def _give_taps(self, pieces: Sequence[DraftPiece]) -> int:
        """Hand over the pieces' taps; how far their tokens stand ahead of the positions that they are computed at."""
        first = 0
        for piece in pieces:
            if piece.taps is None:
                return 0
            assert self._program.taps is not None
            self._program.taps[first : first + len(piece.taps)] = piece.taps
            first += len(piece.taps)
        return 1


def _step_of(pieces: Sequence[DraftPiece], table_of: Callable[[Ints], Ints]) -> RaggedStep:
    num_tokens = [len(piece.token_ids) for piece in pieces]
    first_tokens = running_sums(num_tokens)
    starts = np.array([piece.start for piece in pieces], dtype=np.int32) - first_tokens[:-1]
    positions = np.arange(first_tokens[-1], dtype=np.int32) + np.repeat(starts, num_tokens)
    return RaggedStep(
        token_ids=np.concatenate([piece.token_ids for piece in pieces], dtype=np.int32, casting="unsafe"),
        positions=positions,
        first_tokens=first_tokens,
        block_tables=table_of(np.concatenate([piece.block_ids for piece in pieces])).astype(np.int32),
        first_blocks=running_sums([len(piece.block_ids) for piece in pieces]),
    )


def _settings(sampler: RequestSampler) -> tuple[float, float, float, float]:
    p = sampler.sampling
    return (0.0, 0.0, 1.0, 0.0) if p.greedy else (p.temperature, p.top_k, p.top_p, p.min_p)


def _sequence(settings: RequestSampler, position: int) -> tuple[int, int, int]:
    """Return the sequence that `sampler.uniform` draws with for the token at the position."""
    return settings.seed & _MASK_64, settings.sample_index & _MASK_64, position


@dataclass(slots=True)
class _Job:
    """A request for which drafts are made."""

    place: int  # among the asks
    request: HeldRequest
    num_drafts: int
    kept: Any  # of the request, by the drafter's source
    num_computed: int = 0  # known tokens, of a draft model


class Drafter(Proposer):
    """Proposes what a draft model or a head samples with the request's own settings and random numbers."""

    def __init__(self, runner: DraftRunner, source: KnownTokens | WaitingTaps) -> None:
        self.name = source.name
        self._runner, self._source = runner, source
        self._is_told = False  # that there are faults; the first one is

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(asks)
        jobs = list(self._jobs(asks))
        most = self._runner.max_rows
        for first in range(0, len(jobs), most):
            some = jobs[first : first + most]
            for pieces in self._source.before_chain(some, self._runner.max_tokens):
                self._runner.compute(pieces)
            ends = [ChainEnd(job.num_drafts, job.request.sampler) for job in some]
            for job, made in zip(some, self._runner.chain(self._source.last_pieces(some), ends), strict=True):
                found[job.place] = made.tokens
                self._source.drafted(job, made.tokens)
                if made.fault is not None and not made.tokens:
                    self._give_up(job, made.fault)
        return found

    def forget(self, request_id: str) -> None:
        self._source.forget(request_id)

    def close(self) -> None:
        self._source.clear()
        self._runner.close()

    def _jobs(self, asks: Sequence[DraftAsk]) -> Iterator[_Job]:
        """Jobs of requests within the drafter's context that it can draft for."""
        for place, (request, num_drafts) in enumerate(asks):
            most = min(num_drafts, self._runner.max_positions - request.tokens.size + 1)
            kept = self._source.kept_of(request)
            if most < 1 or kept is None or kept.is_hopeless:
                continue
            job = _Job(place, request, most, kept)
            if self._source.begin(job):
                yield job

    def _give_up(self, job: _Job, fault: str) -> None:
        """Whatever comes later would be computed from the same."""
        job.kept.is_hopeless = True
        level = logging.DEBUG if self._is_told else logging.WARNING
        logger.log(level, "no drafts for request %s: the %s's %s", job.request.request_id, self._source.called, fault)
        self._is_told = True


# ---- what a draft model reads


@dataclass(slots=True)
class _Computed:
    """State of a request: the first `num_known` of its tokens and the drafts after them were computed."""

    number: int  # its own, from 1
    names: list[int]  # of the blocks that its known tokens fill, see `_Blocks`
    num_known: int = 0
    drafts: Sequence[int] = ()
    settled_table: bytes = b""  # the block table before the block of the last known token
    table: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # blocks of all that a chain will write
    is_hopeless: bool = False  # what it knows gives no logits to draw from

    def mark(self, block: int) -> int:
        """Mark of a block of its table, while its known tokens do not fill it: its own, and negative."""
        return -(self.number << _INDEX_BITS | block)

    def num_as_drafted(self, tokens: Ints) -> int:
        """Return how many of `tokens`, from the beginning, were computed when it last drafted."""
        computed = self.drafts[:-1]  # the last was not
        now = tokens[self.num_known : self.num_known + len(computed)].tolist()
        pairs = enumerate(zip(computed, now, strict=False))
        return self.num_known + next((i for i, (then, token) in pairs if then != token), len(now))


class _Blocks:
    """Contents of each block of the pool: a hash of all tokens up to its end, or a mark of the one request that wrote
    there last, and where. So shared blocks are computed once, and overwritten ones are noticed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._contents = [0] * num_blocks  # 0 is nothing
        self._size = block_size

    def up_to(self, num_positions: int) -> int:
        """Blocks for so many positions."""
        return -(-num_positions // self._size)

    def name(self, names: list[int], tokens: Ints) -> None:
        """Add the names of all blocks that the tokens fill to those that are known."""
        for block in range(len(names), len(tokens) // self._size):
            filling = tokens[block * self._size : (block + 1) * self._size].tobytes()
            names.append(hash((names[-1] if names else 0, filling)) & _POSITIVE | 1)

    def num_valid(self, table: Ints, kept: _Computed, num_as_drafted: int) -> int:
        """Return how many positions lie in the table's blocks as its tokens make them."""
        names, end = kept.names, self.up_to(num_as_drafted)
        block = first = self._num_settled(table, kept)
        contents = [self._contents[block_id] for block_id in table[first : max(end, len(names))].tolist()]
        while block < len(names) and contents[block - first] == names[block]:
            block += 1
        num_named = block
        while block < end and contents[block - first] == kept.mark(block):
            block += 1
        return block * self._size if block < end else max(num_as_drafted, num_named * self._size)

    def write(self, table: Ints, kept: _Computed, first: int) -> None:
        """The request's tokens are computed from position `first` on, and drafts to the end of the table."""
        block = first // self._size
        for index, block_id in enumerate(table[block:].tolist(), block):
            self._contents[block_id] = kept.names[index] if index < len(kept.names) else kept.mark(index)

    def settle(self, table: Ints, kept: _Computed) -> None:
        """Note where the known tokens of the request are computed."""
        kept.settled_table = table[: (kept.num_known - 1) // self._size].tobytes()

    def _num_settled(self, table: Ints, kept: _Computed) -> int:
        """Return the blocks that need no look: a request keeps those before its last known token, and requests that
        share them write alike. Blocks behind go back where drafts are rejected, and come again, perhaps after others
        had them.
        """
        count = len(kept.settled_table) // table.itemsize
        return count if table[:count].tobytes() == kept.settled_table else 0


class KnownTokens:
    """A draft model reads a request's known tokens.

    K and V lie in a pool of its own under the served model's block numbers, so there is no second allocator: what two
    requests share they would write alike. They are made when drafts are asked for; what was rejected, forgotten or
    written over by another request is computed again.
    """

    name, called = "draft", "draft model"

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        """Blocks are the served model's."""
        self._kept: dict[str, _Computed] = {}
        self._num_requests = 0
        self._blocks = _Blocks(num_blocks, block_size)

    def kept_of(self, request: HeldRequest) -> _Computed:
        kept = self._kept.get(request.request_id)
        if kept is None:
            self._num_requests += 1
            kept = self._kept[request.request_id] = _Computed(self._num_requests, [])
        return kept

    def begin(self, job: _Job) -> bool:
        tokens, kept = job.request.tokens.array, job.kept
        self._blocks.name(kept.names, tokens[:-1])  # the last is computed in the chain, for its logits
        kept.table = job.request.blocks.array[: self._blocks.up_to(len(tokens) + job.num_drafts - 1)]
        valid = self._blocks.num_valid(kept.table, kept, kept.num_as_drafted(tokens))
        job.num_computed = min(valid, len(tokens) - 1)
        self._blocks.write(kept.table, kept, job.num_computed)  # here: requests that share them compute them no more
        return True

    def before_chain(self, jobs: Sequence[_Job], max_tokens: int) -> Iterator[list[DraftPiece]]:
        """Passes until what is left of all fits into one step, the last known token of each at least."""
        while sum(job.request.tokens.size - job.num_computed for job in jobs) > max_tokens:
            room, pieces = max_tokens, []
            for job in jobs:
                count = min(job.request.tokens.size - 1 - job.num_computed, room)
                if count > 0:
                    pieces.append(self._piece(job, count))
                    room -= count
            yield pieces

    def last_pieces(self, jobs: Sequence[_Job]) -> list[DraftPiece]:
        return [self._piece(job, job.request.tokens.size - job.num_computed) for job in jobs]

    def drafted(self, job: _Job, drafts: Sequence[int]) -> None:
        job.kept.num_known, job.kept.drafts = job.request.tokens.size, drafts
        self._blocks.settle(job.kept.table, job.kept)

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def clear(self) -> None:
        self._kept.clear()

    def _piece(self, job: _Job, num_tokens: int) -> DraftPiece:
        """Return a piece of so many known tokens that are not computed, which are then."""
        first = job.num_computed
        job.num_computed += num_tokens
        return DraftPiece(job.request.tokens.array[first : job.num_computed], first, job.kept.table)


# ---- what a head reads


@dataclass(slots=True)
class _Waiting:
    """Taps of a request that wait, of positions that follow each other."""

    request: HeldRequest
    first: int = 0
    waiting: list[TapRows] = field(default_factory=list)
    num_waiting: int = 0
    num_unasked: int = 0  # steps
    is_hopeless: bool = False  # nothing can be drawn from what it says

    @property
    def end(self) -> int:
        """Position after the last."""
        return self.first + self.num_waiting

    def add(self, start: int, taps: TapRows) -> None:
        if not self.first <= start <= self.end:
            self.drop(0)
            self.first = start
        self.drop(start - self.first)  # rejected drafts
        self.waiting.append(taps)
        self.num_waiting += len(taps)
        self.num_unasked += 1
        if self.num_unasked > KEPT and self.num_waiting > 2 * KEPT:
            self.forget_old()

    def forget_old(self) -> None:
        """Forget all but the last `KEPT`, at most."""
        taps = np.concatenate(self.waiting)[-KEPT:]  # a copy of its own: what the others are views of is large
        self.first, self.waiting, self.num_waiting = self.end - len(taps), [taps.copy()], len(taps)

    def drop(self, num_kept: int) -> None:
        """Drop all but the first so many."""
        while (num_more := self.num_waiting - num_kept) > 0:
            last = self.waiting.pop()
            self.num_waiting -= len(last)
            if len(last) > num_more:
                self.waiting.append(last[:-num_more])
                self.num_waiting += len(last) - num_more

    def take(self) -> tuple[int, TapRows]:
        """Position of the first, and all taps; of which the last waits on, since its state is wanted again."""
        first, taps = self.first, self.waiting[0] if len(self.waiting) == 1 else np.concatenate(self.waiting)
        self.first, self.waiting, self.num_waiting = self.end - 1, [taps[-1:].copy()], 1
        self.num_unasked = 0
        return first, taps


class WaitingTaps:
    """A head reads the taps of a request's positions.

    Slot t of its keys and values is made of the taps at position t and the token after it, so it comes one step later
    than the model's own. Its layer is one more of the served pool: shared, copied and swapped blocks bring it along.
    Taps wait until drafts are asked for, so that steps without drafts do nothing for them but keep them, and those that
    waited too long are dropped. Slots that were not made hold old contents.
    """

    name, called = "mtp", "head"

    def __init__(self, *, tap_width: int, max_tokens: int) -> None:
        self._log: list[ComputedRows] = []
        self._num_logged = 0  # positions
        self._kept: dict[str, _Waiting] = {}
        self._most_waiting = max(WAITING_BYTES // (4 * tap_width), max_tokens)

    def computed(self, step: ComputedRows) -> None:
        """Told of each step."""
        self._log.append(step)
        self._num_logged += len(step.taps)
        if len(self._log) >= _LOGGED or self._num_logged > self._most_waiting:
            self._deal()

    def kept_of(self, request: HeldRequest) -> _Waiting | None:
        """None where no taps came yet."""
        self._deal()
        return self._kept.get(request.request_id)

    def begin(self, job: _Job) -> bool:
        """Return whether the taps of the last position are there."""
        kept, num_taps = job.kept, job.request.tokens.size - 1
        if not kept.first < num_taps <= kept.end:
            return False
        kept.drop(num_taps - kept.first)  # rejected drafts; each needs the token after it, besides
        return True

    def before_chain(self, jobs: Sequence[_Job], max_tokens: int) -> Iterator[list[DraftPiece]]:
        """Passes with the slots of all that waits, where one step has no room for them."""
        if sum(job.kept.num_waiting for job in jobs) <= max_tokens:
            return
        pieces: list[DraftPiece] = []
        room = max_tokens
        for job in jobs:
            first, rows = job.kept.take()
            while len(rows):
                if room == 0:
                    yield pieces
                    pieces, room = [], max_tokens
                count = min(room, len(rows))
                pieces.append(_piece(job.request, first, rows[:count]))
                first, rows, room = first + count, rows[count:], room - count
        yield pieces

    def last_pieces(self, jobs: Sequence[_Job]) -> list[DraftPiece]:
        return [_piece(job.request, *job.kept.take()) for job in jobs]

    def drafted(self, job: _Job, drafts: Sequence[int]) -> None:
        """Nothing is kept of drafts: the next step's taps say which stood."""

    def forget(self, request_id: str) -> None:
        self._deal()
        self._kept.pop(request_id, None)

    def clear(self) -> None:
        self._log.clear()
        self._kept.clear()

    def _deal(self) -> None:
        """Give each request the taps of the steps that were logged."""
        for step in self._log:
            first = 0
            for request, start, count in zip(step.requests, step.starts, step.counts, strict=True):
                kept = self._kept.get(request.request_id)
                if kept is None or kept.request is not request:  # it comes back as another
                    kept = self._kept[request.request_id] = _Waiting(request)
                kept.add(start, step.taps[first : first + count])
                first += count
        if self._log:
            self._log.clear()
            self._num_logged = 0
            self._drop_old()

    def _drop_old(self) -> None:
        """Drop the oldest taps until the waiting ones are within their bound."""
        num_waiting = sum(kept.num_waiting for kept in self._kept.values())
        for kept in self._kept.values():
            if num_waiting <= self._most_waiting:
                return
            num_waiting -= kept.num_waiting - min(kept.num_waiting, KEPT)
            kept.forget_old()


def _piece(request: HeldRequest, first: int, taps: TapRows) -> DraftPiece:
    return DraftPiece(request.tokens.array[first + 1 : first + 1 + len(taps)], first, request.blocks.array, taps)


# ---- their programs


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
    if spec.has_state:
        raise ConfigError(
            f"draft model {checkpoint.name}: {spec.architecture} has recurrent layers, whose states cannot go back to "
            f"a rejected draft; choose a draft model with softmax attention alone, or --speculative mtp or ngram"
        )
    alone = replace(config, tensor_parallel=1)  # rank 0 makes drafts up by itself
    plan = plan_native_executor(
        alone, checkpoint, spec, cache=cache, scheduler=scheduler, num_threads=config.num_threads or num_threads
    )
    return replace(plan, num_threads=min(plan.num_threads, num_threads))


def draft_proposer(
    plan: NativePlan, threads: Any, *, num_blocks: int, max_model_len: int, on_packed: OnPacked | None = None
) -> tuple[Drafter, str]:
    """The draft model, loaded, and where its weights came from; blocks and context are the served model's.

    `threads` are the executor's, a `_native.ThreadPool`; a smaller model has one of its own.
    Raises CheckpointError or OutOfMemory.
    """
    if plan.num_threads < threads.num_threads:
        threads = _native.ThreadPool(plan.num_threads)
    pool = plan.make_pool(num_blocks)
    context = min(max_model_len, plan.spec.max_position_embeddings)
    program, summary = plan.load(threads, pool, max_model_len=context, on_packed=on_packed)
    runner = DraftRunner(
        program, Sampler(threads, isa=plan.isa), max_positions=context, num_blocks=int(pool.num_blocks)
    )
    return Drafter(runner, KnownTokens(num_blocks=runner.num_blocks, block_size=plan.block_size)), summary


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadPlan:
    """Memory of a head beside the served model, known before any of it is taken."""

    program: Program
    head: HeadCheckpoint | MtpLayer
    served: NativePlan
    max_rows: int

    @property
    def own(self) -> Program:
        """Return what is loaded for it."""
        borrowed = self._borrowed
        own = (op for op in self.program.ops if not (isinstance(op, Embed | Linear) and op.weight.name in borrowed))
        return struct_replace(self.program, ops=tuple(own))

    @property
    def _borrowed(self) -> frozenset[str]:
        """Weights that are the served model's, of which a rank has a part only."""
        return self.head.borrowed if self.served.num_ranks == 1 else frozenset()

    @property
    def weights_bytes(self) -> int:
        return total_bytes(plan_weights(self.own))

    @property
    def buffer_bytes(self) -> int:
        """Rows of its program, the taps that the served one leaves, and those that wait."""
        spec, rows = self.head.spec, self.served.max_tokens
        decoder = spec.decoder
        widths = 8 * decoder.hidden_size + 3 * decoder.q_width + max(decoder.mlp_widths) + 3 * spec.tap_width
        experts = expert_buffer_values(decoder, rows) or 0
        return 4 * (rows * widths + experts + self.max_rows * decoder.vocab_size) + WAITING_BYTES

    def describe(self) -> str:
        """A line for the terminal."""
        if self.head.spec.layer:
            return f"the MTP layer of its checkpoint, weights {self.program.formats}"
        taps = ", ".join(str(tap) for tap in self.head.spec.taps)
        return f"a head on layers {taps}, weights {self.program.formats.linears}"

    def load(
        self, executor: NativeExecutor, *, max_model_len: int, on_packed: OnPacked | None = None
    ) -> tuple[NativeProgram, str]:
        """Raises CheckpointError or OutOfMemory."""
        served, own = self.served, self.own
        groups = executor.pages.groups if executor.pages is not None else None
        loaded = load_weights(
            own, self.head.checkpoint, executor.threads, isa=served.isa, cache=served.weight_cache, on_packed=on_packed
        )
        borrowed = {
            name: executor.runner.weights[name]
            for name in self._borrowed & {weight.name for weight in self.program.weights}
        }
        program = NativeProgram(
            self.program,
            PackedWeights({**loaded.weights.tensors, **borrowed}),
            executor.pool,
            executor.threads,
            max_tokens=served.max_tokens,
            max_logits=self.max_rows,
            max_model_len=max_model_len,
            isa=served.isa,
            layers=[
                (0, layer) for _, layer in layer_places(served.spec, groups)
            ],  # a step has its layer's tables alone
        )
        return program, loaded.summary


def plan_head(served: NativePlan, head: HeadCheckpoint | MtpLayer, *, max_rows: int) -> HeadPlan:
    """Settle formats and memory of a head beside the served model, for `max_rows` requests of a step at most.

    Raises KernelError for a matrix that no kernel takes.
    """
    formats = served.program.formats
    if formats.stored:
        formats = struct_replace(formats, stored=stored_formats(head.checkpoint, head.spec) | formats.stored)
    program = compile_head(head.spec, formats, len(served.spec.kv_layers))
    plan_weights(program)
    rows = most_logits(head.spec.decoder.vocab_size, max_rows)
    return HeadPlan(program=program, head=head, served=served, max_rows=min(rows, served.max_tokens))


def head_proposer(
    plan: HeadPlan, executor: NativeExecutor, *, max_model_len: int, on_packed: OnPacked | None = None
) -> tuple[Drafter, str]:
    """The head, loaded and told of the executor's steps, and where its weights came from.

    Raises CheckpointError or OutOfMemory.
    """
    spec = plan.head.spec
    context = min(max_model_len, spec.decoder.max_position_embeddings)
    program, summary = plan.load(executor, max_model_len=context, on_packed=on_packed)
    assert program.taps is not None
    sampler = Sampler(executor.threads, isa=plan.served.isa)
    runner = DraftRunner(program, sampler, max_positions=context, vocabulary=plan.head.draft_to_target)
    if executor.pages is not None:
        runner.table_of = partial(executor.pages.of_group, executor.pages.groups.places[-1][0])
    taps = WaitingTaps(tap_width=spec.tap_width, max_tokens=runner.max_tokens)
    executor.on_taps = taps.computed
    return Drafter(runner, taps), summary

"""Request state of an executor between steps: its tokens, its block table, its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from maitred.core.errors import KernelError
from maitred.core.step import BlockCopy, NewRequest, ScheduledRow, SchedulerOutput, StateSave
from maitred.executor.grammar import Grammars, GrammarSlot
from maitred.executor.sampler_state import RequestSampler
from maitred.kv.pages import KVGroups

Ints = NDArray[np.int64]
CopyBlocks = Callable[[Sequence[tuple[int, int]]], object]
TapRows = NDArray[np.float32]
_NO_SUM = np.zeros(0, np.float32)


class GrowingInts:
    """A list of integers kept as an array, so that a step reads slices of it without a loop over elements."""

    __slots__ = ("_items", "size")

    def __init__(self, first: Sequence[int] = (), *, spare: int = 64) -> None:
        self.size = len(first)
        self._items = np.zeros(self.size + spare, dtype=np.int64)
        self._items[: self.size] = first

    @property
    def array(self) -> Ints:
        """A view of what is held now; valid until it next grows."""
        return self._items[: self.size]

    def append(self, value: int) -> None:
        self._make_room(self.size + 1)
        self._items[self.size] = value
        self.size += 1

    def extend(self, more: Sequence[int]) -> None:
        size = self.size + len(more)
        self._make_room(size)
        self._items[self.size : size] = more
        self.size = size

    def _make_room(self, size: int) -> None:
        if size > len(self._items):
            grown = np.zeros(2 * size, dtype=np.int64)
            grown[: self.size] = self.array
            self._items = grown

    def replace(self, index: int, value: int) -> None:
        self.array[index] = value

    def shorten(self, size: int) -> None:
        self.size = min(self.size, size)


class PageTables:
    """The pages of each block, as plans tell of them: one table for each group of layers (`kv.pages`).

    What a block has no more stays in the table: nothing reads it.
    """

    def __init__(self, groups: KVGroups) -> None:
        self.groups = groups
        self._pages = np.zeros((groups.num_groups, 1024), np.int32)  # [groups, blocks]

    def of(self, blocks: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
        """Pages [groups, blocks] of blocks."""
        pages: NDArray[np.int32] = self._pages[:, blocks]
        return pages

    def of_group(self, group: int, blocks: NDArray[np.integer]) -> Ints:
        """Pages of blocks in one group, in the blocks' shape."""
        pages: Ints = self._pages[group, blocks].astype(np.int64)
        return pages

    def take(self, plan: SchedulerOutput, copy_pages: CopyBlocks) -> CopyBlocks:
        """Take in what the plan tells of pages; return what copies its blocks."""
        sources = self.of([copy.source for copy in plan.block_copies])
        for block, first, pages in plan.page_changes:
            if block >= self._pages.shape[1]:
                grown = np.zeros((len(self._pages), 2 * block), np.int32)
                grown[:, : self._pages.shape[1]] = self._pages
                self._pages = grown
            self._pages[first : first + len(pages), block] = pages

        def copy_blocks(copies: Sequence[tuple[int, int]]) -> None:
            targets = self.of([target for _, target in copies])
            copy_pages(list(zip(sources.ravel().tolist(), targets.ravel().tolist(), strict=True)))

        return copy_blocks


class HeldRequest:
    """One request as the executor knows it. Everything in it can be rebuilt from a `NewRequest` and the blocks."""

    __slots__ = (
        "adapter",
        "blocks",
        "grammar",
        "num_pooled",
        "num_prompt_tokens",
        "pooled_sum",
        "pooling",
        "prediction",
        "prompt_logprobs",
        "request_id",
        "sampler",
        "state_slot",
        "tokens",
    )

    def __init__(self, new: NewRequest, vocab_size: int) -> None:
        self.request_id = new.request_id
        self.adapter = new.spec.adapter
        self.state_slot = -1 if new.state_slot is None else new.state_slot
        self.num_prompt_tokens = new.spec.num_prompt_tokens
        self.prompt_logprobs = new.spec.sampling.prompt_logprobs
        self.pooling, self.num_pooled = new.spec.pooling, 0
        self.pooled_sum: TapRows = _NO_SUM  # of the states of the first `num_pooled` tokens, where a mean is asked for
        self.prediction = new.spec.prediction_token_ids
        self.tokens = GrowingInts((*new.spec.prompt_token_ids, *new.output_token_ids))
        assert self.tokens.size == new.spec.num_prompt_tokens + new.num_output_tokens, new
        self.blocks = GrowingInts()
        self.grammar: GrammarSlot | None = None
        self.sampler = RequestSampler(
            new.spec.sampling,
            vocab_size=vocab_size,
            seed=new.spec.seed,
            sample_index=new.spec.sample_index,
            prompt_token_ids=new.spec.prompt_token_ids,
            output_token_ids=new.output_token_ids,
            eos_token_ids=new.spec.eos_token_ids,
            bad_word_token_ids=new.spec.bad_word_token_ids,
            thinking=new.spec.thinking,
        )

    def take_blocks(self, row: ScheduledRow) -> bool:
        """Bring the block table up to the row's plan; whether it changed."""
        for index, block_id in row.replaced_blocks:
            self.blocks.replace(index, block_id)
        if row.new_block_ids:
            self.blocks.extend(row.new_block_ids)
        return bool(row.new_block_ids or row.replaced_blocks)

    def settle_blocks(self, num_computed: int, block_size: int) -> None:
        """Blocks past the computed tokens are the request's no more, as the scheduler has it after rows with drafts."""
        self.blocks.shorten(-(-num_computed // block_size))

    def output(self) -> list[int]:
        """The output tokens known now."""
        tokens: list[int] = self.tokens.array[self.num_prompt_tokens :].tolist()
        return tokens

    def append(self, token_id: int) -> None:
        """Note a sampled token; the next plan may name it by its position."""
        self.tokens.append(token_id)
        self.sampler.append(token_id)


class RowWork(NamedTuple):
    """A row of the plan and the request it belongs to."""

    row: ScheduledRow
    state: HeldRequest
    drafts: tuple[int, ...] = ()  # the tokens of the row's last `num_drafts` positions


class StateSlots:
    """Position of each slot of recurrent states: tokens that it has consumed, and how many inputs after those lie
    beside it, which were not certain when they were computed (design note 0034)."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, int]] = {}
        self._saves: dict[str, list[StateSave]] = {}

    def take(self, plan: SchedulerOutput, copy: Callable[[list[tuple[int, int]]], None]) -> None:
        """Copy slots as the plan says, and keep what it wants saved for its rows."""
        if plan.state_copies:
            copy([(source, target) for source, target in plan.state_copies])
        for source, target in plan.state_copies:
            self._held[target] = self._held[source]
        self._saves = {}
        for save in plan.state_saves:
            self._saves.setdefault(save.request_id, []).append(save)

    def advance(self, work: RowWork, start: int, num_certain: int, num_pending: int) -> tuple[int, int, int]:
        """Note a row's tokens from `start` on: its slot, pending inputs to consume before them, and tokens that are
        certain. Raises KernelError where the slot's state is not the one before `start`."""
        slot = work.state.state_slot
        position, pending = self._held.get(slot, (0, 0)) if start else (0, 0)
        if slot < 0 or not position <= start <= position + pending:
            raise KernelError(
                f"request {work.row.request_id} goes on at position {start}, and state slot {slot} holds that of "
                f"{position} tokens and inputs of {pending} more"
            )
        self._held[slot] = start + num_certain, num_pending
        return slot, start - position, num_certain

    def saves(self, work: RowWork, start: int, num_tokens: int) -> Iterator[tuple[int, int]]:
        """Tokens of a row's [start, start + num_tokens) after which its state is saved, and to which slot."""
        for save in self._saves.get(work.row.request_id, ()):
            if start < save.position <= start + num_tokens or start == save.position == work.row.start:
                self._held[save.slot] = save.position, 0
                yield save.position - start, save.slot


class ComputedRows(NamedTuple):
    """A step: requests, the first position of each and how many, and the taps of all, one below the other."""

    requests: Sequence[HeldRequest]
    starts: Sequence[int]
    counts: Sequence[int]
    taps: TapRows  # [positions, width], not the caller's


class DraftAsk(NamedTuple):
    """Drafts are asked for: at most so many tokens after the last known one of a request."""

    request: HeldRequest
    num_drafts: int  # >= 1


class Proposer:
    """Proposes drafts for requests of one executor; called by its thread alone."""

    name: str  # as `--speculative` has it

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        """Propose at most `num_drafts` tokens for each, in order; empty where there are none. A fault of its own (a
        NaN) costs the drafts and nothing else.
        """
        raise NotImplementedError

    def forget(self, request_id: str) -> None:
        """The executor holds this request no more, or holds it anew; also of ids it never heard of."""

    def close(self) -> None:
        """Give back memory; the proposer is not used again."""


class SwapBandwidth(NamedTuple):
    """Bytes a second between the pool and the host."""

    out_bytes_per_s: float
    in_bytes_per_s: float


class HostPool(Protocol):
    """The host's memory for blocks of preempted requests."""

    def copy_out(self, copies: Sequence[BlockCopy]) -> None: ...

    def copy_in(self, copies: Sequence[BlockCopy]) -> None: ...


def take_plan(
    plan: SchedulerOutput,
    states: dict[str, HeldRequest],
    vocab_size: int,
    copy_blocks: CopyBlocks,
    host: HostPool | None,
    grammars: Grammars | None = None,
    proposer: Proposer | None = None,
) -> list[RowWork]:
    """Forgets, learns and copies what the plan says, in its order. The rows' block tables are still those of before."""
    for request_id in plan.forgotten_request_ids:
        forgotten = states.pop(request_id, None)  # one that was aborted before its first row is not known
        if proposer is not None:
            proposer.forget(request_id)
        if forgotten is not None and forgotten.grammar is not None and grammars is not None:
            grammars.leave(forgotten.grammar)
    for new in plan.new_requests:
        state = states[new.request_id] = HeldRequest(new, vocab_size)
        if new.spec.grammar:
            if grammars is None:
                raise KernelError(f"request {new.request_id} has a grammar, and this executor was given no Grammars")
            state.grammar = grammars.enter(new.spec, state.output)
            state.sampler.mask = state.grammar.mask
    if grammars is not None and grammars.is_used:
        grammars.tell()
    if host is not None:
        host.copy_out(plan.swap_outs)
    if plan.block_copies:
        copy_blocks([(copy.source, copy.target) for copy in plan.block_copies])
    if host is not None:
        host.copy_in(plan.swap_ins)
    return [RowWork(row, states[row.request_id]) for row in plan.rows]

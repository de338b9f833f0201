"""Draft model: a smaller model of the same vocabulary says what the served one may say next.

Its K and V lie in a pool of its own under the served model's block numbers, so there is no second allocator: what two
requests share they would write alike. They are made when drafts are asked for, from the request's known tokens; what
was rejected, forgotten or written over by another is computed again.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from maitred.speculative.proposer import DraftAsk, DraftedRequest, Ints, SamplerSettings

logger = logging.getLogger(__name__)
_POSITIVE = 2**63 - 1
_INDEX_BITS = 24  # blocks of one request


class Piece(NamedTuple):
    """Tokens of a request that follow each other, to be computed."""

    token_ids: Ints
    start: int  # position of the first
    block_ids: Ints  # the block table, as far as it will be written


class ChainEnd(NamedTuple):
    """How far a chain goes on from a piece, and its settings of drawing."""

    num_tokens: int
    settings: SamplerSettings


class DraftTokens(NamedTuple):
    tokens: list[int]
    fault: str | None  # why they are fewer than were wanted


class DraftRunner(Protocol):
    """The draft model's program and pool; `executor.native_draft.NativeDraftRunner` is one."""

    @property
    def max_tokens(self) -> int:
        """Most tokens of a pass."""

    @property
    def max_rows(self) -> int:
        """Most pieces of a chain, at most `max_tokens`."""

    @property
    def max_positions(self) -> int:
        """Positions are below it."""

    @property
    def num_blocks(self) -> int: ...

    def compute(self, pieces: Sequence[Piece]) -> None:
        """K and V of these tokens."""

    def chain(self, pieces: Sequence[Piece], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        """The same, then sample the token after each piece, compute it, and so on; the last one is not computed."""

    def close(self) -> None: ...


@dataclass(slots=True)
class _Kept:
    """State of a request: the first `num_known` of its tokens and the drafts after them were computed."""

    number: int  # its own, from 1
    names: list[int]  # of the blocks that its known tokens fill, see `_Blocks`
    num_known: int = 0
    drafts: Sequence[int] = ()
    settled_table: bytes = b""  # the block table before the block of the last known token
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

    def num_valid(self, table: Ints, kept: _Kept, num_as_drafted: int) -> int:
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

    def write(self, table: Ints, kept: _Kept, first: int) -> None:
        """The request's tokens are computed from position `first` on, and drafts to the end of the table."""
        block = first // self._size
        for index, block_id in enumerate(table[block:].tolist(), block):
            self._contents[block_id] = kept.names[index] if index < len(kept.names) else kept.mark(index)

    def settle(self, table: Ints, kept: _Kept) -> None:
        """Note where the known tokens of the request are computed."""
        kept.settled_table = table[: (kept.num_known - 1) // self._size].tobytes()

    def _num_settled(self, table: Ints, kept: _Kept) -> int:
        """Return the blocks that need no look: a request keeps those before its last known token, and requests that
        share them write alike. Blocks behind go back where drafts are rejected, and come again, perhaps after others
        had them.
        """
        count = len(kept.settled_table) // table.itemsize
        return count if table[:count].tobytes() == kept.settled_table else 0


@dataclass(slots=True)
class _Job:
    """A request for which drafts are made."""

    place: int  # among the asks
    request: DraftedRequest
    kept: _Kept
    num_known: int
    num_drafts: int
    num_computed: int
    table: Ints  # blocks of all that will be written: known tokens, and drafts but the last

    def next_piece(self, num_tokens: int) -> Piece:
        """Return a piece of so many known tokens that are not computed, which are then."""
        first = self.num_computed
        self.num_computed += num_tokens
        return Piece(self.request.tokens.array[first : self.num_computed], first, self.table)


class DraftModel:
    """Proposes what a draft model samples with the request's own settings and random numbers (`proposer.Proposer`).

    Penalties, masks and forced tokens are left out: drafts are guesses, which the served model checks.
    """

    name = "draft"

    def __init__(self, runner: DraftRunner, *, block_size: int) -> None:
        """`block_size` is the served model's, whose block numbers the runner's pool has."""
        self._runner = runner
        self._kept: dict[str, _Kept] = {}
        self._num_requests = 0
        self._blocks = _Blocks(runner.num_blocks, block_size)
        self._is_told = False  # that there are faults; the first one is

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        found: list[Sequence[int]] = [()] * len(asks)
        jobs = [job for place, ask in enumerate(asks) if (job := self._job(place, ask)) is not None]
        most = self._runner.max_rows
        for first in range(0, len(jobs), most):
            for job, tokens in self._draft(jobs[first : first + most]):
                found[job.place] = tokens
        return found

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def close(self) -> None:
        self._kept.clear()
        self._runner.close()

    def _job(self, place: int, ask: DraftAsk) -> _Job | None:
        """Return the job; None where the draft model's context ends, or it has nothing to say."""
        tokens = ask.request.tokens.array
        num_drafts = min(ask.num_drafts, self._runner.max_positions - len(tokens) + 1)
        kept = self._kept_of(ask.request)
        if num_drafts < 1 or kept.is_hopeless:
            return None
        self._blocks.name(kept.names, tokens[:-1])  # the last is computed in the chain, for its logits
        table = ask.request.blocks.array[: self._blocks.up_to(len(tokens) + num_drafts - 1)]
        valid = min(self._blocks.num_valid(table, kept, kept.num_as_drafted(tokens)), len(tokens) - 1)
        self._blocks.write(table, kept, valid)  # here, so that requests that share them compute them no more
        return _Job(place, ask.request, kept, len(tokens), num_drafts, valid, table)

    def _kept_of(self, request: DraftedRequest) -> _Kept:
        kept = self._kept.get(request.request_id)
        if kept is None:
            self._num_requests += 1
            kept = self._kept[request.request_id] = _Kept(self._num_requests, [])
        return kept

    def _draft(self, jobs: Sequence[_Job]) -> Iterator[tuple[_Job, list[int]]]:
        """Draft for at most `max_rows` of them."""
        self._catch_up(jobs)
        ends = [ChainEnd(job.num_drafts, job.request.sampler) for job in jobs]
        pieces = [job.next_piece(job.num_known - job.num_computed) for job in jobs]
        for job, made in zip(jobs, self._runner.chain(pieces, ends), strict=True):
            self._keep(job, made)
            yield job, made.tokens

    def _catch_up(self, jobs: Sequence[_Job]) -> None:
        """Compute until what is left of all fits into one step, the last known token of each at least."""
        while sum(job.num_known - job.num_computed for job in jobs) > self._runner.max_tokens:
            room, pieces = self._runner.max_tokens, []
            for job in jobs:
                count = min(job.num_known - 1 - job.num_computed, room)
                if count > 0:
                    pieces.append(job.next_piece(count))
                    room -= count
            self._runner.compute(pieces)

    def _keep(self, job: _Job, made: DraftTokens) -> None:
        job.kept.num_known, job.kept.drafts = job.num_known, made.tokens
        self._blocks.settle(job.table, job.kept)
        if made.fault is not None and not made.tokens:
            job.kept.is_hopeless = True  # whatever comes later would be computed from the same
            level = logging.DEBUG if self._is_told else logging.WARNING
            logger.log(level, "no drafts for request %s: the draft model's %s", job.request.request_id, made.fault)
            self._is_told = True

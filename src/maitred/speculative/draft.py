"""Draft model: a smaller model of the same vocabulary says what the served one may say next.

Its K and V lie in a pool of its own under the served model's block numbers, so there is no second allocator: what two
requests share they would write alike. They are made when drafts are asked for, from the request's known tokens; what
was rejected, forgotten or written over by another is computed again.
Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, ICML 2023, arXiv:2211.17192.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

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
    """How far a chain goes on from a piece, and what it draws with."""

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
    """What is known of a request: the first `num_known` of its tokens and the drafts after them were computed."""

    number: int  # its own, from 1
    names: Ints  # of the blocks that its known tokens fill, see `_Blocks`
    num_known: int = 0
    drafts: Sequence[int] = ()
    is_hopeless: bool = False  # what it knows gives no logits to draw from

    def marks(self, first: int, end: int) -> Ints:
        """Of blocks first .. end - 1 of its table, while its known tokens do not fill them: its own, and negative."""
        return -(self.number << _INDEX_BITS) - np.arange(first, end)

    def num_as_drafted(self, tokens: Ints) -> int:
        """Of `tokens`, those at the beginning that were computed when it last drafted."""
        count = self.num_known
        for draft in self.drafts[:-1]:  # the last was not computed
            if count >= len(tokens) or tokens[count] != draft:
                break
            count += 1
        return count


class _Blocks:
    """What lies in each block of the pool: a hash of all tokens up to its end, or a mark of the one request that wrote
    there last, and where. So what requests share is computed once, and what was written over is noticed.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._contents: Ints = np.zeros(num_blocks, np.int64)  # 0 is nothing
        self._size = block_size

    def up_to(self, num_positions: int) -> int:
        """Blocks for so many positions."""
        return -(-num_positions // self._size)

    def names(self, tokens: Ints, known: Ints) -> Ints:
        """Names of all blocks that the tokens fill, of which the first are known."""
        first, count = len(known), len(tokens) // self._size
        if first == count:
            return known
        name, more = int(known[-1]) if first else 0, []
        for block in range(first, count):
            name = hash((name, tokens[block * self._size : (block + 1) * self._size].tobytes())) & _POSITIVE | 1
            more.append(name)
        return np.concatenate([known, np.array(more, dtype=np.int64)])

    def num_valid(self, table: Ints, kept: _Kept, num_as_drafted: int) -> int:
        """How many positions lie in the table's blocks as its tokens make them."""
        named = self._contents[table[: len(kept.names)]] == kept.names
        count = len(named) if named.all() else int(named.argmin())
        end = self.up_to(num_as_drafted)
        own = self._contents[table[count:end]] == kept.marks(count, end)
        if own.all():
            return max(num_as_drafted, count * self._size)
        return (count + int(own.argmin())) * self._size

    def write(self, table: Ints, kept: _Kept, first: int) -> None:
        """The request's tokens are computed from position `first` on, and drafts to the end of the table."""
        block, filled = first // self._size, len(kept.names)
        self._contents[table[block:filled]] = kept.names[block:]
        partial = max(block, filled)
        self._contents[table[partial:]] = kept.marks(partial, len(table))


@dataclass(slots=True)
class _Job:
    """A request for which drafts are made."""

    place: int  # among the asks
    request: DraftedRequest
    kept: _Kept
    num_known: int
    num_drafts: int
    num_computed: int

    def piece(self, num_tokens: int, block_ids: Ints) -> Piece:
        """The next of its known tokens."""
        first = self.num_computed
        return Piece(self.request.tokens.array[first : first + num_tokens], first, block_ids)


class DraftModel:
    """Proposes what a draft model samples with the request's own settings and random numbers (`proposer.Proposer`).

    Penalties, masks and forced tokens are left out: drafts are guesses, which the served model checks.
    """

    name = "draft"

    def __init__(self, runner: DraftRunner, *, block_size: int, clock: Callable[[], float] = time.perf_counter) -> None:
        """`block_size` is the served model's, whose block numbers the runner's pool has; `clock` tells seconds."""
        self._runner = runner
        self._clock = clock
        self._kept: dict[str, _Kept] = {}
        self._num_requests = 0
        self._blocks = _Blocks(runner.num_blocks, block_size)
        self.took_s = 0.0
        """What the last `propose` took."""

    def propose(self, asks: Sequence[DraftAsk]) -> list[Sequence[int]]:
        began_at = self._clock()
        found: list[Sequence[int]] = [()] * len(asks)
        jobs = [job for place, ask in enumerate(asks) if (job := self._job(place, ask)) is not None]
        most = self._runner.max_rows
        for first in range(0, len(jobs), most):
            for job, tokens in self._draft(jobs[first : first + most]):
                found[job.place] = tokens
        self.took_s = self._clock() - began_at
        return found

    def forget(self, request_id: str) -> None:
        self._kept.pop(request_id, None)

    def close(self) -> None:
        self._kept.clear()
        self._runner.close()

    def _job(self, place: int, ask: DraftAsk) -> _Job | None:
        """None where the draft model's context ends, or it has nothing to say."""
        tokens = ask.request.tokens.array
        num_drafts = min(ask.num_drafts, self._runner.max_positions - len(tokens) + 1)
        kept = self._kept_of(ask.request)
        if num_drafts < 1 or kept.is_hopeless:
            return None
        kept.names = self._blocks.names(tokens[:-1], kept.names)  # the last is computed in the chain, for its logits
        valid = self._blocks.num_valid(ask.request.blocks.array, kept, kept.num_as_drafted(tokens))
        job = _Job(place, ask.request, kept, len(tokens), num_drafts, min(valid, len(tokens) - 1))
        self._blocks.write(self._table(job), kept, job.num_computed)  # so that the next one computes it no more
        return job

    def _kept_of(self, request: DraftedRequest) -> _Kept:
        kept = self._kept.get(request.request_id)
        if kept is None:
            self._num_requests += 1
            kept = self._kept[request.request_id] = _Kept(self._num_requests, np.empty(0, np.int64))
        return kept

    def _draft(self, jobs: Sequence[_Job]) -> Iterator[tuple[_Job, list[int]]]:
        """At most `max_rows` of them."""
        self._catch_up(jobs)
        ends = [ChainEnd(job.num_drafts, job.request.sampler) for job in jobs]
        pieces = [job.piece(job.num_known - job.num_computed, self._table(job)) for job in jobs]
        for job, made in zip(jobs, self._runner.chain(pieces, ends), strict=True):
            self._keep(job, made)
            yield job, made.tokens

    def _table(self, job: _Job) -> Ints:
        """Blocks of all that will be written: known tokens and drafts but the last."""
        return job.request.blocks.array[: self._blocks.up_to(job.num_known + job.num_drafts - 1)]

    def _catch_up(self, jobs: Sequence[_Job]) -> None:
        """Compute until what is left of all fits into one step, the last known token of each at least."""
        while sum(job.num_known - job.num_computed for job in jobs) > self._runner.max_tokens:
            room, pieces = self._runner.max_tokens, []
            for job in jobs:
                count = min(job.num_known - 1 - job.num_computed, room)
                if count > 0:
                    pieces.append(job.piece(count, self._table(job)))
                    job.num_computed += count
                    room -= count
            self._runner.compute(pieces)

    def _keep(self, job: _Job, made: DraftTokens) -> None:
        job.kept.num_known, job.kept.drafts = job.num_known, made.tokens
        if made.fault is not None and not made.tokens:
            job.kept.is_hopeless = True  # whatever comes later would be computed from the same
            logger.warning("no drafts for request %s: the draft model's %s", job.request.request_id, made.fault)

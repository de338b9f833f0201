"""KV cache manager: the blocks of each request, by prefix hits, growth, copy on write and release.

Blocks are numbered 0 .. num_blocks - 1; the memory itself is the executor's.
Source: PagedAttention, Kwon et al. 2023, arXiv:2309.06180, sections 4.2 to 4.4.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from maitred.core.errors import PromptTooLong
from maitred.core.request import RequestState
from maitred.core.step import BlockCopy, PoolChanges, ScheduledRow
from maitred.kv.prefix_cache import BlockHasher, Changes, PrefixCache


class BlockPool:
    """Reference counts of all blocks, and the free blocks as two queues: the first of the first is handed out next.

    `kept` names the blocks whose contents can still be found by prefix. Such a block, once free, goes to the end of the
    second queue (least recently used is evicted first), or of the first where none but background requests had it; a
    block that can no longer be found goes to the very front.
    """

    def __init__(self, num_blocks: int, kept: Container[int] = ()) -> None:
        self.ref_counts = [0] * num_blocks  # read by the manager's hot paths; written here only
        self._kept = kept
        self._first: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._last: OrderedDict[int, None] = OrderedDict()
        self._used: set[int] = set()  # by others than background requests, since they were handed out

    @property
    def num_blocks(self) -> int:
        return len(self.ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._first) + len(self._last)

    @property
    def num_used(self) -> int:
        """Blocks held by at least one request."""
        return len(self.ref_counts) - self.num_free

    @property
    def free_blocks(self) -> tuple[int, ...]:
        """Free blocks in the order in which they will be handed out."""
        return (*self._first, *self._last)

    def take(self, count: int) -> list[int]:
        """`count` free blocks, held once each. The caller has checked `num_free`."""
        first, last = self._first, self._last
        taken = [(first or last).popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.ref_counts[block] = 1
        self._used.difference_update(taken)
        return taken

    def share(self, block: int) -> None:
        """Add a holder of a block that is in use, or is free but still has its contents."""
        if self.ref_counts[block] == 0:
            del (self._first if block in self._first else self._last)[block]
        self.ref_counts[block] += 1

    def release(self, block: int, *, background: bool = False) -> None:
        """Remove one holder; the last one puts the block among the free."""
        remaining = self.ref_counts[block] - 1
        assert remaining >= 0, f"block {block} released more often than it was held"
        self.ref_counts[block] = remaining
        if not background:
            self._used.add(block)
        if remaining == 0:
            (self._last if block in self._used else self._first)[block] = None
            if block not in self._kept:
                self.put_first(block)

    def put_first(self, block: int) -> None:
        """Hand out a free block next."""
        self._last.pop(block, None)
        self._first[block] = None
        self._first.move_to_end(block, last=False)

    def check_invariants(self) -> None:
        """Assert that a block is free exactly when it has no holder."""
        assert all(count >= 0 for count in self.ref_counts)
        unheld = {block for block, count in enumerate(self.ref_counts) if count == 0}
        assert sorted(unheld) == sorted(self.free_blocks), f"lost or doubly owned: {unheld ^ {*self.free_blocks}}"


class HostBlockPool:
    """Blocks on the host with the KV of preempted requests, each with one owner. A block given back in a step is handed
    out from the next step on: within a step, all copies to the host come before those from it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # the last is handed out next
        self._leaving: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` blocks. The caller has checked `num_free`."""
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Sequence[int]) -> None:
        self._leaving += blocks

    def begin_step(self) -> None:
        if self._leaving:
            self._free += reversed(self._leaving)
            self._leaving = []

    def check_invariants(self, held: Sequence[int]) -> None:
        """Asserts that `held`, by all owners, and what is free are all there is."""
        assert sorted([*held, *self._free, *self._leaving]) == list(range(self.num_blocks))


class PrefixHit(NamedTuple):
    """Blocks with contents that a request can use as they are."""

    blocks: tuple[int, ...]
    num_tokens: int  # 0 is a miss; a multiple of block_size, unless forked or swapped
    forked: bool = False  # shared with a running sample of the same prompt
    host_blocks: tuple[int, ...] = ()  # swapped: what follows `blocks` is copied from these


class Allocation(NamedTuple):
    """Blocks that a request's table gained, in the terms of `ScheduledRow`."""

    new_block_ids: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()  # (index in table, new block id)
    copies: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    state_slot: int | None = None  # for its recurrent layers


class PoolRow(NamedTuple):
    """Unit that the pool counts and copies: a block, or a page of one of its groups (`kv.pages`)."""

    place: int  # of the block, in a table
    group: int
    number: int  # in the pool


NO_HIT = PrefixHit((), 0)
NO_POOL_CHANGES = PoolChanges()


class KVCacheManager:
    """The bookkeeping of one KV cache of `num_blocks` blocks with `block_size` tokens each.

    `hasher` extends `RequestState.block_hashes` when output fills a block.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher,
        enable_prefix_caching: bool = True,
        num_host_blocks: int = 0,
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = hasher
        self._host = HostBlockPool(num_host_blocks)
        self._cache = PrefixCache()
        self._pool = BlockPool(num_blocks, kept=self._cache.hashes)
        self.ref_counts = self._pool.ref_counts  # for the decode path, which asks for each row; read only
        self.evicted: dict[bytes, int] | None = None  # block by hash, still unchanged; while it is being cleared
        self._filling: set[int] = set()  # findable blocks, to which this plan copies
        self.on_cached: Callable[[bytes], None] | None = None  # told the hash of each block that becomes findable

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_used(self) -> int:
        return self._pool.num_used

    # Memory is counted in pages; a block is one, where nothing else is said.
    pages_per_block = 1
    kinds: tuple[range, ...] = (range(1),)  # groups of each kind of pages: those that stay, and by window
    unit = "blocks"
    opens_windows = False  # whether each chunk of a prompt asks for room (`allocate_spare`)
    has_pool_changes = False  # whether rows alone do not tell the executor where things lie
    num_evictions = 0  # of snapshots, for want of slots

    @property
    def num_pages(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_pages_used(self) -> int:
        return self._pool.num_used

    def num_pages_for(self, num_tokens: int) -> int:
        """Pages without which a request of so many known tokens cannot run."""
        return self.num_blocks_for(num_tokens)

    def rows(self, table: Sequence[int], first: int, num_tokens: int) -> list[PoolRow]:
        """Return the rows with which a request goes on after so many tokens, of its blocks from the `first` on."""
        return [PoolRow(place, 0, table[place]) for place in range(first, self.num_blocks_for(num_tokens))]

    def places(self, table: Sequence[int], first: int, num_tokens: int) -> Sequence[Any]:
        """Return those rows by block, as far as the table goes, as `layout.LayerIO` takes them."""
        return table[first:]

    def num_rows(self, first: int, num_tokens: int) -> int:
        """Return how many rows `rows` returns."""
        return max(0, self.num_blocks_for(num_tokens) - first)

    def num_usable(self, num_blocks: int, has: Callable[[int, int], bool]) -> int:
        """Return after how many of the first blocks a request could go on, where `has(kind, index)` tells which pages
        of windows are there.
        """
        return num_blocks

    def take_pool_changes(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> PoolChanges:
        """Return what the executor is to be told beside a finished plan's rows; nothing where blocks are whole."""
        return NO_POOL_CHANGES

    @property
    def num_snapshots(self) -> int:
        """Return how many states of recurrent layers are kept (`kv.states`)."""
        return 0

    @property
    def num_cached(self) -> int:
        """Blocks findable by prefix, in use or free."""
        return len(self._cache)

    @property
    def findable(self) -> Container[int]:
        """Findable blocks; they hold a full, computed prefix."""
        return self._cache.hashes

    @property
    def changes(self) -> Changes[bytes] | None:
        """Hashes of blocks that became findable, and that are no more; None while changes are not told."""
        return self._cache.changes

    def has_block(self, digest: bytes) -> bool:
        """Return whether a block of this hash is findable."""
        return digest in self._cache

    def take_changes(self, most: int) -> tuple[list[bytes], list[bytes]]:
        """Return the changes as `Changes.take` does."""
        return self._cache.changes.take(most) if self._cache.changes is not None else ([], [])

    def tell_changes(self, wanted: bool) -> None:
        """Begin or end telling changes. The blocks that are findable now are told first."""
        self._cache.changes = Changes(self._cache.hashes.values()) if wanted else None

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def check_fits(self, request: RequestState) -> None:
        """Raises PromptTooLong when the request would not fit even alone."""
        num_tokens = request.num_prompt_tokens + max(request.max_tokens - 1, 0)  # the last is never computed
        needed = self.num_pages_for(num_tokens)
        if needed > self.num_pages or self.num_blocks_for(num_tokens) > self.num_blocks:
            raise PromptTooLong(
                f"request {request.request_id}: a prompt of {request.num_prompt_tokens} tokens with max_tokens "
                f"{request.max_tokens} needs {needed} KV {self.unit} of {self.block_size} tokens, the cache has "
                f"{self.num_pages}; shorten it, or serve with a larger --kv-cache-memory-bytes"
            )

    def find_prefix(self, request: RequestState) -> PrefixHit:
        """The longest cached prefix of the request's known tokens; takes about 0.1 us a block and holds nothing."""
        if not self.enable_prefix_caching or request.spec.sampling.prompt_logprobs is not None:
            return NO_HIT  # prompt_logprobs needs the logits of every prompt token
        if request.spec.pooling is not None and request.spec.pooling.all_tokens:
            return NO_HIT
        # Match at most num_tokens - 1: the last token is always computed, because sampling needs its logits.
        usable = (request.num_tokens - 1) // self.block_size
        blocks = self._cache.find(request.block_hashes[:usable])
        return PrefixHit(tuple(blocks), len(blocks) * self.block_size)

    def fork(self, source: RequestState, target: RequestState) -> PrefixHit:
        """Return the blocks that `target`, a sample of the same prompt, can share of `source`, whose prompt is
        computed.

        The last prompt token is left out: `target` computes it for its logits. A partly used last block is shared too,
        and copied on the first write, which is at once.
        """
        num_tokens = target.num_prompt_tokens - 1
        return PrefixHit(tuple(source.block_table[: self.num_blocks_for(num_tokens)]), num_tokens, forked=True)

    def swapped(self, request: RequestState, hit: PrefixHit) -> PrefixHit:
        """`hit` and, from the host, what a preempted request has beyond it."""
        num_tokens, rows = request.num_swapped_tokens, request.host_block_table
        if num_tokens <= hit.num_tokens:
            return hit
        num_found = len(rows) - self.num_rows(len(hit.blocks), num_tokens)
        return PrefixHit(hit.blocks, num_tokens, host_blocks=tuple(rows[num_found:]))

    def num_blocks_short(self, request: RequestState, hit: PrefixHit) -> int:
        """Return how many more free pages `admit` would need; 0 when it would succeed."""
        return max(0, self.num_blocks_needed(request, hit) - self.num_free)

    def num_blocks_needed(self, request: RequestState, hit: PrefixHit) -> int:
        """Free blocks that `admit` takes."""
        copied_tail = hit.forked and hit.num_tokens % self.block_size != 0
        return self.num_blocks_for(request.num_tokens) - len(hit.blocks) + copied_tail + self._num_free_in(hit)

    def _num_free_in(self, hit: PrefixHit) -> int:
        """A free block that is hit is free no more."""
        ref_counts = self.ref_counts
        return sum(1 for block in hit.blocks if ref_counts[block] == 0)

    def admit(self, request: RequestState, hit: PrefixHit) -> Allocation | None:
        """Gives a request that has no blocks the hit, and fresh blocks for the rest of its known tokens.

        All or nothing: None, with nothing changed, when blocks are lacking. `new_block_ids` is the whole table. Sets
        `num_computed_tokens` to the tokens of the hit.
        """
        assert not request.block_table, f"request {request.request_id} is admitted twice"
        if self.num_blocks_short(request, hit):
            return None
        new = self._fill(request, hit, hit.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        swap_ins = self._swap_in(request, hit, new) if request.host_block_table else ()
        allocation = self.allocate(request, request.num_tokens - hit.num_tokens)
        assert allocation is not None, "num_blocks_short and allocate disagree"
        return Allocation(tuple(request.block_table), (), allocation.copies, swap_ins)

    def allocate(self, request: RequestState, num_tokens: int) -> Allocation | None:
        """Makes the next `num_tokens` positions writable: new blocks, and copies of shared ones.

        None, with nothing changed, when blocks are lacking.
        """
        table, size, ref_counts = request.block_table, self.block_size, self.ref_counts
        start = request.num_computed_tokens
        end_block = -(-(start + num_tokens) // size)
        shared = [i for i in range(start // size, min(end_block, len(table))) if ref_counts[table[i]] > 1]
        num_new = max(0, end_block - len(table))
        if num_new + len(shared) > self._pool.num_free:
            return None
        copies, replaced = self._copy_on_write(request, shared)
        new = self._take(num_new)
        table.extend(new)
        return Allocation(tuple(new), replaced, copies)

    def allocate_spare(self, request: RequestState, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        """Makes up to `num_tokens` positions more writable, as many as free blocks allow, and says how many and which
        blocks it took. What comes next in its table is its own: the position before was made writable.
        """
        start, table = request.num_computed_tokens, request.block_table
        num_tokens = min(num_tokens, (len(table) + self._pool.num_free) * self.block_size - start)
        new = self._take(max(0, self.num_blocks_for(start + num_tokens) - len(table)))
        table.extend(new)
        return num_tokens, tuple(new)

    def trim(self, request: RequestState) -> None:
        """Gives back the blocks past its computed tokens: those that rejected drafts were written to."""
        table, num_kept = request.block_table, self.num_blocks_for(request.num_computed_tokens)
        for block in reversed(table[num_kept:]):
            self._pool.release(block)
        del table[num_kept:]

    def commit(self, request: RequestState, start: int, end: int) -> None:
        """Positions [start, end) have been computed: the blocks they filled can be found from now on."""
        first, last = start // self.block_size, end // self.block_size
        if first == last or not self.enable_prefix_caching:
            return
        self._hash(request, last)
        self._register(request, first, last)

    def hash_known(self, request: RequestState) -> None:
        """Names the blocks that a resumed request's output fills, so that they are found if they are cached."""
        if self.enable_prefix_caching:
            self._hash(request, request.num_tokens // self.block_size)

    def _hash(self, request: RequestState, num_blocks: int) -> None:
        if len(request.block_hashes) < num_blocks:
            request.block_hashes.extend(self._hasher(request, num_blocks))

    def free(self, request: RequestState) -> None:
        """Gives back all blocks."""
        self._release(request.block_table, background=request.background)
        request.block_table = []
        request.num_computed_tokens = 0

    def finds_again(self, request: RequestState) -> bool:
        """Return whether the prefix cache serves this request at all."""
        return self.enable_prefix_caching and request.spec.sampling.prompt_logprobs is None

    def can_swap_out(self, num_tokens: int) -> bool:
        return 0 < self.num_rows(0, num_tokens) <= self._host.num_free

    def swap_out(self, request: RequestState, num_tokens: int, copied_from: Mapping[int, int]) -> tuple[BlockCopy, ...]:
        """Copies of what it goes on with after its first `num_tokens` tokens to the host; `free` comes next.

        `copied_from` names, for blocks that a copy of this very plan was to fill, where the contents still are.
        """
        sources = [row.number for row in self.rows(request.block_table, 0, num_tokens)]
        request.host_block_table = self._host.take(len(sources))
        request.num_swapped_tokens = num_tokens
        pairs = zip(sources, request.host_block_table, strict=True)
        return tuple([BlockCopy(copied_from.get(source, source), target) for source, target in pairs])

    def drop_swapped(self, request: RequestState) -> None:
        """Drop the request's copy on the host, if it has one."""
        self._host.give_back(request.host_block_table)
        request.host_block_table = []
        request.num_swapped_tokens = 0

    def reserve(
        self, request: RequestState, hit: PrefixHit, num_blocks: int, num_spared: int
    ) -> tuple[int, ...] | None:
        """Give a waiting request the hit, and fresh blocks up to so many in all, to be filled from elsewhere:
        none of its tokens is computed yet. None, with nothing changed, unless `num_spared` free blocks would be left.
        """
        if self._num_needed_for(hit, num_blocks * self.block_size) + num_spared > self.num_free:
            return None
        return tuple(self._fill(request, hit, num_blocks * self.block_size))

    def hold(self, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest cached prefix of a chain, held once more until `release`."""
        blocks = tuple(self._cache.find(block_hashes))
        for block in blocks:
            self._pool.share(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Release what `hold` gave."""
        self._release(blocks)

    def _release(self, blocks: Sequence[int], *, background: bool = False) -> None:
        """Release blocks, the last first, so that a chain is evicted from its end."""
        for block in reversed(blocks):
            self._pool.release(block, background=background)

    def _num_needed_for(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free pages that `_fill` takes."""
        return self.num_blocks_for(num_tokens) - len(hit.blocks) + self._num_free_in(hit)

    def _fill(self, request: RequestState, hit: PrefixHit, num_tokens: int) -> list[int]:
        """Give a request the hit, and more blocks for what it goes on with after so many tokens; those."""
        for block in hit.blocks:
            self._pool.share(block)
        new = self._take(self.num_blocks_for(num_tokens) - len(hit.blocks))
        request.block_table = [*hit.blocks, *new]
        return new

    def begin_step(self) -> None:
        """Begin a step; call it before each plan."""
        if self._host.num_blocks:
            self._host.begin_step()
        self._filling.clear()

    def num_freed_by(self, victim: RequestState, hit: PrefixHit) -> int:
        """Blocks that would become free if `victim` alone gave its own back, besides those of a hit."""
        ref_counts, kept = self.ref_counts, set(hit.blocks)
        return sum(1 for block in victim.block_table if ref_counts[block] == 1 and block not in kept)

    def check_invariants(self, requests: Iterable[RequestState], leased: Iterable[Sequence[int]] = ()) -> None:
        """Assert that reference counts are what the block tables of `requests`, all holders, and `leased` say."""
        requests = list(requests)
        held = Counter(block for request in requests for block in request.block_table)
        held.update(block for blocks in leased for block in blocks)
        assert all(len(set(r.block_table)) == len(r.block_table) for r in requests), "a block twice in one table"
        assert [held[block] for block in range(self.num_blocks)] == self.ref_counts
        self._pool.check_invariants()
        self._cache.check_invariants()

    def check_host(self, requests: Iterable[RequestState]) -> None:
        """Asserts that host blocks are held as `requests`, all that there are, say."""
        self._host.check_invariants([block for request in requests for block in request.host_block_table])

    def _register(self, request: RequestState, first: int, last: int) -> None:
        digests, register, on_cached = request.block_hashes[first:last], self._cache.register, self.on_cached
        for digest, block in zip(digests, request.block_table[first:last], strict=False):
            register(digest, block)
            if on_cached is not None:
                on_cached(digest)

    def _swap_in(self, request: RequestState, hit: PrefixHit, new: Sequence[int]) -> tuple[BlockCopy, ...]:
        """Fill new blocks from the host, findable from now on: copies come before all that this plan computes."""
        self._filling.update(new)
        self.drop_swapped(request)
        if new and self.enable_prefix_caching:
            num_full = min(hit.num_tokens // self.block_size, len(request.block_hashes))
            self._register(request, len(hit.blocks), num_full)
        rows = self.rows(request.block_table, len(hit.blocks), hit.num_tokens)
        return tuple([BlockCopy(host, row.number) for host, row in zip(hit.host_blocks, rows, strict=True)])

    def _copy_on_write(
        self, request: RequestState, shared: list[int]
    ) -> tuple[tuple[BlockCopy, ...], tuple[tuple[int, int], ...]]:
        copies, replaced, table = [], [], request.block_table
        for index, block in zip(shared, self._take(len(shared)), strict=True):
            copies.append(BlockCopy(table[index], block))
            replaced.append((index, block))
            self._pool.release(table[index])
            table[index] = block
        return tuple(copies), tuple(replaced)

    def _take(self, count: int) -> list[int]:
        taken = self._pool.take(count)
        for block in taken:
            digest = self._cache.forget(block)
            if digest is not None and self.evicted is not None and block not in self._filling:
                self.evicted[digest] = block
        return taken

"""Pages: what blocks consist of where layers see windows of unlike sizes (design note 0033).

A block is `block_size` tokens of a request in all layers; a page is that of one group of layers, all of one window.
A block in use has the pages of groups without a window. Those of a window are given back once no later token of any
holder sees them, and keep their contents until they are wanted for something else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from maitred.core.request import RequestState
from maitred.core.step import BlockCopy, PageChange, PoolChanges, ScheduledRow
from maitred.kv.manager import NO_HIT, Allocation, BlockPool, KVCacheManager, PoolRow, PrefixHit
from maitred.kv.states import StatefulKVCacheManager

MOST_BLOCKS = 2**20  # numbers of blocks, where they have no pages that stay


class KVGroups(NamedTuple):
    """Groups of layers by kind: kind 0 has no window, and perhaps no layers; a window is in tokens."""

    windows: tuple[int | None, ...]  # of each kind
    counts: tuple[int, ...]  # groups of each kind
    size: int  # layers of a group; a kind's last may have fewer
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place there

    @property
    def num_groups(self) -> int:
        return sum(self.counts)

    def firsts(self) -> tuple[int, ...]:
        """The first group of each kind."""
        return tuple(sum(self.counts[:kind]) for kind in range(len(self.counts)))

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Window of each layer; None sees all tokens."""
        of_group = [window for window, count in zip(self.windows, self.counts, strict=True) for _ in range(count)]
        return tuple(of_group[group] for group, _ in self.places)

    def pages_for(self, num_tokens: int, block_size: int, ahead: int = 1) -> int:
        """Pages of a request of so many tokens, at most, when `ahead` of them are computed in a step."""
        num_blocks = -(-num_tokens // block_size)
        pages = num_blocks * self.counts[0]
        for window, count in zip(self.windows[1:], self.counts[1:], strict=True):
            assert window is not None
            pages += count * min(num_blocks, most_blocks(window - 1 + ahead, block_size))
        return pages

    def tokens_for(self, num_pages: int, block_size: int, most: int, ahead: int = 1) -> int:
        """The longest request that so many pages hold, whole blocks of it, up to about `most` tokens."""
        low, high = 0, -(-most // block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pages_for(middle * block_size, block_size, ahead) <= num_pages:
                low = middle
            else:
                high = middle - 1
        return low * block_size

    def num_blocks(self, num_pages: int, context: int) -> int:
        """Numbers of blocks for so many pages: those that stay bound them; without such, contexts as long as can be."""
        if self.counts[0]:
            return num_pages // self.counts[0]
        return max(num_pages, min(MOST_BLOCKS, int(num_pages * self.blocks_per_page(context))))

    def blocks_per_page(self, context: int) -> float:
        """Numbers of blocks that there are for each page, at most."""
        return 1 / self.counts[0] if self.counts[0] else -(-context // max(filter(None, self.windows)))


def part_of(groups: KVGroups | None, block_size: int) -> float:
    """Part of whole blocks' bytes that a prompt of some thousand tokens keeps."""
    if groups is None:
        return 1.0
    num_blocks = -(-4096 // block_size)
    pages = groups.pages_for(num_blocks * block_size, block_size)
    return min(1.0, pages * groups.size / (num_blocks * len(groups.places)))


def first_seen(window: int | None, num_tokens: int, block_size: int) -> int:
    """The first block that the token after so many sees in layers of this window."""
    return 0 if window is None else max(0, num_tokens + 1 - window) // block_size


def most_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks in which so many consecutive tokens lie, at most."""
    return (num_tokens + block_size - 2) // block_size + 1 if num_tokens else 0


def groups_of(windows: Sequence[int | None], context: int, widths: Sequence[int] = ()) -> KVGroups | None:
    """Groups of layers with these windows; None where no window is shorter than the context: blocks are whole then.
    `widths` are what layers keep of a token, where that differs: groups then fill about the same memory."""
    windows = [window if window is not None and window < context else None for window in windows]
    layers = Counter(windows)
    if set(layers) == {None}:
        return None
    kinds = (None, *sorted(window for window in layers if window is not None))
    width: Counter[int | None] = Counter()
    for window, each in zip(windows, widths or [1] * len(windows), strict=True):
        width[window] = max(width[window], each)

    def padded(page: int, *of_kinds: int | None) -> int:
        return sum(-(-layers[kind] // (page // width[kind])) * page - layers[kind] * width[kind] for kind in of_kinds)

    # What stays is padded least, then all: 13 layers and 12 of a window are two groups of 13.
    pages = sorted(max(layers[kind] * width[kind], *width.values()) for kind in layers)
    page = min(pages, key=lambda size: (padded(size, *({None} & set(layers))), padded(size, *layers)))
    sizes = [page // (width[window] or page) for window in kinds]
    counts = tuple(-(-layers[window] // size) for window, size in zip(kinds, sizes, strict=True))
    firsts, seen, places = [sum(counts[:kind]) for kind in range(len(kinds))], Counter[int | None](), []
    for window in windows:
        kind = kinds.index(window)
        places.append((firsts[kind] + seen[window] // sizes[kind], seen[window] % sizes[kind]))
        seen[window] += 1
    return KVGroups(kinds, counts, max(sizes[kind] for kind, count in enumerate(counts) if count), tuple(places))


class PagedBlockPool(BlockPool):
    """Blocks, and the pages that they have of each kind.

    Free pages are a queue as free blocks are: first those that hold nothing of worth, then by when they were left.
    """

    def __init__(
        self,
        num_blocks: int,
        groups: KVGroups,
        num_pages: int,
        kept: Container[int],
        on_lost: Callable[[int], object],
    ) -> None:
        """`on_lost` is told of a free block that lost pages without which it is nothing."""
        super().__init__(num_blocks, kept)
        self.groups, self.num_pages, self._on_lost = groups, num_pages, on_lost
        self._firsts = groups.firsts()
        self._free_pages: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._owners: list[tuple[int, int] | None] = [None] * num_pages  # kind, block
        self.pages: list[dict[int, tuple[int, ...]]] = [{} for _ in groups.counts]  # of each kind, by block
        self.holders: list[Counter[int]] = [Counter() for _ in groups.counts]  # of a window's pages, by block
        self.changes: list[PageChange] = []  # not told yet

    @property
    def num_free_pages(self) -> int:
        return len(self._free_pages)

    def take(self, count: int) -> list[int]:
        """`count` free blocks with the pages that stay."""
        taken = []
        for _ in range(count):
            pages = self._take_pages(self.groups.counts[0])
            block = super().take(1)[0]
            self._discard(block)
            self._give(0, block, pages)
            taken.append(block)
        return taken

    def share(self, block: int) -> None:
        if self.ref_counts[block] == 0:
            for page in self.pages[0].get(block, ()):
                del self._free_pages[page]
        super().share(block)

    def release(self, block: int, *, background: bool = False) -> None:
        super().release(block)  # what is short is pages, and their queue knows no classes
        if self.ref_counts[block] == 0:
            if block in self._kept:
                self._free_pages.update(dict.fromkeys(self.pages[0].get(block, ())))
            else:
                self._discard(block)

    def hold(self, kind: int, block: int) -> None:
        """Add a holder of a block's pages of a window, which it has, or is given."""
        if not self.holders[kind][block]:
            pages = self.pages[kind].get(block)
            if pages is None:
                assert block not in self._kept, f"block {block} is given pages while it is findable"
                self._give(kind, block, self._take_pages(self.groups.counts[kind]))
            else:
                for page in pages:
                    del self._free_pages[page]
        self.holders[kind][block] += 1

    def drop(self, kind: int, block: int) -> None:
        """Remove one holder of a block's pages of a window; the last one puts them among the free."""
        self.holders[kind][block] -= 1
        if self.holders[kind][block] == 0:
            del self.holders[kind][block]
            self._free_pages.update(dict.fromkeys(self.pages[kind][block]))
            if block not in self._kept:
                self._empty(kind, block)

    def forgotten(self, block: int) -> None:
        """The block is findable no more: if it is free, it has nothing of worth."""
        if self.ref_counts[block] == 0:
            self._discard(block)
            self.put_first(block)

    def _take_pages(self, count: int) -> tuple[int, ...]:
        """The caller has checked `num_free_pages`."""
        taken = []
        for _ in range(count):
            page, _ = self._free_pages.popitem(last=False)
            owner = self._owners[page]
            if owner is not None:
                self._free_pages[page] = None  # for a moment, along with the others of its block
                kind, block = owner
                self._empty(kind, block)
                if kind == 0:
                    self._on_lost(block)
                    self.forgotten(block)
                del self._free_pages[page]
            taken.append(page)
        return tuple(taken)

    def _give(self, kind: int, block: int, pages: tuple[int, ...]) -> None:
        if pages:
            self.pages[kind][block] = pages
            for page in pages:
                self._owners[page] = kind, block
            self.changes.append(PageChange(block, self._firsts[kind], pages))

    def _discard(self, block: int) -> None:
        """What a free block has is worth nothing."""
        for kind, pages in enumerate(self.pages):
            if block in pages:
                self._free_pages.update(dict.fromkeys(pages[block]))
                self._empty(kind, block)

    def _empty(self, kind: int, block: int) -> None:
        """Free pages of a block become nobody's."""
        for page in self.pages[kind].pop(block):
            self._owners[page] = None
            self._free_pages.move_to_end(page, last=False)

    def check_invariants(self) -> None:
        """Assert besides that a page has one owner, and that those are free that are held by nobody."""
        super().check_invariants()
        owned = [(kind, block) for kind, pages in enumerate(self.pages) for block in pages]
        pages = [page for kind, block in owned for page in self.pages[kind][block]]
        assert len(set(pages)) == len(pages), "a page of two blocks"
        assert all(self._owners[page] == (kind, block) for kind, block in owned for page in self.pages[kind][block])
        assert sum(owner is not None for owner in self._owners) == len(pages)
        held = [(kind, block) for kind, block in owned if (self.holders[kind] if kind else self.ref_counts)[block]]
        in_use = {page for kind, block in held for page in self.pages[kind][block]}
        assert set(range(self.num_pages)) - in_use == set(self._free_pages), "a page is lost, or free and held"
        assert all(block in self.pages[kind] for kind, holders in enumerate(self.holders) for block in holders)
        if self.groups.counts[0]:
            for block, count in enumerate(self.ref_counts):
                assert (block in self.pages[0]) == (count > 0 or block in self._kept), f"pages of block {block}"


class PagedKVCacheManager(KVCacheManager):
    """Bookkeeping of a KV cache some of whose layers see a window alone: memory is counted in pages.

    Positions have the pages of a window from when they are computed until they are seen no more; blocks for all known
    tokens are taken when a request is admitted. A hit ends where it has all pages of the last window.
    """

    def __init__(self, groups: KVGroups, *, num_pages: int, **same: Any) -> None:
        super().__init__(**same)
        self.groups = groups
        self.pages = PagedBlockPool(same["num_blocks"], groups, num_pages, self._cache.hashes, self._cache.forget)
        self._pool = self.pages
        self.ref_counts = self.pages.ref_counts
        self.pages_per_block = groups.num_groups
        self._kinds = tuple(enumerate(groups.counts))[1:]
        self.kinds = tuple(map(lambda first, count: range(first, first + count), groups.firsts(), groups.counts))
        self._windows: dict[str, list[range]] = {}  # of each request and kind: places in its table whose pages it holds

    opens_windows = has_pool_changes = True
    unit = "pages"

    @property
    def num_pages(self) -> int:
        return self.pages.num_pages

    @property
    def num_free(self) -> int:
        return self.pages.num_free_pages

    @property
    def num_pages_used(self) -> int:
        return self.num_pages - self.num_free

    def take_pool_changes(self, rows: Sequence[ScheduledRow], requests: Sequence[RequestState]) -> PoolChanges:
        changes, self.pages.changes = tuple(self.pages.changes), []
        return PoolChanges(page_changes=changes)

    def num_pages_for(self, num_tokens: int) -> int:
        return self.groups.pages_for(num_tokens, self.block_size)

    def rows(self, table: Sequence[int], first: int, num_tokens: int) -> list[PoolRow]:
        return [
            PoolRow(index, group, page)
            for index in range(first, self.num_blocks_for(num_tokens))
            for kind, pages in enumerate(self.pages.pages)
            if index >= self._first(kind, num_tokens)
            for group, page in enumerate(pages.get(table[index], ()), self.kinds[kind].start)
        ]

    def places(self, table: Sequence[int], first: int, num_tokens: int) -> Sequence[tuple[int, ...]]:
        """The page of each group; -1 where there is none, or none is seen."""
        firsts = [self._first(kind, num_tokens) for kind in range(len(self.kinds))]
        none = [(-1,) * count for count in self.groups.counts]
        return [
            tuple(
                page
                for kind, pages in enumerate(self.pages.pages)
                for page in (pages.get(block, none[kind]) if place >= firsts[kind] else none[kind])
            )
            for place, block in enumerate(table[first:], first)
        ]

    def num_rows(self, first: int, num_tokens: int) -> int:
        end, counts = self.num_blocks_for(num_tokens), enumerate(self.groups.counts)
        return sum(count * max(0, end - max(first, self._first(kind, num_tokens))) for kind, count in counts)

    def num_usable(self, num_blocks: int, has: Callable[[int, int], bool]) -> int:
        while True:
            gaps = (
                index
                for kind, _ in self._kinds
                for index in range(num_blocks - 1, self._first(kind, num_blocks * self.block_size) - 1, -1)
                if not has(kind, index)
            )
            gap = next(gaps, None)
            if gap is None:
                return num_blocks
            num_blocks = gap

    def find_prefix(self, request: RequestState) -> PrefixHit:
        blocks = self._usable(super().find_prefix(request).blocks)
        return PrefixHit(blocks, len(blocks) * self.block_size)

    def fork(self, source: RequestState, target: RequestState) -> PrefixHit:
        """Blocks that `target` can share; none where the source has left pages that `target` would see."""
        hit = super().fork(source, target)
        return hit if self._sees_all(hit.blocks, hit.num_tokens) else NO_HIT

    def num_blocks_needed(self, request: RequestState, hit: PrefixHit) -> int:
        """Free pages that `admit` takes, with those for a first step of one block."""
        num_blocks, end = self.num_blocks_for(request.num_tokens), self.num_blocks_for(hit.num_tokens)
        num_copied = int(hit.forked and hit.num_tokens % self.block_size != 0)
        num_new = num_blocks - len(hit.blocks) + num_copied
        if num_new > self.pages.num_free - self._num_free_in(hit):
            return self.num_pages + num_new  # numbers of blocks lack
        num_opened = num_copied or int(num_blocks > end)
        needed = self._num_needed_for(hit, hit.num_tokens) + (num_blocks - end + num_copied) * self.groups.counts[0]
        return needed + num_opened * sum(self.groups.counts[1:])

    def admit(self, request: RequestState, hit: PrefixHit) -> Allocation | None:
        assert not request.block_table, f"request {request.request_id} is admitted twice"
        if self.num_blocks_short(request, hit):
            return None
        new = self._fill(request, hit, hit.num_tokens)
        request.num_computed_tokens = hit.num_tokens
        swap_ins = self._swap_in(request, hit, new) if request.host_block_table else ()
        table = request.block_table
        shared = [len(table) - 1] if hit.forked and hit.num_tokens % self.block_size else []
        copies, _ = self._copy_on_write(request, shared)
        table.extend(self._take(self.num_blocks_for(request.num_tokens) - len(table)))
        return Allocation(tuple(table), (), copies, swap_ins)

    def allocate(self, request: RequestState, num_tokens: int) -> Allocation | None:
        table, size, ref_counts = request.block_table, self.block_size, self.ref_counts
        start = request.num_computed_tokens
        end_block = -(-(start + num_tokens) // size)
        shared = [i for i in range(start // size, min(end_block, len(table))) if ref_counts[table[i]] > 1]
        needed = self._num_needed_to(request, end_block) + len(shared) * self.groups.num_groups
        num_new = max(0, end_block - len(table))
        if needed > self.num_free or num_new + len(shared) > self.pages.num_free:
            return None
        copies, replaced = self._copy_on_write(request, shared)
        return Allocation(self._open(request, end_block), replaced, copies)

    def allocate_spare(self, request: RequestState, num_tokens: int) -> tuple[int, tuple[int, ...]]:
        start, size = request.num_computed_tokens, self.block_size
        end_block = self.num_blocks_for(start + num_tokens)
        while self._num_needed_to(request, end_block) > self.num_free or (
            end_block - len(request.block_table) > self.pages.num_free
        ):
            end_block -= 1
        num_tokens = min(num_tokens, end_block * size - start)
        return (num_tokens, self._open(request, end_block)) if num_tokens > 0 else (0, ())

    def trim(self, request: RequestState) -> None:
        num_kept = self.num_blocks_for(request.num_computed_tokens)
        for kind, _ in self._kinds:
            held = self._windows[request.request_id][kind]
            self._drop(request, kind, range(held.start, min(held.stop, num_kept)))
        super().trim(request)

    def commit(self, request: RequestState, start: int, end: int) -> None:
        """Blocks filled by [start, end) can be found; pages that no later token of the request sees are given back."""
        super().commit(request, start, end)
        if request.request_id in self._windows:
            for kind, _ in self._kinds:
                held = self._windows[request.request_id][kind]
                first = self._first(kind, request.num_computed_tokens)
                if first > held.start:
                    self._drop(request, kind, range(min(first, held.stop), held.stop))

    def free(self, request: RequestState) -> None:
        if request.request_id in self._windows:
            for kind, _ in self._kinds:
                self._drop(request, kind, range(0))
            del self._windows[request.request_id]
        super().free(request)

    def swap_out(self, request: RequestState, num_tokens: int, copied_from: Mapping[int, int]) -> tuple[BlockCopy, ...]:
        """No copies where one of this plan was to fill a block: its source may have other pages by now."""
        return () if copied_from else super().swap_out(request, num_tokens, copied_from)

    def reserve(
        self, request: RequestState, hit: PrefixHit, num_blocks: int, num_spared: int
    ) -> tuple[int, ...] | None:
        lacks_numbers = num_blocks - len(hit.blocks) > self.pages.num_free - self._num_free_in(hit)
        return None if lacks_numbers else super().reserve(request, hit, num_blocks, num_spared)

    def hold(self, block_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest prefix of a chain that a request could go on from, and their last window's pages."""
        blocks = self._usable(tuple(self._cache.find(block_hashes)))
        for block in blocks:
            self.pages.share(block)
        for kind, block in self._held_by(blocks):
            self.pages.hold(kind, block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        for kind, block in self._held_by(blocks):
            self.pages.drop(kind, block)
        super().release(blocks)

    def _held_by(self, blocks: Sequence[int]) -> list[tuple[int, int]]:
        """Kinds and blocks whose pages of windows a lease holds, the last first."""
        first = partial(self._first, num_tokens=len(blocks) * self.block_size)
        return [(kind, block) for kind, _ in self._kinds for block in reversed(blocks[first(kind) :])]

    def num_freed_by(self, victim: RequestState, hit: PrefixHit) -> int:
        """Pages that would become free, if `victim` alone gave its own back, besides those of a hit."""
        freed = super().num_freed_by(victim, hit) * self.groups.counts[0]
        for kind, count in self._kinds:
            held, holders = self._windows[victim.request_id][kind], self.pages.holders[kind]
            kept = set(hit.blocks[self._first(kind, hit.num_tokens) :])
            blocks = victim.block_table[held.start : held.stop]
            freed += count * sum(1 for block in blocks if holders[block] == 1 and block not in kept)
        return freed

    def check_invariants(self, requests: Iterable[RequestState], leased: Iterable[Sequence[int]] = ()) -> None:
        """Assert besides that pages of windows are held as the requests see them."""
        requests, leased = list(requests), list(leased)
        super().check_invariants(requests, leased)
        for kind, _ in self._kinds:
            held = Counter(block for blocks in leased for of, block in self._held_by(blocks) if of == kind)
            for request in requests:
                window = self._windows.get(request.request_id, [range(0)] * len(self.groups.counts))[kind]
                held.update(request.block_table[window.start : window.stop])
                if window and request.num_computed_tokens:  # else KV is on its way
                    assert window.start <= self._first(kind, request.num_computed_tokens)
            assert held == self.pages.holders[kind], "pages of a window held otherwise than tables say"

    # -- windows

    def _first(self, kind: int, num_tokens: int) -> int:
        """Place in a table of the first block that the token after so many sees."""
        return first_seen(self.groups.windows[kind], num_tokens, self.block_size)

    def _sees_all(self, blocks: Sequence[int], num_tokens: int) -> bool:
        return all(
            block in self.pages.pages[kind]
            for kind, _ in self._kinds
            for block in blocks[self._first(kind, num_tokens) :]
        )

    def _usable(self, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """Blocks of a hit, of which the last window has all pages."""
        pages = self.pages.pages
        return blocks[: self.num_usable(len(blocks), lambda kind, index: blocks[index] in pages[kind])]

    def _num_needed_for(self, hit: PrefixHit, num_tokens: int) -> int:
        end, free = self.num_blocks_for(num_tokens), self._num_free_in(hit)
        needed = (end - len(hit.blocks) + free) * self.groups.counts[0]
        for kind, count in self._kinds:
            first, holders = self._first(kind, num_tokens), self.pages.holders[kind]
            num_unheld = sum(1 for block in hit.blocks[first:] if not holders[block])
            needed += count * (num_unheld + max(0, end - max(first, len(hit.blocks))))
        return needed

    def _fill(self, request: RequestState, hit: PrefixHit, num_tokens: int) -> list[int]:
        for block in hit.blocks:
            self.pages.share(block)
        request.block_table = list(hit.blocks)
        firsts = [self._first(kind, num_tokens) for kind in range(len(self.groups.counts))]
        self._windows[request.request_id] = [range(first, max(first, len(hit.blocks))) for first in firsts]
        for kind, _ in self._kinds:
            for block in hit.blocks[firsts[kind] :]:
                self.pages.hold(kind, block)
        return list(self._open(request, self.num_blocks_for(num_tokens)))

    def _num_needed_to(self, request: RequestState, end_block: int) -> int:
        """Free pages that it takes to have all of a request's blocks before this one."""
        windows = self._windows[request.request_id]
        needed = self.groups.counts[0] * max(0, end_block - len(request.block_table))
        return needed + sum(count * max(0, end_block - windows[kind].stop) for kind, count in self._kinds)

    def _open(self, request: RequestState, end_block: int) -> tuple[int, ...]:
        """All pages of a request's blocks before this one; the blocks that are new."""
        table, windows = request.block_table, self._windows[request.request_id]
        new = self._take(max(0, end_block - len(table)))
        table.extend(new)
        for kind, _ in self._kinds:
            held = windows[kind]
            for block in table[held.stop : end_block]:
                self.pages.hold(kind, block)
            windows[kind] = range(held.start, max(held.stop, end_block))
        return tuple(new)

    def _drop(self, request: RequestState, kind: int, kept: range) -> None:
        """Pages of a kind outside `kept` are the request's no more, the last first: a chain is evicted from its end."""
        held, table = self._windows[request.request_id][kind], request.block_table
        for index in reversed(held):
            if index not in kept:
                self.pages.drop(kind, table[index])
        self._windows[request.request_id][kind] = kept

    def _copy_on_write(
        self, request: RequestState, shared: list[int]
    ) -> tuple[tuple[BlockCopy, ...], tuple[tuple[int, int], ...]]:
        before = [request.block_table[index] for index in shared]
        for block in before:
            self.pages.share(block)  # until its pages of windows are dropped
        copies, replaced = super()._copy_on_write(request, shared)
        for old, (_, new) in zip(before, replaced, strict=True):
            for kind, _ in self._kinds:
                self.pages.hold(kind, new)
                self.pages.drop(kind, old)
            self.pages.release(old)
        return copies, replaced

    def _register(self, request: RequestState, first: int, last: int) -> None:
        """Of two blocks with equal contents the first keeps the name, unless it lacks pages that the other has."""
        for block, digest in zip(request.block_table[first:last], request.block_hashes[first:last], strict=True):
            known = self._cache.block_of(digest)
            if known not in (None, block):
                for kind, _ in self._kinds:
                    if known not in self.pages.pages[kind] and block in self.pages.pages[kind]:
                        self._cache.forget(known)
                        self.pages.forgotten(known)
                        break
        super()._register(request, first, last)


def kv_cache_manager(
    groups: KVGroups | None, *, num_pages: int, num_state_slots: int = 0, **same: Any
) -> KVCacheManager:
    """The manager of a cache of whole blocks, with states beside them where there are slots, or of pages."""
    if num_state_slots:
        return StatefulKVCacheManager(num_state_slots, **same)
    return KVCacheManager(**same) if groups is None else PagedKVCacheManager(groups, num_pages=num_pages, **same)

"""The memory plan: what weights and KV cache take, what is free, and the longest context that fits."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from maitred.config import CacheConfig, SchedulerConfig
from maitred.core.errors import OutOfMemory
from maitred.kv.pages import KVGroups

GIB = 1024**3
DEFAULT_SWAP_BYTES = 4 * GIB
RESERVE_SHARE = 0.10  # of the available memory, left for activations, the tokenizer and the system
HOST_KV_SHARE = (
    0.5  # of the memory that weights leave free, at most for a KV cache on the host: other programs live there
)


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """Memory of a draft model, with a block for each of the served model's, or of a head, whose KV lies in those."""

    weights_bytes: int
    bytes_per_block: int = 0


class PagePlan(NamedTuple):
    """The pool where blocks consist of pages."""

    groups: KVGroups
    num_pages: int
    bytes_per_page: int


class StatePlan(NamedTuple):
    """Slots of recurrent layers' states: one of each running request, the others for snapshots."""

    num_slots: int
    bytes_per_slot: int
    num_running: int

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self.bytes_per_slot

    def describe(self) -> str:
        return (
            f"{format_bytes(self.num_bytes)} = {self.num_slots:,} slots of {format_bytes(self.bytes_per_slot)} "
            f"({self.num_running} requests, and {self.num_slots - self.num_running} snapshots of what began alike)"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes that will be allocated; planned before anything is."""

    available_bytes: int
    weights_bytes: int  # the draft model's included
    bytes_per_block: int  # of the served model
    block_size: int  # tokens
    num_blocks: int
    max_model_len: int  # tokens
    model_context: int  # tokens the model was made for
    longest_context: int  # tokens one request could have if it had all the KV cache
    draft: DraftMemory | None = None  # of the above, unless said otherwise
    pages: PagePlan | None = None  # None: `num_blocks` whole blocks
    states: StatePlan | None = None  # of recurrent layers

    @property
    def num_state_slots(self) -> int:
        return self.states.num_slots if self.states is not None else 0

    @property
    def groups(self) -> KVGroups | None:
        return self.pages.groups if self.pages is not None else None

    @property
    def num_pages(self) -> int:
        """What the pool counts: blocks, where they are whole."""
        return self.pages.num_pages if self.pages is not None else self.num_blocks

    @property
    def kv_bytes(self) -> int:
        """The draft model's included."""
        drafts = self.num_blocks * self.draft.bytes_per_block if self.draft is not None else 0
        unit = self.bytes_per_block if self.pages is None else self.pages.bytes_per_page
        return self.num_pages * unit + drafts

    @property
    def num_full_contexts(self) -> float:
        """Number of requests of max_model_len that fit at once."""
        if self.pages is None:
            return self.num_blocks * self.block_size / self.max_model_len
        return self.num_pages / self.pages.groups.pages_for(self.max_model_len, self.block_size)

    def describe(self) -> str:
        """A few lines for the terminal."""
        lines = [
            f"memory  available {format_bytes(self.available_bytes)}",
            f"        weights   {format_bytes(self.weights_bytes)}",
            f"        KV cache  {format_bytes(self.kv_bytes)} = {self._units()}, "
            f"{self.num_full_contexts:.1f} full contexts)",
            f"        context   {self.max_model_len:,} tokens{self._remark()}; "
            f"the longest that memory holds is {self.longest_context:,}",
        ]
        if self.states is not None:
            lines.insert(3, f"        states    {self.states.describe()}")
        if self.draft is not None:
            lines.append(f"        of these, {self._drafts_share(self.draft)}")
        return "\n".join(lines)

    def _units(self) -> str:
        if self.pages is None:
            tokens = self.num_blocks * self.block_size
            return f"{self.num_blocks:,} blocks of {self.block_size} tokens ({tokens:,} tokens"
        groups, num_pages, bytes_per_page = self.pages
        windows = " and ".join(f"{window:,}" for window in groups.windows if window is not None)
        context_bytes = bytes_per_page * groups.pages_for(self.max_model_len, self.block_size)
        return (
            f"{num_pages:,} pages of {self.block_size} tokens in {groups.size} layers (a window of {windows} "
            f"tokens keeps no more: {format_bytes(context_bytes)} for a full context"
        )

    def _drafts_share(self, draft: DraftMemory) -> str:
        weights = f"{format_bytes(draft.weights_bytes)} of weights"
        if not draft.bytes_per_block:
            return f"{weights} are the head's, and a layer of each block"
        return f"{weights} and {format_bytes(self.num_blocks * draft.bytes_per_block)} of cache are the draft model's"

    def _remark(self) -> str:
        if self.max_model_len < self.model_context:
            return f" of the model's {self.model_context:,}"
        if self.max_model_len > self.model_context:
            return f" (the model was made for {self.model_context:,}: beyond that, expect nonsense)"
        return ""


def swap_bytes(asked: int | None, *, on_gpu: bool, available_host_bytes: int, host_bytes_planned: int) -> int:
    """Host memory for swapped blocks. Raises OutOfMemory when what was asked for is not there."""
    free = int(available_host_bytes * (1 - RESERVE_SHARE)) - host_bytes_planned
    if asked is None:
        return max(0, min(DEFAULT_SWAP_BYTES, free // 4)) if on_gpu else 0
    if asked > free:
        raise OutOfMemory(
            f"swap_memory_bytes asks for {format_bytes(asked)} of host memory, and {format_bytes(max(free, 0))} are "
            "left; ask for less, or leave it out"
        )
    return asked


def own_share(available_bytes: int, num_engines: int, mapped_bytes: int) -> int:
    """Memory that one of several engines which share it is to plan with. `mapped_bytes` of the weights lie there once
    for all, so that each gets an equal part of what is left beside them and the reserve.
    """
    return (available_bytes + int((num_engines - 1) * mapped_bytes / (1 - RESERVE_SHARE))) // num_engines


def format_bytes(count: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def plan_memory(
    *,
    available_bytes: int,
    weights_bytes: int,
    bytes_per_block: int,
    model_context: int,
    pinned_context: int | None,
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    draft: DraftMemory | None = None,
    kv_share: float = 1.0,
    groups: KVGroups | None = None,
    bytes_per_page: int | None = None,
    bytes_per_state_slot: int = 0,
) -> MemoryPlan:
    """Fit the KV cache: what `max_num_seqs` full contexts need, bounded by `kv_share` of what the weights leave; one
    full context may take more.

    `draft` comes to `weights_bytes` and `bytes_per_block`; a pinned number of KV bytes holds both caches.
    Without `pinned_context` the context shrinks to what fits; with it, or with a pinned number of KV bytes, what does
    not fit raises OutOfMemory with both numbers.
    """
    served_bytes_per_block, served_bytes_per_page = bytes_per_block, bytes_per_page or bytes_per_block
    context = pinned_context or model_context
    if groups is not None:
        bytes_per_block = served_bytes_per_page  # memory is counted in pages
    if draft is not None:
        weights_bytes += draft.weights_bytes
        per_page = groups.blocks_per_page(context) if groups is not None else 1
        bytes_per_block += math.ceil(draft.bytes_per_block * per_page)
    budget = int(available_bytes * (1 - RESERVE_SHARE)) - weights_bytes
    if budget < bytes_per_block:
        raise OutOfMemory(
            f"the weights need {format_bytes(weights_bytes)} and {format_bytes(available_bytes)} are available; "
            "choose a smaller model or dtype, or free memory"
        )
    states = _plan_states(bytes_per_state_slot, budget, cache, scheduler) if bytes_per_state_slot else None
    budget -= states.num_bytes if states is not None else 0
    if cache.kv_cache_memory_bytes is not None:
        budget = _pinned_kv(cache.kv_cache_memory_bytes, budget)
    blocks_that_fit = budget // bytes_per_block
    if blocks_that_fit == 0:
        raise OutOfMemory(
            f"one KV block of {cache.block_size} tokens needs {format_bytes(bytes_per_block)}, and "
            f"kv_cache_memory_bytes is {format_bytes(budget)}; give the KV cache more, or take a smaller --block-size"
        )
    blocks_per_context = _pages_for(groups, context, cache.block_size)
    longest = blocks_that_fit * cache.block_size
    if groups is not None:
        longest = groups.tokens_for(blocks_that_fit, cache.block_size, max(context, model_context, 2**20))
    if blocks_that_fit < blocks_per_context:
        if pinned_context is not None or not longest:
            raise OutOfMemory(_context_too_long(context, blocks_per_context, blocks_that_fit, longest, bytes_per_block))
        context = longest
    if cache.kv_cache_memory_bytes is not None:
        num_pages = blocks_that_fit
    else:
        ahead = scheduler.token_budget if groups is not None else 1  # the chunk under way
        blocks_per_context = _pages_for(groups, context, cache.block_size, ahead)
        share = max(int(blocks_that_fit * kv_share), blocks_per_context)
        num_pages = min(blocks_that_fit, share, scheduler.max_num_seqs * blocks_per_context)
    return MemoryPlan(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        bytes_per_block=served_bytes_per_block,
        block_size=cache.block_size,
        num_blocks=num_pages if groups is None else groups.num_blocks(num_pages, context),
        max_model_len=context,
        model_context=model_context,
        longest_context=longest,
        draft=draft,
        pages=PagePlan(groups, num_pages, served_bytes_per_page) if groups is not None else None,
        states=states,
    )


def _plan_states(bytes_per_slot: int, budget: int, cache: CacheConfig, scheduler: SchedulerConfig) -> StatePlan:
    """Slots for all requests of a step, which must leave half of `budget` for keys and values, and for snapshots."""
    num_running, most = scheduler.max_num_seqs, budget // 2 // bytes_per_slot
    if num_running > most:
        raise OutOfMemory(
            f"the states of {num_running} requests need {format_bytes(num_running * bytes_per_slot)}, more than half "
            f"of the {format_bytes(budget)} left after the weights; serve with --max-num-seqs {max(most, 1)} or less"
        )
    left, asked = budget - num_running * bytes_per_slot, cache.state_cache_memory_bytes
    if asked is not None and asked > left:
        raise OutOfMemory(
            f"state_cache_memory_bytes asks for {format_bytes(asked)}, and {format_bytes(left)} are left after the "
            "weights and the states of requests; ask for less, or leave it out"
        )
    num_snapshots = min(num_running, left // 4 // bytes_per_slot) if asked is None else asked // bytes_per_slot
    return StatePlan(num_running + num_snapshots * cache.enable_prefix_caching, bytes_per_slot, num_running)


def _pages_for(groups: KVGroups | None, num_tokens: int, block_size: int, ahead: int = 1) -> int:
    return math.ceil(num_tokens / block_size) if groups is None else groups.pages_for(num_tokens, block_size, ahead)


def _pinned_kv(asked_bytes: int, budget: int) -> int:
    if asked_bytes > budget:
        raise OutOfMemory(
            f"kv_cache_memory_bytes asks for {format_bytes(asked_bytes)}, and {format_bytes(budget)} are left after "
            "the weights; ask for less, or leave it out to take what fits"
        )
    return asked_bytes


def _context_too_long(context: int, needed: int, fitting: int, longest: int, bytes_per_block: int) -> str:
    return (
        f"one context of {context:,} tokens needs {format_bytes(needed * bytes_per_block)} of KV cache, and "
        f"{format_bytes(fitting * bytes_per_block)} ({longest:,} tokens) fit; "
        f"serve with --max-model-len {max(longest, 2)} or less, or with a larger KV cache"
    )


def available_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes this process may still take: the machine's available memory, or what its cgroup leaves if that is less."""
    available = _meminfo_available(proc / "meminfo")
    limit = min(_cgroups_free(proc, cgroup), default=None)
    return available if limit is None else min(available, limit)


def _meminfo_available(meminfo: Path) -> int:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # macOS: all of it


def _cgroups_free(proc: Path, cgroup: Path) -> Iterator[int]:
    """Limit less use of each control group of this process that has a limit, version 2 or 1: its own, as a systemd unit
    has one, and those that this is in. Page cache that can be dropped counts as free.
    """
    v2 = ("", "memory.max", "memory.current", "inactive_file")
    v1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    try:
        own = dict(line.split(":", 2)[1:] for line in (proc / "self/cgroup").read_text().splitlines())
    except (OSError, ValueError):
        own = {}
    for controller, limit_file, usage_file, cache_key in (v2, v1):
        group = Path(own.get(controller, "/"))
        for each in (group, *group.parents):
            at = cgroup / controller / each.relative_to("/")
            try:
                limit_text = (at / limit_file).read_text().strip()
                if limit_text == "max" or int(limit_text) >= 2**60:
                    continue
                used = int((at / usage_file).read_text())
                stat = (at / "memory.stat").read_text()
            except (OSError, ValueError):  # as seen from within a container
                continue
            droppable = next((int(row.split()[1]) for row in stat.splitlines() if row.split()[0] == cache_key), 0)
            yield max(0, int(limit_text) - used + droppable)


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Physical cores this process may use: its CPU affinity's, or its cgroup's quota if that is less; at least 1."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = physical_cores(os.sched_getaffinity(0) if has_affinity else range(os.cpu_count() or 1))
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return cores


def physical_cores(cpus: Iterable[int], system: Path = Path("/sys/devices/system/cpu")) -> int:
    """Number of cores among these processors: those of one core share its arithmetic and its way to memory, and threads
    that spin on both take from each other.
    """

    def core_of(cpu: int) -> str:
        try:
            return (system / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text()
        except OSError:
            return str(cpu)

    return len({core_of(cpu) for cpu in cpus})


def give_memory_back() -> None:
    """Return memory that this process freed and still holds: garbage, and what the C library keeps for later."""
    gc.collect()
    with suppress(OSError, AttributeError):  # not the GNU library
        ctypes.CDLL(None).malloc_trim(0)

"""Ranks of tensor parallelism: processes that run one program together, each with the weights of its own channels.

Rank 0 is the engine's own process. It makes the memory that all share, which has no name, so that nothing is left of it
when they end; starts the others (`rank_process`) before anything is loaded; and hears of their end, which is its own.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from maitred.config import CacheConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ConfigError, KernelError, OutOfMemory
from maitred.executor.native_program import Place
from maitred.kernels import _native
from maitred.kv.pages import KVGroups

# -P: the current folder, which may be a model's with Python code in it, is no place for modules
RANK = (sys.executable, "-P", "-m", "maitred.executor.rank_process")
PROCESS_BYTES = 64 * 2**20
"""Bytes of a rank's process besides its weights: Python, numpy and the library."""
SPARE_BYTES = 2**38
"""Bytes of addresses for buffers out of the plan, as parts of long attentions. Untouched ones take no memory."""
NODES = Path("/sys/devices/system/node")
STOP_S = 3.0  # a rank that was told to end, and has not by then, is killed

OnLost = Callable[[str, int], None]
"""A rank ended by itself: why in words, and its exit code, minus the signal that killed it."""


class RankConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration from which a rank makes its plan, as rank 0 did; with `identity`, the files that it must find."""

    path: str
    identity: str
    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    num_drafts: int
    taps: tuple[int, ...] = ()
    needs_all: bool = False


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """Message to a rank: its place, and what it loads."""

    config: RankConfig
    rank: int = 0
    num_ranks: int
    num_threads: int  # of each
    memory_fd: int = -1
    memory_bytes: int
    num_blocks: int  # or pages, where there are groups
    num_state_slots: int = 0
    groups: KVGroups | None = None
    max_model_len: int
    cpus: tuple[tuple[int, ...], ...] = ()  # of each rank's threads; none: any

    @property
    def own_cpus(self) -> tuple[int, ...]:
        return self.cpus[self.rank] if self.cpus else ()


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """Message from a rank that has loaded: bytes of shared memory that its program takes; or why it could not load."""

    num_taken: int = 0
    error: str = ""


class Ranks:
    """The other ranks' processes. A thread for each begins it, and waits for its end: the system ends a process with
    the thread that began it."""

    def __init__(self, begin: Begin, on_lost: OnLost | None = None) -> None:
        """`begin` as for rank 0, without memory yet; `on_lost` is called by some thread. Raises ConfigError or
        OutOfMemory where there is no such memory.
        """
        self._memory = make_shared_memory(begin.memory_bytes)
        begin = replace(begin, memory_fd=self._memory.fileno())
        self._team = join_team(begin)
        self.place = Place(0, begin.num_ranks, self._team)
        self.cpus = begin.own_cpus
        self._on_lost = on_lost
        self._answers: queue.SimpleQueue[tuple[int, Loaded]] = queue.SimpleQueue()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._loaded = self._closing = False
        self._keepers = [
            threading.Thread(target=self._keep, args=(replace(begin, rank=rank),), name=f"maitred-rank-{rank}")
            for rank in range(1, begin.num_ranks)
        ]
        for keeper in self._keepers:
            keeper.daemon = True
            keeper.start()
        bind_process(self.cpus)  # from here on: the others begin wherever there is room

    def wait(self, num_taken: int) -> None:
        """Wait until all have loaded, and have the program in memory that rank 0 has. Raises KernelError."""
        for _ in self._keepers:
            rank, loaded = self._answers.get()
            if loaded.error:
                raise KernelError(f"rank {rank} {loaded.error}")
            if loaded.num_taken != num_taken:
                raise KernelError(
                    f"rank {rank} takes {loaded.num_taken} bytes of shared memory and rank 0 {num_taken}: they have "
                    "another program each; are they of one installation?"
                )
        self._loaded = True
        self._memory.close()  # all have it mapped

    def close(self) -> None:
        """End all ranks before returning; idempotent."""
        self._closing = True
        self._team.stop()
        for keeper in self._keepers:
            keeper.join(STOP_S if self._loaded else 0)
        for process in list(self._processes.values()):
            process.kill()
        for keeper in self._keepers:
            keeper.join()
        self._memory.close()

    def _keep(self, begin: Begin) -> None:
        """Keep one rank for its life."""
        try:
            process = self._processes[begin.rank] = _start(begin.memory_fd)
        except OSError as error:
            self._answers.put((begin.rank, Loaded(error=f"could not be started: {error}")))
            return
        loaded = self._follow(process, begin)
        why = cause_of_end(process.wait())
        if loaded is None:
            self._answers.put((begin.rank, Loaded(error=f"{why} before it had loaded")))
        elif not loaded.error and not self._closing:
            self._lost(f"rank {begin.rank} {why}", process.returncode)

    def _follow(self, process: subprocess.Popen[bytes], begin: Begin) -> Loaded | None:
        """Follow a rank to its end; return its message after loading, None if there was none."""
        assert process.stdin is not None
        assert process.stdout is not None
        with process.stdin as commands, process.stdout as answers:
            with suppress(OSError):
                commands.write(msgspec.json.encode(begin) + b"\n")
            line = answers.readline()
            if not line:
                return None
            loaded = msgspec.json.decode(line, type=Loaded)
            self._answers.put((begin.rank, loaded))
            answers.read()
            return loaded

    def _lost(self, why: str, returncode: int) -> None:
        self._team.lose(why)
        if self._on_lost is not None:
            self._on_lost(why, returncode)


def _start(memory_fd: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        RANK,
        stdin=subprocess.PIPE,  # its end tells the rank that we are gone
        stdout=subprocess.PIPE,  # and its end tells us that the rank is
        bufsize=0,
        pass_fds=[memory_fd],
        start_new_session=True,  # Ctrl-C is for us
    )


def cause_of_end(returncode: int) -> str:
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-returncode).name}"
    return f"was killed by signal {-returncode}"


def make_shared_memory(num_bytes: int) -> FileIO:
    """A file of so many zeros, of which those become memory that are touched. It has no name and takes nothing of
    /dev/shm. Raises ConfigError where the system has no such memory, OutOfMemory where not so much."""
    try:
        descriptor = os.memfd_create("maitred-ranks")
    except (AttributeError, OSError) as error:
        raise ConfigError(
            f"tensor_parallel needs memory that processes share, and this system refuses it (memfd_create: {error}); "
            "leave --tensor-parallel out"
        ) from None
    try:
        memory = FileIO(descriptor, "r+")
        memory.truncate(num_bytes)
    except OSError as error:
        memory.close()
        raise OutOfMemory(
            f"{num_bytes} bytes of addresses for memory that ranks share could not be had ({error}); raise the limit "
            "of file sizes (ulimit -f), or leave --tensor-parallel out"
        ) from None
    return memory


def join_team(begin: Begin) -> Any:
    """`_native.Team`. Raises OutOfMemory."""
    try:
        return _native.Team(
            begin.memory_fd, begin.memory_bytes, begin.rank, begin.num_ranks, threads_of_each=begin.num_threads
        )
    except (MemoryError, RuntimeError) as error:
        raise OutOfMemory(f"{begin.memory_bytes} bytes of shared memory could not be mapped: {error}") from None


# ---- processors


def processors_of_ranks(num_ranks: int, num_threads: int, system: Path = NODES) -> tuple[tuple[int, ...], ...]:
    """Return processors for each rank: one a thread where there are as many as threads in all; else those of its NUMA
    node, if there are several; else none, for any will do.
    """
    if not hasattr(os, "sched_getaffinity"):
        return ()
    return dealt_processors(processors_by_node(os.sched_getaffinity(0), system), num_ranks, num_threads)


def processors_by_node(allowed: Collection[int], system: Path) -> list[list[int]]:
    """Return the processors of `allowed` by the node with near memory; one list where the system tells of no nodes."""
    nodes = [
        [cpu for cpu in _listed(path.read_text()) if cpu in allowed]
        for path in sorted(system.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    ]
    return [node for node in nodes if node] or [sorted(allowed)]


def dealt_processors(nodes: Sequence[Sequence[int]], num_ranks: int, num_threads: int) -> tuple[tuple[int, ...], ...]:
    all_of_them = [cpu for node in nodes for cpu in node]
    if len(all_of_them) == num_ranks * num_threads:
        return tuple(tuple(all_of_them[r * num_threads : (r + 1) * num_threads]) for r in range(num_ranks))
    if len(nodes) > 1:
        return tuple(tuple(nodes[r * len(nodes) // num_ranks]) for r in range(num_ranks))
    return ()


def bind_process(cpus: Collection[int]) -> None:
    """Bind this thread, and those that it starts from now on, so that memory they touch first lies near."""
    if cpus:
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def bind_rank(threads: Any, cpus: Sequence[int]) -> None:
    """Bind each thread of the `_native.ThreadPool` to one processor, where there are as many."""
    if len(cpus) == threads.num_threads:
        threads.bind(list(cpus))


def _listed(text: str) -> list[int]:
    """`0-2,5` -> 0, 1, 2, 5."""
    ends = [run.split("-") for run in text.strip().split(",") if run]
    return [cpu for run in ends for cpu in range(int(run[0]), int(run[-1]) + 1)]

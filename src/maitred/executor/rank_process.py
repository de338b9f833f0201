"""The process of a rank, `python -m maitred.executor.rank_process`: told on stdin what it is, it loads and serves."""

from __future__ import annotations

import gc
import os
import signal
import sys

import msgspec

from maitred.core.errors import CheckpointError, MaitredError
from maitred.executor.native_plan import plan_native_executor
from maitred.executor.native_program import NativeProgram, Place
from maitred.executor.parent import end_with_parent
from maitred.executor.ranks import Begin, Loaded, bind_process, bind_rank, join_team
from maitred.kernels import _native
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # a signal to the group stops rank 0, which stops this rank
        signal.signal(number, signal.SIG_IGN)
    begin = msgspec.json.decode(_line(0), type=Begin)
    end_with_parent(0)
    bind_process(begin.own_cpus)
    try:
        team = join_team(begin)
        os.close(begin.memory_fd)
        runner = _load(begin, Place(begin.rank, begin.num_ranks, team))
    except MaitredError as error:
        _say(Loaded(error=f"could not load: {error}"))
        return 1
    except MemoryError:
        _say(Loaded(error="ran out of memory while it loaded"))
        return 1
    gc.freeze()
    _say(Loaded(num_taken=team.num_taken))
    runner.serve()
    return 0


def _load(begin: Begin, place: Place) -> NativeProgram:
    config = begin.config
    with open_checkpoint(config.path) as checkpoint:
        if checkpoint.identity != config.identity:
            raise CheckpointError(f"the files of {config.path} changed while they were loaded; start again")
        spec = spec_from_config(checkpoint.config)
        plan = plan_native_executor(
            config.model,
            checkpoint,
            spec,
            cache=config.cache,
            scheduler=config.scheduler,
            num_threads=begin.num_threads,
            num_drafts=config.num_drafts,
            taps=config.taps,
            needs_all=config.needs_all,
        )
        if begin.groups is not None:
            plan = plan.in_groups(begin.groups)
        threads = _native.ThreadPool(begin.num_threads)
        pool = plan.make_pool(begin.num_blocks, place)
        runner, _ = plan.load(
            threads, pool, max_model_len=begin.max_model_len, num_state_slots=begin.num_state_slots, place=place
        )
    bind_rank(threads, begin.own_cpus)
    return runner


def _line(fd: int) -> bytes:
    """Read up to the line's end and no further, so that the end of the stream can be waited for."""
    read = b""
    while not read.endswith(b"\n") and (more := os.read(fd, 65536)):
        read += more
    return read


def _say(loaded: Loaded) -> None:
    os.write(1, msgspec.json.encode(loaded) + b"\n")


if __name__ == "__main__":
    sys.exit(main())

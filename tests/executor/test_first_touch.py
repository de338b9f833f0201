"""First touch of the KV pool: its memory is there before a step needs it, and no more of it than that."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import pytest

from maitred.core.step import NewRequest, ScheduledRow, SchedulerOutput
from maitred.executor.native import NativeExecutor
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import make_decoder, make_spec
from tests.fakes import make_request

NUM_LAYERS, BLOCK_SIZE = 3, 16
GROUP = 512  # blocks of 4 KB a layer in a huge page
NUM_GROUPS = 8
PROMPT = [*range(9)]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks the system which pages are there")


def there(executor: NativeExecutor, group: int) -> list[bool]:
    """By layer: whether the system has given the memory of the group's last block."""
    libc, found = ctypes.CDLL(None, use_errno=True), []
    for layer in range(NUM_LAYERS):
        address = executor.pool.block_view(layer, (group + 1) * GROUP - 1).ctypes.data
        pages = ctypes.create_string_buffer(1)
        assert libc.mincore(ctypes.c_void_p(address // mmap.PAGESIZE * mmap.PAGESIZE), 1, pages) == 0
        found.append(bool(pages.raw[0] & 1))
    return found


def wide_executor(num_blocks: int = NUM_GROUPS * GROUP, **changes: Any) -> NativeExecutor:
    decoder = make_decoder(make_spec(windows=(None,) * NUM_LAYERS))
    return make_native(decoder, num_blocks=num_blocks, block_size=BLOCK_SIZE, **changes)


def step_of(executor: NativeExecutor, start: int, num_tokens: int, *blocks: int) -> None:
    """Of one request; its first step begins at position 0."""
    spec = make_request("r", prompt=PROMPT, max_tokens=20).spec
    new = (NewRequest(request_id="r", spec=spec),) if start == 0 else ()
    row = ScheduledRow("r", start, num_tokens, True, blocks)
    executor.execute(SchedulerOutput(step=start, rows=(row,), new_requests=new))


def test_the_next_blocks_memory_comes_a_layer_a_step_before_they_are_used():
    executor = wide_executor(num_threads=1)
    assert executor.pool.bytes_per_block == NUM_LAYERS * (2 * 2**20 // GROUP)
    step_of(executor, 0, len(PROMPT), 0)
    seen = [sum(there(executor, 1))]
    for position in range(len(PROMPT), len(PROMPT) + 4):
        step_of(executor, position, 1)
        seen.append(sum(there(executor, 1)))
    assert seen == [1, 2, 3, 3, 3]
    assert all(there(executor, 0))
    assert not any(there(executor, 2) + there(executor, 3)), "nobody is near it"


def test_a_small_pool_is_given_in_small_pages():
    executor = wide_executor(num_blocks=GROUP, num_threads=1)
    step_of(executor, 0, len(PROMPT), 0)
    assert not any(there(executor, 0)), "the last block of what would be a huge page"


def test_blocks_far_ahead_have_their_memory_in_all_layers_at_once():
    executor = wide_executor(num_threads=2)
    step_of(executor, 0, len(PROMPT), 2 * GROUP)
    assert all(there(executor, 2))
    assert sum(there(executor, 3)) == 2, "one by each thread"
    assert not any(there(executor, 0) + there(executor, 1)), "no step had them"
    step_of(executor, len(PROMPT), 1, NUM_GROUPS * GROUP - 1)
    assert all(there(executor, 3))

"""KV blocks that go to the host and back: what comes back is what went, and the tokens are those of a large cache."""

from __future__ import annotations

import pytest
import torch

from maitred.core.cost_model import SwapCosts
from maitred.core.errors import OutOfMemory
from maitred.core.request import SamplingParams
from maitred.core.step import BlockCopy
from maitred.executor.torch_kv import PoolShape, TorchHostPool, TorchKVPool
from tests.executor.torch_worlds import make_decoder, make_executor, make_spec
from tests.fakes import make_request, make_scheduler

ALWAYS = SwapCosts(bytes_per_block=1, out_bytes_per_s=1e12, in_bytes_per_s=1e12, prefill_s_per_token=1.0)


def make_pool(device: torch.device, num_blocks: int = 9) -> TorchKVPool:
    return TorchKVPool(PoolShape(3, 2, num_blocks, 4, 2, 8), device=device, dtype=torch.float32)


def test_what_comes_back_is_what_went(device: torch.device):
    pool = make_pool(device)
    contents = torch.randn((9, 3, 2, 4, 2, 8), device=device)
    pool.scatter(range(9), contents)
    host = TorchHostPool(pool, 5)
    host.copy_out([BlockCopy(7, 4), BlockCopy(2, 0), BlockCopy(3, 1)])
    pool.scatter(range(9), torch.zeros_like(contents))
    host.copy_in([BlockCopy(0, 8), BlockCopy(4, 1)])
    expected = torch.zeros_like(contents)
    expected[8], expected[1] = contents[2], contents[7]
    assert torch.equal(pool.gather(range(9)), expected)


def test_blocks_copied_out_may_be_written_at_once(device: torch.device):
    """On a GPU nobody waits for the copy; the stream keeps the order."""
    pool = make_pool(device)
    host = TorchHostPool(pool, 9)
    ones = torch.ones((9, 3, 2, 4, 2, 8), device=device)
    for value in range(20):
        pool.scatter(range(9), ones * value)
        host.copy_out([BlockCopy(i, 8 - i) for i in range(9)])
        pool.scatter(range(9), -ones)
        host.copy_in([BlockCopy(8 - i, i) for i in range(9)])
        assert torch.equal(pool.gather(range(9)), ones * value)


def test_bandwidths_are_measured(device: torch.device):
    out_bytes_per_s, in_bytes_per_s = TorchHostPool(make_pool(device), 4).measure()
    assert out_bytes_per_s > 0
    assert in_bytes_per_s > 0


def test_memory_that_is_not_there_is_an_error_with_a_remedy():
    with pytest.raises(OutOfMemory, match="lower --swap-memory-bytes"):
        TorchHostPool(make_pool(torch.device("cpu")), 10**13)


@pytest.mark.parametrize(("caching", "temperature"), [(True, 0.9), (False, 0.0)])
def test_tokens_are_those_of_a_cache_without_bounds(device: torch.device, caching: bool, temperature: float):
    decoder = make_decoder(make_spec(), device=device)
    outputs = []
    for num_blocks, num_host_blocks, costs in ((200, 0, None), (14, 0, None), (14, 30, ALWAYS), (14, 4, ALWAYS)):
        scheduler = make_scheduler(
            num_blocks=num_blocks, num_host_blocks=num_host_blocks, enable_prefix_caching=caching, max_num_seqs=4
        )
        scheduler.set_swap_costs(costs)
        executor = make_executor(decoder, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        sampling = SamplingParams(temperature=temperature, max_tokens=30)
        requests = [
            make_request(
                f"r{i}",
                prompt=[(7 * i + j) % 97 for j in range(9 + i)],
                max_tokens=30,
                arrived_at=float(i),
                sampling=sampling,
                seed=i,
            )
            for i in range(6)
        ]
        for request in requests:
            scheduler.add(request, 0.0)
        while scheduler.has_work:
            plan = scheduler.schedule(1.0)
            scheduler.update(plan, executor.execute(plan), 1.0)
        assert (scheduler.stats.num_preemptions > 0) == (num_blocks < 200)
        assert (scheduler.stats.num_swapped_in_blocks > 0) == (num_host_blocks > 0)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1] == outputs[2] == outputs[3]

"""The torch executor under the real scheduler: what sharing, chunking and preemption must not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from maitred.core.request import RequestState, SamplingParams
from maitred.executor.torch import TorchExecutor
from tests.executor.torch_worlds import make_decoder, make_executor, make_spec, random_prompt
from tests.fakes import make_request, make_samples, make_scheduler

BLOCK_SIZE = 4
SEEDED = SamplingParams(temperature=1.0, max_tokens=20)


def tiny_executor(num_blocks: int) -> TorchExecutor:
    return make_executor(make_decoder(make_spec(windows=(None, 9))), num_blocks=num_blocks, block_size=BLOCK_SIZE)


def outputs_of(requests: Sequence[RequestState], *, num_blocks: int = 64, budget: int = 64) -> dict[str, list[int]]:
    """Serve them all and give each one's tokens."""
    executor = tiny_executor(num_blocks)
    scheduler = make_scheduler(num_blocks=num_blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=budget)
    for request in requests:
        scheduler.add(request, 0.0)
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        scheduler.update(plan, executor.execute(plan), 0.0)
        scheduler.check_invariants()
    return {request.request_id: request.output_token_ids for request in requests}


def three_samples(prompt_length: int) -> list[RequestState]:
    prompt = random_prompt(prompt_length, seed=1)
    return make_samples("p", 3, prompt=prompt, max_tokens=20, sampling=SEEDED, seed=5, block_size=BLOCK_SIZE)


@pytest.mark.parametrize("prompt_length", [1, 8, 10])  # the last block of the prompt is shared full, or half full
def test_samples_that_share_a_prompt_equal_those_computed_alone(prompt_length: int):
    together = outputs_of(three_samples(prompt_length))
    alone = {}
    for sample in three_samples(prompt_length):
        prompt = sample.spec.prompt_token_ids
        one = make_request(
            sample.request_id,
            prompt=prompt,
            max_tokens=20,
            sampling=SEEDED,
            seed=5,
            sample_index=sample.spec.sample_index,
            block_size=BLOCK_SIZE,
        )
        alone |= outputs_of([one])
    assert together == alone
    assert len({tuple(tokens) for tokens in together.values()}) == 3


def many_requests() -> list[RequestState]:
    return [
        make_request(
            f"r{i}",
            prompt=random_prompt(3 + 7 * i, seed=i),
            max_tokens=20,
            sampling=SEEDED,
            seed=i,
            block_size=BLOCK_SIZE,
        )
        for i in range(6)
    ]


def test_a_small_pool_and_a_small_budget_change_no_token():
    roomy = outputs_of(many_requests(), num_blocks=200, budget=400)
    tight_requests = many_requests()
    tight = outputs_of(tight_requests, num_blocks=20, budget=9)
    assert tight == roomy
    assert any(request.num_preemptions for request in tight_requests)

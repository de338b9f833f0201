"""What is the torch executor's own: its pool, NaN, threads. Duties all executors share are in `test_duties`."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from maitred.core.errors import OutOfMemory
from maitred.core.request import SamplingParams
from maitred.executor.torch_kv import PoolShape, TorchKVPool
from tests.executor.torch_worlds import (
    GREEDY,
    Hand,
    Seen,
    dense_greedy,
    make_decoder,
    make_executor,
    make_spec,
    random_prompt,
)


def make_hand(decoder: Any = None, **changes: Any) -> Hand:
    return Hand(make_executor(decoder or make_decoder(make_spec()), **changes))


def test_copies_are_done_in_order():
    hand = make_hand()
    hand.add("r", random_prompt(8, seed=1))
    hand.step()
    k, _ = hand.executor.pool.blocks(0)
    first, second = hand.tables["r"]
    before_first = k[first].clone()
    hand._copies += [type_copy(first, second), type_copy(second, 7)]
    hand.step()
    assert torch.equal(k[7], before_first)


def type_copy(source: int, target: int) -> Any:
    from maitred.core.step import BlockCopy

    return BlockCopy(source, target)


def test_a_step_writes_only_slots_of_its_own_rows():
    hand = make_hand(block_size=4)
    canary = 123.0
    for layer in range(2):
        for tensor in hand.executor.pool.slots(layer):
            tensor.fill_(canary)
    hand.add("a", random_prompt(6, seed=1))
    hand.add("b", random_prompt(41, seed=2))
    hand.step()
    hand.step()
    own = {block for table in hand.tables.values() for block in table}
    written = {hand.tables[r][p // 4] * 4 + p % 4 for r, count in hand.computed.items() for p in range(count)}
    for layer in range(2):
        for tensor in hand.executor.pool.slots(layer):
            untouched = (tensor == canary).flatten(1).all(1)
            zero = (tensor == 0).flatten(1).all(1)
            for slot in range(len(tensor)):
                assert bool(untouched[slot]) == (slot // 4 not in own)
                assert bool(zero[slot]) == (slot // 4 in own and slot not in written)


class NaNFor:
    """A decoder whose hidden states, from the embedding on, are NaN wherever one token stands."""

    def __init__(self, decoder: Any, token_id: int) -> None:
        self._decoder = decoder
        self._token_id = token_id
        self.spec = decoder.spec
        self.embedding = decoder.embedding

    def forward(self, token_ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Any, **more: Any) -> torch.Tensor:
        poisoned_T = token_ids_T == self._token_id

        def poison(layer: int, *qkv: torch.Tensor) -> torch.Tensor:
            return attend(layer, *(x.masked_fill(poisoned_T[:, None, None], math.nan) for x in qkv))

        hidden_TD = self._decoder.forward(token_ids_T, positions_T, poison, **more)
        return hidden_TD.masked_fill(poisoned_T[:, None], math.nan)

    def logits(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden_TD)


POISON = 96


def test_a_row_with_nan_ends_that_request_only():
    """Eight alike rows, one of which has NaN in its keys, values and output: the other seven stay the same."""
    decoder = make_decoder(make_spec(windows=(None, 6)))
    prompts = [[t % POISON for t in random_prompt(9 + i, seed=i)] for i in range(8)]
    outcomes = []
    for prompt_of_three in (prompts[3], [*prompts[3][:-1], POISON]):
        seen = Seen()
        hand = make_hand(NaNFor(decoder, POISON), dtype=torch.float32, kv_dtype=torch.float32, on_logits=seen)
        for i, prompt in enumerate(prompts):
            hand.add(f"r{i}", prompt_of_three if i == 3 else prompt)
        rows = hand.step()
        hand.forget("r3")
        hand.run(10)
        outcomes.append((rows, hand, seen))
    (_, healthy, healthy_seen), (rows, poisoned, poisoned_seen) = outcomes
    assert rows["r3"].error == "logits are NaN"
    assert rows["r3"].token_ids == ()
    for request_id in (f"r{i}" for i in range(8) if i != 3):
        assert rows[request_id].error is None
        assert poisoned.outputs[request_id] == healthy.outputs[request_id]
        assert torch.equal(poisoned_seen.of(request_id), healthy_seen.of(request_id))


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_nan_left_in_a_block_does_not_reach_its_next_owner(softcap: float | None):
    decoder = make_decoder(make_spec(attention_softcap=softcap))
    hand = make_hand(NaNFor(decoder, POISON), dtype=torch.float32, kv_dtype=torch.float32)
    hand.add("ill", [POISON] * 12)
    assert hand.step()["ill"].error == "logits are NaN"
    blocks = hand.tables["ill"]
    hand.forget("ill")
    prompts = {"next": [1, 2, 3, 4, 5], "longer": random_prompt(30, seed=1)}
    for request_id, prompt in prompts.items():
        hand.add(request_id, [t % POISON for t in prompt])
    hand.run(4)
    assert set(blocks) <= {block for table in hand.tables.values() for block in table}
    for request_id, prompt in prompts.items():
        assert hand.outputs[request_id] == dense_greedy(decoder, [t % POISON for t in prompt], 4)


def test_nan_in_prompt_logprobs_is_that_requests_error():
    decoder = make_decoder(make_spec())
    hand = make_hand(NaNFor(decoder, POISON), dtype=torch.float32, kv_dtype=torch.float32)
    hand.add("r", [1, 2, POISON, 4, 5, 6], SamplingParams(temperature=0.0, prompt_logprobs=0))
    row = hand.step({"r": 4})["r"]
    assert (row.error, row.token_ids, row.prompt_logprobs) == ("logits are NaN", (), None)


def test_the_number_of_threads_is_the_callers_again_after_a_step():
    hand = make_hand(num_threads=2)
    hand.add("r", [1, 2, 3], GREEDY)
    hand.step()
    assert torch.get_num_threads() == 1


def test_a_pool_that_does_not_fit_says_how_large_it_is():
    shape = PoolShape(1000, 2, 10**9, 16, 64, 128)
    with pytest.raises(OutOfMemory, match=r"1000000000 blocks needs 1048576000000000000 bytes"):
        TorchKVPool(shape, device=torch.device("cpu"), dtype=torch.float32)


def test_a_closed_executor_holds_no_tensors():
    hand = make_hand()
    hand.executor.close()
    assert not hasattr(hand.executor, "pool")

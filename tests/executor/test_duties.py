"""What every executor does with plans: state, blocks, sampling, reports; PyTorch's and the native one alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from maitred.core.errors import KernelError
from maitred.core.request import SamplingParams
from maitred.core.step import ModelOutput, SchedulerOutput
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import (
    Hand,
    Seen,
    assert_close,
    dense_greedy,
    dense_logits,
    make_decoder,
    make_executor,
    make_spec,
    random_prompt,
)
from tests.fakes import make_request, make_scheduler

MakeHand = Callable[..., Hand]


@pytest.fixture(params=["torch", "native"])
def make_hand(request: pytest.FixtureRequest) -> MakeHand:
    """make_hand(decoder=None, **what the executor takes)"""
    make = make_executor if request.param == "torch" else make_native

    def make_one(decoder: Any = None, **changes: Any) -> Hand:
        return Hand(make(decoder or make_decoder(make_spec()), **changes))

    return make_one


def test_a_ragged_batch_generates_what_each_request_would_alone(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompts = {f"r{n}": random_prompt(n, seed=n) for n in (1, 2, 3, 9, 33, 50)}
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt)
    hand.run(12)
    for request_id, prompt in prompts.items():
        assert hand.outputs[request_id] == dense_greedy(decoder, prompt, 12)


def test_an_empty_plan_gives_an_empty_output(make_hand: MakeHand):
    hand = make_hand()
    assert hand.executor.execute(SchedulerOutput(step=0, rows=())) == ModelOutput(())


def test_drafts_are_refused_where_no_proposer_makes_them_up(make_hand: MakeHand):
    scheduler = make_scheduler(num_drafts=lambda request, num_rows: 2)
    scheduler.add(make_request("a", prompt=random_prompt(5, seed=1), max_tokens=4), 0.0)
    with pytest.raises(KernelError, match="request a: 2 of 7 planned tokens are drafts"):
        make_hand().executor.execute(scheduler.schedule(0.0))


def test_an_unknown_request_may_be_forgotten(make_hand: MakeHand):
    hand = make_hand()
    plan = SchedulerOutput(step=0, rows=(), forgotten_request_ids=("aborted while it queued",))
    assert hand.executor.execute(plan) == ModelOutput(())


def test_only_the_last_chunk_of_a_prompt_is_reported(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompt = random_prompt(20, seed=1)
    hand.add("r", prompt)
    assert hand.step({"r": 13}) == {}
    assert hand.step({"r": 6}) == {}
    row = hand.step({"r": 1})["r"]
    assert (row.token_ids, row.logprobs, row.prompt_logprobs, row.error) == (
        tuple(dense_greedy(decoder, prompt, 1)),
        None,
        None,
        None,
    )


def test_rows_are_reported_in_the_plans_order(make_hand: MakeHand):
    hand = make_hand()
    lengths = {"c": 40, "a": 1, "d": 7, "b": 40}
    for request_id, length in lengths.items():
        hand.add(request_id, random_prompt(length, seed=length))
    assert list(hand.step()) == ["c", "a", "d", "b"]
    assert list(hand.step({"b": 1, "d": 1, "a": 1, "c": 1})) == ["b", "d", "a", "c"]


def test_a_preempted_request_goes_on_with_the_tokens_it_had(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompts = {"stays": random_prompt(10, seed=1), "goes": random_prompt(13, seed=2)}
    for request_id, prompt in prompts.items():
        hand.add(request_id, prompt)
    hand.run(5)
    hand.preempt("goes")
    hand.step({"stays": 1, "goes": 7})  # its prompt and output again, in other blocks and in chunks
    hand.run(6)
    for request_id, prompt in prompts.items():
        tokens = hand.outputs[request_id]
        assert tokens == dense_greedy(decoder, prompt, len(tokens))
        assert len(tokens) >= 11


def test_a_prefix_hit_reads_blocks_that_another_request_wrote(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    seen = Seen()
    hand = make_hand(decoder, on_logits=seen)
    shared = random_prompt(12, seed=1)
    first, second = shared + random_prompt(5, seed=2), shared + random_prompt(9, seed=3)
    hand.add("first", first)
    hand.step()
    hand.add("second", second, shared_blocks=hand.tables["first"][:3])
    hand.run(4)
    assert hand.outputs["second"] == dense_greedy(decoder, second, 4)
    assert min(seen.logits["second"]) == 12
    assert_close(seen.of("second"), dense_logits(decoder, second + hand.outputs["second"][:-1])[12:])


def test_copy_on_write_leaves_both_requests_their_own_text(make_hand: MakeHand):
    """Samples 0 and 1 of a prompt share its blocks; the second gets a copy of the last, which is half full."""
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompt = random_prompt(10, seed=1)
    hand.add("zero", prompt)
    hand.step()  # zero wrote 10 of 12 slots, and position 10 comes next
    hand.step()  # and now wrote its own token to slot 10 of the shared block
    forced = [5, 6]
    hand.add("one", prompt, output=forced, shared_blocks=hand.tables["zero"][:3], computed=10)
    hand.replace_block("one", 2)
    hand.run(6)
    assert hand.outputs["zero"] == dense_greedy(decoder, prompt, 8)
    assert hand.outputs["one"][2:] == dense_greedy(decoder, prompt + forced, 6)


def test_a_block_the_executor_knows_can_be_replaced(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompt = random_prompt(10, seed=1)
    hand.add("r", prompt)
    hand.run(2)
    old = hand.tables["r"][2]
    hand.replace_block("r", 2)
    hand.executor.execute(SchedulerOutput(step=99, rows=()))
    hand.add("intruder", random_prompt(4, seed=5))
    hand.free.insert(0, old)  # whoever gets the old block may write it
    hand.run(5)
    assert hand.tables["intruder"][0] == old
    assert hand.outputs["r"] == dense_greedy(decoder, prompt, 7)


def test_prompt_logprobs_come_chunk_by_chunk_and_equal_log_softmax(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    hand = make_hand(decoder)
    prompt = random_prompt(150, seed=1)  # more than one chunk of logits
    hand.add("r", prompt, SamplingParams(temperature=0.0, prompt_logprobs=3, logprobs=2))
    hand.add("other", random_prompt(9, seed=2))
    chunks = [hand.step({"r": 4, "other": 9}), hand.step({"r": 1}), hand.step({"r": 145, "other": 1})]
    assert [len(chunk["r"].prompt_logprobs or ()) for chunk in chunks] == [4, 1, 144]
    assert chunks[0]["r"].token_ids == ()
    assert chunks[0]["other"].prompt_logprobs is None
    reported = [entry for chunk in chunks for entry in chunk["r"].prompt_logprobs or ()]
    wanted_TV = torch.log_softmax(dense_logits(decoder, prompt), dim=-1)
    for position, entry in enumerate(reported, start=1):
        wanted_V = wanted_TV[position - 1]
        assert entry.token_ids[0] == prompt[position]
        assert entry.token_ids[1:] == tuple(wanted_V.topk(3).indices.tolist())
        assert_close(torch.tensor(entry.logprobs), wanted_V[list(entry.token_ids)])
        assert entry.ranks == (1 + int((wanted_V > wanted_V[prompt[position]]).sum()), 1, 2, 3)
    sampled = chunks[-1]["r"].logprobs
    assert sampled is not None
    assert_close(torch.tensor(sampled[0].logprobs[0]), wanted_TV[-1].max())


def test_seeded_sampling_does_not_depend_on_the_batch(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    sampling = SamplingParams(temperature=1.0, top_p=0.9, seed=7)
    prompt = random_prompt(11, seed=1)
    alone, crowd = make_hand(decoder), make_hand(decoder)
    alone.add("r", prompt, sampling)
    alone.run(8)
    for n in (3, 20, 41):
        crowd.add(f"other{n}", random_prompt(n, seed=n))
    crowd.add("r", prompt, sampling)
    crowd.run(8)
    assert crowd.outputs["r"] == alone.outputs["r"]


def test_penalties_survive_a_preemption(make_hand: MakeHand):
    decoder = make_decoder(make_spec())
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.8, presence_penalty=1.0)
    prompt = random_prompt(9, seed=1)
    whole, cut = make_hand(decoder), make_hand(decoder)
    whole.add("r", prompt, sampling)
    whole.run(10)
    cut.add("r", prompt, sampling)
    cut.run(4)
    output = cut.outputs["r"]
    cut.forget("r")
    cut.add("r", prompt, sampling, output=output)
    cut.run(6)
    assert cut.outputs["r"] == whole.outputs["r"]

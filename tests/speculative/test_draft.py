"""The draft model proposes what it would say alone, whatever was rejected, forgotten or written over before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from maitred.core.request import SamplingParams
from maitred.executor.drafter import ChainEnd, Drafter, DraftPiece, DraftRunner, DraftTokens, KnownTokens
from maitred.executor.state import DraftAsk, HeldRequest
from maitred.kernels import _native
from maitred.kernels.sampler import Sampler
from tests.executor.native_worlds import DecoderCheckpoint, make_native, nan_embedding, native_plan
from tests.executor.torch_worlds import GREEDY, VOCAB, Hand, make_decoder, make_spec, random_prompt
from tests.fakes import make_new

BLOCK = 4
POISON = VOCAB - 1
SETTINGS = (
    GREEDY,
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.3, top_k=9),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.05, top_k=30),
)


class Watched:
    """A runner that tells which positions it was made to compute, but for those of the chain itself."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self.computed: list[tuple[int, int]] = []
        self.passes: list[int] = []  # tokens of each
        self.max_tokens, self.max_rows = runner.max_tokens, runner.max_rows
        self.max_positions, self.num_blocks = runner.max_positions, runner.num_blocks

    def compute(self, pieces: Sequence[DraftPiece]) -> None:
        self._note(pieces)
        self._runner.compute(pieces)

    def chain(self, pieces: Sequence[DraftPiece], ends: Sequence[ChainEnd]) -> list[DraftTokens]:
        self._note(pieces)
        return self._runner.chain(pieces, ends)

    def close(self) -> None:
        self._runner.close()

    def _note(self, pieces: Sequence[DraftPiece]) -> None:
        self.computed += [(piece.start, piece.start + len(piece.token_ids)) for piece in pieces]
        self.passes.append(sum(len(piece.token_ids) for piece in pieces))

    def take(self) -> list[tuple[int, int]]:
        """What was computed since it was last asked."""
        taken, self.computed, self.passes = self.computed, [], []
        return taken


class World:
    """Requests with block tables, and a draft model with a pool for them."""

    def __init__(self, decoder: Any = None, *, context: int = 512, num_blocks: int = 64, **plan: Any) -> None:
        self.decoder = decoder or make_decoder(make_spec())
        checkpoint: Any = DecoderCheckpoint(self.decoder)
        made = native_plan(checkpoint, checkpoint.spec, block_size=BLOCK, **plan)
        threads = _native.ThreadPool(made.num_threads)
        pool = made.make_pool(num_blocks)
        program, _ = made.load(threads, pool, max_model_len=context)
        sampler = Sampler(threads, isa=made.isa)
        self.runner = Watched(DraftRunner(program, sampler, max_positions=context, num_blocks=num_blocks))
        self.model = Drafter(self.runner, KnownTokens(num_blocks=num_blocks, block_size=BLOCK))
        self.free = list(range(1, num_blocks, 2)) + list(range(0, num_blocks, 2))

    def request(self, name: str, tokens: Sequence[int], sampling: SamplingParams = GREEDY) -> HeldRequest:
        return HeldRequest(make_new(name, tokens, sampling=sampling, seed=7), VOCAB)

    def ask(self, *asks: tuple[HeldRequest, int]) -> list[list[int]]:
        """Drafts, as if a plan had given blocks for them."""
        for request, num_drafts in asks:
            while request.blocks.size * BLOCK < request.tokens.size + num_drafts:
                request.blocks.append(self.free.pop(0))
        return [list(tokens) for tokens in self.model.propose([DraftAsk(*ask) for ask in asks])]

    def settle(self, request: HeldRequest, tokens: Sequence[int]) -> None:
        """The step's outcome: tokens that stand; blocks past the computed ones go back, to be given next."""
        request.tokens.extend(tokens)
        kept = -(-(request.tokens.size - 1) // BLOCK)
        blocks = request.blocks.array.tolist()
        self.free[:0] = blocks[kept:]
        request.blocks = type(request.blocks)(blocks[:kept])

    def alone(self, tokens: Sequence[int], count: int, sampling: SamplingParams = GREEDY) -> list[int]:
        """What the draft model says when it is served, step by step."""
        hand = Hand(make_native(self.decoder, block_size=BLOCK))
        hand.add("alone", tokens, sampling)
        hand.run(count)
        return hand.outputs["alone"]


def tokens_of(request: HeldRequest) -> list[int]:
    known: list[int] = request.tokens.array.tolist()
    return known


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_drafts_are_what_the_model_says_alone_under_the_same_seed(isa: str, dtype: str):
    world = World(isa=isa, dtype=dtype, max_logits=5)
    requests = [world.request(f"r{i}", random_prompt(3 + 5 * i, seed=i), p) for i, p in enumerate(SETTINGS)]
    counts = [5, 1, 3, 5, 2]
    found = world.ask(*zip(requests, counts, strict=True))
    hand = Hand(make_native(world.decoder, isa=isa, dtype=dtype))
    for request, sampling in zip(requests, SETTINGS, strict=True):
        hand.add(request.request_id, tokens_of(request), sampling)
    hand.run(5)
    assert found == [hand.outputs[request.request_id][:n] for request, n in zip(requests, counts, strict=True)]


def test_threads_change_no_draft():
    prompts = [random_prompt(4 + n, seed=n) for n in range(6)]
    found = []
    for num_threads in (1, 2):
        world = World(num_threads=num_threads)
        requests = [world.request(f"r{i}", p, SETTINGS[i % len(SETTINGS)]) for i, p in enumerate(prompts)]
        found.append(world.ask(*((request, 6) for request in requests)))
        world.model.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", [0, 1, -3, 2**63 + 5, 2**70])
def test_any_seed_draws_as_the_served_models_sampler_does(seed: int):
    decoder, prompt, sampling = make_decoder(make_spec()), random_prompt(6, seed=1), SamplingParams(temperature=2.0)
    world = World(decoder)
    spec: dict[str, Any] = {"sampling": sampling, "seed": seed, "sample_index": 3}
    request = HeldRequest(make_new("r", prompt, **spec), VOCAB)
    hand = Hand(make_native(decoder))
    hand.add("r", prompt)
    hand._new = [make_new("r", prompt, **spec)]
    hand.run(6)
    assert world.ask((request, 6)) == [hand.outputs["r"]]


def test_a_draft_that_stood_is_not_computed_again_and_one_that_did_not_is():
    world = World()
    request = world.request("r", random_prompt(9, seed=1))
    (first,) = world.ask((request, 5))
    assert world.runner.take() == [(0, 9)]
    other = (first[2] + 1) % VOCAB
    world.settle(request, [*first[:2], other])
    assert world.ask((request, 4)) == [world.alone(tokens_of(request), 4)]
    assert world.runner.take() == [(11, 12)]
    (third,) = world.ask((request, 4))  # asked again, as after a step that gave no token
    assert world.runner.take() == [(11, 12)]
    world.settle(request, [*third, 5])  # all stand: the last one was never computed
    assert world.ask((request, 3)) == [world.alone(tokens_of(request), 3)]
    assert world.runner.take() == [(15, 17)]


def test_a_request_that_drafted_not_for_a_while_is_caught_up():
    world = World()
    request = world.request("r", random_prompt(9, seed=1))
    world.ask((request, 2))
    world.settle(request, random_prompt(8, seed=2))
    world.runner.take()
    assert world.ask((request, 3)) == [world.alone(tokens_of(request), 3)]
    ((start, end),) = world.runner.take()
    assert (start, end) in {(9, 17), (10, 17)}  # the first draft may have stood by chance


def test_a_long_prompt_is_caught_up_in_passes_that_the_program_takes():
    world = World(max_tokens=16)
    prompts = [random_prompt(n, seed=n) for n in (45, 1, 30, 16)]
    requests = [world.request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert world.ask(*((request, 3) for request in requests)) == [world.alone(prompt, 3) for prompt in prompts]
    assert max(world.runner.passes) <= 16
    assert sum(world.runner.passes) == 92


def test_more_requests_than_rows_of_logits_are_drafted_for_in_turns():
    world = World(max_logits=2)
    prompts = [random_prompt(3 + n, seed=n) for n in range(5)]
    requests = [world.request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]
    assert world.ask(*((request, 3) for request in requests)) == [world.alone(prompt, 3) for prompt in prompts]


def test_what_was_forgotten_is_known_again_from_the_blocks_that_nobody_wrote_over():
    world = World()
    request = world.request("r", random_prompt(9, seed=1))
    world.ask((request, 3))
    world.runner.take()
    world.model.forget("r")
    world.model.forget("never heard of")
    again = world.request("r", tokens_of(request))
    again.blocks = request.blocks
    assert world.ask((again, 3)) == [world.alone(tokens_of(request), 3)]
    assert world.runner.take() == [(8, 9)]


def test_a_preempted_request_begins_at_its_first_token_in_its_new_blocks():
    world = World()
    request = world.request("r", random_prompt(9, seed=1))
    world.ask((request, 3))
    world.model.forget("r")
    world.runner.take()
    again = world.request("r", tokens_of(request))
    assert world.ask((again, 3)) == [world.alone(tokens_of(request), 3)]
    assert world.runner.take() == [(0, 9)]


def test_requests_that_share_blocks_compute_them_once():
    world = World(max_tokens=8)
    prompt = random_prompt(12, seed=1)
    first = world.request("a", prompt)
    second = world.request("b", [*prompt[:8], *random_prompt(5, seed=2)])
    world.ask((first, 1))
    second.blocks.extend(first.blocks.array[:2].tolist())
    world.runner.take()
    assert world.ask((second, 3)) == [world.alone(tokens_of(second), 3)]
    assert world.runner.take() == [(8, 13)]


@pytest.mark.parametrize("length", range(7, 14))
def test_requests_that_share_blocks_and_come_at_once_compute_them_once(length: int):
    world = World(max_tokens=5)
    prompt = random_prompt(length, seed=1)
    first, second = world.request("a", prompt), world.request("b", [*prompt, *random_prompt(7, seed=2)])
    shared = length // BLOCK
    first.blocks.extend([world.free.pop(0) for _ in range(shared)])
    second.blocks.extend(first.blocks.array.tolist())
    expected = [world.alone(tokens_of(request), 3) for request in (first, second)]
    assert world.ask((first, 3), (second, 3)) == expected
    # The first one's last known token comes with its chain, so what is in that block is not there before.
    there = (length - 1) // BLOCK * BLOCK
    assert sum(end - start for start, end in world.runner.computed) == length + length + 7 - there


def test_after_copy_on_write_the_block_that_was_replaced_is_computed_again():
    world = World()
    request = world.request("r", random_prompt(11, seed=1))
    world.ask((request, 3))
    world.settle(request, [3])
    request.blocks.replace(2, world.free.pop(0))
    world.runner.take()
    assert world.ask((request, 3)) == [world.alone(tokens_of(request), 3)]
    assert world.runner.take() == [(8, 12)]


def test_a_block_that_went_back_and_came_again_after_another_had_it_is_computed_again():
    world = World()
    request = world.request("r", random_prompt(7, seed=1))
    (drafts,) = world.ask((request, 6))  # in blocks 1 (position 7), 2 and 3
    world.settle(request, [(drafts[0] + 1) % VOCAB])
    lent = world.free[0]
    other = world.request("other", random_prompt(3, seed=2))
    world.ask((other, 1))
    assert other.blocks.array.tolist() == [lent]
    world.free.insert(0, lent)  # the other one ends
    request.tokens.array[7] = drafts[0]  # as if they were what the request's grammar then forced
    request.tokens.extend(drafts[1:4])
    world.runner.take()
    assert world.ask((request, 2)) == [world.alone(tokens_of(request), 2)]
    assert request.blocks.array.tolist()[2] == lent
    assert world.runner.take() == [(8, 11)]


def test_drafts_end_with_the_draft_models_context():
    world = World(context=20)
    tokens = random_prompt(18, seed=1)
    near, at_end, beyond = (world.request(f"r{n}", tokens + [1] * n) for n in (0, 2, 3))
    found = world.ask((near, 5), (at_end, 5), (beyond, 5))
    assert found == [world.alone(tokens, 3), world.alone([*tokens, 1, 1], 1), []]


def test_a_nan_ends_that_requests_drafts_where_it_comes_up():
    decoder = nan_embedding(make_decoder(make_spec()), POISON)
    world = World(decoder)
    well, ill = world.request("well", [1, 2, 3]), world.request("ill", [1, POISON, 3])
    sampling = SamplingParams(temperature=0.0, logit_bias={POISON: 100.0})
    late = world.request("late", [5, 6, 7], sampling)
    expected = list(itertools.takewhile(lambda token: token != POISON, world.alone([1, 2, 3], 4)))
    found = world.ask((well, 4), (ill, 4), (late, 2))
    assert found[1] == []
    assert found[0][: len(expected)] == expected
    assert found[2] == world.alone([5, 6, 7], 2)  # no bias, no penalties: drafts are guesses
    world.runner.take()
    assert world.ask((ill, 4), (well, 4)) == [[], found[0]]
    assert world.runner.take() == [(2, 3)]  # what would be computed from NaN is not tried again

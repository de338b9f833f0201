"""The same bits whatever the load: logits of a request alone, and of the same request under any schedule.

For each number format and instruction set. A world is a scheduler with random limits under random arrivals: prompts cut
into chunks, shared prefixes, a pool so small that requests are preempted and computed again, other requests in the
step, one to three threads, buffers that hold less than the step. Every position's logits must equal, bit for bit,
those of the request alone in an executor with room for everything and one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.executor.native import Logits, NativeExecutor
from maitred.kernels import _native
from maitred.model.spec import Activation, NormPlacement, QKNorm
from maitred.request import Request, SamplingParams
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import VOCAB, make_decoder, make_spec
from tests.fakes import make_request, make_scheduler

FORMATS = [
    {"dtype": "float32", "kv_dtype": "float32"},
    {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    {"dtype": "int8", "kv_dtype": "int8"},
    {"dtype": "int8", "kv_dtype": "bfloat16"},
    {"dtype": "int4", "kv_dtype": "int8", "int4_group_size": 32},
]
LONGEST = 300  # tokens: past the first of attention's segments of 256
MAX_TOKENS = 4


@cache
def a_decoder(kind: str) -> Any:
    """Two unlike decoders; sizes that fill no tile."""
    sizes = {"hidden_size": 72, "intermediate_size": 100, "head_dim": 20, "max_position_embeddings": 320}
    if kind == "plain":
        return make_decoder(make_spec(**sizes, num_heads=6, num_kv_heads=2, qk_norm=QKNorm.PER_HEAD))
    return make_decoder(
        make_spec(
            windows=(None, 37),
            norm_placement=NormPlacement.BOTH,
            activation=Activation.GELU_TANH,
            attention_softcap=20.0,
            logit_softcap=15.0,
            qkv_bias=True,
            tied_embeddings=True,
            **sizes,
        )
    )


@dataclass
class Bits:
    """Logits of each position of each request, as often as they were computed."""

    seen: dict[str, dict[int, list[bytes]]]

    def __call__(self, request_id: str, start: int, logits_nV: Logits) -> None:
        assert np.isfinite(logits_nV).all()
        of_request = self.seen.setdefault(request_id, {})
        for position, logits_V in enumerate(logits_nV, start):
            of_request.setdefault(position, []).append(logits_V.tobytes())


def prompts_of(chooser: Random) -> list[list[int]]:
    """Some short, some long, some that begin alike."""
    prompts: list[list[int]] = []
    for _ in range(chooser.randint(2, 5)):
        longest = chooser.choice([3, 40, LONGEST - MAX_TOKENS])
        shared = chooser.choice(prompts)[: chooser.randint(0, longest)] if prompts and chooser.random() < 0.6 else []
        tail = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, max(1, longest - len(shared))))]
        prompts.append((shared + tail)[:longest])
    return prompts


def requests_of(prompts: Sequence[list[int]], block_size: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return [
        make_request(f"r{i}", prompt=prompt, max_tokens=MAX_TOKENS, sampling=sampling, block_size=block_size)
        for i, prompt in enumerate(prompts)
    ]


def serve(executor: NativeExecutor, scheduler: Any, requests: Sequence[Request], chooser: Random) -> None:
    """Requests arrive whenever the chooser likes."""
    waiting, now = list(requests), 0.0
    while waiting or scheduler.has_work:
        while waiting and (not scheduler.has_work or chooser.random() < 0.4):
            scheduler.add(waiting.pop(0), now)
        plan = scheduler.schedule(now)
        scheduler.update(plan, executor.execute(plan), now)
        now += 1.0
        assert now < 5000


def alone(decoder: Any, requests: Sequence[Request], **formats: Any) -> dict[str, dict[int, bytes]]:
    """The logits of each request by itself: one step for the prompt, then one a token."""
    found: dict[str, dict[int, bytes]] = {}
    for request in requests:
        bits = Bits({})
        executor = make_native(decoder, num_blocks=40, block_size=16, max_tokens=600, on_logits=bits, **formats)
        scheduler = make_scheduler(num_blocks=40, block_size=16, max_num_batched_tokens=600)
        [again] = requests_of([request.prompt_token_ids], block_size=16)
        serve(executor, scheduler, [again], Random(0))
        found[request.request_id] = {position: logits for position, [logits] in bits.seen["r0"].items()}
        assert len(found[request.request_id]) == request.num_prompt_tokens + MAX_TOKENS - 1
    return found


def check_world(kind: str, seed: int, **formats: Any) -> None:
    chooser = Random(seed)
    decoder = a_decoder(kind)
    block_size = chooser.choice([4, 7, 16, 32])
    requests = requests_of(prompts_of(chooser), block_size)
    expected = alone(decoder, requests, **formats)
    blocks_of_the_longest = -(-LONGEST // block_size)
    num_blocks = blocks_of_the_longest + chooser.randint(0, blocks_of_the_longest)
    bits = Bits({})
    executor = make_native(
        decoder,
        num_blocks=num_blocks,
        block_size=block_size,
        num_threads=chooser.randint(1, 3),
        max_tokens=chooser.choice([5, 64, 600]),
        max_logits=chooser.choice([1, 3, 64]),
        on_logits=bits,
        **formats,
    )
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_batched_tokens=chooser.choice([8, 33, 300, 600]),
        max_num_seqs=chooser.randint(1, 5),
    )
    serve(executor, scheduler, requests, chooser)
    for request in requests:
        seen = bits.seen[request.request_id]
        for position, versions in seen.items():
            assert set(versions) == {expected[request.request_id][position]}, (request.request_id, position)
    executor.close()


@pytest.mark.parametrize("isa", _native.available_isas())
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: f"{f['dtype']}-{f['kv_dtype']}")
@settings(max_examples=2, deadline=None)
@given(kind=st.sampled_from(["plain", "gemma"]), seed=st.integers(0, 2**32))
def test_logits_are_the_same_bits_under_any_schedule(kind: str, seed: int, formats: dict[str, Any], isa: str):
    check_world(kind, seed, isa=isa, **formats)

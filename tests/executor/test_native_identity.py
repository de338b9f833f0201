"""The same bits whatever the load: logits of a request alone, and of the same request under any schedule.

For each number format and instruction set. A world is a scheduler with random limits under random arrivals: prompts cut
into chunks, shared prefixes, a pool so small that requests are preempted and computed again, other requests in the
step, up to three threads of which each step uses another number, buffers that hold less than the step. Every
position's logits must equal, bit for bit, those of the request alone in an executor with room for everything and one
thread.

Worlds are rehearsed without numbers first, and those that preempt nobody or share nothing are not taken.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from random import Random
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import RequestState, SamplingParams
from maitred.executor.native import Logits
from maitred.kernels import _native
from maitred.model.spec import (
    Activation,
    LatentSpec,
    NormPlacement,
    QKNorm,
    RecurrentSpec,
    RopeSpec,
    RopeType,
    RoutedSpec,
)
from tests.executor.native_worlds import BLOCK_TYPES, make_native
from tests.executor.torch_worlds import VOCAB, make_decoder, make_spec
from tests.fakes import FakeExecutor, make_request, make_scheduler

FORMATS = [
    {"dtype": "float32", "kv_dtype": "float32"},
    {"dtype": "float32", "kv_dtype": "int8"},
    {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    {"dtype": "bfloat16", "kv_dtype": "int8"},
    {"dtype": "bfloat16", "kv_dtype": "int4"},
    {"dtype": "int8", "kv_dtype": "int8"},
    {"dtype": "int8", "kv_dtype": "int4"},
    {"dtype": "int8", "kv_dtype": "bfloat16"},
    {"dtype": "int4", "kv_dtype": "bfloat16"},
]
BLOCKS = [  # of GGUF files, all in one model
    {"dtype": "auto", "kv_dtype": "bfloat16", "blocks": "super-blocks"},
    {"dtype": "auto", "kv_dtype": "int8", "blocks": "blocks of 32"},
]
OF_KIND = [  # experts, and recurrent layers, of every kind of number format
    {"dtype": "float32", "kv_dtype": "float32"},
    {"dtype": "bfloat16", "kv_dtype": "int8"},
    {"dtype": "int8", "kv_dtype": "int8"},
    {"dtype": "int4", "kv_dtype": "bfloat16"},
]
KINDS = ("narrow", "wide")
MOST_THREADS = min(3, os.cpu_count() or 1)  # more than processors, and they spin for each other
SEGMENT = 256  # tokens that attention sums at once
LONGEST = 320


@cache
def a_decoder(kind: str) -> Any:
    """Two unlike decoders: one of sizes that fill no tile, one whose heads and rows are more than a tile or two; and
    others whose rows are whole blocks of GGUF files."""
    if kind in BLOCK_TYPES:
        sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
        if kind == "blocks of 32":
            sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_heads": 3, "num_kv_heads": 1}
        return make_decoder(make_spec(windows=(None, 270), max_position_embeddings=LONGEST, **sizes))
    if kind == "routed":
        spec = make_spec(windows=(None, 37), hidden_size=72, max_position_embeddings=LONGEST)
        routed = RoutedSpec(num_experts=7, num_active=3, width=52, normalized=True, shared_width=36, shared_gate=True)
        return make_decoder(replace(spec, layers=tuple(replace(layer, mlp=routed) for layer in spec.layers)))
    if kind == "recurrent":
        spec = make_spec(windows=(None,) * 3, hidden_size=72, max_position_embeddings=LONGEST, output_gate=True)
        delta = RecurrentSpec(num_key_heads=2, num_value_heads=6, key_dim=14, value_dim=37, conv_width=4)
        layers = (replace(layer, attention=None if i == 1 else delta) for i, layer in enumerate(spec.layers))
        return make_decoder(replace(spec, layers=tuple(layers)))
    if kind == "latent":
        latent = LatentSpec(rank=32, rope_dim=6, key_dim=32, value_dim=18, query_rank=40)
        spec = make_spec(hidden_size=72, num_heads=9, num_kv_heads=1, head_dim=38, max_position_embeddings=LONGEST)
        rope = RopeSpec(rope_type=RopeType.DEFAULT, theta=1e4, dim=6, interleaved=True)
        layers = (replace(layer, attention=latent, rope=rope) for layer in spec.layers)
        return make_decoder(replace(spec, layers=tuple(layers), attention_scale=0.1))
    if kind == "wide":
        sizes = {"hidden_size": 580, "intermediate_size": 150, "head_dim": 80, "num_heads": 3, "num_kv_heads": 1}
        spec = make_spec(windows=(None, 270), qk_norm=QKNorm.PER_HEAD, max_position_embeddings=LONGEST, **sizes)
        return make_decoder(spec)
    spec = make_spec(
        windows=(None, 37),
        norm_placement=NormPlacement.BOTH,
        activation=Activation.GELU_TANH,
        attention_softcap=20.0,
        logit_softcap=15.0,
        qkv_bias=True,
        tied_embeddings=True,
        value_norm=True,
        layer_scales=True,
        hidden_size=72,
        intermediate_size=100,
        head_dim=20,
        max_position_embeddings=LONGEST,
    )
    full, *others = spec.layers
    return make_decoder(replace(spec, layers=(replace(full, heads=(1, 36)), *others)))


@dataclass
class Bits:
    """Logits of each position of each request, as often as they were computed."""

    seen: dict[str, dict[int, list[bytes]]] = field(default_factory=dict)

    def __call__(self, request_id: str, start: int, logits_nV: Logits) -> None:
        assert np.isfinite(logits_nV).all()
        of_request = self.seen.setdefault(request_id, {})
        for position, logits_V in enumerate(logits_nV, start):
            of_request.setdefault(position, []).append(logits_V.tobytes())


@dataclass(frozen=True)
class World:
    """Requests, how they arrive, and what they share."""

    prompts: tuple[tuple[int, ...], ...]
    output_lengths: tuple[int, ...]
    arrivals: int  # a seed
    block_size: int
    num_blocks: int
    scheduler: dict[str, int]
    adapters: tuple[str, ...] = ("",)  # of the requests, in turn

    def requests(self) -> list[RequestState]:
        return [
            make_request(
                f"r{i}",
                prompt=prompt,
                max_tokens=length,
                sampling=SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True),
                block_size=self.block_size,
                adapter=self.adapters[i % len(self.adapters)],
                cache_salt=self.adapters[i % len(self.adapters)],
            )
            for i, (prompt, length) in enumerate(zip(self.prompts, self.output_lengths, strict=True))
        ]

    def serve(self, executor: Any) -> list[RequestState]:
        """The requests, served to the end."""
        scheduler = make_scheduler(num_blocks=self.num_blocks, block_size=self.block_size, **self.scheduler)
        chooser, requests, now = Random(self.arrivals), self.requests(), 0.0
        waiting = list(requests)
        while waiting or scheduler.has_work:
            while waiting and (not scheduler.has_work or chooser.random() < 0.4):
                scheduler.add(waiting.pop(0), now)
            plan = scheduler.schedule(now)
            scheduler.update(plan, executor.execute(plan), now)
            now += 1.0
            assert now < 5000
        return requests


@dataclass
class EachInTurn:
    """A choice of threads that is another one for each step."""

    most: int
    num_threads: int = 1

    def took(self, num_tokens: int, num_rows: int, began_at: float, ended_at: float) -> int | None:
        self.num_threads = self.num_threads % self.most + 1
        return None


def tries_everything(requests: list[RequestState]) -> bool:
    """One was preempted, and one that was not had others' blocks."""
    return any(r.num_preemptions for r in requests) and any(
        r.num_cached_tokens and not r.num_preemptions for r in requests
    )


def a_world(chooser: Random, adapters: tuple[str, ...] = ("",), num_state_slots: int = 0) -> World:
    for _ in range(1000):
        world = replace(any_world(chooser), adapters=adapters)
        if num_state_slots:
            world.scheduler["num_state_slots"] = num_state_slots
        if tries_everything(world.serve(FakeExecutor())):
            return world
    raise AssertionError("no world preempts and shares")


def any_world(chooser: Random) -> World:
    """One prompt is longer than attention's first segment, some are short, some begin alike."""
    lengths = tuple(chooser.randint(3, 10) for _ in range(chooser.randint(3, 5)))
    prompts: list[tuple[int, ...]] = []
    for i, output_length in enumerate(lengths):
        longest = LONGEST - output_length if i == 0 else chooser.choice([3, 40, 150, LONGEST - output_length])
        shared = chooser.choice(prompts)[: chooser.randint(0, longest)] if prompts and chooser.random() < 0.7 else ()
        num_tokens = chooser.randint(SEGMENT + 1, longest) if i == 0 else chooser.randint(1, longest)
        prompts.append(
            (shared + tuple(chooser.randrange(VOCAB) for _ in range(longest)))[: max(num_tokens, len(shared))]
        )
    block_size = chooser.choice([4, 7, 16, 32])
    needed = [-(-(len(p) + n) // block_size) for p, n in zip(prompts, lengths, strict=True)]
    return World(
        prompts=tuple(prompts),
        output_lengths=lengths,
        arrivals=chooser.getrandbits(32),
        block_size=block_size,
        num_blocks=max(*needed, int(sum(needed) * chooser.uniform(0.4, 0.9))),
        scheduler={
            "max_num_batched_tokens": chooser.choice([33, 100, 300, 600]),
            "max_num_seqs": chooser.randint(2, 5),
        },
    )


def alone(decoder: Any, request: RequestState, adapter: Any = None, **formats: Any) -> dict[int, bytes]:
    """A request's logits by itself: one step for the prompt, then one a token."""
    bits, name = Bits(), request.spec.adapter
    slots = {"num_state_slots": 1} if decoder.spec.has_state else {}
    executor = make_native(decoder, num_blocks=40, block_size=16, max_tokens=600, on_logits=bits, **slots, **formats)
    if name:
        executor.adapters.load(name, adapter)
    length, limits = request.max_tokens, {"max_num_batched_tokens": 600, "max_num_seqs": 1, **slots}
    world = World((tuple(request.spec.prompt_token_ids),), (length,), 0, 16, 40, limits, (name,))
    world.serve(executor)
    found = {position: logits for position, [logits] in bits.seen["r0"].items()}
    assert len(found) == request.num_prompt_tokens + length - 1
    return found


def cases() -> list[Any]:
    """Each format with each instruction set, in either decoder by turns; the others are for `make soak`."""
    found = []
    for (row, isa), (column, formats) in product(enumerate(_native.available_isas()), enumerate([*FORMATS, *BLOCKS])):
        for number, kind in enumerate([formats["blocks"]] if "blocks" in formats else KINDS):
            in_soak = (row + column + number) % (3 if "blocks" in formats else 4)
            found.append(pytest.param(formats, kind, isa, marks=[pytest.mark.soak] if in_soak else []))
    for (row, isa), (column, formats) in product(enumerate(_native.available_isas()), enumerate(OF_KIND)):
        marks = [pytest.mark.soak] if row != column % len(_native.available_isas()) else []
        found.append(pytest.param(formats, "routed", isa, marks=marks))
        marks = [] if (row, column) in ((1, 0), (3, 2)) else [pytest.mark.soak]
        found.append(pytest.param(formats, "recurrent", isa, marks=marks))
        kept = "float32" if formats["dtype"] == "float32" else "bfloat16"
        found.append(pytest.param(formats | {"kv_dtype": kept}, "latent", isa, marks=marks))
    return found


@pytest.mark.parametrize(
    ("formats", "kind", "isa"),
    cases(),
    ids=lambda value: value if isinstance(value, str) else f"{value['dtype']}-{value['kv_dtype']}",
)
@settings(max_examples=1, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_logits_are_the_same_bits_under_any_schedule(kind: str, seed: int, formats: dict[str, Any], isa: str):
    # the names too, for a first example is always the smallest, and each case shall have a world of its own
    chooser = Random(f"{kind} {formats} {isa} {seed}")
    decoder, world = a_decoder(kind), a_world(chooser, num_state_slots=9 if kind == "recurrent" else 0)
    check_bits(decoder, world, chooser, isa=isa, **formats)


def check_bits(
    decoder: Any, world: World, chooser: Random, adapters: Mapping[str, Any] = MappingProxyType({}), **formats: Any
) -> None:
    """The world's requests, served among each other, have the logits that they have alone."""
    bits = Bits()
    executor = make_native(
        decoder,
        num_blocks=world.num_blocks,
        block_size=world.block_size,
        num_state_slots=world.scheduler.get("num_state_slots", 0),
        num_threads=chooser.randint(1, MOST_THREADS),
        max_tokens=chooser.choice([5, 64, 600]),
        max_logits=chooser.choice([1, 3, 64]),
        on_logits=bits,
        **formats,
    )
    for name, adapter in adapters.items():
        executor.adapters.load(name, adapter)
    executor.choice = EachInTurn(executor.threads.num_threads)
    requests = world.serve(executor)
    assert tries_everything(requests)
    for request in requests:
        expected = alone(decoder, request, adapters.get(request.spec.adapter), **formats)
        for position, versions in bits.seen[request.request_id].items():
            assert set(versions) == {expected[position]}, (request.request_id, position)
    executor.close()

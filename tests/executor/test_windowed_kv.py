"""Layers of windows that keep what these see alone: the same tokens as whole blocks give, on less memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from maitred.core.cost_model import SwapCosts
from maitred.core.request import SamplingParams
from maitred.executor.text_drafts import NGramProposer
from maitred.kv.pages import KVGroups, groups_of
from maitred.model.spec import LayerSpec
from maitred.scheduler.scheduler import Scheduler
from tests.executor.native_worlds import make_native
from tests.executor.torch_worlds import VOCAB, make_decoder, make_executor, make_spec
from tests.fakes import make_request, make_samples, make_scheduler
from tests.scheduler.running import Run

GEMMA = (9, 9, None, 9, 9)
UNLIKE = (20, None, 8, 8, 20, None)
ALIKE = (12, 12, 12)
UNEVEN = (9, 9, None, 9, None)


def of_heads(layer: LayerSpec, heads: tuple[int, int] | None) -> LayerSpec:
    return replace(layer, heads=heads)


def make(kind: str, windows: tuple[int | None, ...], groups: KVGroups | None, pages: int, **changes: Any) -> Any:
    spec = make_spec(windows=windows)
    if windows == UNEVEN:  # full layers have other heads
        heads = [(1, 12) if layer.window is None else None for layer in spec.layers]
        spec = replace(spec, layers=tuple(map(of_heads, spec.layers, heads)), value_norm=True, layer_scales=True)
    decoder = make_decoder(spec)
    if kind == "torch":
        return make_executor(decoder, num_blocks=pages, groups=groups, **changes)
    return make_native(decoder, num_blocks=pages, groups=groups, **changes)


def prompts(chooser: Random) -> list[list[int]]:
    text = [chooser.randrange(VOCAB) for _ in range(64)]
    tails = [[chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 12))] for _ in range(4)]
    return [text[: chooser.choice([5, 17, 40, 64])] + tail for tail in tails]


def outputs_of(
    kind: str, windows: tuple[int | None, ...], groups: KVGroups | None, *, pages: int, block_size: int, host: int = 0
) -> tuple[dict[str, list[int]], Scheduler]:
    """Four requests with shared beginnings, three samples and a second turn, in chunks."""
    executor = make(kind, windows, groups, pages, block_size=block_size, num_host_blocks=host)
    if kind == "native":
        executor.proposer = NGramProposer()
    scheduler = make_scheduler(
        num_blocks=pages,
        block_size=block_size,
        max_num_batched_tokens=24,
        groups=groups,
        num_host_blocks=host,
        num_drafts=(lambda request, num_rows: 2) if kind == "native" else None,
    )
    if host:
        scheduler.set_swap_costs(SwapCosts(1, 1e12, 1e12, 1.0))
    run = Run(scheduler, executor=executor)
    asked = prompts(Random(3))
    requests = [
        make_request(f"r{i}", prompt=prompt, max_tokens=14, block_size=block_size) for i, prompt in enumerate(asked)
    ]
    sampling = SamplingParams(max_tokens=8, temperature=1.0)
    samples = make_samples("s", 3, prompt=asked[0], max_tokens=8, block_size=block_size, sampling=sampling)
    run.add(*requests[:2])
    run.steps(3)
    run.add(*requests[2:], *samples)
    run.to_end()
    second = [*requests[0].spec.prompt_token_ids, *requests[0].output_token_ids, 1, 2, 3]
    requests.append(make_request("again", prompt=second, max_tokens=14, block_size=block_size))
    run.add(requests[-1])
    run.to_end()
    executor.close()
    return {request.request_id: request.output_token_ids for request in [*requests, *samples]}, scheduler


@pytest.mark.parametrize(
    ("kind", "windows", "block_size"),
    [
        *(("native", GEMMA, 4), ("native", UNLIKE, 16), ("native", ALIKE, 4), ("native", UNEVEN, 4)),
        *(("native", UNEVEN, 16), ("torch", UNEVEN, 4), ("torch", UNLIKE, 4), ("torch", ALIKE, 16)),
    ],
)
def test_tokens_are_those_of_whole_blocks(kind: str, windows: tuple[int | None, ...], block_size: int):
    widths = [16 if window else 12 for window in windows] if windows == UNEVEN and kind == "native" else ()
    groups = groups_of(windows, 512, widths)
    assert groups is not None
    whole, _ = outputs_of(kind, windows, None, pages=600 // block_size, block_size=block_size)
    roomy, scheduler = outputs_of(kind, windows, groups, pages=1500 // block_size, block_size=block_size)
    assert roomy == whole
    assert scheduler.stats.num_prefix_hit_tokens > 0
    tight = groups.pages_for(96, block_size) + 5
    scarce, scheduler = outputs_of(kind, windows, groups, pages=tight, block_size=block_size)
    assert scarce == whole
    assert scheduler.stats.num_preemptions > 0
    swapped, scheduler = outputs_of(kind, windows, groups, pages=tight, block_size=block_size, host=tight)
    assert swapped == whole
    assert scheduler.stats.num_swapped_in_blocks > 0 or block_size == 16


def test_a_long_answer_takes_no_more_pages_than_its_window():
    groups = groups_of(ALIKE, 512)
    assert groups is not None
    run = Run(
        make_scheduler(num_blocks=12, max_num_batched_tokens=8, groups=groups),
        executor=make("native", ALIKE, groups, 12, block_size=4),
    )
    run.add(make_request("long", prompt=[i % VOCAB for i in range(200)], max_tokens=100))
    used = []
    while run.scheduler.has_work:
        run.step()
        used.append(run.scheduler.stats.num_blocks_used)
    assert len(run.progress) >= 100
    assert max(used) <= groups.pages_for(300, 4, ahead=8) == 6


def test_groups_of_known_shapes():
    gemma_270m = groups_of([512 if (i + 1) % 6 else None for i in range(18)], 32768)
    gemma_1b = groups_of([512 if (i + 1) % 6 else None for i in range(26)], 32768)
    mistral = groups_of([4096] * 32, 32768)
    assert gemma_270m is not None
    assert gemma_1b is not None
    assert mistral is not None
    assert (gemma_270m.windows, gemma_270m.counts, gemma_270m.size) == ((None, 512), (1, 5), 3)
    assert (gemma_1b.counts, gemma_1b.size) == ((1, 6), 4)
    for groups, num_layers in ((gemma_270m, 18), (gemma_1b, 26)):
        layers = groups.size * groups.pages_for(32768, 16, ahead=256)
        assert layers <= 0.2 * num_layers * 2048
    assert mistral.counts == (0, 1)
    assert mistral.pages_for(32768, 16) == mistral.pages_for(8192, 16) == 257
    gpt_oss_with_head = groups_of([128, None] * 12 + [None], 32768)
    assert gpt_oss_with_head is not None
    assert (gpt_oss_with_head.counts, gpt_oss_with_head.size) == ((1, 1), 13)
    assert groups_of([4096] * 32, 4096) is None
    kinds = [1024 if (i + 1) % 6 else None for i in range(60)]  # Gemma 4 31B: 16 heads of 256, or 4 of 512
    uneven = groups_of(kinds, 262144, [4096 if window else 2048 for window in kinds])
    assert uneven is not None
    assert (uneven.counts, uneven.size) == ((1, 10), 10)

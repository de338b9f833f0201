"""The numbers of paged attention, against attention over the whole sequence at once, in every geometry."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.request import SamplingParams
from maitred.core.step import ScheduledRow
from maitred.executor import batch as batch_module
from maitred.executor.batch import LONGEST_SHARED_QUERY, TorchBatch, build_batch
from maitred.executor.state import HeldRequest, RowWork
from tests.executor.torch_worlds import (
    GREEDY,
    Hand,
    Seen,
    assert_close,
    dense_logits,
    make_decoder,
    make_executor,
    make_spec,
    random_prompt,
)
from tests.fakes import make_new

GEOMETRIES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head": {"num_kv_heads": 1},
    "a key head for each query head": {"num_kv_heads": 4},
    "three queries for a key": {"num_heads": 6, "num_kv_heads": 2, "head_dim": 10, "hidden_size": 38},
    "large heads": {"head_dim": 130},
    "scaled": {"attention_scale": 0.9},
    "softcap": {"attention_softcap": 3.0},
    "softcap and window": {"attention_softcap": 3.0, "windows": (5, None, 5)},
    "windows shorter and longer than the context": {"windows": (1, 7, 40, 1000, None)},
}


def check_against_dense(decoder: Any, lengths: list[int], shares: list[int], *, block_size: int = 4) -> None:
    """Prefill prompts of these lengths in chunks, all rows at once, then decode; every position's logits must agree."""
    seen = Seen()
    hand = Hand(
        make_executor(decoder, num_blocks=1024, block_size=block_size, on_logits=seen),
        num_blocks=1024,
        block_size=block_size,
    )
    for i, length in enumerate(lengths):
        hand.add(f"r{i}", random_prompt(length, seed=i))
    for share in itertools.cycle(shares):
        due = {r: min(share, hand.known[r] - hand.computed[r]) for r in hand.tables}
        hand.step(due)
        if all(len(output) >= 2 for output in hand.outputs.values()):
            break
    for i, length in enumerate(lengths):
        text = random_prompt(length, seed=i) + hand.outputs[f"r{i}"]
        logits = seen.of(f"r{i}")
        assert_close(logits, dense_logits(decoder, text[: len(logits)]))


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_logits_equal_those_of_the_whole_sequence(geometry: str, device: torch.device):
    decoder = make_decoder(make_spec(**GEOMETRIES[geometry]), device=device)
    check_against_dense(decoder, lengths=[1, 2, 5, 16, 33, 70], shares=[LONGEST_SHARED_QUERY + 3, 1, 7])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=7),
    shares=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    block_size=st.sampled_from([1, 3, 4, 16]),
    window=st.sampled_from([None, 1, 4, 19, 64]),
)
def test_any_ragged_batch_in_any_chunks(lengths: list[int], shares: list[int], block_size: int, window: int | None):
    decoder = make_decoder(make_spec(windows=(window, None), num_kv_heads=2))
    check_against_dense(
        decoder, lengths, [max(share, max(lengths) // 12 + 1) for share in shares], block_size=block_size
    )


def test_groups_of_many_keys_are_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batch_module, "MOST_SHARED_KEYS", 40)
    decoder = make_decoder(make_spec(windows=(None, 6)))
    check_against_dense(decoder, lengths=[9, 10, 11, 12, 13, 14, 30], shares=[20])


def test_a_bfloat16_pool_rounds_keys_and_values_only(device: torch.device):
    decoder = make_decoder(make_spec(), device=device)
    seen = Seen()
    hand = Hand(make_executor(decoder, kv_dtype=torch.bfloat16, on_logits=seen))
    prompt = random_prompt(40, seed=1)
    hand.add("r", prompt)
    hand.step()
    wanted = dense_logits(decoder, prompt)
    error = (seen.of("r") - wanted).abs().max()
    assert 1e-4 < error < 0.05 * wanted.abs().max()


def test_bfloat16_weights_and_pool_stay_near_float32():
    exact, rounded = make_decoder(make_spec()), make_decoder(make_spec(), dtype=torch.bfloat16)
    seen = Seen()
    hand = Hand(make_executor(rounded, on_logits=seen))
    prompt = random_prompt(40, seed=1)
    hand.add("r", prompt)
    hand.step({"r": 33})
    hand.step()
    wanted = dense_logits(exact, prompt)
    dense_error = (dense_logits(rounded, prompt) - wanted).abs().max()
    assert (seen.of("r") - wanted).abs().max() <= 2 * dense_error


def make_works(rows: list[tuple[int, int]], *, block_size: int) -> list[RowWork]:
    """A request for each (start, num_tokens), token ids 1000 * request + position, blocks 100 * request + index."""
    works = []
    for i, (start, count) in enumerate(rows):
        tokens = [1000 * i + p for p in range(start + count)]
        state = HeldRequest(make_new(str(i), tokens, sampling=GREEDY), vocab_size=10)
        row = ScheduledRow(
            str(i),
            start,
            count,
            samples=False,
            new_block_ids=tuple(100 * i + j for j in range(-(-(start + count) // block_size))),
        )
        state.take_blocks(row)
        works.append(RowWork(row, state))
    return works


ROWS = st.lists(st.tuples(st.integers(0, 200), st.integers(1, 80)), min_size=1, max_size=9)


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, block_size=st.sampled_from([1, 3, 8]))
def test_a_batch_names_every_token_of_the_plan_once(rows: list[tuple[int, int]], block_size: int):
    works = make_works(rows, block_size=block_size)
    batch = build_batch(works, block_size)
    wanted = {
        (1000 * i + p, p, (100 * i + p // block_size) * block_size + p % block_size)
        for i, (start, count) in enumerate(rows)
        for p in range(start, start + count)
    }
    got = list(zip(batch.token_ids.tolist(), batch.positions.tolist(), batch.slots().tolist(), strict=True))
    assert len(got) == len(wanted)
    assert set(got) == wanted
    assert [works[i] for i in batch.order] == batch.works


@settings(max_examples=60, deadline=None)
@given(rows=ROWS, block_size=st.sampled_from([1, 3, 8]), window=st.sampled_from([None, 1, 5, 64]))
def test_groups_cover_the_batch_and_their_spans_the_keys(
    rows: list[tuple[int, int]], block_size: int, window: int | None
):
    batch = build_batch(make_works(rows, block_size=block_size), block_size)
    groups = batch.groups()
    assert [row for group in groups for row in range(group.rows.start, group.rows.stop)] == list(range(len(rows)))
    assert [t for group in groups for t in range(group.tokens.start, group.tokens.stop)] == list(
        range(len(batch.slots()))
    )
    for group in groups:
        assert group.num_rows == 1 or group.query_len <= LONGEST_SHARED_QUERY
        check_span(batch, batch.key_span(group, window), group.rows.start, window)
        if group.padded:
            tokens = batch.query_index(group).reshape(-1)[batch.query_keep(group)]
            assert tokens.tolist() == list(range(group.tokens.start, group.tokens.stop))


def check_span(batch: TorchBatch, span: batch_module.KeySpan, first_row: int, window: int | None) -> None:
    for i, ids in enumerate(span.block_ids):
        row, state, _ = batch.works[first_row + i]
        first_key = 0 if window is None else max(0, row.start - window + 1)
        wanted = range(first_key // batch.block_size, (row.start + row.num_tokens - 1) // batch.block_size + 1)
        assert span.first_positions[i] == wanted.start * batch.block_size
        assert ids[: len(wanted)].tolist() == state.blocks.array[wanted.start : wanted.stop].tolist()
        assert np.isin(ids[len(wanted) :], ids[: len(wanted)]).all()


def test_alike_decode_rows_share_one_call_and_unlike_ones_do_not():
    alike = build_batch(make_works([(40, 1), (41, 1), (60, 1)], block_size=4), 4)
    assert len(alike.groups()) == 1
    unlike = build_batch(make_works([(40, 1), (4000, 1)], block_size=4), 4)
    assert len(unlike.groups()) == 2


def test_sampling_parameters_of_a_state_are_kept():
    works = make_works([(0, 3)], block_size=4)
    assert works[0].state.sampler.sampling == SamplingParams(temperature=0.0, max_tokens=1000)

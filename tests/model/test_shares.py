"""Shares of matrices: each row is one rank's, in whole tiles, whatever shape and number of ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.kernels import _native
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.fusions import compile_program
from maitred.model.packed import is_matrix, pack_weights
from maitred.model.packed_cache import cache_key
from maitred.model.program import Format, Formats, Part, Weight
from maitred.model.shares import TILE, Share, own_program, share_of
from tests.model.checkpoints import make_checkpoint

F32 = Format(dtype="float32")


def rows_of(parts: tuple[Part, ...]) -> list[tuple[str, int]]:
    return [(part.parameter, row) for part in parts for row in range(part.first, part.first + part.rows)]


@given(sizes=st.lists(st.integers(1, 90), min_size=1, max_size=3), gated=st.booleans(), num_ranks=st.integers(1, 9))
def test_every_row_is_one_ranks_and_tiles_stay_whole(sizes: list[int], gated: bool, num_ranks: int):
    if gated:
        sizes = [sizes[0], sizes[0]]
    parts = tuple(Part(parameter=f"p{i}", first=7 * i, rows=rows) for i, rows in enumerate(sizes))
    bias = tuple(Part(parameter=f"b{i}", first=0, rows=rows) for i, rows in enumerate(sizes))
    weight = Weight(name="w", parts=parts, width=8, format=F32, bias=bias, gated=gated)
    shares = [share_of(weight, rank, num_ranks) for rank in range(num_ranks)]
    owned = [share.weight for share in shares if share.weight is not None]
    assert sorted(row for own in owned for row in rows_of(own.parts)) == sorted(rows_of(parts))
    assert sorted(row for own in owned for row in rows_of(own.bias)) == sorted(rows_of(bias))
    halves = 2 if gated else 1
    first = 0
    for share in shares:
        assert share.first == first
        assert first % (TILE // halves) == 0 or share.weight is None
        first += share.weight.rows // halves if share.weight is not None else 0
    tiles = [-(-own.rows // TILE) for own in owned]
    assert max(tiles) - min(tiles) <= 1


def test_a_gated_share_has_the_same_channels_of_both_halves():
    part = Part(parameter="gate_up.weight", first=0, rows=200)
    weight = Weight(name="gate_up", parts=(part,), width=8, format=F32, gated=True)
    first, own = share_of(weight, 1, 2)
    assert first == 48
    assert own is not None
    assert [(part.first, part.rows) for part in own.parts] == [(48, 52), (148, 52)]


def test_fewer_tiles_than_ranks_leave_some_without():
    weight = Weight(name="w", parts=(Part(parameter="p", first=0, rows=40),), width=8, format=F32)
    shares = [share_of(weight, rank, 3) for rank in range(3)]
    assert shares[0] == Share(0, None)
    assert [share.weight.rows for share in shares if share.weight] == [32, 8]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "q4_1"])
def test_ranks_pack_the_tiles_of_the_whole_under_keys_of_their_own(dtype: str, tmp_path: Path):
    folder = make_checkpoint("llama_bias", tmp_path / "model")
    threads, format = _native.ThreadPool(1), Format(dtype=dtype)
    with open_checkpoint(str(folder)) as checkpoint:
        program = compile_program(spec_from_config(checkpoint.config), Formats(linears=format, head=format))
        own = [own_program(program, rank, 2) for rank in range(2)]
        whole, *packed = (pack_weights(each, checkpoint, threads) for each in (program, *own))
        assert len({cache_key(each, checkpoint, "plain") for each in (program, *own)}) == 3
        for weight in program.weights:
            tiles = Counter(_tiles(whole, weight.name))
            if is_matrix(weight):
                assert Counter(tile for each in packed for tile in _tiles(each, weight.name)) == tiles
            else:
                assert all(Counter(_tiles(each, weight.name)) == tiles for each in packed)


def _tiles(weights: object, name: str) -> list[bytes]:
    """A matrix' tiles, without what follows them; a vector as one."""
    tensor = weights[name]  # type: ignore[index]
    if not is_matrix(tensor.weight):
        return [np.ascontiguousarray(tensor.buffer).tobytes()]
    shape = tensor.shape
    channels = TILE // 2 if tensor.weight.gated else TILE
    num_tiles = -(-shape.out_width // channels)
    floats = (tensor.weight.format.dtype == "int8") + bool(tensor.weight.bias)
    size = (shape.packed_bytes - 4 * TILE * num_tiles * floats) // num_tiles
    return [tensor.buffer[i * size : (i + 1) * size].tobytes() for i in range(num_tiles)]

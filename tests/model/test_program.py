"""What a spec compiles to: which operations remain, what each pass found, and the weights they read."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError, KernelError
from maitred.kernels import _native
from maitred.model import fusions
from maitred.model.checkpoint import Checkpoint, RawTensor, open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.fusions import compile_program, lower
from maitred.model.packed import ALIGNMENT, is_matrix, pack_weights, plan_weights, total_bytes
from maitred.model.packed_cache import cache_key
from maitred.model.program import (
    QKV,
    AddTo,
    Attention,
    Embed,
    Format,
    Formats,
    Gated,
    Linear,
    NormAdd,
    Part,
    Prepare,
    Program,
    Store,
    Take,
    Weight,
)
from maitred.model.shares import TILE, Share, own_program, share_of
from maitred.model.spec import NormPlacement, parameter_shapes
from tests.executor.torch_worlds import make_spec
from tests.model.checkpoints import FAMILIES, make_checkpoint

INT8 = Formats(linears=Format(dtype="int8"), head=Format(dtype="int8"))


def compiled(formats: Formats = INT8, **changes: Any) -> Program:
    return compile_program(make_spec(**changes), formats)


def num_found(program: Program) -> dict[str, int]:
    return {fusion.name: fusion.num_times for fusion in program.fusions}


def test_a_llama_layer_is_ten_operations():
    program = compiled()
    layer = [Prepare, Linear, QKV, Attention, Prepare, Linear, Prepare, Linear, Prepare, Linear]
    assert [type(op) for op in program.ops] == [Embed, *layer, *layer[:4], Take, *layer[4:], Prepare, Linear]
    endings = [type(op.ending) for op in program.ops if isinstance(op, Linear)]
    assert endings == [Store, AddTo, Gated, AddTo, Store, AddTo, Gated, AddTo, Store]


def test_passes_tell_what_they_found():
    program = compiled(tied_embeddings=True, logit_scale=0.5, logit_softcap=30.0)
    assert num_found(program) == {
        "qkv stack": 2,
        "gate into linear ending": 2,
        "norm into prepare": 5,
        "wanted rows after the last attention": 1,
        "residual add into linear ending": 4,
        "rope, q/k norm and KV write in one": 2,
        "logit scale into linear ending": 1,
        "logit softcap into linear ending": 1,
        "tied lm_head = embedding": 1,
    }
    assert program.num_ops_lowered - sum(f.num_ops_saved for f in program.fusions) == len(program.ops)
    head = program.ops[-1]
    assert isinstance(head, Linear)
    assert head.ending == Store(scale=0.5, softcap=30.0)
    assert head.weight == program.ops[0].weight  # type: ignore[union-attr]


@pytest.mark.parametrize("placement", [NormPlacement.POST, NormPlacement.BOTH])
def test_a_norm_after_a_part_is_added_in_one(placement: NormPlacement):
    program = compiled(norm_placement=placement, residual_scale=0.3)
    added = [op for op in program.ops if isinstance(op, NormAdd)]
    assert [op.scale for op in added] == [0.3] * 4
    prepared = [op.norm is not None for op in program.ops if isinstance(op, Prepare)]
    first = placement is NormPlacement.BOTH
    assert prepared == [first, False, first, False] * 2 + [True]


def test_after_the_last_attention_only_wanted_rows_are_computed():
    ops = compiled(norm_placement=NormPlacement.BOTH).ops
    after = ops[next(i for i, op in enumerate(ops) if isinstance(op, Take)) :]
    assert [op.target for op in after if isinstance(op, NormAdd)] == ["taken", "taken"]
    prepared = [(op.source, op.takes) for op in after if isinstance(op, Prepare)]
    assert prepared == [("attended", True), ("taken", False), ("inner", False), ("taken", False)]


def test_formats_of_linears_and_head_decide_what_they_read():
    head = Format(dtype="bfloat16")
    program = compiled(Formats(linears=Format(dtype="q4_1"), head=head), tied_embeddings=True)
    operands = [op.dtype for op in program.ops if isinstance(op, Prepare)]
    assert operands == ["q8_0"] * 8 + ["bfloat16"]
    assert {str(weight.format) for weight in program.weights} == {"bfloat16", "float32", "q4_1"}


def test_what_the_library_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    kept = tuple(each for each in fusions.PASSES if not each.name.startswith("rope"))
    monkeypatch.setattr(fusions, "PASSES", kept)
    with pytest.raises(
        KernelError, match="Tiny needs Rope, WriteKV by itself, which the native executor does not have"
    ):
        compiled()


def test_matrices_of_one_parameter_may_have_formats_of_their_own():
    """As files of llama.cpp's mixes have them: v in more bits than q and k, gate and up apart."""
    spec = make_spec()
    q4, q6, half = (Format(dtype=name) for name in ("q4_k", "q6_k", "bfloat16"))
    v, up = spec.q_width + spec.kv_width, spec.intermediate_size
    stored = {
        "layers.0.qkv.weight": ((0, q4), (spec.q_width, q4), (v, q6)),
        "layers.1.qkv.weight": ((0, q4), (v, half)),
        "layers.0.gate_up.weight": ((0, q4), (up, q6)),
    }
    program = compile_program(spec, Formats(linears=q4, head=q6, stored=stored))
    columns = [(op.first, op.weight.rows, str(op.weight.format)) for op in program.ops
               if isinstance(op, Linear) and op.target == "qkv"]  # fmt: skip
    assert columns == [(0, v, "q4_k"), (v, spec.kv_width, "q6_k"), (0, v, "q4_k"), (v, spec.kv_width, "bfloat16")]
    assert [type(op).__name__ for op in program.ops].count("Gate") == 1
    operands = [op.dtype for op in program.ops if isinstance(op, Prepare)]
    assert operands == ["q8_0"] * 6 + ["q8_0", "bfloat16", "q8_0", "q8_0", "q8_0"] + ["q8_0"]
    assert (
        sum(part.rows for weight in program.weights for part in weight.parts if "0.qkv" in part.parameter)
        == v + spec.kv_width
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_every_family_is_read_once(family: str, tmp_path: Path):
    with open_checkpoint(str(make_checkpoint(family, tmp_path))) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    program = compile_program(spec, INT8)
    read: dict[str, list[tuple[int, int]]] = {}
    for weight in program.weights:
        for part in (*weight.parts, *weight.bias):
            read.setdefault(part.parameter, []).append((part.first, part.rows))
    assert {name: [(0, shape[0])] for name, shape in parameter_shapes(spec).items()} == read
    assert len(lower(spec, INT8)) > len(program.ops)


# ---- packed weights


def program_and_checkpoint(folder: Path, family: str = "qwen3_bias", **overrides: Any) -> tuple[Program, Any]:
    checkpoint = open_checkpoint(str(make_checkpoint(family, folder, **overrides)))
    return compile_program(spec_from_config(checkpoint.config), INT8), checkpoint


def test_sizes_are_known_before_anything_is_read(tmp_path: Path):
    program, checkpoint = program_and_checkpoint(tmp_path)
    plans = plan_weights(program)
    ends = [0]
    for plan in plans:
        assert plan.offset == -(-ends[-1] // ALIGNMENT) * ALIGNMENT
        ends.append(plan.offset + plan.num_bytes)
    assert total_bytes(plans) >= ends[-1]
    weights = pack_weights(program, checkpoint, _native.ThreadPool(1))
    assert [tensor.buffer.nbytes for tensor in weights.tensors.values()] == [plan.num_bytes for plan in plans]
    assert weights.num_bytes == sum(plan.num_bytes for plan in plans)


def test_buffers_that_the_caller_brings_are_filled_the_same(tmp_path: Path):
    import numpy as np

    program, checkpoint = program_and_checkpoint(tmp_path)
    wanted = pack_weights(program, checkpoint, _native.ThreadPool(1))
    flat = np.zeros(total_bytes(plan_weights(program)) + 64, dtype=np.uint8)
    flat = flat[-flat.ctypes.data % 64 :]
    pack_weights(
        program, checkpoint, _native.ThreadPool(2), lambda plan: flat[plan.offset : plan.offset + plan.num_bytes]
    )
    for plan in plan_weights(program):
        packed = flat[plan.offset : plan.offset + plan.num_bytes]
        assert np.array_equal(packed, wanted[plan.weight.name].buffer), plan.weight.name


class CountingCheckpoint(Checkpoint):
    """Counts how often each tensor is read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "counted")
        self.reads: Counter[str] = Counter()

    def tensor(self, name: str) -> RawTensor:
        self.reads[name] += 1
        return super().tensor(name)


def test_a_tensor_with_all_experts_is_read_once_for_all_of_them(tmp_path: Path):
    checkpoint = CountingCheckpoint(make_checkpoint("gpt_oss", tmp_path))
    program = compile_program(spec_from_config(checkpoint.config), INT8)
    pack_weights(program, checkpoint, _native.ThreadPool(1))
    stacks = [name for name in checkpoint.reads if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert stacks
    assert {checkpoint.reads[name] for name in stacks} == {1}


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path):
    from dataclasses import replace

    _, checkpoint = program_and_checkpoint(tmp_path, "llama")
    program = compile_program(replace(spec_from_config(checkpoint.config), intermediate_size=99), INT8)
    with pytest.raises(CheckpointError, match=r"has shape \[\d+, \d+\], config.json asks for \[.*safetensors"):
        pack_weights(program, checkpoint, _native.ThreadPool(1))


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

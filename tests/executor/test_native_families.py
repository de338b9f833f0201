"""Every family on the native executor against transformers in float32, and the most unlike ones on every
instruction set of this machine. On one thread: test_native_identity has the same bits from any number."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from maitred.kernels import _native
from tests.executor.native_worlds import load_native
from tests.executor.test_families_parity import BLOCK_SIZE, NUM_BLOCKS, SHARED, check_against_reference, serve
from tests.model.checkpoints import FAMILIES, load_reference, make_checkpoint

ISAS = _native.available_isas()
UNLIKE = ("llama_bias", "gemma2", "gemma3", "olmo2", "phi3_longrope", "granite", "qwen3")
CASES = [(family, ISAS[-1]) for family in FAMILIES] + [(family, isa) for isa in ISAS[:-1] for family in UNLIKE]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    """Each family's checkpoint is made once."""

    @cache
    def make(family: str) -> Path:
        return make_checkpoint(family, tmp_path_factory.mktemp(family), seed=3)

    return make


@pytest.mark.parametrize(("family", "isa"), CASES)
def test_a_family_served_natively_equals_transformers(family: str, isa: str, folder_of):
    folder = folder_of(family)
    executor = load_native(folder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, isa=isa, num_threads=1)
    served = serve(executor)
    check_against_reference(served, load_reference(folder))
    by_id = {request.request_id: request for request in served.requests}
    assert served.num_chunks_in_prompt(by_id["long"]) >= 2
    assert by_id["late"].num_cached_tokens == SHARED
    assert sum(request.num_preemptions for request in served.requests) >= 1
    executor.close()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    ("hidden_size", "num_heads", "num_kv_heads", "head_dim"), [(51, 3, 1, 6), (94, 2, 2, 130), (35, 5, 5, 2)]
)
def test_any_even_head_size_and_any_hidden_size(
    hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int, isa: str, tmp_path: Path
):
    folder = make_checkpoint(
        "llama",
        tmp_path,
        seed=4,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
    )
    served = serve(load_native(folder, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, isa=isa))
    check_against_reference(served, load_reference(folder))


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_whole_tiles_of_slots_give_the_same(family: str, block_size: int, folder_of):
    """Blocks of 16 slots have a layout of their own in the pool."""
    folder = folder_of(family)
    executor = load_native(folder, num_blocks=40, block_size=block_size)
    check_against_reference(serve(executor, block_size=block_size, num_blocks=40), load_reference(folder))

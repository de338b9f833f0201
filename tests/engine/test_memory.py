"""The memory plan: what fits, what is reduced, what is refused; and reading the machine's limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from maitred.config import CacheConfig, SchedulerConfig
from maitred.core.errors import OutOfMemory
from maitred.engine.memory import (
    GIB,
    DraftMemory,
    MemoryPlan,
    available_memory_bytes,
    format_bytes,
    own_share,
    physical_cores,
    plan_memory,
    usable_cores,
)


def plan(
    *,
    available: int = 10 * GIB,
    weights: int = GIB,
    bytes_per_block: int = 1024 * 1024,
    model_context: int = 4096,
    pinned: int | None = None,
    kv_bytes: int | None = None,
    max_num_seqs: int = 4,
    draft: DraftMemory | None = None,
    kv_share: float = 1.0,
    bytes_per_state_slot: int = 0,
    state_bytes: int | None = None,
) -> MemoryPlan:
    return plan_memory(
        available_bytes=available,
        weights_bytes=weights,
        bytes_per_block=bytes_per_block,
        model_context=model_context,
        pinned_context=pinned,
        cache=CacheConfig(block_size=16, kv_cache_memory_bytes=kv_bytes, state_cache_memory_bytes=state_bytes),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512),
        draft=draft,
        kv_share=kv_share,
        bytes_per_state_slot=bytes_per_state_slot,
    )


def test_the_cache_is_no_larger_than_full_contexts_for_every_slot():
    small = plan(max_num_seqs=4)
    assert small.num_blocks == 4 * 4096 // 16
    assert small.max_model_len == 4096
    assert "of the model" not in small.describe()


def test_the_cache_is_bounded_by_what_the_weights_leave():
    bounded = plan(max_num_seqs=512)
    assert bounded.num_blocks == (int(10 * GIB * 0.9) - GIB) // (1024 * 1024)
    assert bounded.longest_context == bounded.num_blocks * 16


def test_beside_other_programs_the_cache_takes_a_share_but_always_one_context():
    fitting = plan(max_num_seqs=512).num_blocks
    assert plan(max_num_seqs=512, kv_share=0.5).num_blocks == fitting // 2
    assert plan(max_num_seqs=4, kv_share=0.5).num_blocks == 4 * 4096 // 16  # which is less
    long = plan(model_context=fitting * 12, kv_share=0.5)
    assert (long.num_blocks, long.max_model_len) == (fitting * 12 // 16, fitting * 12)
    pinned = plan(kv_bytes=7 * GIB, kv_share=0.5)
    assert pinned.num_blocks == 7 * 1024


def test_a_context_that_does_not_fit_shrinks_unless_it_is_pinned():
    reduced = plan(model_context=1_000_000)
    assert reduced.max_model_len == reduced.longest_context < 1_000_000
    assert "of the model's 1,000,000" in reduced.describe()
    with pytest.raises(OutOfMemory, match=r"1,000,000 tokens needs .* --max-model-len \d+"):
        plan(model_context=4096, pinned=1_000_000)


def test_a_pinned_context_may_be_longer_than_the_models_own_which_is_said():
    longer = plan(model_context=128, pinned=256)
    assert longer.max_model_len == 256
    assert "made for 128" in longer.describe()


def test_a_cache_smaller_than_one_block_is_refused_with_both_numbers():
    with pytest.raises(OutOfMemory, match=r"one KV block of 16 tokens needs 1.0 MiB, and .* 512.0 KiB"):
        plan(kv_bytes=512 * 1024)


def test_a_pinned_cache_size_is_taken_whole_or_refused():
    assert plan(kv_bytes=300 * 1024 * 1024).num_blocks == 300
    with pytest.raises(OutOfMemory, match=r"asks for 20.00 GiB, and 8.00 GiB are left"):
        plan(kv_bytes=20 * GIB)


def test_a_draft_models_weights_and_cache_come_out_of_the_same_memory():
    mib = 1024 * 1024
    beside = plan(max_num_seqs=512, draft=DraftMemory(weights_bytes=GIB, bytes_per_block=mib // 4))
    assert beside.weights_bytes == 2 * GIB
    assert beside.num_blocks == (int(10 * GIB * 0.9) - 2 * GIB) // (mib + mib // 4)
    assert beside.bytes_per_block == mib  # of what is swapped
    assert beside.kv_bytes == beside.num_blocks * (mib + mib // 4)
    assert "of these, 1.00 GiB of weights and 1.40 GiB of cache are the draft model's" in beside.describe()
    assert plan(kv_bytes=300 * mib, draft=DraftMemory(0, mib // 2)).num_blocks == 200


def test_states_come_out_of_what_weights_leave_before_keys_and_values():
    mib = 1024 * 1024
    alone, beside = plan(max_num_seqs=512), plan(max_num_seqs=64, model_context=32768, bytes_per_state_slot=16 * mib)
    assert beside.states == (128, 16 * mib, 64)
    assert beside.num_blocks == alone.num_blocks - 2048
    assert "states    2.00 GiB = 128 slots of 16.0 MiB (64 requests, and 64 snapshots" in beside.describe()
    assert plan(bytes_per_state_slot=512 * mib).num_state_slots == 4 + 3, "a quarter of what they leave"
    assert plan(bytes_per_state_slot=mib, state_bytes=100 * mib + 1).num_state_slots == 4 + 100
    assert plan(bytes_per_state_slot=mib, state_bytes=0).num_state_slots == 4
    with pytest.raises(
        OutOfMemory, match=r"states of 64 requests need 64.00 GiB.* serve with --max-num-seqs 4 or less"
    ):
        plan(max_num_seqs=64, bytes_per_state_slot=GIB)
    with pytest.raises(OutOfMemory, match=r"state_cache_memory_bytes asks for 9.00 GiB, and 8.00 GiB are left"):
        plan(bytes_per_state_slot=mib, state_bytes=9 * GIB)


def test_weights_that_do_not_fit_are_refused_with_both_numbers():
    with pytest.raises(OutOfMemory, match=r"weights need 20.00 GiB and 10.00 GiB are available"):
        plan(weights=20 * GIB)


def test_bytes_are_printed_for_people():
    assert format_bytes(12) == "12 B"
    assert format_bytes(1536) == "1.5 KiB"
    assert format_bytes(3 * GIB) == "3.00 GiB"


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_control_groups_limit_counts_when_it_is_the_smaller(tmp_path: Path):
    proc = write_files(tmp_path / "proc", {"meminfo": "MemTotal: 16000 kB\nMemAvailable: 8000 kB\n"})
    cgroup = write_files(
        tmp_path / "cgroup",
        {"memory.max": "4096000\n", "memory.current": "2048000\n", "memory.stat": "anon 1\ninactive_file 48000\n"},
    )
    assert available_memory_bytes(proc, cgroup) == 4096000 - 2048000 + 48000
    (cgroup / "memory.max").write_text("max\n")
    assert available_memory_bytes(proc, cgroup) == 8000 * 1024


def test_the_limit_of_a_systemd_unit_or_of_a_slice_around_it_counts(tmp_path: Path):
    proc = write_files(
        tmp_path / "proc", {"meminfo": "MemAvailable: 8000 kB\n", "self/cgroup": "0::/my.slice/it.service\n"}
    )
    unit, slice = "my.slice/it.service/memory", "my.slice/memory"
    files = {
        f"{unit}.max": "max\n",
        f"{slice}.max": "4096000\n",
        f"{slice}.current": "96000\n",
        f"{slice}.stat": "anon 1\n",
    }
    cgroup = write_files(tmp_path / "cgroup", files)
    assert available_memory_bytes(proc, cgroup) == 4000000
    write_files(cgroup, {f"{unit}.max": "2000\n", f"{unit}.current": "500\n", f"{unit}.stat": "inactive_file 100\n"})
    assert available_memory_bytes(proc, cgroup) == 1600


def test_processors_of_one_core_count_once(tmp_path: Path):
    siblings = {0: "0,2\n", 1: "1,3\n", 2: "0,2\n", 3: "1,3\n"}
    write_files(tmp_path, {f"cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()})
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 1, 7}, tmp_path) == 3, "nothing is known of 7"
    assert physical_cores(range(6), tmp_path / "no such folder") == 6


def test_a_cpu_quota_counts_when_it_is_below_the_affinity(tmp_path: Path):
    cgroup = write_files(tmp_path, {"cpu.max": "100000 100000\n"})
    assert usable_cores(cgroup) == 1
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert usable_cores(cgroup) >= 1


@pytest.mark.parametrize("mapped", [0, GIB])
def test_engines_of_one_machine_get_equal_parts_and_count_mapped_weights_once(mapped: int):
    available, num_engines = 10 * GIB, 4
    share = plan(available=own_share(available, num_engines, mapped), max_num_seqs=512)
    in_all = num_engines * share.num_blocks * share.bytes_per_block + (GIB if mapped else num_engines * GIB)
    assert 0 <= available * 0.9 - in_all <= num_engines * share.bytes_per_block
    assert own_share(available, 1, mapped) == available

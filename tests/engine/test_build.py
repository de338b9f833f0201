"""What the wiring of an engine tells while it loads."""

from __future__ import annotations

import json
from pathlib import Path

from maitred.config import CacheConfig, EngineConfig, MachineShare, ModelConfig, SchedulerConfig, TiersConfig
from maitred.core.clock import ManualClock
from maitred.core.request import SamplingParams
from maitred.decisions.codec import read_log
from maitred.decisions.files import log_parts, read_frames
from maitred.decisions.log import Held
from maitred.decisions.replay import first_difference
from maitred.engine.build import build_parts, told_now_and_then
from maitred.engine.intake import make_requests
from maitred.engine.planning import _without_moved_kv
from tests.conftest import copied_model


def told(subject: str, **model: str) -> list[str]:
    """The lines of a start that begin with `subject`."""
    lines: list[str] = []
    build_parts(EngineConfig(model=ModelConfig(**model)), on_event=lines.append).close()
    return [line for line in lines if line.startswith(subject + " ")]


def test_a_model_without_a_chat_template_is_told_at_the_start(tmp_path: Path):
    config = copied_model(tmp_path) / "tokenizer_config.json"
    assert told("chat", model=str(tmp_path)) == []
    without = {name: value for name, value in json.loads(config.read_text()).items() if name != "chat_template"}
    config.write_text(json.dumps(without))
    (line,) = told("chat", model=str(tmp_path))
    assert "no chat template" in line
    assert "--chat-template FILE" in line


def test_the_packing_of_large_weights_is_told_every_two_seconds_with_its_speed_and_what_is_left():
    clock, lines = ManualClock(), list[str]()
    on_packed = told_now_and_then(lines.append, clock)
    for second in range(1, 9):
        clock.advance(1.0)
        on_packed(second * 10**9, 8 * 10**9)
    assert lines == [
        "weights packing, 1.86 GiB of 7.45 GiB at 1.00 GB/s, 6 s left",
        "weights packing, 3.73 GiB of 7.45 GiB at 1.00 GB/s, 4 s left",
        "weights packing, 5.59 GiB of 7.45 GiB at 1.00 GB/s, 2 s left",
    ]


def test_what_moves_blocks_is_off_where_states_stay_and_the_start_says_so():
    lines: list[str] = []
    asked = EngineConfig(
        cache=CacheConfig(swap_memory_bytes=1024, block_size=8),
        tiers=TiersConfig(kv_disk="folder"),
        share=MachineShare(exchanges_kv=True),
    )
    kept = _without_moved_kv(asked, lines.append, has_state=True)
    assert lines == [
        "states  of recurrent layers stay in this engine, so swap memory, KV tiers, KV between engines "
        "cannot be used; off"
    ]
    assert (kept.cache.swap_memory_bytes, kept.tiers.are_wanted, kept.share.exchanges_kv) == (0, False, False)
    assert kept.cache.block_size == 8
    _without_moved_kv(EngineConfig(), lines.append, has_state=True)
    assert len(lines) == 1, "nothing was asked for"
    kept = _without_moved_kv(asked, lines.append, has_state=False)
    assert lines[1:] == [
        "KV      of layers with unlike heads stays in this engine, so KV between engines cannot be used; off"
    ]
    assert (kept.cache.swap_memory_bytes, kept.tiers.are_wanted, kept.share.exchanges_kv) == (1024, True, False)


def test_a_log_has_the_end_of_a_step_before_the_blocks_that_are_held_then(tmp_path: Path):
    config = EngineConfig(
        model=ModelConfig(num_threads=1, max_model_len=512),
        scheduler=SchedulerConfig(max_num_batched_tokens=64),
        share=MachineShare(exchanges_kv=True),
        decision_log=str(tmp_path),
    )
    parts = build_parts(config)
    assert parts.kv_peers is not None
    core, gives = parts.core, parts.kv_peers.gives
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    (spec,) = make_requests(parts.model, range(300, 500), sampling, request_id="a", now=core.clock.now())
    core.add(spec)
    offered = gives._lease(spec.block_hashes)
    while core.has_work:
        core.step()
    gives.offers.end(offered.lease, "released")
    core.run_called()
    parts.close()
    logged = list(read_frames(log_parts(tmp_path)))
    steps = list(read_log(logged)[1])
    assert sum(isinstance(event, Held) for step in steps for event in step.events) >= 3
    assert not any(isinstance(event, Held) for step in steps for event in step.during)
    assert first_difference(logged) is None

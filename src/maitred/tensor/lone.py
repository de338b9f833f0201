"""An engine without a language model: its scheduler has lanes alone, and no prompt fits it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from maitred.config import EngineConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.decisions.codec import Header
from maitred.decisions.files import DecisionLogFile
from maitred.decisions.log import Recorder
from maitred.engine.loop import LoadedEngine
from maitred.engine.memory import MemoryPlan
from maitred.engine.model_facts import ModelFacts
from maitred.kv.manager import KVCacheManager
from maitred.kv.prefix_cache import TokenHasher
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.scheduler import Scheduler


def lone_scheduler(config: SchedulerConfig) -> Scheduler:
    kv = KVCacheManager(num_blocks=1, block_size=1, hasher=TokenHasher(1, ""), enable_prefix_caching=False)
    return Scheduler(config, kv)


class _NoExecutor:
    """Executor without plans."""

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        raise AssertionError("an engine without a language model has no steps")

    def close(self) -> None:
        """Do nothing: there is nothing to give back."""


def lone_engine(config: EngineConfig, tell: Callable[[str], None]) -> LoadedEngine:
    log = _decision_log(config)
    scheduler = lone_scheduler(config.scheduler)
    core = EngineCore(scheduler, _NoExecutor(), WallClock(), Recorder(log.write) if log is not None else None)
    plan = MemoryPlan(
        available_bytes=0,
        weights_bytes=0,
        bytes_per_block=0,
        block_size=1,
        num_blocks=1,
        max_model_len=2,
        model_context=1,
        longest_context=1,
    )
    return LoadedEngine(core, _facts(), plan, deterministic=True, close=log.close if log is not None else core.close)


def _facts() -> ModelFacts:
    return ModelFacts(
        tokenizer_folder="",
        chat_template=None,
        names=(),
        max_model_len=2,
        vocab_size=0,
        eos_token_ids=(),
        generation_defaults={},
        created=int(time.time()),
        root="",
        revision="",
        block_size=1,
        footprint=None,
    )


def _decision_log(config: EngineConfig) -> DecisionLogFile | None:
    if config.decision_log is None:
        return None
    header = Header(config=config.scheduler, num_blocks=1, block_size=1, enable_prefix_caching=False)
    sizes = {"max_bytes": config.decision_log_max_bytes, "max_files": config.decision_log_max_files}
    return DecisionLogFile(Path(config.decision_log), header, **sizes)

"""A version of a shelf on its way into service: loaded beside the others, and asked for its golden tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import maitred
from maitred.config import ModelConfig
from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError
from maitred.core.request import RequestSpec, SamplingParams
from maitred.engine.intake import ServedModel, make_requests
from maitred.engine.memory import available_memory_bytes
from maitred.engine.replica import Replica
from maitred.engine.starting import Engine, StartingEngine
from maitred.engine.supervisor import Start
from maitred.model.shelf import ModelRelease, Shelf

logger = logging.getLogger(__name__)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)  # as golden tokens are made


def made_by(model: ServedModel, config: ModelConfig) -> str:
    """All that greedy tokens depend on besides the model's files, in one line."""
    held = model.footprint
    assert held is not None
    formats = f"weights {held.dtype}, head {config.lm_head_dtype}, KV {held.kv_dtype}, {config.tensor_parallel} ranks"
    return f"maitred {maitred.__version__}, {held.executor} {held.isa or held.device}, {formats}"


class StartingRelease(StartingEngine):
    """A version's engine, and what it must repeat before it gets a request."""

    def __init__(
        self,
        shelf: Shelf,
        start: Start,
        release: ModelRelease,
        beside: Iterable[ServedModel] = (),
        half: int | None = 0,
        **how: Any,
    ) -> None:
        """`release` was verified; `how` is as for any engine. `beside` are models in service, whose engines may come to
        use all memory that they planned with, of what was available before the first. `half` of KV tiers is its own;
        None leaves it without, as two others have them.
        """
        self._release, self._model = release, replace(start.config.model, model=str(shelf.folder(release.version)))
        tiers = start.config.tiers
        if half is not None:
            tiers = tiers.of_engine(half, 2)  # each folder has one owner at a time
        elif tiers.kv_disk is not None or tiers.kv_host_bytes:
            tiers = replace(tiers, kv_disk=None, kv_host_bytes=0)
            logger.warning("version %d keeps no KV beside memory: two versions that drain do", release.version)
        planned = sum(each.footprint.weights_bytes + each.footprint.kv_bytes for each in beside if each.footprint)
        share, now = start.config.share, available_memory_bytes()
        first = now if share.available_bytes is None else share.available_bytes
        share = replace(share, available_bytes=max(0, min(now, first - planned)))
        config = replace(start.config, model=self._model, tiers=tiers, share=share)
        names = start.served_model_names or (shelf.root.resolve().name,)
        super().__init__(replace(start, config=config, served_model_names=names), **how)

    def wait(self) -> Engine:
        engine = super().wait()
        engine.model = replace(engine.model, version=self._release.version)
        return engine

    async def checked(self, engine: Engine) -> None:
        """Raises CheckpointError for a version that reads or writes other tokens than it did when it was published."""
        version, golden = f"version {self._release.version}", self._release.golden
        own = made_by(engine.model, self._model)
        specs = [_spec(engine.model, place, told.text) for place, told in enumerate(golden)]
        wrong = [told.text for told, spec in zip(golden, specs, strict=True) if told.prompt != spec.prompt_token_ids]
        if wrong:
            raise CheckpointError(
                f"{version} reads {wrong[0]!r} as other tokens than when it was published; publish it again"
            )
        if self._release.made_by != own:
            words = "%s: its golden tokens were made by %s, and this is %s; they are not compared"
            logger.warning(words, version, self._release.made_by, own)
            return
        outputs = await asyncio.gather(*(_output(engine.replica, spec) for spec in specs))
        wrong = [told.text for told, output in zip(golden, outputs, strict=True) if told.output != output]
        if wrong:
            raise CheckpointError(
                f"{version} gives other tokens than when it was published, after {len(wrong)} of {len(golden)} texts "
                f"({wrong[0]!r}); publish it again"
            )


def _spec(model: ServedModel, place: int, text: str) -> RequestSpec:
    now = WallClock().now()
    (spec,) = make_requests(model, text, GREEDY, request_id=f"golden-{place}", now=now, cache_salt="golden")
    return spec


async def _output(replica: Replica, spec: RequestSpec) -> tuple[int, ...]:
    return tuple([token async for progress in replica.submit(spec)[0] for token in progress.new_token_ids])

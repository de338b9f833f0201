"""What is asked of an engine between two steps, one method a question; the questions stand in `queries`."""

from __future__ import annotations

from maitred.config import SchedulerConfig
from maitred.engine.live_view import LiveView
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.queries import (
    CLEAR_KV,
    INTRODUCE_ADAPTER,
    KV_TIERS,
    LIVE_VIEW,
    POLICY_NAMES,
    QUEUE_VIEW,
    SCHEDULER_CONFIG,
    AdapterFolder,
    Nothing,
    QueuePage,
)
from maitred.engine.questions import Questions
from maitred.replica import TierView
from maitred.scheduler.queue_view import QueueView


class AsksEngine:
    """The half of an `EngineClient` that asks its engine and changes nothing here."""

    _questions: Questions

    async def queue_view(self, *, offset: int, limit: int) -> QueueView:
        """Who waits, as it stands between two steps. Raises EngineDead."""
        return await self._questions.ask(QUEUE_VIEW, QueuePage(offset, limit))

    async def live_view(self) -> LiveView:
        """Slots, queue and blocks, as they stand between two steps. Raises EngineDead."""
        return await self._questions.ask(LIVE_VIEW, Nothing())

    async def scheduler_config(self) -> SchedulerConfig:
        return await self._questions.ask(SCHEDULER_CONFIG, Nothing())

    async def policy_names(self) -> tuple[str, ...]:
        return await self._questions.ask(POLICY_NAMES, Nothing())

    async def kv_tiers(self) -> tuple[TierView, ...]:
        """What outlives requests and restarts; none where nothing does. Raises EngineDead."""
        return await self._questions.ask(KV_TIERS, Nothing())

    async def clear_kv(self) -> int:
        """Empties the tiers; returns when it is done, with how many blocks there were. Raises EngineDead."""
        return await self._questions.ask(CLEAR_KV, Nothing())

    async def introduce_adapter(self, folder: AdapterFolder) -> AdapterFacts:
        """What lies there. Raises CheckpointError, ConfigError or EngineDead."""
        return await self._questions.ask(INTRODUCE_ADAPTER, folder)

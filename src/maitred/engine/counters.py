"""Counters of an engine's client: of all engines it has had so far; gauges are of the present one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from maitred.cost_model import CostModel
from maitred.engine.frames import Figures, counted
from maitred.engine.supervisor import Supervisor
from maitred.replica import ReplicaState
from maitred.request import Charges, FinishReason
from maitred.step import RequestProgress


@dataclass(slots=True)
class Totals:
    """Counters that must equal the ledger's sums, counted from the same frames over all engines."""

    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    num_resumed: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count(self, progress: Iterable[RequestProgress]) -> None:
        for item in progress:
            self.num_generated_tokens += len(item.new_token_ids)
            if item.finish_reason is not None:
                self.num_finished[item.finish_reason] += 1

    def charge(self, before: Charges, now: Charges | None) -> None:
        """A request's prompt counts once, when its first charges come."""
        if now is not None and now.num_prompt_tokens and not before.num_prompt_tokens:
            self.num_prompt_tokens += now.num_prompt_tokens
            self.num_prefix_hit_tokens += now.num_cached_tokens


@dataclass(slots=True)
class Counters:
    """What engines told, and what the client counted of it."""

    totals: Totals = field(default_factory=Totals)
    figures: Figures = field(default_factory=Figures)  # of the present engine
    past: Figures = field(default_factory=Figures)  # counters of those before it

    def keep(self) -> None:
        """The next engine counts from nothing; the gauges are of nobody meanwhile."""
        self.past = Figures(**counted(self.figures, self.past))
        self.figures = Figures(num_blocks=self.figures.num_blocks)

    @property
    def pull_bytes_per_s(self) -> float | None:
        """At which the present engine got KV of others; None before it did."""
        pulled = self.figures.handovers
        return sum(pulled.num_bytes.values()) / pulled.seconds if pulled.seconds else None

    @property
    def step_costs(self) -> CostModel | None:
        """As the present engine has measured them."""
        return self.figures.step_costs

    def state(self, supervisor: Supervisor, *, num_live: int, news_age_s: float) -> ReplicaState:
        """`num_live` requests are with the client, which last heard of a step `news_age_s` ago."""
        figures, totals = self.figures, self.totals
        error = supervisor.why_not_alive
        return ReplicaState(
            alive=error is None,
            error=error,
            loading=not (supervisor.ready or supervisor.sleep.asleep or supervisor.over or supervisor.stopping),
            asleep=not supervisor.ready and supervisor.sleep.asleep,
            num_running=figures.num_running,
            num_waiting=figures.num_waiting if supervisor.ready else num_live,
            num_blocks=figures.num_blocks,
            num_blocks_used=figures.num_blocks_used,
            num_blocks_cached=figures.num_blocks_cached,
            prefill_tokens_per_s=figures.prefill_tokens_per_s,
            decode_tokens_per_s=figures.decode_tokens_per_s,
            adapter_bytes=figures.adapter_bytes,
            num_prompt_tokens=totals.num_prompt_tokens,
            num_prefix_queried_tokens=totals.num_prompt_tokens,
            num_prefix_hit_tokens=totals.num_prefix_hit_tokens,
            num_generated_tokens=totals.num_generated_tokens,
            num_finished=dict(totals.num_finished),
            last_step_age_s=news_age_s if num_live else 0.0,
            heartbeat_age_s=supervisor.silent_s,
            num_restarts=supervisor.num_restarts,
            num_sleeps=supervisor.sleep.num_sleeps,
            wake_s=supervisor.sleep.wake_s,
            num_resumed=totals.num_resumed,
            num_wrong_frames=supervisor.num_wrong_frames,
            **counted(figures, self.past),
        )

"""A real engine that says what a test wants, behind the real server, for a browser to look at."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from maitred.core.clock import WallClock
from maitred.core.step import ModelOutput, SchedulerOutput
from maitred.engine.intake import ServedModel
from maitred.scheduler.engine_core import EngineCore
from maitred.scheduler.speculation import NumDrafts
from tests.engine.worlds import client_of
from tests.fakes import FakeExecutor, make_scheduler
from tests.fakes_api import EOS, RunningServer, make_model, running_server
from tests.waiting import HANGS_S

FOREVER = "and so on, and so on, "  # said again and again, without an end
BLOCK_SIZE = 16
CONTEXT = 200_000  # tokens; nothing that a test waits for lasts so long


class Saying(FakeExecutor):
    """Each answer is `text`, a byte at a time; `repeats` never ends it. A step takes at least `step_s`."""

    may_step = threading.Event()  # cleared, the step under way does not end
    may_step.set()

    def __init__(self, text: str, *, repeats: bool = False, step_s: float = 0.0) -> None:
        super().__init__(self._said)
        self._tokens = [*text.encode()] if repeats else [*text.encode(), EOS]
        self._step_s = step_s

    def _said(self, request_id: str, position: int) -> int:
        place = position - self._requests[request_id].num_prompt_tokens
        return self._tokens[place % len(self._tokens)]

    def execute(self, plan: SchedulerOutput) -> ModelOutput:
        self.may_step.wait(HANGS_S)
        time.sleep(self._step_s)  # so that what never ends leaves time for others
        return super().execute(plan)


def page_model(**fields: Any) -> ServedModel:
    return make_model(**{"max_model_len": CONTEXT, "block_size": BLOCK_SIZE, **fields})


@contextmanager
def serving(
    text: str,
    *,
    repeats: bool = False,
    num_slots: int = 4,
    num_blocks: int = 60_000,
    num_drafts: NumDrafts | None = None,
    **server: Any,
) -> Iterator[RunningServer]:
    """`running.replica` is the engine."""
    scheduler = make_scheduler(
        max_num_seqs=num_slots,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
        num_drafts=num_drafts,
    )
    clock = WallClock()
    executor = Saying(text, repeats=repeats, step_s=0.004 if repeats else 0.0)
    engine = client_of(EngineCore(scheduler, executor, clock))
    with running_server(engine, page_model(max_num_seqs=num_slots), **server) as running:
        try:
            yield running
        finally:
            engine.stop()

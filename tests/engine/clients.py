"""Clients of the fake engine over either transport, and following what they give."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from maitred.config import EngineConfig, ProcessConfig, SchedulerConfig
from maitred.core.clock import WallClock
from maitred.core.request import RequestSpec, SamplingParams
from maitred.core.step import RequestProgress
from maitred.engine.child_process import in_child_process
from maitred.engine.client import EngineClient
from maitred.engine.engine_thread import in_thread
from maitred.engine.frames import OpenTransport
from maitred.engine.live_requests import LiveRequest
from maitred.engine.supervisor import Start
from tests.engine.fake_child import Habits, build_fake, command
from tests.fakes import make_spec

PROMPT, POISON = [1, 2, 3, 4, 5, 6], [1, 13]
TRANSPORTS: dict[str, Callable[[str], OpenTransport]] = {
    "thread": lambda habits: in_thread(build_fake(Habits.read(habits))),
    "process": lambda habits: in_child_process(command(habits)),
}


def start_of(
    habits: str = "", scheduler: SchedulerConfig | None = None, *, transport: str = "process", **process: Any
) -> Start:
    config = EngineConfig(scheduler=scheduler or SchedulerConfig())
    return Start(config=config, process=ProcessConfig(**process), open=TRANSPORTS[transport](habits))


@asynccontextmanager
async def running_client(
    habits: str = "",
    scheduler: SchedulerConfig | None = None,
    *,
    transport: str = "process",
    on_admitted: Callable[[LiveRequest], None] | None = None,
    **process: Any,
) -> AsyncIterator[EngineClient]:
    """Ready; closed at the end."""
    start = start_of(habits, scheduler, transport=transport, **process)
    client = EngineClient(start, WallClock(), on_admitted=on_admitted)
    client.start()
    try:
        yield client
    finally:
        await client.close()


def ask(request_id: str = "r", prompt: list[int] = PROMPT, max_tokens: int = 60, **fields: Any) -> RequestSpec:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **fields.pop("sampling", {}))
    return make_spec(request_id, prompt=prompt, max_tokens=max_tokens, sampling=sampling, **fields)


async def follow(
    client: EngineClient, spec: RequestSpec, at: dict[int, Callable[[], Awaitable[object]]] | None = None
) -> list[RequestProgress]:
    """All progress; after so many tokens, something happens."""
    told, num_tokens, left = [], 0, dict(at or {})
    async for progress in client.submit(spec)[0]:
        told.append(progress)
        num_tokens += len(progress.new_token_ids)
        for count in [count for count in left if num_tokens >= count]:
            await left.pop(count)()
    return told


def tokens(told: list[RequestProgress]) -> list[int]:
    return [token for progress in told for token in progress.new_token_ids]

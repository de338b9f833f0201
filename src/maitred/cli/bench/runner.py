"""Sends the planned requests: at their times whatever the server does (open loop), or so many at once (closed loop)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from maitred.cli.bench.client import LoadClient
from maitred.cli.bench.prompts import PlannedRequest
from maitred.cli.bench.record import Record

PAUSE_AFTER_FAILURE_S = 0.1  # in a closed loop, so that a server that refuses at once is not hammered


@dataclass(slots=True)
class LoadProgress:
    """The run so far, for display."""

    num_sent: int = 0
    peak_in_flight: int = 0
    records: list[Record] = field(default_factory=list)

    @property
    def num_in_flight(self) -> int:
        return self.num_sent - len(self.records)


class LoadRun:
    """One run against one server. `stop` ends it early: nothing more is sent, what is in flight is dropped."""

    def __init__(self, client: LoadClient, plan: Iterator[PlannedRequest], *, duration_s: float | None = None) -> None:
        self._client = client
        self._plan = plan
        self._duration_s = duration_s
        self._tasks: set[asyncio.Task[Record]] = set()
        self._main: asyncio.Task[None] | None = None
        self.progress = LoadProgress()
        self.stopped = False

    async def open_loop(self) -> None:
        self._main = asyncio.ensure_future(self._send_when_due())
        await self._finish()

    async def closed_loop(self, concurrency: int) -> None:
        self._main = asyncio.ensure_future(self._keep_busy(concurrency))
        await self._finish()

    def stop(self) -> None:
        self.stopped = True
        for task in [self._main, *self._tasks]:
            if task is not None:
                task.cancel()

    async def _finish(self) -> None:
        assert self._main is not None
        await asyncio.wait([self._main])
        if self._tasks:
            await asyncio.wait(self._tasks)
        if not self._main.cancelled():
            self._main.result()

    async def _send_when_due(self) -> None:
        for request in self._plan:
            if self._duration_s is not None and request.due_s > self._duration_s:
                return
            body = self._client.form.encode(request)  # before the wait, so that it delays nothing
            await asyncio.sleep(max(0.0, request.due_s - self._client.now()))
            task = asyncio.create_task(self._send(request, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _keep_busy(self, concurrency: int) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(self._work())

    async def _work(self) -> None:
        for request in self._plan:  # the workers share one iterator
            if self._duration_s is not None and self._client.now() > self._duration_s:
                return
            due_now = replace(request, due_s=self._client.now())
            record = await self._send(due_now, self._client.form.encode(due_now))
            if not record.ok:
                await asyncio.sleep(PAUSE_AFTER_FAILURE_S)

    async def _send(self, request: PlannedRequest, body: bytes) -> Record:
        progress = self.progress
        progress.num_sent += 1
        progress.peak_in_flight = max(progress.peak_in_flight, progress.num_in_flight)
        record = await self._client.send(request, body)
        progress.records.append(record)
        return record

"""Asks the lines of a batch, many at once, and hands each answer to the output as it comes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec

from maitred.cli.endpoint import Endpoint, TimedOut
from maitred.cli.run.lines import BadLine, BatchRequest, InputLine, answer_line, error_line, read_request

RETRIED = {429, 503, 529}  # "not now": asked again, so that a full queue costs no line its answer
MAX_ATTEMPTS = 8
MAX_WAIT_S = 30.0


@dataclass(slots=True)
class Tally:
    """Counts of this run's lines, by how they ended."""

    num_answered: int = 0
    num_failed: int = 0
    num_output_tokens: int = 0
    failures: Counter[str] = field(default_factory=Counter)

    def failed(self, kind: str) -> None:
        self.num_failed += 1
        self.failures[kind] += 1


@dataclass(slots=True)
class Batch:
    """One run over the lines that have no answer yet."""

    endpoint: Endpoint
    source: BinaryIO
    write: Callable[[bytes], None]
    on_done: Callable[[], None] = lambda: None
    tally: Tally = field(default_factory=Tally)

    async def answer_all(self, lines: Iterable[InputLine], *, concurrency: int) -> None:
        """Raises Unreachable when the server is gone: lines without an answer stay for the next run."""
        waiting = iter(lines)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(concurrency):
                    workers.create_task(self._work(waiting))
        except ExceptionGroup as group:  # not `except*`, which would wrap what is raised in another
            raise group.exceptions[0] from None

    async def _work(self, waiting: Iterable[InputLine]) -> None:
        for line in waiting:  # the workers share one iterator
            self.write(await self._answer(line))
            self.on_done()

    async def _answer(self, line: InputLine) -> bytes:
        try:
            request = read_request(self.source, line)
            status, headers, body = await self._ask(request)
        except BadLine as error:
            self.tally.failed(error.code)
            return error_line(line, error)
        answer = _decoded(body)
        if status == 200:
            self.tally.num_answered += 1
            self.tally.num_output_tokens += _output_tokens(answer)
        else:
            self.tally.failed(f"HTTP {status}")
        return answer_line(line, status, headers, answer)

    async def _ask(self, request: BatchRequest) -> tuple[int, dict[str, str], bytes]:
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self.endpoint.post(request.url, request.body) as reply:
                    body = await reply.read()
            except TimedOut as error:
                raise BadLine("timeout", str(error)) from None
            if reply.status not in RETRIED or attempt == MAX_ATTEMPTS:
                return reply.status, dict(reply.headers), body
            await asyncio.sleep(_wait_s(reply.headers.get("retry-after"), attempt))


def _wait_s(retry_after: str | None, attempt: int) -> float:
    """Seconds to wait: as the server asks, else half a second doubled each time."""
    try:
        asked = float(retry_after or "")
    except ValueError:
        asked = 0.25 * 2**attempt
    return min(max(asked, 0.05), MAX_WAIT_S)


def _decoded(body: bytes) -> object:
    """JSON as JSON; what is none (a proxy's page) as text, so that the output stays readable."""
    try:
        found: object = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")
    return found


def _output_tokens(answer: object) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return int(usage.get("completion_tokens") or 0) if isinstance(usage, dict) else 0

"""Batches: their lines go through the server's own routes, class background, and each answer is stored as it comes.

A batch is an entry of the store with its lines in parts: those that wait, as they were sent, and answers. Whatever ends
the process, the next one goes on with the lines that wait.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from codecs import BOM_UTF8
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from maitred.api.batch_lines import RETRIED, BadLine, answer_line, error_line, read_line, told_body, wait_s
from maitred.api.dialects.openai import batch_schemas as s
from maitred.api.generate.dialect import HEADERS, MAX_MS
from maitred.api.http.auth import KeyHolder
from maitred.api.http.service import Service
from maitred.core.errors import RateLimited, Unavailable
from maitred.storage.state import PAGE_BYTES, ContentPiece, EntryKey, StateStore
from maitred.tenancy.caller import Caller

logger = logging.getLogger("maitred.batches")
T = TypeVar("T")
WAITING, ANSWERED, FAILED = 0, 1, 2  # parts of a batch's entry
MAX_LINES = 100_000
MAX_LINE_BYTES = 64 * 1024  # beside the body, which has the server's limit
MAX_FAULTS = 100  # told of one input
UNKNOWN_SLOTS, MORE_IN_FLIGHT = 64, 8  # lines beyond the engine's slots, so that none is free between two of them
MAX_UNFINISHED = 64  # batches of a tenant
LIFE_S = 30 * 24 * 3600  # of batches' files, in and out, where the client names none
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
AGAIN_S = 1.0  # between two tries to write where the disk is full


class BatchRecord(msgspec.Struct):
    """A batch as it is stored."""

    batch: s.BatchObject
    holder: KeyHolder
    life_s: int  # of its files, or of itself where lines came without one
    num_left_out: int = 0  # lines that were not asked

    @property
    def key(self) -> EntryKey:
        return EntryKey("batch" if self.batch.input_file_id else "message_batch", self.batch.id, self.holder.tenant)


class BatchRunner:
    """Runs the batches of one service that are not finished, on its event loop."""

    def __init__(self, app: Service) -> None:
        self.app, self.store = app, app.stored
        self.runs: dict[str, RunningBatch] = {}
        self.num_in_flight = 0  # lines there may be, of all batches
        self.slots = asyncio.Semaphore(0)
        self.metrics = app.observer.metrics

    async def create(
        self,
        caller: Caller,
        lines: Sequence[ContentPiece] = (),
        *,
        life_s: int,
        completion_window: str,
        input_file_id: str = "",
        **of_batch: Any,
    ) -> BatchRecord:
        """Store a batch, with its lines where it has no file, and run it. Raises RateLimited, Unavailable."""
        now, holder = _now(), KeyHolder(caller.tenant.name, caller.key_id, caller.is_admin)
        batch = s.BatchObject(
            input_file_id=input_file_id,
            completion_window=completion_window,
            created_at=now,
            expires_at=now + int(completion_window[:-1]) * _SECONDS[completion_window[-1]],
            status="validating" if input_file_id else "in_progress",
            request_counts=s.RequestCounts(total=len(lines)),
            **of_batch,
        )
        record = BatchRecord(batch, holder, life_s)
        mine = sum(run.record.holder.tenant == holder.tenant for run in self.runs.values())
        if mine >= MAX_UNFINISHED:
            text = f"{mine} batches are not finished, the most there may be at once; wait for one, or cancel one"
            raise RateLimited(text, limit="batches", retry_after_s=60.0)
        if self.app.in_flight.draining:
            raise Unavailable("the server is shutting down; try again")

        def put() -> None:
            with self.store.together():
                self.store.put(*record.key, msgspec.json.encode(record), now=time.time(), busy=True)
                self.store.add(record.key, lines, WAITING)

        await asyncio.to_thread(put)
        self.start(record)
        return record

    def start(self, record: BatchRecord) -> None:
        """Run a batch that is stored, from wherever it is."""
        admission = self.app.gate.admission
        most = (admission.num_slots if admission is not None else UNKNOWN_SLOTS) + MORE_IN_FLIGHT
        while self.num_in_flight < most:
            self.slots.release()
            self.num_in_flight += 1
        run = self.runs[record.batch.id] = RunningBatch(self, record)
        run.task = asyncio.create_task(run.run())
        run.task.add_done_callback(lambda task: self._ended(record.batch.id))
        self.metrics.num_batches = len(self.runs)

    def _ended(self, batch_id: str) -> None:
        del self.runs[batch_id]
        self.metrics.num_batches = len(self.runs)

    def resume(self) -> None:
        """Go on with what an earlier process did not finish."""
        for entry in (*self.store.busy("batch"), *self.store.busy("message_batch")):
            self.start(msgspec.json.decode(entry.about, type=BatchRecord))

    def close(self) -> None:
        for run in self.runs.values():
            run.task.cancel()


def batches_of(app: Service) -> BatchRunner:
    """The service's runner of batches, made at its first use."""
    if "batches" not in app.lasting:
        app.lasting["batches"] = BatchRunner(app)
    found: BatchRunner = app.lasting["batches"]
    return found


class Answered(NamedTuple):
    """A line's answer, to be stored in its part."""

    number: int
    part: int
    text: bytes
    used: list[int] | None = None  # tokens, as `_read_usage` tells


class RunningBatch:
    """One batch from where it is to its end. On the event loop, but for the store's work."""

    task: asyncio.Task[None]

    def __init__(self, batches: BatchRunner, record: BatchRecord) -> None:
        self._batches, self._app, self._store = batches, batches.app, batches.store
        self.record, self._key = record, record.key
        self.trouble: str | None = None  # why nothing can be stored at the moment
        self._window: asyncio.Timeout | None = None  # around the lines' work
        self._page: deque[ContentPiece] = deque()  # of lines that wait
        self._again: deque[ContentPiece] = deque()  # refused for now
        self._read_up_to, self._num_refused, self._refused_until = -1, 0, 0.0
        self._answered: list[Answered] = []  # and not stored yet
        self._reading, self._storing = asyncio.Lock(), asyncio.Lock()

    async def run(self) -> None:
        batch = self.record.batch
        try:
            if batch.status == "validating":
                await self._validate()
            if batch.status == "in_progress":
                await self._answer_all()
            if batch.status != "failed" and not self._app.in_flight.draining:
                await self._finish()
        except Exception as error:  # a fault of ours costs one batch, not the server
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not isinstance(error, Unavailable):
                logger.exception("batch %s failed", batch.id)
            await self._fail([s.BatchFault(code="internal_error", message=str(error))])

    async def cancel(self) -> None:
        """End the work; answers that came are kept. Raises Unavailable where that cannot be stored."""
        batch = self.record.batch
        if batch.status in ("validating", "in_progress"):
            batch.status, batch.cancelling_at = "cancelling", _now()
            if self._window is not None and not self._window.expired():
                self._window.reschedule(0.0)
            if self.trouble is not None:
                raise Unavailable(self.trouble)
            async with self._storing:
                if batch.status == "cancelling":  # and not at its end meanwhile
                    await asyncio.to_thread(self._put, msgspec.json.encode(self.record))

    # -- its input

    async def _validate(self) -> None:
        batch = self.record.batch
        faults = await self._stored(self._read_input)
        if faults:
            await self._fail(faults)
        elif batch.status == "validating":  # and not cancelled meanwhile
            batch.status, batch.in_progress_at = "in_progress", _now()
            await self._stored(self._put, msgspec.json.encode(self.record))

    def _read_input(self) -> list[s.BatchFault]:
        """Copy the lines of the input, which may be deleted from then on; gives what is wrong with them."""
        batch, faults, seen = self.record.batch, list[s.BatchFault](), dict[str, int]()
        found, num_bytes = list[ContentPiece](), 0
        try:
            for number, text in input_lines(self._store, self.record, self._app.config.max_body_bytes + MAX_LINE_BYTES):
                try:
                    custom_id = read_line(text, number, (batch.endpoint,)).custom_id
                    if (first := seen.setdefault(custom_id, number)) != number:
                        where = f"line {first} and again in line {number}; give each line its own"
                        raise BadLine("duplicate_custom_id", f"custom_id {custom_id!r} stands in {where}")
                except BadLine as bad:
                    faults.append(s.BatchFault(code=bad.code, message=str(bad), line=number))
                found.append(ContentPiece(number, text))
                num_bytes += len(text)
                if num_bytes >= PAGE_BYTES:
                    self._store.add(self._key, found, WAITING)
                    found, num_bytes = [], 0
                if len(seen) > MAX_LINES:
                    raise BadLine("too_many_lines", f"the input has over {MAX_LINES} lines; send several batches")
                if len(faults) == MAX_FAULTS:
                    return faults
            self._store.add(self._key, found, WAITING)
            if not seen and not faults:
                raise BadLine("empty_file", "the input has no line")
        except BadLine as bad:
            faults.append(s.BatchFault(code=bad.code, message=str(bad), param="input_file_id"))
        batch.request_counts.total = len(seen)
        return faults

    # -- its lines

    async def _answer_all(self) -> None:
        """Ask every line that waits, until the window ends, a client cancels, or the server is told to stop."""
        left_s = max(0.0, self.record.batch.expires_at - time.time())
        try:
            async with asyncio.timeout(left_s) as self._window, asyncio.TaskGroup() as workers:
                for _ in range(self._batches.num_in_flight):
                    workers.create_task(self._work())
        except TimeoutError:
            pass
        await self._store_answers()

    async def _work(self) -> None:
        while not self._app.in_flight.draining:
            if (pause_s := self._refused_until - time.monotonic()) > 0:
                await asyncio.sleep(pause_s)
                continue
            async with self._batches.slots:
                line = await self._next()
                if line is None:
                    return
                await self._ask(line)

    async def _next(self) -> ContentPiece | None:
        async with self._reading:
            if self._again:
                return self._again.popleft()
            if not self._page:
                more = await asyncio.to_thread(self._store.pieces, self._key, WAITING, after=self._read_up_to)
                self._page.extend(more)
                self._read_up_to = more[-1].number if more else self._read_up_to
            return self._page.popleft() if self._page else None

    async def _ask(self, line: ContentPiece) -> None:
        """Ask a line once; its answer is stored when this returns."""
        batch, number = self.record.batch, line.number
        asked = read_line(line.content, number, (batch.endpoint,))
        left_ms = min(MAX_MS, max(1, round(1000 * (batch.expires_at - time.time()))))
        headers = [
            (b"content-type", b"application/json"),
            (b"x-request-id", f"{batch.id}-{number}".encode()),
            (HEADERS["timeout_ms"].encode(), b"%d" % left_ms),
        ]
        caller = partial(self._app.authenticator.in_background, self.record.holder)
        status, told, body = await self._app.ask(asked.url, headers, asked.body, caller)
        if status in RETRIED and told.get("x-should-retry") != "false":
            self._num_refused += 1
            self._refused_until = time.monotonic() + wait_s(told.get("retry-after"), self._num_refused)
            self._again.append(line)
            return
        self._num_refused = 0
        used = _read_usage(body)
        shown = told_body(body) if used is None or b"\n" in body else msgspec.Raw(body)
        text = answer_line(number, asked.custom_id, status, told.get("x-request-id", ""), shown)
        self._answered.append(Answered(number, ANSWERED if status == 200 else FAILED, text, used))
        await asyncio.shield(self._store_answers())  # whatever ends this work, what is counted is stored

    async def _store_answers(self) -> None:
        """Store what was answered until now, by all workers."""
        async with self._storing:
            taken, self._answered = self._answered, []
            if taken:
                await self._stored(self._put_answers, taken, self._counted(taken))

    def _counted(self, answers: Sequence[Answered]) -> bytes:
        """The record with these answers counted."""
        counts, usage = self.record.batch.request_counts, self.record.batch.usage
        num_good = sum(answer.part == ANSWERED for answer in answers)
        counts.completed += num_good
        counts.failed += len(answers) - num_good
        self._batches.metrics.batch_lines["answered"] += num_good
        self._batches.metrics.batch_lines["failed"] += len(answers) - num_good
        for answer in answers:
            prompt, cached, output, reasoning = answer.used or (0, 0, 0, 0)
            usage.input_tokens += prompt
            usage.input_tokens_details["cached_tokens"] += cached
            usage.output_tokens += output
            usage.output_tokens_details["reasoning_tokens"] += reasoning
            usage.total_tokens += prompt + output
        return msgspec.json.encode(self.record)

    def _put_answers(self, answers: Sequence[Answered], about: bytes) -> None:
        with self._store.together():
            self._store.clear(self._key, WAITING, [answer.number for answer in answers])  # room for what follows
            for part in (ANSWERED, FAILED):
                of_part = (ContentPiece(answer.number, answer.text) for answer in answers if answer.part == part)
                self._store.add(self._key, of_part, part)
            self._put(about)

    def _put(self, about: bytes, *, expires_at: float | None = None, busy: bool = True) -> None:
        self._store.put(*self._key, about, now=time.time(), expires_at=expires_at, busy=busy)

    # -- its end

    async def _finish(self) -> None:
        """Write off the lines that still wait, and make files of the answers."""
        batch = self.record.batch
        if batch.status == "cancelling":
            why = BadLine("batch_cancelled", "This request was not executed before the batch was cancelled.")
        else:
            why = BadLine("batch_expired", "This request could not be executed before the completion window expired.")
        await self._stored(self._write_off, why)
        async with self._storing:
            if batch.status == "cancelling":
                batch.status, batch.cancelled_at = "cancelled", _now()
            elif self.record.num_left_out:
                batch.status, batch.expired_at = "expired", _now()
            else:
                batch.status, batch.finalizing_at, batch.completed_at = "completed", _now(), _now()
            await self._stored(self._put_end)

    def _write_off(self, why: BadLine) -> None:
        """Give an error line to every line that waits."""
        while page := self._store.pieces(self._key, WAITING):
            asked = [read_line(line.content, line.number, (self.record.batch.endpoint,)) for line in page]
            lines = zip(page, asked, strict=True)
            left = [Answered(at.number, FAILED, error_line(at.number, of.custom_id, why)) for at, of in lines]
            self.record.num_left_out += len(left)
            self._put_answers(left, self._counted(left))

    async def _fail(self, faults: list[s.BatchFault]) -> None:
        batch = self.record.batch
        async with self._storing:
            batch.status, batch.failed_at, batch.errors = "failed", _now(), s.BatchFaults(data=faults)
            await self._stored(self._put_end)

    def _put_end(self) -> None:
        """Store the end of a batch, and of its answers the files, all or nothing."""
        batch = self.record.batch
        with self._store.together():
            self._store.clear(self._key, WAITING)
            expires_at = None if batch.input_file_id else float(batch.created_at + self.record.life_s)
            if batch.input_file_id:
                batch.output_file_id = self._make_file("output", ANSWERED)
                batch.error_file_id = self._make_file("error", FAILED)
            self._put(msgspec.json.encode(self.record), expires_at=expires_at, busy=False)

    def _make_file(self, name: str, part: int) -> str | None:
        num_bytes = self._store.size(self._key, part)
        if not num_bytes:
            return None
        file = new_file(num_bytes, f"{self.record.batch.id}_{name}.jsonl", "batch_output", self.record.life_s)
        key = self._key._replace(kind="file", id=file.id)
        self._store.put(*key, msgspec.json.encode(file), now=file.created_at, expires_at=file.expires_at)
        self._store.move(self._key, part, key)
        return file.id

    async def _stored(self, work: Callable[..., T], *args: Any) -> T:
        """Have the store do `work` in a thread, again and again while the disk is full. Raises Unavailable where the
        store is memory, in which a batch under way makes no room."""
        while True:
            try:
                done = await asyncio.to_thread(work, *args)
            except Unavailable as error:
                if self._app.config.state_dir is None:
                    raise
                if self.trouble is None:
                    logger.error("batch %s waits: %s", self.record.batch.id, error)
                self.trouble = str(error)
                await asyncio.sleep(AGAIN_S)
            else:
                self.trouble = None
                return done


def input_lines(store: StateStore, record: BatchRecord, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and text of each line of a batch's input that is not blank. Raises BadLine for a line over
    `max_bytes`, and for a file that is gone, or goes meanwhile."""
    key = record.key._replace(kind="file", id=record.batch.input_file_id)
    gone = BadLine("file_not_found", f"the file {key.id} was deleted before it was read")
    if (entry := store.get(*key, time.time())) is None:
        raise gone
    num_left, number, after, rest = msgspec.json.decode(entry.about, type=s.FileObject).bytes, 0, -1, b""
    while page := store.pieces(key, after=after):
        after, came = page[-1].number, b"".join(piece.content for piece in page)
        num_left -= len(came)
        *lines, rest = (rest + came).split(b"\n")
        for line in [*lines, rest] if not num_left else lines:
            number += 1
            text = line.removeprefix(BOM_UTF8) if number == 1 else line
            if text.strip():
                yield number, text
        if len(rest) > max_bytes:
            raise BadLine(
                "line_too_long", f"line {number + 1} has over {max_bytes} bytes, the most that a line may have"
            )
    if num_left:
        raise gone


class _WithUsage(msgspec.Struct):
    usage: dict[str, Any] | None = None


_USAGE = msgspec.json.Decoder(_WithUsage)
_COUNTS = (  # as chats and as responses call them
    ("prompt_tokens", "input_tokens"),
    ("cached_tokens",),
    ("completion_tokens", "output_tokens"),
    ("reasoning_tokens",),
)


def _read_usage(body: bytes) -> list[int] | None:
    """Tokens of an answer, in the order of _COUNTS, 0 where it does not say; None for what is no JSON object."""
    try:
        told = _USAGE.decode(body).usage or {}
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    for details in [value for value in told.values() if isinstance(value, dict)]:
        told |= details
    return [next((told[name] for name in names if isinstance(told.get(name), int)), 0) for names in _COUNTS]


def new_file(num_bytes: int, filename: str, purpose: str, life_s: int | None) -> s.FileObject:
    """A file that begins now."""
    id, now = new_id("file-"), _now()
    file = s.FileObject(id=id, bytes=num_bytes, created_at=now, filename=filename, purpose=purpose)
    file.expires_at = None if life_s is None else now + life_s
    return file


def new_id(prefix: str) -> str:
    return prefix + secrets.token_hex(16)


def _now() -> int:
    return int(time.time())

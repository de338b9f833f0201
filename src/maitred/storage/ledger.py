"""The ledger: one SQLite row per request id, whose sums are the engine's own token counters.

A thread of its own reads the live requests twice a second and writes what changed in one transaction, so neither the
engine nor the event loop ever waits for a disk. A request's row is opened with the first transaction that sees it,
brought up to date by the following ones, and closed once with the final counts; a trigger refuses any change after
that. A process that was killed leaves open rows that are at most one checkpoint old; the next one closes them as they
stand, so nothing is counted twice and at most a checkpoint's worth of tokens is missing. A file that is deleted, moved
or overwritten while the server runs is told of and begun anew.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from maitred.core.errors import Unavailable
from maitred.core.request import NO_CHARGES, Charges, FinishReason, Terms
from maitred.storage import ledger_file
from maitred.tenancy.tenant import tier_of_priority
from maitred.tenancy.usage import UsageKey, UsageQuery, UsageSum

logger = logging.getLogger(__name__)

CHECKPOINT_S = 0.5
_UNWRITABLE = (OverflowError, UnicodeError, ValueError, sqlite3.IntegrityError, sqlite3.DataError)
_UPSERT = """
INSERT INTO request VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run, request_id) DO UPDATE SET
    checkpoint_at = excluded.checkpoint_at, closed_at = excluded.closed_at, status = excluded.status,
    prompt_tokens = excluded.prompt_tokens, cached_tokens = excluded.cached_tokens,
    generated_tokens = excluded.generated_tokens, rows = excluded.rows, compute_us = excluded.compute_us
"""


class _Counts(NamedTuple):
    prompt: int
    cached: int
    generated: int
    rows: int
    compute_us: int


class Owned(Protocol):
    """Whose request it is; a `RequestSpec` is one."""

    @property
    def request_id(self) -> str: ...

    @property
    def terms(self) -> Terms: ...

    @property
    def sample_index(self) -> int: ...

    @property
    def adapter(self) -> str:
        """NAME@BYTES of the LoRA adapter that it was for; empty for the model as it is."""


class Metered(Protocol):
    """A request that is followed to its end, as noted by its engine's listener."""

    @property
    def spec(self) -> Owned: ...

    @property
    def charges(self) -> Charges: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason for the end; once it is there the others stand still."""


class _Replayed(NamedTuple):
    """An answer from the result cache, which ended before it began."""

    spec: Owned
    charges: Charges = NO_CHARGES
    num_output_tokens: int = 0
    finish_reason: FinishReason | None = FinishReason.STOP


class _OpenRow:
    """A request that has no closed row yet."""

    __slots__ = ("closed", "model", "opened_at", "request", "row_id", "status", "written")

    def __init__(
        self, request: Metered, opened_at: float, *, model: str | None = None, status: str | None = None
    ) -> None:
        self.request, self.opened_at, self.model = request, opened_at, model
        self.status = status  # in place of how it ended
        self.row_id: str | None = None  # once it has a row
        self.written: _Counts | None = None
        self.closed = False

    def stands_still(self) -> bool:
        """Whether its row says how it is; asked of every request at every look, the thousands in the queue too."""
        request, written = self.request, self.written
        return (
            written is not None
            and request.num_output_tokens == written.generated
            and request.charges.num_prompt_tokens == written.prompt
        )

    def counts(self) -> _Counts:
        charges = self.request.charges
        charged, cached = charges[:2]
        generated = self.request.num_output_tokens
        return _Counts(charged, cached if charged else 0, generated, charges.num_rows, charges.compute_us)


class Ledger:
    """Writes one file; `opened` never waits. Raises ConfigError when the file cannot be used.

    Ids are one to a request within a run, which the edge sees to; a repeated one gets a suffix. A disk that is full
    stops no request: what is not written is kept and tried again. A row that SQLite refuses for its values is named in
    the log and dropped, and the next is written.
    """

    def __init__(
        self,
        path: Path,
        *,
        model: str = "",
        checkpoint_s: float = CHECKPOINT_S,
        wall_time: Callable[[], float] = time.time,
    ) -> None:
        self.path = path
        self.model = model  # as the rows to come name it
        self._checkpoint_s, self._wall_time = checkpoint_s, wall_time
        self._arrived: deque[_OpenRow] = deque()
        self._open: list[_OpenRow] = []
        self._failing = False
        self._is_damaged = False
        self._file: ledger_file.LedgerFile | None = ledger_file.open_ledger(
            path, wall_time()
        )  # None is lost, and not to be had again so far
        self._wakeup = threading.Condition()
        self._num_flushes = self._num_flushed = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="maitred-ledger", daemon=True)
        self._thread.start()

    def opened(self, request: Metered, model: str | None = None) -> None:
        """`request` was taken in by the engine; from now on it is followed to its end. From any thread.

        Of a router each has its own `model`; None is the ledger's.
        """
        self._arrived.append(_OpenRow(request, self._wall_time(), model=model))

    def replayed(self, spec: Owned, model: str | None = None) -> None:
        """`spec` was answered from the result cache: a row that says so, without tokens, for no engine computed any."""
        self._arrived.append(_OpenRow(_Replayed(spec), self._wall_time(), model=model, status=ledger_file.CACHED))

    def flush(self) -> None:
        """Return when everything up to now is on disk, or has failed to be."""
        with self._wakeup:
            self._num_flushes += 1
            target = self._num_flushes
            self._wakeup.notify_all()
            self._wakeup.wait_for(lambda: self._num_flushed >= target or not self._thread.is_alive())

    def close(self) -> None:
        """Write the last counts, those of unfinished requests too, and close the file; idempotent."""
        with self._wakeup:
            self._stopping = True
            self._wakeup.notify_all()
        self._thread.join()

    def spent_tokens(self) -> dict[str, int]:
        """Tokens of each tenant since the ledger began, prompt and generated."""
        with closing(ledger_file.connect(self.path, reading=True)) as db:
            sql = "SELECT tenant, SUM(prompt_tokens + generated_tokens) FROM request GROUP BY tenant"
            return dict(db.execute(sql).fetchall())

    def usage(self, query: UsageQuery) -> list[tuple[int, UsageKey, UsageSum]]:
        """(start of bucket, whose, how much) for every bucket that is not empty. Reads the disk: call it in a thread.

        What ran within the last checkpoint is not in it yet. Raises Unavailable while the file cannot be read.
        """
        columns = ", ".join(name if name in query.group_by else "NULL" for name in UsageKey._fields)
        where, values = ["opened_at >= ?", "opened_at < ?"], [query.start, query.end]
        for name, accepted in query.filters:
            assert name in UsageKey._fields
            where.append(f"{name} IN ({', '.join('?' * len(accepted))})")
            values += accepted  # type: ignore[arg-type]
        width = int(query.width_s)
        sql = (
            f"SELECT MAX({int(query.start)}, CAST(opened_at AS INTEGER) / {width} * {width}) AS bucket, {columns}, "
            "SUM(num_requests), SUM(prompt_tokens), SUM(cached_tokens), SUM(generated_tokens), "
            "SUM(rows), SUM(compute_us) "
            f"FROM request WHERE {' AND '.join(where)} GROUP BY 1, 2, 3, 4, 5"
        )
        try:
            with closing(ledger_file.connect(self.path, reading=True)) as db:
                return [(row[0], UsageKey(*row[1:5]), UsageSum(*row[5:])) for row in db.execute(sql, values)]
        except sqlite3.Error as error:
            raise Unavailable(f"the ledger cannot be read: {error}; try again, or look at the server's log") from None

    # the ledger's thread

    def _run(self) -> None:
        stopping = False
        while not stopping:
            with self._wakeup:
                self._wakeup.wait_for(self._is_wanted, timeout=self._checkpoint_s)
                stopping, flushes = self._stopping, self._num_flushes
            self._checkpoint(last=stopping)
            with self._wakeup:
                self._num_flushed = flushes
                self._wakeup.notify_all()
        if self._file is not None:
            self._file.close()

    def _is_wanted(self) -> bool:
        return self._stopping or self._num_flushed < self._num_flushes

    def _checkpoint(self, *, last: bool) -> None:
        """One transaction with everything that changed; on failure nothing is forgotten."""
        now = self._wall_time()  # first: what rows of this time do not have came later
        while self._arrived:
            self._open.append(self._arrived.popleft())
        try:
            file = self._file_in_place(now)
            if not self._open and not last and not self._failing:
                return
            with ledger_file.transaction(file.db):
                written = self._write(file, now, last=last)
                if last:
                    file.db.execute("UPDATE run SET closed_at = ? WHERE run = ?", (self._wall_time(), file.run))
        except Exception as error:  # whatever it is, what comes later must still be written
            self._is_damaged = ledger_file.is_damage(error)
            if last or not self._failing:
                lost = f"; {len(self._open)} requests are not in it" if last else "; trying again"
                logger.error("cannot write the ledger %s: %s%s", self.path, error, lost)
            self._failing = True
            return
        if self._failing:
            logger.warning("the ledger %s is written again, and complete", self.path)
            self._failing = False
        for entry, counts, closed in written:
            entry.written, entry.closed = counts, closed
        self._open = [entry for entry in self._open if not entry.closed]

    def _file_in_place(self, now: float) -> ledger_file.LedgerFile:
        """The file, or a new one where the old one is gone; one that holds something else now is kept under another
        name. What runs goes to the new one with all its tokens. Raises ConfigError while there can be none.
        """
        if self._file is not None:
            loss = "was found damaged" if self._is_damaged else ledger_file.loss_of(self.path, self._file.fd)
            if loss is None:
                return self._file
            logger.error("the ledger %s %s; usage goes on in another file, without that of before", self.path, loss)
            with suppress(FileNotFoundError):
                if self._is_damaged or self.path.stat().st_ino == os.fstat(self._file.fd).st_ino:
                    self.path.rename(f"{self.path}.lost-{now:.0f}")
            # now, because with it goes what SQLite keeps beside the file, by name: the next one's, if that was there
            file, self._file, self._is_damaged = self._file, None, False
            file.close()
            for entry in self._open:
                entry.row_id = entry.written = None
        self._file = ledger_file.open_ledger(self.path, now)
        return self._file

    def _write(self, file: ledger_file.LedgerFile, now: float, *, last: bool) -> list[tuple[_OpenRow, _Counts, bool]]:
        """Rows that were written, and whether that closed them."""
        written = []
        for entry in self._open:
            request = entry.request
            reason = request.finish_reason  # asked first: after that the counts stand still
            ended = reason is not None
            if not ended and not last and entry.stands_still():
                continue
            counts = entry.counts()
            status = entry.status or reason.value if reason is not None else ledger_file.INTERRUPTED if last else "open"
            try:
                row = (
                    *(file.run, self._row_id(file, entry), *self._owner(entry, now)),
                    *(now if ended or last else None, status, int(request.spec.sample_index == 0), *counts),
                )
                file.db.execute(_UPSERT, row)
            except _UNWRITABLE as error:
                spec, ended = request.spec, True
                text = "the ledger %s has no row of request %r of tenant %r, %s with %s: %s"
                logger.error(text, self.path, spec.request_id, spec.terms.tenant, status, tuple(counts), error)
            written.append((entry, counts, ended or last))
        return written

    def _owner(self, entry: _OpenRow, now: float) -> tuple[str, str, str, str, float, float]:
        request = entry.request.spec
        model = entry.model if entry.model is not None else request.adapter.partition("@")[0] or self.model
        terms = request.terms
        return terms.tenant, terms.key_id, model, tier_of_priority(terms.priority), entry.opened_at, now

    def _row_id(self, file: ledger_file.LedgerFile, entry: _OpenRow) -> str:
        """The row's request id, if no other request of this run had it."""
        if entry.row_id is None:
            name, count = entry.request.spec.request_id, 1
            taken = "SELECT 1 FROM request WHERE run = ? AND request_id = ?"
            while file.db.execute(taken, (file.run, name)).fetchone():
                count += 1
                name = f"{entry.request.spec.request_id}#{count}"
            entry.row_id = name
        return entry.row_id

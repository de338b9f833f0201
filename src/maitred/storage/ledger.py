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
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from maitred.errors import ConfigError, Unavailable
from maitred.request import Charges, FinishReason, RequestSpec
from maitred.tenancy.tenant import tier_of_priority
from maitred.tenancy.usage import UsageKey, UsageQuery, UsageSum

logger = logging.getLogger(__name__)

VERSION = 1
CHECKPOINT_S = 0.5
_MAGIC = b"SQLite format 3\0"  # how every such file begins
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
INTERRUPTED = "interrupted"  # the process ended before the request did
_SCHEMA = """
CREATE TABLE run (
    run INTEGER PRIMARY KEY,
    boot TEXT NOT NULL,             -- of the machine; with pid and pid_started it names one process for ever
    pid INTEGER NOT NULL,
    pid_started INTEGER NOT NULL,   -- clock ticks after boot
    opened_at REAL NOT NULL,        -- unix seconds, as all times here
    closed_at REAL
);
CREATE TABLE request (
    run INTEGER NOT NULL REFERENCES run,
    request_id TEXT NOT NULL,       -- of one sample
    tenant TEXT NOT NULL,
    key_id TEXT NOT NULL,
    model TEXT NOT NULL,
    tier TEXT NOT NULL,
    opened_at REAL NOT NULL,
    checkpoint_at REAL NOT NULL,
    closed_at REAL,                 -- NULL while it runs
    status TEXT NOT NULL,           -- open, interrupted, or how it ended: stop, length, abort ...
    num_requests INTEGER NOT NULL,  -- 1 for the first sample of a prompt, else 0
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, -- of the prompt tokens
    generated_tokens INTEGER NOT NULL,
    PRIMARY KEY (run, request_id)
) WITHOUT ROWID;
CREATE INDEX request_opened_at ON request (opened_at);
CREATE INDEX request_open ON request (run) WHERE closed_at IS NULL;
CREATE TRIGGER request_is_written_once BEFORE UPDATE ON request WHEN OLD.closed_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a closed row of the ledger does not change'); END;
"""
_UPSERT = """
INSERT INTO request VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (run, request_id) DO UPDATE SET
    checkpoint_at = excluded.checkpoint_at, closed_at = excluded.closed_at, status = excluded.status,
    prompt_tokens = excluded.prompt_tokens, cached_tokens = excluded.cached_tokens,
    generated_tokens = excluded.generated_tokens
"""


class _Counts(NamedTuple):
    prompt: int
    cached: int
    generated: int


class Metered(Protocol):
    """A request that is followed to its end, as whoever listens to its engine notes it."""

    @property
    def spec(self) -> RequestSpec: ...

    @property
    def charges(self) -> Charges: ...

    @property
    def num_output_tokens(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None:
        """Once it is there the others stand still."""


class _OpenRow:
    """A request that has no closed row yet."""

    __slots__ = ("closed", "opened_at", "request", "row_id", "written")

    def __init__(self, request: Metered, opened_at: float) -> None:
        self.request, self.opened_at = request, opened_at
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
        charged, cached = self.request.charges[:2]
        return _Counts(charged, cached if charged else 0, self.request.num_output_tokens)


class _File(NamedTuple):
    """An open ledger. `fd` is the file itself, whatever its name leads to by now; it is closed after `db`, because to
    close any descriptor of a file gives up the locks that SQLite holds on it."""

    db: sqlite3.Connection
    run: int
    fd: int

    def close(self) -> None:
        with suppress(sqlite3.Error):  # damaged, and told
            self.db.close()
        os.close(self.fd)


class Ledger:
    """Writes one file; `opened` never waits. Raises ConfigError when the file cannot be used.

    Ids are one to a request within a run, which the edge sees to; a repeated one gets a suffix. A disk that is full
    stops no request: what is not written is kept and tried again.
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
        self._file: _File | None = _open_ledger(path, wall_time())  # None is lost, and not to be had again so far
        self._wakeup = threading.Condition()
        self._num_flushes = self._num_flushed = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="maitred-ledger", daemon=True)
        self._thread.start()

    def opened(self, request: Metered) -> None:
        """`request` was taken in by the engine; from now on it is followed to its end. From any thread."""
        self._arrived.append(_OpenRow(request, self._wall_time()))

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
        with closing(_connect(self.path, reading=True)) as db:
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
            "SUM(num_requests), SUM(prompt_tokens), SUM(cached_tokens), SUM(generated_tokens) "
            f"FROM request WHERE {' AND '.join(where)} GROUP BY 1, 2, 3, 4, 5"
        )
        try:
            with closing(_connect(self.path, reading=True)) as db:
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
            with _transaction(file.db):
                written = self._write(file, now, last=last)
                if last:
                    file.db.execute("UPDATE run SET closed_at = ? WHERE run = ?", (self._wall_time(), file.run))
        except Exception as error:  # whatever it is, what comes later must still be written
            self._is_damaged = getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE
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

    def _file_in_place(self, now: float) -> _File:
        """The file, or a new one where the old one is gone; one that holds something else now is kept under another
        name. What runs goes to the new one with all its tokens. Raises ConfigError while there can be none.
        """
        if self._file is not None:
            loss = "was found damaged" if self._is_damaged else _loss_of(self.path, self._file.fd)
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
        self._file = _open_ledger(self.path, now)
        return self._file

    def _write(self, file: _File, now: float, *, last: bool) -> list[tuple[_OpenRow, _Counts, bool]]:
        """What was written, and whether that closed the row."""
        written = []
        for entry in self._open:
            request = entry.request
            reason = request.finish_reason  # asked first: after that the counts stand still
            ended = reason is not None
            if not ended and not last and entry.stands_still():
                continue
            counts = entry.counts()
            status = reason.value if reason is not None else INTERRUPTED if last else "open"
            row = (
                *(file.run, self._row_id(file, entry), *self._owner(entry, now)),
                *(now if ended or last else None, status, int(request.spec.sample_index == 0), *counts),
            )
            file.db.execute(_UPSERT, row)
            written.append((entry, counts, ended or last))
        return written

    def _owner(self, entry: _OpenRow, now: float) -> tuple[str, str, str, str, float, float]:
        request = entry.request.spec
        return request.tenant, request.key_id, self.model, tier_of_priority(request.priority), entry.opened_at, now

    def _row_id(self, file: _File, entry: _OpenRow) -> str:
        """Its request id, if no other request of this run had it."""
        if entry.row_id is None:
            name, count = entry.request.spec.request_id, 1
            taken = "SELECT 1 FROM request WHERE run = ? AND request_id = ?"
            while file.db.execute(taken, (file.run, name)).fetchone():
                count += 1
                name = f"{entry.request.spec.request_id}#{count}"
            entry.row_id = name
        return entry.row_id


def _loss_of(path: Path, fd: int) -> str | None:
    """What happened to the file of this descriptor, for people; None if it is a ledger still, at its place."""
    opened = os.fstat(fd)
    try:
        found = path.stat()
    except FileNotFoundError:
        return "was deleted or moved"
    if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
        return "was replaced"
    return None if os.pread(fd, len(_MAGIC), 0) == _MAGIC else "was overwritten"


def _open_ledger(path: Path, now: float) -> _File:
    """The file made ready, rows of dead processes closed, and this run begun. Raises ConfigError."""
    with ExitStack() as stack:
        file = _opened(path, now, stack)
        stack.pop_all()
        return file


def _opened(path: Path, now: float, stack: ExitStack) -> _File:
    try:
        # before SQLite makes it readable for everybody; a pipe must not keep us waiting
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        stack.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"the ledger {path} is a pipe or a device; choose a file")
        db = stack.enter_context(closing(_connect(path)))
        with _transaction(db):
            _prepare(db, path)
            num_closed = _close_rows_of_the_dead(db, now)
            boot, started = _boot_id(), _started_at(os.getpid()) or 0
            cursor = db.execute(
                "INSERT INTO run (boot, pid, pid_started, opened_at) VALUES (?, ?, ?, ?)",
                (boot, os.getpid(), started, now),
            )
    except OSError as error:
        raise ConfigError(f"cannot open the ledger {path}: {error.strerror}; choose another file") from None
    except sqlite3.Error as error:
        raise ConfigError(f"cannot use {path} as the ledger: {error}; choose another file") from None
    if num_closed:
        logger.warning("the ledger has %d requests of a server that was killed; closed as they stood", num_closed)
    assert cursor.lastrowid is not None
    return _File(db, cursor.lastrowid, fd)


def _connect(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    place = f"{path.absolute().as_uri()}?mode=rw"  # which makes no file where there is none
    db = sqlite3.connect(place, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)
    if reading:
        db.execute("PRAGMA query_only = 1")
    else:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut too
    return db


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version != 0 or db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]:
        raise ConfigError(f"{path} is no ledger of this version of maitred; choose another file")
    for statement in _statements(_SCHEMA):
        db.execute(statement)
    db.execute(f"PRAGMA user_version = {VERSION}")


def _statements(script: str) -> Iterator[str]:
    """One by one, because `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _close_rows_of_the_dead(db: sqlite3.Connection, now: float) -> int:
    """How many rows were open. Another living server may be writing the same file; its rows are its own."""
    num_closed = 0
    for run, boot, pid, pid_started in db.execute(
        "SELECT run, boot, pid, pid_started FROM run WHERE closed_at IS NULL"
    ).fetchall():
        if boot == _boot_id() and _started_at(pid) == pid_started:
            continue
        num_closed += db.execute(
            "UPDATE request SET closed_at = checkpoint_at, status = ? WHERE run = ? AND closed_at IS NULL",
            (INTERRUPTED, run),
        ).rowcount
        db.execute("UPDATE run SET closed_at = ? WHERE run = ?", (now, run))
    return num_closed


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def _started_at(pid: int) -> int | None:
    """When the process began, in the system's own ticks; None when there is none. A pid alone may be another's by now.

    Where the system does not tell, a living process of that pid counts as the same.
    """
    try:
        # the second field is the program's name, which may hold spaces and brackets
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except (OSError, ValueError, IndexError):
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0

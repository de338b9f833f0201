"""The ledger's file: its schema, its writers, and what may happen to it while a server runs.

Several living servers may write one file. Each has a row in `run`, so that rows which a killed one left open are told
from those of a living one, and closed as they stand.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from maitred.core.errors import ConfigError

logger = logging.getLogger(__name__)

VERSION = 2
_MAGIC = b"SQLite format 3\0"  # how every such file begins
_DAMAGE = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
INTERRUPTED = "interrupted"  # the process ended before the request did
CACHED = "cached"  # answered from the result cache, by no engine
_SINCE_1 = (  # what version 2 has more
    "ALTER TABLE request ADD COLUMN rows INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN compute_us INTEGER NOT NULL DEFAULT 0",
)
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
    status TEXT NOT NULL,           -- open, interrupted, cached, or how it ended: stop, length, abort ...
    num_requests INTEGER NOT NULL,  -- 1 for the first sample of a prompt, else 0
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, -- of the prompt tokens
    generated_tokens INTEGER NOT NULL,
    rows INTEGER NOT NULL DEFAULT 0,       -- of a tensor request
    compute_us INTEGER NOT NULL DEFAULT 0, -- its part of its steps or batches
    PRIMARY KEY (run, request_id)
) WITHOUT ROWID;
CREATE INDEX request_opened_at ON request (opened_at);
CREATE INDEX request_open ON request (run) WHERE closed_at IS NULL;
CREATE TRIGGER request_is_written_once BEFORE UPDATE ON request WHEN OLD.closed_at IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a closed row of the ledger does not change'); END;
"""


class LedgerFile(NamedTuple):
    """An open ledger. `fd` is the file itself, whatever its name leads to by now; it is closed after `db`, because to
    close any descriptor of a file gives up the locks that SQLite holds on it."""

    db: sqlite3.Connection
    run: int
    fd: int

    def close(self) -> None:
        with suppress(sqlite3.Error):  # damaged, and told
            self.db.close()
        os.close(self.fd)


def is_damage(error: Exception) -> bool:
    """Whether SQLite says that the file's content is no ledger any more."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _DAMAGE


def loss_of(path: Path, fd: int) -> str | None:
    """Damage to the file of this descriptor, for people; None if it is a ledger still, at its place."""
    opened = os.fstat(fd)
    try:
        found = path.stat()
    except FileNotFoundError:
        return "was deleted or moved"
    if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
        return "was replaced"
    return None if os.pread(fd, len(_MAGIC), 0) == _MAGIC else "was overwritten"


def open_ledger(path: Path, now: float) -> LedgerFile:
    """The file made ready, rows of dead processes closed, and this run begun. Raises ConfigError."""
    with ExitStack() as stack:
        file = _opened(path, now, stack)
        stack.pop_all()
        return file


def _opened(path: Path, now: float, stack: ExitStack) -> LedgerFile:
    try:
        # before SQLite makes it readable for all users; a pipe must not keep us waiting
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o600)
        stack.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"the ledger {path} is a pipe or a device; choose a file")
        db = stack.enter_context(closing(connect(path)))
        with transaction(db):
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
    return LedgerFile(db, cursor.lastrowid, fd)


def connect(path: Path, *, reading: bool = False) -> sqlite3.Connection:
    place = f"{path.absolute().as_uri()}?mode=rw"  # which makes no file where there is none
    db = sqlite3.connect(place, uri=True, timeout=10.0, isolation_level=None, check_same_thread=False)
    if reading:
        db.execute("PRAGMA query_only = 1")
    else:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")  # a committed row survives a power cut too
    return db


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
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
    is_empty = version == 0 and not db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
    if version != 1 and not is_empty:
        raise ConfigError(f"{path} is no ledger of this version of maitred; choose another file")
    for statement in _SINCE_1 if version == 1 else _statements(_SCHEMA):
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
    """Close rows of ended servers; how many. Another living server may write the same file; its rows stay."""
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
    """Start of the process, in the system's own ticks; None when there is none. A pid alone may be another's by now.

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

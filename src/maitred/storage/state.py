"""What clients left here to come back for: responses, files, batches. In SQLite, in a folder or in memory alone.

Every entry belongs to a tenant, and to nobody else there is any such entry. Calls take a lock and may wait for the
disk: make them in a thread where a commit's milliseconds matter.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from maitred.core.errors import ConfigError, Unavailable
from maitred.storage.files import private_folder

MAX_MEMORY_BYTES = 256 * 2**20  # of all entries, without a folder; the oldest go first
_SCHEMA = """CREATE TABLE IF NOT EXISTS entry (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- in the order in which they came
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    tenant TEXT NOT NULL,
    created_at REAL NOT NULL,   -- unix seconds
    expires_at REAL,            -- NULL is never
    about BLOB NOT NULL,        -- JSON
    content BLOB NOT NULL,      -- what is long, and seldom read
    UNIQUE (kind, tenant, id)
);
CREATE INDEX IF NOT EXISTS entry_expires_at ON entry (expires_at) WHERE expires_at IS NOT NULL;"""
VERSION = 1


class StoredEntry(NamedTuple):
    """Entry without its content."""

    id: str
    tenant: str
    created_at: float  # unix s
    about: bytes  # JSON


class StateStore:
    """Entries by kind, tenant and id; any number of threads may call."""

    def __init__(self, folder: str | None = None, *, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        """Raises ConfigError for a folder that cannot be used, or that another living process uses."""
        self._lock = threading.Lock()
        self._max_bytes = None if folder is not None else max_memory_bytes
        self._db = _opened(private_folder(Path(folder), "--state-dir") / "state.sqlite" if folder is not None else None)

    def put(
        self,
        kind: str,
        id: str,
        tenant: str,
        about: bytes,
        content: bytes | None = None,
        *,
        now: float,
        expires_at: float | None = None,
    ) -> None:
        """Store an entry, or change one, which keeps its place and, with None, its content; times are unix seconds.
        Raises Unavailable where the disk takes no more."""
        with self._writing() as db:
            db.execute("DELETE FROM entry WHERE expires_at <= ?", (now,))
            db.execute(
                "INSERT INTO entry (kind, id, tenant, created_at, expires_at, about, content) "
                "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET expires_at = excluded.expires_at, "
                "about = excluded.about, content = CASE WHEN ? THEN content ELSE excluded.content END",
                (kind, id, tenant, now, expires_at, about, content or b"", content is None),
            )
            if self._max_bytes is not None:
                self._forget_oldest(db, self._max_bytes)

    def get(self, kind: str, id: str, tenant: str, now: float) -> StoredEntry | None:
        rows = self._read(
            "SELECT id, tenant, created_at, about FROM entry WHERE kind = ? AND id = ? AND tenant = ? "
            "AND (expires_at IS NULL OR expires_at > ?)",
            (kind, id, tenant, now),
        )
        return StoredEntry(*rows[0]) if rows else None

    def content(self, kind: str, id: str, tenant: str) -> bytes:
        """Content of an entry; empty where there is none."""
        rows = self._read("SELECT content FROM entry WHERE kind = ? AND id = ? AND tenant = ?", (kind, id, tenant))
        return rows[0][0] if rows else b""

    def drop(self, kind: str, id: str, tenant: str) -> bool:
        """Remove an entry; whether there was one."""
        with self._writing() as db:
            found = db.execute("DELETE FROM entry WHERE kind = ? AND id = ? AND tenant = ?", (kind, id, tenant))
            return found.rowcount > 0

    def entries(
        self, kind: str, tenant: str | None, now: float, *, after: str = "", limit: int = 100, newest: bool = True
    ) -> list[StoredEntry]:
        """Entries of a tenant, of all tenants with None, from the one that follows `after` on."""
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        rows = self._read(
            f"SELECT id, tenant, created_at, about FROM entry WHERE kind = ?1 AND (?2 IS NULL OR tenant = ?2) "
            f"AND (expires_at IS NULL OR expires_at > ?3) AND (?4 = '' OR number {sign} "
            f"(SELECT number FROM entry WHERE kind = ?1 AND id = ?4 AND (?2 IS NULL OR tenant = ?2))) "
            f"ORDER BY number {order} LIMIT ?5",
            (kind, tenant, now, after, limit),
        )
        return [StoredEntry(*row) for row in rows]

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _read(self, query: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            try:
                with self._db:
                    yield self._db
            except sqlite3.Error as error:
                raise Unavailable(
                    f"the server's state could not be written ({error}), and nothing of it was changed; free space in "
                    "--state-dir, then try again",
                    retry_after_s=10.0,
                ) from None

    @staticmethod
    def _forget_oldest(db: sqlite3.Connection, most: int) -> None:
        size = "length(about) + length(content)"
        (num_bytes,) = db.execute(f"SELECT SUM({size}) FROM entry").fetchone()
        while num_bytes > most:
            number, freed = db.execute(f"SELECT number, {size} FROM entry ORDER BY number LIMIT 1").fetchone()
            db.execute("DELETE FROM entry WHERE number = ?", (number,))
            num_bytes -= freed


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        with ExitStack() as stack:
            db = stack.enter_context(closing(sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False)))
            db.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server would go on with batches of the first
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # what was answered for survives a power cut
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise ConfigError(
                    f"{path} has version {version}, and this maitred writes {VERSION}; choose another folder"
                )
            db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            stack.pop_all()
            return db
    except sqlite3.Error as error:
        text = f"--state-dir: {path} cannot be used: {error}; end the server that uses it, or choose another folder"
        raise ConfigError(text) from None

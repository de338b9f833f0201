"""What clients left here to come back for: responses, files, batches. In SQLite, in a folder or in memory alone.

Every entry belongs to a tenant, and to nobody else there is any such entry. Calls take a lock and may wait for the
disk: make them in a thread where a commit's milliseconds matter.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator
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
    busy INTEGER NOT NULL DEFAULT 0,   -- never forgotten to make room
    size INTEGER NOT NULL DEFAULT 0,   -- bytes of its pieces, which the triggers count
    UNIQUE (kind, tenant, id)
);
CREATE INDEX IF NOT EXISTS entry_expires_at ON entry (expires_at) WHERE expires_at IS NOT NULL;
CREATE TABLE IF NOT EXISTS piece (  -- content too long for one value, or that changes piece by piece
    entry INTEGER NOT NULL REFERENCES entry (number) ON DELETE CASCADE,
    part INTEGER NOT NULL,
    number INTEGER NOT NULL,
    content BLOB NOT NULL,
    PRIMARY KEY (entry, part, number)
);
CREATE TRIGGER IF NOT EXISTS piece_came AFTER INSERT ON piece BEGIN
    UPDATE entry SET size = size + length(new.content) WHERE number = new.entry; END;
CREATE TRIGGER IF NOT EXISTS piece_changed AFTER UPDATE ON piece BEGIN
    UPDATE entry SET size = size - length(old.content) WHERE number = old.entry;
    UPDATE entry SET size = size + length(new.content) WHERE number = new.entry; END;
CREATE TRIGGER IF NOT EXISTS piece_went AFTER DELETE ON piece BEGIN
    UPDATE entry SET size = size - length(old.content) WHERE number = old.entry; END;"""
PAGE_BYTES = 1024 * 1024  # of pieces read at once, and never less than one
SHORT_BYTES = 64 * 1024  # that memory takes at once
MAX_WAITING = 32  # entries that memory takes in one transaction, 0.3 ms of short responses
MAX_WAITING_BYTES = 16 * 1024  # of each
_PUT = (
    "INSERT INTO entry (kind, id, tenant, created_at, expires_at, about, content, busy) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET expires_at = excluded.expires_at, busy = "
    "excluded.busy, about = excluded.about, content = CASE WHEN ? THEN content ELSE excluded.content END"
)
_NUMBER = "(SELECT number FROM entry WHERE kind = ? AND id = ? AND tenant = ?)"
VERSION = 1


class StoredEntry(NamedTuple):
    """Entry without its content."""

    id: str
    tenant: str
    created_at: float  # unix s
    about: bytes  # JSON


class ContentPiece(NamedTuple):
    """Part of an entry's content; `number` is its place, from 0."""

    number: int
    content: bytes


class EntryKey(NamedTuple):
    """Name of an entry."""

    kind: str
    id: str
    tenant: str


class StateStore:
    """Entries by kind, tenant and id; any number of threads may call."""

    def __init__(self, folder: str | None = None, *, max_memory_bytes: int = MAX_MEMORY_BYTES) -> None:
        """Raises ConfigError for a folder that cannot be used, or that another living process uses."""
        self.live: dict[tuple[str, str, str], Any] = {}  # work of this process, as EntryKey
        self._lock = threading.RLock()
        self._num_bytes = 0  # of all entries in memory, or more
        self._waiting: list[tuple[object, ...]] = []  # rows of entries in memory, for which there is room
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
        busy: bool = False,
    ) -> None:
        """Store an entry, or change one, which keeps its place and, with None, its content; times are unix seconds.
        A busy one is not forgotten to make room. Raises Unavailable where disk or memory take no more."""
        num_bytes, most = len(about) + len(content or b""), self._max_bytes
        row = (kind, id, tenant, now, expires_at, about, content or b"", busy, content is None)
        with self._lock:
            has_room = most is not None and self._num_bytes + num_bytes <= most
            waits = has_room and num_bytes <= MAX_WAITING_BYTES and not self._db.in_transaction
            if not waits:
                self._settle()  # those before, which have room
            self._num_bytes += num_bytes
            self._waiting.append(row)
            if not waits or len(self._waiting) == MAX_WAITING:
                self._settle()

    def get(self, kind: str, id: str, tenant: str, now: float) -> StoredEntry | None:
        where = f"number = {_NUMBER} AND (expires_at IS NULL OR expires_at > ?)"
        return next(iter(self._found(where, kind, id, tenant, now)), None)

    def content(self, kind: str, id: str, tenant: str) -> bytes:
        """Content of an entry; empty where there is none."""
        rows = self._read(f"SELECT content FROM entry WHERE number = {_NUMBER}", kind, id, tenant)
        return rows[0][0] if rows else b""

    def add(self, key: EntryKey, pieces: Iterable[ContentPiece], part: int = 0) -> None:
        """Store pieces of an entry, over those of the same numbers. Raises Unavailable, also for an entry that went."""
        with self.together() as db:
            rows = [(*key, part, piece.number, piece.content) for piece in pieces]
            self._num_bytes += sum(len(row[-1]) for row in rows)
            db.executemany(
                f"INSERT INTO piece VALUES ({_NUMBER}, ?, ?, ?) ON CONFLICT DO UPDATE SET content = excluded.content",
                rows,
            )
            self._forget_oldest(db)

    def pieces(self, key: EntryKey, part: int = 0, *, after: int = -1) -> list[ContentPiece]:
        """The next pieces of a part, in order, some PAGE_BYTES of them; none is the end, or an entry that went."""
        found, num_bytes = [], 0
        with self._lock, _naming_faults("read"):
            self._settle()
            wanted = f"SELECT number, content FROM piece WHERE entry = {_NUMBER} AND part = ? AND number > ? ORDER BY 1"
            for row in self._db.execute(wanted, (*key, part, after)):
                found.append(ContentPiece(*row))
                num_bytes += len(row[1])
                if num_bytes >= PAGE_BYTES:
                    break
        return found

    def move(self, key: EntryKey, part: int, to: EntryKey) -> None:
        """Give all pieces of a part to another entry, whose part 0 they become."""
        with self.together() as db:
            change = f"UPDATE piece SET entry = {_NUMBER}, part = 0 WHERE entry = {_NUMBER} AND part = ?"
            db.execute(change, (*to, *key, part))

    def rename(self, key: EntryKey, to: EntryKey, about: bytes, *, expires_at: float | None) -> None:
        """Rename an entry, which is about something else then, and busy no more; its content is not touched."""
        change = "kind = ?, id = ?, tenant = ?, about = ?, expires_at = ?, busy = 0"
        with self.together() as db:
            db.execute(f"UPDATE entry SET {change} WHERE number = {_NUMBER}", (*to, about, expires_at, *key))

    def clear(self, key: EntryKey, part: int, numbers: Iterable[int] | None = None) -> None:
        """Remove pieces of a part: all, or these."""
        with self.together() as db:
            these = f"DELETE FROM piece WHERE entry = {_NUMBER} AND part = ?"
            if numbers is None:
                db.execute(these, (*key, part))
            else:
                db.executemany(f"{these} AND number = ?", ((*key, part, number) for number in numbers))

    def size(self, key: EntryKey, part: int = 0) -> int:
        """Bytes of a part."""
        wanted = f"SELECT SUM(length(content)) FROM piece WHERE entry = {_NUMBER} AND part = ?"
        return self._read(wanted, *key, part)[0][0] or 0

    def busy(self, kind: str) -> list[StoredEntry]:
        """Busy entries of all tenants, oldest first."""
        return self._found("kind = ? AND busy ORDER BY number", kind)

    def drop(self, kind: str, id: str, tenant: str) -> bool:
        """Remove an entry; whether there was one."""
        with self.together() as db:
            return db.execute(f"DELETE FROM entry WHERE number = {_NUMBER}", (kind, id, tenant)).rowcount > 0

    def entries(
        self,
        kind: str,
        tenant: str,
        now: float,
        *,
        after: str = "",
        limit: int = 100,
        newest: bool = True,
        purpose: str | None = None,
    ) -> list[StoredEntry]:
        """Entries of a tenant from the one that follows `after` on; with `purpose`, those that are about it."""
        order, sign = ("DESC", "<") if newest else ("ASC", ">")
        where = (
            f"kind = ?1 AND tenant = ?2 AND (expires_at IS NULL OR expires_at > ?3) AND (?4 = '' OR number {sign} "
            "(SELECT number FROM entry WHERE kind = ?1 AND id = ?4 AND tenant = ?2)) AND (?6 IS NULL OR "
            f"json_extract(CAST(about AS TEXT), '$.purpose') = ?6) ORDER BY number {order} LIMIT ?5"
        )
        return self._found(where, kind, tenant, now, after, limit, purpose)

    def close(self) -> None:
        with self._lock:
            self._db.close()

    def _found(self, where: str, *values: object) -> list[StoredEntry]:
        rows = self._read(f"SELECT id, tenant, created_at, about FROM entry WHERE {where}", *values)
        return [StoredEntry(*row) for row in rows]

    def _read(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock, _naming_faults("read"):
            self._settle()
            return self._db.execute(query, values).fetchall()

    def _settle(self) -> None:
        """Store the entries that wait: a transaction of each would take most of the time of a short answer's."""
        if self._waiting:
            rows, self._waiting = self._waiting, []
            with self.together() as db:
                db.execute("DELETE FROM entry WHERE expires_at <= ?", (rows[-1][3],))
                db.executemany(_PUT, rows)
                self._forget_oldest(db)

    @contextmanager
    def at_once(self, num_bytes: int) -> Iterator[bool]:
        """Whether a call meanwhile that stores so many bytes keeps an event loop from nothing: memory has room for
        them, and no thread is at work.
        """
        has_room = self._max_bytes is not None and self._num_bytes + num_bytes <= self._max_bytes
        is_short = has_room and num_bytes < SHORT_BYTES and self._lock.acquire(blocking=False)
        try:
            yield is_short
        finally:
            if is_short:
                self._lock.release()

    @contextmanager
    def together(self) -> Iterator[sqlite3.Connection]:
        """Transaction around changes. Raises Unavailable, and then none is stored."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._settle()
            with _naming_faults("written"):
                self._db.execute("BEGIN IMMEDIATE")
                with self._db:
                    yield self._db

    def _forget_oldest(self, db: sqlite3.Connection) -> None:
        if self._max_bytes is None or self._num_bytes <= self._max_bytes:
            return
        size = "length(about) + length(content) + size"
        (num_bytes,) = db.execute(f"SELECT SUM({size}) FROM entry").fetchone()
        most = self._max_bytes if num_bytes <= self._max_bytes else self._max_bytes * 15 // 16  # room for the next ones
        while num_bytes > most:
            oldest = db.execute(f"SELECT number, {size} FROM entry WHERE NOT busy ORDER BY number LIMIT 1").fetchone()
            if oldest is None and num_bytes <= self._max_bytes:
                break
            if oldest is None:
                raise Unavailable(
                    f"uploads and batches under way fill the {self._max_bytes} bytes of memory that are for what "
                    "clients leave here; try again later, or serve with --state-dir",
                    retry_after_s=10.0,
                )
            db.execute("DELETE FROM entry WHERE number = ?", (oldest[0],))
            num_bytes -= oldest[1]
        self._num_bytes = num_bytes


@contextmanager
def _naming_faults(done: str) -> Iterator[None]:
    """Raises Unavailable for a fault of SQLite's."""
    try:
        yield
    except sqlite3.Error as error:
        text = f"the server's state could not be {done} ({error}), and nothing of it was changed"
        text = f"{text}; free space in --state-dir, or restore its file, then try again"
        raise Unavailable(text, retry_after_s=10.0) from None


def _opened(path: Path | None) -> sqlite3.Connection:
    try:
        with ExitStack() as stack:
            db = stack.enter_context(closing(sqlite3.connect(path or ":memory:", timeout=1.0, check_same_thread=False)))
            db.execute("PRAGMA foreign_keys = ON")
            db.execute("PRAGMA locking_mode = EXCLUSIVE")  # a second server would go on with batches of the first
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")  # what was answered for survives a power cut
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version not in (0, VERSION):
                raise ConfigError(
                    f"{path} has version {version}, and this maitred writes {VERSION}; choose another folder"
                )
            if not version:  # else a full disk can be read
                db.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {VERSION}; COMMIT;")
            stack.pop_all()
            return db
    except sqlite3.Error as error:
        raise ConfigError(
            f"--state-dir: {path} cannot be used: {error}; end the server that uses it, free space, or choose another "
            "folder"
        ) from None

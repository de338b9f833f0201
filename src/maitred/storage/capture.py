"""Captured traffic: token ids of answers, as JSON lines that the tools around the model learn from.

A thread writes, so neither the event loop nor the engine waits for a disk. Writers, readers and erasures hold the
folder's lock: a line is whole or not there, and an erasure is complete, whichever servers write meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from maitred.core.errors import ConfigError
from maitred.storage.files import private_folder, replace_file, sync

logger = logging.getLogger(__name__)

NUM_FILES = 16
"""Of a full folder; the oldest goes when another begins."""
MAX_WAITING_TOKENS = 2**20
"""More would be memory for a disk that cannot keep up."""
LOCK, ERASED = "lock", "erased.json"


class CapturedAnswer(msgspec.Struct, frozen=True):
    """A line: prompt and answer of one sample."""

    tenant: str
    model: str
    """Served name, or the adapter's."""
    at: float
    """Unix seconds at the answer's end."""
    num_prompt_tokens: int
    token_ids: Sequence[int]


class Capture:
    """Writes one folder; `note` never waits. Raises ConfigError for a folder that cannot be used."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder = folder
        self.counts = Counter(written=0, behind=0, disk=0)
        """Answers written; dropped because too many waited; dropped because the disk took none."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._file: Path | None = None
        self._num_waiting_tokens, self._failing, self._lock = 0, False, threading.Lock()
        try:
            (private_folder(folder, "--capture") / LOCK).touch(mode=0o600)
        except OSError as error:
            raise ConfigError(f"--capture {folder} cannot be written: {error.strerror}; name another folder") from None
        self._writer = ThreadPoolExecutor(1, "maitred-capture")

    def note(self, tenant: str, model: str, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Write this soon, or count it as dropped."""
        now, num_tokens = time.time(), len(prompt) + len(answer)
        with self._lock:
            if self._num_waiting_tokens + num_tokens > MAX_WAITING_TOKENS:
                self.counts["behind"] += 1
                return
            self._num_waiting_tokens += num_tokens
        self._writer.submit(self._write, CapturedAnswer(tenant, model, now, len(prompt), [*prompt, *answer]))

    def close(self) -> None:
        """Write what waits; idempotent."""
        self._writer.shutdown()

    def _write(self, answer: CapturedAnswer) -> None:
        try:
            with _locked(self.folder):
                if answer.at > _erased(self.folder).get(answer.tenant, 0.0):
                    self._append(msgspec.json.encode(answer) + b"\n")
                    self.counts["written"] += 1
            self._told(None)
        except (OSError, ConfigError) as error:
            self.counts["disk"] += 1
            self._told(error)
        finally:
            with self._lock:
                self._num_waiting_tokens -= len(answer.token_ids)

    def _append(self, line: bytes) -> None:
        share = self._max_bytes // NUM_FILES
        if self._file is None or (self._file.exists() and self._file.stat().st_size + len(line) > share):
            self._file = self.folder / f"{time.time_ns() // 1000:020}-{os.getpid()}.jsonl"
        sizes = {file: file.stat().st_size for file in _files(self.folder)}
        while sizes and sum(sizes.values()) + len(line) > self._max_bytes:
            oldest = next(iter(sizes))
            oldest.unlink()
            del sizes[oldest]
        _write(self._file, line)
        self.num_bytes = sum(sizes.values()) + len(line)

    def _told(self, error: Exception | None) -> None:
        """One log line where it begins to fail, and one where it works again."""
        if error is not None and not self._failing:
            logger.warning("captured answers are dropped: %s: %s; make room there", self.folder, error)
        elif error is None and self._failing:
            logger.warning("answers are captured again in %s; %d were dropped", self.folder, self.counts["disk"])
        self._failing = error is not None


def read_captured(folder: Path) -> bytes:
    """All lines, oldest first. Raises ConfigError where the folder holds no captured traffic."""
    with _locked(folder):
        return b"".join(_whole_lines(file) for file in _files(folder))


@dataclass(slots=True)
class HeldAnswers:
    """What is held of a tenant and model."""

    first_at: float
    last_at: float = 0.0
    num_answers: int = 0
    num_tokens: int = 0


def captured(folder: Path) -> dict[tuple[str, str], HeldAnswers]:
    """By tenant and model. Raises ConfigError where the folder holds no captured traffic."""
    found: dict[tuple[str, str], HeldAnswers] = {}
    for line in read_captured(folder).splitlines():
        answer = msgspec.json.decode(line, type=CapturedAnswer)
        held = found.setdefault((answer.tenant, answer.model), HeldAnswers(answer.at))
        held.last_at, held.num_answers = answer.at, held.num_answers + 1
        held.num_tokens += len(answer.token_ids)
    return found


def erase(folder: Path, tenant: str, *, now: float) -> int:
    """Take out all that was captured of a tenant until `now` (unix s); how many answers. Answers that a running server
    has not written yet are dropped there. Raises ConfigError.

    A file is replaced whole, so after a kill the same call goes on.
    """
    num_erased = 0
    with _locked(folder):
        replace_file(folder / ERASED, json.dumps({**_erased(folder), tenant: now}).encode(), mode=0o600)
        for file in _files(folder):
            lines = file.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if (owner := _tenant_of(line)) is not None and owner != tenant]
            num_erased += len(lines) - len(kept)
            if not kept:
                file.unlink()
            elif len(kept) < len(lines):
                replace_file(file, b"".join(kept), mode=0o600)
        sync(folder)
    return num_erased


def _tenant_of(line: bytes) -> str | None:
    """None of a line that is damaged, which could be any tenant's."""
    try:
        return msgspec.json.decode(line, type=CapturedAnswer).tenant if line.endswith(b"\n") else None
    except msgspec.DecodeError:
        return None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        lock = (folder / LOCK).open("r+b")
    except OSError as error:
        raise ConfigError(
            f"{folder} holds no captured traffic ({error.strerror}); name the folder of serve --capture"
        ) from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in folder.glob("*.new"):  # of an erasure that was killed
            left.unlink()
        yield


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def _whole_lines(file: Path) -> bytes:
    """Without the line that a killed server did not end."""
    written = file.read_bytes()
    return written[: written.rfind(b"\n") + 1]


def _erased(folder: Path) -> dict[str, float]:
    file = folder / ERASED
    return dict(json.loads(file.read_bytes())) if file.exists() else {}


def _write(file: Path, line: bytes) -> None:
    """Append it whole, or raise OSError."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        before, rest = os.fstat(descriptor).st_size, memoryview(line)
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            os.ftruncate(descriptor, before)
            raise
    finally:
        os.close(descriptor)

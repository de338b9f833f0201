"""Decision log files: encoded and written by a thread of their own, so that no step waits for them.

A log is a run of parts, `<run>.<part>.decisions`. Each is a gzip stream of frames: length and CRC-32 of what follows
(4 bytes each, little endian), then a frame of `decisions.codec`. The stream is flushed a few times a second, so a
process that is killed loses the last moments and nothing else.
"""

from __future__ import annotations

import glob
import logging
import queue
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from itertools import chain
from pathlib import Path

import msgspec

from maitred.core.errors import ConfigError
from maitred.decisions.codec import Header, LogEncoder
from maitred.decisions.log import StepRecord

logger = logging.getLogger(__name__)
SUFFIX = ".decisions"
FLUSH_S = 0.25  # at most this much of a run is lost when the process is killed
_FRAME = struct.Struct("<II")
_MAX_FRAME_BYTES = 2**30
_CHUNK_BYTES = 2**16
_GZIP = 31  # zlib's number for gzip with the largest window
COMPRESSION_LEVEL = 3  # takes two thirds of the time that level 6 takes, for a tenth more bytes
_NAME = re.compile(r"(?P<run>.+)\.(?P<part>\d+)" + re.escape(SUFFIX))


class DecisionLogFile:
    """The log of one run in `folder`; `write` never waits. Raises ConfigError when the folder cannot be used.

    A full part is closed and the next one begun; of a run, the newest `max_files` parts are kept. A full disk stops the
    log, not the engine: the cause is logged once, and the file ends with a whole frame.
    """

    def __init__(self, folder: Path, header: Header, *, max_bytes: int = 2**26, max_files: int = 16) -> None:
        self._folder, self._max_bytes, self._max_files = folder, max_bytes, max_files
        self.run, self._file = _begin_run(folder)
        self._encoder = LogEncoder(msgspec.structs.replace(header, run=self.run))
        self._part = 0
        self._ended = False
        self._begin_part()
        self._records: queue.SimpleQueue[StepRecord | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="maitred-decision-log", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """Path of the part that is being written."""
        return part_path(self._folder, self.run, self._part)

    def write(self, record: StepRecord) -> None:
        """Hand over one step; it reaches the file within moments, and for certain by close()."""
        if not self._ended:
            self._records.put(record)

    def close(self) -> None:
        """Write what was handed over, and close the file; idempotent."""
        self._records.put(None)
        self._thread.join()

    # the thread's side

    def _run(self) -> None:
        try:
            while self._take_records():
                self._flush(zlib.Z_SYNC_FLUSH)
                if self._num_bytes >= self._max_bytes:
                    self._next_part()
            self._flush(zlib.Z_FINISH)
        except OSError as error:
            logger.error("the decision log %s ends here: %s", self.path, error.strerror)
            self._file.truncate(self._num_bytes)
        finally:
            self._ended = True  # what is still handed over would only fill the memory
            self._file.close()

    def _take_records(self) -> bool:
        """Encodes what comes in until it is time to flush; False when nothing will come any more."""
        record = self._records.get()
        flush_at = time.monotonic() + FLUSH_S
        while record is not None:
            self._put(self._encoder.encode(record))
            left_s = flush_at - time.monotonic()
            if left_s <= 0:  # also when there is always another one
                return True
            try:
                record = self._records.get(timeout=left_s)
            except queue.Empty:
                return True
        return False

    def _begin_part(self) -> None:
        self._num_bytes = 0  # in the file, up to the end of a whole frame
        self._pending: list[bytes] = []
        self._stream = zlib.compressobj(COMPRESSION_LEVEL, zlib.DEFLATED, _GZIP)
        self._put(self._encoder.start(self._part))

    def _next_part(self) -> None:
        self._flush(zlib.Z_FINISH)
        self._file.close()
        self._part += 1
        self._file = self.path.open("xb", buffering=0)
        self._begin_part()
        part_path(self._folder, self.run, self._part - self._max_files).unlink(missing_ok=True)

    def _put(self, frame: bytes) -> None:
        self._pending.append(self._stream.compress(_FRAME.pack(len(frame), zlib.crc32(frame)) + frame))

    def _flush(self, mode: int) -> None:
        data = b"".join([*self._pending, self._stream.flush(mode)])
        self._pending = []
        _write_whole(self._file, data)
        self._num_bytes += len(data)


def part_path(folder: Path, run: str, part: int) -> Path:
    return folder / f"{run}.{part:05}{SUFFIX}"


def _write_whole(file: FileIO, data: bytes) -> None:
    view = memoryview(data)
    while view:  # a nearly full disk takes a part before it refuses
        view = view[file.write(view) :]


def _begin_run(folder: Path) -> tuple[str, FileIO]:
    stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            run = f"{stamp}-{attempt:03}"
            try:
                return run, part_path(folder, run, 0).open("xb", buffering=0)
            except FileExistsError:
                continue
    except OSError as error:
        raise ConfigError(
            f"cannot write the decision log in {folder}: {error.strerror}; choose another folder"
        ) from None
    raise ConfigError(f"{folder} has a thousand decision logs of this second; choose another folder")


# -- reading


def log_runs(folder: Path) -> list[list[Path]]:
    """The parts of each run, in order; the newest run first. Raises ConfigError when there is none."""
    runs: dict[str, list[Path]] = {}
    for part in folder.glob(f"*{SUFFIX}"):
        if named := _NAME.fullmatch(part.name):
            runs.setdefault(named["run"], []).append(part)
    if not runs:
        raise ConfigError(f"{folder} holds no decision log; they end in {SUFFIX}, and serve --decision-log writes them")
    return [sorted(runs[run], key=_part_number) for run in sorted(runs, reverse=True)]


def log_parts(path: Path) -> list[Path]:
    """The parts of one run, in order: of the newest run in a folder, or of the run that a file belongs to from that
    part on. Raises ConfigError when there is none.
    """
    if path.is_dir():
        return log_runs(path)[0]
    if not path.is_file():
        raise ConfigError(f"there is no decision log {path}; give a folder or a file that ends in {SUFFIX}")
    named = _NAME.fullmatch(path.name)
    if named is None:
        return [path]
    later = [
        p for p in path.parent.glob(f"{glob.escape(named['run'])}.*{SUFFIX}") if _part_number(p) >= int(named["part"])
    ]
    return sorted(later, key=_part_number)


def _part_number(path: Path) -> int:
    named = _NAME.fullmatch(path.name)
    return int(named["part"]) if named else 0


def read_frames(paths: Sequence[Path], on_read: Callable[[int], object] = int) -> Iterator[bytes]:
    """The frames of all parts, one after the other; one that a crash cut short is left out.

    `on_read` is told how many bytes of a file were read. Raises ConfigError where a file is damaged, naming it.
    """
    return chain.from_iterable(_frames_of(path, on_read) for path in paths)


def _frames_of(path: Path, on_read: Callable[[int], object]) -> Iterator[bytes]:
    stream = zlib.decompressobj(_GZIP)
    held = bytearray()
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            on_read(len(data))
            while data:
                held += _inflate(stream, data, path)
                data = stream.unconsumed_tail
                yield from _take_frames(held, path)
    if held and stream.eof:  # a file that was closed ends with a whole record; one of a killed process need not
        raise _damaged(path)


def _inflate(stream: zlib._Decompress, data: bytes, path: Path) -> bytes:
    try:
        return stream.decompress(data, _CHUNK_BYTES)
    except zlib.error as error:
        raise ConfigError(f"{path}: {error}; is this a decision log?") from None


def _take_frames(held: bytearray, path: Path) -> Iterator[bytes]:
    """Takes the whole frames out of what is held."""
    start = 0
    while len(held) - start >= _FRAME.size:
        length, checksum = _FRAME.unpack_from(held, start)
        begin, start_of_next = start + _FRAME.size, start + _FRAME.size + length
        if length > _MAX_FRAME_BYTES:
            raise _damaged(path)
        if start_of_next > len(held):
            break
        frame = bytes(held[begin:start_of_next])
        if zlib.crc32(frame) != checksum:
            raise _damaged(path)
        yield frame
        start = start_of_next
    del held[:start]


def _damaged(path: Path) -> ConfigError:
    return ConfigError(f"{path}: a record does not match its length or checksum; what is before it is good")

"""The decision log as bytes: a frame of msgpack a step, as it is, column by column.

Columns compress well, being mostly numbers that repeat those of the step before. Requests are named by number, in order
of their arrival in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.decisions.log import (
    DIGEST_BYTES,
    Arrival,
    Arrived,
    Drafted,
    Ended,
    Event,
    Outcome,
    Step,
    StepRecord,
    Told,
    arrived_of,
    split_digests,
)
from maitred.errors import ConfigError
from maitred.request import FinishReason, RequestSpec, RequestState
from maitred.step import BlockCopy, NewRequest, RequestProgress, ScheduledRow, SchedulerOutput

VERSION = 9
READABLE = (5, 6, 7, 8, 9)
"""5 had no forced tokens, 6 not what decides the number of drafts, 7 no KV from elsewhere, 8 no tensor requests."""


class Header(msgspec.Struct, frozen=True):
    """The first frame of every file of a log: what the scheduler was made of, and which file of its run this is."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_host_blocks: int = 0
    num_speculative_tokens: int = 0  # most drafts of a row; 0 where none are made, or other rules say how many
    run: str = ""  # equal in all files of a run
    part: int = 0  # 0, 1, 2 ...
    version: int = VERSION


class _Rows(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The rows of a plan: a column for each field of `ScheduledRow`, in their order, the request by number."""

    requests: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    new_block_ids: tuple[tuple[int, ...], ...] = ()
    replaced_blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    num_drafts: tuple[int, ...] = ()


class _Outcomes(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Outcomes of rows; what few of them have is told with the row's index."""

    num_tokens: tuple[int, ...] = ()  # of each row
    finished: tuple[tuple[int, FinishReason], ...] = ()
    new_hashes: tuple[tuple[int, bytes], ...] = ()  # digests of the blocks that the row filled, which the log lacks
    num_forced: tuple[tuple[int, int], ...] = ()
    drafts: tuple[tuple[int, int, int], ...] = ()  # made and accepted


class _Frame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Frame of one step. Times are in s, bit for bit."""

    scheduled_at: float
    updated_at: float
    rows: _Rows
    outcomes: _Outcomes
    forgotten: tuple[int, ...] = ()  # requests
    new: tuple[tuple[int, int], ...] = ()  # (request, its output tokens)
    block_copies: tuple[BlockCopy, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    events: tuple[Event, ...] = ()


class _LongFrame(_Frame, frozen=True, array_like=True, omit_defaults=True):
    """Frame of a step during which something happened, or of events alone; other steps go without these fields."""

    during: tuple[Event, ...] = ()
    taken: bool = True


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_frame = msgspec.msgpack.Decoder(_LongFrame).decode


class _Logged:
    """A request as the encoder knows it."""

    __slots__ = ("num_hashes", "number", "request")

    def __init__(self, number: int, request: RequestState, num_hashes: int) -> None:
        self.number, self.request = number, request
        self.num_hashes = num_hashes  # that the log knows of


class LogEncoder:
    """Makes the frames of one run; `encode` may lag behind the run, in another thread."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._block_size = header.block_size if header.enable_prefix_caching else 0
        self._next_number = 0
        self._known: dict[str, _Logged] = {}  # the living, and those that the next plan may name as forgotten
        self._leaving: list[_Logged] = []  # ended in the step before

    def start(self, part: int = 0) -> bytes:
        """The first frame of a file."""
        return _encode(replace(self.header, part=part))

    def encode(self, record: StepRecord) -> bytes:
        """The frame of the next step."""
        plan = record.plan
        gone, self._leaving = self._leaving, []
        events = tuple([self._event(event) for event in record.events])  # first, for they name the newcomers
        during = tuple([self._event(event) for event in record.during])
        known = self._known
        frame = _Frame(
            scheduled_at=record.scheduled_at,
            updated_at=record.updated_at,
            rows=self._rows(plan.rows),
            outcomes=self._outcomes(plan.rows, record.progress, record.drafted),
            forgotten=tuple([known[request_id].number for request_id in plan.forgotten_request_ids]),
            new=tuple([(known[new.request_id].number, new.num_output_tokens) for new in plan.new_requests]),
            block_copies=plan.block_copies,
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            events=events,
        )
        if during or not record.taken:
            frame = _LongFrame(**msgspec.structs.asdict(frame), during=during, taken=record.taken)
        for logged in gone:
            if known.get(logged.request.request_id) is logged:  # else the id was taken anew
                del known[logged.request.request_id]
        return _encode(frame)

    def _event(self, event: Arrival | Told) -> Event:
        if isinstance(event, Arrival):
            request = event.request
            self._known[request.request_id] = _Logged(self._next_number, request, event.num_hashes)
            self._next_number += 1
            return arrived_of(event)
        if isinstance(event, Ended):
            self._leaving.append(self._known[event.request_id])
        return event

    def _rows(self, rows: Sequence[ScheduledRow]) -> _Rows:
        if not rows:
            return _Rows()
        request_ids, *columns = zip(*rows, strict=True)
        return _Rows(tuple([self._known[request_id].number for request_id in request_ids]), *columns)

    def _outcomes(
        self, rows: Sequence[ScheduledRow], progress: Sequence[RequestProgress], drafted: Sequence[Drafted]
    ) -> _Outcomes:
        size, known = self._block_size, self._known
        drafts_of = {each.request_id: each for each in drafted}
        told_of = {told.request_id: told for told in progress}
        num_tokens, finished, new_hashes, forced, drafts = [], [], [], [], []
        for index, (request_id, start, num_computed, samples, _, _, num_drafts) in enumerate(rows):
            told, logged, reason, num_given, num_forced = told_of.get(request_id), known[request_id], None, 0, 0
            if told is not None:
                num_given, num_forced, reason = len(told.new_token_ids), told.num_forced, told.finish_reason
            num_tokens.append(num_given)
            if num_forced:
                forced.append((index, num_forced))
            if reason is not None:
                finished.append((index, reason))
                self._leaving.append(logged)
            end = start + num_computed
            if samples and not num_given and reason is None:
                end -= 1  # postponed
            if num_drafts:
                if (made := drafts_of.get(request_id)) is not None:
                    drafts.append((index, made.num_drafts, made.num_accepted))
                end += max(0, num_given - num_forced - 1) - num_drafts  # computed, and accepted
            if size and end // size > logged.num_hashes and reason is not FinishReason.ERROR:
                filled = logged.request.block_hashes[logged.num_hashes : end // size]
                logged.num_hashes += len(filled)
                new_hashes.append((index, b"".join([digest[:DIGEST_BYTES] for digest in filled])))
        return _Outcomes(tuple(num_tokens), tuple(finished), tuple(new_hashes), tuple(forced), tuple(drafts))


class LogDecoder:
    """Makes steps of frames again: `LogEncoder` backwards."""

    def __init__(self) -> None:
        self._specs: list[RequestSpec] = []  # by number, without their hashes
        self._step = 0

    def decode(self, data: bytes) -> Step:
        """Raises msgspec.MsgspecError, or LookupError or ValueError when its parts do not fit each other."""
        frame = _decode_frame(data)
        specs = self._specs
        arrived = [event for event in (*frame.events, *frame.during) if isinstance(event, Arrived)]
        specs += [replace(event.spec, block_hashes=()) for event in arrived]
        rows = tuple(
            [
                ScheduledRow(specs[number].request_id, *columns)
                for number, *columns in zip(*msgspec.structs.astuple(frame.rows), strict=True)
            ]
        )
        plan = SchedulerOutput(
            step=self._step,
            rows=rows,
            new_requests=tuple([_new_request(specs[number], num_output) for number, num_output in frame.new]),
            forgotten_request_ids=tuple([specs[number].request_id for number in frame.forgotten]),
            block_copies=frame.block_copies,
            swap_outs=frame.swap_outs,
            swap_ins=frame.swap_ins,
        )
        self._step += frame.taken
        return Step(
            scheduled_at=frame.scheduled_at,
            updated_at=frame.updated_at,
            plan=plan,
            events=frame.events,
            outcomes=tuple(_outcomes(rows, frame.outcomes)),
            during=frame.during,
            taken=frame.taken,
        )


def _new_request(spec: RequestSpec, num_output_tokens: int) -> NewRequest:
    return NewRequest(request_id=spec.request_id, num_output_tokens=num_output_tokens, spec=spec)


def _outcomes(rows: Sequence[ScheduledRow], given: _Outcomes) -> Iterator[Outcome]:
    finished, new_hashes, forced = dict(given.finished), dict(given.new_hashes), dict(given.num_forced)
    drafts = {index: counts for index, *counts in given.drafts}
    for index, (row, num_tokens) in enumerate(zip(rows, given.num_tokens, strict=True)):
        if num_tokens or index in finished or index in new_hashes or index in drafts:
            hashes = split_digests(new_hashes.get(index, b""))
            yield Outcome(
                row.request_id, num_tokens, finished.get(index), hashes, forced.get(index, 0), *drafts.get(index, ())
            )


def read_log(frames: Iterable[bytes]) -> tuple[Header, Iterator[Step]]:
    """The header, and the steps as they are asked for, of one run; its parts follow each other, headers and all.

    Raises ConfigError for a damaged frame, a part out of order, or another version of the log.
    """
    numbered = enumerate(frames, 1)
    _, first = next(numbered, (0, b""))
    header = _header_of(first)
    if header.part != 0:
        raise ConfigError(
            f"decision log: this is part {header.part} of its run, and a replay needs what was before it; "
            "give part 0 and all that follow, or have a run keep more of them (--decision-log-max-files)"
        )
    return header, _read_steps(header, numbered)


def _read_steps(header: Header, numbered: Iterable[tuple[int, bytes]]) -> Iterator[Step]:
    decoder = LogDecoder()
    part = header.part
    for number, frame in numbered:
        if is_header(frame):
            part = _next_part(header, part, _header_of(frame))
            continue
        try:
            yield decoder.decode(frame)
        except (msgspec.MsgspecError, LookupError, ValueError) as error:
            raise ConfigError(
                f"decision log: record {number} is damaged ({error}); what is before it is good"
            ) from None


def _next_part(header: Header, part: int, found: Header) -> int:
    if found.run != header.run:
        raise ConfigError(f"decision log: run {found.run!r} follows run {header.run!r}; replay one run at a time")
    if found.part != part + 1:
        raise ConfigError(f"decision log: part {found.part} follows part {part}; parts are missing or out of order")
    return found.part


def is_header(frame: bytes) -> bool:
    """Headers are maps of msgpack, steps are arrays."""
    return frame[:1] != b"" and (0x80 <= frame[0] <= 0x8F or frame[0] in (0xDE, 0xDF))


def _header_of(frame: bytes) -> Header:
    try:
        header = _decode_header(frame)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"decision log: the first record is no header ({error}); is this a decision log?") from None
    if header.version not in READABLE:
        raise ConfigError(
            f"decision log: version {header.version}, this maitred reads versions {READABLE[0]} to {READABLE[-1]}"
        )
    return header

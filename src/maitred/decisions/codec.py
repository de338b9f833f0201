"""The decision log as bytes: a frame of msgpack for each step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.core.request import FinishReason, RequestSpec, RequestState
from maitred.core.step import BlockCopy, NewRequest, RequestProgress, ScheduledRow, SchedulerOutput
from maitred.decisions import log
from maitred.kv.pages import KVGroups

VERSION = 12


class Header(msgspec.Struct, frozen=True):
    """The first frame of every file of a log: what the scheduler was made of, and which file of its run this is."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_host_blocks: int = 0
    num_speculative_tokens: int = 0  # most drafts of a row; 0 where none are made, or other rules say how many
    groups: KVGroups | None = None  # of layers, where blocks consist of pages
    num_pages: int = 0  # of these
    num_state_slots: int = 0  # of recurrent layers
    run: str = ""  # equal in all files of a run
    part: int = 0  # 0, 1, 2 ...
    version: int = VERSION


class _Rows(NamedTuple):
    """A plan's rows by field, as `zip` gives them: side by side, equal values compress best."""

    request_ids: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    num_tokens: tuple[int, ...] = ()
    samples: tuple[bool, ...] = ()
    new_block_ids: tuple[tuple[int, ...], ...] = ()
    replaced_blocks: tuple[tuple[tuple[int, int], ...], ...] = ()
    num_drafts: tuple[int, ...] = ()


class _Frame(msgspec.Struct, frozen=True, array_like=True):
    """A step as `Step` has it. Times are in s, bit for bit."""

    scheduled_at: float
    updated_at: float
    rows: _Rows
    outcomes: tuple[log.Outcome | None, ...]  # of each row, without its name
    forgotten: tuple[str, ...]
    new: tuple[tuple[str, int], ...]  # (request, its output tokens)
    block_copies: tuple[BlockCopy, ...]
    swap_outs: tuple[BlockCopy, ...]
    swap_ins: tuple[BlockCopy, ...]
    events: tuple[log.Event, ...]
    during: tuple[log.Event, ...]
    taken: bool


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_frame = msgspec.msgpack.Decoder(_Frame).decode
_NO_SPEC = RequestSpec(
    request_id="", prompt_token_ids=(), num_prompt_tokens=0, max_tokens=1, arrived_at=0.0
)  # takes no part in whether two plans are equal


class _Logged:
    """A request as the encoder knows it."""

    __slots__ = ("num_hashes", "request")

    def __init__(self, request: RequestState, num_hashes: int) -> None:
        self.request, self.num_hashes = request, num_hashes  # that the log knows of


class LogEncoder:
    """Makes the frames of one run; `encode` may lag behind the run, in another thread."""

    def __init__(self, header: Header) -> None:
        self.header = header
        self._block_size = header.block_size if header.enable_prefix_caching else 0
        self._known: dict[str, _Logged] = {}  # the living, and those whose last plan may be under way
        self._leaving: list[_Logged] = []  # ended in the step before

    def start(self, part: int = 0) -> bytes:
        """The first frame of a file."""
        return _encode(replace(self.header, part=part))

    def encode(self, record: log.StepRecord) -> bytes:
        """The frame of the next step."""
        plan = record.plan
        gone, self._leaving = self._leaving, []
        events = tuple([self._event(event) for event in record.events])  # first, for they name the newcomers
        during = tuple([self._event(event) for event in record.during])
        frame = _Frame(
            record.scheduled_at,
            record.updated_at,
            _Rows(*zip(*plan.rows, strict=True)),
            tuple(self._outcomes(plan.rows, record.progress, record.drafted)),
            plan.forgotten_request_ids,
            tuple([(new.request_id, new.num_output_tokens) for new in plan.new_requests]),
            plan.block_copies,
            plan.swap_outs,
            plan.swap_ins,
            events,
            during,
            record.taken,
        )
        for logged in gone:
            if self._known.get(logged.request.request_id) is logged:  # else the id was taken anew
                del self._known[logged.request.request_id]
        return _encode(frame)

    def _event(self, event: log.Arrival | log.Told) -> log.Event:
        if isinstance(event, log.Arrival):
            self._known[event.request.request_id] = _Logged(event.request, event.num_hashes)
            return log.arrived_of(event)
        if isinstance(event, log.Ended):
            self._leaving.append(self._known[event.request_id])
        return event

    def _outcomes(
        self, rows: Sequence[ScheduledRow], progress: Sequence[RequestProgress], drafted: Sequence[log.Drafted]
    ) -> Iterator[log.Outcome | None]:
        """Outcome of each row, None where it gave nothing."""
        drafts_of = {each.request_id: each for each in drafted}
        told_of = {told.request_id: told for told in progress}
        for row in rows:
            request_id = row.request_id
            told, made, logged = told_of.get(request_id), drafts_of.get(request_id), self._known[request_id]
            num_given, num_forced, reason = 0, 0, None
            if told is not None:
                num_given, num_forced, reason = len(told.new_token_ids), told.num_forced, told.finish_reason
            if reason is not None:
                self._leaving.append(logged)
            end = row.start + row.num_tokens
            if row.samples and not num_given and reason is None:
                end -= 1  # postponed
            if row.num_drafts:
                end += max(0, num_given - num_forced - 1) - row.num_drafts  # computed, and accepted
            hashes = () if reason is FinishReason.ERROR else self._new_hashes(logged, end)
            drafts = (made.num_drafts, made.num_accepted) if made is not None and row.num_drafts else ()
            gave = num_given or reason is not None or hashes or drafts
            yield log.Outcome("", num_given, reason, hashes, num_forced, *drafts) if gave else None

    def _new_hashes(self, logged: _Logged, end: int) -> tuple[bytes, ...]:
        """Hashes of the blocks that are filled up to that position, and that the log lacks."""
        if not self._block_size or end // self._block_size <= logged.num_hashes:
            return ()
        filled = logged.request.block_hashes[logged.num_hashes : end // self._block_size]
        logged.num_hashes += len(filled)
        return tuple([digest[: log.DIGEST_BYTES] for digest in filled])


def _decoded(data: bytes, number: int) -> log.Step:
    """Raises msgspec.MsgspecError, or ValueError when the rows' fields are not equally many."""
    frame = _decode_frame(data)
    rows = tuple(map(ScheduledRow._make, zip(*frame.rows, strict=True)))
    outcomes = zip(rows, frame.outcomes, strict=True)
    plan = SchedulerOutput(
        step=number,
        rows=rows,
        new_requests=tuple(
            [NewRequest(request_id=name, num_output_tokens=count, spec=_NO_SPEC) for name, count in frame.new]
        ),
        forgotten_request_ids=frame.forgotten,
        block_copies=frame.block_copies,
        swap_outs=frame.swap_outs,
        swap_ins=frame.swap_ins,
    )
    return log.Step(
        scheduled_at=frame.scheduled_at,
        updated_at=frame.updated_at,
        plan=plan,
        events=frame.events,
        outcomes=tuple([replace(outcome, request_id=row.request_id) for row, outcome in outcomes if outcome]),
        during=frame.during,
        taken=frame.taken,
    )


def read_log(frames: Iterable[bytes]) -> tuple[Header, Iterator[log.Step]]:
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


def _read_steps(header: Header, numbered: Iterable[tuple[int, bytes]]) -> Iterator[log.Step]:
    part, num_steps = header.part, 0
    for number, frame in numbered:
        if is_header(frame):
            part = _next_part(header, part, _header_of(frame))
            continue
        try:
            step = _decoded(frame, num_steps)
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(
                f"decision log: record {number} is damaged ({error}); what is before it is good"
            ) from None
        num_steps += step.taken
        yield step


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
    if header.version != VERSION:
        raise ConfigError(
            f"decision log: version {header.version}, this maitred reads version {VERSION}; "
            "read it with the maitred that wrote it"
        )
    return header

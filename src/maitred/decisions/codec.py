"""The decision log as bytes: frames of msgpack, in which a step is what the step before did not foretell.

The rows of a step are foretold to be those of the step before that sampled and were not forgotten, behind the tokens
they got and with as many drafts again; their outcomes, one token each. So a step of plain decoding is two times and
the blocks that were filled and taken: a few bytes for each 16 tokens of a row. Requests are named by number, in order
of their arrival in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from maitred.config import SchedulerConfig
from maitred.decisions.log import (
    DIGEST_BYTES,
    Arrival,
    Arrived,
    Configured,
    Ended,
    Event,
    Measured,
    Outcome,
    Step,
    StepRecord,
    arrived_of,
    split_digests,
)
from maitred.errors import ConfigError
from maitred.request import FinishReason, RequestSpec, RequestState
from maitred.step import BlockCopy, NewRequest, RequestProgress, ScheduledRow, SchedulerOutput

VERSION = 4


class Header(msgspec.Struct, frozen=True):
    """The first frame of every file of a log: what the scheduler was made of, and which file of its run this is."""

    config: SchedulerConfig
    num_blocks: int
    block_size: int
    enable_prefix_caching: bool
    num_host_blocks: int = 0
    run: str = ""  # equal in all files of a run
    part: int = 0  # 0, 1, 2 ...
    version: int = VERSION


class _Growth(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A foretold row that got blocks."""

    row: int
    new_block_ids: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()


class _Row(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A row that was not foretold; its request by number."""

    request: int
    start: int
    num_known: int
    samples: bool
    new_block_ids: tuple[int, ...] = ()
    replaced_blocks: tuple[tuple[int, int], ...] = ()


class _New(msgspec.Struct, frozen=True, array_like=True):
    request: int
    num_output_tokens: int


class _Surprise(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """An outcome other than one token of a row that samples, and none of another."""

    row: int
    num_tokens: int
    finish_reason: FinishReason | None = None


class _Frame(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """One step. Times are in ns since the time before, or in s where that would not give the same float."""

    scheduled: int | float
    updated: int | float
    growths: tuple[_Growth, ...] = ()
    hashes: tuple[tuple[int, bytes], ...] = ()  # (row, digests of blocks that its output filled)
    surprises: tuple[_Surprise, ...] = ()
    forgotten: tuple[int, ...] = ()
    num_missing: int = 0  # foretold rows, the last ones, that are not in the plan as foretold
    rows: tuple[_Row, ...] = ()  # after the foretold ones
    new: tuple[_New, ...] = ()
    copies: tuple[BlockCopy, ...] = ()
    events: tuple[Arrived | Ended | Configured | Measured, ...] = ()
    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    drafts: tuple[tuple[int, int], ...] = ()  # (row, drafts) where there are other than foretold; of other rows, none


_encode = msgspec.msgpack.Encoder().encode
_decode_header = msgspec.msgpack.Decoder(Header).decode
_decode_frame = msgspec.msgpack.Decoder(_Frame).decode


class Ticks:
    """Times as whole nanoseconds since the one before. Clocks count them, so three bytes do for most."""

    def __init__(self) -> None:
        self._last = 0

    def shorten(self, at: float) -> int | float:
        ticks = round(at * 1e9)
        since, self._last = ticks - self._last, ticks
        return since if ticks / 1e9 == at else at

    def restore(self, short: int | float) -> float:
        if isinstance(short, float):
            self._last = round(short * 1e9)
            return short
        self._last += short
        return self._last / 1e9


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
        self._ticks = Ticks()
        self._next_number = 0
        self._known: dict[str, _Logged] = {}  # the living, and those that the next plan may name as forgotten
        self._leaving: list[_Logged] = []  # ended in the step before
        self._last: list[ScheduledRow] = []  # rows of the step before that go on

    def start(self, part: int = 0) -> bytes:
        """The first frame of a file."""
        return _encode(replace(self.header, part=part))

    def encode(self, record: StepRecord) -> bytes:
        """The frame of the next step."""
        plan = record.plan
        gone, self._leaving = self._leaving, []
        events = tuple([self._event(event) for event in record.events])
        foretold = _still_there(self._last, plan.forgotten_request_ids)
        num_foretold, growths, drafts = _compare(foretold, plan.rows)
        hashes, surprises = self._outcomes(plan.rows, record.progress)
        number = self._number
        frame = _Frame(
            scheduled=self._ticks.shorten(record.scheduled_at),
            updated=self._ticks.shorten(record.updated_at),
            growths=tuple(growths),
            hashes=tuple(hashes),
            surprises=tuple(surprises),
            forgotten=tuple([number(request_id) for request_id in plan.forgotten_request_ids]),
            num_missing=len(foretold) - num_foretold,
            rows=tuple(
                [_Row(number(row.request_id), row.start, row.num_known, *row[3:6]) for row in plan.rows[num_foretold:]]
            ),
            new=tuple([_New(number(new.request_id), new.num_output_tokens) for new in plan.new_requests]),
            copies=plan.block_copies,
            events=events,
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            drafts=tuple(drafts),
        )
        self._last = _that_go_on(plan.rows, ((told.request_id, len(told.new_token_ids)) for told in record.progress))
        for logged in gone:
            if self._known.get(logged.request.request_id) is logged:  # else the id was taken anew
                del self._known[logged.request.request_id]
        return _encode(frame)

    def _event(self, event: Arrival | Ended | Configured | Measured) -> Event:
        if isinstance(event, Arrival):
            request = event.request
            self._known[request.request_id] = _Logged(self._next_number, request, event.num_hashes)
            self._next_number += 1
            return arrived_of(event)
        if isinstance(event, Ended):
            self._leaving.append(self._known[event.request_id])
        return event

    def _number(self, request_id: str) -> int:
        return self._known[request_id].number

    def _outcomes(
        self, rows: Sequence[ScheduledRow], progress: Sequence[RequestProgress]
    ) -> tuple[list[tuple[int, bytes]], list[_Surprise]]:
        """Both lists are by row. `progress` is in the plan's order, with gaps."""
        size, known = self._block_size, self._known
        hashes, surprises = [], []
        told_of = iter(progress)
        told = next(told_of, None)
        for index, (request_id, start, num_tokens, samples, _, _, num_drafts) in enumerate(rows):
            num_given, reason = 0, None
            if told is not None and told.request_id == request_id:
                num_given, reason = len(told.new_token_ids), told.finish_reason
                told = next(told_of, None)
            logged, end = known[request_id], start + num_tokens
            if num_drafts:
                end += max(0, num_given - 1) - num_drafts  # computed, and accepted
            if num_given != samples or reason is not None:
                surprises.append(_Surprise(index, num_given, reason))
            if size and end // size > logged.num_hashes and reason is not FinishReason.ERROR:
                filled = logged.request.block_hashes[logged.num_hashes : end // size]
                logged.num_hashes += len(filled)
                hashes.append((index, b"".join([digest[:DIGEST_BYTES] for digest in filled])))
            if reason is not None:
                self._leaving.append(logged)
        return hashes, surprises


def _compare(
    foretold: Sequence[ScheduledRow], rows: Sequence[ScheduledRow]
) -> tuple[int, list[_Growth], list[tuple[int, int]]]:
    """How many rows are as foretold, the blocks that these got, and drafts that were not foretold."""
    growths: list[_Growth] = []
    drafts: list[tuple[int, int]] = []
    index = 0
    for was, row in zip(foretold, rows, strict=False):
        request_id, start, num_tokens, samples, new_block_ids, replaced_blocks, num_drafts = row
        if request_id != was[0] or start != was[1] + was[2] or num_tokens != 1 + num_drafts or not samples:
            break
        if new_block_ids or replaced_blocks:
            growths.append(_Growth(index, new_block_ids, replaced_blocks))
        if num_drafts != was[6]:
            drafts.append((index, num_drafts))
        index += 1
    drafts += [(i, row.num_drafts) for i, row in enumerate(rows[index:], index) if row.num_drafts]
    return index, growths, drafts


def _that_go_on(rows: Iterable[ScheduledRow], num_given: Iterable[tuple[str, int]]) -> list[ScheduledRow]:
    """Rows that sampled, each without the drafts that were not accepted."""
    sampled = [row for row in rows if row.samples]
    if not any(map(_num_drafts, sampled)):
        return sampled
    given = dict(num_given)
    return [row._replace(num_tokens=row.num_known + max(0, given.get(row.request_id, 0) - 1)) for row in sampled]


_num_drafts = itemgetter(ScheduledRow._fields.index("num_drafts"))


def _still_there(rows: list[ScheduledRow], forgotten: Sequence[str]) -> list[ScheduledRow]:
    if not forgotten:
        return rows
    gone = set(forgotten)
    return [row for row in rows if row.request_id not in gone]


class LogDecoder:
    """Makes steps of frames again: `LogEncoder` backwards."""

    def __init__(self) -> None:
        self._ticks = Ticks()
        self._specs: list[RequestSpec] = []  # by number, without their hashes
        self._last: list[ScheduledRow] = []  # rows of the step before that go on
        self._step = 0

    def decode(self, data: bytes) -> Step:
        """Raises msgspec.MsgspecError, or LookupError when it names what was never there."""
        frame = _decode_frame(data)
        specs = self._specs
        specs += [replace(event.spec, block_hashes=()) for event in frame.events if isinstance(event, Arrived)]
        forgotten = tuple([specs[number].request_id for number in frame.forgotten])
        rows = tuple(self._rows(frame, forgotten))
        plan = SchedulerOutput(
            step=self._step,
            rows=rows,
            new_requests=tuple([_new_request(new, specs) for new in frame.new]),
            forgotten_request_ids=forgotten,
            block_copies=frame.copies,
            swap_outs=frame.swap_outs,
            swap_ins=frame.swap_ins,
        )
        self._step += 1
        outcomes = _outcomes(rows, frame)
        self._last = _that_go_on(rows, ((outcome.request_id, outcome.num_tokens) for outcome in outcomes))
        return Step(
            scheduled_at=self._ticks.restore(frame.scheduled),
            updated_at=self._ticks.restore(frame.updated),
            plan=plan,
            events=frame.events,
            outcomes=outcomes,
        )

    def _rows(self, frame: _Frame, forgotten: tuple[str, ...]) -> list[ScheduledRow]:
        foretold = _still_there(self._last, forgotten)
        rows = [
            ScheduledRow(request_id, start + num_tokens, 1 + num_drafts, True, (), (), num_drafts)
            for request_id, start, num_tokens, _, _, _, num_drafts in foretold[: len(foretold) - frame.num_missing]
        ]
        for index, new_block_ids, replaced_blocks in (
            (g.row, g.new_block_ids, g.replaced_blocks) for g in frame.growths
        ):
            rows[index] = rows[index]._replace(new_block_ids=new_block_ids, replaced_blocks=replaced_blocks)
        rows += [_row(row, self._specs) for row in frame.rows]
        for index, num_drafts in frame.drafts:
            rows[index] = rows[index]._replace(num_tokens=rows[index].num_known + num_drafts, num_drafts=num_drafts)
        return rows


def _row(row: _Row, specs: Sequence[RequestSpec]) -> ScheduledRow:
    return ScheduledRow(
        specs[row.request].request_id, row.start, row.num_known, row.samples, row.new_block_ids, row.replaced_blocks
    )


def _new_request(new: _New, specs: Sequence[RequestSpec]) -> NewRequest:
    return NewRequest(
        request_id=specs[new.request].request_id, num_output_tokens=new.num_output_tokens, spec=specs[new.request]
    )


def _outcomes(rows: Sequence[ScheduledRow], frame: _Frame) -> tuple[Outcome, ...]:
    surprises = {surprise.row: surprise for surprise in frame.surprises}
    hashes = dict(frame.hashes)
    outcomes = []
    for index, row in enumerate(rows):
        surprise = surprises.get(index)
        num_tokens, reason = (surprise.num_tokens, surprise.finish_reason) if surprise else (int(row.samples), None)
        if num_tokens or reason is not None or index in hashes:
            outcomes.append(Outcome(row.request_id, num_tokens, reason, split_digests(hashes.get(index, b""))))
    return tuple(outcomes)


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
        except (msgspec.MsgspecError, LookupError) as error:
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
    if header.version != VERSION:
        raise ConfigError(f"decision log: version {header.version}, this maitred reads version {VERSION}")
    return header

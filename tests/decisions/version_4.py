"""Decision logs recorded by version 4, in which a step was what the step before did not foretell, and their reader."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path

import msgspec
from msgspec.structs import replace

from maitred.decisions.codec import is_header
from maitred.decisions.log import Arrived, Configured, Ended, Measured, Outcome, Step, split_digests
from maitred.request import FinishReason, RequestSpec
from maitred.step import BlockCopy, NewRequest, ScheduledRow, SchedulerOutput

FOLDER = Path(__file__).parent / "recorded"


def recorded_by(version: int, name: str) -> list[bytes]:
    """The frames of run `name` under random load."""
    return msgspec.msgpack.decode((FOLDER / f"{name}_version_{version}.msgpack").read_bytes(), type=list[bytes])


def steps_of_version_4(frames: Sequence[bytes]) -> list[Step]:
    decoder = LogDecoder()
    return [decoder.decode(frame) for frame in frames if not is_header(frame)]


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


_decode_frame = msgspec.msgpack.Decoder(_Frame).decode


class Ticks:
    """Times as whole nanoseconds since the one before. Clocks count them, so three bytes do for most."""

    def __init__(self) -> None:
        self._last = 0

    def restore(self, short: int | float) -> float:
        if isinstance(short, float):
            self._last = round(short * 1e9)
            return short
        self._last += short
        return self._last / 1e9


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

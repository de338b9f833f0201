"""What a replica tells a router: its identity, keys and load, and the tokens beside a stream's text. Pure.

Each write of such a stream is a frame: a comment with the tokens that made it and how many bytes follow that are
theirs, then these bytes. A frame counts as a whole or not at all, so wherever a stream breaks off, the client has
exactly the text of the tokens that were told.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Annotated, Literal, NamedTuple

import msgspec

from maitred.fleet.disagg import WorkerFacts

TELL = b"x-maitred-tell-tokens"  # asks for it; heeded with the fleet's token
SEED = b"x-maitred-seed"  # of a request that brings none, so that the same request asked again has the same answer
HEAD, FRAME = b": resume ", b": tokens "
USAGE = b"x-maitred-usage"  # of an answer that is no stream: what it cost, as four numbers with commas between
MAX_TOLD_TOKENS = 4 * 1024 * 1024  # of one stream, 4 bytes each; beyond, it cannot go on elsewhere
MAX_PENDING_BYTES = 16 * 1024 * 1024  # of a frame that is not whole
MAX_LINE_BYTES = 4 * 1024 * 1024
MAX_COUNT = 2**31 - 1  # of tokens, rows or bytes that a replica tells: no request and no cache has more
Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]
Micros = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class ToldUsage(NamedTuple):
    """Tokens that the engine computed for an answer; those that its text hides too, as the counters have them."""

    num_prompt_tokens: Count
    num_cached_tokens: Count
    num_output_tokens: Count
    compute_us: Micros = 0  # its part of the steps it was in


NOTHING = ToldUsage(0, 0, 0)


class StreamHead(msgspec.Struct, frozen=True):
    """All that a resume needs besides the request's body: told once, before the first tokens."""

    id: str
    created: int  # unix s
    fingerprint: str  # of model and numerics
    seeds: tuple[int, ...]  # by prompt
    max_tokens: tuple[int, ...]  # by prompt
    num_prompt_tokens: Count = 0  # of all prompts


class ToldSample(msgspec.Struct, omit_defaults=True):
    """Tokens of one sample: those of a frame, or all that the client has the text of."""

    index: Count  # of the choice
    token_ids: list[Count]
    ended: bool = False
    num_cached_tokens: Count | None = None  # of its prompt, once that is known


class ToldFrame(msgspec.Struct, frozen=True, omit_defaults=True):
    """One write, with the tokens that made the `num_bytes` that follow."""

    num_bytes: Count
    samples: tuple[ToldSample, ...]
    usage: ToldUsage | None = None  # with the last


class ResumeRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The body of POST /fleet/resume: a stream that another replica began."""

    path: str  # the client asked for
    body: msgspec.Raw  # of the client, as it came
    head: StreamHead
    samples: list[ToldSample]  # those with tokens
    age_s: float = 0.0  # since the request arrived
    ttft_s: float = 0.0  # of that, until its first token


class BrokenFrame(Exception):
    """A replica of ours sent what is no frame."""


_encode = msgspec.json.Encoder().encode
_read_head = msgspec.json.Decoder(StreamHead).decode
_read_frame = msgspec.json.Decoder(ToldFrame).decode
_read_usage = msgspec.json.Decoder(ToldUsage).decode


def head_line(head: StreamHead) -> bytes:
    return HEAD + _encode(head) + b"\n"


def frame(samples: Iterable[ToldSample], events: bytes, num_more: int = 0, usage: ToldUsage | None = None) -> bytes:
    """`events` as one frame; `num_more` bytes that follow are its as well."""
    return FRAME + _encode(ToldFrame(len(events) + num_more, tuple(samples), usage)) + b"\n" + events


def usage_header(usage: ToldUsage) -> tuple[bytes, bytes]:
    return USAGE, b"%d,%d,%d,%d" % usage


def usage_in(headers: Iterable[tuple[bytes, bytes]]) -> ToldUsage | None:
    """Usage as a replica's answer tells it; None where it does not, or not so."""
    for name, value in headers:
        if name == USAGE:
            with suppress(msgspec.DecodeError):
                return _read_usage(b"[%b]" % value)
    return None


class _Sample:
    """All that was told of one sample."""

    __slots__ = ("ended", "num_cached_tokens", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.ended = False
        self.num_cached_tokens: int | None = None


class ToldTokens:
    """One stream's tokens, over all replicas that had it. `feed` gives what is for the client."""

    __slots__ = ("_num_tokens", "_pending", "_samples", "head", "usage")

    def __init__(self) -> None:
        self.head: StreamHead | None = None  # once it was told
        self.usage: ToldUsage | None = None  # once it came to its end
        self._samples: dict[int, _Sample] = {}
        self._num_tokens = 0
        self._pending = b""  # of a line, an event or a frame that is not whole

    def feed(self, piece: bytes) -> bytes:
        """The part of it that the client gets now: whole frames and whole events, without the comments that are for us.

        Raises BrokenFrame.
        """
        data = self._pending + piece if self._pending else piece
        out: list[bytes] = []
        start, end = 0, len(data)
        while start < end:
            try:
                following = self._one(data, start, out)
            except BrokenFrame:
                if start == 0:
                    raise
                break  # what came before is the client's; the next call raises it again
            if following is None:
                break
            start = following
        self._pending = data[start:]
        if len(self._pending) > MAX_PENDING_BYTES:
            raise BrokenFrame(f"a write of {len(self._pending)} bytes and more")
        return out[0] if len(out) == 1 else b"".join(out)

    def broke_off(self) -> None:
        """The replica is gone: what is not whole never was."""
        self._pending = b""

    @property
    def is_whole(self) -> bool:
        """Whether no frame has begun that has not ended."""
        return not self._pending

    @property
    def num_tokens(self) -> int:
        """Told so far, of all samples."""
        return self._num_tokens

    @property
    def can_resume(self) -> bool:
        return self.head is not None and self._num_tokens <= MAX_TOLD_TOKENS

    def has_begun(self, num_each: int) -> bool:
        """Whether each choice has a token, of so many for each prompt, and there is more to come."""
        num_choices = num_each * len(self.head.seeds) if self.head is not None else 1
        num_begun = sum(bool(sample.token_ids or sample.ended) for sample in self._samples.values())
        return num_begun >= num_choices and self.usage is None

    def usage_so_far(self) -> ToldUsage:
        """Usage of the text that the client has, or of all of it once it has ended."""
        if self.usage is not None:
            return self.usage
        num_cached = sum(sample.num_cached_tokens or 0 for sample in self._samples.values())
        return ToldUsage(self.head.num_prompt_tokens if self.head is not None else 0, num_cached, self._num_tokens)

    def resume_body(self, path: str, body: bytes, *, age_s: float = 0.0, ttft_s: float = 0.0) -> bytes:
        """The body of a resume request to the next replica; `can_resume` must be."""
        assert self.head is not None, "nothing was told"
        samples = [
            ToldSample(index, told.token_ids.tolist(), told.ended, told.num_cached_tokens)
            for index, told in sorted(self._samples.items())
        ]
        asked = ResumeRequest(
            path=path, body=msgspec.Raw(body), head=self.head, samples=samples, age_s=age_s, ttft_s=ttft_s
        )
        return _encode(asked)

    def _one(self, data: bytes, start: int, out: list[bytes]) -> int | None:
        """Take the next frame, head or event; where it ends, or None while it is not whole."""
        if not data.startswith(b": ", start):
            return None if len(data) - start < 2 and b": ".startswith(data[start:]) else _event(data, start, out)
        if data.startswith(FRAME, start):
            return self._frame(data, start, out)
        if data.startswith(HEAD, start):
            return self._head(data, start)
        shown = data[start : start + len(FRAME)]
        return None if FRAME.startswith(shown) or HEAD.startswith(shown) else _event(data, start, out)

    def _frame(self, data: bytes, start: int, out: list[bytes]) -> int | None:
        line_end = _line_end(data, start)
        if line_end is None:
            return None
        try:
            told = _read_frame(data[start + len(FRAME) : line_end])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BrokenFrame(str(error)) from None
        begin = line_end + 1
        end = begin + told.num_bytes
        if end > len(data):
            return None
        if told.num_bytes:
            out.append(data[begin:end])
        for sample in told.samples:
            self._keep(sample)
        self.usage = told.usage or self.usage
        return end

    def _head(self, data: bytes, start: int) -> int | None:
        line_end = _line_end(data, start)
        if line_end is None:
            return None
        try:
            head = _read_head(data[start + len(HEAD) : line_end])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BrokenFrame(str(error)) from None
        if not self._samples:  # else the client has tokens of the first
            self.head = head
        return line_end + 1

    def _keep(self, told: ToldSample) -> None:
        sample = self._samples.get(told.index)
        if sample is None:
            sample = self._samples[told.index] = _Sample()
        self._num_tokens += len(told.token_ids)
        if self._num_tokens <= MAX_TOLD_TOKENS:
            sample.token_ids.extend(told.token_ids)
        sample.ended = sample.ended or told.ended
        if told.num_cached_tokens is not None and sample.num_cached_tokens is None:
            sample.num_cached_tokens = told.num_cached_tokens


def _line_end(data: bytes, start: int) -> int | None:
    end = data.find(b"\n", start)
    if end < 0 and len(data) - start > MAX_LINE_BYTES:
        raise BrokenFrame(f"a line of {len(data) - start} bytes and more")
    return end if end >= 0 else None


def _event(data: bytes, start: int, out: list[bytes]) -> int | None:
    """An event or comment that is the client's, or a line where those are JSON objects."""
    mark = b"\n" if data.startswith(b"{", start) else b"\n\n"
    end = data.find(mark, start)
    if end < 0:
        return None
    end += len(mark)
    out.append(data[start:end])
    return end


BEAT_S = 0.25  # between two of `Load`
Phase = Literal["ready", "asleep", "loading", "draining", "dead"]
MAX_KEYS_AN_EVENT = 2048  # 40 KB
Speed = Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)]


class Fingerprint(msgspec.Struct, frozen=True):
    """All that tokens depend on besides the request: two replicas with equal ones give equal answers."""

    revision: str
    executor: str
    dtype: str
    kv_dtype: str
    isa: str  # the instruction set; empty where the executor has none to choose

    def __str__(self) -> str:
        return " ".join(msgspec.structs.astuple(self))


class VersionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is. What only the engine knows is null while it loads."""

    version: str
    name: Literal["maitred"] = "maitred"
    models: tuple[str, ...] | None = None
    tensor_models: tuple[str, ...] = ()  # of the model repository, those that answer
    slots: Count | None = None  # requests in one step
    max_model_len: Count | None = None  # tokens
    block_size: Count | None = None  # tokens
    fingerprint: Fingerprint | None = None


class Began(msgspec.Struct, frozen=True, tag="began"):
    """The first event; what earlier streams told is void."""

    replica: VersionResponse


class KeysChanged(msgspec.Struct, frozen=True, tag="keys"):
    """Prefix keys that are found here from now on, and that are not any more. After `Began` those there are."""

    stored: list[int]
    removed: list[int]


class KVWorker(msgspec.Struct, frozen=True):
    """A replica whose KV others may pull: where, and what foretelling its times takes."""

    facts: WorkerFacts
    addresses: tuple[str, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """A beat. The first one says that all keys there were have been told."""

    state: Phase
    error: str | None = None  # why it is not ready
    drain_s: Speed | None = None  # while it drains: so long what it has may take
    num_running: Count
    num_waiting: Count
    num_blocks: Count
    num_free_blocks: Count  # held by no request
    prefill_tokens_per_s: Speed  # as measured; 0 is not yet
    decode_tokens_per_s: Speed
    worker: KVWorker | None = None


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """A router's request came to no end here (it left, or there was an error), and this is all that was computed."""

    request_id: str  # as the router named it
    usage: ToldUsage  # prompt tokens as they were counted here; of output also those that it began with


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """Sent with a beat: machine time by tenant of requests ended since the last one, whichever server admitted them."""

    us_by_tenant: dict[str, Micros]


FleetEvent = Began | KeysChanged | Load | Ended | Computed

"""Chunks of a streamed completion: what does not change in a stream is encoded once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import msgspec

from maitred.api.generate.generation import Generation, Sample
from maitred.api.http.sse import EventStream
from maitred.engine.output import TextDelta
from maitred.request import FinishReason

encode = msgspec.json.Encoder().encode
END = b"}\n\n"


class ChunkWriter:
    """Puts choices into the envelope of their stream: `data: {"id":...,"choices":[` choice `]...}`."""

    def __init__(self, envelope: dict[str, Any], generation: Generation, *, usage: bool, continuous: bool) -> None:
        head = encode({**envelope, "choices": []})
        assert head.endswith(b"]}")
        self._head = b"data: " + head[:-2]
        self._generation, self._usage, self._continuous = generation, usage, continuous
        self._tail = b'],"usage":null' + END if usage else b"]" + END

    def event(self, choice: msgspec.Struct, **more: Any) -> bytes:
        """One event with one choice; `more` are further fields of the envelope."""
        tail = self._tail
        if self._continuous:
            tail = b'],"usage":' + encode(self._generation.usage()) + END
        if more:
            tail = tail[:1] + b"," + encode(more)[1:-1] + tail[1:]
        return self._head + encode(choice) + tail

    def last(self) -> bytes:
        """The event with the usage and no choice, if it was asked for."""
        if not self._usage:
            return b""
        return self._head + b'],"usage":' + encode(self._generation.usage()) + END


async def stream_events(
    generation: Generation, events: EventStream, write: Callable[[Sample, TextDelta], bytes], chunks: ChunkWriter
) -> None:
    """Send what `write` makes of every delta, then the usage and [DONE]."""
    unfinished, last = len(generation.samples), b""
    async with aclosing(generation.deltas()) as deltas:
        async for sample, delta in deltas:
            unfinished -= delta.finish_reason is not None
            written = write(sample, delta)
            if not unfinished:
                last += written  # goes out with what follows, in one write
            elif written:
                await events.write(written)
    await events.done(last + chunks.last())


def finish_name(reason: FinishReason | None) -> Any:
    """As the wire has it; a generation that failed never gets here."""
    return "stop" if reason is FinishReason.STOP else "length"

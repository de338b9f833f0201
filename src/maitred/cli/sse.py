"""Server-sent events, as OpenAI servers send them: bytes in any pieces -> the `data` of each event."""

from __future__ import annotations

DONE = b"[DONE]"


class SSEParser:
    """Feed it bytes as they come; an event counts once its blank line is there."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events completed by `piece`; comments (keep-alive) and other fields are dropped."""
        text = self._rest + piece
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        return [data for event in events if (data := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None

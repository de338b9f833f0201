"""Write coalescing: an answer's head leaves with the first of its body."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class CoalescingTransport:
    """The transport as an answer sees it. uvicorn writes the head by itself; here it leaves with what follows at once,
    in one system call.
    """

    __slots__ = ("_cycle", "_head", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle, self._transport = cycle, cycle.transport
        self._head: bytes | None = b""  # kept back; None once it left

    def write(self, data: bytes) -> None:
        if self._head is None or not self._cycle.response_started:  # 100 Continue comes before
            self._transport.write(data)
        elif self._head:
            self._transport.write(self._head + data)
            self._head = None
        else:
            self._head = data

    def flush(self) -> None:
        """An answer without a body has ended."""
        if self._head:
            self._transport.write(self._head)
            self._head = None

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

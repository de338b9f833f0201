"""Log-probabilities that wait for the end of answers which are not streamed: bounded for each, and for all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from maitred.core.errors import InvalidRequest, Overloaded
from maitred.core.step import TokenLogprobs
from maitred.engine.progress_streams import MAX_UNREAD_BYTES, logprob_bytes

MAX_KEPT_BYTES = 64 * 2**20  # of one answer: 35,000 tokens with 20 of each, some 40 MiB of JSON; 200,000 with one
MAX_KEPT_BYTES_IN_ALL = 512 * 2**20  # from there on, an answer ends that keeps more than a stream may leave unread
Keep = Callable[[Sequence[TokenLogprobs]], None]


class KeptLogprobs:
    """Counts what is kept, in bytes of memory."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def answer(self) -> Iterator[Keep]:
        """Account for one answer while it is made. The function given is called with what the answer keeps, and raises
        InvalidRequest or Overloaded once that is too much.
        """
        own = 0

        def keep(positions: Sequence[TokenLogprobs]) -> None:
            nonlocal own
            num_bytes = logprob_bytes(positions)
            own += num_bytes
            self.num_bytes += num_bytes
            if own > MAX_KEPT_BYTES:
                raise InvalidRequest(
                    f"the answer's log-probabilities take over {MAX_KEPT_BYTES} bytes of memory, the most that is kept "
                    "until an answer ends; send stream: true, or ask for fewer of each token, fewer tokens or samples",
                    param="logprobs",
                    code="answer_too_large",
                )
            if self.num_bytes > MAX_KEPT_BYTES_IN_ALL and own > MAX_UNREAD_BYTES:
                raise Overloaded(
                    f"log-probabilities of answers that are not streamed take over {MAX_KEPT_BYTES_IN_ALL} bytes of "
                    f"memory, {own} of them for this one; send stream: true, or try again later",
                    retry_after_s=1.0,
                )

        try:
            yield keep
        finally:
            self.num_bytes -= own

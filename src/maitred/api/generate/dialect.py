"""A dialect: how the clients of one API ask for tokens and read them. Generation knows only `GenerationAsk`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from maitred.api.generate.outcome import Outcome, Sample
from maitred.api.http.app import App
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import DialectFormat
from maitred.core.errors import InvalidRequest
from maitred.core.request import SamplingParams
from maitred.engine.model_facts import AdapterFacts
from maitred.engine.output import TextDelta
from maitred.gate.gate import TimeLimits
from maitred.text.shape import NO_SHAPE, Shape

MAX_MS = 24 * 3600 * 1000
HEADERS: Mapping[str, str] = {  # in the order of TimeLimits
    "ttft_slo_ms": "x-slo-ttft-ms",
    "queue_timeout_ms": "x-queue-timeout-ms",
    "timeout_ms": "x-request-timeout-ms",
}
LIMIT_HEADERS = frozenset(name.encode() for name in HEADERS.values())


class AskedLimits(Protocol):
    """Milliseconds from arrival, as a body may have them; None was not sent."""

    @property
    def ttft_slo_ms(self) -> float | None: ...

    @property
    def queue_timeout_ms(self) -> float | None: ...

    @property
    def timeout_ms(self) -> float | None: ...


def time_limits(asked: AskedLimits | None, headers: Mapping[bytes, bytes]) -> TimeLimits:
    """The request's limits; a field outranks its header. Raises InvalidRequest for no number of milliseconds."""
    return TimeLimits(*(_asked(field, asked, headers) for field in HEADERS))


def _asked(field: str, asked: AskedLimits | None, headers: Mapping[bytes, bytes]) -> float | None:
    """One limit in seconds."""
    value, name = getattr(asked, field, None), field
    if value is None:
        name = HEADERS[field]
        sent = headers.get(name.encode())
        if sent is None:
            return None
        value = _number(sent, name)
    if not 0 < value <= MAX_MS:
        shown = shortened(str(value), 40)
        raise InvalidRequest(f"{name} is {shown}; it must be over 0 and at most {MAX_MS} (milliseconds)", param=name)
    return float(value) / 1000.0


def _number(sent: bytes, name: str) -> float:
    try:
        return float(sent.decode("ascii"))
    except (ValueError, UnicodeDecodeError):
        shown = shortened(sent.decode("latin-1"), 40)
        raise InvalidRequest(f"the header {name} is {shown!r}; it must be milliseconds", param=name) from None


Prompt = str | list[int]


class StreamWriter(Protocol):
    """Writes one streamed answer: whole events, or nothing."""

    def delta(self, sample: Sample, delta: TextDelta) -> bytes:
        """Bytes to send for what a sample gained."""

    def last(self) -> bytes:
        """Bytes to send after all samples have ended; the format's end of stream follows."""


class Answer(Protocol):
    """Writes what came of one `GenerationAsk`."""

    id: str
    created: int  # unix s; a stream that another replica began keeps both

    def whole(self, outcome: Outcome) -> bytes:
        """The body of an answer that is not streamed. Called in a thread where it takes long."""

    def stream(self, outcome: Outcome) -> StreamWriter: ...


@dataclass(slots=True, kw_only=True, eq=False)
class GenerationAsk:
    """What to generate, and how to write the answer."""

    id: str  # of the answer
    answer: Answer
    stream: bool
    sampling: SamplingParams
    num_prompts: int = 1
    prompts: Callable[[], list[Prompt]]
    """Templates are rendered here: called once, in a thread. The list is emptied once it is tokenised, but with
    `keeps_text`."""
    shape: Callable[[], Shape] = lambda: NO_SHAPE
    """What binds the answers; called once, in the same thread, after `prompts`."""
    prediction: Callable[[], str] | None = None
    """A text that the answers may be like; called once, in the same thread."""
    is_shaped: bool = False  # so `shape` may take long
    shape_found: Shape = NO_SHAPE  # what `shape` gave
    keeps_text: bool = False  # the answer repeats it
    may_take_long: bool = False  # however short: a template reads variables of the client's
    add_special_tokens: bool
    default_max_tokens: float | None = None  # where `sampling` has none, as far as the context has room
    cuts_max_tokens: bool = False  # to what the context has room for, in place of an error
    score_only: bool = False  # the token that must be sampled is not shown
    adapter: AdapterFacts | None = None  # LoRA adapter that it names
    # how it is treated
    priority: int | None = None  # None is the tenant's
    tier: str | None = None  # service tier, in place of a priority
    cache_salt: str = ""
    store: bool | None = None  # whether its answer may be captured
    limits: AskedLimits | None = None

    @property
    def num_samples(self) -> int:
        return self.sampling.n * self.num_prompts

    @property
    def keeps_logprobs(self) -> bool:
        """Whether log-probabilities wait for the end of the answer."""
        asked = self.sampling.logprobs is not None or self.sampling.prompt_logprobs is not None
        return asked and not self.stream


class Dialect(NamedTuple):
    """The request format of a route. Known fields that it does not support are refused by a table of its own."""

    format: DialectFormat
    decode: Callable[[App, Exchange, bytes], GenerationAsk]
    """From a body, which is JSON. Raises RequestError. The event loop stands meanwhile, so its work is bounded."""
    read: Callable[[Exchange], Awaitable[bytes]] = Exchange.json_body  # the body

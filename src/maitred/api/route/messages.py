"""Requests as replicas get them and answers as clients do: headers, stops on a request's way, facts of an answer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, NamedTuple

import msgspec

from maitred.api.http.exchange import TOLD_OF_BODIES, Exchange, Header
from maitred.api.http.fleet_headers import KV_EXPECTED, NUM_CACHED, PROMPT_ONLY, kv_from_headers, time_left_headers
from maitred.api.http.results import HEADER as CACHE
from maitred.api.route.fleet import LiveReplica
from maitred.fleet.balance import Choice
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind
from maitred.fleet.prefix_keys import RoutedBody
from maitred.fleet.told import MAX_COUNT, BrokenFrame, ToldUsage, usage_in
from maitred.fleet.upstream import UpstreamAnswer, UpstreamAsk, UpstreamFailed, request_head
from maitred.gate.gate import NO_LIMITS, TimeLimits

# of one connection, RFC 9110, 7.6.1, and what is written anew for each
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
CREDENTIALS = (b"authorization", b"x-api-key")  # the router's own clients'
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",  # the whole body is here already
    b"accept-encoding",  # usage is read from answers
    *CREDENTIALS,
    b"x-forwarded-for",
    b"x-request-id",
    b"cookie",  # of the router's origin
}
_NOT_RETURNED = HOP_BY_HOP | {
    *(b"date", b"server", b"x-request-id"),  # they have ours
    # what a browser would keep, or follow, of the router's origin
    *(b"set-cookie", b"set-cookie2", b"location", b"refresh", b"clear-site-data", b"strict-transport-security"),
    *(b"alt-svc", b"service-worker-allowed"),
}
OWN = b"x-maitred-"  # not believed from clients
REPLICA, HELD_MS = b"x-maitred-replica", b"x-maitred-held-ms"
ESCALATION = b"x-maitred-escalation"  # failed: an answer below `escalate_below`, as no later tier gave one


def towards_replica(exchange: Exchange) -> list[Header]:
    """Headers of a request for any replica; `x-forwarded-for` names the client."""
    sent = exchange.scope["headers"]
    named = _named_by_connection(sent)
    dropped = _NOT_FORWARDED | named if named else _NOT_FORWARDED
    if exchange.trace_header is not None:  # what replicas do is below the router's span, and no longer the client's
        dropped |= {b"traceparent"}
    kept = [header for header in sent if header[0] not in dropped and not header[0].startswith(OWN)]
    kept.append((b"x-request-id", exchange.request_id.encode()))
    if exchange.trace_header is not None:
        kept.append(exchange.trace_header)
    client = exchange.scope.get("client")
    before = exchange.headers.get(b"x-forwarded-for")
    if client is not None:
        address = client[0].encode("latin-1", "replace")
        kept.append((b"x-forwarded-for", b"%b, %b" % (before, address) if before else address))
    return kept


def towards_client(sent: Sequence[Header], replica: bytes, held_ms: int, *, is_traced: bool = False) -> list[Header]:
    """An answer's headers for the client, with its replica; the span is the router's where it `is_traced`."""
    named = _named_by_connection(sent)
    dropped = _NOT_RETURNED | named if named else _NOT_RETURNED
    if is_traced:
        dropped |= {b"traceparent"}
    kept = [
        header
        for header in sent
        if header[0] in TOLD_OF_BODIES or not (header[0] in dropped or header[0].startswith(OWN))
    ]
    kept.append((REPLICA, replica))
    kept.append((HELD_MS, b"%d" % held_ms))
    return kept


def _named_by_connection(headers: Iterable[Header]) -> frozenset[bytes]:
    """Names that a Connection header says are of this connection only."""
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            return frozenset(word.strip().lower() for word in value.split(b","))
    return frozenset()


MAX_ERROR_BYTES = 64 * 1024


@dataclass(slots=True)
class Outgoing:
    """A request as every replica gets it."""

    method: str
    target: str  # path and query
    headers: list[Header]
    body: bytes
    judged_body: bytes = b""  # for a tier with `escalate_below`: asks for log-probabilities
    hides_logprobs: bool = False  # the client did not
    secret: list[Header] = field(default_factory=list)  # only for replicas that hold the fleet's token
    is_generation: bool = False  # its answer has tokens
    has_usage: bool = False  # and says how many it took
    is_stream: bool = False
    limits: TimeLimits = NO_LIMITS  # from its arrival

    @property
    def tells(self) -> bool:
        """Whether our own replicas are asked to tell the tokens of the answer."""
        return self.is_stream and bool(self.secret)

    def ask(
        self,
        live: LiveReplica,
        age_s: float,
        told: Sequence[Header] = (),
        *,
        is_judged: bool = False,
        model: str | None = None,
    ) -> UpstreamAsk:
        """`age_s` ago it arrived; `told` is for a replica that hands KV over, and knows the model as `model`."""
        body = asking(self.judged_body if is_judged else self.body, model)
        headers = [*self._secretly(age_s), *told] if live.is_ours and self.secret else self.headers
        head = request_head(self.method, self.target, live.origin, headers, len(body))
        return UpstreamAsk(head, body, is_head=self.method == "HEAD")

    def resume(self, live: LiveReplica, body: bytes, age_s: float, told: Sequence[Header] = ()) -> UpstreamAsk:
        """The ask to go on where another replica left off."""
        headers = [*self._secretly(age_s), *told]
        return UpstreamAsk(request_head("POST", "/fleet/resume", live.origin, headers, len(body)), body)

    def _secretly(self, age_s: float) -> list[Header]:
        left = time_left_headers(self.limits, age_s) if self.limits != NO_LIMITS else ()
        return [*self.headers, *self.secret, *left]

    def may_hand_over(self) -> bool:
        """Whether one replica may compute the prompt and another answer."""
        return self.is_generation and bool(self.secret)


class Leg(NamedTuple):
    """A replica on a request's way."""

    live: LiveReplica
    kv_from: Sequence[str] = ()  # addresses where it finds KV of the prompt
    is_last: bool = True  # else it computes the prompt, and the next one answers

    def headers(self, *, is_stream: bool, prompt: AnswerUsage | None) -> list[Header]:
        """Headers of KV. The router sees no first token of a whole answer, so the second replica begins anew with the
        KV, and counts what the `prompt` has cost.
        """
        told = kv_from_headers(self.kv_from)
        if prompt is not None:
            told.append((NUM_CACHED, b"%d" % (prompt.num_cached_tokens or 0)))
        return told if self.is_last or is_stream else [*told, (PROMPT_ONLY, b"1")]

    @property
    def expects(self) -> list[Header]:
        """Headers sent while the prompt is computed elsewhere: this replica pulls what there is of its KV."""
        return [*kv_from_headers(self.kv_from), (KV_EXPECTED, b"1")]


async def tell_expected(outgoing: Outgoing, stop: Leg, age_s: float) -> None:
    """Have KV leave while it is computed. Without this it leaves later, so a failure is not reported."""
    with suppress(UpstreamFailed):
        answer = await stop.live.upstream.send(outgoing.ask(stop.live, age_s, stop.expects))
        try:
            await answer.whole(MAX_ERROR_BYTES)
        finally:
            answer.abort()


def stops_of(choice: Choice, replicas: Mapping[str, LiveReplica], *, may_hand_over: bool) -> list[Leg]:
    """The stops, in order. Without a hand-over (the request has begun, say) the last one finds what KV there is."""
    answers, computes = replicas[choice.replica], replicas.get(choice.prefill or "")
    peer = replicas.get(choice.fetch_from or "")
    finds = peer.kv_addresses if peer is not None else ()
    if computes is None:
        return [Leg(answers, finds)]
    last = Leg(answers, computes.kv_addresses)
    return [Leg(computes, finds, is_last=False), last] if may_hand_over else [last]


def reached_by(addresses: Sequence[str], host: str) -> tuple[str, ...]:
    """Addresses as others reach them: one of every interface gets the `host` that its server is reached by."""
    return tuple(_reached_by(address, host) for address in addresses)


def _reached_by(address: str, host: str) -> str:
    transport, _, place = address.partition(":")
    own, _, port = place.rpartition(":")
    try:
        return f"{transport}:{host}:{port}" if ip_address(own).is_unspecified else address
    except ValueError:
        return address


MAX_JUDGED_BYTES = 16 * 1024 * 1024  # of an answer with log-probabilities, which is held
_ASKED = {"/v1/chat/completions": msgspec.Raw(b"true"), "/v1/completions": msgspec.Raw(b"1")}
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_WRONG = (msgspec.DecodeError, ValueError, RecursionError)


def with_logprobs(path: str, body: bytes, read: RoutedBody) -> bytes:
    """The body, asking for its answer's log-probabilities; empty where they cannot be had apart from a prompt's."""
    if path not in _ASKED or read.echo or shows_logprobs(read):
        return body if path in _ASKED and not read.echo else b""
    with suppress(*_WRONG):
        return msgspec.json.encode(_decode_fields(body) | {"logprobs": _ASKED[path]})
    return b""


def asking(body: bytes, model: str | None) -> bytes:
    """The body, asking for a model by another name; None leaves it."""
    with suppress(*_WRONG):
        return body if model is None else msgspec.json.encode(_decode_fields(body) | {"model": model})
    return body


def shows_logprobs(read: RoutedBody) -> bool:
    """Whether the client asked for them itself."""
    return read.logprobs is not None and read.logprobs is not False


class Doubt:
    """Judges an answer by its least probable token, and holds a stream's events meanwhile."""

    def __init__(self, sure_from: float, *, hides: bool) -> None:
        """`hides` takes log-probabilities out, for a client that did not ask for them."""
        self._lowest, self._hides = math.log(sure_from), hides
        self.is_low, self.events = False, bytearray()

    def hold(self, events: bytes) -> None:
        """Take whole events. Raises BrokenFrame where they are too many."""
        for line in events.splitlines(keepends=True):
            is_told = line.startswith(b"data:") and (data := line[5:].strip()) != _DONE
            self.events += b"data: %b\n" % self.judged(data) if is_told else line
        if len(self.events) > MAX_JUDGED_BYTES:
            raise BrokenFrame(f"an answer has over {MAX_JUDGED_BYTES} bytes")

    def judged(self, body: bytes) -> bytes:
        """A body, or an event's data, as the client gets it."""
        try:
            told = msgspec.json.decode(body)
            for choice in told.get("choices") or ():
                known = choice.get("logprobs") or {}
                chat, text = known.get("content") or (), known.get("token_logprobs") or ()
                found = [*(each["logprob"] for each in chat), *text]
                self.is_low |= any(each is not None and each < self._lowest for each in found)
                if known:
                    choice["logprobs"] = None
        except (*_WRONG, TypeError, AttributeError, KeyError):  # an error, say
            return body
        return msgspec.json.encode(told) if self._hides else body


OVERLOADED = (503, 529)  # the second is Anthropic's
NOT_THERE = (404, 405, 501)  # of a foreign server: it may not have the path that was asked
STREAMS = (b"text/event-stream", b"application/x-ndjson")
RETRIED = (500, 502, *OVERLOADED)  # others are the request's own doing: 501 never works, 504 was its time limit
MAX_RETRY_AFTER_S = 60.0
MAX_EVENT_BYTES = 4 * 1024 * 1024
_DONE = b"[DONE]"
_LAST_EVENTS = ("message_stop", "response.completed", "response.incomplete", "response.failed")
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")  # of a JSON object


class _Foreign(msgspec.Struct):
    """Fields read of a foreign server's answer or event, whatever they hold."""

    usage: Any = None
    choices: Any = None
    error: Any = None
    type: Any = None  # of Anthropic's events
    message: Any = None
    done: Any = None  # of Ollama's lines
    prompt_eval_count: Any = None
    eval_count: Any = None
    response: Any = None  # of events of responses


_decode = msgspec.json.Decoder(_Foreign).decode


def failure_told(answer: UpstreamAnswer, *, is_ours: bool) -> Failure | None:
    """Why another replica should be asked; None is an answer for the client. 503 or 529 with Retry-After is full; 429
    of one of ours is the tenant's own limit, and 404 is that there is no such thing anywhere.
    """
    if not is_ours and (answer.status == 429 or answer.status in NOT_THERE):
        return Failure(FailureKind.LIMITED, message=f"status {answer.status}")
    if answer.status not in RETRIED:
        return None
    if answer.status in OVERLOADED:
        after = next((value for name, value in answer.headers if name == b"retry-after"), None)
        if after is not None:
            return Failure(FailureKind.FULL, retry_after_s=_seconds(after))
    return Failure(FailureKind.ERROR, message=f"status {answer.status}")


def _seconds(value: bytes) -> float:
    """Seconds of a Retry-After; a date, or nonsense, is taken for one second."""
    text = value.strip()
    return min(float(text), MAX_RETRY_AFTER_S) if text.isdigit() and len(text) < 8 else 1.0


def is_stream(answer: UpstreamAnswer) -> bool:
    return any(name == b"content-type" and value.startswith(STREAMS) for name, value in answer.headers)


class ForeignStream:
    """Cuts a stream of a server that tells no tokens into whole events, and reads its end and its usage in them."""

    __slots__ = ("_end", "_num_finished", "_rest", "_usage", "has_answer", "is_done", "is_error")

    def __init__(self, *, has_lines: bool = False) -> None:
        """With `has_lines` an event is a line of JSON."""
        self._end = _LINE_END if has_lines else _EVENT_END
        self.has_answer = self.is_done = self.is_error = False  # by its events so far
        self._rest = b""  # begins an event
        self._num_finished = 0  # choices
        self._usage: Any = None

    def feed(self, piece: bytes) -> bytes:
        """The events that are whole now. Raises BrokenFrame when the first is no JSON, or too long to wait for."""
        data, start = self._rest + piece, 0
        for end in self._end.finditer(data):
            try:
                self._read(data[start : end.start()])
            except BrokenFrame:
                if start == 0:
                    raise
                break  # what came before is the client's; the next call raises it again
            start = end.end()
        self._rest = data[start:]
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BrokenFrame(f"an event has over {MAX_EVENT_BYTES} bytes")
        return data[:start]

    def has_ended(self, num_choices: int) -> bool:
        """Whether the client has all of the answer, were this the end."""
        is_done = self.is_done or self._rest.strip() == b"data: " + _DONE
        return is_done or self.is_error or self._num_finished >= num_choices

    def usage(self, num_tokens: int) -> AnswerUsage:
        """Usage as the stream told it, else as many tokens as events were counted."""
        return _told(self._usage, num_tokens)

    def _read(self, event: bytes) -> None:
        data = event
        if self._end is _EVENT_END:
            data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:")).strip()
        if not data or data == _DONE:  # or a comment
            self.is_done |= bool(data)
            return
        try:
            told = _decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise BrokenFrame(f"an event is no JSON: {error}") from None
        self.is_error |= told.error is not None
        self.has_answer |= told.error is None
        self.is_done |= told.type in _LAST_EVENTS or told.done is True
        if isinstance(told.response, Mapping):
            told.usage = told.response.get("usage")
        begun = (
            told.message.get("usage") if told.type == "message_start" and isinstance(told.message, Mapping) else None
        )
        if isinstance(found := begun or _usage(told), Mapping):  # Anthropic's come in parts, those of the prompt first
            self._usage = {**(self._usage or {}), **{name: count for name, count in found.items() if count is not None}}
        for choice in told.choices if isinstance(told.choices, list) else ():
            self._num_finished += isinstance(choice, Mapping) and choice.get("finish_reason") is not None


def message_of(body: bytes) -> str:
    """The message of an error body, at most a line of it."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return body[:200].decode("utf-8", "replace").strip()
    for key in ("error", "message", "detail"):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
    return str(found)[:200]


def read_whole(answer: UpstreamAnswer, body: bytes) -> AnswerUsage:
    """Usage of a foreign server's answer as one JSON object. Raises BrokenFrame where it is cut, or is an error for all
    that its status says.
    """
    if not any(name == b"content-type" and value.startswith(b"application/json") for name, value in answer.headers):
        return AnswerUsage()
    try:
        told = _decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BrokenFrame(f"no JSON: {error}") from None
    if told.error is not None and told.choices is None:
        raise BrokenFrame(f"an error with status 200: {message_of(body)}")
    return _told(_usage(told), None)


def _usage(told: _Foreign) -> Any:
    """Usage as OpenAI's and Anthropic's servers tell it; Ollama's tell it beside the rest, by other names."""
    if told.eval_count is None:
        return told.usage
    return {"prompt_tokens": told.prompt_eval_count, "completion_tokens": told.eval_count}


def _told(usage: Any, num_tokens: int | None) -> AnswerUsage:
    """Fields that are no number of tokens count as not told; without output tokens there are `num_tokens`."""
    if not isinstance(usage, Mapping):
        return AnswerUsage(num_output_tokens=num_tokens)
    if "input_tokens_details" in usage:  # of responses
        usage = {name.replace("input", "prompt").replace("output", "completion"): of for name, of in usage.items()}
    if "input_tokens" in usage:
        return _told_by_anthropic(usage, num_tokens)
    details = usage.get("prompt_tokens_details")
    prompt, output = _count(usage.get("prompt_tokens")), _count(usage.get("completion_tokens"))
    cached = _count(details.get("cached_tokens")) if isinstance(details, Mapping) else None
    if cached is not None:
        cached = min(cached, prompt or 0)
    return AnswerUsage(prompt, num_tokens if output is None else output, cached)


def _told_by_anthropic(usage: Mapping[str, Any], num_tokens: int | None) -> AnswerUsage:
    """Usage whose `input_tokens` are those of the prompt that no cache had anything to do with."""
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    fresh, cached, created = (_count(usage.get(name)) for name in names)
    output = _count(usage.get("output_tokens"))
    prompt = None if fresh is None else fresh + (cached or 0) + (created or 0)
    return AnswerUsage(prompt, num_tokens if output is None else output, cached)


def _count(told: object) -> int | None:
    return int(told) if type(told) in (int, float) and 0 <= told <= MAX_COUNT else None  # type: ignore[call-overload,operator]


def as_usage(told: ToldUsage, *, complete: bool = True) -> AnswerUsage:
    return AnswerUsage(
        told.num_prompt_tokens, told.num_output_tokens, told.num_cached_tokens, complete, told.compute_us
    )


def cost_told(answer: UpstreamAnswer, *, is_ours: bool) -> AnswerUsage | None:
    """Cost by the head of our own replica's answer: nothing, where its result cache had it."""
    if not is_ours:
        return None
    if (CACHE, b"hit") in answer.headers:
        return AnswerUsage(0, 0, 0)
    told = usage_in(answer.headers)
    return None if told is None else as_usage(told)

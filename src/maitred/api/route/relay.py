"""A request's relay: sent where the core says, again elsewhere if it must, and its answer passed on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from maitred.api.http.errors import ClientGone, ReplicaFailed, shortened
from maitred.api.http.exchange import CONNECTION, EventStream, Exchange
from maitred.api.route import messages
from maitred.api.route.fleet import Bill, Fleet, LiveReplica, Moved, RoutedRequest
from maitred.core.errors import MaitredError, RouteNotFound
from maitred.core.request import Charges, FinishReason
from maitred.fleet.actions import Bind
from maitred.fleet.fleet_request import AnswerUsage, Failure, FailureKind, FleetRequest
from maitred.fleet.told import NOTHING, BrokenFrame, ToldTokens
from maitred.fleet.upstream import Broken, UpstreamAnswer, UpstreamAsk, UpstreamFailed

MAX_KEPT_BYTES = 256 * 1024  # of an answer that is not streamed: while it is shorter another replica can begin anew
TOKENS_AT_ONCE = 16  # the core is told of the tokens of a stream by so many
_REASONS = {"answered": FinishReason.STOP, "cancelled": FinishReason.ABORT, "failed": FinishReason.ERROR}
BROKE_OFF = "the replica broke its answer off, and no other can go on with it"
_Read = TypeVar("_Read")


class Relay:
    """Relays one request. `run` returns when the client has its answer, and raises what it hears instead.

    Implements `storage.ledger.Metered`, all samples together; the ledger's thread reads it.
    """

    def __init__(
        self,
        fleet: Fleet,
        routed: RoutedRequest,
        outgoing: messages.Outgoing,
        *,
        keep_alive_s: float,
        on_tokens: Callable[[int, float], None],
    ) -> None:
        self._fleet, self._routed, self._outgoing = fleet, routed, outgoing
        self.bill: Bill | None = None  # where a ledger is kept
        self._is_billed = False  # the answer under way has said what it cost
        self._doubt: messages.Doubt | None = None  # of a tier whose answers are held until they are judged
        self._kept: tuple[UpstreamAnswer, LiveReplica, bytes] | None = None  # not sure enough; sent if no other comes
        self._doubted_us = 0  # compute of answers that were not sent
        self._prompt: AnswerUsage | None = None  # what its computing cost, which is told where it is answered
        self._is_computed = False  # its prompt is, and that was all that was asked of this replica
        self._num_each = routed.request.num_samples
        self._exchange: Exchange = routed.exchange
        self._events = EventStream(self._exchange, silence_s=keep_alive_s) if outgoing.is_stream else None
        self._event = b"data:" if self._exchange.format.stream.before_error else b"\n"  # is in each event, once
        self._keep_alive_s, self._on_tokens = keep_alive_s, on_tokens
        self._pace = self._exchange.paces[0] if self._exchange.paces else None
        self._told = ToldTokens() if outgoing.tells else None
        self._first_byte_at = 0.0  # s
        self._unsent = b""  # of the client's, if sending it was interrupted
        self._num_tokens = 0
        self._is_cancelled = False
        self._num_untold = 0  # of these, to the core
        self._telling: asyncio.Task[None] | None = None  # tells the answering replica what to expect
        self._refusal: tuple[UpstreamAnswer, bytes] | None = None  # what the last replica said, with a status of 5xx
        self.usage: AnswerUsage | None = None  # once the answer is complete
        self.finish_reason: FinishReason | None = None  # of the ledger, which is not told why a whole answer ended

    @property
    def outcome(self) -> str:
        """The request's outcome for the metrics, once it is over."""
        return "answered" if self.usage is not None else "cancelled" if self._is_cancelled else "failed"

    @property
    def spent(self) -> AnswerUsage:
        """What is known to have been computed for the request until now. From any thread."""
        spent = self._spent()
        return spent if self.bill is None else self.bill.with_untold(spent)

    def _spent(self) -> AnswerUsage:
        if self.usage is not None:
            return self.usage
        if self._told is None:
            return AnswerUsage(num_output_tokens=self._num_tokens, complete=False)
        return messages.as_usage(self._told.usage_so_far(), complete=False)

    @property
    def spec(self) -> FleetRequest:
        return self._routed.request

    @property
    def charges(self) -> Charges:
        spent = self.spent
        compute_us = spent.compute_us + self._doubted_us + (self._prompt.compute_us if self._prompt is not None else 0)
        return Charges(spent.num_prompt_tokens or 0, spent.num_cached_tokens or 0, compute_us=compute_us)

    @property
    def num_output_tokens(self) -> int:
        return self.spent.num_output_tokens or 0

    def ended(self) -> None:
        """Nothing of the answer comes any more, nor of what it cost."""
        self.finish_reason = _REASONS[self.outcome]

    async def run(self) -> None:
        """The request is with the core from here to the end."""
        exchange, routed = self._exchange, self._routed
        connection = exchange.scope.get(CONNECTION)
        if connection is not None:
            connection.when_gone(lambda: routed.interrupt(ClientGone()))
        self._fleet.enter(routed.request, routed)
        is_over = False
        try:
            while not is_over:
                try:
                    is_over = await self._attempt()
                except asyncio.CancelledError:
                    reason = routed.interruption()
                    if reason is None:
                        raise
                    if not isinstance(reason, Moved):
                        self._is_cancelled = isinstance(reason, ClientGone)
                        is_over = await self._send_kept(reason)
                except MaitredError as error:
                    is_over = await self._send_kept(error)
        finally:
            if self._telling is not None:
                self._telling.cancel()
            self._fleet.leave(routed, self.usage)
            self._fleet.kept_bodies.let_go(routed)
            exchange.log["held_ms"] = round(routed.request.held_s * 1000, 1) or None

    async def _attempt(self) -> bool:
        """Make one attempt; returns whether it was the last."""
        try:
            bind = self._routed.bound() or await self._held()
        except MaitredError:
            if self._refusal is not None and not self._exchange.started and self._kept is None:
                await self._pass_on_refusal(*self._refusal)
                return True
            raise
        if self.spec.fell_back and self._kept is not None:
            return await self._send_kept(ReplicaFailed(BROKE_OFF))
        if self._events is None:  # its first token will not be seen
            self._on_tokens(0, self._fleet.clock.now())
        if not self._routed.began:
            outgoing, sure_from = self._outgoing, self._fleet.core.sure_from(self._routed.request.request_id)
            is_judged = bool(outgoing.judged_body and sure_from)
            self._doubt = messages.Doubt(sure_from, hides=outgoing.hides_logprobs) if is_judged else None
            self._told = ToldTokens() if outgoing.tells else None  # those of an answer that was not sent are void
        may_hand_over = self._outgoing.may_hand_over() and not self._routed.began and self._doubt is None
        stops = messages.stops_of(bind.choice, self._fleet.replicas, may_hand_over=may_hand_over)
        if bind.choice.prefill is not None and len(stops) == 1:
            self._fleet.handed_over(self._routed)
        if len(stops) > 1:
            self._telling = asyncio.create_task(messages.tell_expected(self._outgoing, stops[-1], self._age_s))
        for stop in stops:
            self._is_computed = False
            is_over = await self._stop(stop)
            if not self._is_computed:
                return is_over
            self._exchange.is_handed_over = True
            self._fleet.handed_over(self._routed, is_computed=True)
        return False

    async def _stop(self, stop: messages.Leg) -> bool:
        """Try one stop; returns whether the client has all of the answer. `_is_computed` tells of a prompt alone."""
        self._refusal, self._is_billed, live = None, False, stop.live
        try:
            return await self._tried(stop)
        finally:
            if self.bill is not None and live.facts.has_beats and not self._is_billed:
                self.bill.left(live.facts.name, self._told.usage_so_far() if self._told is not None else NOTHING)

    async def _tried(self, stop: messages.Leg) -> bool:
        try:
            answer = await stop.live.upstream.send(self._ask(stop))
        except UpstreamFailed as failed:
            self._fleet.failed(self._routed, failure_of(failed), stop.live)
            return False
        try:
            return await self._answered(answer, stop)
        except UpstreamFailed as failed:
            self._broke_off(failed, stop.live)
            return False
        finally:
            answer.abort()

    def _ask(self, stop: messages.Leg) -> UpstreamAsk:
        """The ask from the beginning, or for the rest. Raises ReplicaFailed where no replica could go on."""
        live, kv_told = stop.live, stop.headers(is_stream=self._told is not None, prompt=self._prompt)
        if self._told is not None:
            self._told.broke_off()
        age_s, model = self._age_s, self._fleet.core.model_at(live.facts.name, self.spec)
        if not self._routed.began:
            is_judged = self._doubt is not None
            return self._outgoing.ask(live, age_s, kv_told, is_judged=is_judged, model=model)
        if self._told is None or not self._goes_on:
            raise ReplicaFailed(BROKE_OFF)
        ttft_s = self._first_byte_at - self._routed.request.arrived_at
        path, body = self._exchange.scope["path"], self._outgoing.body
        rest = self._told.resume_body(path, messages.asking(body, model), age_s=age_s, ttft_s=ttft_s)
        return self._outgoing.resume(live, rest, age_s, kv_told)

    @property
    def _age_s(self) -> float:
        return self._fleet.clock.now() - self._routed.request.arrived_at

    @property
    def _goes_on(self) -> bool:
        """Whether another replica could go on with what the client has of the answer."""
        return self._told is not None and self._told.can_resume and bool(self._outgoing.body)

    async def _held(self) -> Bind:
        """Streams get comments meanwhile."""
        silence_s = self._keep_alive_s / 3 if self._events is not None and self._keep_alive_s else None
        while (bind := self._routed.bound()) is None:
            try:
                async with asyncio.timeout(silence_s):
                    await self._routed.decision()
            except TimeoutError:
                assert self._events is not None, "nobody else listens"
                await self._events.keep_alive()
        return bind

    async def _answered(self, answer: UpstreamAnswer, stop: messages.Leg) -> bool:
        live = stop.live
        failure = messages.failure_told(answer, is_ours=live.is_ours)
        is_judged = self._doubt is not None and answer.status == 400
        if failure is None and answer.status >= 300 and self.spec.first_tier and not (is_judged or self._routed.began):
            failure = Failure(FailureKind.LIMITED, message=f"status {answer.status}")
        elif 300 <= answer.status < 400 and answer.status != 304:  # would send the client, key and prompt, elsewhere
            raise ReplicaFailed(f"the replica answers {answer.status}, a redirect, which a router does not pass on")
        if failure is not None:
            body = await answer.whole(messages.MAX_ERROR_BYTES)
            self._is_billed = failure.kind is not FailureKind.ERROR
            if failure.kind is not FailureKind.FULL:
                self._refusal = answer, body
            self._fleet.failed(self._routed, failure, live)
            return False
        if self._routed.began and not (answer.status == 200 and messages.is_stream(answer)):
            why = messages.message_of(await answer.whole(messages.MAX_ERROR_BYTES))
            raise ReplicaFailed(f"{BROKE_OFF}: {why}")
        if self._events is not None and messages.is_stream(answer):
            return await self._stream(answer, stop)
        if answer.status == 200 and not stop.is_last:
            await answer.begin(MAX_KEPT_BYTES)
            self._prompt = messages.cost_told(answer, is_ours=live.is_ours)
            self._is_computed = self._is_billed = True
            return True
        return await self._whole(answer, live)

    def _escalates(self, answer: UpstreamAnswer, live: LiveReplica) -> bool:
        """Whether the next tier is asked in place of this answer, while it can be."""
        doubt, request_id = self._doubt, self._routed.request.request_id
        if doubt is None or not doubt.is_low or not self._fleet.core.sure_from(request_id):
            return False
        if (cost := messages.cost_told(answer, is_ours=live.is_ours)) is not None:
            self._is_billed, self._doubted_us = True, self._doubted_us + cost.compute_us
        self._fleet.escalated(self._routed, live)
        return True

    def _broke_off(self, failed: UpstreamFailed, live: LiveReplica) -> None:
        """The replica failed in the middle of its answer. Raises when the client has a part of it."""
        self._fleet.failed(self._routed, failure_of(failed), live)
        if self._routed.began and not self._routed.is_decided and not self._goes_on:
            raise ReplicaFailed(BROKE_OFF)

    # -- what is not streamed

    async def _whole(self, answer: UpstreamAnswer, live: LiveReplica) -> bool:
        """Send an answer, kept as long as it fits, so that the client hears nothing if a replica dies meanwhile.
        Returns whether the client has it; else the next tier is asked.
        """
        doubt = self._doubt
        body = await answer.begin(MAX_KEPT_BYTES if doubt is None else messages.MAX_JUDGED_BYTES)
        if doubt is not None:
            body = doubt.judged(body)
            doubt.is_low |= answer.status == 400  # it may give no log-probabilities, or have a shorter context
            if self._escalates(answer, live):
                self._kept = (answer, live, body) if answer.status == 200 else self._kept
                return False
            answer.headers = [header for header in answer.headers if header[0] != b"content-length"]
        if answer.is_over:
            await self._send_whole(answer, live, body)
            return True
        self._begin()
        await self._send_head(answer, live)
        while body:
            await self._send_piece(body)
            body = await answer.piece()
        self.usage = messages.cost_told(answer, is_ours=live.is_ours) or AnswerUsage()
        self._is_billed = True
        self._ends()
        await self._send_end()
        return True

    async def _send_whole(self, answer: UpstreamAnswer, live: LiveReplica, body: bytes) -> None:
        usage = AnswerUsage(num_output_tokens=0)
        if self._outgoing.has_usage and answer.status == 200:
            usage = messages.cost_told(answer, is_ours=live.is_ours) or _read(
                partial(messages.read_whole, answer), body
            )
        self._begin()
        self._ends()
        self._is_billed, self.usage = True, usage
        self._on_tokens(self.usage.num_output_tokens or 0, self._fleet.clock.now())
        if self._exchange.started:  # a comment was sent while it was held, so it goes on as a stream
            stream, data = self._exchange.format.stream, body.replace(b"\n", b" ")
            await self._send_end(stream.before_error + data + stream.after_error + stream.end)
            return
        has_body = self._outgoing.method != "HEAD" and answer.status not in (204, 304)
        await self._send_head(answer, live, length=len(body) if has_body else None)
        await self._send_end(body)

    async def _send_kept(self, error: Exception) -> bool:
        """Send the answer that was not sure enough, as no later tier gave one. Raises the error where there is none."""
        if self._kept is None or self._is_cancelled:
            raise error from None
        answer, live, body = self._kept
        self.spec.fell_back = True
        self._is_billed = True
        answer.headers = [header for header in answer.headers if header[0] != b"content-length"]
        await self._send_whole(answer, live, body)
        assert self.usage is not None, "it was sent"
        self._doubted_us -= self.usage.compute_us
        return True

    async def _pass_on_refusal(self, answer: UpstreamAnswer, body: bytes) -> None:
        if answer.status in messages.NOT_THERE:
            path, told = self._exchange.scope["path"], messages.message_of(body)
            raise RouteNotFound(f"no replica has what was asked of it at {shortened(path)}: {answer.status}, {told}")
        headers = [header for header in answer.headers if header[0] in (b"content-type", b"retry-after")]
        await self._exchange.answer(body, answer.status, tuple(headers))

    # -- streams

    async def _stream(self, answer: UpstreamAnswer, stop: messages.Leg) -> bool:
        """Whole events only, so that an error or another replica's can follow wherever it breaks off; those that are
        judged at the end. Returns whether the client has them; else the next tier is asked.
        """
        live, doubt = stop.live, self._doubt
        told = self._told if live.is_ours else None
        foreign = messages.ForeignStream(has_lines=self._event == b"\n")  # where nothing is told
        feed = foreign.feed if told is None else told.feed
        await self._send_events(answer, live, self._unsent)
        while piece := await answer.piece():
            events = _read(feed, piece)
            if doubt is not None:
                _read(doubt.hold, events)
                if self._escalates(answer, live):
                    return False
                if self._keep_alive_s and self._events is not None:
                    await self._events.keep_alive()
                continue
            if not self._routed.began and ((told is not None and told.head is not None) or self._event in events):
                self._begin_stream(foreign)
            if events:
                self._count(events)
                await self._send_events(answer, live, events)
            if not stop.is_last and self._goes_on and told is not None and told.has_begun(self._num_each):
                self._tell_tokens()
                self._is_computed = True
                return True
        if told is not None and not told.is_whole:
            raise UpstreamFailed(Broken.WRONG, "its answer ended within a frame")
        stream, is_foreign = self._exchange.format.stream, told is None and answer.status == 200
        if is_foreign and stream.tells_end and not foreign.has_ended(self._num_each):
            raise UpstreamFailed(Broken.WRONG, "its stream ended without a finish reason or [DONE]")
        if doubt is not None:
            self._begin_stream(foreign)
            self._count(events := bytes(doubt.events))
            await self._send_events(answer, live, events)
        self._tell_tokens()
        self.usage = messages.cost_told(answer, is_ours=live.is_ours)
        self._is_billed = self.usage is not None or told is None or told.usage is not None
        if self.usage is None and told is not None:
            self.usage = messages.as_usage(told.usage_so_far())
        self.usage = self.usage or foreign.usage(self._num_tokens)
        if self._pace is not None and self.usage.num_output_tokens:  # better than events
            self._pace.num_tokens = self.usage.num_output_tokens
        await self._send_end(stream.end if is_foreign and not foreign.is_done else b"")
        return True

    def _begin_stream(self, foreign: messages.ForeignStream) -> None:
        if foreign.is_error and not foreign.has_answer:
            raise UpstreamFailed(Broken.WRONG, "its stream begins with an error")
        self._begin()

    async def _send_events(self, answer: UpstreamAnswer, live: LiveReplica, events: bytes) -> None:
        """Send events; those that an interruption keeps from being written go out with the next replica's."""
        exchange = self._exchange
        if not events:
            return
        self._unsent = events
        if not exchange.started:
            exchange.streaming = True
            await self._send_head(answer, live)
        await exchange.raw_send({"type": "http.response.body", "body": events, "more_body": True})
        self._unsent = b""

    def _count(self, events: bytes) -> None:
        num_events = events.count(self._event)
        if self._pace is not None and num_events:
            self._pace.came(time.monotonic(), num_events)
        self._num_tokens += num_events
        self._num_untold += num_events
        if self._num_untold >= TOKENS_AT_ONCE:
            self._tell_tokens()

    def _tell_tokens(self) -> None:
        if self._num_untold:
            now = self._fleet.clock.now()
            self._on_tokens(self._num_untold, now)
            self._fleet.core.progressed(self._routed.request.request_id, self._num_untold, now)
            self._num_untold = 0

    # -- to the client

    def _begin(self) -> None:
        """Begin the answer: no other replica may begin anew. The body is needed only where one could go on."""
        routed = self._routed
        if not routed.began:
            routed.began, self._kept = True, None
            now = self._first_byte_at = self._fleet.clock.now()
            if self._events is not None:  # else it was told before
                self._on_tokens(0, now)
            self._fleet.core.progressed(routed.request.request_id, 0, now)
            if not (self._goes_on and self._fleet.kept_bodies.keep(routed, len(self._outgoing.body))):
                self._outgoing.body = b""
            self._exchange.large_bodies.release(self._exchange)

    async def _send_head(self, answer: UpstreamAnswer, live: LiveReplica, length: int | None = None) -> None:
        """`length` is of a body that may have come without one."""
        self._exchange.log["replica"] = live.facts.name
        is_traced = self._exchange.trace_header is not None
        headers = messages.towards_client(
            answer.headers, live.name, round(self._routed.request.held_s * 1000), is_traced=is_traced
        )
        if length is not None and not any(name == b"content-length" for name, _ in headers):
            headers.append((b"content-length", b"%d" % length))
        if self.spec.fell_back:
            headers.append((messages.ESCALATION, b"failed"))
        await self._exchange.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _send_piece(self, piece: bytes) -> None:
        await self._exchange.raw_send({"type": "http.response.body", "body": piece, "more_body": True})

    def _ends(self) -> None:
        """Note the end: tokens of an answer that is not streamed are not seen to come, only that all are there."""
        if self._pace is not None:
            self._pace.last_at = time.monotonic()

    async def _send_end(self, last: bytes = b"") -> None:
        await self._exchange.send({"type": "http.response.body", "body": last})


def _read(read: Callable[[bytes], _Read], piece: bytes) -> _Read:
    try:
        return read(piece)
    except BrokenFrame as error:
        raise UpstreamFailed(Broken.WRONG, f"its answer cannot be read: {error}") from None


def failure_of(failed: UpstreamFailed) -> Failure:
    """The failure as the core counts it."""
    kinds = {
        Broken.REFUSED: FailureKind.RESET,
        Broken.RESET: FailureKind.RESET,
        Broken.SILENT: FailureKind.SILENT,
        Broken.WRONG: FailureKind.ERROR,
    }
    return Failure(kinds[failed.broken], message=str(failed))

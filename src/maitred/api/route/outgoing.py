"""A request as replicas get it, and where it goes: to one of them, or to one that computes its prompt and one that
answers, which pulls the KV (docs/disaggregation.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import NamedTuple

from maitred.api.http.exchange import Header
from maitred.api.http.fleet_headers import KV_EXPECTED, NUM_CACHED, PROMPT_ONLY, kv_from_headers, time_left_headers
from maitred.api.route.fleet import LiveReplica
from maitred.fleet.balance import Choice
from maitred.fleet.fleet_request import Usage
from maitred.fleet.upstream import Ask, UpstreamFailed, request_head
from maitred.gate.terms import NO_LIMITS, TimeLimits

MAX_ERROR_BYTES = 64 * 1024


@dataclass(slots=True)
class Outgoing:
    """A request as every replica gets it."""

    method: str
    target: str  # path and query
    headers: list[Header]
    body: bytes
    secret: list[Header] = field(default_factory=list)  # only for replicas that hold the fleet's token
    is_generation: bool = False  # its answer has tokens
    has_usage: bool = False  # and says how many it took
    is_stream: bool = False
    limits: TimeLimits = NO_LIMITS  # from its arrival

    @property
    def tells(self) -> bool:
        """Whether our own replicas are asked to tell the tokens of the answer."""
        return self.is_stream and bool(self.secret)

    def ask(self, live: LiveReplica, age_s: float, told: Sequence[Header] = ()) -> Ask:
        """`age_s` ago it arrived; `told` is for a replica that hands KV over."""
        headers = [*self._secretly(age_s), *told] if live.is_ours and self.secret else self.headers
        head = request_head(self.method, self.target, live.origin, headers, len(self.body))
        return Ask(head, self.body, is_head=self.method == "HEAD")

    def resume(self, live: LiveReplica, body: bytes, age_s: float, told: Sequence[Header] = ()) -> Ask:
        """The ask to go on where another replica left off."""
        headers = [*self._secretly(age_s), *told]
        return Ask(request_head("POST", "/fleet/resume", live.origin, headers, len(body)), body)

    def _secretly(self, age_s: float) -> list[Header]:
        left = time_left_headers(self.limits, age_s) if self.limits != NO_LIMITS else ()
        return [*self.headers, *self.secret, *left]

    def may_hand_over(self) -> bool:
        """Whether one replica may compute the prompt and another answer."""
        return self.is_generation and bool(self.secret)


class Stop(NamedTuple):
    """A replica on a request's way."""

    live: LiveReplica
    kv_from: Sequence[str] = ()  # addresses where it finds KV of the prompt
    is_last: bool = True  # else it computes the prompt, and the next one answers

    def headers(self, *, is_stream: bool, prompt: Usage | None) -> list[Header]:
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


async def tell_expected(outgoing: Outgoing, stop: Stop, age_s: float) -> None:
    """Have KV leave while it is computed. Without this it leaves later, so a failure is not reported."""
    with suppress(UpstreamFailed):
        answer = await stop.live.upstream.send(outgoing.ask(stop.live, age_s, stop.expects))
        try:
            await answer.whole(MAX_ERROR_BYTES)
        finally:
            answer.abort()


def stops_of(choice: Choice, replicas: Mapping[str, LiveReplica], *, may_hand_over: bool) -> list[Stop]:
    """The stops, in order. Without a hand-over (the request has begun, say) the last one finds what KV there is."""
    answers, computes = replicas[choice.replica], replicas.get(choice.prefill or "")
    peer = replicas.get(choice.fetch_from or "")
    finds = peer.kv_addresses if peer is not None else ()
    if computes is None:
        return [Stop(answers, finds)]
    last = Stop(answers, computes.kv_addresses)
    return [Stop(computes, finds, is_last=False), last] if may_hand_over else [last]


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

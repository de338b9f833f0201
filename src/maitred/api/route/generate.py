"""Requests to a replica: completions, read once for what decides where, and every other path, as it is."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec
from msgspec import UNSET

from maitred.api.generate.dialect import HEADERS
from maitred.api.http.exchange import Exchange, Header
from maitred.api.http.fleet_headers import vouching
from maitred.api.http.results import WantedAnswer
from maitred.api.ops.metrics_page import TenantCounts
from maitred.api.route.fleet import RoutedRequest
from maitred.api.route.messages import CREDENTIALS, Outgoing, shows_logprobs, towards_replica, with_logprobs
from maitred.api.route.relay import Relay
from maitred.api.route.router import Router
from maitred.core.errors import InvalidRequest, RateLimited, RouteNotFound, Unavailable
from maitred.core.objectives import new_pace
from maitred.core.request import FinishReason, Terms
from maitred.fleet.balance import hash_of
from maitred.fleet.fleet_request import AnswerUsage, FleetRequest
from maitred.fleet.prefix_keys import (
    MESSAGES,
    NO_KEYS,
    OLLAMA,
    RoutedBody,
    generate_asked,
    keep_alive_s,
    prefix_keys,
    read_asked,
    read_body,
)
from maitred.fleet.told import SEED, TELL, Count
from maitred.fleet.upstream import UpstreamFailed
from maitred.gate.gate import NO_LIMITS, Ask, Lease, TimeLimits
from maitred.tenancy.caller import Caller
from maitred.tenancy.tenant import TIERS

BYTES_A_TOKEN = 4  # of English
_NONE = AnswerUsage(complete=False)
_HEADERS = [(field, name.encode()) for field, name in HEADERS.items()]
_NAMES = frozenset(name for _, name in _HEADERS)


@dataclass(slots=True)
class RouteLease:
    """A lease granted until the `with` ends. `usage`, as known by then, settles what was taken."""

    lease: Lease
    limits: TimeLimits  # of request, tenant and router, the strictest
    counts: TenantCounts
    usage: AnswerUsage | None = None
    default_max_tokens: int | None = None  # of each sample, where the request names none

    def terms(self, now: float) -> Terms:
        """Terms of the request, which came now."""
        return self.lease.terms(self.limits.asked(now), now)

    def take(self, request: FleetRequest, *, is_silent: bool) -> tuple[str, ...]:
        """A place in the queue, and of the tenant's quota the prompt and most tokens of all samples; gives the ids of
        those that leave the queue for it. Raises as `Gate.admit`.

        A request that is silent of a limit gets the tenant's own, or a share of what is left.
        """
        lease, now = self.lease, request.arrived_at
        if is_silent and lease.quota is not None:
            self._limit_silent(request, now)
        num_tokens = request.num_prompt_tokens + request.max_tokens * request.num_samples
        return lease.gate.let_in(lease, (request,), num_tokens, now)

    def is_over(self, request: FleetRequest) -> bool:
        """Whether the tenant may never use as many tokens as the request is estimated to take."""
        if self.lease.quota is None:
            return False
        quota = self.lease.caller.quota
        budget = None if quota.limits.token_budget is None else quota.limits.token_budget - quota.spent_tokens
        needed = request.num_prompt_tokens + request.max_tokens * request.num_samples
        return any(most is not None and needed > most for most in (quota.limits.tokens_per_minute, budget))

    def _limit_silent(self, request: FleetRequest, now: float) -> None:
        caller = self.lease.caller
        share = caller.quota.silent_max_tokens(request.num_prompt_tokens, request.num_samples, now)
        limits = [limit for limit in (caller.tenant.default_max_tokens, share) if limit is not None]
        if limits:
            self.default_max_tokens = request.max_tokens = max(1, min(limits))

    def tokens_came(self, num_tokens: int, now: float) -> None:
        """Count more tokens of the answer; with the first call the request waits no longer."""
        lease = self.lease
        if lease.waiting and lease.quota is not None:
            for _ in range(lease.num_samples - 1):  # the gate knows them for one
                lease.quota.first_token()
        for request_id in lease.request_ids:
            lease.tokens_came(request_id, num_tokens, now)

    def __enter__(self) -> RouteLease:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """End the lease; the request came to its end if usage says so."""
        usage, caller = self.usage or _NONE, self.lease.caller
        prompt, output = usage.num_prompt_tokens or 0, usage.num_output_tokens or 0
        self.lease.end(prompt + output, FinishReason.STOP if usage.complete else FinishReason.ABORT)
        if not caller.is_anybody:
            self.counts.left(caller.quota, prompt, output)
            if isinstance(error, RateLimited):
                self.counts.refused(caller.tenant.name, error)


def leased(router: Router, exchange: Exchange, read: RoutedBody) -> RouteLease:
    """A lease for `with`, until the request has its answer. Raises as `Gate.enter`."""
    caller, counts = exchange.caller, router.metrics.tenants
    asked = _limits(read, exchange.headers)
    ask = Ask(num_samples=max(1, read.n or 1), priority=_priority(caller, read), limits=asked)
    try:
        lease = router.gate.enter(caller, ask, router.clock.now())
    except RateLimited as error:
        counts.refused(caller.tenant.name, error)
        raise
    if not caller.is_anybody:
        counts.entered(caller.quota)
    return RouteLease(lease, asked.and_also(lease.limits), counts)


def _priority(caller: Caller, read: RoutedBody) -> int:
    """The priority asked for, which the gate checks; the replica refuses what is no tier."""
    if read.priority is not None:
        return read.priority
    known = not caller.is_anybody and read.service_tier in TIERS
    return caller.tenant.priority_of_tier(read.service_tier if known else None)


def _limits(read: RoutedBody, headers: Mapping[bytes, bytes]) -> TimeLimits:
    """The request's limits, a field before its header; the replica refuses what is no number of milliseconds."""
    if read.ttft_slo_ms is read.queue_timeout_ms is read.timeout_ms is None and _NAMES.isdisjoint(headers):
        return NO_LIMITS
    return TimeLimits(*(_seconds(getattr(read, field), headers.get(name)) for field, name in _HEADERS))


def _seconds(field: float | None, header: bytes | None) -> float | None:
    if field is None and header is not None:
        with suppress(ValueError):
            field = float(header)
    return field / 1000.0 if field is not None and field > 0 else None


MAX_TOKENS = 256  # assumed where a request names no limit
NOT_PASSED_ON = (  # for a replica's own administrators, for routers, and for clients that share its memory
    "/admin/",
    "/fleet/",
    "/v2/repository/models/",
    "/v2/systemsharedmemory/",
    "/v2/cudasharedmemory/",
)
ADMINISTRATIVE = (  # of vLLM, and our own servers' likewise
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/start_profile",
    "/stop_profile",
    "/collective_rpc",
)
MAX_COUNTED_BYTES = 64 * 1024 * 1024  # ids stand beside the count
COUNT_S = 2.0  # for a replica to count a prompt's tokens; without an answer the estimate holds
_random = random.Random()  # seeds are no secrets
SESSION, PRIVACY = b"x-session-id", b"x-maitred-privacy"


async def generate(router: Router, exchange: Exchange) -> None:
    """A chat or text completion, or Triton's generate."""
    await generate_body(router, exchange, await exchange.body())


async def generate_body(router: Router, exchange: Exchange, body: bytes) -> None:
    """Route a body that was read, as `generate`."""
    async with exchange.turn():
        read = read_asked(exchange.scope["path"], body)
        keys = prefix_keys(read, router.salt_of(exchange.caller)).keys
    await _route(router, exchange, body, read, keys, is_generation=True, has_usage=True)


async def embed(router: Router, exchange: Exchange) -> None:
    """Vectors of texts, whose tokens count."""
    body = await exchange.body()
    async with exchange.turn():
        read = read_body(body)
    read.max_tokens = 1  # for it generates none
    await _route(router, exchange, body, read, NO_KEYS.keys, has_usage=True)


async def post_kserve(router: Router, exchange: Exchange) -> None:
    """A language model is asked for text, and whatever else stands under /v2."""
    is_text = generate_asked(exchange.scope["path"]) is not None
    await (generate if is_text else pass_through)(router, exchange)


async def pass_through(router: Router, exchange: Exchange) -> None:
    """Any other path: some replica answers it, which has the model if one is named."""
    path = exchange.scope["path"]
    if path.startswith(NOT_PASSED_ON):
        raise RouteNotFound(f"{path} is not passed on to replicas; ask one at its own address")
    if path in ADMINISTRATIVE:
        exchange.caller.require_admin(f"use {path}")
    body = await exchange.body()
    read = read_body(body) if body else RoutedBody()
    read.model = await router.models.named_in(path) or read.model
    await _route(router, exchange, body, read, NO_KEYS.keys)


async def _route(
    router: Router,
    exchange: Exchange,
    body: bytes,
    read: RoutedBody,
    keys: tuple[int, ...],
    *,
    is_generation: bool = False,
    has_usage: bool = False,
) -> None:
    if is_generation and not router.observer.promises.is_empty:
        exchange.paces = (new_pace(keeps_gaps=router.observer.promises.keeps_gaps),)
    if router.draining:
        raise Unavailable("the router is shutting down; try again", retry_after_s=1.0)
    read.model = _model_asked(router, exchange, read.model, has_usage=has_usage)
    await router.models.check(read.model, exchange.caller)
    is_local = _is_local(exchange)
    # an answer that is pinned to a tier is never in a cache beyond that tier
    wanted = _wanted(router, exchange, body, read) if is_generation and not is_local else None
    with leased(router, exchange, read) as granted:
        if wanted is not None and await router.results.replay(exchange, wanted):
            if router.ledger is not None:
                router.ledger.replayed(_request(router, exchange, body, read, keys, granted), read.model or "")
            return
        request = _request(router, exchange, body, read, keys, granted)
        if has_usage:
            await _count(router, exchange, body, read, request, granted)
            router.shed(granted.take(request, is_silent=_names_no_limit(read)))
        routed = RoutedRequest(request, exchange)
        outgoing = _outgoing(router, exchange, body, read, granted, is_generation=is_generation, has_usage=has_usage)
        relay = Relay(
            router.fleet, routed, outgoing, keep_alive_s=router.config.sse_keep_alive_s, on_tokens=granted.tokens_came
        )
        if has_usage and router.ledger is not None:
            router.ledger.opened(relay, request.model or "")
            if is_generation:  # of which replicas tell what came to no end
                relay.bill = router.fleet.bills.opened(exchange.request_id)
        try:
            await relay.run()
        finally:
            granted.usage = relay.spent
            if relay.bill is not None:
                router.fleet.bills.close(exchange.request_id, relay.bill, relay.ended)
            else:
                relay.ended()
            router.metrics.routed(exchange.log.get("replica", ""), relay.outcome, request.held_s)
            router.metrics.num_fell_back += request.fell_back
        if wanted is not None and not request.fell_back:
            router.results.keep(exchange, wanted)


def _model_asked(router: Router, exchange: Exchange, named: str | None, *, has_usage: bool) -> str | None:
    """The model by the name that is served. Of several models a generation that names none gets the first; other paths
    are answered by any that is loaded. Raises Unavailable where none is.
    """
    core = router.fleet.core
    if exchange.scope["path"].startswith(OLLAMA):
        named = router.models.untagged(named)
    if named is not None or core.several is None:
        return named
    if not has_usage and not core.fleet.ready:
        raise Unavailable("the request names no model, and none is loaded; name one", retry_after_s=1.0)
    return core.several.models[0].name if has_usage else None


def _wanted(router: Router, exchange: Exchange, body: bytes, read: RoutedBody) -> WantedAnswer | None:
    """What the result cache may answer; None where a quota may cut an answer short, as another time it is longer."""
    tenant = exchange.caller.tenant
    limits = tenant.limits
    if not router.results.is_on or (
        _names_no_limit(read) and (limits.tokens_per_minute, limits.token_budget) != (None, None)
    ):
        return None
    revision = f"{router.fingerprints(read.model)}:{tenant.default_max_tokens}"
    return router.results.wanted(exchange, body, revision=revision, temperature=read.temperature, seed=read.seed)


def _names_no_limit(read: RoutedBody) -> bool:
    return read.max_completion_tokens is None and read.max_tokens is None


def _request(
    router: Router, exchange: Exchange, body: bytes, read: RoutedBody, keys: tuple[int, ...], granted: RouteLease
) -> FleetRequest:
    now = router.clock.now()
    num_bytes = _num_prompt_bytes(body, read)
    return FleetRequest(
        request_id=router.fleet.free_id(exchange.request_id),
        arrived_at=now,
        num_bytes=num_bytes,
        num_inputs=max(1, num_bytes // BYTES_A_TOKEN),
        max_tokens=read.max_completion_tokens or read.max_tokens or MAX_TOKENS,
        model=read.model,
        terms=granted.terms(now),
        num_samples=max(1, read.n or 1),
        keys=keys,
        hash_key=_hash_key(exchange, read, keys),
        keep_alive_s=keep_alive_s(read.keep_alive) if exchange.scope["path"].startswith(OLLAMA) else None,
        can_resume=bool(read.stream) and router.fleet_token.is_set,
        is_local=_is_local(exchange),
    )


def _is_local(exchange: Exchange) -> bool:
    """Raises InvalidRequest for a pin that does not exist: a slip of the pen must not send a prompt away."""
    told = exchange.headers.get(PRIVACY, b"local").strip().lower()
    if told != b"local":
        raise InvalidRequest(f"the header {PRIVACY.decode()} is {told.decode('latin-1')!r}; its one value is local")
    return PRIVACY in exchange.headers


class _Counted(msgspec.Struct):
    count: Count | None = None
    input_tokens: Count | None = None  # as Anthropic's clients are told


async def _count(
    router: Router, exchange: Exchange, body: bytes, read: RoutedBody, request: FleetRequest, granted: RouteLease
) -> None:
    """Ask a replica, of its tier where the request is pinned, for the prompt's tokens where their estimate would refuse
    the request.
    """
    name = router.fleet.core.counter(request, is_needed=granted.is_over(request))
    live = router.fleet.replicas.get(name or "")
    if live is None:
        return
    target = "/tokenize"
    if exchange.scope["path"] == MESSAGES:
        target = f"{MESSAGES}/count_tokens"
    else:
        fields = {name: getattr(read, name) for name in ("model", "messages", "prompt", "chat_template_kwargs")}
        body = msgspec.json.encode({name: value for name, value in fields.items() if value not in (None, UNSET)})
    outgoing = _outgoing(router, exchange, body, read, granted, is_generation=False, has_usage=False)
    outgoing.method, outgoing.target = "POST", target
    with suppress(UpstreamFailed, TimeoutError, msgspec.DecodeError):
        async with asyncio.timeout(COUNT_S):
            answer = await live.upstream.send(outgoing.ask(live, 0.0))
            try:
                told = await answer.whole(MAX_COUNTED_BYTES)
            finally:
                answer.abort()
        if answer.status == 200:
            counted = msgspec.json.decode(told, type=_Counted)
            if (num_tokens := counted.count if counted.input_tokens is None else counted.input_tokens) is not None:
                request.num_inputs = request.num_counted = num_tokens


def _num_prompt_bytes(body: bytes, read: RoutedBody) -> int:
    """Length of messages, prompt and tools; of another body all of it."""
    texts = [text for text in (read.messages, read.prompt, read.tools) if isinstance(text, bytes | memoryview)]
    return sum(map(len, texts)) or len(body)


def _hash_key(exchange: Exchange, read: RoutedBody, keys: tuple[int, ...]) -> int | None:
    """The key that `hash` and `session` go by."""
    session = exchange.headers.get(SESSION)
    named = session.decode("latin-1") if session else read.session_id or read.prompt_cache_key or read.user
    if named:
        return hash_of(named)
    return keys[0] if keys else None


def _to_go_on(read: RoutedBody) -> list[Header]:
    """Headers by which another replica can give the same answer, or the rest of it."""
    seed = (SEED, b"%d" % _random.getrandbits(63))
    return [seed, (TELL, b"1")] if read.stream else [seed]


def _vouched(router: Router, exchange: Exchange, granted: RouteLease, model: str | None) -> list[Header]:
    """Headers that vouch for the caller; a router that asks for no key sends none."""
    if router.authenticator.is_open:
        return []
    caller = exchange.caller
    return vouching(
        caller,
        salt=router.salt_of(caller),
        priority=granted.lease.priority,
        default_max_tokens=granted.default_max_tokens,
        model=model,
    )


def _outgoing(
    router: Router,
    exchange: Exchange,
    body: bytes,
    read: RoutedBody,
    granted: RouteLease,
    *,
    is_generation: bool,
    has_usage: bool,
) -> Outgoing:
    scope = exchange.scope
    headers = towards_replica(exchange)
    secret = router.fleet_token.shown()
    if secret:
        secret += _vouched(router, exchange, granted, read.model)
        if is_generation:
            secret += _to_go_on(read)
    if router.authenticator.is_open:  # they are for the replicas
        headers += [(name, exchange.headers[name]) for name in CREDENTIALS if name in exchange.headers]
    query = scope["query_string"]
    target = scope["raw_path"].decode("latin-1") + (f"?{query.decode('latin-1')}" if query else "")
    cascades = is_generation and any(tier.escalate_below for tier in router.fleet.core.fleet.tiers)
    return Outgoing(
        method=scope["method"],
        target=target,
        headers=headers,
        body=body,
        judged_body=with_logprobs(scope["path"], body, read) if cascades else b"",
        hides_logprobs=not shows_logprobs(read),
        secret=secret,
        is_generation=is_generation,
        has_usage=has_usage,
        is_stream=is_generation and bool(read.stream),
        limits=granted.limits,
    )

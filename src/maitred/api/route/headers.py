"""Headers across the router: what of a client's request reaches a replica, and what of its answer the client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from maitred.api.http.exchange import Exchange, Header
from maitred.api.http.ignored_fields import TOLD_OF_BODIES

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
_NOT_FORWARDED = HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",  # the whole body is here already
    b"accept-encoding",  # usage is read from answers
    b"authorization",  # see `credentials`
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


def towards_replica(exchange: Exchange) -> list[Header]:
    """Headers of a request for any replica; `x-forwarded-for` names the client."""
    sent = exchange.scope["headers"]
    named = _named_by_connection(sent)
    dropped = _NOT_FORWARDED | named if named else _NOT_FORWARDED
    kept = [header for header in sent if header[0] not in dropped and not header[0].startswith(OWN)]
    kept.append((b"x-request-id", exchange.request_id.encode()))
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

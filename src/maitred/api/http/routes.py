"""A route as one record: what server, document, keys, start, log and traces know of a path, and its answers' format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from maitred.api.http.errors import HttpError, MethodNotAllowed, shortened
from maitred.core.errors import RouteNotFound, did_you_mean
from maitred.tenancy.quota import TenantQuota

SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not collect events
)


class StreamFormat(NamedTuple):
    """Format of answers sent piece by piece: server-sent events (WHATWG HTML, 9.2) by default."""

    end: bytes = b""  # after the last event
    headers: tuple[tuple[bytes, bytes], ...] = SSE_HEADERS
    keep_alive: bytes = b": keep-alive\n\n"  # what readers skip, for silent times; empty where there is no such thing
    before_error: bytes = b"data: "  # begins the event of an error
    after_error: bytes = b"\n\n"
    tells_end: bool = True  # a whole stream says that it is one, by `end` or its last event


class DialectFormat(NamedTuple):
    """How the clients of a dialect are told of errors, and how their streams end. A route names its own."""

    stream: StreamFormat
    error_schema: type[msgspec.Struct]
    """Schema of error bodies, for the OpenAPI document."""
    told: Callable[[HttpError], msgspec.Struct]
    statuses: Mapping[str | None, int] = {}
    """Statuses by an error's code, where the dialect has its own."""
    id_headers: tuple[bytes, ...] = (b"x-request-id",)
    """Headers of every answer with the request's id."""
    limit_headers: Callable[[TenantQuota, float], Iterable[tuple[str, str]]] = TenantQuota.headers
    """Headers of every answer to a tenant with limits, as of now."""

    def error_body(self, error: HttpError) -> bytes:
        """JSON, with the error's status."""
        return msgspec.json.encode(self.told(error))

    def error_event(self, error: HttpError) -> bytes:
        """The error as an event of a stream that has begun, before its end: the status can't change any more."""
        return self.stream.before_error + self.error_body(error) + self.stream.after_error


GENERATION_ERRORS = (400, 401, 403, 404, 413, 415, 429, 500, 503, 504)
"""Statuses of errors where a model answers."""


class ErrorText(msgspec.Struct, frozen=True):
    error: str


TEXT_ERRORS = DialectFormat(StreamFormat(tells_end=False), ErrorText, lambda error: ErrorText(error.message))
"""Errors as KServe v2 and TF Serving tell them: one text."""


Handler = Callable[..., Awaitable[None]]  # of an App and an Exchange, which know routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method of one path. A path may end in one parameter, `{name}`, or `{name:path}` which takes slashes too."""

    path: str
    handler: Handler
    summary: str
    method: str = "GET"
    format: DialectFormat | None = None  # its dialect's; None is the table's
    # access
    is_open: bool = False  # needs no key; of a path with a parameter, for `open_names` alone
    open_names: frozenset[str] = frozenset()
    is_for_routers: bool = False  # the fleet's token opens it too
    admin: str = ""  # what it takes an administrator's key for, in words; empty is for every key
    while_loading: bool = False  # answered before the engine is there
    # how much of it is told
    is_polled: bool = False  # asked every second by supervisors and routers: a 503 is no news for the log
    is_asset: bool = False  # asked thirty at once: an access line for the debug log
    span: str = ""  # gen_ai.operation.name of its traces; empty has none
    span_ends: tuple[str, ...] = ()  # of a path with a parameter: the ends of those paths that are traced
    # its shape, for the document
    body: type[msgspec.Struct] | None = None
    body_type: str = "application/json"
    answer: type[msgspec.Struct] | None = None
    event: Any = None  # of the streamed form: a struct, or a union of them
    text: str | None = None  # content type of an answer that is not JSON
    tells_ignored: bool = False  # in a header: the fields of a body that it does not know
    errors: tuple[int, ...] = (401,)
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # name -> schema

    @property
    def template(self) -> str:
        """The path as the document, metrics and traces name it."""
        return self.path.replace(":path", "")


class FoundRoute(NamedTuple):
    """The route at a path, and all that a request's way there asks of it."""

    route: Route | None  # None where `find` raises why
    parameter: str
    format: DialectFormat  # for its errors too, whatever comes before its route is asked
    span: str
    needs_key: bool  # unknown paths too, so that a new route cannot be forgotten
    is_for_routers: bool
    needs_engine: bool


class RouteTable:
    """Finds routes by the path of the request line; what is not listed is not there."""

    def __init__(self, routes: Iterable[Route], format: DialectFormat, fallback: Route | None = None) -> None:
        """`format` is of routes that name none, and of what is said where there is no route. `fallback` answers what is
        not listed, whatever its method.
        """
        self.routes, self.format, self._fallback = tuple(routes), format, fallback
        self._exact: dict[str, dict[str, Route]] = {}
        self._prefixed: dict[str, dict[str, Route]] = {}  # by what stands before the parameter
        for route in self.routes:
            before, brace, _ = route.path.partition("{")
            where = self._prefixed if brace else self._exact
            where.setdefault(before, {})[route.method] = route
        self._open = {route.path for route in self.routes if route.is_open and not route.open_names}
        for route in self.routes:
            self._open |= {route.path.partition("{")[0] + name for name in route.open_names}
        self._for_routers = {route.path for route in self.routes if route.is_for_routers}
        self._while_loading = {route.path for route in self.routes if route.while_loading} | self._open
        self._known = {
            (method, path): self._look(method, path) for path, methods in self._exact.items() for method in methods
        }

    def look(self, method: str, path: str) -> FoundRoute:
        """The route at a path; one look into a dict for those asked most."""
        return self._known.get((method, path)) or self._look(method, path)

    def _look(self, method: str, path: str) -> FoundRoute:
        try:
            route, parameter = self.find(method, path)
        except (RouteNotFound, MethodNotAllowed):
            route, parameter = None, ""
        return FoundRoute(
            route=route,
            parameter=parameter,
            format=self._format_of(method, path),
            span=route.span if route is not None and (route.path == path or path.endswith(route.span_ends)) else "",
            needs_key=path not in self._open,
            is_for_routers=path in self._for_routers,
            needs_engine=path not in self._while_loading,
        )

    def _format_of(self, method: str, path: str) -> DialectFormat:
        """The route's own format, or that of another method of the path."""
        methods = self._exact.get(path) or self._by_prefix(path)[0] or {}
        routes = (*filter(None, [methods.get(method)]), *methods.values())
        return next((route.format for route in routes if route.format is not None), self.format)

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route, and its parameter. HEAD is a GET. Raises RouteNotFound or MethodNotAllowed."""
        methods, parameter = self._exact.get(path), ""
        if methods is None:
            methods, parameter = self._by_prefix(path)
        if methods is None and self._fallback is not None:
            return self._fallback, path
        if methods is None:
            meant = self._meant(path[:200])
            raise RouteNotFound(f"there is nothing at {shortened(path)}{meant}; GET /openapi.json lists what there is")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allow = ", ".join(sorted({*methods, "HEAD"} if "GET" in methods else methods))
            raise MethodNotAllowed(f"{shortened(path)} does not take {shortened(method)}; use {allow}", allow=allow)
        return route, parameter

    def _meant(self, path: str) -> str:
        """A base URL without /v1, or with more before it, is the commonest slip."""
        asked = path.rstrip("/")
        for known in self._exact:
            if asked and known.strip("/") and (known.endswith(asked) or asked.endswith(known)):
                return f" (did you mean {known}?)"
        return did_you_mean(path, self._exact, cutoff=0.8)

    def _by_prefix(self, path: str) -> tuple[dict[str, Route] | None, str]:
        for before, methods in self._prefixed.items():
            if not path.startswith(before):
                continue
            rest = path.removeprefix(before)
            if any(route.path.endswith(":path}") for route in methods.values()) or (rest and "/" not in rest):
                return methods, rest
        return None, ""

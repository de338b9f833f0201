"""Calls of gRPC: callers, limits, deadlines, and errors as statuses."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError

from maitred.api.http.app import App
from maitred.api.http.errors import http_error
from maitred.api.http.logs import ACCESS, ERRORS, log_fields
from maitred.core import errors
from maitred.gate.gate import TimeLimits
from maitred.tenancy.caller import Caller

PUSHBACK = "grpc-retry-pushback-ms"
_NEVER = "-1"

# The first match counts, so subclasses stand before their bases.
_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (errors.InvalidApiKey, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.RequestTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.RouteNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.RegionNotFound, grpc.StatusCode.NOT_FOUND),
    (errors.UnsupportedParameter, grpc.StatusCode.UNIMPLEMENTED),
    (errors.RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.RequestTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.EngineDead, grpc.StatusCode.UNAVAILABLE),
)


class GrpcError(NamedTuple):
    """The status of a call that has no answer."""

    code: grpc.StatusCode
    message: str
    trailing: tuple[tuple[str, str], ...] = ()  # metadata


def grpc_error(error: BaseException) -> GrpcError:
    """The status of an exception; unexpected ones reveal nothing of their content to the client."""
    code = next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)
    return GrpcError(code, http_error(error).message, _pushback(error))


def _pushback(error: BaseException) -> tuple[tuple[str, str], ...]:
    if not isinstance(error, errors.Unavailable | errors.RateLimited):
        return ()
    after_s = error.retry_after_s
    return ((PUSHBACK, _NEVER if after_s is None else str(max(1, math.ceil(after_s * 1000)))),)


AUTHORIZATION = "authorization"
Decode = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class Call:
    """What a method gets beside its message."""

    caller: Caller
    limits: TimeLimits  # the client's deadline


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a service: `answer` gives a message or what is sent of it, `stream` takes and gives many."""

    decode: Decode
    answer: Callable[[Any, Call], Awaitable[Any]] | None = None
    stream: Callable[[AsyncIterator[Any], Call], AsyncGenerator[bytes, None]] | None = None
    is_open: bool = False  # needs no key
    admin: str = ""  # what it takes an administrator's key for, in words


class RpcService:
    """A service of a protocol, by its name there."""

    name: str
    methods: Mapping[str, Method]


def handler_of(app: App, service: RpcService) -> grpc.GenericRpcHandler:
    """The service for grpc.aio. Messages are decoded by us: one that is broken is the client's fault."""
    handlers = {name: _rpc_handler(app, f"/{service.name}/{name}", method) for name, method in service.methods.items()}
    return grpc.method_handlers_generic_handler(service.name, handlers)


def _rpc_handler(app: App, path: str, method: Method) -> grpc.RpcMethodHandler:
    if method.stream is not None:
        return grpc.stream_stream_rpc_method_handler(partial(_streamed, app, path, method))
    return grpc.unary_unary_rpc_method_handler(partial(_answered, app, path, method))


async def _answered(app: App, path: str, method: Method, content: bytes, context: grpc.aio.ServicerContext) -> bytes:
    assert method.answer is not None
    with _told(app, path, context) as ended:
        try:
            told = await method.answer(_decoded(method, content), _call(app, method, context))
        except Exception as error:
            await _refuse(context, error, ended)
        encoded: bytes = told if isinstance(told, bytes) else told.SerializeToString()
        ended.code = grpc.StatusCode.OK
        return encoded


async def _streamed(
    app: App, path: str, method: Method, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
) -> None:
    """Writes the answers rather than yield them: gRPC leaves a generator whose client is gone to the garbage collector,
    which ends it when the call is no more.
    """
    assert method.stream is not None
    with _told(app, path, context) as ended:
        try:
            decoded = (_decoded(method, content) async for content in requests)
            async with aclosing(method.stream(decoded, _call(app, method, context))) as answers:
                async for told in answers:
                    await context.write(told)
        except Exception as error:
            await _refuse(context, error, ended)
        ended.code = grpc.StatusCode.OK


@dataclass(slots=True)
class _Ended:
    code: grpc.StatusCode = grpc.StatusCode.CANCELLED  # unless it came to an end


@contextmanager
def _told(app: App, path: str, context: grpc.aio.ServicerContext) -> Iterator[_Ended]:
    """Log one access line per call. The context may be gone at its end, so the peer is read at its beginning."""
    ended, began_at, client = _Ended(), app.clock.now(), context.peer()
    try:
        yield ended
    finally:
        ms = round((app.clock.now() - began_at) * 1000, 1)
        fields = {"method": "GRPC", "path": path, "status": ended.code.name, "ms": ms, "client": client}
        log_fields(ACCESS, logging.INFO, "access", fields)


def _call(app: App, method: Method, context: grpc.aio.ServicerContext) -> Call:
    """Raises InvalidApiKey and PermissionDenied."""
    sent = next((value for name, value in context.invocation_metadata() or () if name == AUTHORIZATION), None)
    key = sent.encode() if isinstance(sent, str) else sent
    caller = app.authenticator.check(key, is_open=method.is_open)
    if method.admin:
        caller.require_admin(method.admin)
    return Call(caller, TimeLimits(timeout_s=context.time_remaining()))


def _decoded(method: Method, content: bytes) -> Any:
    try:
        return method.decode(content)
    except (DecodeError, ValueError) as error:
        raise errors.InvalidRequest(f"the message cannot be decoded: {error}") from None


async def _refuse(context: grpc.aio.ServicerContext, error: Exception, ended: _Ended) -> None:
    """Ends the call; logs what was not raised on purpose."""
    if not isinstance(error, errors.MaitredError):
        ERRORS.error("request failed", exc_info=error)
    told = grpc_error(error)
    ended.code = told.code
    await context.abort(told.code, told.message, told.trailing)

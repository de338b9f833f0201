"""Convert our exceptions to gRPC: status code, message, and when to try again (gRPC proposal A6)."""

from __future__ import annotations

import math
from typing import NamedTuple

import grpc

from maitred.api.http.errors import http_error
from maitred.core.errors import (
    EngineDead,
    InvalidApiKey,
    ModelNotFound,
    PermissionDenied,
    RateLimited,
    RegionNotFound,
    RequestError,
    RequestTimeout,
    RequestTooLarge,
    RouteNotFound,
    Unavailable,
    UnsupportedParameter,
)

PUSHBACK = "grpc-retry-pushback-ms"
_NEVER = "-1"

# The first match counts, so subclasses stand before their bases.
_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (InvalidApiKey, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (RateLimited, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestTooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ModelNotFound, grpc.StatusCode.NOT_FOUND),
    (RouteNotFound, grpc.StatusCode.NOT_FOUND),
    (RegionNotFound, grpc.StatusCode.NOT_FOUND),
    (UnsupportedParameter, grpc.StatusCode.UNIMPLEMENTED),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (RequestTimeout, grpc.StatusCode.DEADLINE_EXCEEDED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (EngineDead, grpc.StatusCode.UNAVAILABLE),
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
    if not isinstance(error, Unavailable | RateLimited):
        return ()
    after_s = error.retry_after_s
    return ((PUSHBACK, _NEVER if after_s is None else str(max(1, math.ceil(after_s * 1000)))),)

"""Headers by which a router vouches for a request: the fleet's token, the request's caller, terms, and time left.

A replica believes them only from requests with the fleet's token, and drops them from all others.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hmac import compare_digest
from math import isfinite
from pathlib import Path
from urllib.parse import quote, unquote

from msgspec.structs import replace

from maitred.core.errors import ConfigError, InvalidRequest
from maitred.core.request import Charges, RequestSpec, ResumePoint
from maitred.fleet.launch import TOKEN_VARIABLE
from maitred.fleet.told import SEED, TELL
from maitred.gate.gate import NO_LIMITS, TimeLimits
from maitred.tenancy.caller import ANYBODY, Caller
from maitred.tenancy.quota import QuotaBook
from maitred.tenancy.tenant import CAPTURES, LEAST_URGENT, Tenant

HEADER = b"x-maitred-fleet-token"
MIN_CHARS = 16


class FleetToken:
    """The secret, checked in headers; if it is None, no request can show it."""

    def __init__(self, secret: bytes | None) -> None:
        self._secret = secret

    @property
    def is_set(self) -> bool:
        return self._secret is not None

    def shown(self) -> list[tuple[bytes, bytes]]:
        """The header that shows the secret, for servers that may hear it."""
        return [(HEADER, self._secret)] if self._secret is not None else []

    def is_shown_by(self, headers: Mapping[bytes, bytes]) -> bool:
        """Takes as long for a wrong one as for the right one."""
        return self._secret is not None and compare_digest(headers.get(HEADER, b""), self._secret)


def read_fleet_token(path: str | None) -> FleetToken:
    """The file's first line, else the environment's. Raises ConfigError for a file without one."""
    if path is None:
        inherited = os.environ.get(TOKEN_VARIABLE)
        return FleetToken(inherited.encode() if inherited else None)
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the fleet's token from {path}: {error.strerror}") from None
    if len(secret) < MIN_CHARS or any(byte <= 32 or byte >= 127 for byte in secret):
        raise ConfigError(
            f"{path} holds no fleet token: it takes one line of {MIN_CHARS} or more printable characters without "
            "spaces, the same for the router and its replicas; write one with: openssl rand -hex 32"
        )
    return FleetToken(secret)


Header = tuple[bytes, bytes]
Batches = list[list[RequestSpec]]
TENANT = b"x-maitred-tenant"  # empty where clients have keys and no tenants; without it a router vouches for no caller
WEIGHT, PRIORITY = b"x-maitred-weight", b"x-maitred-priority"
ADAPTER = b"x-maitred-adapter"  # that it names, where its tenant may use it
CAPTURE = b"x-maitred-capture"  # as its tenant lets; never without it
SALT = b"x-maitred-salt"  # of the tenant's cache group
KEY_ID, ADMIN = b"x-maitred-key-id", b"x-maitred-admin"
MAX_TOKENS = b"x-maitred-default-max-tokens"  # of a request that names none
TIME_LEFT = (b"x-maitred-ttft-left-ms", b"x-maitred-queue-left-ms", b"x-maitred-time-left-ms")  # as TimeLimits
CLASS, BACKGROUND = b"x-maitred-class", b"background"  # served with what nobody else uses; never without the caller
KV_FROM = b"x-maitred-kv-from"  # where the prompt's KV may be pulled: addresses with commas between
PROMPT_ONLY = b"x-maitred-prompt-only"  # another replica answers: the prompt is to be computed, and one token
KV_EXPECTED = b"x-maitred-kv-expected"  # it is being computed there: its KV is to be pulled meanwhile, and no more
NUM_CACHED = b"x-maitred-num-cached"  # prompt tokens found cached where the prompt was computed, and counted
MAX_ADDRESSES, MAX_ADDRESS_CHARS = 8, 300
_OF_CALLER = (TENANT, WEIGHT, PRIORITY, SALT, ADAPTER, CAPTURE, KEY_ID, ADMIN, MAX_TOKENS, CLASS)
BELIEVED = frozenset((*_OF_CALLER, *TIME_LEFT, SEED, TELL, KV_FROM, PROMPT_ONLY, KV_EXPECTED, NUM_CACHED))
LEAST_LEFT_S = 0.001


def vouching(
    caller: Caller, *, salt: str, priority: int, default_max_tokens: int | None = None, model: str | None = None
) -> list[Header]:
    """A router's headers for a `caller` of `model`, whose key it has checked; the gate granted the priority."""
    told: list[Header] = [(ADMIN, b"1")] if caller.is_admin else []
    told += [(CLASS, BACKGROUND)] if caller.background else []
    if caller.is_anybody:
        return [(TENANT, b""), *told]
    tenant = caller.tenant
    told += ((TENANT, tenant.name.encode()), (WEIGHT, b"%.12g" % tenant.weight), (PRIORITY, b"%d" % priority))
    told += ((SALT, salt.encode()), (KEY_ID, quote(caller.key_id).encode()))
    if model is not None and tenant.may_use(model):
        told.append((ADAPTER, quote(model).encode()))
    if tenant.capture != CAPTURES[0]:
        told.append((CAPTURE, tenant.capture.encode()))
    return told if default_max_tokens is None else [*told, (MAX_TOKENS, b"%d" % default_max_tokens)]


def time_left_headers(limits: TimeLimits, age_s: float) -> list[Header]:
    """Headers with what is left of the limits of a request that came `age_s` ago."""
    return [
        (name, b"%d" % round(1000 * max(LEAST_LEFT_S, limit - age_s)))
        for name, limit in zip(TIME_LEFT, limits, strict=True)
        if limit is not None
    ]


def kv_from_headers(addresses: Sequence[str]) -> list[Header]:
    return [(KV_FROM, ",".join(addresses).encode())] if addresses else []


def placed_by_router(headers: Mapping[bytes, bytes], batches: Sequence[Sequence[RequestSpec]]) -> Batches:
    """Each prompt's samples, with where their KV is and its cost there, by trusted headers. Raises InvalidRequest."""
    told = headers.get(KV_FROM, b"").decode("latin-1")
    addresses = tuple(told.split(",")) if told else ()
    if len(addresses) > MAX_ADDRESSES or any(len(address) > MAX_ADDRESS_CHARS for address in addresses):
        raise InvalidRequest(
            f"the header {KV_FROM.decode()} of a router has more, or longer, addresses than any worker"
        )
    placed = [[replace(spec, kv_from=addresses) for spec in batch] if addresses else [*batch] for batch in batches]
    if PROMPT_ONLY in headers:
        return [[replace(spec, max_tokens=1) for spec in batch] for batch in placed]
    if NUM_CACHED in headers:
        _charge(placed, int(_number(headers, NUM_CACHED)))
    return placed


def _charge(batches: Batches, num_cached: int) -> None:
    """The first sample of each prompt was in a step elsewhere."""
    for batch in batches:
        first = batch[0]
        charges = Charges(first.num_prompt_tokens, min(num_cached, first.num_prompt_tokens), 0, 0, first.arrived_at)
        batch[0] = replace(first, resumed=ResumePoint(charges=charges))
        num_cached -= charges.num_cached_tokens


def without_believed(headers: dict[bytes, bytes]) -> None:
    """Drop what is believed of routers alone."""
    for name in BELIEVED & headers.keys():
        del headers[name]


def time_left(headers: Mapping[bytes, bytes]) -> TimeLimits:
    """Time limits by trusted headers. Raises InvalidRequest."""
    if TIME_LEFT[0] not in headers and TIME_LEFT[1] not in headers and TIME_LEFT[2] not in headers:
        return NO_LIMITS
    return TimeLimits(*(_number(headers, name) / 1000 if name in headers else None for name in TIME_LEFT))


def vouched_caller(headers: Mapping[bytes, bytes], quotas: QuotaBook, anybody: Caller) -> Caller:
    """The caller by trusted headers: with the terms of the router's tenant, and no limits left to check.

    `quotas` counts its use, and the server's own caller is `anybody`. Raises InvalidRequest for an invalid value.
    """
    is_admin, background = anybody.is_admin and ADMIN in headers, headers.get(CLASS) == BACKGROUND
    name = headers[TENANT].decode("latin-1")
    if not name:
        return Caller(ANYBODY, anybody.quota, is_admin=is_admin, background=background)
    priority = int(_number(headers, PRIORITY))
    tenant = Tenant(
        name=name,
        weight=_number(headers, WEIGHT) or 1.0,
        priorities=(priority, priority),
        default_priority=priority,
        default_max_tokens=int(_number(headers, MAX_TOKENS)) if MAX_TOKENS in headers else None,
        adapters=(unquote(headers[ADAPTER].decode("latin-1")),) if ADAPTER in headers else (),
        capture=headers.get(CAPTURE, b"").decode("latin-1"),
        shared_cache_group=headers.get(SALT, b"").decode("latin-1"),
    )
    return Caller(tenant, quotas.of(tenant), unquote(headers.get(KEY_ID, b"").decode("latin-1")), is_admin, background)


def _number(headers: Mapping[bytes, bytes], name: bytes) -> float:
    """The header's number: at least 0, a priority at most LEAST_URGENT. Raises InvalidRequest."""
    try:
        value = float(headers.get(name, b"0"))
    except ValueError:
        value = -1.0
    if not isfinite(value) or value < 0 or (name == PRIORITY and value > LEAST_URGENT):
        raise InvalidRequest(f"the header {name.decode()} of a router is no number that it could be")
    return value

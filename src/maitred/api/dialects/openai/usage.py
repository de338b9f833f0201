"""GET /v1/organization/usage/completions: the ledger, as OpenAI's administrators read theirs."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from maitred.api.dialects.openai.refusals import unsupported
from maitred.api.http.errors import shortened
from maitred.api.http.exchange import Exchange
from maitred.api.http.service import Service
from maitred.core.errors import InvalidRequest, RouteNotFound
from maitred.tenancy.usage import DIMENSIONS, WIDTHS, UsageBucket, fill_buckets, usage_pages

# OpenAI's filters -> what they filter; a tenant is a project, and users are not told apart
_FILTERS = {"project_ids": "project_id", "api_key_ids": "api_key_id", "models": "model"}
_NUMBERS = ("start_time", "end_time", "limit")
_INTEGER, _TEXTS = {"type": "integer", "minimum": 0}, {"type": "array", "items": {"type": "string"}}
USAGE_QUERY: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_NUMBERS, _INTEGER),
    "bucket_width": {"enum": [*WIDTHS], "default": "1d"},
    "group_by": {"type": "array", "items": {"enum": [*DIMENSIONS]}},
    "page": {"type": "string"},
    **dict.fromkeys(_FILTERS, _TEXTS),
}
_LISTS = ("group_by", *_FILTERS)
_NOT_KEPT = ("user_ids", "batch")
MAX_FIELDS = 1000


class UsageResult(msgspec.Struct, kw_only=True):
    """Usage of one group in one bucket; a field that was not grouped by is null. OpenAI's fields, and three of ours."""

    object: Literal["organization.usage.completions.result"] = "organization.usage.completions.result"
    input_tokens: int
    output_tokens: int
    input_cached_tokens: int
    input_audio_tokens: int = 0
    output_audio_tokens: int = 0
    num_model_requests: int
    num_rows: int = 0  # of tensor requests
    engine_ms: float = 0.0  # of steps and batches
    cost: float | msgspec.UnsetType = msgspec.UNSET  # of that, where there is a price
    project_id: str | None = None
    user_id: str | None = None
    api_key_id: str | None = None
    model: str | None = None
    batch: bool | None = None
    service_tier: str | None = None


class UsageBucketObject(msgspec.Struct, kw_only=True):
    object: Literal["bucket"] = "bucket"
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(msgspec.Struct, kw_only=True):
    """A page of buckets, oldest first."""

    object: Literal["page"] = "page"
    data: list[UsageBucketObject]
    has_more: bool
    next_page: str | None


async def show_usage(app: Service, exchange: Exchange) -> None:
    """Tokens and requests by time, tenant (project_id), key, model and tier; for administrators."""
    ledger = app.ledger
    if ledger is None:
        raise RouteNotFound("this server keeps no ledger; start it with --ledger FILE")
    asked = _fields(exchange.scope["query_string"])
    numbers = {name: _number(name, asked[name][0]) for name in _NUMBERS if name in asked}
    if "start_time" not in numbers:
        raise InvalidRequest("start_time is missing; send unix seconds", param="start_time")
    if "page" in asked:
        numbers["start_time"] = _page(asked["page"][0], numbers["start_time"])
    query, following = usage_pages(
        start_time=numbers["start_time"],
        end_time=numbers.get("end_time"),
        limit=numbers.get("limit"),
        now=int(time.time()),
        bucket_width=asked.get("bucket_width", ["1d"])[0],
        group_by=asked.get("group_by", []),
        filters=[(ours, asked[name]) for name, ours in _FILTERS.items() if name in asked],
    )
    rows = await asyncio.to_thread(ledger.usage, query)
    price = app.config.price_per_hour
    buckets = [_bucket(bucket, price) for bucket in fill_buckets(query, rows)]
    next_page = f"page_{following}" if following is not None else None
    await exchange.answer_json(UsagePage(data=buckets, has_more=following is not None, next_page=next_page))


def _fields(query_string: bytes) -> dict[str, list[str]]:
    """`group_by=model&group_by[]=project_id` -> lists; OpenAI's clients write brackets."""
    try:
        pairs = parse_qsl(query_string.decode("latin-1"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError:
        raise InvalidRequest(f"the query has over {MAX_FIELDS} fields") from None
    asked: dict[str, list[str]] = {}
    for name, value in pairs:
        known = name.removesuffix("[]")
        if known in _NOT_KEPT:
            raise unsupported(known, "the ledger does not keep it")
        if known not in USAGE_QUERY:
            choices = ", ".join(USAGE_QUERY)
            raise InvalidRequest(f"the query has no field {shortened(repr(name))}; choose from {choices}")
        asked.setdefault(known, []).append(value)
    for name, values in asked.items():
        if len(values) > 1 and name not in _LISTS:
            raise InvalidRequest(f"{name} is there {len(values)} times; send it once", param=name)
    return asked


def _number(name: str, value: str) -> int:
    if not value.isascii() or not value.isdecimal() or len(value) > 18:
        raise InvalidRequest(f"{name} is {shortened(repr(value))}; it must be an integer", param=name)
    return int(value)


def _page(value: str, start: int) -> int:
    kind, _, at = value.partition("_")
    if kind != "page" or not at.isascii() or not at.isdecimal() or len(at) > 18 or int(at) <= start:
        raise InvalidRequest("page is not one that next_page gave for this query", param="page")
    return int(at)


def _bucket(bucket: UsageBucket, price_per_hour: float | None) -> UsageBucketObject:
    results = []
    for key, amount in bucket.sums:
        results.append(
            UsageResult(
                input_tokens=amount.prompt_tokens,
                output_tokens=amount.generated_tokens,
                input_cached_tokens=amount.cached_tokens,
                num_model_requests=amount.num_requests,
                num_rows=amount.rows,
                engine_ms=amount.compute_us / 1000,
                cost=msgspec.UNSET if price_per_hour is None else amount.cost(price_per_hour),
                **{theirs: getattr(key, ours) for theirs, ours in DIMENSIONS.items()},
            )
        )
    return UsageBucketObject(start_time=bucket.start, end_time=bucket.end, results=results)

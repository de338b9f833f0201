"""/v1/messages/batches: batches whose lines come in the request, as Anthropic has them; they run as all others do."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import msgspec

from maitred.api.batch_lines import BadLine, read_line
from maitred.api.batches import ANSWERED, FAILED, MAX_LINES, BatchRecord, batches_of, new_id
from maitred.api.dialects.anthropic.schemas import BatchParams
from maitred.api.dialects.openai.batches import found, listed
from maitred.api.http.bodies import decode_json
from maitred.api.http.exchange import Exchange
from maitred.api.http.service import Service
from maitred.core.errors import InvalidRequest
from maitred.storage.state import ContentPiece

ENDPOINT, KIND = "/v1/messages", "message_batch"
LIFE_S = 29 * 24 * 3600  # of results
_PARAMS, _RAW = msgspec.json.Decoder(BatchParams), msgspec.json.Decoder(dict[str, msgspec.Raw])


async def _create(app: Service, exchange: Exchange, _: str) -> None:
    lines = await asyncio.to_thread(_lines_of, await exchange.json_body())
    of_batch = {"id": new_id("msgbatch_"), "endpoint": ENDPOINT, "completion_window": "24h"}
    record = await batches_of(app).create(exchange.caller, lines, life_s=LIFE_S, **of_batch)
    await exchange.answer_json(_told(record))


def _lines_of(body: bytes) -> list[ContentPiece]:
    """Raises InvalidRequest."""
    asked, seen, lines = decode_json(body, _PARAMS).requests, set[str](), list[ContentPiece]()
    if not 1 <= len(asked) <= MAX_LINES:
        raise InvalidRequest(f"requests has {len(asked)}; a batch has 1 to {MAX_LINES}", param="requests")
    for number, one in enumerate(asked, 1):
        line = {"custom_id": one.custom_id, "method": "POST", "url": ENDPOINT, "body": one.params}
        lines.append(ContentPiece(number, msgspec.json.encode(line)))
        try:
            read_line(lines[-1].content, number, (ENDPOINT,))
            if one.custom_id in seen:
                raise BadLine("duplicate_custom_id", f"custom_id {one.custom_id!r} stands twice; give each its own")
        except BadLine as bad:
            numbered, at = f"line {number}", f"requests[{number - 1}]"
            text = str(bad).replace(f"{numbered}: body", f"{at}.params").replace(numbered, at)
            raise InvalidRequest(text, param=at) from None
        seen.add(one.custom_id)
    return lines


async def _record(app: Service, exchange: Exchange, id: str) -> BatchRecord:
    return msgspec.json.decode((await found(app, exchange, KIND, id)).about, type=BatchRecord)


def _told(record: BatchRecord) -> dict[str, Any]:
    batch, counts, num_left = record.batch, record.batch.request_counts, record.num_left_out
    status = {"in_progress": "in_progress", "cancelling": "canceling"}.get(batch.status, "ended")
    ended_at = batch.completed_at or batch.expired_at or batch.cancelled_at or batch.failed_at
    return {
        "id": batch.id,
        "type": KIND,
        "processing_status": status,
        "request_counts": {
            "processing": counts.total - counts.completed - counts.failed,
            "succeeded": counts.completed,
            "errored": counts.failed - num_left,
            "canceled": num_left if batch.cancelled_at else 0,
            "expired": num_left if batch.expired_at else 0,
        },
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at),
        "ended_at": _time(ended_at),
        "cancel_initiated_at": _time(batch.cancelling_at),
        "archived_at": None,
        "results_url": f"{ENDPOINT}/batches/{batch.id}/results" if status == "ended" else None,
    }


def _time(at: int | None) -> str | None:
    """RFC 3339."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat()


async def _show(app: Service, exchange: Exchange, id: str) -> None:
    await exchange.answer_json(_told(await _record(app, exchange, id)))


async def _list(app: Service, exchange: Exchange, _: str) -> None:
    before, limit = exchange.query.get("before_id"), exchange.query_number("limit", 1, 1000, 20)
    field = "before_id" if before else "after_id"
    entries, has_more = await listed(app, exchange, KIND, limit=limit, after=field, newest=not before)
    data = [_told(msgspec.json.decode(entry.about, type=BatchRecord)) for entry in entries]
    data = data[::-1] if before else data
    ids = [batch["id"] for batch in data] or [None]
    await exchange.answer_json({"data": data, "has_more": has_more, "first_id": ids[0], "last_id": ids[-1]})


async def _cancel(app: Service, exchange: Exchange, id: str) -> None:
    """Cancel a batch; one that has ended stays as it is."""
    record, run = await _record(app, exchange, id), batches_of(app).runs.get(id)
    if run is not None:
        await run.cancel()
    await exchange.answer_json(_told(run.record if run is not None else record))


async def _delete(app: Service, exchange: Exchange, id: str) -> None:
    record = await _record(app, exchange, id)
    if id in batches_of(app).runs:
        raise InvalidRequest("the batch has not ended; cancel it first")
    await asyncio.to_thread(app.stored.drop, *record.key)
    await exchange.answer_json({"id": id, "type": "message_batch_deleted"})


async def _results(app: Service, exchange: Exchange, id: str) -> None:
    """Answer what became of every request, a line of JSON each."""
    record = await _record(app, exchange, id)
    if id in batches_of(app).runs:
        raise InvalidRequest("the batch has not ended, so there are no results yet")
    headers = [(b"content-type", b"application/x-jsonl")]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    for part in (ANSWERED, FAILED):
        after = -1
        while page := await asyncio.to_thread(app.stored.pieces, record.key, part, after=after):
            after, content = page[-1].number, b"".join(_result(piece.content) for piece in page)
            await exchange.send({"type": "http.response.body", "body": content, "more_body": True})
    await exchange.send({"type": "http.response.body", "body": b""})


def _result(line: bytes) -> bytes:
    told, result = _RAW.decode(line), dict[str, Any]()
    if bytes(told["response"]) == b"null":
        result["type"] = "expired" if b"batch_expired" in bytes(told["error"]) else "canceled"
    else:
        response = _RAW.decode(told["response"])
        is_good = bytes(response["status_code"]) == b"200"
        result |= {"type": "succeeded" if is_good else "errored", "message" if is_good else "error": response["body"]}
    return msgspec.json.encode({"custom_id": told["custom_id"], "result": result}) + b"\n"


HANDLERS = {
    ("POST", "/v1/messages/batches", ""): _create,
    ("GET", "/v1/messages/batches", ""): _list,
    ("GET", "/v1/messages/batches/{id:path}", ""): _show,
    ("GET", "/v1/messages/batches/{id:path}", "results"): _results,
    ("POST", "/v1/messages/batches/{id:path}", "cancel"): _cancel,
    ("DELETE", "/v1/messages/batches/{id:path}", ""): _delete,
}

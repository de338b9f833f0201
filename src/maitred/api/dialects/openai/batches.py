"""/v1/files and /v1/batches, as OpenAI has them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from email.parser import HeaderParser
from typing import Any, NamedTuple

import msgspec

from maitred.api.batches import LIFE_S, batches_of, new_file, new_id
from maitred.api.dialects.openai import batch_schemas as s
from maitred.api.http.bodies import BodyDecoder, decode_json
from maitred.api.http.errors import ClientGone, RequestTooSlow, UnsupportedMediaType, shortened
from maitred.api.http.exchange import CONNECTION, TOO_SLOW, Exchange, IgnoredFields
from maitred.api.http.service import Service
from maitred.core.errors import InvalidRequest, RequestTooLarge, RouteNotFound
from maitred.storage.state import PAGE_BYTES, ContentPiece, EntryKey, StoredEntry

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
UPLOAD_S = 24 * 3600.0  # and what is left of one that a kill ended is gone
MAX_FIELD_BYTES, MAX_FIELDS, MAX_HEAD_BYTES = 1024, 16, 8192  # of a form
_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,70})"|([^";,\s]{1,70}))', re.IGNORECASE)
_CREATE, _FORM = BodyDecoder(s.BatchCreate), msgspec.json.Decoder(s.FileForm, strict=False)
_FORM_FIELDS = s.FileForm.__struct_encode_fields__


def _ignored(app: Service) -> IgnoredFields:
    return IgnoredFields(strict=app.config.strict_fields)


async def _create_file(app: Service, exchange: Exchange, _: str) -> None:
    tenant, now, fields = exchange.caller.tenant.name, time.time(), dict[str, str]()
    upload = EntryKey("upload", new_id("upload-"), tenant)
    store, form, num_bytes, filename = app.stored, _FormReader(_boundary(exchange)), 0, None
    await asyncio.to_thread(store.put, *upload, b"", now=now, expires_at=now + UPLOAD_S, busy=True)
    try:
        number, pending = 0, bytearray()
        more = True
        while more:
            chunk, more = await _received(exchange)
            for part in form.feed(chunk):
                if part.filename is None:
                    fields[part.name] = fields.get(part.name, "") + part.content.decode("utf-8", "replace")
                    if len(fields[part.name]) > MAX_FIELD_BYTES:
                        raise RequestTooLarge(f"a field of the form is over {MAX_FIELD_BYTES} bytes")
                elif part.name != "file":
                    raise InvalidRequest(f"the form has a file {shortened(repr(part.name))}; send one, as `file`")
                else:
                    filename = part.filename
                    pending += part.content
                    num_bytes += len(part.content)
            if num_bytes > app.config.max_file_bytes:
                raise RequestTooLarge(
                    f"the file is over the limit of {app.config.max_file_bytes} bytes; the server's --max-file-bytes "
                    "sets it"
                )
            if len(pending) >= PAGE_BYTES or (pending and not more):
                await asyncio.to_thread(store.add, upload, [ContentPiece(number, bytes(pending))])
                number, pending = number + 1, bytearray()
        if not form.is_complete or filename is None:
            raise InvalidRequest("the form ends before its end, or has no file; send the field `file`", param="file")
        _ignored(app).heed(exchange, [name for name in fields if name not in _FORM_FIELDS], _FORM_FIELDS)
        asked = decode_json(msgspec.json.encode({**fields, "file": filename}), _FORM)
        life_s = asked.seconds or (LIFE_S if asked.purpose == "batch" else None)
        file = new_file(num_bytes, filename, asked.purpose, life_s)
        key, about = upload._replace(kind="file", id=file.id), msgspec.json.encode(file)
        await asyncio.to_thread(store.rename, upload, key, about, expires_at=file.expires_at)
    except BaseException:
        await asyncio.shield(asyncio.to_thread(store.drop, *upload))
        raise
    await exchange.answer_json(file)


async def _received(exchange: Exchange) -> tuple[bytes, bool]:
    """The next piece of a body of any length; whether there is more."""
    message = await exchange.receive()
    if message["type"] == "http.disconnect":
        raise RequestTooSlow("the body did not come in time") if TOO_SLOW in exchange.scope else ClientGone
    return message.get("body", b""), bool(message.get("more_body", False))


def _boundary(exchange: Exchange) -> bytes:
    sent = exchange.headers.get(b"content-type", b"").decode("latin-1")
    found = _BOUNDARY.search(sent) if sent.lower().startswith("multipart/form-data") else None
    if found is None:
        raise UnsupportedMediaType("send the file as multipart/form-data, with its boundary in the Content-Type")
    return (found[1] or found[2]).rstrip().encode("latin-1")


class _FormPart(NamedTuple):
    """Some of a part's content; `filename` is None in a field that is no file."""

    name: str
    filename: str | None
    content: bytes


class _FormReader:
    """Reads multipart/form-data as it comes, and keeps no more than a head or a delimiter. Source: RFC 7578, and
    RFC 2046, 5.1.1.
    """

    def __init__(self, boundary: bytes) -> None:
        self.is_complete = False
        self._delimiter, self._rest = b"\r\n--" + boundary, b"\r\n"  # so that the first one has its line's end too
        self._part: _FormPart | None = None  # that its content is of; None before the first
        self._in_head, self._names = False, set[str]()

    def feed(self, chunk: bytes) -> Iterator[_FormPart]:
        """Raises InvalidRequest."""
        rest = self._rest + chunk
        while not self.is_complete:
            end = rest.find(b"\r\n\r\n" if self._in_head else self._delimiter)
            if self._in_head and rest.startswith(b"--"):
                self.is_complete = True
            elif self._in_head and end < 0:
                if len(rest) > MAX_HEAD_BYTES:
                    raise InvalidRequest(f"a part's head in the form is over {MAX_HEAD_BYTES} bytes")
                break
            elif self._in_head:
                self._part, rest, self._in_head = self._headed(rest[:end].lstrip()), rest[end + 4 :], False
            else:
                num_ready = end if end >= 0 else max(0, len(rest) - len(self._delimiter))
                if self._part is not None:
                    yield self._part._replace(content=rest[:num_ready])
                rest = rest[num_ready:]
                if end < 0:
                    break
                rest, self._in_head = rest[len(self._delimiter) :], True
        self._rest = rest

    def _headed(self, head: bytes) -> _FormPart:
        try:
            headers = HeaderParser().parsestr(head.decode("utf-8", "replace"))
            name, filename = headers.get_param("name", header="content-disposition"), headers.get_filename()
            (filename or "").encode()
        except ValueError as error:  # of a charset (RFC 2231, 4) that there is not, or that makes no letters
            raise InvalidRequest(f"a part's head in the form cannot be read: {error}", param="file") from None
        if not isinstance(name, str):
            raise InvalidRequest("a part of the form has no name in its Content-Disposition")
        if name in self._names or len(self._names) == MAX_FIELDS:
            raise InvalidRequest(f"the form has {shortened(repr(name))} twice, or over {MAX_FIELDS} parts", param=name)
        self._names.add(name)
        return _FormPart(name, filename, b"")


async def _list(app: Service, exchange: Exchange, _: str) -> None:
    assert exchange.route is not None
    kind = "batch" if "batches" in exchange.route.path else "file"
    asked, (most, default) = exchange.query, (10_000, 10_000) if kind == "file" else (100, 20)
    if asked.get("order", "desc") not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    entries, has_more = await listed(
        app,
        exchange,
        kind,
        limit=exchange.query_number("limit", 1, most, default),
        after="after",
        newest=asked.get("order") != "asc",
        purpose=asked.get("purpose") if kind == "file" else None,
    )
    data: list[Any] = [_public(entry, kind) for entry in entries]
    ids: list[str | None] = [*(entry.id for entry in entries)] or [None]
    await exchange.answer_json(s.StoredList(data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more))


async def listed(
    app: Service, exchange: Exchange, kind: str, *, limit: int, after: str, **page: Any
) -> tuple[list[StoredEntry], bool]:
    """Up to `limit` of the caller's entries behind the one that the query's field `after` names; whether there are
    more. Raises InvalidRequest where that one is gone: an empty page would be taken for the last.
    """
    tenant, now, last = exchange.caller.tenant.name, time.time(), exchange.query.get(after, "")
    if last and await asyncio.to_thread(app.stored.get, kind, last, tenant, now) is None:
        raise InvalidRequest(f"{after} is {shortened(repr(last), 80)}, which is none here", param=after)
    found = await asyncio.to_thread(app.stored.entries, kind, tenant, now, after=last, limit=limit + 1, **page)
    return found[:limit], len(found) > limit


def _public(entry: StoredEntry, kind: str) -> Any:
    about = msgspec.json.decode(entry.about)
    return about["batch"] if kind == "batch" else about


async def found(app: Service, exchange: Exchange, kind: str, id: str, param: str = "id") -> StoredEntry:
    """Raises RouteNotFound, for another tenant's as for what is not there."""
    entry = await asyncio.to_thread(app.stored.get, kind, id, exchange.caller.tenant.name, time.time())
    if entry is None:
        raise RouteNotFound(f"No such {kind.capitalize()} object: {shortened(id)}", param=param)
    return entry


async def _show_file(app: Service, exchange: Exchange, id: str) -> None:
    await exchange.answer_json(_public(await found(app, exchange, "file", id), "file"))


async def _delete_file(app: Service, exchange: Exchange, id: str) -> None:
    """Delete a file; a batch that has read it goes on."""
    await found(app, exchange, "file", id)
    await asyncio.to_thread(app.stored.drop, "file", id, exchange.caller.tenant.name)
    await exchange.answer_json(s.Deleted(id=id, object="file"))


async def _show_content(app: Service, exchange: Exchange, id: str) -> None:
    entry = await found(app, exchange, "file", id)
    length = b"%d" % _public(entry, "file")["bytes"]
    headers = [(b"content-type", b"application/octet-stream"), (b"content-length", length)]
    await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
    num_left, after, key = int(length), -1, EntryKey("file", id, entry.tenant)
    while num_left and (page := await asyncio.to_thread(app.stored.pieces, key, after=after)):
        after, content = page[-1].number, b"".join(piece.content for piece in page)
        num_left -= len(content)
        await exchange.send({"type": "http.response.body", "body": content, "more_body": True})
    if num_left:  # it was deleted meanwhile
        exchange.scope[CONNECTION].break_off()
    await exchange.send({"type": "http.response.body", "body": b""})


async def _create_batch(app: Service, exchange: Exchange, _: str) -> None:
    body = await exchange.sent(_CREATE)
    asked, batches = body.body, batches_of(app)
    _ignored(app).heed(exchange, body.unknown, _CREATE.known)
    choices = [path for path in ENDPOINTS if getattr(app.asgi.routes.look("POST", path).route, "path", "") == path]
    if asked.endpoint not in choices:
        raise InvalidRequest(
            f"endpoint is {shortened(repr(asked.endpoint))}; it must be one of {', '.join(choices)}", param="endpoint"
        )
    file = _public(await found(app, exchange, "file", asked.input_file_id, "input_file_id"), "file")
    if file["purpose"] != "batch":
        text = f"the file's purpose is {file['purpose']!r}; it must be 'batch'"
        raise InvalidRequest(text, param="input_file_id")
    record = await batches.create(
        exchange.caller,
        id=new_id("batch_"),
        endpoint=asked.endpoint,
        input_file_id=asked.input_file_id,
        completion_window=asked.completion_window,
        metadata=asked.metadata,
        life_s=asked.output_expires_after.seconds if asked.output_expires_after is not None else LIFE_S,
    )
    await exchange.answer_json(record.batch)


async def _show_batch(app: Service, exchange: Exchange, id: str) -> None:
    batch = _public(await found(app, exchange, "batch", id), "batch")
    run = batches_of(app).runs.get(id)
    if run is not None and run.trouble is not None:
        fault = s.BatchFault(code="state_unavailable", message=run.trouble)
        batch["errors"] = s.BatchFaults(data=[fault])
    await exchange.answer_json(batch)


async def _cancel_batch(app: Service, exchange: Exchange, id: str) -> None:
    await found(app, exchange, "batch", id)
    run = batches_of(app).runs.get(id)
    if run is None:
        status = _public(await found(app, exchange, "batch", id), "batch")["status"]
        raise InvalidRequest(f"the batch is {status}, and cannot be cancelled any more")
    await run.cancel()
    await exchange.answer_json(run.record.batch)


HANDLERS = {
    ("POST", "/v1/files", ""): _create_file,
    ("GET", "/v1/files", ""): _list,
    ("GET", "/v1/files/{id:path}", ""): _show_file,
    ("GET", "/v1/files/{id:path}", "content"): _show_content,
    ("DELETE", "/v1/files/{id:path}", ""): _delete_file,
    ("POST", "/v1/batches", ""): _create_batch,
    ("GET", "/v1/batches", ""): _list,
    ("GET", "/v1/batches/{id:path}", ""): _show_batch,
    ("POST", "/v1/batches/{id:path}", "cancel"): _cancel_batch,
}

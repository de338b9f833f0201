"""Routes of Ollama's API, of a server and a router. What answers them is imported when one is asked.

Fields and their meaning: docs/api.md, docs/openapi.yaml and api/types.go of ollama/ollama, as of v0.33.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from maitred.api.dialects.kserve.generate import body_of
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import SSE_HEADERS, TEXT_ERRORS, DialectFormat, ErrorText, Handler, Route, StreamFormat

_LINES = ((b"content-type", b"application/x-ndjson"), *SSE_HEADERS[1:])


# a line is a JSON object, and the last one says that it is
OLLAMA = DialectFormat(StreamFormat(b"", _LINES, b"", before_error=b"", after_error=b"\n"), ErrorText, TEXT_ERRORS.told)


def _decode(*given: Any) -> GenerationAsk:
    from maitred.api.dialects.ollama.chat import decode  # noqa: PLC0415 - for those who ask

    return decode(*given)


DIALECTS = {
    path: Dialect(OLLAMA, partial(_decode, is_chat), body_of)
    for path, is_chat in (("/api/chat", True), ("/api/generate", False))
}


def _answered_by(name: str, *first: Any) -> Handler:
    async def handle(service: Any, exchange: Exchange) -> None:
        from maitred.api.dialects.ollama import models  # noqa: PLC0415 - likewise

        await getattr(models, name)(*first, service, exchange)

    return handle


_route = partial(Route, format=OLLAMA, errors=(400, 401, 403, 404, 413, 429, 500, 503, 504))
_post = partial(_route, method="POST")
_FILES = [("DELETE", "delete"), ("POST", "create"), ("POST", "copy"), ("POST", "push"), ("POST", "blobs/{digest}")]


def _routes(list_models: Handler, converse: Handler, embed: Handler, show: Handler) -> tuple[Route, ...]:
    answers = partial(_post, handler=converse, span="chat", summary="Answer a conversation or prompt, as Ollama does.")
    lists = partial(_route, handler=_answered_by("list_models", list_models))
    pulls = _answered_by("pull", list_models)
    embeds = partial(_post, handler=embed, summary="Vectors of texts, as Ollama's.")
    refused = partial(_route, handler=_answered_by("no_files"), summary="Refused: it would change files.")
    return (
        *(answers(path=path) for path in DIALECTS),
        _route(path="/api/version", handler=_answered_by("version"), summary="The version of Ollama's API here."),
        lists(path="/api/tags", summary="Models, as Ollama lists them."),
        lists(path="/api/ps", summary="Models in memory, as Ollama lists them."),
        *(refused(method=method, path=f"/api/{name}") for method, name in _FILES),
        _post(path="/api/show", handler=show, summary="What a model is and can do."),
        _post(path="/api/pull", handler=pulls, summary="Succeeds for a model that is here."),
        embeds(path="/api/embed"),
        embeds(path="/api/embeddings"),
    )


def server_routes(list_models: Handler, embeddings: Handler) -> tuple[Route, ...]:
    """Those of a server; the two are handlers of /v1/models and /v1/embeddings."""
    converse, embed = _answered_by("converse", DIALECTS), _answered_by("embed", embeddings)
    return _routes(list_models, converse, embed, _answered_by("show", list_models))


def router_routes(
    list_models: Handler, generate: Callable[..., Awaitable[None]], embed: Handler, passed_on: Handler
) -> tuple[Route, ...]:
    """Those of a router, whose replicas answer; `generate` is given the body that was read."""
    return _routes(list_models, _answered_by("steered", generate), embed, passed_on)

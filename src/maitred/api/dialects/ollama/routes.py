"""Routes of Ollama's API, of a server and a router. What answers them is imported when one is asked.

Fields and their meaning: docs/api.md, docs/openapi.yaml and api/types.go of ollama/ollama, as of v0.33.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from maitred.api.dialects.kserve.generate import body_of
from maitred.api.generate.dialect import Dialect, GenerationAsk
from maitred.api.http.errors import HttpError
from maitred.api.http.exchange import Exchange
from maitred.api.http.routes import SSE_HEADERS, DialectFormat, ErrorText, Handler, Route, StreamFormat

_FIELDS = {  # of a chat, as messages about it have them -> their names here
    "max_completion_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format.schema": "format",
}
_LINES = ((b"content-type", b"application/x-ndjson"), *SSE_HEADERS[1:])


def _told(error: HttpError) -> ErrorText:
    message = error.message
    for ours, theirs in _FIELDS.items():
        message = message.replace(ours, theirs)
    return ErrorText(message)


# a line is a JSON object, and the last one says that it is
OLLAMA = DialectFormat(StreamFormat(b"", _LINES, b"", before_error=b"", after_error=b"\n"), ErrorText, _told)


def _decode(name: str, *given: Any) -> GenerationAsk:
    from maitred.api.dialects.ollama import chat  # noqa: PLC0415 - for those who ask

    ask: GenerationAsk = getattr(chat, name)(*given)
    return ask


DIALECTS = {
    "/api/chat": Dialect(OLLAMA, partial(_decode, "decode_chat"), body_of),
    "/api/generate": Dialect(OLLAMA, partial(_decode, "decode_generate"), body_of),
}


def _answered_by(name: str, *first: Any) -> Handler:
    async def handle(service: Any, exchange: Exchange) -> None:
        from maitred.api.dialects.ollama import models  # noqa: PLC0415 - likewise

        await getattr(models, name)(*first, service, exchange)

    return handle


_route = partial(Route, format=OLLAMA, errors=(400, 401, 403, 404, 413, 429, 500, 503, 504))
_post = partial(_route, method="POST")
_FILES = [("DELETE", "delete"), ("POST", "create"), ("POST", "copy"), ("POST", "push"), ("POST", "blobs/{digest}")]


def common_routes(list_models: Handler) -> tuple[Route, ...]:
    """Routes that a server and a router have alike; `list_models` is the handler of /v1/models."""
    lists = partial(_route, handler=_answered_by("list_models", list_models))
    refused = partial(_route, handler=_answered_by("no_files"), summary="Refused: it would change files.")
    return (
        _route(path="/api/version", handler=_answered_by("version"), summary="The version of Ollama's API here."),
        lists(path="/api/tags", summary="Models, as Ollama lists them."),
        lists(path="/api/ps", summary="Models in memory, as Ollama lists them."),
        *(refused(method=method, path=f"/api/{name}") for method, name in _FILES),
    )


def server_routes(list_models: Handler, embeddings: Handler) -> tuple[Route, ...]:
    """All of a server's; the two are handlers of /v1/models and /v1/embeddings."""
    answers = partial(_post, span="chat", summary="Answer a conversation or prompt, as Ollama does.")
    embeds = partial(_post, handler=_answered_by("embed", embeddings), summary="Vectors of texts, as Ollama's.")
    return (
        *(answers(path=path, handler=_answered_by("converse", dialect)) for path, dialect in DIALECTS.items()),
        *common_routes(list_models),
        _post(path="/api/show", handler=_answered_by("show", list_models), summary="What a model is and can do."),
        _post(path="/api/pull", handler=_answered_by("pull"), summary="Succeeds for a model that is here."),
        embeds(path="/api/embed"),
        embeds(path="/api/embeddings"),
    )


def router_routes(list_models: Handler, *, generate: Handler, embed: Handler, passed_on: Handler) -> tuple[Route, ...]:
    """A router's: what a replica must answer goes to one that has the model."""
    handlers = {"embed": embed, "embeddings": embed, "show": passed_on, "pull": passed_on}
    return (
        *(_post(path=path, handler=generate, summary="Ollama's chat and prompts.", span="chat") for path in DIALECTS),
        *common_routes(list_models),
        *(
            _post(path=f"/api/{name}", handler=each, summary="Ollama's, by a replica.")
            for name, each in handlers.items()
        ),
    )

"""TF Serving's REST API: `/v1/models/NAME[/versions/V|/labels/L]`, with `/metadata`, `:predict`, `:classify` and
`:regress`. Beside a language model the same paths are OpenAI's.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from maitred.api.dialects.openai import models as openai
from maitred.api.dialects.openai.answers import OPENAI
from maitred.api.dialects.tfserving import rows
from maitred.api.dialects.tfserving.rows import as_json, metadata_json, statuses
from maitred.api.generate.dialect import time_limits
from maitred.api.http.app import App
from maitred.api.http.exchange import JSON_HEADERS, Exchange
from maitred.api.http.routes import TEXT_ERRORS, Route
from maitred.api.tensor.lease import infer, new_id, tensors_of
from maitred.core.errors import RouteNotFound
from maitred.core.tensor_request import InferRequest, Tensor, num_bytes_of
from maitred.tensor.config import DeclaredTensor, inputs_of

_PATH = re.compile(
    r"(?P<model>[^/:]+)(?:/versions/(?P<version>\d{1,18})|/labels/(?P<label>[^/:]+))?"
    r"(?:(?P<metadata>/metadata)|:(?P<method>predict|classify|regress))?"
)


class _Asked(NamedTuple):
    model: str
    version: int  # 0 is the default
    label: str
    wants_metadata: bool
    method: str

    @property
    def is_model_alone(self) -> bool:
        return not (self.version or self.label or self.wants_metadata or self.method)


async def get_model(app: App, exchange: Exchange) -> None:
    """Status or metadata; of a name alone OpenAI's and TF Serving's keys in one object."""
    asked = _asked(exchange.parameter)
    if asked is None or asked.method or (asked.is_model_alone and _is_openais(app, exchange, asked)):
        await openai.get_model(app, exchange)
        return
    tensors = tensors_of(app)
    if not asked.is_model_alone:
        exchange.format = TEXT_ERRORS
    if asked.wants_metadata:
        await exchange.answer_json(metadata_json(tensors, asked.model, asked.version, asked.label))
        return
    told = as_json(statuses(tensors, asked.model, asked.version, asked.label))
    if asked.is_model_alone:
        told = {"id": asked.model, "object": "model", "created": 0, "owned_by": "maitred", **told}
    await exchange.answer_json(told)


def _is_openais(app: App, exchange: Exchange, asked: _Asked) -> bool:
    """The language model's names come first, as everywhere."""
    return app.tensors is None or app.is_model(asked.model) or app.adapter(asked.model, exchange.caller) is not None


async def post_model(app: App, exchange: Exchange) -> None:
    """`:predict`, `:classify`, `:regress`."""
    asked = _asked(exchange.parameter)
    if asked is None or not asked.method:
        raise RouteNotFound("post to /v1/models/NAME:predict, :classify or :regress")
    # clients of TF Serving need not say that it is JSON; pages of other origins must, so that browsers ask first
    body = await (exchange.json_body() if b"origin" in exchange.headers else exchange.body())
    specs = inputs_of(tensors_of(app).config(asked.model, asked.version, asked.label))
    async with app.in_flight.watch(exchange):
        answer = await _METHODS[asked.method](app, exchange, asked, body, specs)
    await exchange.answer(answer, 200, JSON_HEADERS)


async def _predict(app: App, exchange: Exchange, asked: _Asked, body: bytes, specs: Sequence[DeclaredTensor]) -> bytes:
    decoded = await app.text.run(exchange.num_body_bytes, partial(rows.predict_inputs, body, specs))
    outputs = await _outputs(app, exchange, asked, decoded.inputs)
    write = partial(rows.predictions, outputs, by_rows=decoded.by_rows)
    return await app.text.run(num_bytes_of(outputs), write)


async def _classify(app: App, exchange: Exchange, asked: _Asked, body: bytes, specs: Sequence[DeclaredTensor]) -> bytes:
    inputs = await app.text.run(exchange.num_body_bytes, partial(rows.example_inputs, body, specs))
    outputs = await _outputs(app, exchange, asked, inputs)
    return await app.text.run(num_bytes_of(outputs), partial(rows.classes, outputs))


async def _regress(app: App, exchange: Exchange, asked: _Asked, body: bytes, specs: Sequence[DeclaredTensor]) -> bytes:
    inputs = await app.text.run(exchange.num_body_bytes, partial(rows.example_inputs, body, specs))
    outputs = await _outputs(app, exchange, asked, inputs)
    return await app.text.run(num_bytes_of(outputs), partial(rows.regressions, outputs))


_METHODS = {"predict": _predict, "classify": _classify, "regress": _regress}


async def _outputs(app: App, exchange: Exchange, asked: _Asked, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    request = InferRequest(
        request_id=new_id(), model=asked.model, version=asked.version, label=asked.label, inputs=inputs
    )
    limits = time_limits(None, exchange.headers)
    return (await infer(app, exchange.caller, request, limits=limits)).outputs


def _asked(path: str) -> _Asked | None:
    """Parse a path; None for one that is not TF Serving's, such as a name with a slash."""
    found = _PATH.fullmatch(path)
    if found is None:
        return None
    return _Asked(
        model=found["model"],
        version=int(found["version"] or "0"),
        label=found["label"] or "",
        wants_metadata=found["metadata"] is not None,
        method=found["method"] or "",
    )


ROUTES = (
    Route(
        path="/v1/models/{model:path}",
        handler=get_model,
        format=OPENAI,
        summary="One model; of a tensor model the state of its versions, with /metadata its signature.",
        text="application/json",
        errors=(401, 404),
    ),
    Route(
        method="POST",
        path="/v1/models/{model:path}",
        handler=post_model,
        format=TEXT_ERRORS,
        summary="TF Serving's :predict, :classify and :regress of a tensor model.",
        text="application/json",
        errors=(400, 401, 403, 404, 413, 429, 503, 504),
    ),
)

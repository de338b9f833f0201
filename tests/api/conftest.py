"""One server with the default fake replica, shared by tests that change nothing about it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from maitred.api.http.asgi import AsgiApp
from maitred.api.serving import create_app
from maitred.config import ServerConfig
from tests.fakes_api import FakeReplica, RunningServer, make_model, running_server
from tests.waiting import HANGS_S

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="session")
def served() -> Iterator[RunningServer]:
    """Says `Hello, world!` to everybody; `temperature` 0.7 is the model's own default."""
    model = make_model(generation_defaults={"temperature": 0.7, "top_k": 20})
    with running_server(FakeReplica(num_cached_tokens=4), model) as server:
        yield server


@pytest.fixture(scope="session")
def http(served: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=HANGS_S) as client:
        yield client


@pytest.fixture(scope="session")
def client(served: RunningServer) -> Iterator[openai.OpenAI]:
    """OpenAI's own client; a field that its types do not allow raises APIResponseValidationError."""
    with strict_client(served.url) as strict:
        yield strict


def strict_client(url: str, api_key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=api_key, max_retries=0, _strict_response_validation=True)


@asynccontextmanager
async def with_tensors(
    folder: Path,
    *,
    model: Any = None,
    config: Any = None,
    wrap: Any = None,
    mode: Any = None,
    load: Any = (),
    **of: Any,
) -> AsyncIterator[tuple[AsgiApp, httpx.AsyncClient]]:
    """A server of this repository of tensor models, and a client of it; `of` goes to `create_app`."""
    from maitred.tensor.host import LocalTensorService

    tensors = LocalTensorService(folder) if mode is None else LocalTensorService(folder, mode)
    await tensors.start(load)
    replica = of.pop("replica", None) or FakeReplica()
    replica.tensors = tensors if wrap is None else wrap(tensors)
    asgi = create_app(replica, model or make_model(), config or ServerConfig(), **of)
    accepting = {"accept-encoding": "identity"}
    try:
        transport = httpx.ASGITransport(asgi)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=accepting) as http:
            yield asgi, http
    finally:
        await tensors.close()
        asgi.app.close()

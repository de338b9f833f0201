"""POST /fleet/resume: go on with a stream that another replica began."""

from __future__ import annotations

from collections.abc import Mapping

from maitred.api.generate.complete import generate
from maitred.api.generate.dialect import Dialect
from maitred.api.generate.resumption import Resumption
from maitred.api.generate.telling import fingerprint_of
from maitred.api.http.app import App
from maitred.api.http.body_decoder import BodyDecoder
from maitred.api.http.exchange import Exchange
from maitred.cluster.told_tokens import ResumeRequest
from maitred.engine.model_facts import AdapterFacts
from maitred.errors import CannotResume, InvalidRequest, PermissionDenied

MAX_TOLD_BYTES = 32 * 1024 * 1024  # of tokens, beside as much body as any request may have
_decoder = BodyDecoder(ResumeRequest)


class Resume:
    """The route; `dialects` by the paths of theirs, or what theirs begin with, which ends in a slash."""

    def __init__(self, dialects: Mapping[str, Dialect]) -> None:
        self._dialects = dialects

    async def __call__(self, app: App, exchange: Exchange) -> None:
        if not app.fleet_token.is_shown_by(exchange.headers):
            raise PermissionDenied("this takes the fleet's token, in the header x-maitred-fleet-token")
        exchange.max_body_bytes += MAX_TOLD_BYTES
        asked = (await exchange.sent(_decoder)).body
        found = next((each for each in self._dialects if _is_of(each, asked.path)), None)
        if found is None:
            paths = ", ".join(self._dialects)
            raise InvalidRequest(f"{asked.path[:100]!r} is none of the paths that are resumed: {paths}", param="path")
        dialect, exchange.parameter = self._dialects[found], asked.path.removeprefix(found)
        exchange.format = dialect.format
        async with exchange.turn():
            body = bytes(asked.body)
            ask = dialect.decode(app, exchange, body)
            note_tokens = app.fleet.noting(asked.path, body, exchange.headers)
        _check_numerics(app, ask.adapter, asked.head.fingerprint)
        await generate(app, exchange, ask, None, note_tokens, Resumption(asked, ask, app.model))


def _is_of(known: str, path: str) -> bool:
    return path.startswith(known) if known.endswith("/") else path == known


def _check_numerics(app: App, adapter: AdapterFacts | None, fingerprint: str) -> None:
    own = fingerprint_of(app.model, adapter)
    why_not = app.replica.why_not_resumed(same_numbers=own == fingerprint)
    if why_not is not None:
        raise CannotResume(
            f"the stream cannot go on here: {why_not}; it was begun by {fingerprint[:200]!r}, and this is {own!r}"
        )

"""Shared by the commands of a fleet: where its router is, and how it is asked."""

from __future__ import annotations

from dataclasses import dataclass

from maitred.cli.flags import option


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """The router"""

    url: str = option("http://127.0.0.1:8000", metavar="URL")
    """Where maitred route listens."""
    api_key: str | None = option(None, metavar="KEY", env="MAITRED_API_KEY")
    """An administrator's key, where the router has keys."""
    json: bool = False
    """Print the router's answer as it is."""


def get(router: RouterOptions, path: str) -> bytes:
    """Raises Refused, Unreachable."""
    return _ask(router, path, None)


def order(router: RouterOptions, path: str, body: object, done: str) -> int:
    """Tell the router to do something, and the user that it begins."""
    import msgspec

    answer = _ask(router, path, msgspec.json.encode(body))
    print(answer.decode() if router.json else f"{done}; maitred fleet status shows how far it is")
    return 0


def _ask(router: RouterOptions, path: str, body: bytes | None) -> bytes:
    import asyncio

    return asyncio.run(_asked(router, path, body))


async def _asked(router: RouterOptions, path: str, body: bytes | None) -> bytes:
    from maitred.cli.endpoint import HttpEndpoint, Refused, error_text

    async with (
        HttpEndpoint(router.url, api_key=router.api_key, timeout_s=30.0) as endpoint,
        endpoint.get(path) if body is None else endpoint.post(path, body) as reply,
    ):
        answer = await reply.read()
        if reply.status not in (200, 202):
            raise Refused(reply.status, error_text(reply.status, answer) + _hint(reply.status))
        return answer


def _hint(status: int) -> str:
    if status in (401, 403):
        return "; give an administrator's --api-key"
    return "; is it maitred route that listens there?" if status == 404 else ""

"""KV that is expected: a request of its own brings it while another engine computes it."""

from __future__ import annotations

from msgspec.structs import replace

from maitred.request import RequestSpec


def expecting_id(request: RequestSpec) -> str:
    """Of what brings the KV of its prompt, for all of its samples; no client has such an id."""
    return f"{request.parent_id or request.request_id}~kv"


def expecting(request: RequestSpec, kv_from: tuple[str, ...]) -> RequestSpec:
    """A request that waits for the KV of that prompt, in its place in the queue, and computes nothing."""
    return replace(
        request,
        request_id=expecting_id(request),
        parent_id=None,
        sample_index=0,
        grammar="",
        thinking=None,
        prediction_token_ids=(),
        adapter="",
        kv_from=kv_from,
        kv_only=True,
    )

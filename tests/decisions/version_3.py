"""Converter of the decision log's frames of version 3 to version 4."""

from __future__ import annotations

from typing import Any

import msgspec

from maitred.decisions.codec import is_header
from maitred.decisions.log import DIGEST_BYTES

NEW, EVENTS = 8, 10  # places in a frame


def converted(frame: bytes) -> bytes:
    """A frame of version 3 in version 4: an arrival holds a spec, and a new request is named without its prompt."""
    decoded = msgspec.msgpack.decode(frame)
    if is_header(frame):
        return msgspec.msgpack.encode({**decoded, "version": 4})
    if len(decoded) > NEW:
        decoded[NEW] = [[number, num_output] for number, _, num_output, _ in decoded[NEW]]
    if len(decoded) > EVENTS:
        decoded[EVENTS] = [_event(event) for event in decoded[EVENTS]]
    return msgspec.msgpack.encode(decoded)


def _event(event: dict[str, Any]) -> dict[str, Any]:
    if event["type"] != "arrived":
        return event
    spec = dict(event)
    kind, now = spec.pop("type"), spec.pop("now")
    digests = spec.pop("block_digests", b"")
    spec["block_hashes"] = [digests[i : i + DIGEST_BYTES] for i in range(0, len(digests), DIGEST_BYTES)]
    if spec.pop("wants_prompt_logprobs", False):
        spec["sampling"] = {"prompt_logprobs": 0}
    num_output = spec.pop("num_output_tokens", 0)
    if num_output:
        spec["resumed"] = {"output_token_ids": [0] * num_output}
    return {"type": kind, "now": now, "spec": spec}

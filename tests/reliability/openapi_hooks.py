"""What schemathesis cannot guess: the name of the model, messages with something in them, and time enough.

Loaded by schemathesis itself. Nothing is changed that would make a request break its schema, or keep it.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, urlsplit
from zlib import crc32

import requests
import schemathesis

ROLES = ("system", "user", "assistant")
TIMES = ("x-queue-timeout-ms", "x-request-timeout-ms")
LISTS = ("project_ids", "api_key_ids", "models")  # in queries


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, **kwargs: Any) -> None:
    for name in TIMES:
        sent = case.headers.get(name)
        if sent is not None and _chosen(sent) % 8 and _is_short(sent):
            case.headers[name] = "60000"
    body = case.body
    if not isinstance(body, dict):
        return
    model, messages = body.get("model"), body.get("messages")
    if isinstance(model, str) and _chosen(model) % 8:
        body["model"] = "maitred-mini"
    for message in messages if isinstance(messages, list) else ():
        role = message.get("role") if isinstance(message, dict) else None
        if isinstance(role, str) and _chosen(role) % 8:
            message["role"] = ROLES[_chosen(role) % len(ROLES)]
            if message.get("content") is None:
                message["content"] = role or "soup"


@schemathesis.hook
def filter_query(context: schemathesis.HookContext, query: Any) -> bool:
    """Without values that no URL can carry, as an empty list in place of one text; whatever can be sent, is."""
    told = query.items() if isinstance(query, dict) else ()
    return all(_can_be_sent(name, value) for name, value in told)


def _can_be_sent(name: str, value: Any) -> bool:
    """Whether a URL says something for it and, of a list of any texts, says that and no list in its place."""
    if value is None:
        return True  # the parameter is left out
    sent = "" if value == {} else value  # as schemathesis has it
    url = requests.Request("GET", "http://host/", params={name: sent}).prepare().url
    texts = [text for _, text in parse_qsl(urlsplit(str(url)).query, keep_blank_values=True)]
    return bool(texts) and (name not in LISTS or value == texts)


def _chosen(text: str) -> int:
    """Any number, the same for the same text."""
    return crc32(text.encode("utf-8", "surrogatepass"), 1)


def _is_short(milliseconds: str) -> bool:
    try:
        return 0.0 < float(milliseconds) < 1000.0
    except ValueError:
        return False

"""R12 in small: no request that the OpenAPI document describes, or forbids, gets a 5xx or an answer not told there."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT, ServerProcess, start_server
from tests.fleet.test_end_to_end import real_fleet
from tests.waiting import HANGS_S, until

# Few are the same every time; those that a schema's bounds make are for `make soak`.
FEW = ("--generation-deterministic", "--phases", "fuzzing,stateful", "--max-examples", "3", "--request-timeout", "200")
MANY = ("--max-examples", "1000", "--request-timeout", "10")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [FEW, pytest.param(MANY, marks=(pytest.mark.soak, pytest.mark.timeout(7200)))],
    ids=["few", "many"],
)
def test_the_server_does_what_its_openapi_document_says(tmp_path: Path, flags: tuple[str, ...]):
    with documented_server(tmp_path) as server:
        ran = run_schemathesis(server.url, tmp_path, *flags)
        assert ran.returncode == 0, ran.stdout
        assert int(ran.stdout.split("Tested: ")[1].split()[0]) >= NUM_OPERATIONS
        assert num_restarts(server.url) == 0


SCHEMATHESIS = (sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()")
CONFIG = Path(__file__).with_name("schemathesis.toml")
HOOKS = "tests.reliability.openapi_hooks"
NUM_OPERATIONS = 53  # at least; all but the endless streams


@contextmanager
def documented_server(folder: Path) -> Iterator[ServerProcess]:
    """The built-in model with a context so short that no answer takes long, and with a ledger to ask."""
    server = start_server("--max-model-len", "64", "--ledger", str(folder / "ledger.sqlite"))
    try:
        until(lambda: httpx.get(f"{server.url}/ready", timeout=HANGS_S).status_code == 200)
        yield server
    finally:
        ended = server.stop()
    assert ended == 0


def run_schemathesis(url: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """All checks, all phases: exit code 0 when nothing was found. `folder` takes what it leaves behind."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "SCHEMATHESIS_HOOKS": HOOKS}
    words = [*SCHEMATHESIS, "--no-color", "--config-file", str(CONFIG), "run", f"{url}/openapi.json", *flags]
    return subprocess.run(
        words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )


def num_restarts(url: str) -> float:
    """Of the engine, so far."""
    page = httpx.get(f"{url}/metrics", timeout=HANGS_S).text
    return float(page.split("\nmaitred_engine_restarts_total ")[1].split("\n")[0])


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
FUNCTION = {"name": "cook", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "c", "type": "function", "function": {"name": "cook", "arguments": "{}"}}
BLOCKS = [
    {"type": "thinking", "thinking": "t", "signature": "s"},
    {"type": "tool_use", "id": "t", "name": "cook", "input": {}},
]
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "done"}], "is_error": False}
CALLED = {"role": "tool", "tool_call_id": "c", "content": ""}
ITEMS = [
    {"type": "function_call", "call_id": "c", "name": "cook", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "done"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
]
CUSTOM = {"type": "custom", "name": "q", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]"}}
HI = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {
            "messages": [*HI, {"role": "assistant", "tool_calls": [CALL]}, CALLED],
            "max_tokens": 2,
            "tools": [TOOL],
            "tool_choice": "auto",
            "stream": True,
            "stop": ["x"],
            "logit_bias": {"5": 1},
        },
        {
            "messages": HI,
            "max_completion_tokens": 2,
            "chat_template_kwargs": {"a": 1},
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
            "prediction": {"type": "content", "content": "x"},
        },
    ],
    "/v1/completions": [{"prompt": ["a"], "max_tokens": 2, "logprobs": 1, "structured_outputs": {"regex": "[a-z]"}}],
    "/v1/messages": [
        {
            "max_tokens": 2,
            "system": HI[0]["content"],
            "tools": [{"name": "cook", "input_schema": SCHEMA}],
            "messages": [*HI, {"role": "assistant", "content": BLOCKS}, {"role": "user", "content": [RESULT]}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stream": True,
            "metadata": {"user_id": ""},
        },
        {
            "max_tokens": 2,
            "messages": HI,
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "stop_sequences": ["x"],
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ],
    "/v1/responses": [
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}, *ITEMS],
            "max_output_tokens": 2,
            "tools": [{"type": "function", **FUNCTION}, CUSTOM, {"type": "web_search"}],
            "tool_choice": "auto",
            "stream": True,
        },
        {
            "input": "hi",
            "max_output_tokens": 2,
            "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            "reasoning": {"effort": "low", "summary": "auto"},
            "include": ["reasoning.encrypted_content"],
        },
    ],
    "/api/chat": [
        {
            "model": "maitred-mini",
            "messages": [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "", "tool_name": "cook"},
            ],
            "tools": [TOOL],
            "options": {"num_predict": 2, "stop": ["x"]},
        },
        {
            "model": "maitred-mini",
            "messages": [{"role": "user", "content": "hi"}],
            "format": SCHEMA,
            "stream": False,
            "think": False,
            "keep_alive": "5m",
            "options": {"num_predict": 2},
            "logprobs": True,
        },
    ],
    "/api/generate": [
        {"model": "maitred-mini", "prompt": "a", "context": [1], "options": {"num_predict": 2}, "raw": False}
    ],
    "/api/embed": [{"model": "maitred-mini", "input": ["a"], "truncate": True, "dimensions": 4}],
    "/v1/embeddings": [{"input": ["a"], "encoding_format": "float", "dimensions": 4, "truncate_prompt_tokens": 3}],
    "/v1/rerank": [{"query": "q", "documents": ["a", {"text": "b"}], "top_n": 1}],
    "/v1/batches": [
        {
            "input_file_id": "file-x",
            "endpoint": "/v1/chat/completions",
            "completion_window": "24h",
            "output_expires_after": {"anchor": "created_at", "seconds": 3600},
        }
    ],
    "/v1/messages/batches": [{"requests": [{"custom_id": "a", "params": {"max_tokens": 2, "messages": HI}}]}],
}
HOSTILE: tuple[Any, ...] = (
    *(None, True, 0, -1, 5, 1.5, 2**31, 2**63, 10**40, 1e308, float("nan")),
    *("", "x", "a\x00b", "\ud800", "x" * 3000, "assistant", "system", "required", "resp_x", "</s>"),
    *([], {}, [[]], [None], [5], {"a": None}, {"type": "text"}, {"type": "image", "source": {}}, {"type": 1}),
    *({"$ref": "#/a"}, {"type": "string", "pattern": "(((a+)+)+)+$"}, {"enum": []}),
)


def mutated(draw: random.Random, body: dict[str, Any]) -> bytes:
    """The body with one to three values changed, gone, doubled, strange or nested deeply."""
    made = deepcopy(body)
    for _ in range(draw.choice((1, 1, 2, 3))):
        places = [place for place in _places(made) if place[1] != "model"]  # a router looks for an unknown one for 1 s
        if not places:
            break
        holder, key = draw.choice(places)
        what = draw.random()
        if what < 0.75:
            holder[key] = deepcopy(draw.choice(HOSTILE))
        elif what < 0.8:
            holder[key] = "@DEEP@"
        elif isinstance(holder, list):
            holder.insert(key, deepcopy(holder[key]))
        elif what < 0.9:
            del holder[key]
        else:
            holder[draw.choice(("unknown", "\ud800", "temprature", ""))] = draw.choice(HOSTILE)
    depth = draw.choice((50, 600, 50_000))
    text = json.dumps(made).replace('"@DEEP@"', "[" * depth + "]" * depth)
    if draw.random() < 0.05 and made:
        text = f"{text[:-1]},{json.dumps(next(iter(made)))}:{json.dumps(draw.choice(HOSTILE))}}}"
    return text.encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keyed = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(keyed):
        yield value, key
        yield from _places(inner)


def is_error_of(path: str, told: Any) -> bool:
    """Whether the body is an error as the dialect of the path has it."""
    error = told.get("error")
    if path.startswith("/api/"):
        return isinstance(error, str)
    if path.startswith("/v1/messages"):
        return told["type"] == "error" and {"type", "message"} <= error.keys()
    return {"message", "type", "param", "code"} <= error.keys()


@pytest.mark.soak
@pytest.mark.parametrize("is_routed", [False, True])
def test_a_thousand_mutated_bodies_of_each_dialect_have_an_answer_or_its_error(tmp_path: Path, *, is_routed: bool):
    with real_fleet(tmp_path, [("--max-model-len", "256")] * 2) as fleet:
        url = fleet.router.url if is_routed else fleet.replicas[0].url
        with httpx.Client(base_url=url, timeout=60, headers={"content-type": "application/json"}) as client:
            for path, bodies in BODIES.items():
                draw = random.Random(path)
                for _ in range(1000):
                    body = mutated(draw, draw.choice(bodies))
                    answer = client.post(path, content=body)
                    assert answer.status_code < 500, (path, body[:2000], answer.text)
                    if answer.status_code >= 400:
                        assert is_error_of(path, answer.json()), (path, body[:2000], answer.text)
        for replica in fleet.replicas:
            until(lambda url=replica.url: is_idle(httpx.get(f"{url}/metrics").text))


def is_idle(page: str) -> bool:
    gauges = ("maitred_kv_blocks_used", "maitred_requests_running", "maitred_requests_waiting")
    return all(f"\n{name} 0.0\n" in page for name in gauges)

"""What is not built is refused by name; what is out of range is refused with number and bound; nothing is a 5xx."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers

from maitred.api.dialects.openai.refusals import CHAT_REFUSED, COMPLETION_REFUSED, TOKENIZE_REFUSED
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from maitred.api.http.bodies import SMALL_BYTES
from maitred.api.http.exchange import MAX_LOGGED, names_told
from maitred.config import AdmissionConfig, ProcessConfig, ServerConfig
from maitred.core.errors import ConfigError
from maitred.fleet.config import FleetConfig
from maitred.fleet.sizing import AutoscaleConfig
from maitred.text.tokenizer import Tokenizer
from tests.api.conftest import MESSAGES
from tests.fakes_api import FakeReplica, RunningServer, byte_tokenizer, make_model, running_server
from tests.waiting import HANGS_S

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def refused(http, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"model": "tiny", "messages": MESSAGES} if path == CHAT else {"model": "tiny", "prompt": "ab"}
    response = http.post(path, json={**base, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (set(error), error["type"]) == ({"message", "type", "param", "code"}, "invalid_request_error")
    return error


UNBUILT: dict[str, Any] = {
    "functions": [{"name": "f"}], "function_call": "auto", "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"}, "web_search_options": {}, "verbosity": "high", "use_beam_search": True,
    "length_penalty": 0.5, "truncate_prompt_tokens": -1, "logprob_token_ids": [1], "prompt_embeds": "AAAA",
    "chat_template": "{{ messages }}", "documents": [{"text": "x"}], "stream_interval": 4,
    "kv_transfer_params": {"a": 1}, "spaces_between_special_tokens": False, "guided_json": {}, "guided_regex": "a",
    "guided_choice": ["a"], "guided_grammar": "a", "guided_decoding_backend": "a", "guided_whitespace_pattern": "a",
}  # fmt: skip


@pytest.mark.parametrize("name", UNBUILT)
def test_an_unbuilt_field_of_chat_is_refused_by_name(http, name):
    error = refused(http, CHAT, {name: UNBUILT[name]})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)
    assert name in error["message"]


@pytest.mark.parametrize("name", [*COMPLETION_REFUSED, "guided_json", "guided_choice"])
def test_an_unbuilt_field_of_completions_is_refused_by_name(http, name):
    error = refused(http, TEXT, {name: {"any": "thing"}})
    assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_null_is_as_good_as_absent(http, name):
    response = http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, name: None})
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("name", CHAT_REFUSED)
def test_what_clients_send_by_default_is_accepted(http, name):
    for value in CHAT_REFUSED[name]:
        response = http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, name: value})
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(("theirs", "ours"), [
    ("max_new_tokens", "max_tokens"), ("repeat_penalty", "repetition_penalty"), ("n_predict", "max"),
    ("grammar", "structured_outputs"), ("json_schema", "response_format"), ("rid", "request_id"),
    ("enable_thinking", "chat_template_kwargs"), ("t_max_predict_ms", "timeout_ms"),
])  # fmt: skip
def test_a_field_that_has_another_name_here_is_told_it(http, path, theirs, ours):
    """Left alone, it would change nothing, and nobody would hear of it."""
    error = refused(http, path, {theirs: 3})
    assert (error["code"], error["param"]) == ("unsupported_parameter", theirs)
    assert f"send {ours}" in error["message"]


NO_SETTINGS: list[tuple[type, dict[str, Any], str]] = [
    (ServerConfig, {"ssl_keyfile": "x"}, "without ssl_certfile"),
    (ServerConfig, {"slo": ("first:1s",)}, "ttft:200ms"),
    (ServerConfig, {"metrics_compat": "sglang"}, "none, vllm, triton"),
    *(
        (ServerConfig, {"otlp_endpoint": address}, r"must look like http://127\.0\.0\.1:4318")
        for address in ("", "collector:4318", "http://", "ftp://collector")
    ),
    (AdmissionConfig, {"max_queued_by_priority": {"high": 3}}, "PRIORITY=COUNT"),
    (AdmissionConfig, {"max_queued_by_priority": {"1": -1}}, "PRIORITY=COUNT"),
    (ProcessConfig, {"mixed_workers": 0}, "workers"),
    (ProcessConfig, {"mixed_workers": 2, "in_process": True}, "workers"),
    (AutoscaleConfig, {"idle_s": -1.0}, "at least 0"),
    (FleetConfig, {"balance": "prefx"}, r"balance is 'prefx' \(did you mean prefix\?\); choose one of round_robin"),
    (FleetConfig, {"tiers": {"edge": {"max_prompt_token": 5}}}, "did you mean max_prompt_tokens"),
    (FleetConfig, {"tiers": {"edge": {"spill_after_s": "soon"}}}, "spill_after_s is 'soon'; it must be a number"),
    (FleetConfig, {"tiers": {"edge": {"replicas": "http://a"}}}, "it must be a list of URLs"),
    (FleetConfig, {"tiers": {"edge": 5}}, "edge is 5; give it replicas"),
]


def test_settings_that_cannot_be_are_refused_before_anything_loads():
    for config, fields, says in NO_SETTINGS:
        with pytest.raises(ConfigError, match=says):
            config(**fields)


def test_what_is_refused_is_no_field_of_the_route_and_stands_on_the_page():
    assert not set(CHAT_REFUSED) & set(ChatCompletionRequest.__struct_fields__)
    assert not set(COMPLETION_REFUSED) & set(CompletionRequest.__struct_fields__)
    assert not set(TOKENIZE_REFUSED) & set(TokenizeRequest.__struct_fields__)
    section = (ROOT / "docs/api.md").read_text().partition("## Refused")[2].partition("\n## ")[0]
    table = [row.split("|")[1:3] for row in section.splitlines() if row.startswith("| `")]
    names = [set(re.findall(r"`([a-z_]+)", column)) for column in map(" ".join, zip(*table, strict=True))]
    assert names[0] - {"guided_"} <= set(CHAT_REFUSED)
    assert names[1] - {"system"} <= {*ChatCompletionRequest.__struct_fields__, *CHAT_REFUSED}


@pytest.mark.parametrize(("message", "param"), [
    ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
    ({"role": "assistant", "content": "x", "prefix": True}, "messages[0].prefix"),
])  # fmt: skip
def test_messages_this_version_cannot_read_are_refused(http, message, param):
    error = refused(http, CHAT, {"messages": [message]})
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize("part", [
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    {"type": "video_url", "video_url": {"url": "x"}},
    {"type": "file", "file": {"file_id": "x"}},
    {"type": "x" * 500},
])  # fmt: skip
def test_a_part_that_is_no_text_is_refused_by_its_type_and_place(http, part):
    """In /tokenize too, which renders messages alike."""
    text = {"role": "user", "content": [{"type": "text", "text": "what is this?"}]}
    messages = [*MESSAGES, *MESSAGES, *MESSAGES, {"role": "user", "content": [*text["content"], part]}]
    errors = [refused(http, CHAT, {"messages": messages})]
    errors.append(http.post("/tokenize", json={"messages": messages}).json()["error"])
    for error in errors:
        assert (error["code"], error["param"]) == ("unsupported_content", "messages[3].content[1]")
        assert part["type"][:20] in error["message"]
        assert len(error["message"]) < 400


@pytest.mark.parametrize("name", ["audio", "images"])
def test_what_stands_beside_the_text_of_a_message_and_is_none_is_refused(http, name):
    error = refused(http, CHAT, {"messages": [{"role": "assistant", "content": "x", name: ["AAAA"]}]})
    assert (error["code"], error["param"]) == ("unsupported_content", f"messages[0].{name}")


@pytest.mark.parametrize(("message", "param"), [
    ({"role": "wizard", "content": "x"}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 7}, "messages[0].content"),
    ({"content": "x"}, "messages[0].role"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
    ("hello", "messages[0]"),
])  # fmt: skip
def test_malformed_messages_are_refused(http, message, param):
    assert refused(http, CHAT, {"messages": [message]})["param"] == param


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"n": 17}, "n", ("17", "16")),
    ({"n": 0}, "n", ("0", "1")),
    ({"temperature": 2.1}, "temperature", ("2.1", "2")),
    ({"temperature": -1}, "temperature", ("-1", "0")),
    ({"top_p": 0}, "top_p", ("0",)),
    ({"top_p": 1.5}, "top_p", ("1.5", "1")),
    ({"top_k": -2}, "top_k", ("-2", "-1")),
    ({"min_p": 2}, "min_p", ("2", "1")),
    ({"presence_penalty": 3}, "presence_penalty", ("3", "2")),
    ({"frequency_penalty": -3}, "frequency_penalty", ("-3", "-2")),
    ({"repetition_penalty": 0}, "repetition_penalty", ("0",)),
    ({"repetition_penalty": 1e-300}, "repetition_penalty", ("1e-300", "0.01")),
    ({"prompt_logprobs": -1}, "prompt_logprobs", ("-1", "20")),
    ({"logit_bias": {"1": 200}}, "logit_bias", ("200", "100")),
    ({"logit_bias": {"999": 1}}, "logit_bias", ("999",)),
    ({"seed": 2**63}, "seed", (str(2**63),)),
    ({"stop": ["a"] * 65}, "stop", ("65", "64")),
    ({"stop": ""}, "stop", ("empty",)),
    ({"stop": "x" * 1025}, "stop", ("1025", "1024")),
    ({"bad_words": ["x"] * 129}, "bad_words", ("129", "128")),
    ({"allowed_token_ids": [257]}, "allowed_token_ids", ("257",)),
    ({"allowed_token_ids": []}, "allowed_token_ids", ("empty",)),
    ({"stop_token_ids": [-1]}, "stop_token_ids", ("-1",)),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", ("5", "4")),
    ({"prompt_logprobs": 21}, "prompt_logprobs", ("21", "20")),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", ("stream",)),
    ({"cache_salt": ""}, "cache_salt", ("0", "1024")),
    ({"cache_salt": "x" * 1025}, "cache_salt", ("1025", "1024")),
    ({"priority": -1}, "priority", ("-1", "0")),
    ({"request_id": "a b"}, "request_id", ("128",)),
    ({"stream_options": {"include_usage": True}}, "stream_options", ("stream",)),
    (
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
        "stream_options.continuous_usage_stats",
        ("include_usage",),
    ),
    ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation", ()),
    ({"service_tier": "flex"}, "service_tier", ()),
])  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_value_out_of_range_is_refused_with_number_and_bound(http, path, fields, param, words):
    error = refused(http, path, fields)
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(("path", "fields", "param"), [
    (TEXT, {"prompt": [[97] * 511] * 25, "prompt_logprobs": 20}, "prompt_logprobs"),  # 268,275 of them
    (TEXT, {"prompt": [[97] * 511] * 25, "echo": True, "logprobs": 20}, "logprobs"),
    (TEXT, {"prompt": [[97] * 511] * 25, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
    (TEXT, {"prompt": ["a" * 511] * 2, "n": 16, "prompt_logprobs": 20}, "prompt_logprobs"),
    (CHAT, {"messages": [{"role": "user", "content": "a" * 480}], "n": 16}, "prompt_logprobs"),
])  # fmt: skip
def test_more_log_probabilities_of_prompts_than_an_answer_may_hold_are_refused_before_any_is_computed(
    http, served, monkeypatch, path, fields, param
):
    num_submitted = len(served.replica.submitted)
    if fields.get("n"):
        monkeypatch.setattr(
            "maitred.api.generate.complete.MAX_PROMPT_LOGPROBS", 100_000
        )  # one prompt of 512 tokens has not more
    error = refused(http, path, {"prompt_logprobs": 20, **fields} if path == CHAT else {"max_tokens": 1, **fields})
    assert error["param"] == param
    assert ("at most 100000" if fields.get("n") else "at most 262144") in error["message"]
    assert "send fewer tokens at a time" in error["message"]
    assert len(served.replica.submitted) == num_submitted


def test_as_many_log_probabilities_of_prompts_as_an_answer_may_hold_are_given(http, monkeypatch):
    monkeypatch.setattr("maitred.api.generate.complete.MAX_PROMPT_LOGPROBS", 2 * 3 * 4 * 21)
    fields = {"model": "tiny", "prompt": [[97] * 4] * 3, "n": 2, "prompt_logprobs": 20, "max_tokens": 1}
    assert http.post(TEXT, json=fields).status_code == 200
    monkeypatch.setattr("maitred.api.generate.complete.MAX_PROMPT_LOGPROBS", 2 * 3 * 4 * 21 - 1)
    assert "504" in refused(http, TEXT, fields)["message"]


@pytest.mark.parametrize(("fields", "param"), [
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs.self"),
    ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
    ({"stop": [1]}, "stop[0]"),
    ({"stream": "yes"}, "stream"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"n": True}, "n"),
    ({"seed": 0.5}, "seed"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"prompt_cache_options": [1]}, "prompt_cache_options"),
])  # fmt: skip
def test_chat_names_the_wrong_field(http, fields, param):
    assert refused(http, CHAT, fields)["param"].startswith(param)


@pytest.mark.parametrize(("fields", "param"), [
    ({"logprobs": 21}, "logprobs"), ({"logprobs": True}, "logprobs"), ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1, "echo": True}, "max_tokens"), ({"best_of": 1, "n": 2}, "best_of"),
    ({"prompt": []}, "prompt"), ({"prompt": ["a", 1]}, "prompt[1]"), ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": ["a"] * 1025}, "prompt"), ({"prompt": [97, 257]}, "prompt"), ({"prompt": [97, -1]}, "prompt"),
    ({"prompt": [[97], [10**30]]}, "prompt[1][0]"), ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ""}, "prompt"), ({"prompt": None}, "prompt"), ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
])  # fmt: skip
def test_completions_name_the_wrong_field(http, fields, param):
    assert refused(http, TEXT, fields)["param"] == param


def test_missing_fields_and_those_that_were_removed_are_named(http):
    assert refused(http, TEXT, {"best_of": 3, "n": 2})["code"] == "unsupported_parameter"
    assert "structured_outputs" in refused(http, CHAT, {"guided_json": {}})["message"]
    for path, param in ((CHAT, "messages"), (TEXT, "prompt")):
        response = http.post(path, json={})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    response = http.post(CHAT, json={"model": "m" * 100_000, "messages": MESSAGES})
    assert response.status_code == 404
    assert len(response.text) < 1500


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (TEXT, "prompt")])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(http, path, field):
    text = "x" * 600
    error = refused(http, path, {field: text if path == TEXT else [{"role": "user", "content": text}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", field)
    assert "512" in error["message"]
    assert "600" in error["message"] or "620" in error["message"] or path == CHAT


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_prompt_and_max_tokens_over_the_context_are_refused(http, path):
    error = refused(http, path, {"max_tokens": 511})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "512" in error["message"]
    assert "511" in error["message"]


HEADER = "x-maitred-ignored-fields"
BASES = {
    "/v1/chat/completions": {"messages": MESSAGES}, "/v1/completions": {"prompt": "ab"},
    "/tokenize": {"prompt": "ab"}, "/detokenize": {"tokens": [97]}, "/v1/responses": {"input": "ab"},
}  # fmt: skip


@pytest.fixture(scope="module")
def strict() -> Iterator[RunningServer]:
    with running_server(strict_fields=True) as server:
        yield server


@pytest.mark.parametrize("path", BASES)
def test_an_unknown_field_is_served_and_named(http: httpx.Client, path: str):
    answer = http.post(path, json=BASES[path] | {"temprature": 0.5, "poems": [1]})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == "temprature, poems"
    assert HEADER not in http.post(path, json=BASES[path]).headers


def test_streams_errors_and_options_name_unknown_fields_but_no_null_and_none_refused_elsewhere(http: httpx.Client):
    with http.stream("POST", CHAT, json=BASES[CHAT] | {"poems": 1, "stream": True}) as answer:
        assert answer.headers[HEADER] == "poems"
        assert answer.read().endswith(b"data: [DONE]\n\n")
    wrong = http.post(CHAT, json=BASES[CHAT] | {"poems": 1, "temperature": 9})
    assert (wrong.status_code, wrong.headers[HEADER]) == (400, "poems")
    options = {"include_usage": True, "include_usages": True, "chunk": None}
    for more in ({}, {"user": "x" * SMALL_BYTES}):
        answer = http.post(CHAT, json=BASES[CHAT] | more | {"stream": True, "stream_options": options})
        assert answer.headers[HEADER] == "stream_options.include_usages"
    assert HEADER not in http.post(CHAT, json=BASES[CHAT] | {"poems": None}).headers
    assert HEADER not in http.post(CHAT, json=BASES[CHAT] | {"typical_p": 1.0, "tools": []}).headers
    paths = http.get("/openapi.json").json()["paths"]
    told = {path for path, methods in paths.items() for operation in methods.values() if _tells(operation)}
    assert told == {
        *BASES,
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/batches",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
    }


@pytest.mark.parametrize("more", [{}, {"user": "x" * SMALL_BYTES}], ids=["small", "large"])
def test_no_more_than_ten_plain_names_are_told_and_the_rest_is_counted(http: httpx.Client, more: dict[str, str]):
    fields = {'a"b': 1, "ä": 1, "x" * 65: 1, "": 1} | {f"f{number}": 1 for number in range(12)}
    told = http.post(CHAT, json=BASES[CHAT] | more | fields).headers[HEADER]
    assert told == ", ".join([*(f"f{number}" for number in range(10)), "+6 more"])


def test_names_that_no_header_may_have_are_only_counted():
    assert names_told(["a\r\nset-cookie: x", "", "a b"]) == b"+3 more"
    assert names_told(["a.b-c_D", "x" * 64]) == b"a.b-c_D, " + b"x" * 64


def test_the_log_guesses_once_what_was_meant_and_a_flood_does_not_fill_it(caplog: pytest.LogCaptureFixture):
    with running_server() as server, caplog.at_level(logging.INFO, "maitred.api"):
        for _ in range(2):
            httpx.post(f"{server.url}{CHAT}", json=BASES[CHAT] | {"temprature": 0.5, "poems": 1})
    told = [(r.levelname, r.getMessage()) for r in caplog.records if "unknown" in r.getMessage()]
    assert told == [
        ("WARNING", "field temprature is unknown and was ignored (did you mean temperature?)"),
        ("INFO", "field poems is unknown and was ignored"),
    ]
    caplog.clear()
    with running_server() as server, caplog.at_level(logging.INFO, "maitred.api"):
        for first in range(0, MAX_LOGGED + 100, 10):
            fields = {f"f{number}": 1 for number in range(first, first + 10)}
            httpx.post(f"{server.url}/detokenize", json=BASES["/detokenize"] | fields)
    assert sum("unknown" in r.getMessage() for r in caplog.records) == MAX_LOGGED


@pytest.mark.parametrize("path", BASES)
def test_a_strict_server_refuses_it_and_says_what_may_be_meant(strict: RunningServer, path: str):
    with httpx.Client(base_url=strict.url) as http:
        answer = http.post(path, json=BASES[path] | {"mdel": "tiny"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unknown_parameter", "mdel")
        assert "did you mean model?" in error["message"]
        assert http.post(path, json=BASES[path] | {"poems": None}).status_code == 200
    assert strict.replica.aborted == []


def test_a_strict_server_says_why_and_repeats_no_name_that_is_none(strict: RunningServer):
    with httpx.Client(base_url=strict.url) as http:
        assert refused(http, CHAT, {"poems": 1, "typical_p": 0.5})["param"] == "typical_p"
    with httpx.Client(base_url=strict.url) as http:
        error = http.post(TEXT, json=BASES[TEXT] | {"\x1b" * 100_000: 1}).json()["error"]
    assert error["param"] is None
    assert len(error["message"]) < 300


def _tells(operation: dict[str, dict[str, dict[str, object]]]) -> bool:
    return HEADER in str(operation["responses"]["200"].get("headers", {}))


EXTRA = "tell <extra>"
CHAT_EXTRA = {"messages": [{"role": "user", "content": EXTRA}], "max_tokens": 2}
PLAIN = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 2}
PREDICTED = {"type": "content", "content": EXTRA}


def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(byte_tokenizer()._inner.to_str())
    inner.add_tokens(["<extra>"])
    made = Tokenizer(inner, {"eos_token": "</s>"})
    made.limit_to(257)
    return made


@pytest.fixture(scope="module")
def rowless() -> Iterator[httpx.Client]:
    with (
        running_server(FakeReplica(), make_model(tokenizer=tokenizer())) as server,
        httpx.Client(base_url=server.url, timeout=HANGS_S) as client,
    ):
        yield client


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/completions", {"prompt": EXTRA}),
    ("/v1/completions", {"prompt": ["tell", EXTRA]}),
    ("/v1/completions", {"prompt": [116, 257]}),
    ("/v1/completions", {"prompt": "tell", "bad_words": [EXTRA]}),
    ("/v1/completions", {"prompt": "tell", "stop_token_ids": [257]}),
    ("/v1/completions", {"prompt": "tell", "allowed_token_ids": [257]}),
    ("/v1/completions", {"prompt": "tell", "logit_bias": {"257": 1}}),
    ("/v1/chat/completions", CHAT_EXTRA),
    ("/v1/chat/completions", PLAIN | {"prediction": PREDICTED}),
    ("/tokenize", {"prompt": EXTRA}),
    ("/tokenize", {"messages": CHAT_EXTRA["messages"]}),
    ("/detokenize", {"tokens": [257]}),
    ("/v2/models/tiny/generate", {"text_input": EXTRA}),
    ("/v2/models/tiny/generate_stream", {"text_input": EXTRA}),
])  # fmt: skip
def test_a_token_without_a_row_is_a_400_with_token_and_bound(rowless, path, body):
    answer = rowless.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "257" in answer.text or "extra" in answer.text
    assert "256" in answer.text


def test_the_field_is_named_and_a_stop_string_needs_no_token(rowless):
    def param(body: dict[str, object]) -> object:
        return rowless.post("/v1/chat/completions", json=PLAIN | body).json()["error"]["param"]

    assert (param({"prediction": PREDICTED}), param({"bad_words": [EXTRA]})) == ("prediction", "bad_words")
    assert rowless.post("/v1/chat/completions", json=PLAIN | {"stop": [EXTRA]}).status_code == 200

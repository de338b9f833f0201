"""What is not built is refused by name; what is out of range is refused with number and bound; nothing is a 5xx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from maitred.api.dialects.openai.refusals import CHAT_REFUSED, COMPLETION_REFUSED, TOKENIZE_REFUSED
from maitred.api.dialects.openai.schemas import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from tests.api.conftest import MESSAGES

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def refused(http, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"model": "tiny", "messages": MESSAGES} if path == CHAT else {"model": "tiny", "prompt": "ab"}
    response = http.post(path, json={**base, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


UNBUILT: dict[str, Any] = {
    "functions": [{"name": "f"}],
    "function_call": "auto",
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"},
    "web_search_options": {},
    "verbosity": "high",
    "use_beam_search": True,
    "length_penalty": 0.5,
    "truncate_prompt_tokens": -1,
    "logprob_token_ids": [1],
    "prompt_embeds": "AAAA",
    "chat_template": "{{ messages }}",
    "documents": [{"text": "x"}],
    "stream_interval": 4,
    "kv_transfer_params": {"a": 1},
    "spaces_between_special_tokens": False,
    "guided_json": {},
    "guided_regex": "a",
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "guided_decoding_backend": "a",
    "guided_whitespace_pattern": "a",
}


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
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_new_tokens", "max_tokens"),
        ("repeat_penalty", "repetition_penalty"),
        ("n_predict", "max"),
        ("grammar", "structured_outputs"),
        ("json_schema", "response_format"),
        ("rid", "request_id"),
        ("enable_thinking", "chat_template_kwargs"),
        ("t_max_predict_ms", "timeout_ms"),
    ],
)
def test_a_field_that_has_another_name_here_is_told_it(http, path, theirs, ours):
    """Left alone, it would change nothing, and nobody would hear of it."""
    error = refused(http, path, {theirs: 3})
    assert (error["code"], error["param"]) == ("unsupported_parameter", theirs)
    assert f"send {ours}" in error["message"]


def test_what_is_refused_is_no_field_of_the_route():
    assert not set(CHAT_REFUSED) & set(ChatCompletionRequest.__struct_fields__)
    assert not set(COMPLETION_REFUSED) & set(CompletionRequest.__struct_fields__)
    assert not set(TOKENIZE_REFUSED) & set(TokenizeRequest.__struct_fields__)


def test_the_page_lists_as_refused_what_is_and_sends_to_what_there_is():
    table = [row.split("|")[1:3] for row in (ROOT / "docs/api.md").read_text().splitlines() if row.startswith("| `")]
    names = [set(re.findall(r"`([a-z_]+)", column)) for column in map(" ".join, zip(*table, strict=True))]
    assert names[0] - {"guided_"} <= set(CHAT_REFUSED)
    assert names[1] - {"system"} <= {*ChatCompletionRequest.__struct_fields__, *CHAT_REFUSED}


def test_removed_fields_are_told_their_successor(http):
    assert "structured_outputs" in refused(http, CHAT, {"guided_json": {}})["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "content": "x", "prefix": True}, "messages[0].prefix"),
    ],
)
def test_messages_this_version_cannot_read_are_refused(http, message, param):
    error = refused(http, CHAT, {"messages": [message]})
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {"type": "file", "file": {"file_id": "x"}},
        {"type": "x" * 500},
    ],
)
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


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 7}, "messages[0].content"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ("hello", "messages[0]"),
    ],
)
def test_malformed_messages_are_refused(http, message, param):
    assert refused(http, CHAT, {"messages": [message]})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
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
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_value_out_of_range_is_refused_with_number_and_bound(http, path, fields, param, words):
    error = refused(http, path, fields)
    assert error["param"] == param
    for word in words:
        assert word in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"prompt": [[97] * 511] * 25, "prompt_logprobs": 20}, "prompt_logprobs"),  # 268,275 of them
        (TEXT, {"prompt": [[97] * 511] * 25, "echo": True, "logprobs": 20}, "logprobs"),
        (TEXT, {"prompt": [[97] * 511] * 25, "echo": True, "logprobs": 20, "stream": True}, "logprobs"),
        (TEXT, {"prompt": ["a" * 511] * 2, "n": 16, "prompt_logprobs": 20}, "prompt_logprobs"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 480}], "n": 16}, "prompt_logprobs"),
    ],
)
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


@pytest.mark.parametrize(
    ("fields", "param"),
    [
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
    ],
)
def test_chat_names_the_wrong_field(http, fields, param):
    assert refused(http, CHAT, fields)["param"].startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [[1], "a"]}, "prompt[1]"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": [97, 257]}, "prompt"),
        ({"prompt": [97, -1]}, "prompt"),
        ({"prompt": [[97], [10**30]]}, "prompt[1][0]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": {"a": 1}}, "prompt"),
    ],
)
def test_completions_name_the_wrong_field(http, fields, param):
    assert refused(http, TEXT, fields)["param"] == param


def test_best_of_more_than_n_is_not_built(http):
    assert refused(http, TEXT, {"best_of": 3, "n": 2})["code"] == "unsupported_parameter"


def test_missing_fields_are_named(http):
    for path, param in ((CHAT, "messages"), (TEXT, "prompt")):
        response = http.post(path, json={})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


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
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert "512" in error["message"]
    assert "511" in error["message"]


def test_a_message_never_repeats_much_of_what_was_sent(http):
    response = http.post(CHAT, json={"model": "m" * 100_000, "messages": MESSAGES})
    assert response.status_code == 404
    assert len(response.text) < 1500

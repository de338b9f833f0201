"""Texts with tokens for which the model's embedding has no row: refused on every way, with the token and the bound."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import tokenizers

from maitred.text.tokenizer import Tokenizer
from tests.fakes_api import FakeReplica, byte_tokenizer, make_model, running_server
from tests.waiting import HANGS_S

TEXT = "tell <extra>"
CHAT = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
PLAIN = {"messages": [{"role": "user", "content": "tell"}], "max_tokens": 2}
PREDICTED = {"type": "content", "content": TEXT}


def tokenizer() -> Tokenizer:
    inner = tokenizers.Tokenizer.from_str(byte_tokenizer()._inner.to_str())
    inner.add_tokens(["<extra>"])
    made = Tokenizer(inner, {"eos_token": "</s>"})
    made.limit_to(257)
    return made


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with (
        running_server(FakeReplica(), make_model(tokenizer=tokenizer())) as server,
        httpx.Client(base_url=server.url, timeout=HANGS_S) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["tell", TEXT]}),
        ("/v1/completions", {"prompt": [116, 257]}),
        ("/v1/completions", {"prompt": "tell", "bad_words": [TEXT]}),
        ("/v1/completions", {"prompt": "tell", "stop_token_ids": [257]}),
        ("/v1/completions", {"prompt": "tell", "allowed_token_ids": [257]}),
        ("/v1/completions", {"prompt": "tell", "logit_bias": {"257": 1}}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", PLAIN | {"prediction": PREDICTED}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": CHAT["messages"]}),
        ("/detokenize", {"tokens": [257]}),
        ("/v2/models/tiny/generate", {"text_input": TEXT}),
        ("/v2/models/tiny/generate_stream", {"text_input": TEXT}),
    ],
)
def test_a_token_without_a_row_is_a_400_with_token_and_bound(http, path, body):
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert "257" in answer.text or "extra" in answer.text
    assert "256" in answer.text


def test_the_field_is_named_and_a_stop_string_needs_no_token(http):
    def param(body: dict[str, object]) -> object:
        return http.post("/v1/chat/completions", json=PLAIN | body).json()["error"]["param"]

    assert param({"prediction": PREDICTED}) == "prediction"
    assert param({"bad_words": [TEXT]}) == "bad_words"
    assert http.post("/v1/chat/completions", json=PLAIN | {"stop": [TEXT]}).status_code == 200

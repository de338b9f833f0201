"""Chats that bring a prediction (OpenAI's predicted outputs): its tokens go with the request, and usage tells of it."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from maitred.core.replica import DraftCounts, ReplicaState
from maitred.engine.model_facts import Footprint
from tests.api.conftest import MESSAGES
from tests.api.test_chat import chat, events_of
from tests.fakes_api import FakeReplica, make_model, running_server

CHAT = "/v1/chat/completions"


def predicted(text: str) -> dict[str, object]:
    return {"prediction": {"type": "content", "content": text}}


def test_usage_tells_what_of_a_prediction_became_output(client):
    answer = client.chat.completions.create(model="tiny", messages=MESSAGES, **predicted("Hello, folks"))
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (len("Hello, o"), len("flks"))
    assert answer.choices[0].message.content == "Hello, world!"
    assert answer.usage.completion_tokens == len("Hello, world!") + 1, "what was rejected is on no bill"


def test_without_one_there_is_nothing_to_tell(client):
    details = client.chat.completions.create(model="tiny", messages=MESSAGES).usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)


def test_the_parts_of_a_prediction_are_one_text(http, served):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo<|x|>"}]
    usage = chat(http, n=2, prediction={"type": "content", "content": parts})["usage"]
    first, second = served.replica.submitted[-2:]
    assert bytes(first.prediction_token_ids) == bytes(second.prediction_token_ids) == b"Hello<|x|>"
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 2 * len("Hello")


def test_a_stream_tells_it_at_the_end(http):
    asked = {"model": "tiny", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    events = events_of(http.post(CHAT, json={**asked, **predicted("Hello!")}).text)
    details = events[-1]["usage"]["completion_tokens_details"]
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (5, 1)


@pytest.mark.parametrize("nothing", [None, {"type": "content", "content": ""}, {"type": "content", "content": []}])
def test_an_empty_prediction_is_none(http, served, nothing):
    chat(http, prediction=nothing)
    assert not served.replica.submitted[-1].prediction_token_ids


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ({"type": "tokens", "content": "x"}, "prediction.type", "'tokens'; it must be 'content'"),
        ({"type": "content"}, "prediction.content", "missing"),
        ({"type": "content", "content": 7}, "prediction.content", "got `int`"),
        (
            {"type": "content", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]},
            "prediction.content[1].type",
            "'image_url'; it must be 'text'",
        ),
        ({"type": "content", "content": "x" * 513}, "prediction", "513 tokens; at most 512"),
        ({"type": "content", "content": "x" * 2**20}, "prediction", "1048607 bytes; at most 1048576"),
        ("text", "prediction", "object"),
    ],
    ids=["type", "no content", "number", "part", "tokens", "bytes", "text"],
)
def test_what_is_no_prediction_is_refused_with_its_place(http, prediction, param, message):
    response = http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, "prediction": prediction})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert message in error["message"]


class DraftingReplica(FakeReplica):
    def state(self) -> ReplicaState:
        return ReplicaState(drafts=DraftCounts(7, 30, [7, 7, 5, 2, 0]), predicted_drafts=DraftCounts(2, 10, [2, 1]))


def test_the_metrics_page_counts_drafts_by_proposer_and_those_from_predictions_apart():
    held = Footprint(
        architecture="LlamaForCausalLM",
        num_parameters=4,
        executor="native",
        device="cpu",
        dtype="float32",
        kv_dtype="float32",
        weights_bytes=16,
        kv_bytes=64,
        proposer="ngram",
    )
    with running_server(DraftingReplica(), make_model(footprint=held), metrics_compat="vllm") as server:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    assert 'maitred_draft_tokens_total{proposer="ngram"} 30.0' in lines
    assert 'maitred_draft_tokens_total{proposer="prediction"} 10.0' in lines
    assert 'maitred_draft_tokens_accepted_total{proposer="ngram"} 21.0' in lines
    assert 'maitred_draft_tokens_accepted_at_position_total{position="1",proposer="prediction"} 1.0' in lines
    families = text_string_to_metric_families("\n".join(lines))
    told = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode") and sample.labels["proposer"] == "ngram"
    }
    assert told == {
        ("vllm:spec_decode_num_drafts_total", None): 7.0,
        ("vllm:spec_decode_num_draft_tokens_total", None): 30.0,
        ("vllm:spec_decode_num_accepted_tokens_total", None): 21.0,
        **{("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(i)): n for i, n in enumerate([7, 7, 5, 2, 0])},
    }

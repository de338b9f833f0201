"""Log-probabilities of answers that are not streamed: bounded, and written piece by piece."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from maitred.api.dialects.openai.answers import (
    PACKED,
    CompletionLogprobsWriter,
    TokenNames,
    chat_logprobs,
    packed_chat_logprobs,
)
from maitred.api.http.app import KeptLogprobs
from maitred.core.errors import InvalidRequest, Overloaded
from maitred.core.step import TokenLogprobs
from tests.api.conftest import MESSAGES
from tests.fakes_api import FakeReplica, make_model, running_server
from tests.waiting import HANGS_S, until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_TOKENS = 100


def positions(num: int, num_top: int = 2) -> list[TokenLogprobs]:
    """Whole characters and halves of them."""
    return [
        TokenLogprobs(
            token_ids=tuple((97 + 7 * at + 31 * rank) % 256 for rank in range(num_top + 1)),
            logprobs=tuple(-0.25 * rank for rank in range(num_top + 1)),
            ranks=tuple(range(num_top + 1)),
        )
        for at in range(num)
    ]


@pytest.mark.parametrize("num", [0, 1, PACKED, 2 * PACKED + 1])
def test_written_piece_by_piece_log_probabilities_are_the_same(num):
    tokenizer = make_model().tokenizer
    names = TokenNames(tokenizer, as_ids=False)

    def writer() -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(tokenizer, names, 2, skip_special_tokens=True, context=())

    known = positions(num)
    encode = msgspec.json.encode
    assert encode(packed_chat_logprobs(known, names, 2)) == encode(chat_logprobs(known, names, 2))
    assert encode(writer().packed_output(known)) == encode(writer().output(known))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (TEXT, {"prompt": "ab", "logprobs": 20, "n": 2}),
        (TEXT, {"prompt": ["ab", "cd"], "logprobs": 20}),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, "n": 2}),
    ],
)
def test_an_answer_with_more_log_probabilities_than_are_kept_ends_unless_it_is_streamed(monkeypatch, path, fields):
    limit = 2000 * NUM_TOKENS  # one sample has less, two have more
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES", limit)
    replica = FakeReplica(answer=lambda request: [ord("x")] * 400)
    body = {"model": "tiny", "max_tokens": NUM_TOKENS, **fields}
    with running_server(replica) as server, httpx.Client(base_url=server.url, timeout=HANGS_S) as http:
        error = http.post(path, json=body).json()["error"]
        assert (error["code"], error["param"]) == ("answer_too_large", "logprobs")
        assert str(limit) in error["message"]
        assert "stream: true" in error["message"]
        assert not replica.live
        until(lambda: server.server.app.kept_logprobs.num_bytes == 0)
        streamed = http.post(path, json={**body, "stream": True}).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert streamed.count('"finish_reason":"length"') == 2
        alone = {name: value for name, value in body.items() if name != "n"} | {"max_tokens": NUM_TOKENS // 2}
        assert http.post(path, json=alone).status_code == 200
        until(lambda: server.server.app.kept_logprobs.num_bytes == 0)


def test_all_answers_together_keep_only_so_much_and_who_keeps_little_goes_on(monkeypatch):
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES_IN_ALL", 100_000)
    monkeypatch.setattr("maitred.api.http.app.MAX_UNREAD_BYTES", 30_000)
    keeping = KeptLogprobs()
    with keeping.answer() as first:
        first(positions(200))
        held = keeping.num_bytes
        assert held == 200 * (256 + 3 * 72)
        with keeping.answer() as second:
            second(positions(30))
            assert held < keeping.num_bytes
            with pytest.raises(Overloaded, match="over 100000 bytes of memory, 37760 of them for this one"):
                second(positions(50))
        assert keeping.num_bytes == held
    assert keeping.num_bytes == 0


def test_one_answer_keeps_only_so_much(monkeypatch):
    monkeypatch.setattr("maitred.api.http.app.MAX_KEPT_BYTES", 3 * (256 + 3 * 72))
    with KeptLogprobs().answer() as keep:
        keep(positions(3))
        with pytest.raises(InvalidRequest, match="over 1416 bytes"):
            keep(positions(1))

"""A server killed in the middle of a batch: the next one asks the lines that have no answer, and none twice."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import strict_client
from tests.conftest import ServerProcess, start_server
from tests.waiting import until

CHAT, NUM_LINES = "/v1/chat/completions", 200


def asked(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Tell me of number {number}."}]
    return {"model": "maitred-mini", "messages": messages, "max_tokens": 24, "temperature": 0}


def num_answered(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    assert counts is not None
    return counts.completed


@pytest.mark.soak
def test_killed_twice_in_the_middle_a_batch_has_every_answer_once(tmp_path: Path):
    def started() -> ServerProcess:
        server = start_server("--state-dir", str(tmp_path / "state"), "--max-num-seqs", "4")
        until(lambda: openai.OpenAI(base_url=f"{server.url}/v1", api_key="x").models.list().data)
        return server

    lines = [{"custom_id": str(n), "method": "POST", "url": CHAT, "body": asked(n)} for n in range(NUM_LINES)]
    content = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
    server, batch, before = started(), "", 0
    for _ in range(2):
        with strict_client(server.url) as client:
            if not batch:
                file = client.files.create(file=("in.jsonl", content), purpose="batch")
                batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id
            until(lambda: num_answered(client, batch) >= before + NUM_LINES // 10)  # noqa: B023
            before = num_answered(client, batch)
        server.process.kill()
        server.process.wait()
        server = started()
        with strict_client(server.url) as client:
            assert before <= num_answered(client, batch)
    assert before < NUM_LINES, "it was over before it could be killed"
    with strict_client(server.url) as client:
        until(lambda: client.batches.retrieve(batch).status == "completed")
        done = client.batches.retrieve(batch)
        found = [json.loads(text) for text in client.files.content(str(done.output_file_id)).text.splitlines()]
        alone = client.chat.completions.create(**asked(7)).choices[0].message.content
    assert server.stop() == 0
    assert sorted(int(answer["custom_id"]) for answer in found) == list(range(NUM_LINES))
    assert done.request_counts.to_dict() == {"total": NUM_LINES, "completed": NUM_LINES, "failed": 0}
    by_id = {answer["custom_id"]: answer["response"]["body"] for answer in found}
    assert by_id["7"]["choices"][0]["message"]["content"] == alone

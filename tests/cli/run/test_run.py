from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from maitred.api.batch_lines import BadLine, answer_line, error_line, wait_s
from maitred.cli.batch import LINE_START, OutputFile, read_request, scan
from maitred.core.errors import ConfigError
from tests.cli.fake_server import FakeServer, serving
from tests.cli.running import environment, maitred_process, maitred_thread
from tests.waiting import HANGS_S, until


def batch_file(folder: Path, count: int, **body: object) -> Path:
    path = folder / "in.jsonl"
    lines = (
        {
            "custom_id": f"r{number}",
            "method": "POST",
            "url": "/v1/chat/completions" if number % 2 else "/v1/completions",
            "body": {"model": "fake", "prompt": "x", "messages": [], "max_tokens": 2} | body,
        }
        for number in range(count)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def run(url: str, source: Path, *words: str) -> int:
    return await maitred_thread("run", "-i", str(source), "-o", str(source.parent / "out.jsonl"), "--url", url, *words)


async def test_every_line_gets_its_answer_as_the_server_gave_it(tmp_path, capsys):
    async with serving(FakeServer()) as fake:
        assert await run(fake.url, batch_file(tmp_path, 20)) == 0
    found = {answer["custom_id"]: answer for answer in answers(tmp_path / "out.jsonl")}
    assert set(found) == {f"r{number}" for number in range(20)}
    assert found["r1"]["id"] == "batch_req_line_2"
    assert found["r1"]["error"] is None
    assert found["r1"]["response"]["status_code"] == 200
    assert found["r1"]["response"]["body"]["choices"][0]["message"]["content"] == "word0 word1 "
    assert found["r2"]["response"]["body"]["choices"][0]["text"] == "word0 word1 "
    assert "20 answered, 40 output tokens" in capsys.readouterr().err


async def test_many_lines_are_in_flight_but_no_more_than_asked(tmp_path):
    async with serving(FakeServer(together=5)) as fake:
        await run(fake.url, batch_file(tmp_path, 20), "--concurrency", "5")
    assert fake.max_in_flight == 5


async def test_a_second_run_asks_only_what_is_missing(tmp_path, capsys):
    source = batch_file(tmp_path, 10)
    async with serving(FakeServer()) as fake:
        await run(fake.url, source)
        out = tmp_path / "out.jsonl"
        out.write_bytes(out.read_bytes()[:-7])  # the last line is torn
        fake.bodies.clear()
        assert await run(fake.url, source) == 0
        assert len(fake.bodies) == 1
        assert await run("http://127.0.0.1:9", source) == 0  # nothing left: nobody is asked
    assert len({answer["custom_id"] for answer in answers(out)}) == len(answers(out)) == 10
    assert "9 of 10 lines have their answer already" in capsys.readouterr().err


async def test_bad_lines_become_error_lines_once_and_fail_the_run(tmp_path, capsys):
    source = batch_file(tmp_path, 2)
    with source.open("a") as file:
        file.write('{oops\n{"custom_id": "bad", "url": "/v1/nothing", "body": {}}\n')
    async with serving(FakeServer()) as fake:
        assert await run(fake.url, source) == 1
        assert await run(fake.url, source) == 1, "they still have no answer"
        assert await run(fake.url, source, "--allow-failures") == 0
    assert "4 done before (2 failed)" in capsys.readouterr().err
    found = {answer["id"]: answer for answer in answers(tmp_path / "out.jsonl")}
    assert len(answers(tmp_path / "out.jsonl")) == 4
    assert found["batch_req_line_3"]["custom_id"] is None
    assert found["batch_req_line_3"]["error"]["code"] == "invalid_json_line"
    assert found["batch_req_line_4"]["error"]["code"] == "invalid_url"
    assert found["batch_req_line_4"]["response"] is None


async def test_a_refused_line_keeps_the_servers_words(tmp_path, capsys):
    async with serving(FakeServer()) as fake:
        assert await run(fake.url, batch_file(tmp_path, 1, model="other")) == 1
    response = answers(tmp_path / "out.jsonl")[0]["response"]
    assert response["status_code"] == 404
    assert response["body"]["error"]["message"] == "no model other"
    err = capsys.readouterr().err
    assert "1 failed (1 HTTP 404)" in err
    assert "their answers say why" in err


async def test_a_busy_server_is_asked_again(tmp_path):
    async with serving(FakeServer(refuse=lambda number: 503 if number < 3 else None)) as fake:
        await run(fake.url, batch_file(tmp_path, 2), "--concurrency", "1")
    assert [answer["response"]["status_code"] for answer in answers(tmp_path / "out.jsonl")] == [200, 200]
    assert len(fake.bodies) == 5


async def test_a_server_that_is_gone_ends_the_run_and_answers_nothing(tmp_path, capsys):
    assert await run("http://127.0.0.1:9", batch_file(tmp_path, 3)) == 1
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert "cannot reach" in capsys.readouterr().err


async def test_a_line_that_takes_too_long_fails_alone(tmp_path):
    async with serving(FakeServer(first_token_s=60)) as fake:
        assert await run(fake.url, batch_file(tmp_path, 1), "--timeout", "0.2") == 1
    assert answers(tmp_path / "out.jsonl")[0]["error"]["code"] == "timeout"


@pytest.mark.parametrize(
    ("header", "attempt", "seconds"), [("2", 1, 2), (None, 1, 0.5), ("soon", 3, 2), ("9999", 1, 30)]
)
def test_the_wait_is_what_the_server_asks_for_within_reason(header, attempt, seconds):
    assert wait_s(header, attempt) == seconds


def wait_for_answers(out: Path, count: int) -> None:
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= count)


@contextmanager
def answering(at_most: int) -> Iterator[str]:
    """A server in a process of its own; its URL."""
    script = Path(__file__).parents[1] / "fake_server.py"
    words = [sys.executable, str(script), "0", str(at_most)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def killed_run(source: Path, out: Path, url: str, num_answers: int) -> int:
    """Start a run, kill -9 it when `out` has at least so many answers; how many it had."""
    words = ["run", "-i", str(source), "-o", str(out), "--url", url, "--concurrency", "7"]
    process = subprocess.Popen([sys.executable, "-m", "maitred", *words], env=environment(), stderr=subprocess.DEVNULL)
    wait_for_answers(out, num_answers)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=HANGS_S) == -signal.SIGKILL, "the run was over before it could be killed"
    return out.read_bytes().count(b"\n")


def test_killed_at_any_time_each_custom_id_is_answered_exactly_once(tmp_path):
    source, out = batch_file(tmp_path, 300), tmp_path / "out.jsonl"
    had = 0
    for more in (20, 130):  # and then it hangs until it is killed
        with answering(more) as url:
            had = killed_run(source, out, url, had + more)
    assert had == 150
    with answering(300) as url:
        result = maitred_process("run", "-i", str(source), "-o", str(out), "--url", url)
    assert result.code == 0
    assert Counter(answer["custom_id"] for answer in answers(out)) == Counter(f"r{n}" for n in range(300))


async def test_ctrl_c_says_how_to_go_on(tmp_path):
    source, out = batch_file(tmp_path, 50), tmp_path / "out.jsonl"
    async with serving(FakeServer(at_most=1)) as fake:
        words = ["run", "-i", str(source), "-o", str(out), "--url", fake.url, "--concurrency", "1"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "maitred", *words, stderr=subprocess.PIPE, env=environment()
        )
        await asyncio.to_thread(wait_for_answers, out, 1)
        process.send_signal(signal.SIGINT)
        _, err = await process.communicate()
    assert process.returncode == 130
    assert err.decode() == "interrupted; the same command goes on from here\n"


def test_in_process_a_line_is_answered_as_the_server_would(tmp_path):
    source = tmp_path / "in.jsonl"
    body = {"model": "mini", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    lines = [
        {"custom_id": "good", "url": "/v1/chat/completions", "body": body},
        {"custom_id": "bad", "url": "/v1/chat/completions", "body": body | {"temperature": "hot"}},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    result = maitred_process(
        "run", "-i", str(source), "-o", str(out), "--served-model-name", "mini", "--allow-failures"
    )
    assert result.code == 0, result.err
    found = {answer["custom_id"]: answer["response"] for answer in answers(out)}
    assert found["good"]["status_code"] == 200
    assert found["good"]["body"]["choices"][0]["message"]["content"]
    assert found["good"]["request_id"]
    assert found["bad"]["status_code"] == 400
    assert "temperature" in found["bad"]["body"]["error"]["message"]


BODY = {"model": "m", "messages": []}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def line(custom_id: object = "a", **fields: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": BODY} | fields


def test_lines_are_found_by_number_and_place(tmp_path):
    path = written(tmp_path, line("a"), "", line("ü"), line("c"))
    found = scan(path)
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (3, "ü"), (4, "c")]
    with path.open("rb") as file:
        for each in reversed(found):
            request = read_request(file, each)
            assert (request.url, json.loads(request.body)) == ("/v1/chat/completions", BODY)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = written(tmp_path, line("a"), line("b"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = scan(path)
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (2, "b")]
    with path.open("rb") as file:
        assert [json.loads(read_request(file, each).body) for each in found] == [BODY, BODY]


def test_a_custom_id_that_stands_twice_is_refused_with_both_lines(tmp_path):
    with pytest.raises(ConfigError, match="'a' stands in line 1 and again in line 3"):
        scan(written(tmp_path, line("a"), line("b"), line("a")))


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        ("{oops", "invalid_json_line", "line 1 is not valid JSON"),
        ("[1]", "invalid_json_line", "line 1 is not a JSON object"),
        (line(None), "missing_custom_id", "no custom_id"),
        (line(7), "missing_custom_id", "no custom_id that is a string"),
        (line(method="GET"), "invalid_method", "'GET'; it must be POST"),
        (line(url="/v1/embeddings"), "invalid_url", "/v1/chat/completions, /v1/completions"),
        (line(url=["x"]), "invalid_url", "['x']"),
        (line(body="x"), "invalid_body", "body is not a JSON object"),
        (line(body=BODY | {"stream": True}), "invalid_body", "cannot stream"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(tmp_path, bad, code, message):
    path = written(tmp_path, bad)
    with path.open("rb") as file, pytest.raises(BadLine) as caught:
        read_request(file, scan(path)[0])
    assert caught.value.code == code
    assert message in str(caught.value)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "\xff\xfe"}\n')
    with path.open("rb") as file, pytest.raises(BadLine):
        read_request(file, scan(path)[0])


def test_files_that_are_not_there_are_told(tmp_path):
    with pytest.raises(ConfigError, match="--input"):
        scan(tmp_path / "none")

    with pytest.raises(ConfigError, match="--output"):
        OutputFile(tmp_path / "none" / "out")


def test_what_is_written_begins_as_the_output_file_expects():
    assert answer_line(1, "a", 200, "", {"x": 1}).startswith(LINE_START)
    assert error_line(2, None, BadLine("code", "message")).startswith(LINE_START)


def answer(number: int, custom_id: str | None, status_code: int = 200) -> bytes:
    response = {"status_code": status_code, "body": "x" * 50}
    line = {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def test_what_is_there_is_done(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer(1, "a") + answer(2, None))
    with OutputFile(path) as output:
        assert output.done == {"custom_id a", "batch_req_line_2"}
        output.append(answer(3, "c"))
    assert path.read_bytes() == answer(1, "a") + answer(2, None) + answer(3, "c")


def test_what_is_done_and_failed_is_known(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    error = b'{"id":"batch_req_line_3","custom_id":"c","response":null,"error":{"code":"timeout","message":""}}\n'
    path.write_bytes(answer(1, "a") + answer(2, "b", status_code=404) + error)
    with OutputFile(path) as output:
        assert output.failed == {"custom_id b", "custom_id c"}


@pytest.mark.parametrize("cut", range(1, len(answer(2, "b"))))
def test_a_line_torn_anywhere_is_cut_off_and_asked_again(tmp_path: Path, cut: int):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer(1, "a") + answer(2, "b")[:cut])
    with OutputFile(path) as output:
        assert output.done == {"custom_id a"}
        output.append(answer(2, "b"))
    assert path.read_bytes() == answer(1, "a") + answer(2, "b")


@pytest.mark.parametrize("text", ["my notes\nand more", "one line without an end"])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"notes.txt:1: is not a line of a batch's output"):
        OutputFile(path)
    assert path.read_text() == text


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    with OutputFile(tmp_path / "out"), pytest.raises(ConfigError, match="another run writes it"):
        OutputFile(tmp_path / "out")
    OutputFile(tmp_path / "out").__exit__(None, None, None)

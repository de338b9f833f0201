"""The load generator against the fake server."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from maitred.cli import bench_session as plot
from maitred.cli.bench import LoadOptions, PromptOptions, ReportOptions, TargetOptions
from maitred.cli.bench_session import live_table, make_bench
from maitred.cli.endpoint import HttpEndpoint
from maitred.cli.load import LoadClient, LoadProgress, PlannedRequest, Record, RequestForm
from maitred.cli.main import main
from maitred.core.errors import ConfigError
from tests.cli.fake_server import FakeServer, serving
from tests.cli.running import environment, maitred_thread
from tests.waiting import HANGS_S, until_async


async def one_request(fake: FakeServer, **form: Any) -> Record:
    async with serving(fake), HttpEndpoint(fake.url, timeout_s=form.pop("timeout_s", None)) as endpoint:
        client = LoadClient(endpoint, RequestForm(model="fake", **form))
        request = PlannedRequest(0, 0.0, [5, 6, 7], 6)
        return await client.send(request, client.form.encode(request))


async def bench(fake: FakeServer, folder: Path, *words: str) -> dict[str, Any]:
    """The JSON result."""
    path = folder / "result.json"
    async with serving(fake):
        assert await maitred_thread("bench", "serve", "--url", fake.url, "--json", str(path), *words) == 0
    return json.loads(path.read_text())


async def test_tokens_and_times_of_one_answer():
    record = await one_request(FakeServer(first_token_s=0.05, token_s=0.02))
    assert record.ok
    assert (record.input_tokens, record.output_tokens, record.finish_reason) == (3, 6, "length")
    assert [chunk.num_tokens for chunk in record.chunks] == [1] * 6
    assert record.ttft_s >= 0.05
    assert len(record.itls_s()) == 5


async def test_chunks_and_tokens_are_counted_as_the_server_counts_them():
    record = await one_request(FakeServer(tokens_per_chunk=4, token_s=0.01))
    assert [chunk.num_tokens for chunk in record.chunks] == [4, 2]
    assert len(record.itls_s()) == 2

    record = await one_request(FakeServer(sends_usage=False), endpoint="chat")
    assert (record.output_tokens, len(record.chunks)) == (6, 6)

    record = await one_request(FakeServer(text_of=lambda position: "" if position == 0 else "x"))
    assert len(record.chunks) == 6


@pytest.mark.parametrize(
    ("fake", "kind"),
    [
        (FakeServer(refuse=lambda number: 429), "HTTP 429"),
        (FakeServer(first_token_s=60), "timeout"),
        (FakeServer(break_stream=True), "unreachable"),
        (FakeServer(text_of=lambda position: "", sends_usage=False), "stream error"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_failure_is_part_of_the_record(fake, kind):
    record = await one_request(fake, timeout_s=0.3 if kind == "timeout" else 60)
    assert record.failure.kind == kind
    assert record.failure.message


async def test_the_body_asks_for_exact_lengths_unless_told_not_to():
    fake = FakeServer()
    await one_request(fake)
    await one_request(fake, endpoint="chat", ignore_eos=False, continuous_usage=False, temperature=None, extra={"a": 1})
    tokens, chat = fake.bodies
    assert tokens["prompt"] == [5, 6, 7]
    assert (tokens["max_tokens"], tokens["ignore_eos"], tokens["temperature"]) == (6, True, 0.0)
    assert tokens["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert chat["messages"][0]["content"].split() == ["is", "you", "that"]
    assert chat["stream_options"] == {"include_usage": True}
    assert not {"ignore_eos", "temperature"} & set(chat)
    assert chat["a"] == 1


async def test_an_open_loop_sends_at_its_times_whatever_the_server_does(tmp_path):
    fake = FakeServer(together=30)  # a closed loop would wait for ever
    words = ["--rate", "100", "--num-requests", "30", "--seed", "1", "--timeout", str(HANGS_S)]
    result = (await bench(fake, tmp_path, *words))["result"]
    assert result["num_completed"] == fake.max_in_flight == 30


async def test_a_closed_loop_keeps_so_many_in_flight(tmp_path):
    fake = FakeServer(first_token_s=0.02)
    result = (await bench(fake, tmp_path, "--concurrency", "3", "--num-requests", "30", "--warmup", "2"))["result"]
    assert fake.max_in_flight == result["peak_in_flight"] == 3
    assert result["num_completed"] == 30
    assert len(fake.bodies) == 32


async def test_a_duration_ends_the_sending(tmp_path):
    for words in (["--rate", "50"], ["--concurrency", "2"]):
        fake = FakeServer(first_token_s=0.02)
        result = (await bench(fake, tmp_path, "--duration", "0.5", *words))["result"]
        assert 0 < result["num_completed"] < 100, "without an end it would be a hundred requests by --num-requests"
        assert result["duration_s"] >= 0.2, "it sent for as long as it was told to"


async def test_a_trace_is_replayed(tmp_path):
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 100 * n, "input_length": 600, "output_length": 3, "hash_ids": [7, n]} for n in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    fake = FakeServer()
    result = (await bench(fake, tmp_path, "--trace", str(trace), "--rate-scale", "2"))["result"]
    assert result["num_completed"] == 4
    assert result["output_tokens"] == 12
    assert result["duration_s"] > 0.1, "sent as the trace has it, twice as fast: 300 ms in 150"
    assert len({tuple(body["prompt"][:512]) for body in fake.bodies}) == 1
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 4


async def test_the_report_says_how_to_repeat_the_run_and_never_the_key(tmp_path):
    words = [
        "--num-requests",
        "3",
        "--slo",
        "ttft:900s",
        "--slo",
        "itl:900s",
        "--records",
        str(tmp_path / "records.jsonl"),
    ]
    whole = await bench(FakeServer(api_key="secret"), tmp_path, "--api-key", "secret", *words)
    assert "secret" not in json.dumps(whole)
    assert whole["run"]["model"] == "fake"
    assert isinstance(whole["run"]["seed"], int)
    assert whole["result"]["num_good"] == 3
    assert set(whole["result"]["ttft_s"]) == {"count", "mean", "p50", "p90", "p99", "max"}
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert len(records) == 3
    assert len(records[0]["chunks"]) == 64


async def test_two_runs_without_a_seed_send_different_prompts(tmp_path):
    fake = FakeServer()
    for _ in range(2):
        await bench(fake, tmp_path, "--num-requests", "1")
    assert fake.bodies[0]["prompt"] != fake.bodies[1]["prompt"]


@pytest.mark.parametrize(
    ("words", "workload"),
    [
        ("--num-requests 3 --seed 7", "completions: 3 requests, 8 in flight, 128 tokens in, 64 out"),
        (
            "--endpoint chat --num-requests 2 --rate inf --shared-prefix-len 9 --output-len choice:3,4 --seed 7",
            "chat: 2 requests, inf per second (burstiness 1), 128 tokens in after 1 x 9, choice:3,4 out",
        ),
        ("--duration 0.1 --output-len 2 --seed 7", "all requests of 0.1 s, 8 in flight"),
        ("--trace trace.jsonl --rate-scale 9 --seed 7", "all requests, trace.jsonl, 9 times as fast, lengths times 1"),
    ],
)
async def test_the_table_says_what_was_sent_and_with_which_seed(tmp_path, capsys, monkeypatch, words, workload):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text('{"timestamp": 0, "input_length": 6, "output_length": 3, "hash_ids": [7]}\n')
    await bench(FakeServer(), tmp_path, *words.split())
    out = capsys.readouterr().out
    assert workload in out.splitlines()[0]
    assert "--seed 7 sends the same again" in out.splitlines()[0]


async def test_some_failures_are_in_the_table(tmp_path, capsys):
    result = await bench(FakeServer(refuse=lambda number: 500 if number % 2 else None), tmp_path, "--num-requests", "8")
    assert (result["result"]["num_completed"], result["result"]["num_failed"]) == (4, 4)
    assert "4 x HTTP 500: the server answered 500: refused with 500" in capsys.readouterr().out


async def test_nothing_answered_is_an_error_with_a_hint(capsys):
    async with serving(FakeServer(strict=True)) as fake:
        assert await maitred_thread("bench", "serve", "--url", fake.url, "--num-requests", "2") == 1
    err = capsys.readouterr().err
    assert "2 times HTTP 400" in err
    assert "--no-ignore-eos" in err


@pytest.mark.parametrize("suffix", ["png", "svg"])
async def test_a_plot_is_drawn(tmp_path, suffix):
    path = tmp_path / f"plot.{suffix}"
    words = ["--num-requests", "6", "--plot", str(path), "--slo", "ttft:1s"]
    await bench(FakeServer(token_s=0.001, refuse=lambda number: 500 if number == 1 else None), tmp_path, *words)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


def test_a_plot_that_cannot_be_is_told_before_the_load(monkeypatch):
    with pytest.raises(ConfigError, match=r"\.png or \.svg"):
        plot.check_plot_path("plot.gif")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'maitred\[plot\]'"):
        plot.check_plot_path("plot.png")


def test_the_live_table_shows_a_run_from_its_first_moment():
    console = Console(file=io.StringIO(), width=100)
    console.print(live_table(LoadProgress(num_sent=4), {"ttft": 0.2}, 3.0))
    text = console.file.getvalue()
    assert "3 s: 4 sent, 4 in flight, 0 done, 0 failed" in text
    assert "goodput" in text
    assert "ttft <= 200.0 ms" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--rate 1 --concurrency 2", "exclude each other"),
        ("--rate 0", "--rate is 0.0; it must be over 0"),
        ("--endpoint chat --prompt-form tokens", "takes no token ids"),
        ("--token-ids 9:3", "write LOW:HIGH"),
        ("--trace x --rate 1", "--rate-scale"),
        ("--json /no/such/folder/x.json", "its folder does not exist"),
        ("--endpoint embeddings", "choose one of completions, chat"),
        ("--num-prefixes 0", "at least 1"),
    ],
)
def test_what_cannot_work_is_told_before_the_load(words, message, capsys):
    assert main(["bench", "serve", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_without_rate_or_trace_the_loop_is_closed():
    made = make_bench(TargetOptions(), LoadOptions(), PromptOptions(), ReportOptions())
    assert made.concurrency == 8
    assert len(list(made.plan())) == 100


async def test_ctrl_c_reports_what_was_answered(tmp_path):
    async with serving(FakeServer(first_token_s=0.02)) as fake:
        words = ["bench", "serve", "--url", fake.url, "--concurrency", "1", "--duration", "60"]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "maitred", *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        await until_async(lambda: len(fake.bodies) >= 5)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode == 130
    assert "output tokens" in out.decode()
    assert "interrupted" in err.decode()

"""`maitred bench infer` against a server that really runs, over HTTP, gRPC and shared memory."""

from __future__ import annotations

import json
import socket

import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.cli.main import main
from tests.conftest import start_server
from tests.tensor.models import write_model


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """(HTTP URL, gRPC address) of one that adds two vectors."""
    folder, port = tmp_path_factory.mktemp("models"), free_port()
    write_model(folder, "add", config="max_batch_size: 8")
    running = start_server("none", "--model-repository", str(folder), "--grpc-port", str(port))
    yield running.url, f"127.0.0.1:{port}"
    assert running.stop() == 0


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize(
    "words", [("--concurrency", "4"), ("--rate", "2000", "--rows", "3"), ("--shm",)], ids=["closed", "open", "shm"]
)
def test_every_request_is_answered_and_counted(server, capsys, protocol, words):
    url = server[protocol == "grpc"]
    flags = ("--model", "add", "--num-requests", "60", "--duration", "300", "--json")
    assert main(["bench", "infer", "--url", url, "--protocol", protocol, *flags, *words]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["num_requests"], told["num_failed"]) == (60, 0)
    assert 0 < told["p50_ms"] <= told["p90_ms"] <= told["p99_ms"]
    assert told["rows_per_s"] == pytest.approx(told["requests_per_s"] * (3 if "--rows" in words else 1))


def test_what_fails_is_told_by_kind(server, capsys):
    flags = ("--model", "add", "--num-requests", "5", "--rows", "9", "--json")
    assert main(["bench", "infer", "--url", server[0], *flags]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["failures"] == {"HTTP 400": 5}
    assert "9" in told["reasons"]["HTTP 400"]
    assert "8" in told["reasons"]["HTTP 400"]
    assert main(["bench", "infer", "--url", server[1], "--protocol", "grpc", *flags]) == 1
    grpc = json.loads(capsys.readouterr().out)
    assert grpc["failures"] == {"INVALID_ARGUMENT": 5}
    assert told["reasons"]["HTTP 400"] == json.dumps(
        {"error": grpc["reasons"]["INVALID_ARGUMENT"]}, separators=(",", ":")
    )
    assert main(["bench", "infer", "--url", server[0], *flags[:-1]]) == 1
    assert f"failed HTTP 400: 5, the first with: {told['reasons']['HTTP 400']}\n" in capsys.readouterr().out


def test_a_model_that_is_not_there_and_a_server_that_is_not_are_told(server, capsys):
    assert main(["bench", "infer", "--url", server[0], "--model", "none"]) != 0
    assert "none" in capsys.readouterr().err
    assert main(["bench", "infer", "--url", f"http://127.0.0.1:{free_port()}", "--model", "add"]) != 0
    assert "does not answer" in capsys.readouterr().err

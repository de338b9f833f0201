from __future__ import annotations

import socket

import pytest

from maitred.cli.main import main
from maitred.cli.serve import _welcome, bind
from maitred.errors import ConfigError
from tests.cli.running import maitred_process
from tests.conftest import ServerProcess


def test_a_busy_port_is_one_line_before_anything_is_loaded(capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 1
    expected = f"error: port {port} of 127.0.0.1 is in use; stop the other server, or choose a free one with --port 0\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("host", "remedy"),
    [("no.such.host.invalid", "use 127.0.0.1"), ("203.0.113.7", "is no address of this machine; use 127.0.0.1")],
)
def test_a_host_that_cannot_be_listened_on_has_a_remedy(host, remedy):
    with pytest.raises(ConfigError, match=remedy):
        bind(host, 0)


def test_a_bound_port_refuses_clients_until_somebody_answers():
    with bind("127.0.0.1", 0) as bound, socket.socket() as client:
        assert client.connect_ex(bound.getsockname()) != 0


def test_a_missing_model_is_one_line(capsys):
    assert main(["serve", "/no/such/model", "--port", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "/no/such/model" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")]
)
def test_the_welcome_gives_an_address_that_works_and_never_the_key(host, shown):
    text = _welcome("m", host, 8000, has_keys=True)
    assert text.startswith(f"maitred serves m on http://{shown}:8000")
    assert "secret" not in text
    assert "--api-key KEY" in text


def test_the_memory_plan_is_printed_before_the_server_is_ready(server: ServerProcess):
    text = "".join(server.lines)
    assert -1 < text.index("weights") < text.index("KV cache") < text.index("longest that memory holds")
    assert text.index("longest that memory holds") < text.index("maitred serves")


def test_chat_and_bench_against_the_served_model(server: ServerProcess):
    said = maitred_process("chat", "--url", server.url, "--set", "max_tokens=4", stdin="Hello\n")
    assert said.code == 0
    assert said.out.strip()
    measured = maitred_process("bench", "serve", "--url", server.url, "--num-requests", "4", "--json", "-")
    assert measured.code == 0
    assert '"num_completed": 4' in measured.out
    assert '"output_tokens": 256' in measured.out

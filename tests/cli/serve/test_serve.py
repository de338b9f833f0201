from __future__ import annotations

import json
import re
import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from maitred.cli.main import main
from maitred.cli.serve import _welcome, bind, served_words, url_of
from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.engine.limits import claim_descriptors
from tests.cli.running import maitred_process
from tests.cli.test_ps import tensor_entry
from tests.conftest import ServerProcess, copied_model


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


def test_all_descriptors_that_the_system_allows_are_claimed():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        assert claim_descriptors() == hard == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def cut_short(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def with_another_dtype(folder: Path) -> None:
    """As many bits a value, so that nothing but the name is wrong."""
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = content[8 : 8 + length].replace(b'"BF16"', b'"I16" ')
    assert len(header) == length
    weights.write_bytes(content[:8] + header + content[8 + length :])


def with_another_dtype_in_the_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "float13"}))


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_half_a_tokenizer(folder: Path) -> None:
    whole = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(whole[: len(whole) // 2])


def unharmed(folder: Path) -> None:
    """What is asked of it is wrong."""


@pytest.mark.parametrize(
    ("damage", "flags", "cause", "processes"),
    [
        (cut_short, [], "model.safetensors was cut short: 7677400 bytes of 7678400", []),
        (with_another_dtype, [], "is of type I16; matrices must be one of", ["--in-process"]),
        (with_another_dtype_in_the_config, [], "config.json: dtype is 'float13'", []),
        (without_tokenizer, [], "has no tokenizer.json", ["--in-process"]),
        (with_half_a_tokenizer, [], "tokenizer.json cannot be read", []),
        (unharmed, ["--kv-cache-memory-bytes", "900TB"], "kv_cache_memory_bytes asks for", []),
        (
            unharmed,
            ["--max-model-len", "100000000000"],
            "one context of 100,000,000,000 tokens needs",
            ["--in-process"],
        ),
    ],
)
def test_a_model_that_cannot_be_served_ends_the_server_with_its_cause_in_one_line(
    tmp_path: Path, capsys, damage: Callable[[Path], None], flags: list[str], cause: str, processes: list[str]
):
    """R27, before anybody asked for anything."""
    damage(copied_model(tmp_path))
    began_at = time.monotonic()
    assert main(["serve", str(tmp_path), "--port", "0", "--log-level", "error", *flags, *processes]) == 1
    seconds = time.monotonic() - began_at
    ended = capsys.readouterr()
    assert ended.err.startswith("error: ")
    assert cause in ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert ended.out == ""
    assert seconds < 60  # one or two, and a quiet machine's five are R27's bound


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")]
)
def test_the_welcome_gives_an_address_that_works_and_never_the_key(host, shown):
    text = _welcome("m", url_of(ServerConfig(), host, 8000), has_keys=True)
    assert text.startswith(f"maitred serves m on http://{shown}:8000")
    assert "secret" not in text
    assert "--api-key KEY" in text


def test_the_welcome_says_which_models_of_tensors_there_are_and_what_to_type():
    ready = [tensor_entry(f"m{at}", 1, "READY") for at in range(8)]
    broken = tensor_entry("m0", 2, "UNAVAILABLE", "cut off")
    assert _welcome(served_words(("tiny",), ()), "URL", has_keys=False).startswith("maitred serves tiny on URL ")
    alone = served_words((), [*ready[:2], broken])
    assert alone == "2 tensor models (m0, m1), 1 unavailable (maitred ps says why),"
    assert "or try: maitred ps URL --api-key KEY)" in _welcome(alone, "URL", has_keys=True, talks=False)
    assert served_words(("tiny", "alias"), ready) == "tiny and 8 tensor models (m0, m1, m2, m3, m4, m5, and 2 more)"
    assert served_words((), [broken]) == "0 tensor models, 1 unavailable (maitred ps says why),"


def test_the_memory_plan_is_printed_before_the_server_is_ready(server: ServerProcess):
    text = "".join(server.lines)
    assert -1 < text.index("weights") < text.index("KV cache") < text.index("longest that memory holds")
    assert text.index("longest that memory holds") < text.index("maitred serves")


def test_the_log_tells_where_the_start_went_and_the_metric_has_the_same_phases(server: ServerProcess):
    (line,) = [line for line in server.lines if line.startswith("started in ")]
    page = httpx.get(f"{server.url}/metrics").text
    phases = {name: float(s) for name, s in re.findall(r'^maitred_start_seconds\{phase="(\w+)"\} (\S+)$', page, re.M)}
    assert {"command", "engine_process", "plan", "kv_pool", "weights", "program", "scheduler", "server"} <= set(phases)
    assert line.startswith(f"started in {sum(phases.values()):.2f} s: ")
    assert all(f" {name} {seconds:.2f}" in line for name, seconds in phases.items() if seconds >= 0.01)


def test_chat_and_bench_against_the_served_model(server: ServerProcess):
    said = maitred_process("chat", "--url", server.url, "--set", "max_tokens=4", stdin="Hello\n")
    assert said.code == 0
    assert said.out.strip()
    measured = maitred_process("bench", "serve", "--url", server.url, "--num-requests", "4", "--json", "-")
    assert measured.code == 0
    assert '"num_completed": 4' in measured.out
    assert '"output_tokens": 256' in measured.out

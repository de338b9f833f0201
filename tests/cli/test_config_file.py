from __future__ import annotations

from pathlib import Path

import pytest

from maitred.cli.flags import UsageError
from maitred.cli.main import load
from maitred.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig

SERVE = load("serve")


def parse(tmp_path: Path, text: str, *words: str):
    path = tmp_path / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return SERVE.parse(["--config", str(path), *words], {})


def test_keys_are_flags_with_dashes_or_underscores(tmp_path):
    options = parse(
        tmp_path,
        """
        model: ./some-folder
        port: 9000
        max_num_seqs: 8
        kv-cache-memory-bytes: 2GiB
        enable-prefix-caching: false
        api-keys: [a, b]
        served-model-name: one
        sse-keep-alive-s: 3
        generation-config: {temperature: 0.5}
        revision: 123
        """,
    )
    assert options[ModelConfig].model == "./some-folder"
    assert options[ModelConfig].revision == "123"
    assert options[ModelConfig].generation_config == {"temperature": 0.5}
    assert options[ServerConfig].port == 9000
    assert options[ServerConfig].api_keys == ("a", "b")
    assert options[ServerConfig].served_model_names == ("one",)
    assert options[ServerConfig].sse_keep_alive_s == 3.0
    assert options[SchedulerConfig].max_num_seqs == 8
    assert options[CacheConfig].kv_cache_memory_bytes == 2**31
    assert not options[CacheConfig].enable_prefix_caching


def test_the_command_line_wins(tmp_path):
    options = parse(tmp_path, "port: 9000\nenable-prefix-caching: false\n", "--port", "1", "--enable-prefix-caching")
    assert options[ServerConfig].port == 1
    assert options[CacheConfig].enable_prefix_caching


def test_what_says_nothing_changes_nothing(tmp_path):
    assert parse(tmp_path, "# nothing\n")[ServerConfig] == ServerConfig()

    assert parse(tmp_path, "port: null\nmax-num-seqs: ~\n")[ServerConfig] == ServerConfig()
    path = tmp_path / "run.yaml"
    path.write_text("input: null\noutput: out.jsonl\n")
    with pytest.raises(UsageError, match="--input is required"):
        load("run").parse(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: 1\nprot: 2\n", "serve.yaml:2: no option 'prot' (did you mean port?)"),
        ("\nport: many\n", "serve.yaml:2: port is 'many'; it must be an integer"),
        ("port: true\n", "serve.yaml:1: port is True; it must be an integer"),
        ("max-num-seqs: 1.5\n", "max-num-seqs is 1.5; it must be an integer"),
        ("enable-prefix-caching: 1\n", "enable-prefix-caching is 1; it must be true or false"),
        ("api-key: {a: b}\n", "it must be a list"),
        ("generation-config: [1]\n", "it must be pairs KEY=VALUE"),
        ("port: 1\nport: 2\n", "serve.yaml:2: 'port' stands twice"),
        ("- port\n", "holds no keys"),
        ("port: [1\n", "is not valid YAML"),
        ("model: !!python/object/apply:os.system [true]\n", "it must be text"),
        ("config: other.yaml\n", "no option 'config'"),
        ("log-level: loud\n", "--log-level is 'loud'; choose one of"),
    ],
)
def test_a_slip_names_file_line_and_key(tmp_path, text, message):
    with pytest.raises(UsageError) as caught:
        parse(tmp_path, text)
    assert message in str(caught.value)

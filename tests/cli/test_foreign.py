"""Flags and commands of other servers: each is answered with what does it here, none by a flag of another meaning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from maitred.cli.command import make_parser
from maitred.cli.main import COMMANDS, load, main
from maitred.engine import foreign
from maitred.engine.foreign import EQUAL, FLAGS, flag_named, what_was_meant
from tests.conftest import ROOT

OWN = list(make_parser(load("serve"))._option_string_actions)


def test_what_is_called_equal_is_there():
    assert sum(not answer.startswith("gone: ") for answer in FLAGS.values()) == 60
    assert not {flag for flag in FLAGS if flag in OWN or f"--{flag}" in OWN}, "what is here needs no other name"
    for answer in FLAGS.values():
        assert answer.startswith((EQUAL, "not yet: ", "not needed: ", "gone: "))
        assert set(re.findall(r"--[a-z-]+", answer)) - {"--replicas"} <= set(OWN)


def test_no_command_that_is_here_is_told_as_missing():
    told = {name: answer for name, answer in foreign.COMMANDS.items() if name in COMMANDS}
    assert not [name for name, answer in told.items() if answer.startswith(("not yet: ", "gone: "))]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("serve --tp-size 2", "no option --tp-size; here it is --tensor-parallel RANKS, processes of this machine"),
        ("serve --pipeline-parallel-size=2", "no option --pipeline-parallel-size; not yet: splits over machines"),
        ("serve --data-parallel-size 2", "here it is --mixed-workers WORKERS, engines of this server"),
        ("serve --quantization awq", "here it is --dtype int8 (or int4)"),
        ("serve --gpu-memory-utilization 0.9", "here it is --kv-cache-memory-bytes BYTES"),
        ("serve --model_path /models", "here it is MODEL (or --model MODEL)"),
        ("serve --no-enable-chunked-prefill", "not needed: a step is one batch"),
        ("serve -m model", "here it is MODEL"),
        ("serve -hf owner/name", "here it is MODEL"),
        ("serve -c 4096", "here it is --max-model-len TOKENS"),
        ("chat -t 4", "here it is --num-threads THREADS"),
        ("chat --alias name", "here it is --served-model-name NAME, of maitred serve"),
        ("serve --speculative-algorithm EAGLE3", "here it is --speculative ngram (or draft, mtp, off)"),
        ("serve --role-switching on", "no option --role-switching; gone: "),
        ("serve --kv-compat mixed", "no option --kv-compat; gone: "),
        ("serve --kv-disk-key-file key", "no option --kv-disk-key-file; gone: "),
        ("manifests kubernetes", "gone: deploy/kubernetes"),
        ("deploy model", "deploy/kubernetes puts a fleet"),
        ("quantize model", "--dtype int8 (or int4)"),
        ("list", "maitred models lists"),
        ("pull owner/name", "maitred serve OWNER/NAME downloads"),
        ("show name", "maitred explain MODEL"),
        ("rm name", "hf cache rm"),
        ("stop name", "Ctrl-C or SIGTERM"),
        ("run ./model", "maitred chat MODEL talks to a model"),
    ],
)
def test_a_habit_of_others_is_answered_and_not_accepted(words: str, answer: str, capsys: pytest.CaptureFixture[str]):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert answer in error
    assert error.count("\n") == 1


def test_a_key_of_a_config_file_is_answered_as_the_flag_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "serve.yaml").write_text("tp_size: 2\n")
    assert main(["serve", "--config", str(tmp_path / "serve.yaml")]) == 2
    assert "serve.yaml:1: no option 'tp_size'; here it is --tensor-parallel RANKS" in capsys.readouterr().err


def test_a_flag_of_ours_with_a_letter_missing_is_still_recognised():
    for flag in OWN:
        if len(flag) > len("--port"):
            typed = flag[:-2] + flag[-1]
            assert flag in what_was_meant(typed, OWN), typed


def test_the_table_for_newcomers_says_what_the_command_line_answers():
    text = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.M)
    for there, here in rows:
        for flag in re.findall(r"`(--?[a-z-]+)", there):
            assert flag in OWN or (flag_named(flag) or "").startswith(EQUAL), flag
        for flag in re.findall(r"(?<=[ `])--[a-z-]+", here):
            assert flag in OWN or flag == "--set", flag
    assert len(rows) > 10

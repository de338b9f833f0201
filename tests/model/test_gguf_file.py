"""GGUF files are read as gguf's own reader reads them; whatever is wrong with one is told in a line, and soon."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from maitred.core.errors import CheckpointError
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.gguf_file import GGML_TYPES, GgufFile, gguf_in
from tests.model.gguf_models import random_tensors, write_gguf
from tests.model.test_gguf_config import llama


@pytest.fixture
def path(tmp_path: Path) -> Path:
    config = llama(num_hidden_layers=1, vocab_size=8)
    return write_gguf(tmp_path / "small.gguf", "llama", config, random_tensors(config), general__note="größer")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def header(tensors: int = 0, keys: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def tensor(name: bytes, shape: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as refused:
        GgufFile(path)
    told = str(refused.value)
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    return told


def test_types_are_ggmls() -> None:
    sizes = {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    assert sizes == GGML_TYPES


def test_keys_and_tensors_are_what_ggufs_reader_reads(path: Path) -> None:
    oracle = gguf.GGUFReader(path)
    file = GgufFile(path)
    assert {name: file.metadata[name] for name in file.metadata} == {
        name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")
    }
    assert sorted(file.tensor_names()) == sorted(each.name for each in oracle.tensors)
    for each in oracle.tensors:
        raw = file.tensor(each.name)
        assert (raw.dtype, raw.shape) == (each.tensor_type.name, tuple(int(n) for n in reversed(each.shape)))
        assert bytes(raw.data) == each.data.tobytes()
    file.close()


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no GGUF file, or cut short (0 bytes)"),
        (b"PK" + bytes(40), "its first bytes are b'PK"),
        (header(version=1) + bytes(9), "GGUF version 1 is not read"),
        (header(version=4) + bytes(9), "GGUF version 4 is not read"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (header(tensors=2**63) + bytes(99), "claims 9,223,372,036,854,775,808 tensors, and the file has 123 bytes"),
        (header(keys=2**63) + bytes(99), "claims 9,223,372,036,854,775,808 keys"),
        (header(keys=1) + struct.pack("<Q", 2**62) + bytes(99), "key 0 takes 4,611,686,018,427,387,904 bytes, and 99"),
        (header(keys=1) + key(b"a", 8, struct.pack("<Q", 100)), "key a takes 108 bytes, and 8 are left"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 6, 2**61)), "key a takes 9,223,372,036,854,775,808 bytes"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 8, 2**61)), "key a claims 2,305,843,009,213,693,952 texts"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQQ", 8, 1, 2**64 - 8)), "key a takes 18,446,744,073,709,551,616"),
        (header(keys=1) + key(b"a", 9, struct.pack("<IQ", 9, 1)), "arrays of arrays are not read"),
        (header(keys=1) + key(b"a", 77, bytes(8)), "key a is of kind 77, which the format has not"),
        (header(keys=1) + key(b"\xff", 4, bytes(4)), "key 0 is no printable UTF-8"),
        (header(keys=1) + key(b"a\nb", 4, bytes(4)), "key 0 is no printable UTF-8"),
        (header(keys=1) + key(b"a" * 10_000, 4, bytes(4)), "of at most 255 characters"),
        (header(keys=2) + 2 * key(b"a", 4, bytes(4)), "key a stands there twice"),
        (header(keys=1) + key(b"general.alignment", 4, struct.pack("<I", 24)), "alignment is '24', no power of 2"),
        (header(tensors=2) + 2 * tensor(b"t") + bytes(400), "tensor t stands there twice"),
        (header(tensors=1) + tensor(b"t", (4,) * 5) + bytes(400), "tensor t has 5 dimensions"),
        (header(tensors=1) + tensor(b"t", (0,)) + bytes(400), "tensor t (F32) has shape [0]"),
        (header(tensors=1) + tensor(b"t", (33,), 3) + bytes(400), "tensor t (Q4_1) has shape [33]"),
        (header(tensors=1) + tensor(b"t", kind=99) + bytes(400), "tensor t is of GGML's type 99"),
        (header(tensors=1) + tensor(b"t", offset=8) + bytes(400), "tensor t lies at offset 8, no multiple of 32"),
        (header(tensors=1) + tensor(b"t", (2**63, 2**63)) + bytes(400), "was cut short"),
        (header(tensors=1) + tensor(b"t", offset=2**63) + bytes(400), "was cut short"),
        (header(tensors=2) + tensor(b"a") + tensor(b"b", offset=64) + bytes(400), "tensors a and b overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_fault_in_a_header_is_told_by_key_or_tensor(tmp_path: Path, data: bytes, told: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    assert told in refusal(path)


def test_a_file_that_is_cut_short_anywhere_is_refused(path: Path) -> None:
    data = path.read_bytes()
    with_header = GgufFile(path)
    size = len(with_header.header_bytes)
    with_header.close()
    for length in (*range(0, size, 23), size, (size + len(data)) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        assert "cut short" in refusal(path)


def test_damaged_headers_are_refused_or_read_and_nothing_else(path: Path) -> None:
    """Random bytes, and large numbers over random places: a model, or one line; never another error."""
    data = path.read_bytes()
    file = GgufFile(path)
    size = len(file.header_bytes)
    file.close()
    draw = random.Random(13)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            at = draw.randrange(size)
            new = draw.choice((bytes([draw.randrange(256)]), b"\xff" * 8, bytes(8), struct.pack("<Q", 2**63)))
            damaged[at : at + len(new)] = new
        path.write_bytes(damaged)
        assert "\n" not in outcome(path)


def outcome(path: Path) -> str:
    """Of opening the file and all that a start reads of it."""
    try:
        with open_checkpoint(str(path)) as checkpoint:
            spec_from_config(checkpoint.config)
            for name in checkpoint.tensor_names():
                checkpoint.tensor(name)
            return f"ends with {checkpoint.generation_config.get('eos_token_id')}"
    except CheckpointError as error:
        return str(error)


def test_a_folder_with_one_model_is_that_model_and_with_several_names_them(path: Path) -> None:
    (path.parent / "mmproj-small.gguf").write_bytes(b"GGUF")
    with open_checkpoint(str(path.parent)) as checkpoint:
        assert (checkpoint.name, checkpoint.path, checkpoint.folder) == ("small", path, path.parent)
    (path.parent / "other.gguf").write_bytes(path.read_bytes())
    with pytest.raises(CheckpointError, match=r"holds 2 GGUF models \(other.gguf, small.gguf\); name the file"):
        open_checkpoint(str(path.parent))


def test_a_file_without_suffix_is_known_by_its_first_bytes(path: Path) -> None:
    with open_checkpoint(str(path.rename(path.with_name("sha256-0f")))) as checkpoint:
        assert checkpoint.gguf is not None


def split(path: Path) -> list[Path]:
    """The same model in two parts, as llama.cpp's gguf-split writes them: all keys in the first."""
    oracle = gguf.GGUFReader(path)
    parts = []
    for number, tensors in enumerate((oracle.tensors[:5], oracle.tensors[5:])):
        part = path.with_name(f"small-{number + 1:05d}-of-00002.gguf")
        writer = gguf.GGUFWriter(part, "llama")
        if number:
            writer.kv_data[0].clear()
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        own = (
            ()
            if number
            else (n for n in oracle.fields if n.partition(".")[0] != "GGUF" and n != "general.architecture")
        )
        for name in own:
            field = oracle.fields[name]
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=sub)
        for each in tensors:
            writer.add_tensor(each.name, np.array(each.data))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        parts.append(part)
    return parts


def test_parts_of_a_model_open_together_whichever_is_named(path: Path) -> None:
    with open_checkpoint(str(path)) as whole:
        tensors = {name: bytes(whole.tensor(name).data) for name in whole.tensor_names()}
        config, identity = whole.config, whole.identity
    first, second = split(path)
    path.unlink()
    for named in (first, second, path.parent):
        with open_checkpoint(str(named)) as checkpoint:
            assert {name: bytes(checkpoint.tensor(name).data) for name in checkpoint.tensor_names()} == tensors
            assert (checkpoint.config, checkpoint.name) == (config, "small")
            assert checkpoint.identity != identity
            assert [stamp.name for stamp in checkpoint.stamps] == [first.name, second.name]
    second.unlink()
    with pytest.raises(CheckpointError, match=r"1 of 2 parts are missing \(small-00002-of-00002.gguf\)"):
        open_checkpoint(str(first))
    with pytest.raises(CheckpointError, match=r"by its metadata part 0 \(from 0\) of 2"):
        open_checkpoint(str(first.rename(path)))


def test_identity_changes_with_the_metadata(path: Path) -> None:
    with open_checkpoint(str(path)) as checkpoint:
        before = checkpoint.identity
    data = path.read_bytes()
    status = path.stat()
    path.write_bytes(data.replace("größer".encode(), "grösser".encode()))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    with open_checkpoint(str(path)) as checkpoint:
        assert checkpoint.identity != before


def test_a_file_is_opened_and_refused_before_anything_heavy_is_imported(path: Path) -> None:
    bad = path.with_name("bad.gguf")
    bad.write_bytes(path.read_bytes()[:-1])
    code = (
        "import sys; from maitred.cli.main import main; from maitred.model.checkpoint import open_checkpoint;"
        f"open_checkpoint({str(path)!r}).identity; assert main(['serve', '--port', '0', {str(bad)!r}]) != 0;"
        "assert not {'numpy', 'jinja2', 'maitred.engine.build'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert f"{bad}: the file was cut short" in ended.stderr


def test_no_model_is_found_in_an_empty_folder(tmp_path: Path) -> None:
    assert gguf_in(tmp_path) is None

"""Packed weights on disk: the same numbers as packed anew, whatever happens to file, folder or checkpoint."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from maitred.core.errors import CheckpointError
from maitred.kernels import _native
from maitred.model import packed_cache
from maitred.model.checkpoint import open_checkpoint
from maitred.model.families import spec_from_config
from maitred.model.fusions import compile_program
from maitred.model.packaged import default_folder
from maitred.model.packed import PackedWeights, pack_weights
from maitred.model.packed_cache import LoadedWeights, WeightCache, cache_key, load_weights
from maitred.model.program import Format, Formats, Program
from tests.model.checkpoints import make_checkpoint

INT8 = Formats(linears=Format(dtype="int8"), head=Format(dtype="int8"))
POOL = _native.ThreadPool(2)
ISA = _native.default_isa()


class World(NamedTuple):
    model: Path
    cache: WeightCache

    @property
    def files(self) -> list[Path]:
        return sorted(self.cache.folder.iterdir()) if self.cache.folder.exists() else []

    def program(self, formats: Formats = INT8) -> Program:
        return compile_program(spec_from_config(open_checkpoint(str(self.model)).config), formats)

    def load(self, formats: Formats = INT8, **changes: Any) -> LoadedWeights:
        cache = WeightCache(**{name: getattr(self.cache, name) for name in self.cache.__slots__} | changes)
        checkpoint = open_checkpoint(str(self.model))
        return load_weights(self.program(formats), checkpoint, POOL, isa=ISA, cache=cache)

    def packed_anew(self) -> PackedWeights:
        return pack_weights(self.program(), open_checkpoint(str(self.model)), POOL)


@pytest.fixture
def world(tmp_path: Path) -> World:
    cache = WeightCache(folder=tmp_path / "cache" / "weights", max_bytes=2**40, min_bytes=0, spare_bytes=0)
    return World(make_checkpoint("qwen3_bias", tmp_path / "model"), cache)


def assert_equal(found: PackedWeights, wanted: PackedWeights) -> None:
    assert list(found.tensors) == list(wanted.tensors)
    for name, tensor in wanted.tensors.items():
        assert found[name].buffer.tobytes() == tensor.buffer.tobytes(), name
        assert found[name].buffer.ctypes.data % 64 == 0


def change_byte(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def test_what_was_packed_is_mapped_the_second_time_and_cannot_be_written(world: World):
    first = world.load()
    assert first.origin == "kept"
    assert str(world.cache.folder) in first.summary
    second = world.load()
    assert second.origin == "mapped"
    assert_equal(first.weights, world.packed_anew())
    assert_equal(second.weights, world.packed_anew())
    assert [path.suffix for path in world.files] == [".packed"]
    (file,) = world.files
    assert Path("/proc/self/maps").read_text().count(str(file)) >= 2, "the first has it mapped too: one copy for both"

    world.load()
    for tensor in world.load().weights.tensors.values():
        with pytest.raises(ValueError, match="read-only"):
            tensor.buffer[0] = 1


def test_packing_tells_after_each_tensor_how_far_it_is_and_mapping_tells_nothing(world: World):
    told: list[tuple[int, int]] = []
    for _ in range(2):
        checkpoint = open_checkpoint(str(world.model))
        on_packed = lambda done, total: told.append((done, total))  # noqa: E731
        load_weights(world.program(), checkpoint, POOL, isa=ISA, cache=world.cache, on_packed=on_packed)
    assert len(told) == len(world.program().weights)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {told[-1][0]}


@pytest.mark.parametrize(
    "place",
    [
        lambda size: 0,  # the magic
        lambda size: 9,  # the header's length
        lambda size: 60,  # a checksum
        lambda size: 2 * 2**20,  # the first byte of the first segment
        lambda size: 2 * 2**20 + (size - 2 * 2**20) // 2 // 4096 * 4096,  # within a segment
    ],
)
def test_a_corrupt_byte_is_found_and_the_file_made_anew(world: World, place: Callable[[int], int]):
    world.load()
    (path,) = world.files
    change_byte(path, place(path.stat().st_size))
    repaired = world.load()
    assert repaired.origin == "kept"
    assert "and is replaced" in repaired.summary
    assert_equal(repaired.weights, world.packed_anew())
    assert world.load().origin == "mapped"


@pytest.mark.parametrize("kept", [0, 10, 100, 2**20, 2 * 2**20 + 5, -4096, -1])
def test_a_file_cut_short_is_found_and_made_anew(world: World, kept: int):
    world.load()
    (path,) = world.files
    path.chmod(0o600)
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    assert world.load().origin == "kept"
    mapped = world.load()
    assert mapped.origin == "mapped"
    assert_equal(mapped.weights, world.packed_anew())


def test_a_file_that_others_could_write_or_that_is_a_pipe_is_not_believed(world: World):
    world.load()
    (path,) = world.files
    assert path.stat().st_mode & 0o777 == 0o400
    path.chmod(0o620)
    repaired = world.load()
    assert repaired.origin == "kept"
    assert "open to changes by others" in repaired.summary
    path.chmod(0o644)  # others may have read it, and no more
    assert world.load().origin == "mapped"
    assert path.stat().st_mode & 0o777 == 0o400

    world.load()
    (path,) = world.files
    path.unlink()
    os.mkfifo(path)
    assert world.load().origin == "kept"


def test_changed_weights_are_packed_again(world: World):
    world.load()
    before = os.stat(world.model / "model.safetensors")
    change_byte(world.model / "model.safetensors", before.st_size - 3)
    os.utime(world.model / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    changed = world.load()
    assert changed.origin == "kept"
    assert_equal(changed.weights, world.packed_anew())
    assert len(world.files) == 2


def test_whatever_decides_the_bytes_decides_the_name(world: World):
    checkpoint = open_checkpoint(str(world.model))
    int4 = Format(dtype="q4_1")
    keys = [
        cache_key(world.program(), checkpoint, "avx2"),
        cache_key(world.program(), checkpoint, "plain"),
        cache_key(world.program(Formats(linears=int4, head=INT8.head)), checkpoint, "avx2"),
        cache_key(world.program(Formats(linears=Format(dtype="q8_0"), head=INT8.head)), checkpoint, "avx2"),
    ]
    assert len(set(keys)) == len(keys)
    assert cache_key(world.program(), open_checkpoint(str(world.model)), "avx2") == keys[0]


def test_a_folder_that_cannot_be_written_is_told_and_weights_are_served_from_memory(world: World):
    world.cache.folder.parent.mkdir()
    world.cache.folder.write_text("a file where the folder should be")  # even root cannot write into that
    loaded = world.load()
    assert loaded.origin == "packed"
    assert "into memory (unusable: " in loaded.summary
    assert_equal(loaded.weights, world.packed_anew())


def test_a_file_in_a_read_only_folder_is_still_mapped(world: World):
    world.load()
    world.cache.folder.chmod(0o500)
    assert world.load().origin == "mapped"
    world.cache.folder.chmod(0o700)


def test_a_full_disk_is_told_and_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch):
    def full(fd: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(packed_cache, "_allocate", full)
    loaded = world.load()
    assert loaded.origin == "packed"
    assert "No space left on device" in loaded.summary
    assert_equal(loaded.weights, world.packed_anew())
    assert world.files == []


def test_what_is_small_or_has_no_room_is_not_kept(world: World):
    assert world.load(min_bytes=2**30).origin == "packed"
    checkpoint = open_checkpoint(str(world.model))
    assert load_weights(world.program(), checkpoint, POOL, isa=ISA, cache=None).origin == "packed"
    assert not world.cache.folder.exists()

    loaded = world.load(spare_bytes=2**62)
    assert loaded.origin == "packed"
    assert "are needed" in loaded.summary
    assert world.files == []

    loaded = world.load(max_bytes=1000)
    assert loaded.origin == "packed"
    assert "more than the cache may hold" in loaded.summary
    assert world.files == []


def test_the_file_used_longest_ago_makes_room(world: World):
    float32, bfloat16 = (Formats(linears=Format(dtype=name), head=INT8.head) for name in ("float32", "bfloat16"))
    world.load(float32)
    (first,) = world.files
    world.load(bfloat16)
    (second,) = set(world.files) - {first}
    for age, path in enumerate((first, second)):
        os.utime(path, ns=(0, age))
    assert world.load(float32).origin == "mapped"  # used again, so the other one is now the oldest
    both = first.stat().st_size + second.stat().st_size
    assert world.load(INT8, max_bytes=both).origin == "kept"
    assert first in world.files
    assert second not in world.files


def test_a_draft_whose_writer_died_is_removed_and_a_living_writers_is_not(world: World):
    world.load()
    (path,) = world.files
    path.unlink()
    (world.cache.folder / "dead.draft").write_bytes(b"half")
    with packed_cache._draft(world.cache.folder) as (_, living):
        assert world.load().origin == "kept"
        assert living.exists()
        assert not (world.cache.folder / "dead.draft").exists()
    assert not living.exists()


def test_a_checkpoint_that_cannot_be_packed_leaves_no_file(world: World):
    from safetensors.torch import load_file, save_file

    tensors = load_file(world.model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, world.model / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape"):
        world.load()
    assert world.files == []


def test_two_processes_that_pack_at_once_both_serve_the_right_numbers(world: World):
    code = """
import sys
from pathlib import Path
from tests.model.test_packed_cache import World, WeightCache
model, folder = map(Path, sys.argv[1:])
world = World(model, WeightCache(folder=folder, max_bytes=2**40, min_bytes=0, spare_bytes=0))
print("ready", flush=True)
sys.stdin.readline()
loaded = world.load()
assert loaded.origin in ("kept", "mapped"), loaded.summary
print(hash(tuple(t.buffer.tobytes() for t in loaded.weights.tensors.values())))
"""
    command = [sys.executable, "-c", code, str(world.model), str(world.cache.folder)]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate()[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert len(set(answers)) == 1
    assert answers[0].strip()
    assert world.load().origin == "mapped"
    assert len(world.files) == 1


def test_the_folder_is_where_caches_belong_if_there_is_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "maitred" / "weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, as the specification of base directories says
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_folder() == tmp_path / "home" / ".cache" / "maitred" / "weights"

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert default_folder() is None


@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 4096, 2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 17])
def test_a_checksum_changes_with_every_byte_and_with_no_number_of_threads(size: int):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    wanted = _native.checksum(POOL, data)
    assert all(_native.checksum(_native.ThreadPool(n), data) == wanted for n in (1, 3))
    for place in {0, size // 2, size - 1} if size else ():
        changed = data.copy()
        changed[place] ^= 128
        assert _native.checksum(POOL, changed) != wanted
    assert _native.checksum(POOL, np.append(data, np.uint8(0))) != wanted

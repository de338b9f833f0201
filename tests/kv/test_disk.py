"""The KV disk tier: what was stored is found after a restart; what is wrong is a miss, counted once, never a byte."""

from __future__ import annotations

import errno
import logging
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256, shake_128
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import ConfigError
from maitred.kv import disk as kv_disk
from maitred.kv.disk import KVDisk, open_kv_disk, salt_secret
from maitred.kv.tiers import DropReason

BLOCK = 256


def keys_of(count: int, chain: str = "a") -> list[bytes]:
    return [sha256(f"{chain}, {i}".encode()).digest() for i in range(count)]


def rows_of(keys: Sequence[bytes], size: int = BLOCK) -> memoryview:
    """The only bytes that these keys may ever bring back."""
    return memoryview(b"".join(shake_128(key).digest(size) for key in keys))


@contextmanager
def opened(
    folder: Path, *, max_bytes: int = 1 << 20, fingerprint: str = "this model", block: int = BLOCK, **settings: Any
) -> Iterator[KVDisk]:
    disk = open_kv_disk(folder, max_bytes=max_bytes, bytes_per_block=block, fingerprint=fingerprint, **settings)
    try:
        yield disk
    finally:
        disk.close()


def stored(folder: Path, keys: Sequence[bytes], **settings: Any) -> None:
    with opened(folder, **settings) as disk:
        assert disk.write(keys, rows_of(keys)) == len(keys)


def found(disk: KVDisk, keys: Sequence[bytes]) -> int:
    """How many are read; all of those are right, or this fails."""
    into = memoryview(bytearray(len(keys) * BLOCK))
    count = disk.read(keys, into)
    assert into[: count * BLOCK] == rows_of(keys[:count])
    return count


def found_each(disk: KVDisk, keys: Sequence[bytes]) -> int:
    return sum(found(disk, [key]) for key in keys)


def dropped(disk: KVDisk) -> dict[DropReason, int]:
    return dict(+disk.stats.dropped)


def the_file(folder: Path, suffix: str) -> Path:
    (file,) = folder.glob(f"*{suffix}")
    return file


def flip(file: Path, bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    file.write_bytes(content)


# ---- what is stored is found


def test_blocks_are_found_after_a_restart_and_a_prefix_ends_where_they_do(tmp_path):
    keys = keys_of(100)
    stored(tmp_path, keys[:60])
    with opened(tmp_path) as disk:
        assert disk.num_known(keys) == 60
        assert found(disk, keys) == 60
        assert (disk.stats.num_blocks, disk.stats.num_hits, disk.stats.num_misses) == (60, 60, 40)
        assert disk.write(keys, rows_of(keys)) == 100
        assert disk.stats.num_written == 40  # those that were not there
        assert found(disk, keys[30:]) == 70  # any run of keys, also over two segments


def test_a_block_that_lacks_in_the_middle_ends_the_prefix(tmp_path):
    keys = keys_of(9)
    with opened(tmp_path) as disk:
        disk.write(keys[:4], rows_of(keys[:4]))
        disk.write(keys[5:], rows_of(keys[5:]))
        assert disk.num_known(keys) == found(disk, keys) == 4
        assert disk.write(keys, rows_of(keys)) == 9
        assert found(disk, keys) == 9


def test_the_folder_is_private_and_its_names_tell_nothing(tmp_path):
    folder = tmp_path / "kv"
    stored(folder, keys_of(10))
    salt_secret(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    names = " ".join(file.name for file in folder.iterdir())
    assert not any(key.hex()[:8] in names for key in keys_of(10))


def test_the_bound_holds_and_what_was_hit_longest_ago_goes_first(tmp_path):
    chains = [keys_of(16, f"chain {i}") for i in range(12)]
    with opened(tmp_path, max_bytes=8 * 16 * (BLOCK + 48) + 8 * 96) as disk:
        for i, chain in enumerate(chains):
            disk.write(chain, rows_of(chain))
            disk.touch(chains[0])
            if i >= 1:
                assert found(disk, chains[1]) == 16
            assert sum(file.stat().st_size for file in tmp_path.glob("*.kv*")) == disk.stats.num_bytes <= disk.max_bytes
        kept = [found(disk, chain) == 16 for chain in chains]
        assert kept[:2] == [True, True]
        assert not any(kept[2:5])
        assert disk.stats.num_evicted == 16 * kept.count(False) == 12 * 16 - disk.stats.num_blocks
        assert not disk.stats.dropped


def test_the_order_of_use_outlives_a_restart(tmp_path):
    chains = [keys_of(16, f"chain {i}") for i in range(6)]
    bound = 8 * 16 * (BLOCK + 48)
    with opened(tmp_path, max_bytes=bound) as disk:
        for i, chain in enumerate(chains):
            disk.write(chain, rows_of(chain))
            os.utime(max(tmp_path.glob("*.kvi"), key=lambda file: file.stat().st_mtime_ns), (i, i))
        found(disk, chains[0])
    with opened(tmp_path, max_bytes=bound // 2) as disk:  # a lower bound evicts at once
        assert [disk.num_known(chain) for chain in (chains[0], chains[1])] == [16, 0]
        assert disk.stats.num_bytes <= bound // 2


def test_it_tells_which_blocks_came_and_went(tmp_path):
    keys = keys_of(60)
    with opened(tmp_path / "kv") as disk:
        disk.write(keys[:10], rows_of(keys[:10]))
    with opened(tmp_path / "kv", max_bytes=10_000) as disk:
        disk.tell_changes(True)
        assert set(disk.changes.take(99)[0]) == set(keys[:10])
        disk.write(keys[10:], rows_of(keys[10:]))
        there = {key for key in keys if disk.num_known([key])}
        came, gone = disk.changes.take(99)
        assert disk.stats.num_evicted > 0
        assert set(keys[:10]) - set(gone) | set(came) == there
        disk.tell_changes(False)
        assert disk.changes is None


def test_clear_deletes_every_block_and_after_close_nothing_is_found(tmp_path):
    keys = keys_of(40)
    with opened(tmp_path) as disk:
        disk.write(keys, rows_of(keys))
        assert disk.clear() == 40
        assert disk.num_known(keys) == disk.stats.num_bytes == 0
        assert not list(tmp_path.glob("*.kv*"))
        assert disk.write(keys, rows_of(keys)) == 40
    assert disk.num_known(keys) == found(disk, keys) == disk.write(keys, rows_of(keys)) == 0
    disk.close()


def test_readers_and_writers_meet_eviction_and_bytes_stay_right(tmp_path):
    chains = [keys_of(16, f"chain {i}") for i in range(24)]
    with opened(tmp_path, max_bytes=8 * 16 * (BLOCK + 48)) as disk:
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            order = random.Random(seed)
            try:
                for chain in order.choices(chains, k=150):
                    if found(disk, chain) < 16:
                        disk.write(chain, rows_of(chain))
                    disk.touch(chain)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert disk.stats.num_blocks == sum(found_each(disk, chain) for chain in chains)
        assert not +disk.stats.dropped


# ---- whatever is wrong is a miss


@settings(max_examples=60, deadline=None)
@given(suffix=st.sampled_from([".kv", ".kvi"]), bit=st.integers(0, 1 << 20), while_open=st.booleans())
def test_a_flipped_bit_anywhere_is_a_miss_that_is_counted_once(tmp_path_factory, suffix, bit, while_open):
    folder, keys = tmp_path_factory.mktemp("kv"), keys_of(12)
    stored(folder, keys)
    with opened(folder) as disk:
        if while_open:
            flip(the_file(folder, suffix), bit)
            num_found = found_each(disk, keys)
            assert num_found == 12 - disk.stats.dropped.total() == disk.stats.num_blocks
    if not while_open:
        flip(the_file(folder, suffix), bit)
    with opened(folder) as disk:
        num_found = found_each(disk, keys)
        assert num_found in {0, 11, 12}
        assert num_found == 12 or disk.stats.dropped or while_open
        assert disk.write(keys, rows_of(keys)) == 12
        assert found(disk, keys) == 12
    with opened(folder) as disk:
        assert found(disk, keys) == 12
        assert not +disk.stats.dropped


@settings(max_examples=60, deadline=None)
@given(suffix=st.sampled_from([".kv", ".kvi"]), part=st.floats(0, 1))
def test_a_torn_file_keeps_what_is_whole(tmp_path_factory, suffix, part):
    folder, keys = tmp_path_factory.mktemp("kv"), keys_of(12)
    stored(folder, keys)
    file = the_file(folder, suffix)
    size = int(file.stat().st_size * part)
    os.truncate(file, size)
    whole = size // BLOCK if suffix == ".kv" else max(0, size - kv_disk.HEADER_BYTES) // kv_disk.ENTRY_BYTES
    with opened(folder) as disk:
        assert found(disk, keys) == disk.num_known(keys) == whole
        if suffix == ".kv":
            assert dropped(disk) == ({DropReason.TORN: 12 - whole} if whole < 12 else {})
    with opened(folder) as disk:
        assert (found(disk, keys), dropped(disk)) == (whole, {})


@settings(max_examples=40, deadline=None)
@given(suffix=st.sampled_from([".kv", ".kvi"]), garbage=st.binary(max_size=600))
def test_garbage_and_half_of_another_segment_are_never_taken_for_blocks(tmp_path_factory, suffix, garbage):
    folder, other = tmp_path_factory.mktemp("kv"), tmp_path_factory.mktemp("other")
    keys, strange = keys_of(12), keys_of(12, "b")
    stored(folder, keys)
    stored(other, strange)
    theirs = the_file(other, suffix).read_bytes()
    the_file(folder, suffix).write_bytes(theirs[: len(garbage)] + garbage if len(garbage) % 2 else theirs)
    with opened(folder) as disk:
        for key in keys + strange:
            found(disk, [key])


def test_rows_or_index_alone_are_nothing_and_go(tmp_path):
    for suffix in (".kv", ".kvi"):
        stored(tmp_path, keys_of(5))
        the_file(tmp_path, suffix).unlink()
        with opened(tmp_path) as disk:
            assert found(disk, keys_of(5)) == 0
            assert disk.stats.dropped[DropReason.TORN] > 0
        assert not list(tmp_path.glob("*.kv*"))


def test_files_that_vanish_while_served_are_misses(tmp_path):
    keys = keys_of(5)
    with opened(tmp_path) as disk:
        disk.write(keys, rows_of(keys))
        the_file(tmp_path, ".kv").unlink()
        assert found(disk, keys) == disk.num_known(keys) == 0
        assert dropped(disk) == {DropReason.TORN: 5}


def test_blocks_of_another_model_are_deleted(tmp_path):
    stored(tmp_path, keys_of(5), fingerprint="an older revision")
    (tmp_path / "notes.txt").write_text("not ours")
    with opened(tmp_path) as disk:
        assert found(disk, keys_of(5)) == 0
        assert dropped(disk) == {DropReason.FOREIGN: 5}
    assert {file.name for file in tmp_path.iterdir()} == {"lock", "notes.txt"}


def test_files_of_an_older_layout_are_deleted(tmp_path, monkeypatch):
    with monkeypatch.context() as before:
        before.setattr(kv_disk, "FILE_VERSION", 0)
        stored(tmp_path, keys_of(5))
    with opened(tmp_path) as disk:
        assert (found(disk, keys_of(5)), dropped(disk)) == (0, {DropReason.OLDER: 5})
    assert not list(tmp_path.glob("*.kv*"))


WRITES_UNTIL_KILLED = """
import sys
from tests.kv.test_disk import keys_of, opened, rows_of
from pathlib import Path
with opened(Path(sys.argv[1]), max_bytes=1 << 18) as disk:
    print("open", flush=True)
    for i in range(10**9):
        keys = keys_of(1 + i * 7 % 23, f"{sys.argv[2]} {i}")
        disk.write(keys, rows_of(keys))
        print(i, flush=True)
"""


def test_whatever_a_killed_writer_left_is_right(tmp_path):
    folder, chance, told = tmp_path / "kv", random.Random(8), 0
    for life in range(4):
        command = [sys.executable, "-c", WRITES_UNTIL_KILLED, str(folder), str(life)]
        root = Path(__file__).parents[2]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root) as writer:
            assert writer.stdout is not None
            for _ in range(chance.randrange(2, 60)):
                told = int(writer.stdout.readline().strip().replace("open", "-1"))
            writer.send_signal(signal.SIGKILL)
        with opened(folder, max_bytes=1 << 18) as disk:
            chains = [keys_of(1 + i * 7 % 23, f"{life} {i}") for i in range(told + 20)]
            assert sum(found_each(disk, chain) for chain in chains) > 0
            assert found(disk, chains[told]) == len(chains[told])  # told of, so the system has it
            assert not +disk.stats.dropped or dropped(disk).keys() == {DropReason.TORN}


# ---- who may use the folder


def test_a_second_server_is_refused_and_told_who_has_it(tmp_path):
    with opened(tmp_path), pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on "):
        open_kv_disk(tmp_path, max_bytes=1 << 20, bytes_per_block=BLOCK, fingerprint="")
    stored(tmp_path, keys_of(3))


def test_a_folder_that_others_may_enter_is_refused_unless_it_is_empty(tmp_path):
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(0o755)
    stored(folder, keys_of(3))
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"open to others .* chmod 700"):
        open_kv_disk(folder, max_bytes=1 << 20, bytes_per_block=BLOCK, fingerprint="")


def test_a_bound_below_one_block_is_refused_with_the_number(tmp_path):
    least = BLOCK + kv_disk.ENTRY_BYTES + kv_disk.HEADER_BYTES
    with pytest.raises(ConfigError, match=f"one block takes {least}"), opened(tmp_path, max_bytes=least - 1):
        pass
    keys = keys_of(3)
    with opened(tmp_path, max_bytes=least) as disk:
        assert disk.write(keys, rows_of(keys)) == 0  # only the last one is there
        assert (disk.stats.num_blocks, disk.stats.num_evicted, found(disk, keys[2:])) == (1, 2, 1)


def in_a_child(work: Callable[[], str]) -> str:
    """What `work` returns in a process of its own, whose limits and user it may change."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = repr(error)
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer_file:
        answer = answer_file.read().decode()
    os.waitpid(child, 0)
    return answer


def test_on_a_full_disk_it_goes_on_without_storing_and_stores_again_when_there_is_room(tmp_path):
    first, more = keys_of(10), keys_of(40, "b")

    def work() -> str:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("maitred.kv.disk").addHandler(handler)
        with opened(tmp_path, retry_s=0.0) as disk:
            disk.write(first, rows_of(first))
            resource.setrlimit(resource.RLIMIT_FSIZE, (20 * BLOCK + 7, resource.RLIM_INFINITY))
            assert [disk.write(more, rows_of(more)) for _ in range(3)] == [0, 0, 0]
            assert disk.stats.dropped == {DropReason.NO_SPACE: 120}
            assert (found(disk, first), disk.num_known(more)) == (10, 0)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert disk.write(more, rows_of(more)) == found(disk, more) == 40
        with opened(tmp_path) as disk:
            assert (found(disk, first), found(disk, more), dropped(disk)) == (10, 40, {})
        return " | ".join(message.partition(": ")[2] for message in told)

    expected = f"{os.strerror(errno.EFBIG)}; what is there is used, nothing is stored | blocks are stored again"
    assert in_a_child(work) == expected


def test_a_read_only_folder_is_served_and_nothing_is_stored(tmp_path):
    keys, more = keys_of(10), keys_of(3, "b")
    folder = tmp_path / "kv"
    stored(folder, keys)
    secret = salt_secret(folder)

    def work() -> str:
        if os.geteuid() == 0:  # who may write anywhere
            for file in folder.iterdir():
                os.chown(file, 65534, 65534)
            os.chown(folder, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
        return reader()

    def reader() -> str:
        os.chdir("/")
        os.chmod(inner, 0o500)
        with opened(inner) as disk:
            assert (found(disk, keys), disk.write(more, rows_of(more)), found(disk, more)) == (10, 0, 0)
            assert dropped(disk) == {DropReason.READ_ONLY: 3}
            with pytest.raises(ConfigError, match="in use by"):
                open_kv_disk(inner, max_bytes=1 << 20, bytes_per_block=BLOCK, fingerprint="")
            disk.clear()
        assert salt_secret(inner) == secret
        with opened(inner) as disk:
            assert found(disk, keys) == 10
        return "served"

    inner = Path("/dev/shm") / f"maitred-test-{os.getpid()}" if os.geteuid() == 0 else folder
    if inner != folder:  # where another user can come
        subprocess.run(["cp", "-r", str(folder), str(inner)], check=True)
        folder = inner
    try:
        assert in_a_child(work) == "served"
    finally:
        if inner.parent != tmp_path:
            subprocess.run(["rm", "-rf", str(inner)], check=True)


# ---- the salt's secret


def test_the_salt_secret_is_drawn_once_for_a_folder(tmp_path):
    secret = salt_secret(tmp_path / "kv")
    assert len(secret) == 32
    assert salt_secret(tmp_path / "kv") == secret
    assert salt_secret(tmp_path / "other") != secret
    stored(tmp_path / "kv", keys_of(2))
    assert salt_secret(tmp_path / "kv") == secret


def test_a_salt_secret_that_was_cut_short_is_drawn_anew(tmp_path, caplog):
    salt_secret(tmp_path)
    (tmp_path / "salt").write_bytes(b"short")
    secret = salt_secret(tmp_path)
    assert len(secret) == 32
    assert salt_secret(tmp_path) == secret
    assert "holds 5 bytes" in caplog.text

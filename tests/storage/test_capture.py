"""The folder of captured traffic: bounded, closed to others, and erased whole beside servers that write."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from maitred.cli.main import main
from maitred.core.errors import ConfigError
from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.optimize.data import Reader
from maitred.storage import capture as module
from maitred.storage.capture import Capture, captured, erase, read_captured
from tests.waiting import until


def filled(folder: Path, *tenants: str, max_bytes: int = 2**20) -> Capture:
    capture = Capture(folder, max_bytes)
    for number, tenant in enumerate(tenants):
        capture.note(tenant, "tiny", [number, 1], [2, 3, 4])
    until(lambda: sum(capture.counts.values()) == len(tenants))
    return capture


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in read_captured(folder).splitlines()]


def test_answers_are_lines_that_the_tools_read_and_no_other_user_can(tmp_path):
    folder = tmp_path / "new" / "captured"
    filled(folder, "a", "b").close()
    assert [(line["tenant"], line["token_ids"], line["num_prompt_tokens"]) for line in lines(folder)] == [
        ("a", [0, 1, 2, 3, 4], 2), ("b", [1, 1, 2, 3, 4], 2)
    ]  # fmt: skip
    assert {folder.stat().st_mode & 0o777, *(file.stat().st_mode & 0o777 for file in folder.iterdir())} == {
        0o700,
        0o600,
    }
    with open_checkpoint(str(BUILTIN_FOLDER)) as checkpoint:
        first, _ = Reader(checkpoint).read(folder)
    assert (first.ids.tolist(), first.learnt.tolist()) == ([0, 1, 2, 3, 4], [False, False, True, True, True])
    folder.chmod(0o750)
    with pytest.raises(ConfigError, match="chmod 700"):
        Capture(folder, 2**20)


def test_the_folder_stays_within_its_bytes_and_the_oldest_answers_go(tmp_path):
    capture = Capture(tmp_path / "c", 2**20)
    for number in range(40):
        capture.note("a", "tiny", [number], [7] * 20_000)
        until(lambda number=number: capture.counts["written"] == number + 1)
    capture.close()
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.jsonl")]
    assert 2**19 < sum(sizes) == capture.num_bytes <= 2**20
    kept = [line["token_ids"][0] for line in lines(tmp_path / "c")]  # type: ignore[index]
    assert kept == list(range(kept[0], 40)), "those that are left are the newest, in order"


def test_an_erasure_takes_all_of_a_tenant_also_what_a_server_has_not_written_yet(tmp_path, capsys):
    folder = tmp_path / "c"
    capture = filled(folder, "a", "b", "a")
    with module._locked(folder):  # the writer waits, as while another erasure runs
        capture.note("a", "tiny", [9], [9])
        capture.note("b", "tiny", [8], [8])
        (torn := next(folder.glob("*.jsonl"))).write_bytes(torn.read_bytes() + b'{"tenant":"a","to')
        asked_at = time.time()
    assert erase(folder, "a", now=asked_at) in (3, 4)
    capture.note("a", "tiny", [5], [5])
    capture.close()
    assert [(line["tenant"], line["token_ids"]) for line in lines(folder)] == [
        ("b", [1, 1, 2, 3, 4]), ("b", [8, 8]), ("a", [5, 5])
    ]  # fmt: skip
    assert main(["capture", "erase", str(folder), "--tenant", "b"]) == 0
    assert main(["capture", "list", str(folder)]) == 0
    out, err = capsys.readouterr()
    assert "2 answers of b are gone" in err
    assert [row.split()[:4] for row in out.splitlines()[1:]] == [["a", "tiny", "1", "2"]]
    assert main(["capture", "list", str(tmp_path)]) == 1


def test_an_erasure_that_was_killed_leaves_whole_files_and_the_next_one_goes_on(tmp_path, monkeypatch):
    folder = tmp_path / "c"
    for _ in range(3):
        filled(folder, "a", "b").close()
    replace, calls = Path.replace, []

    def killed(self: Path, target: Path) -> Path:
        calls.append(target)
        if len(calls) == 3:  # the note of the erasure, one file, and no more
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        erase(folder, "a", now=time.time())
    monkeypatch.undo()
    assert [line["tenant"] for line in lines(folder)] == ["b", "a", "b", "a", "b"]
    assert erase(folder, "a", now=time.time()) == 2
    assert set(captured(folder)) == {("b", "tiny")}
    assert not [*folder.glob("*.new")]


def test_a_full_disk_loses_answers_and_no_line_is_torn(tmp_path, monkeypatch, caplog):
    capture = filled(tmp_path / "c", "a")
    write = os.write

    def full(descriptor: int, rest: memoryview) -> int:
        if len(rest) > 10:
            return write(descriptor, rest[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.os, "write", full)
    for _ in range(3):
        capture.note("a", "tiny", [1], [2])
    until(lambda: capture.counts["disk"] == 3)
    monkeypatch.undo()
    capture.note("b", "tiny", [1], [2])
    capture.close()
    assert [line["tenant"] for line in lines(tmp_path / "c")] == ["a", "b"]
    assert capture.counts == {"written": 2, "behind": 0, "disk": 3}
    assert [record.message for record in caplog.records if "No space left" in record.message][1:] == [], "told once"


def test_a_disk_that_cannot_keep_up_drops_answers_and_does_not_wait(tmp_path):
    capture = Capture(tmp_path / "c", 2**20)
    with module._locked(tmp_path / "c"):
        for _ in range(8):
            capture.note("a", "tiny", [1] * 300_000, [2])
    capture.close()
    assert capture.counts == {"written": 3, "behind": 5, "disk": 0}

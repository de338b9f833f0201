from __future__ import annotations

import json
from pathlib import Path

import pytest

from maitred.cli.batch import OutputFile
from maitred.core.errors import ConfigError


def answer(number: int, custom_id: str | None, status_code: int = 200) -> bytes:
    response = {"status_code": status_code, "body": "x" * 50}
    line = {"id": f"batch_req_line_{number}", "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def test_what_is_there_is_done(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer(1, "a") + answer(2, None))
    with OutputFile(path) as output:
        assert output.done == {"custom_id a", "batch_req_line_2"}
        output.append(answer(3, "c"))
    assert path.read_bytes() == answer(1, "a") + answer(2, None) + answer(3, "c")


def test_what_is_done_and_failed_is_known(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    error = b'{"id":"batch_req_line_3","custom_id":"c","response":null,"error":{"code":"timeout","message":""}}\n'
    path.write_bytes(answer(1, "a") + answer(2, "b", status_code=404) + error)
    with OutputFile(path) as output:
        assert output.failed == {"custom_id b", "custom_id c"}


@pytest.mark.parametrize("cut", range(1, len(answer(2, "b"))))
def test_a_line_torn_anywhere_is_cut_off_and_asked_again(tmp_path: Path, cut: int):
    path = tmp_path / "out.jsonl"
    path.write_bytes(answer(1, "a") + answer(2, "b")[:cut])
    with OutputFile(path) as output:
        assert output.done == {"custom_id a"}
        output.append(answer(2, "b"))
    assert path.read_bytes() == answer(1, "a") + answer(2, "b")


@pytest.mark.parametrize("text", ["my notes\nand more", "one line without an end"])
def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"notes.txt:1: is not a line of a batch's output"):
        OutputFile(path)
    assert path.read_text() == text


def test_two_runs_cannot_write_one_file(tmp_path: Path):
    with OutputFile(tmp_path / "out"), pytest.raises(ConfigError, match="another run writes it"):
        OutputFile(tmp_path / "out")
    OutputFile(tmp_path / "out").__exit__(None, None, None)


def test_a_folder_that_is_not_there_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="--output"):
        OutputFile(tmp_path / "none" / "out")

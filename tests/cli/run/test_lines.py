from __future__ import annotations

import json
from pathlib import Path

import pytest

from maitred.cli.batch import LINE_START, BadLine, answer_line, error_line, read_request, scan
from maitred.core.errors import ConfigError

BODY = {"model": "m", "messages": []}


def written(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def line(custom_id: object = "a", **fields: object) -> dict[str, object]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": BODY} | fields


def test_lines_are_found_by_number_and_place(tmp_path):
    path = written(tmp_path, line("a"), "", line("ü"), line("c"))
    found = scan(path)
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (3, "ü"), (4, "c")]
    with path.open("rb") as file:
        for each in reversed(found):
            request = read_request(file, each)
            assert (request.url, json.loads(request.body)) == ("/v1/chat/completions", BODY)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = written(tmp_path, line("a"), line("b"))
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = scan(path)
    assert [(each.number, each.custom_id) for each in found] == [(1, "a"), (2, "b")]
    with path.open("rb") as file:
        assert [json.loads(read_request(file, each).body) for each in found] == [BODY, BODY]


def test_a_custom_id_that_stands_twice_is_refused_with_both_lines(tmp_path):
    with pytest.raises(ConfigError, match="'a' stands in line 1 and again in line 3"):
        scan(written(tmp_path, line("a"), line("b"), line("a")))


@pytest.mark.parametrize(
    ("bad", "code", "message"),
    [
        ("{oops", "invalid_json_line", "line 1 is not valid JSON"),
        ("[1]", "invalid_json_line", "line 1 is not a JSON object"),
        (line(None), "missing_custom_id", "no custom_id"),
        (line(7), "missing_custom_id", "no custom_id that is a string"),
        (line(method="GET"), "invalid_method", "'GET'; it must be POST"),
        (line(url="/v1/embeddings"), "invalid_url", "/v1/chat/completions, /v1/completions"),
        (line(url=["x"]), "invalid_url", "['x']"),
        (line(body="x"), "invalid_body", "body is not a JSON object"),
        (line(body=BODY | {"stream": True}), "invalid_body", "cannot stream"),
    ],
)
def test_a_bad_line_says_what_is_wrong_with_it(tmp_path, bad, code, message):
    path = written(tmp_path, bad)
    with path.open("rb") as file, pytest.raises(BadLine) as caught:
        read_request(file, scan(path)[0])
    assert caught.value.code == code
    assert message in str(caught.value)


def test_bytes_that_are_no_text_are_a_bad_line(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'{"custom_id": "\xff\xfe"}\n')
    with path.open("rb") as file, pytest.raises(BadLine):
        read_request(file, scan(path)[0])


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ConfigError, match="--input"):
        scan(tmp_path / "none")


def test_what_is_written_begins_as_the_output_file_expects(tmp_path):
    found = scan(written(tmp_path, line("a"), "{oops"))
    assert answer_line(found[0], 200, {}, {"x": 1}).startswith(LINE_START)
    assert error_line(found[1], BadLine("code", "message")).startswith(LINE_START)

"""With --url the engine is elsewhere, so its flags are refused instead of doing nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.running import maitred_process

LINE = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


@pytest.mark.parametrize("words", [["chat"], ["run", "-i", "in.jsonl", "-o", "out.jsonl"]])
def test_engine_flags_beside_a_url_are_refused_by_name(words: list[str], tmp_path: Path):
    (tmp_path / "in.jsonl").write_text(LINE)
    words = [str(tmp_path / word) if word.endswith(".jsonl") else word for word in words]
    done = maitred_process(*words, "--url", "http://127.0.0.1:9", "--dtype", "float32")
    assert done.code == 2
    assert "--dtype: with --url the model runs elsewhere" in done.err

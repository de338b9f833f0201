from __future__ import annotations

import json
from pathlib import Path

import pytest

from maitred.cli.load import TraceReplay, Vocabulary, read_trace
from maitred.cli.simulate_inputs import read_workload
from maitred.core.errors import ConfigError
from maitred.sim.traces import BLOCK_TOKENS


def trace_file(tmp_path: Path, *lines: object) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return str(path)


def line(timestamp: float, input_length: int, *hash_ids: int, output_length: int = 5) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": output_length,
        "hash_ids": list(hash_ids),
    }


def replay(path: str, **changes: object) -> list:
    given: dict[str, object] = {"lines": read_trace(path), "vocabulary": Vocabulary(low=0, high=900), "seed": 1}
    return list(TraceReplay(**(given | changes)).requests())


def test_times_are_milliseconds_since_the_first_line_scaled(tmp_path):
    path = trace_file(tmp_path, line(9000, 4), line(5000, 4), line(5500, 4))
    assert [request.due_s for request in replay(path)] == [0.0, 0.5, 4.0]
    assert [request.due_s for request in replay(path, rate_scale=2.0)] == [0.0, 0.25, 2.0]
    assert [request.due_s for request in replay(path, paced=False)] == [0.0, 0.0, 0.0]


def test_equal_hash_ids_give_equal_blocks_and_only_those(tmp_path):
    path = trace_file(tmp_path, line(0, 1200, 1, 2, 3), line(1, 1300, 1, 2, 4), line(2, 600, 9, 2))
    one, two, three = (request.token_ids for request in replay(path))
    shared = 2 * BLOCK_TOKENS
    assert one[:shared] == two[:shared]
    assert one[shared:1200] != two[shared:1200]
    assert three[BLOCK_TOKENS:600] == one[BLOCK_TOKENS:600]  # the block's own tokens depend on its id alone
    assert three[:BLOCK_TOKENS] != one[:BLOCK_TOKENS]
    assert [len(one), len(two), len(three)] == [1200, 1300, 600]


def test_what_no_hash_covers_is_unique(tmp_path):
    path = trace_file(tmp_path, line(0, 40), line(1, 40), line(2, BLOCK_TOKENS + 40, 1), line(3, BLOCK_TOKENS + 40, 1))
    prompts = [request.token_ids for request in replay(path)]
    assert prompts[0] != prompts[1]
    assert prompts[2][:BLOCK_TOKENS] == prompts[3][:BLOCK_TOKENS]
    assert prompts[2][BLOCK_TOKENS:] != prompts[3][BLOCK_TOKENS:]


def test_lengths_and_blocks_shrink_together(tmp_path):
    path = trace_file(tmp_path, line(0, 1024, 1, 2, output_length=100), line(1, 1024, 1, 3, output_length=0))
    one, two = replay(path, length_scale=0.1)
    assert (len(one.token_ids), one.output_len, two.output_len) == (102, 10, 1)
    assert one.token_ids[:51] == two.token_ids[:51]
    assert one.token_ids[51:] != two.token_ids[51:]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "trace.jsonl:2: "),
        ({"timestamp": 1}, "trace.jsonl:2: .*input_length"),
        (line(1, 0), "trace.jsonl:2: lengths are 0 and 5"),
        ({"timestamp": 1, "input_length": "x", "output_length": 2}, "trace.jsonl:2: "),
    ],
)
def test_a_bad_line_is_named(tmp_path, bad, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(trace_file(tmp_path, line(0, 1), bad))


def test_an_empty_or_missing_trace_is_told(tmp_path):
    for path in (trace_file(tmp_path, ""), str(tmp_path / "none")):
        with pytest.raises(ConfigError, match="--trace"):
            read_trace(path)


@pytest.mark.parametrize("bad", ["{", line(1, 0), line(1, 1) | {"priority": -1}, line(1, 1) | {"weight": 0}])
def test_bench_refuses_the_line_that_simulate_refuses(tmp_path, bad):
    path, told = trace_file(tmp_path, line(0, 1), bad), []
    for read in (read_trace, read_workload):
        with pytest.raises(ConfigError) as caught:
            read(path)
        told.append(str(caught.value).removeprefix("--trace "))
    assert told[0] == told[1]

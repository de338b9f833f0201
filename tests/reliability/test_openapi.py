"""R12 in small: no request that the OpenAPI document describes, or forbids, gets a 5xx or an answer not told there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.openapi import NUM_OPERATIONS, documented_server, num_restarts, run_schemathesis

# Few are the same every time; those that a schema's bounds make are for `make soak`.
FEW = ("--generation-deterministic", "--phases", "fuzzing,stateful", "--max-examples", "5", "--request-timeout", "200")
MANY = ("--max-examples", "1000", "--request-timeout", "10")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [FEW, pytest.param(MANY, marks=(pytest.mark.soak, pytest.mark.timeout(7200)))],
    ids=["few", "many"],
)
def test_the_server_does_what_its_openapi_document_says(tmp_path: Path, flags: tuple[str, ...]):
    with documented_server(tmp_path) as server:
        ran = run_schemathesis(server.url, tmp_path, *flags)
        assert ran.returncode == 0, ran.stdout
        assert f"Tested: {NUM_OPERATIONS}" in ran.stdout
        assert num_restarts(server.url) == 0

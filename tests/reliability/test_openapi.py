"""R12 in small: no request that the OpenAPI document describes, or forbids, gets a 5xx or an answer not told there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.openapi import NUM_OPERATIONS, documented_server, num_restarts, run_schemathesis


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--generation-deterministic", "--max-examples", "2", "--request-timeout", "200"),  # the same every time
        pytest.param(
            ("--max-examples", "1000", "--request-timeout", "10"),
            marks=(pytest.mark.soak, pytest.mark.timeout(7200)),
        ),
    ],
    ids=["few", "many"],
)
def test_the_server_does_what_its_openapi_document_says(tmp_path: Path, flags: tuple[str, ...]):
    with documented_server(tmp_path) as server:
        ran = run_schemathesis(server.url, tmp_path, *flags)
        assert ran.returncode == 0, ran.stdout
        assert f"Tested: {NUM_OPERATIONS}" in ran.stdout
        assert num_restarts(server.url) == 0

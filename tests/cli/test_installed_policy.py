"""A policy that another package brings is served, switched to, simulated, replayed and explained as ours are."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import httpx
import pytest

from tests.cli.running import Result, maitred_process
from tests.conftest import start_server

MODULE = '''
from maitred.policy.policy import Policy


def tips_first(config, *, tip_s: float = 60.0):
    """Who tips more (a smaller priority) is served first, and nobody waits for later ones longer than tip_s."""
    return Policy(
        source="a restaurant",
        bound="overtaken only by those that come within tip_s",
        order=lambda r: (r.arrived_at + tip_s * (r.priority > 0), r.request_id),
        overtaken_until=lambda r: r.arrived_at + tip_s * (r.priority > 0),
        terms=lambda r: {"tip": float(r.priority == 0)},
    )
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path, as an installer leaves it: a module, and what its package says of itself."""
    about = tmp_path / "site" / "tips-1.0.dist-info"
    about.mkdir(parents=True)
    (about.parent / "tips.py").write_text(MODULE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: tips\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[maitred.policies]\ntips_first = tips:tips_first\n")
    monkeypatch.setenv("PYTHONPATH", str(about.parent), prepend=os.pathsep)
    return tmp_path


def done(*words: str) -> Result:
    result = maitred_process(*words)
    assert result.code == 0, result.err
    return result


def test_a_third_partys_policy_goes_all_the_way(installed: Path):
    config, log, trace = installed / "maitred.yaml", installed / "log", installed / "trace.jsonl"
    config.write_text(f"policy: tips_first\ndecision_log: {log}\n")
    server = start_server("--config", str(config), "--policy-arg", "tip_s=30")
    try:
        with httpx.Client(base_url=server.url, timeout=60) as http:
            view = http.get("/admin/policy").json()
            assert (view["policy"], view["arguments"]) == ("tips_first", {"tip_s": 30.0})
            assert {"tips_first", "fcfs"} <= set(view["choices"])
            asked = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": "Hello", "max_tokens": 3}
            answer = http.post("/v1/completions", json=asked).json()
            for policy in ("fcfs", "tips_first"):
                assert http.post("/admin/policy", json={"policy": policy}).json()["policy"] == policy
            assert http.post("/v1/completions", json=asked).status_code == 200
    finally:
        server.stop()

    assert "every decision is the same" in done("replay", str(log)).out
    why = done("why", answer["id"], "--log", str(log)).out
    assert "tips_first" in why
    assert re.search(r"\btip\b", why)

    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    simulated = done("simulate", "--workload", str(trace), "--policy", "tips_first,fcfs", "--json")
    assert set(json.loads(simulated.out)) == {"tips_first", "fcfs"}
    assert "--policy-arg tip_s=60 (a number)" in done("policies").out


def test_without_the_package_a_log_of_its_policy_says_what_is_missing(installed: Path, monkeypatch: pytest.MonkeyPatch):
    trace = installed / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    monkeypatch.delenv("PYTHONPATH")
    refused = maitred_process("simulate", "--workload", str(trace), "--policy", "tips_first")
    assert refused.code != 0
    assert "'tips_first'" in refused.err

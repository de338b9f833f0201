"""Every example runs as a person would run it."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT, ServerProcess

EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def run_example(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_run_here():
    assert {"offline.py", "openai_client.py", "priority.py"} == EXAMPLES


def test_the_offline_example_answers_and_samples():
    printed = run_example("offline.py")
    assert "What is maitred?" in printed
    assert printed.count("sample ") == printed.count(" (stop): ") == 3
    assert all(line.endswith((".", "?", "!")) for line in printed.splitlines())  # none ends in mid-sentence


def test_the_openai_client_example_streams_from_a_real_server(server: ServerProcess):
    printed = run_example("openai_client.py", server.url + "/v1")
    assert "tokens in" in printed


def test_the_urgent_request_of_the_priority_example_waits_least():
    waits = [float(line.split()[2]) for line in run_example("priority.py").splitlines()]
    assert waits[2] < min(waits[:2])

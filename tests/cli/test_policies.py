from __future__ import annotations

import json
from importlib.metadata import EntryPoint
from typing import Annotated

import pytest

from maitred.cli.main import main
from maitred.config import SchedulerConfig
from maitred.core.errors import ConfigError
from maitred.engine import installed
from maitred.engine.installed import GROUP, installed_policies
from maitred.policy.parameters import Range
from maitred.policy.policies import POLICIES, policy_for
from maitred.policy.policy import Policy, arrival_term, by_arrival

HERE = "tests.cli.test_policies"


def tips_first(config: SchedulerConfig, *, tip_s: Annotated[float, Range(0, 600)] = 60.0) -> Policy:
    """A third party's."""
    return Policy(
        source="a restaurant",
        bound="overtaken by nobody",
        order=by_arrival,
        overtaken_until=lambda r: r.arrived_at,
        terms=arrival_term,
    )


def latest_first(config: SchedulerConfig) -> Policy:
    return Policy(
        source="a lift",
        bound="as claimed",
        order=lambda r: (-r.arrived_at, r.request_id),
        overtaken_until=lambda r: r.arrived_at,
        terms=lambda r: {"it": -r.arrived_at},
    )


not_a_factory = 3


def point(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def test_an_installed_policy_stands_beside_ours():
    policies = installed_policies([point("tips_first", f"{HERE}:tips_first")])
    assert list(policies) == [*POLICIES, "tips_first"]
    assert policy_for(SchedulerConfig(policy="tips_first"), policies).source == "a restaurant"
    assert "tips_first" not in POLICIES


@pytest.mark.parametrize(
    ("points", "words"),
    [
        ([point("fcfs", f"{HERE}:tips_first")], r"'fcfs' of .* has the name of maitred's own; remove"),
        ([point("a", f"{HERE}:tips_first")] * 2, r"'a' of .* has the name of another installed one"),
        ([point("a", "no_such_module:x")], r"'a' .* does not load \(ModuleNotFoundError"),
        ([point("a", f"{HERE}:missing")], r"'a' .* does not load \(AttributeError"),
        ([point("a", f"{HERE}:not_a_factory")], r"'a' .* is a int; it must be a function"),
    ],
)
def test_a_policy_that_does_not_load_or_takes_a_name_is_one_line(points: list[EntryPoint], words: str):
    with pytest.raises(ConfigError, match=words):
        installed_policies(points)


@pytest.fixture
def _with_third_parties(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [point("tips_first", f"{HERE}:tips_first"), point("latest_first", f"{HERE}:latest_first")]
    monkeypatch.setattr(installed, "entry_points", lambda group: points)


@pytest.mark.usefixtures("_with_third_parties")
def test_the_list_has_source_bound_and_parameters_of_each(capsys: pytest.CaptureFixture[str]):
    assert main(["policies"]) == 0
    text = capsys.readouterr().out
    assert all(f"{name}\n" in text for name in [*POLICIES, "tips_first"])
    assert text.count("source: ") == text.count("bound: ") == len(POLICIES) + 2

    assert main(["policies"]) == 0
    blocks = dict(block.split("\n", 1) for block in capsys.readouterr().out.strip().split("\n\n"))
    assert "  --policy-arg tip_s=60 (from 0 to 600)" in blocks["tips_first"].splitlines()
    assert "  --policy-arg mlfq_levels=6 (from 1 to 32)" in blocks["mlfq"].splitlines()
    assert "  --policy-arg ageing_tokens_per_s=unset (from 0.001 to 1e+09)" in blocks["sjf"].splitlines()
    assert "--policy-arg" not in blocks["fcfs"]
    assert "priority: not heeded" in blocks["fcfs"]
    assert "priority: heeded" in blocks["edf"]


@pytest.mark.parametrize("command", [["simulate", "--workload", "examples/workloads/bimodal.yaml"], ["serve"]])
@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--policy", "mlfq", "--policy-arg", "mlfq_level=2"], "(did you mean mlfq_levels?)"),
        (["--policy", "mlfq", "--policy-arg", "mlfq_levels=33"], "it must be from 1 to 32"),
    ],
)
def test_an_argument_that_a_policy_cannot_take_is_refused_before_anything_starts(command, words, refusal, capsys):
    assert main([*command, *words]) != 0
    assert refusal in capsys.readouterr().err


def test_a_comparison_gives_an_argument_to_those_policies_that_have_it(tmp_path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 2}\n')
    words = ["simulate", "--workload", str(trace), "--policy", "fcfs,sjf", "--policy-arg", "kv_block_weight=2"]
    assert main([*words, "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"fcfs", "sjf"}


@pytest.mark.usefixtures("_with_third_parties")
def test_the_kit_passes_and_fails_policies_by_name(capsys: pytest.CaptureFixture[str]):
    assert main(["policies", "tips_first", "--worlds", "3"]) == 0
    printed = capsys.readouterr().out
    assert "tips_first: steps holds in 3 worlds" in printed
    assert "tips_first: fleet: endless load holds in 3 worlds" in printed
    assert main(["policies", "--check", "latest_first", "--worlds", "30"]) == 1
    assert "error: starvation bound: seed " in capsys.readouterr().err

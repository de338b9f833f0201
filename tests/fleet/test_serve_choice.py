"""What Ray Serve asks of the fleet's rules, without Ray: which replica, how many, and with which arguments."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from maitred.config import ModelConfig, SchedulerConfig, ServerConfig
from maitred.core.errors import ConfigError
from maitred.fleet.serve_choice import Seen, ServeChoice, ServeScaling, key_of
from maitred.fleet.serve_engine import read_options


def seen(**loads: int) -> list[Seen]:
    return [Seen(name, load, slots=8) for name, load in loads.items()]


def test_a_conversation_stays_with_a_replica_and_few_move_when_one_goes():
    proxies = [ServeChoice(), ServeChoice()]
    proxies[1].ranked(seen(c=0, a=0), 7, "earlier", 0.0)
    for key in range(0, 2**63, 2**58):
        first, second = (proxy.ranked(seen(a=1, b=0, c=2), key, "r", 1.0) for proxy in proxies)
        assert (first[0], sorted(first)) == (second[0], ["a", "b", "c"])
    choice = ServeChoice()
    keys = [key_of(f"s{n}") for n in range(300)]
    before = [choice.ranked(seen(a=0, b=0, c=0), key, "r", 0.0)[0] for key in keys]
    after = [choice.ranked(seen(a=0, b=0), key, "r", 0.0)[0] for key in keys]
    assert min(Counter(before).values()) > 50
    assert all(now == then for now, then in zip(after, before, strict=True) if then != "c")
    assert key_of("") is None


def test_those_without_a_conversation_go_by_load_and_a_full_replica_is_passed_over():
    choice = ServeChoice()
    assert choice.ranked(seen(a=3, b=1, c=2), None, "r", 0.0)[0] == "b"
    owner = choice.ranked(seen(a=0, b=0), 42, "r", 0.0)[0]
    other = "b" if owner == "a" else "a"
    assert choice.ranked(seen(**{owner: 8, other: 7}), 42, "r", 0.0)[0] == other
    assert (choice.ranked(seen(a=8, b=8), 42, "r", 0.0)[0], choice.ranked([], 42, "r", 0.0)) == (owner, [])


@dataclass
class Context:
    """As Serve's controller sees a deployment."""

    current_time: float = 0.0
    target_num_replicas: int = 0
    running_replicas: list[str] = field(default_factory=list)
    capacity_adjusted_min_replicas: int = 0
    capacity_adjusted_max_replicas: int = 4
    total_queued_requests: float = 0.0
    raw_metrics: dict[str, dict[str, list[Any]]] = field(default_factory=dict)


@dataclass
class Sample:
    value: float


def counted(**values: float) -> dict[str, dict[str, list[Any]]]:
    return {name: {"a": [Sample(0.0), Sample(value)]} for name, value in values.items()}


def test_serve_starts_for_those_held_and_a_backlog_and_stops_what_is_idle():
    scaling = ServeScaling(slots=8, idle_s=5.0)
    assert (scaling(Context())[0], scaling(Context(current_time=1.0, total_queued_requests=1.0))[0]) == (0, 1)
    busy = counted(arrived=1, ended=0, served_s=0.0, start_s=2.0)
    assert scaling(Context(2.0, 1, ["a"], raw_metrics=busy))[0] == 1
    done = counted(arrived=1, ended=1, served_s=0.5, start_s=2.0)
    assert scaling(Context(3.0, 1, ["a"], raw_metrics=done))[0] == 1
    assert scaling(Context(9.0, 1, ["a"], raw_metrics=done))[0] == 0
    scaling = ServeScaling(slots=2)
    told = counted(arrived=12, ended=10, served_s=100.0, start_s=1.0)
    scaling(Context(0.0, 1, ["a"], raw_metrics=told))
    num, state = scaling(Context(1.0, 1, ["a"], total_queued_requests=500.0, raw_metrics=told))
    assert (num, state) == (4, {})


def test_arguments_are_settings_of_serve_by_name():
    options = read_options({"model": "m", "max_replicas": 3, "max_num_seqs": 16, "api_keys": ["k"]})
    assert (options.max_replicas, options.part(ModelConfig).model) == (3, "m")
    assert options.engine.scheduler == SchedulerConfig(max_num_seqs=16)
    assert options.part(ServerConfig).api_keys == ("k",)


@pytest.mark.parametrize(("given", "message"), [
    ({"modle": "m"}, "modle is no argument of the application.*model"),
    ({"port": 1}, "port is no argument"),
    ({"min_replicas": 3}, "min_replicas is 3 and max_replicas 1"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"balance": "best"}, "balance is 'best'"),
])  # fmt: skip
def test_wrong_arguments_are_told_before_anything_starts(given: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        read_options(given)


def test_without_ray_it_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "maitred.fleet.ray_backend", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'maitred\[ray\]'"):
        import maitred.fleet.ray_backend  # noqa: F401

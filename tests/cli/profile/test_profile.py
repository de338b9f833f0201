from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from urllib.request import urlopen

import msgspec
import pytest

from benchmarks.live_engine import CpuClock, SleepingClock, record
from maitred.cli.load import Chunk, Record
from maitred.cli.main import main
from maitred.cli.profiling import OpenLoad, edge_samples, served
from maitred.config import EngineConfig, ModelConfig, SchedulerConfig
from maitred.core.errors import ServerError
from maitred.sim.fit import measured_steps, read_run
from maitred.sim.profile import EdgeModel, decode_profile, encode_profile
from tests.sim.worlds import arrival

ONE_THREAD = ModelConfig(num_threads=1, dtype="float32")


def test_profile_then_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path, workload = tmp_path / "p.json", tmp_path / "w.yaml"
    words = ["profile", "-o", str(path), "--seconds", "1", "--num-threads", "1"]
    assert main([*words, "--max-num-seqs", "12"]) == 0
    assert "error of a step" in capsys.readouterr().out
    profile = decode_profile(path.read_bytes(), "p")
    assert profile.model == "maitred-mini"
    assert profile.num_held_out_steps > 0
    assert profile.cost_model.fixed_s > 0
    assert sum(term.share for term in profile.terms.values()) == pytest.approx(1.0)
    assert profile.num_edge_requests > 0
    assert profile.edge.first_token_s(200) > 1e-4  # HTTP alone takes longer

    workload.write_text("rate: 4\nnum_requests: 20\n")
    words = ["simulate", "--workload", str(workload), "--no-jitter", "--json", "--device"]
    path.with_name("alone.json").write_bytes(encode_profile(msgspec.structs.replace(profile, edge=EdgeModel())))
    first_s = []
    for device in (path, path.with_name("alone.json")):
        assert main([*words, str(device)]) == 0
        first_s.append(json.loads(capsys.readouterr().out)["fcfs"]["ttft_s"]["mean"])
    assert first_s[0] > first_s[1] + 1e-4


def test_a_server_has_the_flags_of_the_engine_that_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "json.py").write_text("raise SystemExit('code of the working folder was run')")
    monkeypatch.setenv("MAITRED_API_KEY", "not-for-this-server")
    config = EngineConfig(model=ONE_THREAD, scheduler=SchedulerConfig(max_num_seqs=2, policy="srpt"))
    with served(config) as server, urlopen(f"{server.url}/admin/policy") as answer:
        assert json.load(answer)["policy"] == "srpt"
    with (
        pytest.raises(ServerError, match=r"did not start: .*no-such-model"),
        served(replace(config, model=ModelConfig(model=str(tmp_path / "no-such-model")))),
    ):
        pass


def test_a_live_run_serves_what_arrives_and_its_log_tells_all_of_it():
    config = EngineConfig(model=ONE_THREAD, scheduler=SchedulerConfig(max_num_seqs=2))
    asked = [arrival(f"r{i}", at=0.02 * i, prompt=20 + i, output=3 + i % 2) for i in range(6)]
    steps = record(config, CpuClock(), asked)
    results, arrivals = read_run(steps)
    assert results.total.num_finished == 6
    assert [(a.prompt_tokens, a.output_tokens) for a in arrivals] == [(a.prompt_tokens, a.output_tokens) for a in asked]
    assert [a.at for a in arrivals] == pytest.approx([a.at for a in asked], abs=1e-6)
    assert all(step.step_s > 0 for step in measured_steps(steps))


class TickingClock:
    """A millisecond passes each time it is asked."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        self.at += 1e-3
        return self.at

    def wait_until(self, at: float) -> None:
        self.at = max(self.at, at)

    def take_back(self, seconds: float) -> None:
        self.at -= seconds


def test_the_edge_is_what_a_client_waits_beside_the_step_under_way_the_queue_and_its_own_steps():
    config = EngineConfig(model=ONE_THREAD, scheduler=SchedulerConfig(max_num_seqs=2))
    steps = record(config, TickingClock(), [arrival(f"r{i}", at=4e-3 * i, prompt=20 + i, output=6) for i in range(6)])
    tickets = read_run(steps).results.tickets.kept
    began_at = steps[0].scheduled_at - 1e-3
    records = []
    for ticket in sorted(tickets, key=lambda ticket: ticket.arrived_at):
        sent_s, first_s, last_s = (
            at - began_at for at in (ticket.arrived_at, ticket.first_token_at + 0.5, ticket.finished_at + 0.8)
        )
        chunks = [Chunk(first_s, 1), Chunk(last_s, 5)]
        sizes = ticket.num_prompt_tokens, ticket.num_output_tokens
        records.append(Record(0, sent_s, sent_s, *sizes, ended_s=last_s, output_tokens=6, chunks=chunks))
    samples = edge_samples(OpenLoad(began_at, records), steps)
    assert [sample.prompt_tokens for sample in samples] == [20 + i for i in range(6)]
    assert [sample.first_token_s for sample in samples] == pytest.approx([0.5] * 6, abs=10e-3)
    assert [sample.gaps_s for sample in samples] == pytest.approx([0.3] * 6)
    assert max(ticket.scheduled_at - ticket.arrived_at for ticket in tickets) > 20e-3

    records[1].input_tokens += 1  # as another request that came at the same time
    assert len(edge_samples(OpenLoad(began_at, records), steps)) == 5


def test_clocks_wait_until_a_time_and_take_time_back():
    for clock in (CpuClock(), SleepingClock()):
        at = clock.now() + 0.01
        clock.wait_until(at)
        assert clock.now() >= at

    for clock in (CpuClock(), SleepingClock()):
        before = clock.now()
        clock.take_back(100.0)
        assert clock.now() < before - 50
        clock.wait_until(before - 99.9)
        assert clock.now() >= before - 99.9


class HandClock:
    """Only a test moves it."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def wait_until(self, at: float) -> None:
        self.at = max(self.at, at)

    def take_back(self, seconds: float) -> None:
        self.at -= seconds


def test_what_happens_aside_of_a_live_run_takes_none_of_its_time():
    clock, calls = HandClock(), []

    def aside(now: float) -> bool:
        calls.append(now)
        clock.at += 7.0
        return True

    config = EngineConfig(model=ONE_THREAD, scheduler=SchedulerConfig(max_num_seqs=2))
    asked = [arrival("a", at=0.0, output=3), arrival("b", at=1.0, output=2)]
    results, _ = read_run(record(config, clock, asked, aside))
    assert results.total.num_finished == 2
    assert results.total.e2e_s.largest == 0.0
    assert len(calls) >= 5
    assert set(calls) == {0.0, 1.0}

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from maitred.cli.main import main
from maitred.cli.simulate_inputs import find_target, profile_path, read_workload
from maitred.cli.simulation import write_report
from maitred.config import CacheConfig
from maitred.core.cost_model import CostModel
from maitred.core.errors import ConfigError
from maitred.sim.profile import EdgeModel, Profile, decode_profile, encode_profile

WORKLOADS = Path(__file__).parents[3] / "examples" / "workloads"
NUM_REQUESTS = re.compile(r"num_requests: \d+")
TRACE = "\n".join(
    json.dumps(
        {"timestamp": 40 * i, "input_length": 600, "output_length": 6, "hash_ids": [1, i % 3], "tenant": "ab"[i % 2]}
    )
    for i in range(30)
)


@pytest.fixture(autouse=True)
def no_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE + "\n")
    return str(path)


def a_profile(**fields: object) -> Profile:
    known = {
        "model": "maitred-mini",
        "machine": "test",
        "executor": "torch",
        "cost_model": CostModel(fixed_s=0.25),
        "max_model_len": 128,
        "kv_bytes_per_token": 64,
        "kv_memory_bytes": 1 << 20,
    }
    return Profile(**known | fields)


def figures(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main(["simulate", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_policies_are_compared_as_json(trace: str, capsys):
    words = ("--workload", trace, "--policy", "fcfs,srpt", "--device", "h100", "--model", "llama-3.1-8b", "--json")
    compared = figures(capsys, *words)
    assert set(compared) == {"fcfs", "srpt"}
    for whole in compared.values():
        assert set(whole) == {
            "ttft_s", "itl_s", "tpot_s", "e2e_s", "queue_s", "goodput_rps", "slo_attainment", "jain", "tenants",
            "num_finished", "failed", "num_cached_tokens", "num_preemptions", "utilisation",
        }  # fmt: skip
        assert set(whole["tenants"]) == {"a", "b"}
        assert set(whole["tenants"]["a"]) == set(whole) - {"tenants", "utilisation"}
        for count in ("num_cached_tokens", "num_preemptions"):
            assert whole[count] == sum(tenant[count] for tenant in whole["tenants"].values())
        assert whole["num_cached_tokens"] > 0
        assert 0 < whole["utilisation"] <= 1
        assert set(whole["ttft_s"]) == {"mean", "p50", "p90", "p99", "max"}
    assert figures(capsys, *words) == compared


LLAMA = ("--model", "llama-3.1-8b", "--json")


QWEN35 = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 1024, "head_dim": 256,
    "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2,
    "vocab_size": 248320, "max_position_embeddings": 32768, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "tie_word_embeddings": True,
}  # fmt: skip


def test_recurrent_layers_have_states_and_no_keys(trace: str, tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN35))
    target = find_target("cpu", str(tmp_path))
    assert target.kv_bytes_per_token == 6 * 2 * 2 * 256 * 4
    assert target.state_bytes == 18 * 4 * (3 * 6144 + 16 * 128 * 128)
    slots = [target.num_state_slots(CacheConfig(state_cache_memory_bytes=most), 8) for most in (None, 0, 10**8)]
    assert slots == [16, 8, 8 + 4]
    least, most = (target.num_blocks(CacheConfig(state_cache_memory_bytes=size), 64) for size in (4 * 10**9, 0))
    assert most - least == pytest.approx(4e9 / (16 * target.kv_bytes_per_token), rel=0.01)
    words = ("--workload", trace, "--device", "cpu", "--model", str(tmp_path), "--json")
    assert figures(capsys, *words)["fcfs"]["num_cached_tokens"] > 0


@pytest.mark.parametrize(("model", "least"), [("gemma-3-27b", 3), ("gpt-oss-120b", 1.5)])
def test_layers_of_windows_are_counted_in_pages(model: str, least: float, trace: str, capsys):
    """As many bytes of KV hold more long requests at once than whole blocks would."""
    target, cache = find_target("h100x4", model), CacheConfig(kv_cache_memory_bytes=2**32)
    assert target.groups is not None
    pages = target.num_pages(cache, 64, 2048)
    per_page = target.kv_bytes_per_token * 16 / target.num_layers * target.groups.size
    assert pages == int(2**32 / per_page)
    requests = pages / target.groups.pages_for(32768, 16, 2048)
    assert requests > least * 2**32 / (32768 * target.kv_bytes_per_token)
    words = ("--workload", trace, "--device", "h100x4", "--model", model, "--kv-cache-memory-bytes", "4G", "--json")
    assert figures(capsys, *words)["fcfs"]["num_cached_tokens"] > 0


def test_fleets_are_compared_as_json(trace: str, capsys):
    words = ("--workload", trace, "--fleet", "2", "--fleet-devices", "h100:1,a100:1", *LLAMA)
    compared = figures(capsys, *words, "--balance", "round_robin,prefix")
    assert set(compared) == {"round_robin", "prefix"}
    for whole in compared.values():
        assert whole["num_finished"] == 30
        assert {"prefix_hit_ratio", "load_max_over_mean", "replica_s", "num_starts"} < set(whole)

    words = ("--workload", trace, "--fleet", "0:2", "--cold-start-s", "1", "--device", "h100", *LLAMA)
    compared = figures(capsys, *words, "--policy", "fcfs,srpt")
    assert set(compared) == {"fcfs", "srpt"}
    assert all(whole["num_starts"] >= 1 for whole in compared.values())


def test_several_models_are_swapped_as_the_router_would(tmp_path: Path, capsys):
    models = "\n".join(
        f"  {name}: {{share: {share}, memory_bytes: 4, load_s: 5}}"
        for name, share in zip("abc", (3, 2, 1), strict=True)
    )
    workload = tmp_path / "models.yaml"
    workload.write_text(
        f"rate: 1\nnum_requests: 150\nmodels:\n{models}\nclasses: {{chat: {{input: 64, output: 16}}}}\n"
    )
    words = ("--workload", str(workload), "--device", "cpu", "--json", "--models-memory-bytes", "4")
    strict, patient = (figures(capsys, *words, "--swap-wait-s", wait)["prefix"] for wait in ("0", "10"))
    assert patient["num_starts"] < strict["num_starts"] / 2
    assert patient["queue_s"]["p99"] < strict["queue_s"]["p99"]
    assert figures(capsys, *words[:5])["prefix"]["num_starts"] == 3, "all fit"


def test_workers_hand_over_and_engines_may_have_a_disk(trace: str, capsys):
    words = ("--workload", trace, "--device", "h100", *LLAMA, "--handover", "always", "--link", "100gbe")
    told = figures(capsys, *words, "--prefill-workers", "1", "--decode-workers", "1")["always"]
    assert 0 < told["handovers"]["moved"] <= told["num_finished"]
    assert told["kv_transfer_bytes"] > 0

    words = ("--workload", trace, "--device", "h100", *LLAMA)
    assert "kv_disk_blocks" in figures(capsys, *words, "--kv-disk-bytes", "1000000000")["auto"]


def test_json_to_a_file_leaves_the_table_on_the_terminal(trace: str, tmp_path: Path, capsys):
    result = tmp_path / "result.json"
    assert main(["simulate", "--workload", trace, "--json", str(result)]) == 0
    assert set(json.loads(result.read_text())) == {"fcfs"}
    out = capsys.readouterr().out
    assert out.splitlines()[0].startswith("policy")
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["fcfs", "a", "b"]
    assert [heading in out.splitlines()[0] for heading in ("cached", "preempted", "busy")] == [True] * 3


def contents(report: Path) -> Any:
    """Data of a report's page."""
    found = re.search(r'<script type="application/json" id="contents">(.*?)</script>', report.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_report_has_the_figures_of_json_and_nothing_from_elsewhere(trace: str, tmp_path: Path, capsys):
    report, written = tmp_path / "<img src=x>&.html", tmp_path / "figures.json"
    words = ["--policy", "fcfs,srpt", "--json", str(written), "--report", str(report)]
    assert main(["simulate", "--workload", trace, *words]) == 0
    told = contents(report)
    assert {each["name"]: each["figures"] for each in told["columns"]} == json.loads(written.read_text())
    page = report.read_text()
    assert not re.search(r"""(?:src|href)=|url\(|^import |https?:(?!//www\.w3\.org)""", page, re.MULTILINE)
    assert page.count("</script>") == 3  # theme, contents, modules, and none out of data
    capsys.readouterr()


def test_a_tenant_of_a_trace_steers_no_terminal(tmp_path: Path, capsys):
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": i, "input_length": 8, "output_length": 2, "tenant": t} for i, t in enumerate(["a\x1b[2J\nb", "c"])
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert main(["simulate", "--workload", str(path), "--device", "cpu"]) == 0
    assert "\n  a[2J b " in capsys.readouterr().out


def test_text_of_a_workload_ends_no_script(tmp_path: Path):
    report = tmp_path / "report.html"
    name = "</script><script>alert(1)</script>"
    write_report(str(report), "simulation", name, {"columns": [], "baseline": 0})
    assert name not in report.read_text()
    assert contents(report)["source"] == name


def test_a_faster_load_waits_longer_and_objectives_are_counted(trace: str, capsys):
    words = ("--workload", trace, "--device", "cpu", "--max-num-seqs", "2", "--slo", "ttft:30ms", "--json")
    slow, fast = figures(capsys, *words), figures(capsys, *words, "--rate-scale", "50")
    assert fast["fcfs"]["queue_s"]["mean"] > slow["fcfs"]["queue_s"]["mean"]
    assert fast["fcfs"]["slo_attainment"] < slow["fcfs"]["slo_attainment"]


def test_a_tenants_computing_is_limited_as_at_a_server(trace: str, tmp_path: Path, capsys):
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  a:\n  b: {compute_ms_per_minute: 1}\n")
    words = ("--workload", trace, "--device", "cpu", "--tenants", str(tenants), "--json")
    (whole,) = figures(capsys, *words).values()
    assert whole["tenants"]["b"]["failed"]["compute_ms_per_minute"] > 0
    assert whole["tenants"]["a"]["failed"] == {}


def test_a_file_of_tenants_gives_a_trace_its_terms(trace: str, tmp_path: Path, capsys):
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text("tenants:\n  a: {tier: priority, weight: 3}\n  b: {tier: flex, requests_per_minute: 5}\n")
    (whole,) = figures(capsys, "-w", trace, "--tenants", str(tenants), "--policy", "interactive", "--json").values()
    assert whole["failed"] == whole["tenants"]["b"]["failed"] == {"requests_per_minute": 10}
    assert whole["tenants"]["a"]["failed"] == {}
    assert main(["simulate", "-w", trace, "--tenants", str(tenants)]) == 0
    assert "10 (10 requests_per_minute)" in capsys.readouterr().out
    tenants.write_text("tenants:\n  a: {}\n")
    assert main(["simulate", "-w", trace, "--tenants", str(tenants)]) == 1
    assert "tenant 'b'" in capsys.readouterr().err


def test_admission_is_there_when_asked_for(trace: str, capsys):
    words = ("-w", trace, "--device", "cpu", "--max-num-seqs", "1", "--rate-scale", "50", "--json")
    admission = ("--admission", "--max-queued-requests", "3")
    assert figures(capsys, *words)["fcfs"]["failed"] == {}
    refused = figures(capsys, *words, *admission)["fcfs"]
    assert refused["failed"]["requests"] + refused["num_finished"] == 30
    assert main(["simulate", "-w", trace, *admission[1:]]) == 2
    assert "--max-queued-requests is for --admission, which was not given; add it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=pytest.mark.soak if path.stem == "tenants" else ())
        for path in sorted(WORKLOADS.glob("*.yaml"))
    ],
)
def test_the_examples_run(path: Path, tmp_path: Path, capsys):
    is_overload = path.stem == "tenants"
    policies = "fcfs,vtc" if is_overload else "interactive"
    workload = tmp_path / path.name
    workload.write_text(path.read_text() if is_overload else NUM_REQUESTS.sub("num_requests: 300", path.read_text()))
    compared = figures(capsys, "--workload", str(workload), "--policy", policies, "--json", "--slo", "e2e:60s")
    if not is_overload:
        assert all(whole["slo_attainment"] > 0.9 for whole in compared.values())
        return
    alike, fair = compared["fcfs"]["tenants"], compared["vtc"]["tenants"]
    assert min(tenant["queue_s"]["mean"] for tenant in alike.values()) > 5
    assert min(fair[name]["slo_attainment"] for name in ("modest", "paying")) > 0.9


def test_a_table_in_which_nothing_waited_says_so_and_what_to_try(trace: str, capsys):
    words = ("simulate", "--workload", trace, "--device", "cpu", "--max-num-seqs", "2")
    assert main([*words, "--rate-scale", "0.5"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("Almost nothing waited:")
    assert "Try --rate-scale 2," in last
    assert main([*words, "--rate-scale", "50"]) == 0
    assert "nothing waited" not in capsys.readouterr().out


def test_a_predictor_that_learns_can_be_tried(trace: str, capsys):
    assert figures(capsys, "--workload", trace, "--policy", "srpt", "--predictor", "ranker", "--json")


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ((), 2, "--workload is required"),
        (("--policy", "fcsf"), 2, "did you mean fcfs?"),
        (("--predictor", "orcale"), 2, "did you mean oracle?"),
        (("--rate-scale", "0"), 2, "--rate-scale is 0"),
        (("--rate-scale", "1e-320"), 2, "it must be from 1e-06"),
        (("--batching", "dynamic", "--batch-delay-s", "nan"), 2, "--batch-delay-s is nan; it must be at least 0"),
        (("--report", "none/x.html"), 2, "where no file can be written"),
        (("--json", "none/x.json"), 2, "where no file can be written"),
        (("--report", "x.pdf"), 2, "must end in .html"),
        (("--slo", "ttft:soon"), 1, "ttft:200ms"),
        (("--device", "h10"), 1, "did you mean h100?"),
        (("--device", "none.json"), 1, "maitred profile"),
        (("--model", "llama"), 1, "choose one of"),
        (("--device", "h100", "--model", "llama-3.1-70b"), 1, "141 GB of weights"),
        (("--balance", "hash"), 2, "add --fleet"),
        (("--prefill-workers", "1"), 2, "add --decode-workers N or --mixed-workers N"),
        (("--link", "tpc", "--mixed-workers", "2"), 2, "did you mean tcp?"),
        (("--link", "shm"), 2, "add --prefill-workers 1 --decode-workers 1"),
        (("--mixed-workers", "2", "--link", "none", "--handover", "always"), 2, "give --link tcp"),
        (("--mixed-workers", "2", "--fleet", "2"), 2, "give --mixed-workers N instead"),
        (("--prefill-workers", "-1", "--decode-workers", "1"), 2, "give from 0 to 1000"),
        (("--prefill-workers", "1:2", "--decode-workers", "1"), 2, "'1:2'"),
        (("--kv-disk-bytes", "10", *LLAMA, "--device", "h100"), 2, "give at least as many"),
        (("--fleet", "4:2"), 2, "at least the fewest"),
        (("--fleet", "2", "--balance", "prefx"), 2, "did you mean prefix?"),
        (("--fleet", "2", "--balance", "hash,prefix", "--policy", "fcfs,srpt"), 2, "one of them at a time"),
        (("--fleet", "2", "--fleet-devices", "h100:3"), 2, "names 3 devices"),
        (("--fleet", "2", "--fleet-devices", "h100"), 2, "write NAME:COUNT"),
        (("--fleet", "2", "--fleet-devices", "h10:2", "--model", "llama-3.1-8b"), 1, "did you mean h100?"),
    ],
)
def test_a_slip_is_one_line_with_a_remedy(trace: str, words: tuple[str, ...], code: int, told: str, capsys):
    given = ("--workload", trace, *words) if words else ()
    assert main(["simulate", *given]) == code
    err = capsys.readouterr().err
    assert err.splitlines()[-1].startswith("error: ")
    assert told in err


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("none.yaml", None, "No such file"),
        ("x.yaml", "[1, 2]", "holds no mapping"),
        ("x.yaml", "rate: [", "x.yaml"),
        ("x.yaml", "raet: 4", "did you mean rate?"),
        ("x.jsonl", "{}", "x.jsonl:1:"),
    ],
)
def test_a_workload_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None, told: str, capsys):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main(["simulate", "--workload", str(path)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert told in err


def test_a_trace_is_known_by_its_first_line_too(tmp_path: Path):
    path = tmp_path / "trace"
    path.write_text(TRACE)
    assert len(list(read_workload(str(path)).arrivals())) == 30


def test_this_machines_own_profile_comes_first(tmp_path: Path):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    assert "datasheet" in find_target(None, None, environ).label
    path = profile_path("maitred-mini", environ)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_profile(a_profile()))
    target = find_target(None, None, environ)
    assert target.cost_model.fixed_s == 0.25
    assert target.num_blocks(CacheConfig(), 4) == 4 * 128 // 16
    assert target.num_blocks(CacheConfig(kv_cache_memory_bytes=64 * 16 * 5), 4) == 5
    assert "llama-3.1-8b on h100" in find_target(None, "llama-3.1-8b", environ).label


def test_a_profile_of_version_1_has_no_edge():
    told = json.loads(encode_profile(a_profile(edge=EdgeModel(fixed_s=9.0))))
    old = {name: value for name, value in told.items() if "edge" not in name} | {"version": 1}
    assert decode_profile(json.dumps(old).encode(), "p").edge == EdgeModel()
    with pytest.raises(ConfigError, match="version 3, this maitred reads 1 and 2"):
        decode_profile(json.dumps(told | {"version": 3}).encode(), "p")


@pytest.mark.parametrize(
    ("errors", "warned"),
    [
        ({"mape": 0.09, "edge_error": 0.1}, None),
        ({"mape": 0.24}, "24% off on steps"),
        ({"edge_error": 0.5}, "the edge"),
    ],
)
def test_a_profile_that_missed_its_held_out_part_is_warned_of(trace: str, tmp_path: Path, errors, warned, capsys):
    path = tmp_path / "p.json"
    path.write_bytes(encode_profile(a_profile(max_model_len=1024, **errors)))
    assert main(["simulate", "--workload", trace, "--device", str(path)]) == 0
    err = capsys.readouterr().err
    assert ("warning: " in err) == (warned is not None)
    assert warned is None or (warned in err and "run maitred profile again" in err)


def test_a_profile_of_another_model_is_refused(trace: str, tmp_path: Path, capsys):
    path = tmp_path / "p.json"
    path.write_bytes(encode_profile(a_profile()))
    assert main(["simulate", "--workload", trace, "--device", str(path), "--model", "llama-3.1-8b"]) == 1
    assert "the profile is of maitred-mini" in capsys.readouterr().err


def test_a_trace_that_is_packed_is_unpacked_and_told_of(tmp_path, capsys):
    path = tmp_path / "BurstGPT_1.csv.gz"
    rows = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,a,4,1,5,b\n7.5,a,4,1,5,b\n"
    path.write_bytes(gzip.compress(rows.encode()))
    assert [arrival.at for arrival in read_workload(str(path)).arrivals()] == [0.0, 2.5]
    assert "2 requests in 2.5 s" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="damaged gzip file"):
        read_workload(str(path))


def test_baselines_are_compared_by_what_tells_them_apart(trace: str, capsys):
    device = ("--workload", trace, "--device", "h100", "--model", "llama-3.1-8b", "--max-num-seqs", "4")
    compared = figures(capsys, *device, "--batching", "static,continuous", "--kv-layout", "paged,contiguous", "--json")
    assert list(compared) == ["static paged", "static contiguous", "continuous paged", "continuous contiguous"]
    assert compared["continuous paged"]["kv_waste"] < compared["continuous contiguous"]["kv_waste"]
    assert main(["simulate", *device, "--policy", "fcfs,sjf", "--batching", "static"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.endswith("rows  kv waste")
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == ["fcfs", "sjf"]


def test_baselines_of_a_fleet_are_refused_in_one_line(trace: str, capsys):
    assert main(["simulate", "--workload", trace, "--fleet", "2", "--kv-layout", "none"]) == 2
    assert "--kv-layout is of one engine; drop --fleet" in capsys.readouterr().err
    assert main(["simulate", "--workload", trace, "--batching", "statik"]) == 2
    assert "--batching is 'statik' (did you mean static?)" in capsys.readouterr().err

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from maitred.cli.main import main
from maitred.cli.route import read_plan
from maitred.cli.simulate_inputs import model_shape
from maitred.core.cost_model import CostModel
from maitred.core.errors import ConfigError
from maitred.sim.devices import MODELS
from maitred.sim.profile import Profile, encode_profile
from tests.cli.simulate.test_simulate import contents

OBJECTIVES = ("--slo", "ttft:1s", "--slo", "tpot:200ms")
LOAD = ("--input", "100", "--output", "3", *OBJECTIVES)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """A machine that computes a prompt of 100 tokens in 100 ms, and any number of answers in steps of 10 ms."""
    path = tmp_path / "machine.json"
    costs = CostModel(weights_s=10e-3, prefill_token_s=1e-3)
    known = {"max_model_len": 512, "kv_bytes_per_token": 1000, "kv_memory_bytes": 16_000_000}
    path.write_bytes(
        encode_profile(Profile(model="maitred-mini", machine="test", executor="native", cost_model=costs, **known))
    )
    return str(path)


def test_a_plan_is_written_as_json_that_the_router_starts_and_as_a_report(profile: str, tmp_path: Path, capsys):
    best, report = tmp_path / "best.json", tmp_path / "report.html"
    limits = ("--max-num-seqs", "32", "--max-num-batched-tokens", "512")
    words = ["plan", "--device", profile, *LOAD, "--rate", "15", "--price", f"{profile}=2", *limits]
    words += ["--modes", "aggregated,disaggregated"]
    assert main([*words, "--json", str(best), "--report", str(report)]) == 0
    told = json.loads(best.read_text())
    assert {each["mode"] for each in told["plans"]} == {"aggregated", "disaggregated"}
    (first, *_), table = told["plans"], capsys.readouterr().out
    assert first["mode"] == told["best"]
    assert first["num_devices"] == min(each["num_devices"] for each in told["plans"]) == 2
    assert first["attainment"] >= 0.9
    assert first["cost_per_million_tokens"] == pytest.approx(2 * 2 / (15 * 3 * 3600) * 1e6)
    assert first["commands"][0] in table
    plan = read_plan(str(best))
    assert len(plan.plans[0].replicas) == 2
    assert plan.plans[0].replicas[0][:2] == ["--max-num-seqs", "32"]
    apart = next(each for each in told["plans"] if each["mode"] == "disaggregated")
    assert {words[words.index("--role") + 1] for words in apart["replicas"]} == {"prefill", "decode"}
    assert apart["handover"] == "always"
    drawn = contents(report)
    assert [each["figures"] for each in drawn["columns"]] == told["plans"]
    assert all(each["tickets"] and each["curves"]["tpot_s"][-1][1] == 1.0 for each in drawn["columns"])
    assert {each["mode"] for each in drawn["tried"]} == {"aggregated", "disaggregated"}
    assert sorted(each["layout"] for each in drawn["tried"] if each["front"]) == sorted(
        each["layout"] for each in told["front"]
    )


MIXTURE = {
    **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936},
    **{"hidden_size": 2048, "num_hidden_layers": 48, "intermediate_size": 6144, "max_position_embeddings": 40960},
    **{"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "rms_norm_eps": 1e-6},
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
    **{"hidden_act": "silu", "rope_theta": 1e6, "attention_bias": False, "tie_word_embeddings": False},
    **{"decoder_sparse_step": 1, "mlp_only_layers": [], "eos_token_id": 0, "torch_dtype": "bfloat16"},
}


def test_experts_of_a_folders_model_are_parted_and_cost_what_a_known_names_do(tmp_path: Path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    known, own = MODELS["qwen3-30b-a3b"], model_shape(str(tmp_path))
    for figure in ("num_parameters", "num_active_parameters"):
        assert getattr(own, figure) == pytest.approx(getattr(known, figure), rel=0.12), figure
    for figure in ("expert_parameters", "experts", "experts_per_token", "routed_layers", "kv_width", "num_layers"):
        assert getattr(own, figure) == getattr(known, figure), figure
    words = ["plan", "--model", str(tmp_path), "--device", "b200", "--parallel", "2", "--modes", "aggregated"]
    assert main([*words, "--input", "100", "--output", "3", "--slo", "ttft:1us", "--rate", "4", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["rejected"] == {"a first token takes longer than promised, alone": 2}, "b200x2 and b200x2ep"


def test_without_a_plan_the_objective_and_the_best_value_are_told(profile: str, capsys):
    assert (
        main(["plan", "--device", profile, "--input", "100", "--output", "8", "--slo", "ttft:10ms", "--rate", "1"]) == 1
    )
    told = capsys.readouterr().out
    assert "no layout meets ttft:10ms for 90% of the requests: 110ms is the best" in told or "100ms is the best" in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--device", "h10", *LOAD, "--rate", "1"), "--device is 'h10' (did you mean h100?)"),
        (("--model", "lama-3.1-8b", *LOAD, "--rate", "1"), "did you mean llama-3.1-8b?"),
        ((*LOAD, "--rate", "1", "--link", "infinband"), "did you mean infiniband?"),
        (("--input", "9", "--output", "9", "--slo", "tft:1s", "--rate", "1"), "--slo is 'tft:1s'; write NAME:TIME"),
        (("--input", "9", "--output", "9", "--rate", "1"), "a plan needs objectives"),
        ((*LOAD, "--rate", "1", "--price", "b200=3"), "--price is of 'b200', which is not among --device h100"),
        ((*LOAD, "--rate", "1", "--minimise", "cost"), "--minimise cost needs a price of each device"),
        ((*LOAD, "--rate", "1", "--users", "5"), "--rate and --users say what is asked in two ways"),
        (LOAD, "how much is asked? give --rate R, --devices N or --users U"),
        ((*OBJECTIVES, "--input", "9", "--rate", "1"), "give --input N and --output N, or --workload FILE"),
        ((*LOAD, "--rate", "inf"), "rate is inf; it must be from 1e-06 to 1e+09"),
        ((*LOAD, "--users", "1e9", "--peak", "1e9"), "rate is 115740740740740.73; it must be"),
        ((*LOAD, "--rate", "1", "--device", ","), "--device is ',' and names none; choose from a100"),
        ((*LOAD, "--rate", "1", "--parallel", "1,x"), "--parallel is '1,x'; give numbers of devices from 1 to 64"),
        ((*LOAD, "--rate", "1", "--report", "none/x.html"), "--report is 'none/x.html', where no file can be written"),
        ((*LOAD, "--rate", "1", "--json", "."), "--json is '.', where no file can be written; name a file in a"),
        ((*LOAD, "--rate", "1", "--modes", "apart"), "--modes is 'apart'; choose from aggregated"),
    ],
)
def test_slips_are_told_in_one_line(words: tuple[str, ...], told: str, capsys):
    assert main(["plan", *words]) in (1, 2)
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1


def test_a_trace_without_lengths_is_refused_with_its_line(tmp_path: Path, capsys):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0.0}\n')
    assert main(["plan", "--workload", str(trace), *OBJECTIVES, "--rate", "1"]) == 1
    assert "trace.jsonl:1: " in capsys.readouterr().err


def test_ctrl_c_prints_the_best_so_far_and_says_so(capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    try:
        words = ["plan", "--model", "llama-3.1-8b", "--input", "2000", "--output", "400", *OBJECTIVES, "--rate", "200"]
        assert main([*words, "--json"]) == 130
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    told = capsys.readouterr()
    assert json.loads(told.out)["is_cut"]
    assert "this is the best so far" in told.err


def test_users_are_a_rate_and_a_fleet_is_as_many_slices_as_it_takes(profile: str, tmp_path: Path, capsys):
    """A prompt of 100 ms 1,000 times a second takes 100 to 130 workers: three slices or four of at most 33."""
    best = tmp_path / "best.json"
    words = ["plan", "--device", profile, "--input", "100", "--output", "1", *OBJECTIVES, "--modes", "aggregated"]
    words += ["--max-num-seqs", "32", "--users", "5760000", "--requests-per-user-day", "10", "--peak", "1.5"]
    assert main([*words, "--json", str(best)]) == 0
    told = json.loads(best.read_text())
    (plan,), ((group,),) = told["plans"], (each["groups"] for each in told["plans"])
    assert plan["rate"] == pytest.approx(1000)
    assert plan["num_slices"] in (3, 4)
    assert len(plan["replicas"]) == group["count"] <= 33
    assert 100 < plan["num_devices"] == plan["num_slices"] * group["count"] < 130
    assert plan["tokens_per_s_per_device"] * plan["num_devices"] == pytest.approx(1000)
    parts = [part["num_devices"] for part in told["slice_parts"]]
    assert parts == [round(group["count"] * share) for share in (0.25, 0.5, 1.0)]
    assert all(each["num_devices"] > 100 for each in told["front"]), "parts are no plans"
    text = capsys.readouterr().out
    assert f"# {plan['num_slices']} times, each behind a router of its own" in text
    assert f"\n{parts[0]} devices" in text


def test_a_file_that_is_no_plan_is_refused(tmp_path: Path):
    path = tmp_path / "best.json"
    for text, told in (("{}", "missing required field `plans`"), ('{"plans": []}', "has no layout")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_plan(str(path))

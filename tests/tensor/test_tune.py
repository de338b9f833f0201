"""Tuning: settings simulated with measured batch times, the best of them live, and one of them written."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import psutil
import pytest

pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.cli import tuning
from maitred.cli.main import main
from maitred.cli.tuning import (
    RunFigures,
    Setting,
    TuningTarget,
    best_to_run,
    settings_of,
    simulate,
    simulated,
    tune,
    with_setting,
    write_setting,
)
from maitred.core.errors import ConfigError
from maitred.sim.tensor_profile import HostTimes, ModelTimes, ShapeTimes
from maitred.tensor.repository_files import read_config, read_model
from tests.tensor.ensembles import write_diamond
from tests.tensor.models import write_model
from tests.tensor.test_python_models import CONFIG as PYTHON_CONFIG
from tests.tensor.test_python_models import triton_model
from tests.tensor.test_python_models import write as write_python
from tests.waiting import until

CONFIG = """
# a comment
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 3 ] default_queue_policy { max_queue_size: 100 } }
instance_group { kind: KIND_CPU count: 2 }
parameters { key: "queue_delay" value { string_value: "auto" } }
parameters { key: "session.intra_op.allow_spinning" value { string_value: "0" } }
"""
ROWS = (1, 2, 4, 8)
HOST = HostTimes(request_s=2e-5, batch_s=5e-5)


def times(*seconds):
    return ModelTimes(
        model="add",
        version=1,
        shapes=(ShapeTimes(length=0, rows=ROWS, seconds=seconds),),
        beside=((1, 1.0), (2, 2.0)),
    )


CHEAP_ROWS = times(0.010, 0.0105, 0.011, 0.012)
DEAR_ROWS = times(0.010, 0.020, 0.040, 0.080)
ONE = Setting(batch=1, delay_us=0, instances=1, threads=1)


def few_settings(config, target):
    settings = settings_of(config, target, num_cores=1)
    return [each for each in settings if each.instances == 1 and each.batch in (1, 4, 8) and each.delay_us < 1000]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch):
    """Of each simulation; what they show needs no more."""
    monkeypatch.setattr(tuning, "FIRST_REQUESTS", 150)
    monkeypatch.setattr(tuning, "SECOND_REQUESTS", 600)


@pytest.fixture
def config(tmp_path):
    write_model(tmp_path, "add", config=CONFIG)
    return read_model(tmp_path / "add").config


def test_batches_are_chosen_where_rows_are_cheap(config):
    target = TuningTarget(p99_s=0.05, rate=300.0)
    settings = few_settings(config, target)
    best = simulated(config, settings, {1: CHEAP_ROWS}, HOST, target)[0]
    assert best.setting.batch == 8
    assert best.simulated.meets(target)
    alone = simulate(with_setting(config, ONE), CHEAP_ROWS, HOST, target, 600)
    assert not alone.meets(target)


def test_where_batching_does_not_pay_nothing_is_better_than_batch_1(config):
    target = TuningTarget(p99_s=1.0, concurrency=8)
    settings = few_settings(config, target)
    tried = simulated(config, settings, {1: DEAR_ROWS}, HostTimes(), target)
    alone = next(each for each in tried if each.setting.batch == 1)
    assert tried[0].simulated.throughput_rps <= alone.simulated.throughput_rps * 1.02
    assert alone in best_to_run(tried)


@pytest.mark.parametrize("model_times", [DEAR_ROWS, CHEAP_ROWS], ids=["near", "far"])
def test_the_best_without_batches_runs_live_however_far_behind_it_is_told_to_be(config, model_times):
    target = TuningTarget(p99_s=1.0, concurrency=16)
    to_run = best_to_run(simulated(config, few_settings(config, target), {1: model_times}, HOST, target))
    assert any(each.setting.batch == 1 for each in to_run)
    assert len({each.simulated for each in to_run}) == len(to_run), "those that do the very same run once"


def of_speed(times, factor):
    changed = msgspec.structs.replace
    shapes = (changed(each, seconds=tuple(taken / factor for taken in each.seconds)) for each in times.shapes)
    return changed(times, shapes=tuple(shapes))


def test_those_run_live_differ_in_instances_and_threads_where_they_can(config):
    target = TuningTarget(p99_s=1.0, concurrency=16)
    times = {threads: of_speed(CHEAP_ROWS, 1 + threads / 10) for threads in (1, 2, 4)}
    tried = simulated(config, settings_of(config, target, num_cores=2), times, HOST, target)
    shapes = [(each.setting.instances, each.setting.threads) for each in best_to_run(tried)[:3]]
    assert len(set(shapes)) == 3


def test_settings_leave_the_cores_and_the_time_that_there_is(config):
    settings = settings_of(config, TuningTarget(p99_s=0.003, rate=1.0, num_rows=2), num_cores=4)
    assert max(each.instances * each.threads for each in settings) == 8
    assert {each.delay_us for each in settings} == {0, 500, 1000}
    assert {each.batch for each in settings} == {1, 2, 4, 8}
    assert {each.delay_us for each in settings if each.batch == 1} == {0}


def test_accelerators_keep_their_instances(config):
    config.instance_group[0].kind = 1  # KIND_GPU
    settings = settings_of(config, TuningTarget(p99_s=0.01, rate=1.0))
    assert {(each.instances, each.threads) for each in settings} == {(2, 0)}
    assert with_setting(config, settings[0]).instance_group == config.instance_group


def test_what_is_written_keeps_the_rest_of_the_config(tmp_path):
    folder = write_model(tmp_path, "add", config=CONFIG)
    write_setting(folder, Setting(batch=4, delay_us=500, instances=1, threads=2))
    written = read_config(folder)
    assert list(written.dynamic_batching.preferred_batch_size) == [4]
    assert written.dynamic_batching.max_queue_delay_microseconds == 500
    assert written.dynamic_batching.default_queue_policy.max_queue_size == 100
    assert [group.count for group in written.instance_group] == [1]
    values = {key: value.string_value for key, value in written.parameters.items()}
    assert values == {"intra_op_thread_count": "2", "session.intra_op.allow_spinning": "0"}
    assert not list(folder.glob(".config*"))


def test_a_model_without_batches_is_tuned_in_instances_alone(tmp_path):
    config = read_model(write_model(tmp_path, "add", config=CONFIG)).config
    config.max_batch_size = 0
    config.ClearField("dynamic_batching")
    settings = settings_of(config, TuningTarget(p99_s=0.01, rate=1.0), num_cores=2)
    assert {each.batch for each in settings} == {1}
    assert not with_setting(config, settings[0]).HasField("dynamic_batching")


def test_an_outcome_that_misses_the_target_is_behind_all_that_meet_it():
    target = TuningTarget(p99_s=0.02, concurrency=4)
    quick = RunFigures(p50_s=0.01, p99_s=0.015, throughput_rps=100.0, mean_batch=1.0, num_failed=0)
    late = replace(quick, p99_s=0.021, throughput_rps=900.0)
    assert quick.order(target) < late.order(target)
    assert not quick.meets(TuningTarget(p99_s=0.02, rate=200.0)), "it does not keep up"


def test_ensembles_are_refused(tmp_path):
    write_diamond(tmp_path)
    with pytest.raises(ConfigError, match="tune its steps"):
        tune(tmp_path / "diamond", TuningTarget(p99_s=0.1, rate=1.0))


def test_a_model_is_tuned_live_and_written(tmp_path, capsys):
    folder = write_model(tmp_path, "add", config=CONFIG)
    words = ["tune", "add", "--model-repository", str(tmp_path), "--p99", "10s", "--seconds", "0.1"]
    assert main([*words, "--concurrency", "4", "--write", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["meets_target"]
    assert told["chosen"] == told["live"][0]["setting"]
    assert all(each["live"]["throughput_rps"] > 0 for each in told["live"])
    assert list(read_config(folder).dynamic_batching.preferred_batch_size) == [told["chosen"]["batch"]]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--p99", "20", "--rate", "5"], "--p99 is '20'"),
        (["--p99", "20ms"], "--rate or --concurrency"),
        (["--p99", "20ms", "--rate", "5", "--concurrency", "5"], "--rate or --concurrency"),
        (["--p99", "20ms", "--rate", "0"], "--rate is 0"),
        (["--p99", "20ms", "--rate", "5"], "no model 'add'"),
    ],
)
def test_slips_are_told(tmp_path, capsys, words, told):
    assert main(["tune", "add", "--model-repository", str(tmp_path), *words]) != 0
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["profile"],
        pytest.param(
            ["tune", "double", "--p99", "5s", "--concurrency", "2", "--seconds", "0.2"], marks=pytest.mark.soak
        ),
    ],
)
def test_a_python_model_is_profiled_and_tuned_where_its_code_may_run(tmp_path, capsys, command):
    write_python(tmp_path, "double", triton_model(), config=PYTHON_CONFIG)
    before = {*psutil.Process().children()}
    asked = [*command, "--model-repository", str(tmp_path)]
    assert main(asked) != 0
    assert "allow that with --allow-repository-code" in capsys.readouterr().err
    assert main([*asked, "--allow-repository-code"]) == 0
    assert "batch" in capsys.readouterr().out
    until(lambda: {*psutil.Process().children()} <= before)  # they end by themselves

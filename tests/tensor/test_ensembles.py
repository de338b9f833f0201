"""Ensembles: checked at load, and answered as their steps would one after another."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from maitred.core.clock import WallClock
from maitred.core.errors import CheckpointError, InvalidRequest, ModelNotFound, Overloaded, QueueTimeout
from maitred.core.tensor_request import InferRequest
from maitred.tensor.arrays import array_of, tensor_of
from maitred.tensor.check import check
from maitred.tensor.config import parse_config
from maitred.tensor.ensembles import EnsembleRun, plan_of
from maitred.tensor.served_models import ControlMode
from tests.fakes import with_terms
from tests.tensor.ensembles import DIAMOND, scale_model, write_diamond
from tests.tensor.models import write_model
from tests.tensor.test_local import served

MODELS = {
    "double": 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 4 } '
    'output { name: "y" data_type: TYPE_FP32 dims: 4 }',
    "zsum": 'max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: -1 } '
    'input { name: "y" data_type: TYPE_FP32 dims: 4 } output { name: "z" data_type: TYPE_FP32 dims: 4 }',
}
MODELS["triple"] = MODELS["double"]


def plan(config=DIAMOND, **models):
    parsed = {name: parse_config(f'name: "{name}" {text}'.encode(), name) for name, text in (MODELS | models).items()}
    return plan_of(
        parse_config(f'name: "diamond" {config}'.encode(), "diamond"), lambda name, version: parsed.get(name)
    )


def test_steps_go_when_what_they_read_is_there():
    run = EnsembleRun(plan(), [tensor_of("IN", np.ones((1, 4), np.float32), "TYPE_FP32")])
    left, right = run.ready()
    assert (left.step.model, right.step.model) == ("double", "triple")
    assert [tensor.name for tensor in left.inputs] == ["x"]
    assert run.ready() == []
    twos = tensor_of("y", np.full((1, 4), 2, np.float32), "TYPE_FP32")
    run.answered(left.step, [twos])
    assert run.ready() == []
    run.answered(right.step, [twos])
    (last,) = run.ready()
    assert [(tensor.name, array_of(tensor)[0, 0]) for tensor in last.inputs] == [("x", 2), ("y", 2)]
    assert not run.is_done
    run.answered(last.step, [tensor_of("z", np.full((1, 4), 4, np.float32), "TYPE_FP32")])
    assert run.is_done
    assert run.outputs()[0].name == "OUT"


@pytest.mark.parametrize(
    ("config", "models", "says"),
    [
        (DIAMOND.replace('"triple"', '"quadruple"'), {}, r"step\[2\] \(model 'quadruple'\) needs a model that is not"),
        (DIAMOND.replace('"triple"', '"diamond"'), {}, r"leads back to the ensemble 'diamond' itself"),
        (DIAMOND.replace('key: "z"', 'key: "zz"'), {}, r"maps tensor 'OUT' to output 'zz'; outputs are z"),
        (DIAMOND.replace('key: "y" value: "right"', 'key: "w" value: "right"'), {}, r"no tensor for input 'y'"),
        (DIAMOND.replace('"right" }\n         out', '"wrong" }\n         out'), {}, "reads tensor 'wrong'"),
        (
            DIAMOND.replace('key: "y" value: "right"', 'key: "y" value: "left"'),
            {},
            "'left' comes from step.1. .model 'double'. and step.2",
        ),
        (
            DIAMOND.replace('model_version: -1\n         input_map { key: "x" value: "IN" } output_map { key: "y" '
            'value: "left"', 'input_map { key: "x" value: "OUT" } output_map { key: "y" value: "left"'),
            {},
            "the steps wait for each other: step",
        ),
        (DIAMOND, {"double": MODELS["double"].replace("batch_size: 4", "batch_size: 2")}, "is 4, and that of step.1"),
        (
            DIAMOND,
            {"double": MODELS["double"].replace('"y" data_type: TYPE_FP32', '"y" data_type: TYPE_FP16')},
            "'left' is TYPE_FP16 from step.1. .model 'double'., TYPE_FP32 for step.0. .model 'zsum'.",
        ),
        (
            DIAMOND,
            {"triple": MODELS["triple"].replace("dims: 4 }", "dims: 5 }")},
            r"'right' has shape \[-1, 5\] from step.2.*'IN' has shape \[-1, 4\] from the ensemble, \[-1, 5\] for",
        ),
    ],
)  # fmt: skip
def test_a_fault_refuses_the_ensemble_and_names_both_sides(config, models, says):
    with pytest.raises(CheckpointError, match=says):
        plan(config, **models)


def test_a_model_without_a_batch_takes_the_whole_shape():
    plan(double=MODELS["double"].replace("max_batch_size: 4", "").replace("dims: 4", "dims: [ -1, 4 ]"))
    with pytest.raises(CheckpointError, match=r"'IN' has shape \[-1, 4\] from the ensemble, \[3, 5\] for"):
        plan(double=MODELS["double"].replace("max_batch_size: 4", "").replace("dims: 4", "dims: [ 3, 5 ]"))


def test_models_check_looks_for_the_steps_beside_an_ensemble(tmp_path):
    write_diamond(tmp_path)
    assert all(each.served for each in check(tmp_path))
    (tmp_path / "triple").rename(tmp_path / ".triple")
    found = {each.path.rpartition("/")[2]: each for each in check(tmp_path)}
    assert not found["diamond"].served
    assert "step[2] (model 'triple') needs a model that is not served" in found["diamond"].reason
    assert found["double"].served


def ask(request_id, *values, model="diamond", name="IN", **fields):
    array = np.repeat(np.array(values, np.float32)[:, None], 4, 1)
    return InferRequest(
        request_id=request_id, model=model, inputs=(tensor_of(name, array, "TYPE_FP32"),), **with_terms(fields)
    )


def test_an_ensemble_is_loaded_with_its_steps_and_answers_as_they_do(tmp_path):
    write_diamond(tmp_path)

    async def story():
        async with served(tmp_path, ControlMode.EXPLICIT, load=["diamond"]) as service:
            assert service.versions("triple") == [1]
            answers = await asyncio.gather(*(service.infer(ask(f"r{at}", at, 10 * at)) for at in range(20)))
            for at, answer in enumerate(answers):
                (output,) = answer.outputs
                assert output.name == "OUT"
                assert array_of(output)[:, 0].tolist() == [5 * at, 50 * at]
                assert answer.compute_us > 0
            for wrong in (ask("name", 1, name="x"), ask("rows", *range(5))):
                with pytest.raises(InvalidRequest):
                    await service.infer(wrong)
            assert len(service.runner) == 0

    asyncio.run(story())


def test_a_step_that_fails_ends_the_whole(tmp_path):
    queue = "dynamic_batching { max_queue_delay_microseconds: 60000000 preferred_batch_size: 4 %s }"
    write_diamond(tmp_path)
    full = "default_queue_policy { max_queue_size: 1 }"
    (tmp_path / "triple" / "config.pbtxt").write_text("max_batch_size: 4 " + queue % full)
    (tmp_path / "double" / "config.pbtxt").write_text("max_batch_size: 4 " + queue % "")

    async def story():
        async with served(tmp_path) as service:
            first = asyncio.ensure_future(service.infer(ask("first", 1)))
            await asyncio.sleep(0)
            with pytest.raises(Overloaded):
                await service.infer(ask("second", 1))
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            with pytest.raises(QueueTimeout, match="Request timeout expired"):
                await service.infer(ask("late", 1, start_by=WallClock().now() + 0.01))
            assert len(service.runner) == 0

    asyncio.run(story())


def test_an_ensemble_that_waited_for_a_model_is_served_once_that_is_there(tmp_path):
    write_diamond(tmp_path)
    (tmp_path / "triple").rename(tmp_path / ".triple")

    async def story():
        async with served(tmp_path, ControlMode.POLL) as service:
            with pytest.raises(ModelNotFound):
                await service.infer(ask("early", 1))
            assert any("triple" in entry.reason for entry in service.index() if entry.name == "diamond")
            (tmp_path / ".triple").rename(tmp_path / "triple")
            await service.poll()
            await service.poll()
            assert array_of((await service.infer(ask("now", 1))).outputs[0])[0, 0] == 5
            (tmp_path / "triple" / "1" / "model.onnx").unlink()
            (tmp_path / "triple" / "1").rmdir()
            write_model(tmp_path, "triple", model=scale_model(3.0, shape=("batch", 5)))
            await service.poll()
            await service.poll()
            (entry,) = (each for each in service.index() if each.name == "diamond")
            assert "'IN' has shape [-1, 4] from the ensemble, [-1, 5]" in entry.reason

    asyncio.run(story())

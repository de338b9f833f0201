"""Models replaced while they serve."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")
pytest.importorskip("onnxruntime", reason="the extra tensor brings it")

from maitred.core.errors import ModelNotFound
from maitred.tensor.repository_files import read_model
from maitred.tensor.served_models import ServedModels
from tests.tensor.models import write_model

ONES = {"INPUT0": np.ones((1, 16), np.float32), "INPUT1": np.ones((1, 16), np.float32)}
ALL = "version_policy { all { } }"


@pytest.fixture
def models() -> ServedModels:
    return ServedModels()


def states(models: ServedModels) -> dict[int | None, str]:
    return {each.version: f"{each.state.value} {each.reason}".strip() for each in models.index() if each.state}


def test_the_highest_version_answers_or_the_one_that_is_named(tmp_path: Path, models: ServedModels):
    config = ALL + 'parameters { key: "label.stable" value { string_value: "2" } }'
    assert models.take(read_model(write_model(tmp_path, "m", config=config, versions=(1, 2, 10))))
    with models.lease("m") as newest, models.lease("m", label="stable") as stable, models.lease("m", 1) as first:
        assert (newest.number, stable.number, first.number) == (10, 2, 1)
        assert newest.instances[0].run(ONES)["OUTPUT"][0, 0] == 2
    for asked, told in (
        (("n",), "Request for unknown model: 'n' is not found"),
        (("m", 3), "'m' version 3 is not found; served are: 1, 2, 10"),
        (("m", None, "new"), "'m' with the label 'new' is not found; served are"),
    ):
        with pytest.raises(ModelNotFound, match=told), models.lease(*asked):
            pass


def test_a_version_that_is_replaced_serves_until_its_last_batch(tmp_path: Path, models: ServedModels):
    folder = write_model(tmp_path, "m", versions=(1,))
    models.take(read_model(folder))
    with models.lease("m") as old:
        write_model(tmp_path, "m", versions=(2,))
        models.take(read_model(folder))
        assert states(models) == {1: "UNLOADING", 2: "READY"}
        with models.lease("m") as new:
            assert new.number == 2
        assert old.instances[0].run(ONES)
    assert old.is_closed
    assert states(models) == {1: "UNAVAILABLE unloaded", 2: "READY"}


def test_a_reload_of_the_same_version_takes_its_place(tmp_path: Path, models: ServedModels):
    model = read_model(write_model(tmp_path, "m"))
    models.take(model)
    with models.lease("m") as old:
        models.take(model)
        assert states(models) == {1: "READY"}
        with models.lease("m") as new:
            assert new is not old
        assert not old.is_closed
    assert old.is_closed
    assert states(models) == {1: "READY"}


def test_a_failed_load_leaves_the_old_one_serving_with_the_reason(tmp_path: Path, models: ServedModels):
    folder = write_model(tmp_path, "m", config=ALL, versions=(1,))
    models.take(read_model(folder))
    (folder / "config.pbtxt").write_text(
        'model_warmup { inputs { key: "INPUT0" value { data_type: TYPE_FP32 dims: 16 zero_data: true } } }'
    )
    assert not models.take(read_model(folder))
    assert states(models)[1] == "READY model_warmup[0] has no input 'INPUT1'"
    with models.lease("m") as served:
        assert served.instances[0].run(ONES)


def test_of_versions_those_that_load_are_served(tmp_path: Path, models: ServedModels):
    folder = write_model(tmp_path, "m", config=ALL, versions=(1, 2))
    (folder / "2" / "model.onnx").write_bytes(b"\x08")
    assert not models.take(read_model(folder))
    assert models.versions("m") == [1]
    assert states(models)[2].startswith("UNAVAILABLE ")


def test_a_model_that_is_dropped_drains(tmp_path: Path, models: ServedModels):
    models.take(read_model(write_model(tmp_path, "m")))
    with models.lease("m") as served:
        models.drop("m")
        assert states(models) == {1: "UNLOADING"}
        with pytest.raises(ModelNotFound), models.lease("m"):
            pass
        assert served.instances[0].run(ONES)
    assert served.is_closed
    assert states(models) == {1: "UNAVAILABLE unloaded"}
    models.drop("m")

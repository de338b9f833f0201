"""TF Serving's configuration files: what they say is served, and what has no equal is refused by name."""

from __future__ import annotations

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from maitred.config import TensorConfig
from maitred.core.errors import ConfigError
from maitred.tensor.served_models import ControlMode, ModelControl, ServedModels
from maitred.tensor.tfs_config import open_repository, read_batching, read_models
from tests.tensor.models import write_model

BATCHING = """
max_batch_size { value: 16 }
batch_timeout_micros { value: 500 }
max_enqueued_batches { value: 10 }
num_batch_threads { value: 3 }
allowed_batch_sizes: [ 4, 16 ]
thread_pool_name { value: "ours" }
"""


def listing(folder, base_path, rest=""):
    path = folder / "models.config"
    path.write_text(f'model_config_list {{ config {{ name: "mine" base_path: "{base_path}" {rest} }} }}')
    return path


def served(config):
    repository = open_repository(config)
    control = ModelControl(repository.folder, ControlMode.POLL, ServedModels(), rewrite=repository.rewrite)
    control.start()
    return repository, control


def test_a_listed_model_is_served_by_its_name_with_its_versions_and_labels(tmp_path):
    base = write_model(tmp_path / "somewhere", "other", versions=(1, 2, 3))
    rest = 'model_version_policy { specific { versions: [1, 3] } } version_labels { key: "stable" value: 1 }'
    models = str(listing(tmp_path, base, rest + ' model_platform: "onnx"'))
    kept, control = served(TensorConfig(tfs_model_config=models))
    assert control.models.versions("mine") == [1, 3]
    with control.models.lease("mine", label="stable") as loaded:
        assert loaded.number == 1
    write_model(tmp_path / "new", "other", versions=(4,))
    (tmp_path / "new/other/4").rename(base / "4")
    control.poll()
    control.poll()
    assert control.models.versions("mine") == [1, 3]  # it is seen, and not asked for
    assert kept.folder.exists()


def test_batching_parameters_are_the_rules_of_every_model(tmp_path):
    repository, rules = tmp_path / "models", tmp_path / "batching.config"
    write_model(repository, "add", config="dynamic_batching { preferred_batch_size: [ 2 ] preserve_ordering: true }")
    rules.write_text(BATCHING)
    _, control = served(TensorConfig(model_repository=str(repository), tfs_batching_parameters=str(rules)))
    with control.models.lease("add") as loaded:
        config = loaded.config
    assert config.max_batch_size == 16
    assert list(config.dynamic_batching.preferred_batch_size) == [4, 16]
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert config.dynamic_batching.default_queue_policy.max_queue_size == 160
    assert [group.count for group in config.instance_group] == [3]


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        ("model_type: TENSORFLOW", "model_config_list.config.0..model_type is not supported"),
        ("logging_config { }", "logging_config is not supported"),
        ('model_platform: "tensorflow"', "models here are ONNX"),
        ('} config { name: "mine" base_path: "/x"', "twice"),
        ('} config { name: "../up" base_path: "/x"', "without slashes"),
        ('} config { name: "rel" base_path: "x"', "absolute"),
        ("nonsense: 1", 'no field named "nonsense"'),
    ],
)
def test_what_has_no_equal_is_refused_by_name(tmp_path, rest, says):
    with pytest.raises(ConfigError, match=says):
        read_models(listing(tmp_path, "/models/mine", rest))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pad_variable_length_inputs: true", "length_buckets"),
        ("enable_large_batch_splitting { value: true }", "enable_large_batch_splitting is not supported"),
        ("allowed_batch_sizes: [ 4, 2 ]", "ascend"),
        ("max_batch_size { value: 8 } allowed_batch_sizes: [ 4 ]", "last"),
        ("max_batch_size { value: 0 }", "max_batch_size is 0"),
    ],
)
def test_batching_parameters_that_cannot_be_kept_are_refused(tmp_path, text, says):
    path = tmp_path / "batching.config"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_batching(path)

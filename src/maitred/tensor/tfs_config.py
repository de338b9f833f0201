"""TF Serving's two configuration files: which models there are, and how they are batched, by the rules that are here.

A list of models becomes a folder of links, which is a model repository; versions, labels and batch rules are laid over
the config that each model's folder has. What has no equal here is refused by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf import text_format

from maitred.config import TensorConfig
from maitred.core.errors import ConfigError
from maitred.tensor.config import ANY_MESSAGE, ModelConfig
from maitred.tensor.repository import LABEL
from maitred.tensor.schema import marked_fields
from maitred.tensor.tfs_fields import FILE_MESSAGES, FILE_SCHEMA

MOST_BYTES = 4 << 20
PLATFORMS = ("", "onnx", "onnxruntime", "onnxruntime_onnx")  # of model_platform
MOST_QUEUED = 2**32 - 1
_NAME = re.compile(r"[^/.][^/]*")  # a folder's, not hidden


def read_models(path: Path) -> tuple[ANY_MESSAGE, ...]:
    """The models of a `--tfs-model-config`. Raises ConfigError with file and field."""
    listed = tuple(_read(path, "ModelServerConfig").model_config_list.config)
    for model in listed:
        if not _NAME.fullmatch(model.name) or not model.base_path:
            raise ConfigError(f"{path}: a model needs a name, without slashes, and a base_path; one has {model.name!r}")
        if not Path(model.base_path).is_absolute():
            raise ConfigError(f"{path}: base_path {model.base_path!r} of {model.name!r} must be absolute")
        if model.model_platform not in PLATFORMS:
            raise ConfigError(
                f"{path}: model_platform of {model.name!r} is {model.model_platform!r}, and models here are ONNX"
            )
    names = [model.name for model in listed]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: the model {twice!r} is there twice")
    if not listed:
        raise ConfigError(f"{path}: model_config_list has no model")
    return listed


def read_batching(path: Path) -> ANY_MESSAGE:
    """The BatchingParameters of a `--tfs-batching-parameters`. Raises ConfigError."""
    rules = _read(path, "BatchingParameters")
    sizes = list(rules.allowed_batch_sizes)
    if sizes and sizes != sorted({*sizes}):
        raise ConfigError(f"{path}: allowed_batch_sizes must ascend")
    if sizes and rules.HasField("max_batch_size") and sizes[-1] != rules.max_batch_size.value:
        raise ConfigError(f"{path}: the last of allowed_batch_sizes must be max_batch_size")
    for name in ("max_batch_size", "batch_timeout_micros", "max_enqueued_batches", "num_batch_threads"):
        least, value = 0 if name == "batch_timeout_micros" else 1, getattr(rules, name).value
        if rules.HasField(name) and not least <= value < 2**31:
            raise ConfigError(f"{path}: {name} is {value}; it must be {least} or more, and below 2^31")
    return rules


def _read(path: Path, kind: str) -> ANY_MESSAGE:
    found = FILE_MESSAGES[kind]()
    try:
        with open(path, "rb") as file:
            text_format.Parse(file.read(MOST_BYTES).decode(), found)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no {kind}: {error}") from None
    for where, line in marked_fields(FILE_SCHEMA, found):
        if line.mark == "!":
            raise ConfigError(f"{path}: {where} is not supported: {line.note}")
    return found


@dataclass(frozen=True, slots=True)
class Repository:
    """The models' folder, and what is laid over their configs."""

    folder: Path
    over: Mapping[str, ANY_MESSAGE] = field(default_factory=dict)  # by model
    batching: ANY_MESSAGE | None = None  # of every model
    links: TemporaryDirectory[str] | None = None  # goes with us

    def rewrite(self, name: str, written: ANY_MESSAGE) -> ANY_MESSAGE:
        """A model's config as it is served."""
        for over in (self.over.get(name), self.batching):
            if over is not None:
                written = laid_over(written, over)
        return written

    def close(self) -> None:
        if self.links is not None:
            self.links.cleanup()


def open_repository(config: TensorConfig) -> Repository:
    """A model repository as flags name it. Raises ConfigError."""
    batching = None
    if config.tfs_batching_parameters is not None:
        batching = batch_rules(read_batching(Path(config.tfs_batching_parameters)))
    if config.tfs_model_config is None:
        assert config.model_repository is not None
        return Repository(Path(config.model_repository), batching=batching)
    models = read_models(Path(config.tfs_model_config))
    links = TemporaryDirectory(prefix="maitred-models-")
    link_models(models, Path(links.name))
    return Repository(Path(links.name), {model.name: _of_model(model) for model in models}, batching, links)


def link_models(models: Sequence[ANY_MESSAGE], repository: Path) -> None:
    """Fills an empty folder: each model's base_path by its name. Links are followed, so that new versions are seen."""
    for model in models:
        os.symlink(model.base_path, repository / model.name, target_is_directory=True)


def _of_model(model: ANY_MESSAGE) -> ANY_MESSAGE:
    config, policy = ModelConfig(), model.model_version_policy
    chosen = policy.WhichOneof("policy_choice")
    if chosen == "latest":
        config.version_policy.latest.num_versions = policy.latest.num_versions
    elif chosen == "all":
        config.version_policy.all.SetInParent()
    elif chosen == "specific":
        config.version_policy.specific.versions.extend(policy.specific.versions)
    for label, version in model.version_labels.items():
        config.parameters[LABEL + label].string_value = str(version)
    return config


def batch_rules(batching: ANY_MESSAGE) -> ANY_MESSAGE:
    """The same rules as a ModelConfig has them; what is not given stays the model's own."""
    config = ModelConfig()
    batches = config.dynamic_batching
    batches.SetInParent()
    if batching.HasField("max_batch_size"):
        config.max_batch_size = batching.max_batch_size.value
    elif batching.allowed_batch_sizes:
        config.max_batch_size = batching.allowed_batch_sizes[-1]
    batches.preferred_batch_size.extend(batching.allowed_batch_sizes)
    if batching.HasField("batch_timeout_micros"):
        batches.max_queue_delay_microseconds = batching.batch_timeout_micros.value
    if batching.HasField("max_enqueued_batches"):
        rows = batching.max_enqueued_batches.value * max(1, config.max_batch_size)
        batches.default_queue_policy.max_queue_size = min(rows, MOST_QUEUED)
    if batching.HasField("num_batch_threads"):
        config.instance_group.add(count=batching.num_batch_threads.value)
    return config


def laid_over(written: ANY_MESSAGE, over: ANY_MESSAGE) -> ANY_MESSAGE:
    """A model's config with what a file of TF Serving says of it; lists are replaced, not joined."""
    if over.instance_group:
        written.ClearField("instance_group")
    if over.HasField("version_policy"):
        written.ClearField("version_policy")
    if over.HasField("dynamic_batching") and written.WhichOneof("scheduling_choice") in (None, "dynamic_batching"):
        written.ClearField("dynamic_batching")
    elif over.HasField("dynamic_batching"):  # sequences and ensembles have a scheduler of their own
        kept = ModelConfig()
        kept.CopyFrom(over)
        kept.ClearField("dynamic_batching")
        over = kept
    written.MergeFrom(over)
    return written

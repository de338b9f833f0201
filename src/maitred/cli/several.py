"""Several models behind one address: `--models FILE` and `--models-dir`, each with its words of `maitred serve` and its
memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from maitred.cli import serve
from maitred.cli.command import Options, typed
from maitred.cli.flags import Flag, FlagKind, UsageError
from maitred.config import NO_MODEL, LoraConfig, ModelConfig, TensorConfig
from maitred.core.errors import ConfigError, MaitredError, OutOfMemory, did_you_mean
from maitred.engine.memory import RESERVE_SHARE, available_memory_bytes, format_bytes
from maitred.fleet.swapping import FleetModel, ModelSet, bounded

MODELS_SHARE = 0.8  # of the available memory, for weights and KV of loaded models: their processes need some beside
KV_SHARE = 8  # of that memory, as its part, is the KV cache of a model whose size is not given, or one full context
OF_ROUTER = ("host", "port", "announce_fd", "config", "debug", "served_model_names", "fleet_token_file", "api_keys")


class _Own(msgspec.Struct):
    """Keys of a model that are not of `maitred serve`."""

    aliases: list[Annotated[str, msgspec.Meta(min_length=1)]] = []
    pinned: bool = False
    keep_alive_s: float | None = None


def read_several(
    file: str | None,
    folder: str | None,
    memory_bytes: int | None,
    words: Sequence[str],
    tell: Callable[[str], None],
) -> ModelSet:
    """`words` are for `maitred serve` too, before each model's own. Raises UsageError, and ConfigError for a context
    that memory can never hold.
    """
    if memory_bytes is None:
        memory_bytes = int(MODELS_SHARE * available_memory_bytes())
    described = {**_in_folder(folder, tell), **_in_file(file)}
    if not described:
        raise UsageError(f"no model is in {file or folder}; write models: {{NAME: {{model: FOLDER}}}}")
    models = (_model(name, fields, memory_bytes, words, tell) for name, fields in described.items())
    return ModelSet(tuple(models), memory_bytes)


def _in_file(path: str | None) -> dict[str, Mapping[str, Any]]:
    if path is None:
        return {}
    from maitred.storage.key_files import parsed_yaml

    try:
        told = parsed_yaml(Path(path).read_text(encoding="utf-8"), Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--models {path}: {getattr(error, 'strerror', None) or error}; give a YAML file") from None
    models = told.get("models") if isinstance(told, dict) else None
    if not isinstance(models, dict) or len(told) != 1:
        raise UsageError(f"--models {path}: has one key, `models`, with a mapping: {{NAME: {{model: FOLDER}}}}")
    found: dict[str, Mapping[str, Any]] = {}
    for name, fields in models.items():
        if name in (None, "") or not isinstance(fields, dict | None) or not str(name).isprintable() or '"' in str(name):
            raise UsageError(f"{path}: models: {name!r} is {fields!r}; write NAME: {{model: FOLDER}}")
        found[str(name)] = fields or {}
    return found


def _in_folder(path: str | None, tell: Callable[[str], None]) -> dict[str, Mapping[str, Any]]:
    """Each GGUF file, and each folder with a model in it, by its name."""
    if path is None:
        return {}
    try:
        paths = sorted(each for each in Path(path).expanduser().iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise UsageError(f"--models-dir {path}: {error.strerror}; give a folder of models") from None
    found: dict[str, Mapping[str, Any]] = {}
    for each in paths:
        if each.suffix == ".gguf":  # of a split one any part
            found.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", each.stem), {"model": str(each)})
        elif (each / "config.json").is_file() or any(each.glob("*.gguf")):
            found[each.name] = {"model": str(each)}
        elif each.is_dir():
            tell(f"models  {each} is left out: it has no config.json and no .gguf file")
    return found


def _model(
    name: str, fields: Mapping[str, Any], memory_bytes: int, words: Sequence[str], tell: Callable[[str], None]
) -> FleetModel:
    where = f"models: {name}"
    try:
        own = msgspec.convert({key: fields[key] for key in _Own.__struct_fields__ if key in fields}, _Own)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}") from None
    has_tensors = fields.get("model_repository") is not None
    names = () if has_tensors else (name, *own.aliases)
    starts = [
        str(fields.get("model") or (NO_MODEL if has_tensors else name)),
        *_words({key: value for key, value in fields.items() if key not in (*_Own.__struct_fields__, "model")}, where),
        *(word for each in names for word in ("--served-model-name", each)),
    ]
    try:
        options = serve.COMMAND.parse([*words, *starts], environ={})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    tensor_models: Iterable[str] = ()
    if has_tensors:
        from maitred.tensor.repository_files import scan

        tensor_models = scan(Path(str(options[TensorConfig].model_repository)))
    needed, kv_bytes = _needed(options, memory_bytes, name, tell)
    if kv_bytes is not None:
        starts += ["--kv-cache-memory-bytes", str(kv_bytes)]
    return FleetModel(
        name=name,
        names=(*own.aliases, *options[LoraConfig].lora, *tensor_models),
        aliases=tuple(own.aliases),
        words=(*words, *starts),
        memory_bytes=needed,
        pinned=own.pinned,
        keep_alive_s=bounded(own.keep_alive_s),
    )


def _words(fields: Mapping[str, Any], where: str) -> list[str]:
    """Flags of `maitred serve` for keys of its config file. Raises UsageError."""
    flags = {key: flag for flag in serve.COMMAND.flags() for key in (flag.field, flag.key.replace("-", "_"))}
    words: list[str] = []
    for key, value in fields.items():
        flag = flags.get(str(key).replace("-", "_"))
        if flag is None:
            raise UsageError(f"{where}: no option {key!r}{did_you_mean(str(key), (*flags, *_Own.__struct_fields__))}")
        if flag.field in OF_ROUTER:
            raise UsageError(f"{where}: {key} is the router's; give it to `maitred route`, or leave it out")
        try:
            words += [] if value is None else given_words(flag, typed(flag, value))
        except (ValueError, UsageError):
            raise UsageError(f"{where}: {key} is {value!r}; it must be {flag.kind.form}") from None
    return words


def given_words(flag: Flag, value: Any) -> list[str]:
    """A flag with its value, as it is typed."""
    if flag.kind is FlagKind.SWITCH:
        return [flag.name if value else f"--no-{flag.key}"]
    if flag.kind is FlagKind.MAPPING:
        from json import dumps

        texts = {key: each if isinstance(each, str) else dumps(each) for key, each in value.items()}
        return [f"{flag.name}={key}={text}" for key, text in texts.items()]
    return [f"{flag.name}={each}" for each in (value if flag.kind is FlagKind.LIST else (value,))]


def _needed(options: Options, memory_bytes: int, name: str, tell: Callable[[str], None]) -> tuple[int, int | None]:
    """Bytes of weights and KV by the engine's own memory plan, and those of KV where it is free to choose. What cannot
    be planned counts as nothing until it has told: its load says what is wrong with it.
    """
    repository = options[TensorConfig].model_repository
    files_of_tensors = Path(repository).rglob("*") if repository is not None else ()
    tensor_bytes = sum(path.stat().st_size for path in files_of_tensors if path.is_file())
    if options[ModelConfig].model == NO_MODEL:
        return tensor_bytes, None
    from maitred.engine.planning import plan_engine
    from maitred.model.checkpoint import open_checkpoint

    try:
        config = serve.served_config(options)
        available_bytes = int(memory_bytes / (1 - RESERVE_SHARE))
        config = replace(config, share=replace(config.share, available_bytes=available_bytes))
        with ExitStack() as files:
            checkpoint = files.enter_context(open_checkpoint(config.model.model, config.model.revision))
            plan = plan_engine(config, checkpoint, lambda line: None, files).memory
    except OutOfMemory as error:
        raise ConfigError(f"model {name}: {error}; models may take {format_bytes(memory_bytes)}") from None
    except (MaitredError, OSError) as error:
        tell(f"models  {name} cannot be planned: {error}")
        return tensor_bytes, None
    kv_bytes, is_free = plan.kv_bytes, config.cache.kv_cache_memory_bytes is None
    if is_free:
        kv_bytes = min(kv_bytes, max(int(kv_bytes / max(1.0, plan.num_full_contexts)), memory_bytes // KV_SHARE))
    state_bytes = plan.states.num_bytes if plan.states is not None else 0
    buffer_bytes = max(0, available_bytes - plan.available_bytes)
    needed = plan.weights_bytes + state_bytes + kv_bytes + buffer_bytes + tensor_bytes
    tell(f"models  {name} takes {format_bytes(needed)}, {format_bytes(kv_bytes)} of it for KV")
    return needed, kv_bytes if is_free else None

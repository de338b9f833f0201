"""Several models behind one address: `--models FILE` and `--models-dir`, each with its words of `maitred serve` and its
memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from maitred.cli import serve
from maitred.cli.command import Options, typed
from maitred.cli.flags import Flag, FlagKind, UsageError
from maitred.config import NO_MODEL, LoraConfig, ModelConfig, TensorConfig
from maitred.core.errors import ConfigError, MaitredError, OutOfMemory, did_you_mean
from maitred.engine.memory import RESERVE_SHARE, available_memory_bytes, format_bytes
from maitred.fleet.swapping import FleetModel, ModelSet, bounded

MODELS_SHARE = 0.8  # of the available memory, for weights and KV of loaded models: their processes need some beside
KV_SHARE = 8  # of that memory, as its part, is the KV cache of a model whose size is not given, or one full context
OWN_KEYS = ("aliases", "pinned", "keep_alive_s")
OF_ROUTER = ("host", "port", "announce_fd", "config", "debug", "served_model_names", "fleet_token_file", "api_keys")


class Described(NamedTuple):
    """A model as a file or a folder names it."""

    where: str  # for errors
    fields: Mapping[str, Any]


class Several(NamedTuple):
    """Models, and the words of `maitred serve` that start each."""

    models: ModelSet
    words: Mapping[str, tuple[str, ...]]


def read_several(
    file: str | None,
    folder: str | None,
    memory_bytes: int | None,
    words: Sequence[str],
    tell: Callable[[str], None],
) -> Several:
    """`words` are for `maitred serve` too, before each model's own. Raises UsageError, and ConfigError for a model that
    memory can never hold.
    """
    if memory_bytes is None:
        memory_bytes = int(MODELS_SHARE * available_memory_bytes())
    described = {**_in_folder(folder, tell), **_in_file(file)}
    if not described:
        raise UsageError(f"no model is in {file or folder}; write models: {{NAME: {{model: FOLDER}}}}")
    found, starts = list[FleetModel](), dict[str, tuple[str, ...]]()
    for name, each in described.items():
        model, starts[name] = _model(name, each, memory_bytes, words, tell)
        found.append(model)
    several = ModelSet(tuple(found), memory_bytes)
    several.check()
    return Several(several, starts)


def _in_file(path: str | None) -> dict[str, Described]:
    if path is None:
        return {}
    from maitred.storage.key_files import parsed_yaml

    try:
        told = parsed_yaml(Path(path).read_text(encoding="utf-8"), Path(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--models {path}: {getattr(error, 'strerror', None) or error}; give a YAML file") from None
    models = told.get("models") if isinstance(told, dict) else None
    if not isinstance(models, dict) or len(told) != 1:
        raise UsageError(
            f"--models {path}: has one key, `models`, with a mapping of names: {{NAME: {{model: FOLDER}}}}"
        )
    found = {}
    for name, fields in models.items():
        if name in (None, "") or not isinstance(fields, dict | None) or not str(name).isprintable() or '"' in str(name):
            raise UsageError(f"{path}: models: {name!r} is {fields!r}; write NAME: {{model: FOLDER}}")
        found[str(name)] = Described(f"{path}: models: {name}", fields or {})
    return found


def _in_folder(path: str | None, tell: Callable[[str], None]) -> dict[str, Described]:
    """Each GGUF file, and each folder with a model in it, by its name."""
    if path is None:
        return {}
    try:
        paths = sorted(each for each in Path(path).expanduser().iterdir() if not each.name.startswith("."))
    except OSError as error:
        raise UsageError(f"--models-dir {path}: {error.strerror}; give a folder of models") from None
    found: dict[str, Described] = {}
    for each in paths:
        if each.suffix == ".gguf":  # of a split one any part
            found.setdefault(re.sub(r"-\d{5}-of-\d{5}$", "", each.stem), Described(str(each), {"model": str(each)}))
        elif (each / "config.json").is_file() or any(each.glob("*.gguf")):
            found[each.name] = Described(str(each), {"model": str(each)})
        elif each.is_dir():
            tell(f"models  {each} is left out: it has no config.json and no .gguf file")
    return found


def _model(
    name: str, described: Described, memory_bytes: int, words: Sequence[str], tell: Callable[[str], None]
) -> tuple[FleetModel, tuple[str, ...]]:
    where, fields = described
    own = {key: fields[key] for key in OWN_KEYS if key in fields}
    aliases = own.get("aliases") or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise UsageError(f"{where}: aliases is {aliases!r}; it must be a list of names")
    keep_alive_s, pinned = own.get("keep_alive_s"), own.get("pinned", False)
    if not isinstance(pinned, bool) or type(keep_alive_s) not in (int, float, type(None)):
        raise UsageError(f"{where}: pinned is true or false, and keep_alive_s a number of seconds; correct {own}")
    tensors = fields.get("model_repository")
    model = fields.get("model") or (NO_MODEL if tensors is not None else name)
    ours = [
        str(model),
        *_words({key: value for key, value in fields.items() if key not in (*OWN_KEYS, "model")}, where),
    ]
    starts = [*ours, *(word for each in (name, *aliases) if tensors is None for word in ("--served-model-name", each))]
    try:
        options = serve.COMMAND.parse([*words, *starts], environ={})
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    names = dict.fromkeys((*aliases, *options[LoraConfig].lora, *_tensor_models(options)))
    needed, kv_bytes = _needed(options, memory_bytes, name, tell)
    if kv_bytes is not None:
        starts += ["--kv-cache-memory-bytes", str(kv_bytes)]
    found = FleetModel(
        name=name,
        names=tuple(names),
        aliases=tuple(aliases),
        memory_bytes=needed,
        pinned=pinned,
        keep_alive_s=bounded(keep_alive_s),
    )
    return found, (*words, *starts)


def _words(fields: Mapping[str, Any], where: str) -> list[str]:
    """Flags of `maitred serve` for keys of its config file. Raises UsageError."""
    flags = {key: flag for flag in serve.COMMAND.flags() for key in (flag.field, flag.key.replace("-", "_"))}
    words: list[str] = []
    for key, value in fields.items():
        flag = flags.get(str(key).replace("-", "_"))
        if flag is None:
            raise UsageError(f"{where}: no option {key!r}{did_you_mean(str(key), (*flags, *OWN_KEYS))}")
        if flag.field in OF_ROUTER:
            raise UsageError(f"{where}: {key} is the router's; give it to `maitred route`, or leave it out")
        if value is None:
            continue
        try:
            words += given_words(flag, typed(flag, value))
        except (ValueError, UsageError):
            raise UsageError(f"{where}: {key} is {value!r}; it must be {flag.kind.form}") from None
    return words


def given_words(flag: Flag, value: Any) -> list[str]:
    """A flag with its value, as it is typed."""
    if flag.kind is FlagKind.SWITCH:
        return [flag.name if value else f"--no-{flag.key}"]
    if flag.kind is FlagKind.MAPPING:
        from json import dumps

        pairs = ((key, each if isinstance(each, str) else dumps(each)) for key, each in value.items())
        return [f"{flag.name}={key}={each}" for key, each in pairs]
    return [f"{flag.name}={each}" for each in (value if flag.kind is FlagKind.LIST else (value,))]


def _tensor_models(options: Options) -> list[str]:
    repository = options[TensorConfig].model_repository
    if repository is None:
        return []
    from maitred.tensor.repository_files import scan

    return list(scan(Path(repository)))


def _needed(options: Options, memory_bytes: int, name: str, tell: Callable[[str], None]) -> tuple[int, int | None]:
    """Bytes of weights and KV by the engine's own memory plan, and those of KV where it is free to choose. What cannot
    be planned counts as nothing until it has told: its load says what is wrong with it.
    """
    repository = options[TensorConfig].model_repository
    tensor_bytes = (
        0 if repository is None else sum(p.stat().st_size for p in Path(repository).rglob("*") if p.is_file())
    )
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
    states = plan.states.num_bytes if plan.states is not None else 0
    kv_bytes = plan.kv_bytes
    if config.cache.kv_cache_memory_bytes is None:
        one = int(kv_bytes / max(1.0, plan.num_full_contexts))
        kv_bytes = min(kv_bytes, max(one, memory_bytes // KV_SHARE))
    buffers = available_bytes - plan.available_bytes
    needed = plan.weights_bytes + states + kv_bytes + max(0, buffers) + tensor_bytes
    tell(f"models  {name} takes {format_bytes(needed)}, {format_bytes(kv_bytes)} of it for KV")
    return needed, kv_bytes if config.cache.kv_cache_memory_bytes is None else None

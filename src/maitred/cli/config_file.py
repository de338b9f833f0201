"""`--config file.yaml`: keys are long flag names, values have the flag's type, and every slip names its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from maitred.cli.command import UsageError, what_was_meant
from maitred.cli.flags import Flag, from_yaml


def read_config_file(path: str, flags: Sequence[Flag]) -> dict[str, object]:
    """Field -> value. Raises UsageError with file, line and key."""
    root = _read(path)
    if root is None:
        return {}
    if not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: holds no keys; write lines such as `port: 8000`")
    by_key = {flag.key: flag for flag in flags if flag.key not in ("config", "help")}
    values: dict[str, object] = {}
    for key_node, value_node in root.value:
        where = f"{path}:{key_node.start_mark.line + 1}"
        key = str(key_node.value).replace("_", "-")
        flag = by_key.get(key) or _by_field(key, flags)
        if flag is None:
            meant = what_was_meant(f"--{key}", [flag.name for flag in by_key.values()])
            meant = meant.replace("did you mean --", "did you mean ")  # here a key
            raise UsageError(f"{where}: no option {key_node.value!r}{meant}")
        if flag.field in values:
            raise UsageError(f"{where}: {key_node.value!r} stands twice; keep one")
        values[flag.field] = _value(where, flag, value_node)
    return values


def _by_field(key: str, flags: Sequence[Flag]) -> Flag | None:
    """Lists may go by their plural: `api-keys` as well as `api-key`."""
    return next((flag for flag in flags if flag.field.replace("_", "-") == key and key != "config"), None)


def _value(where: str, flag: Flag, node: yaml.Node) -> object:
    value: Any = None
    try:
        value = _Constructor().construct_document(node)
        return from_yaml(flag, value)
    except (ValueError, yaml.YAMLError):
        raise UsageError(f"{where}: {flag.key} is {value!r}; it must be {flag.kind.value}") from None


class _Constructor(yaml.constructor.SafeConstructor):
    """YAML's safe types only: no objects, no code."""


def _read(path: str) -> yaml.Node | None:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: is not UTF-8 text; give a YAML file") from None
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: is not valid YAML: {error.problem}") from None

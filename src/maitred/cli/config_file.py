"""`--config file.yaml`: keys are long flag names, values have the flag's type, and every slip names its line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from maitred.cli.flags import Flag, FlagKind, UsageError
from maitred.engine.foreign import what_was_meant


def read_config_file(path: str, flags: Sequence[Flag]) -> dict[str, object]:
    """Field -> value. Raises UsageError with file, line and key."""
    # lists may go by their plural: `api-keys` as well as `api-key`
    by_key = {key: f for f in flags if f.field != "config" for key in (f.field.replace("_", "-"), f.key)}
    values: dict[str, object] = {}
    for key_node, value_node in _entries(path):
        where, key = f"{path}:{key_node.start_mark.line + 1}", str(key_node.value).replace("_", "-")
        if key not in by_key:
            meant = what_was_meant(f"--{key}", [flag.name for flag in by_key.values()])
            meant = meant.replace("did you mean --", "did you mean ")  # here a key
            raise UsageError(f"{where}: no option {key_node.value!r}{meant}")
        flag, value = by_key[key], None
        if flag.field in values:
            raise UsageError(f"{where}: {key_node.value!r} stands twice; keep one")
        try:
            value = yaml.constructor.SafeConstructor().construct_document(value_node)  # no objects, no code
            if value is not None:  # null leaves the default
                values[flag.field] = _typed(flag, value)
        except (ValueError, UsageError, yaml.YAMLError) as error:
            is_worded = flag.env is not None and isinstance(error, UsageError)  # of a key
            told = str(error) if is_worded else f"{flag.key} is {value!r}; it must be {flag.kind.form}"
            raise UsageError(f"{where}: {told}") from None
    return values


def _typed(flag: Flag, value: Any) -> object:
    """The flag's value from what YAML read. Raises ValueError and UsageError."""
    if flag.kind in (FlagKind.SWITCH, FlagKind.MAPPING):
        return _require(value, bool if flag.kind is FlagKind.SWITCH else dict)
    if flag.kind is FlagKind.LIST and isinstance(value, list):
        return tuple(word for item in value for word in flag.parse(str(_require(item, str, int, float))))
    return flag.join(flag.parse(str(_require(value, str, int, float))))


def _require(value: object, *kinds: type) -> object:
    if type(value) not in kinds:  # a bool is an int to Python, a slip to us
        raise ValueError(value)
    return value


def _entries(path: str) -> list[tuple[yaml.Node, yaml.Node]]:
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UsageError(f"--config {path}: {error.strerror}; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UsageError(f"--config {path}: is not UTF-8 text; give a YAML file") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UsageError(f"{path}:{line}: is not valid YAML: {error.problem}") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise UsageError(f"{path}: holds no keys; write lines such as `port: 8000`")
    return root.value if root is not None else []

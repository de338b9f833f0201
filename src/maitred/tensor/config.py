"""ModelConfig of Triton: read from `config.pbtxt` (protobuf text), told as JSON, and as the tensors it declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from maitred.core.errors import CheckpointError, did_you_mean
from maitred.tensor.config_fields import DATA_TYPES, SCHEMA, ModelConfig
from maitred.tensor.schema import marked_fields

# Without this package maitred.tensor.schema has raised already.
from google.protobuf import json_format, text_format  # isort: skip

MOST_BYTES = 4 << 20  # of a config.pbtxt; the largest of Triton's own are under 100 kB
MOST_OF_REASON = 300  # characters; the parser quotes what it could not read
WILDCARD = -1  # a dimension of any length
ANY_MESSAGE = Any  # protobuf makes its classes at run time; this one is a ModelConfig

_TYPE_NAMES = {number: name for name, number in DATA_TYPES.items()}
_NO_FIELD = re.compile(r'Message type "inference\.(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output as the config declares it. `dims` are without the batch; -1 is any length."""

    name: str
    data_type: str  # TYPE_FP32
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None  # what the model itself takes or gives, where that differs
    optional: bool = False

    @property
    def model_dims(self) -> tuple[int, ...]:
        return self.dims if self.reshape is None else self.reshape


def parse_config(content: bytes, source: str) -> ANY_MESSAGE:
    """The ModelConfig of a `config.pbtxt`. Raises CheckpointError with file, line and column."""
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{source} has over {MOST_BYTES} bytes, which no config has")
    config = ModelConfig()
    try:
        text_format.Parse(_decoded(content, source), config)
    except text_format.ParseError as error:
        place = f":{error.GetLine()}:{error.GetColumn()}" if error.GetLine() else ""
        raise CheckpointError(f"{source}{place}: {_reason(str(error))}") from None
    except (ValueError, RecursionError) as error:  # a string that is no UTF-8, or far too many brackets
        raise CheckpointError(f"{source}: {error}") from None
    return config


def config_from_json(text: str, name: str) -> ANY_MESSAGE:
    """The ModelConfig of a request to load the model `name`. Raises CheckpointError."""
    try:
        return json_format.Parse(text, ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        reason = " ".join(str(error).split())[:MOST_OF_REASON]
        raise CheckpointError(f"the config given for {name!r} is no ModelConfig: {reason}") from None


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise CheckpointError(f"{source}:{line}:{column}: byte 0x{content[error.start]:02x} is no UTF-8") from None


def _reason(error: str) -> str:
    """Return the reason without position and line, which are told before it; in our words for an unknown name."""
    text = re.sub(r"^\d+:\d+ : (?:'.*?': (?=[A-Z]))?", "", error, flags=re.DOTALL).rstrip(".")[:MOST_OF_REASON]
    unknown = _NO_FIELD.search(text)
    if unknown is None:
        return text
    message, name = unknown["message"], unknown["field"]
    names = [field.name for field in SCHEMA.messages[message]]
    return f"{message} has no field {name!r}{did_you_mean(name, names)}"


def hints(config: ANY_MESSAGE) -> tuple[str, ...]:
    """Fields that are set and ignored, each with why that changes no answer."""
    return tuple(f"{where}: {line.note}" for where, line in marked_fields(SCHEMA, config) if line.mark == "~")


def refusals(config: ANY_MESSAGE) -> tuple[str, ...]:
    """Fields that are set, would change answers, and are not built."""
    return tuple(
        f"{where} is not supported: {line.note}" for where, line in marked_fields(SCHEMA, config) if line.mark == "!"
    )


def inputs_of(config: ANY_MESSAGE) -> tuple[TensorSpec, ...]:
    return tuple(_spec(each, optional=each.optional) for each in config.input)


def outputs_of(config: ANY_MESSAGE) -> tuple[TensorSpec, ...]:
    return tuple(_spec(each, optional=False) for each in config.output)


def _spec(each: ANY_MESSAGE, *, optional: bool) -> TensorSpec:
    reshape = tuple(each.reshape.shape) if each.HasField("reshape") else None
    return TensorSpec(each.name, type_name(each.data_type), tuple(each.dims), reshape, optional)


def type_name(number: int) -> str:
    """`TYPE_FP32` of 11; a number that no type has is told as it is."""
    return _TYPE_NAMES.get(number, str(number))


def parameters_of(config: ANY_MESSAGE) -> dict[str, str]:
    """The model's `parameters`, in the order of their names."""
    return {key: config.parameters[key].string_value for key in sorted(config.parameters)}


# ---- as JSON

Fields = Callable[[ANY_MESSAGE], Iterable[tuple[Any, Any]]]


def written(config: ANY_MESSAGE) -> dict[str, Any]:
    """The fields that are set, as JSON has them: enums by name, numbers as numbers."""
    return _json(config, lambda message: message.ListFields())


def complete(config: ANY_MESSAGE) -> dict[str, Any]:
    """All fields, as Triton answers for a model's config: only messages that are not set are left out."""
    return _json(config, _all_fields)


def _all_fields(message: ANY_MESSAGE) -> Iterable[tuple[Any, Any]]:
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            yield field, getattr(message, field.name)


def _json(message: ANY_MESSAGE, fields: Fields) -> dict[str, Any]:
    return {field.name: _json_field(field, value, fields) for field, value in fields(message)}


def _json_field(field: Any, value: Any, fields: Fields) -> Any:
    if isinstance(value, Mapping):
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _json_value(inner, value[key], fields) for key in value}
    if field.is_repeated:
        return [_json_value(field, each, fields) for each in value]
    return _json_value(field, value, fields)


def _json_value(field: Any, value: Any, fields: Fields) -> Any:
    if field.message_type is not None:
        return _json(value, fields)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value

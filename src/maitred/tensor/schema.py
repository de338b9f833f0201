"""Protobuf schemas as text: a table of messages, fields and numbers becomes message classes, without generated code.

    enum Kind                       a name on a line of its own opens an enum or a message; dots nest them
      0 KIND_AUTO
    message Group
      = 4 Kind kind                 what is done with the field, its number, type and name
      ! 3 int32* gpus -- why        a repeated field, and a note
      ~ 5 {string:Value} values     a map
      = 1 bool zero @data           a member of the oneof `data`

The mark may be left out. Types are scalars, or the whole dotted name of a message or an enum of the table. Classes
live in a descriptor pool of their own, so that they never meet those of another package with the same names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from maitred.core.errors import ConfigError


def missing(package: str) -> ConfigError:
    """Return the error to be raised in place of the ImportError of `package`."""
    return ConfigError(f"tensor models need the package {package}; install it with: pip install 'maitred[tensor]'")


try:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
except ImportError:
    raise missing("protobuf") from None

_FIELD = re.compile(
    r"(?:(?P<mark>[=~!]) +)?(?P<number>\d+) +(?:\{(?P<key>\w+):)?(?P<type>[\w.]+)\}?(?P<repeated>\*)?"
    r" +(?P<name>\w+)(?: +@(?P<oneof>\w+))?(?: +-- (?P<note>.*))?"
)
_PROTO = descriptor_pb2.FieldDescriptorProto


@dataclass(frozen=True, slots=True)
class Field:
    """A line of a table."""

    message: str
    name: str
    number: int
    type: str
    repeated: bool
    key: str | None  # the type of a map's keys
    oneof: str | None
    mark: str
    note: str


@dataclass(frozen=True, slots=True)
class Schema:
    """A table that was read: fields by their message, and the values of enums by name."""

    package: str
    messages: dict[str, list[Field]] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)

    def full_name(self, name: str) -> str:
        return f"{self.package}.{name}"


def read_schema(package: str, table: str) -> Schema:
    schema, opened = Schema(package), ("", "")
    for line in filter(None, map(str.strip, table.splitlines())):
        head, _, name = line.partition(" ")
        if head == "message":
            opened, schema.messages[name] = (head, name), []
        elif head == "enum":
            opened, schema.enums[name] = (head, name), {}
        elif opened[0] == "enum":
            schema.enums[opened[1]][name] = int(head)
        else:
            schema.messages[opened[1]].append(_field(opened[1], line))
    return schema


def _field(message: str, line: str) -> Field:
    found = _FIELD.fullmatch(line)
    assert found is not None, line
    says = found.groupdict()
    return Field(
        message=message,
        name=says["name"],
        number=int(says["number"]),
        type=says["type"],
        repeated=bool(says["repeated"] or says["key"]),
        key=says["key"],
        oneof=says["oneof"],
        mark=says["mark"] or "",
        note=says["note"] or "",
    )


def message_classes(schema: Schema) -> Mapping[str, Any]:
    """Message classes of protobuf, by their names in the table."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"maitred/{schema.package}.proto", package=schema.package, syntax="proto3"
    )
    made: dict[str, Any] = {}
    for name in schema.messages:
        parent, _, own = name.rpartition(".")
        made[name] = (made[parent].nested_type if parent else file.message_type).add(name=own)
    for name, values in schema.enums.items():
        parent, _, own = name.rpartition(".")
        enum = (made[parent] if parent else file).enum_type.add(name=own)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    for name, fields in schema.messages.items():
        for each in fields:
            _add_field(schema, made[name], each)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    found = (pool.FindMessageTypeByName(schema.full_name(name)) for name in schema.messages)
    return dict(zip(schema.messages, map(message_factory.GetMessageClass, found), strict=True))


def _add_field(schema: Schema, message: Any, field: Field) -> None:
    added = message.field.add(name=field.name, number=field.number)
    added.label = _PROTO.LABEL_REPEATED if field.repeated else _PROTO.LABEL_OPTIONAL
    if field.key is not None:
        entry = message.nested_type.add(name="".join(map(str.capitalize, field.name.split("_"))) + "Entry")
        entry.options.map_entry = True
        for number, (name, kind) in enumerate((("key", field.key), ("value", field.type)), 1):
            _set_type(schema, entry.field.add(name=name, number=number, label=_PROTO.LABEL_OPTIONAL), kind)
        added.type, added.type_name = _PROTO.TYPE_MESSAGE, f".{schema.full_name(field.message)}.{entry.name}"
        return
    _set_type(schema, added, field.type)
    if field.oneof is not None:
        added.oneof_index = _oneof(message, field.oneof)


def _set_type(schema: Schema, field: Any, kind: str) -> None:
    if kind in schema.messages or kind in schema.enums:
        field.type = _PROTO.TYPE_MESSAGE if kind in schema.messages else _PROTO.TYPE_ENUM
        field.type_name = f".{schema.full_name(kind)}"
    else:
        field.type = _PROTO.Type.Value(f"TYPE_{kind.upper()}")


def _oneof(message: Any, name: str) -> int:
    """The index of a oneof, which is made when its first member comes."""
    names = [each.name for each in message.oneof_decl]
    if name not in names:
        message.oneof_decl.add(name=name)
        return len(names)
    return names.index(name)


def marked_fields(schema: Schema, message: Any, path: str = "") -> Iterator[tuple[str, Field]]:
    """Each field that is set in a message, outermost first, and where it stands; those marked `=` are gone into."""
    name = message.DESCRIPTOR.full_name.removeprefix(f"{schema.package}.")
    lines = {line.name: line for line in schema.messages[name]}
    for descriptor, value in message.ListFields():
        line, where = lines[descriptor.name], f"{path}{descriptor.name}"
        yield where, line
        if line.mark == "=" and line.type in schema.messages:
            for at, inner in _members(line, value):
                yield from marked_fields(schema, inner, f"{where}{at}.")


def _members(line: Field, value: Any) -> Iterator[tuple[str, Any]]:
    if line.key is not None:
        return ((f"[{key}]", inner) for key, inner in value.items())
    if line.repeated:
        return ((f"[{at}]", inner) for at, inner in enumerate(value))
    return iter([("", value)])

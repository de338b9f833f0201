"""config.pbtxt: what is read, where an error is, what is told."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("google.protobuf", reason="the extra tensor brings it")

from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st

from maitred.core.errors import CheckpointError
from maitred.tensor.config import (
    SCHEMA,
    ModelConfig,
    complete,
    hints,
    inputs_of,
    outputs_of,
    parameters_of,
    parse_config,
    refusals,
    written,
)
from scripts.config_page import with_fields

RANKER = """
# a ranker, as its owner wrote it
platform: "onnxruntime_onnx"
max_batch_size: 32
input [
  { name: "ids" data_type: TYPE_INT64 dims: [ -1 ] },
  { name: "flag", data_type: TYPE_BOOL, dims: 1, reshape { shape: [ ] } }
]
output { name: "score" data_type: TYPE_FP32 dims: [ 1 ] label_filename: 'labels.txt' }
dynamic_batching <
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 500;
  default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 0x3E8 }
>
parameters [ { key: "label.stable" value: { string_value: "1" "2" } } ]
optimization { cuda { graphs: true } graph { level: -1 } }
instance_group [ { count: 2 kind: KIND_CPU }, { kind: 2 } ]
"""


def parse(text: str):
    return parse_config(text.encode(), "config.pbtxt")


def test_every_spelling_of_protobuf_text_is_read():
    config = parse(RANKER)
    assert [(spec.name, spec.data_type, spec.dims) for spec in inputs_of(config)] == [
        ("ids", "TYPE_INT64", (-1,)),
        ("flag", "TYPE_BOOL", (1,)),
    ]
    assert [spec.model_dims for spec in inputs_of(config)] == [(-1,), ()]
    assert outputs_of(config)[0].name == "score"
    assert list(config.dynamic_batching.preferred_batch_size) == [8, 16]
    assert config.dynamic_batching.default_queue_policy.default_timeout_microseconds == 1000
    assert parameters_of(config) == {"label.stable": "12"}
    assert config.instance_group[1].kind == config.instance_group[0].kind


def test_written_is_what_stands_there_and_complete_is_all():
    config = parse('name: "m" input { name: "x" data_type: TYPE_INT64 dims: -1 } sequence_batching { direct { } }')
    assert written(config) == {
        "name": "m",
        "input": [{"name": "x", "data_type": "TYPE_INT64", "dims": [-1]}],
        "sequence_batching": {"direct": {}},
    }
    told = complete(config)
    assert told["max_batch_size"] == 0
    assert told["parameters"] == {}
    assert told["input"][0]["format"] == "FORMAT_NONE"
    assert told["sequence_batching"]["direct"] == {"max_queue_delay_microseconds": 0, "minimum_slot_utilization": 0.0}
    assert "dynamic_batching" not in told
    assert "reshape" not in told["input"][0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            'name: "a"\n  max_batch_sizes: 3',
            "config.pbtxt:2:3: ModelConfig has no field 'max_batch_sizes' (did you mean",
        ),
        ("input [\n {\n dims: [ 1, x ] } ]", "config.pbtxt:3:13: Couldn't parse integer: x"),
        ("max_batch_size: 99999999999", "config.pbtxt:1:17: Value out of range"),
        (
            'name: "a"\nname: "b"',
            'config.pbtxt:2:7: Message type "inference.ModelConfig" should not have multiple "name"',
        ),
        ("input { data_type: TYPE_FLOAT }", 'config.pbtxt:1:20: Enum type "inference.DataType" has no value named'),
        ("dynamic_batching { }\nsequence_batching { }", "config.pbtxt:2:1: Field"),
        ('name: "open', "config.pbtxt:1:7: String missing ending quote"),
        ("input { input { } }", "config.pbtxt:1:9: ModelInput has no field 'input'"),
        ("dynamic_batching {", "config.pbtxt:1:18: Expected"),
        ("{" * 100_000, "config.pbtxt:1:1"),
    ],
)
def test_an_error_tells_file_line_and_column(text: str, told: str):
    with pytest.raises(CheckpointError) as error:
        parse(text)
    assert str(error.value).startswith(told)
    assert len(str(error.value)) < 400


def test_bytes_that_are_no_text_and_a_file_that_is_too_long_are_refused():
    with pytest.raises(CheckpointError, match=r"config.pbtxt:2:8: byte 0xff is no UTF-8"):
        parse_config(b'name: "a"\nbackend\xff', "config.pbtxt")
    with pytest.raises(CheckpointError, match="has over 4194304 bytes"):
        parse_config(b" " * 5_000_000, "config.pbtxt")


def test_hints_are_told_and_what_changes_answers_is_named():
    config = parse(RANKER + "model_transaction_policy { decoupled: true } input { allow_ragged_batch: true }")
    assert [hint.partition(":")[0] for hint in hints(config)] == ["optimization.cuda"]
    assert [refusal.partition(" ")[0] for refusal in refusals(config)] == [
        "input[2].allow_ragged_batch",
        "model_transaction_policy.decoupled",
    ]
    assert refusals(parse("model_transaction_policy { decoupled: false }")) == ()


def test_every_field_of_the_table_says_what_is_done_with_it():
    for fields in SCHEMA.messages.values():
        for field in fields:
            assert field.mark in ("=", "~", "!"), field
            assert len({each.number for each in fields}) == len(fields)


# ---- generated configs

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=6)
RANGES = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint32": st.integers(0, 2**32 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "bool": st.booleans(),
    "string": TEXTS,
    "double": st.floats(allow_nan=False),
    "float": st.floats(width=32, allow_nan=False),
}


@st.composite
def messages(draw, name: str = "ModelConfig"):
    """A dict of some fields of a message of the table, with values of the right kind."""
    fields, chosen, taken = SCHEMA.messages[name], {}, set()
    for field in draw(st.lists(st.sampled_from(fields), max_size=4, unique_by=lambda f: f.name)) if fields else []:
        if field.oneof is not None and field.oneof in taken:
            continue
        taken.add(field.oneof)
        chosen[field.name] = draw(values(field))
    return chosen


def values(field):
    one = single(field.type)
    if field.key is not None:
        return st.dictionaries(RANGES[field.key], one, max_size=2)
    return st.lists(one, max_size=3) if field.repeated else one


def single(kind: str):
    if kind in SCHEMA.messages:
        return messages(kind)
    return st.sampled_from(sorted(SCHEMA.enums[kind])) if kind in SCHEMA.enums else RANGES[kind]


@settings(max_examples=75, deadline=None)
@given(messages(), st.booleans(), st.booleans())
def test_a_generated_config_is_read_as_it_was_written(fields, one_line, short):
    config = ModelConfig(**fields)
    text = text_format.MessageToString(config, as_utf8=True, as_one_line=one_line, use_short_repeated_primitives=short)
    again = parse(text)
    assert again == config
    assert ModelConfig(**from_json(written(again))) == config
    assert complete(again).keys() >= written(again).keys()
    assert all(isinstance(line, str) for line in (*hints(again), *refusals(again)))


def from_json(config: dict, name: str = "ModelConfig") -> dict:
    """Keys of maps become numbers again where they are."""
    lines = {field.name: field for field in SCHEMA.messages[name]}
    return {key: back(lines[key], value) for key, value in config.items()}


def back(field, value):
    one = (lambda each: from_json(each, field.type)) if field.type in SCHEMA.messages else (lambda each: each)
    if field.key is not None:
        return {key if field.key == "string" else int(key): one(each) for key, each in value.items()}
    return [one(each) for each in value] if field.repeated else one(value)


def test_the_page_tells_what_is_done_with_each_field():
    page = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()
    assert with_fields(page) == page, "write it anew: scripts/config_page.py docs/tensor.md"

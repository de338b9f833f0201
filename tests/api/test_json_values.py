"""Tensors in JSON: what is decoded and written in pieces is what the json module makes of it, and no piece is long."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from maitred.api.dialects.kserve.wire import asked
from maitred.api.dialects.tfserving.rows import predict_inputs
from maitred.api.http.bodies import SMALL_BYTES
from maitred.api.tensor import json_values
from maitred.api.tensor.json_values import Numbers, array_of_json, flat_of_json, json_of_array, loaded
from maitred.core.errors import InvalidRequest
from maitred.core.tensor_request import InferRequest
from maitred.tensor.arrays import MOST_DIMS
from maitred.tensor.config import DeclaredTensor


def no_text(name, value):
    raise InvalidRequest(f"input {name!r} is of BYTES", param=name)


def apart(value, key="data"):
    """What stands under `key`."""
    return loaded(json.dumps({"before": "x", key: value, "after": [1]}).encode(), (key,))[key]


@pytest.mark.parametrize("shape", [(15_000,), (300, 50), (7000, 2), (2000, 1, 4)])
@pytest.mark.parametrize(("data_type", "kind"), [("TYPE_FP32", "f4"), ("TYPE_INT64", "i8"), ("TYPE_BOOL", "?")])
def test_numbers_in_pieces_are_those_of_the_json_module(shape, data_type, kind):
    given = (np.random.default_rng(0).standard_normal(shape) * 1e3).astype(kind)
    found = apart(given.tolist())
    assert isinstance(found, Numbers)
    assert max(map(len, json_values._pieces(found.text))) < 2 * json_values.PIECE_BYTES
    assert np.array_equal(array_of_json("x", data_type, found, no_text), given)
    assert np.array_equal(flat_of_json("x", data_type, found, no_text), given.reshape(-1))


def test_numbers_that_json_has_not_and_large_ones_are_read_as_before():
    given = [float("nan"), float("-inf"), 1e300, -0.0, 1e-7] * 20
    found = array_of_json("x", "TYPE_FP64", apart([given]), no_text)
    assert np.array_equal(found, np.array([given]), equal_nan=True)
    assert np.isinf(array_of_json("x", "TYPE_FP32", apart([1e300] * 40), no_text)).all()


@pytest.mark.parametrize(("data_type", "values"), [
    ("TYPE_INT8", [300] * 40), ("TYPE_UINT8", [-1] * 40), ("TYPE_INT32", [1.5] * 40), ("TYPE_FP32", [True] * 40),
    ("TYPE_BOOL", [0] * 80), ("TYPE_FP32", [None] * 40), ("TYPE_STRING", [1] * 80),
    ("TYPE_FP32", [[1] * 40, [1] * 41]),
])  # fmt: skip
def test_numbers_of_another_kind_are_refused_in_pieces_too(data_type, values):
    found = apart(values)
    assert isinstance(found, Numbers)
    with pytest.raises(InvalidRequest, match="x"):
        array_of_json("x", data_type, found, no_text)


def test_a_list_is_taken_in_pieces_just_when_the_json_module_takes_the_whole(monkeypatch):
    monkeypatch.setattr(json_values, "PIECE_BYTES", 8)
    dice = random.Random(0)
    whole = json.dumps([[[1, 2.5], []], [-3e2], [[4, 5], [6]]] * 8)
    for _ in range(1000):
        at, sign = dice.randrange(len(whole)), dice.choice("[],1. -e")
        text = whole[:at] + sign + whole[at + dice.randrange(2) :]
        body = f'{{"data": {text}}}'.encode()
        try:
            known = json.loads(body)["data"]
        except ValueError:
            known = None
        try:
            found = flat_of_json("x", "TYPE_FP64", loaded(body, ("data",))["data"], no_text)
        except (ValueError, InvalidRequest):
            found = None
        assert (found is None) == (known is None), text
        if known is not None:
            assert found.tolist() == flat_of_json("x", "TYPE_FP64", known, no_text).tolist(), text


def test_only_a_list_under_its_key_stands_apart():
    text = '\\"data": [' + "1," * 100 + '1] "'
    sent = {"id": text, "data": [0.5] * 100, "other": {"data": list(range(100))}, "": 0, "n": [1] * 100, "d": {"": 0}}
    found = loaded(json.dumps(sent).encode(), ("data",))
    numbers, other = found.pop("data"), found["other"].pop("data")
    assert (json.loads(numbers.text), json.loads(other.text)) == (sent.pop("data"), sent["other"].pop("data"))
    assert found == sent
    with pytest.raises(InvalidRequest, match=r"values in JSON beside .* may have 131072"):
        loaded(json.dumps({"data": [{}] * 140_000}).encode(), ("data",))


def kserve(**fields):
    head = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", **fields}], "id": "x" * SMALL_BYTES}).encode()
    (tensor,) = asked(head, len(head), InferRequest(request_id="", model="m"), None).request.inputs
    return np.frombuffer(tensor.data, np.float32)


def test_a_shape_is_bounded_before_it_is_multiplied_and_rows_with_names_are_columns():
    deep = 1.0
    for _ in range(200):
        deep = [deep]
    assert kserve(shape=[50], data=[deep] * 50).tolist() == [1.0] * 50
    for num_dims in (MOST_DIMS + 1, 100_000, 400_000):
        with pytest.raises(InvalidRequest, match=r"length <= 32|values in JSON"):
            kserve(shape=[2] * num_dims, data=[1.0])
    specs = (DeclaredTensor("a", "TYPE_FP32", (-1,)), DeclaredTensor("b", "TYPE_FP32", ()))
    rows = [{"a": [float(at)] * 100, "b": at} for at in range(100)]
    a, b = predict_inputs(json.dumps({"instances": rows}).encode(), specs).inputs
    assert (a.shape, b.shape) == ((100, 100), (100,)) if a.name == "a" else ((100,), (100, 100))
    rows[5]["a"] = rows[5]["a"] * 2
    with pytest.raises(InvalidRequest, match="'a' has rows of unlike shapes"):
        predict_inputs(json.dumps({"instances": rows}).encode(), specs)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (40_000,), (9000, 2), (2, 17_000), (2, 1, 17_000)])
def test_an_answer_in_pieces_is_that_of_one_call(shape):
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sizes = []

    def write(part):
        sizes.append(part.size)
        return json_values._json_of_numbers(part)

    assert json.loads(json_of_array(array, write)) == array.tolist()
    assert max(sizes) <= json_values.PIECE_VALUES
    if array.ndim and array.size:
        array[-1] = np.nan
        assert np.array_equal(json.loads(json_of_array(array)), array, equal_nan=True)

"""`maitred ps`: the table of models."""

from __future__ import annotations

import json
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from maitred.api.ops.live import LoadedModel
from maitred.cli.console import columns, inert
from maitred.cli.top import MODEL_HEADINGS, ago, model_row
from maitred.core.clock import ManualClock
from maitred.engine.intake import Footprint
from maitred.scheduler.engine_core import EngineCore
from tests.cli.running import maitred_process
from tests.cli.top.test_top import with_lanes
from tests.engine.worlds import client_of
from tests.fakes import FakeExecutor, make_scheduler
from tests.fakes_api import FakeReplica, make_model, running_server

HELD = Footprint(
    architecture="LlamaForCausalLM",
    num_parameters=3_836_672,
    executor="torch",
    device="cpu",
    dtype="bfloat16",
    kv_dtype="int8",
    weights_bytes=16 * 2**20,
    kv_bytes=3 * 2**30,
)


def test_ages_have_two_units():
    told = ["0 s", "0 s", "59 s", "1 min 1 s", "1 h", "1 d 1 h"]
    assert list(map(ago, (-5, 0, 59, 61, 3600, 90_061))) == [f"{words} ago" for words in told]


def test_what_is_not_known_is_a_dash_and_names_are_inert():
    model = LoadedModel(id="a\x1b[31m", aliases=(), root="a", since=100, max_model_len=4096)
    assert model_row(model, 160.0) == ("a[31m", "-", "-", "-", "-", "4,096", "-", "1 min ago")


def test_columns_line_up():
    lines = columns([("A", "BB"), ("aaaa", "b")])
    assert lines == ["A      BB", "aaaa   b"]


def test_the_table_of_a_server():
    with running_server(FakeReplica(), make_model(footprint=HELD), api_keys=("secret",)) as server:
        done = maitred_process("ps", server.url, "--api-key", "secret")
        assert done.code == 0, done.err
        head, line = done.out.splitlines()
        assert [word.strip() for word in head.split("   ") if word] == list(MODEL_HEADINGS)
        for part in (
            "tiny, tiny-alias",
            "3.8 M",
            "bfloat16, KV int8",
            "16.0 MiB",
            "3.00 GiB",
            "512",
            "torch cpu",
            "ago",
        ):
            assert part in line
        as_json = maitred_process("ps", server.url, "--json", MAITRED_API_KEY="secret")
        assert json.loads(as_json.out)["models"][0]["kv_bytes"] == 3 * 2**30
        refused = maitred_process("ps", server.url)
        assert refused.code == 1
        assert "--api-key" in refused.err


def test_lanes_of_tensor_models_stand_below_the_models():
    scheduler = with_lanes(make_scheduler())
    core = EngineCore(scheduler, FakeExecutor(), ManualClock(3.0))
    engine = client_of(core)
    with running_server(engine) as server:
        done = maitred_process("ps", server.url)
        engine.stop()
    assert done.code == 0, done.err
    told = [" ".join(line.split()) for line in done.out.splitlines()]
    assert told[2] == "LANE WAITING ROWS RUNNING ROWS/S AGE WHY"
    assert told[3].startswith("resnet 1 3 3 2 ")
    assert told[3].endswith("all instances run: 2 rows on 0")


def tensor_entry(name: str, version: int | None = None, state: str = "", reason: str = "") -> SimpleNamespace:
    told = SimpleNamespace(value=state) if state else None
    return SimpleNamespace(name=name, version=version, state=told, reason=reason)


def test_versions_of_tensor_models_are_rows_and_without_a_language_model_the_only_ones():
    replica = FakeReplica()
    replica.tensors = SimpleNamespace(
        index=lambda: [
            tensor_entry("dishes", 1, "READY"),
            tensor_entry("dishes", 2, "UNAVAILABLE", "cut off\nor no ONNX file"),
            tensor_entry("wines"),
        ]
    )
    rows = [
        "TENSOR MODEL VERSION STATE REASON",
        "dishes 1 READY",
        "dishes 2 UNAVAILABLE cut off or no ONNX file",
        "wines - NOT LOADED",
    ]
    for model, before in ((make_model(names=()), 0), (make_model(), 2)):
        with running_server(replica, model) as server:
            done = maitred_process("ps", server.url)
            assert [" ".join(line.split()) for line in done.out.splitlines()][before:] == rows, done.err


def test_another_server_is_told_apart():
    with running_server(FakeReplica()) as server:
        url = server.url
    assert "cannot reach" in maitred_process("ps", url).err


def test_what_steers_a_terminal_becomes_plain_text_and_the_rest_stays():
    assert inert("a\x1b[31mred\x07\r\x9b2J\x00z") == "a[31mred2Jz"
    assert inert("user\u202etxt.exe\u2066") == "usertxt.exe"

    for text in ("plain", "two\nlines\tand a tab", "Grüße 世界 👩‍🍳", "عربي"):
        assert inert(text) == text


@given(st.text())
def test_no_control_character_survives(text):
    assert not any(c not in {"\n", "\t"} and (ord(c) < 32 or 127 <= ord(c) < 160) for c in inert(text))

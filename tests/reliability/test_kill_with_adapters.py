"""A process is killed while requests speculate under adapters on two ranks: every stream goes on exactly."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from maitred.model.checkpoint import BUILTIN_FOLDER, open_checkpoint
from maitred.model.families import spec_from_config
from tests.conftest import ServerProcess, start_server
from tests.model.adapters import random_tensors, write_adapter
from tests.reliability.streams import Stream
from tests.reliability.test_served_engine import engine_of, on_linux
from tests.waiting import HANGS_S, is_gone, until

MODEL = "maitred-mini"
NUM_TOKENS = 400  # so many that no stream ends before the kill
pytestmark = on_linux


def asked(model: str) -> list[dict[str, Any]]:
    """Greedy and seeded."""
    common = {"model": model, "prompt": "The maître d'", "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [{**common, "temperature": 0}, {**common, "temperature": 0.8, "seed": 7}]


def calm(server: ServerProcess, body: dict[str, Any]) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def begun(server: ServerProcess, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Return when each has text."""
    streams = [Stream(server.url, body) for body in bodies]
    until(lambda: all(stream.text for stream in streams))
    return streams


def metric(server: ServerProcess, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics", timeout=HANGS_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"maitred_{name}"))


def rank_of(engine: psutil.Process) -> psutil.Process:
    return next(one for one in engine.children() if "maitred.executor.rank_process" in one.cmdline())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with open_checkpoint(str(BUILTIN_FOLDER)) as checkpoint:
        spec = spec_from_config(checkpoint.config)
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "gone")):
        write_adapter(root / name, random_tensors(spec, 4, seed=seed), rank=4, lora_alpha=1)
    return root


@pytest.fixture(scope="module")
def served(folders: Path) -> Iterator[ServerProcess]:
    adapters = [word for name in ("sql", "gone") for word in ("--lora", f"{name}={folders / name}")]
    server = start_server(*adapters, "--speculative", "draft", "--tensor-parallel", "2", "--num-threads", "1")
    yield server
    if server.process.poll() is None:
        assert server.stop() == 0


@pytest.fixture(scope="module")
def texts(served: ServerProcess) -> dict[str, list[str]]:
    """What nobody disturbed, all at once: beside others, tokens are those of a request alone."""
    models = (MODEL, "sql", "gone")
    with ThreadPoolExecutor() as pool:
        asking = {model: [pool.submit(calm, served, body) for body in asked(model)] for model in models}
        found = {model: [each.result() for each in texts] for model, texts in asking.items()}
    assert len({text for of_model in found.values() for text in of_model}) == 6, "adapters and seeds make a difference"
    for _ in range(20):  # on a machine whose steps are slow for another reason, drafts first pay later
        if metric(served, "draft_tokens_total") > 0:
            return found
        calm(served, asked(MODEL)[0])
    raise AssertionError("no request had drafts")


@pytest.mark.parametrize("victim", [pytest.param("engine", marks=pytest.mark.soak), "rank"])
def test_every_stream_goes_on_exactly(served: ServerProcess, texts: dict[str, list[str]], victim: str):
    before = metric(served, "requests_resumed_total")
    streams = begun(served, asked("sql")) + begun(served, asked(MODEL))
    engine = engine_of(served)
    rank = rank_of(engine)
    (engine if victim == "engine" else rank).kill()
    for stream in streams:
        stream.join()
    assert [(stream.errors, stream.whole) for stream in streams] == [([], True)] * 4
    assert [stream.text for stream in streams] == [*texts["sql"], *texts[MODEL]]
    assert metric(served, "requests_resumed_total") == before + 4
    until(lambda: is_gone(engine) and is_gone(rank))


def test_an_adapter_deleted_while_in_use_ends_no_other_request(served, texts, folders):
    """In memory it is used to the end. After a death it would have to be read again, and who needs it is told."""
    doomed = begun(served, asked("gone"))
    shutil.rmtree(folders / "gone")
    for stream in doomed:
        stream.join()
    assert [stream.text for stream in doomed] == texts["gone"]
    doomed, others = begun(served, asked("gone")), begun(served, [*asked(MODEL), *asked("sql")])
    engine_of(served).kill()
    for stream in (*doomed, *others):
        stream.join()
    assert [stream.text for stream in others] == [*texts[MODEL], *texts["sql"]]
    assert [stream.errors for stream in others] == [[]] * 4
    assert all("adapter gone: " in stream.errors[0]["message"] and stream.whole for stream in doomed)


def test_a_server_that_is_killed_takes_engine_and_ranks_along(served: ServerProcess):
    engine = engine_of(served)
    rank = rank_of(engine)
    served.process.kill()
    served.process.wait(HANGS_S)
    until(lambda: is_gone(engine) and is_gone(rank))

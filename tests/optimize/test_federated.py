"""Rounds of a federation: what is averaged, what is refused, and what goes on after any end."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save
from starlette.testclient import TestClient

from maitred.api.http.auth import Authenticator
from maitred.config.optimize import FederateConfig, JoinConfig, ToolConfig
from maitred.core.errors import ConfigError
from maitred.optimize.federated import TOOL, Federation, UpdateRefused, epsilon, join, web_of
from maitred.optimize.job import run_tool
from maitred.storage.key_files import TenantFile, add_key, make_key
from tests.model.checkpoints import make_checkpoint

torch.set_num_threads(1)
SHAPES = {"q": (4, 2), "k": (3, 2)}


def federation(folder: Path, **own: object) -> Federation:
    zeros = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return Federation(FederateConfig(**{"clip": 4.0, **own}), zeros, folder)  # type: ignore[arg-type]


def update(value: float, **shapes: tuple[int, ...]) -> bytes:
    return save({name: torch.full(shape, value, dtype=torch.bfloat16) for name, shape in (SHAPES | shapes).items()})


def test_updates_are_averaged_by_their_examples(tmp_path: Path):
    fed = federation(tmp_path)
    fed.take("a", 0, 300, update(0.5))
    assert not fed.has_all
    fed.take("b", 0, 100, update(-0.5))
    assert fed.has_all
    fed.close_round(torch.Generator())
    assert fed.round == 1
    assert all(torch.equal(b, torch.full(SHAPES[name], 0.25)) for name, b in fed.b.items())


def test_a_round_waits_for_those_that_began_it(tmp_path: Path):
    fed = federation(tmp_path)
    for client in "abc":
        fed.offer(client)
    fed.take("a", 0, 1, update(0.1))
    fed.take("b", 0, 1, update(0.1))
    assert not fed.has_all
    fed.take("c", 0, 1, update(0.1))
    assert fed.has_all


def test_a_server_that_was_killed_goes_on_with_every_update_that_it_had_accepted(tmp_path: Path):
    fed = federation(tmp_path)
    fed.take("a", 0, 1, update(0.5))
    fed.take("b", 0, 1, update(0.25))
    fed.close_round(torch.Generator())
    fed.take("a", 1, 1, update(0.5))
    again = federation(tmp_path)
    assert again.round == 1
    assert again.history == fed.history
    assert torch.equal(again.b["q"], fed.b["q"])
    with pytest.raises(UpdateRefused, match="a has told its update of round 1 already"):
        again.take("a", 1, 1, update(0.5))
    again.take("b", 1, 1, update(0.5))
    again.close_round(torch.Generator())
    assert again.b["q"][0, 0] == 0.875
    assert not list(tmp_path.glob("*.update"))


@pytest.mark.parametrize(
    ("kind", "status", "number", "examples", "body"),
    [
        ("late", 409, 3, 1, update(0.1)),
        ("malformed", 400, 0, 0, update(0.1)),
        ("malformed", 400, 0, 10**8, update(0.1)),
        ("malformed", 400, 0, 1, b"\x80\x04pickle"),
        ("wrong_shape", 400, 0, 1, update(0.1, q=(4, 3))),
        ("wrong_shape", 400, 0, 1, update(0.1, more=(1,))),
        ("not_finite", 400, 0, 1, update(math.nan)),
        ("huge", 400, 0, 1, update(2.0)),
        ("huge", 413, 0, 1, bytes(2**19)),
    ],
)
def test_what_is_refused_is_told_counted_and_changes_nothing(
    kind: str, status: int, number: int, examples: int, body: bytes, tmp_path: Path
):
    fed = federation(tmp_path)
    web = TestClient(web_of(fed, {}, Authenticator()))
    answer = web.post(f"/federate/round/{number}", content=body, headers={"x-maitred-examples": str(examples)})
    assert (answer.status_code, dict(fed.refused)) == (status, {kind: 1})
    assert answer.json()["error"]["message"]
    assert not fed.updates
    assert web.post("/federate/round/0", content=update(0.1), headers={"x-maitred-examples": "5"}).status_code == 200
    assert web.get("/federate/round").status_code == 204, "nothing to do until the next round"


def test_a_key_is_one_client_and_without_one_nothing_is_told(tmp_path: Path):
    key = make_key("ward")
    add_key(tmp_path / "tenants.yaml", key.key)
    tenants = TenantFile(tmp_path / "tenants.yaml")
    try:
        fed = federation(tmp_path)
        web = TestClient(web_of(fed, {"seed": 1}, Authenticator(tenants=tenants)))
        for path in ("/federate/plan", "/federate/round"):
            assert web.get(path).status_code == 401
        assert web.post("/federate/round/0", content=update(0.1)).status_code == 401
        named = {"authorization": f"Bearer {key.secret}", "x-maitred-examples": "5"}
        sent = [
            web.post("/federate/round/0", content=update(0.1), headers={**named, "x-maitred-client": name})
            for name in "ab"
        ]
        assert [each.status_code for each in sent] == [200, 409]
        assert list(fed.updates) == [key.key.id]
    finally:
        tenants.close()


def test_noise_is_of_the_sum_and_hides_how_many_examples_a_client_has(tmp_path: Path):
    own = {"noise": 0.5, "clip": 1.0}
    fed = Federation(FederateConfig(**own), {"q": torch.zeros(400, 100)}, tmp_path)  # type: ignore[arg-type]
    for client, examples in (("a", 1), ("b", 10**6)):
        fed.take(client, 0, examples, save({"q": torch.zeros(400, 100, dtype=torch.bfloat16)}))
    fed.close_round(torch.Generator().manual_seed(1))
    assert fed.b["q"].std().item() == pytest.approx(0.5 * 1.0 / 2, rel=0.02)


@pytest.mark.parametrize(("noise", "rounds"), [(1.0, 1), (4.0, 10), (8.0, 100)])
def test_epsilon_is_over_the_exact_one_and_near_it(noise: float, rounds: int):
    """Exact for Gaussian noise: Balle and Wang 2018, arXiv:1805.06530, theorem 8."""
    found, shift, cdf = epsilon(noise, rounds), math.sqrt(rounds) / noise, NormalDist().cdf

    def delta(eps: float) -> float:
        return cdf(shift / 2 - eps / shift) - math.exp(eps) * cdf(-shift / 2 - eps / shift)

    assert delta(found) < 1e-5 < delta(0.85 * found)


# ---- whole federations


def write_counting(file: Path, first: int) -> None:
    """Every third number, from each fourth."""
    lines = [{"token_ids": [(at + step * 3) % 240 for step in range(10)]} for at in range(first, 240, 4)]
    file.write_text("\n".join(json.dumps(line) for line in lines))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(folder: Path, port: int) -> None:
    given = {"model": str(folder / "parent"), "out": str(folder / "out"), "held_out": str(folder / "held.jsonl")}
    own = {"rounds": 2, "min_clients": 2, "port": port, "round_s": 2.0, "clip": 50.0}
    report = run_tool(TOOL, ToolConfig(**given), FederateConfig(**own), lambda *_: None)  # type: ignore[arg-type]
    assert report.passed, report.fields["gate"]


def client(folder: Path, port: int, name: str, model: str = "parent") -> JoinConfig:
    return JoinConfig(
        url=f"http://127.0.0.1:{port}",
        data=str(folder / f"{name}.jsonl"),
        local_steps=12,
        model=str(folder / model),
        learning_rate=0.02,
        name=name,
    )


def take_part(folder: Path, port: int, name: str, told: dict[str, dict], model: str = "parent") -> None:
    told[name] = join(client(folder, port, name, model), lambda *_: None)


def test_a_federation_goes_on_through_kills_and_learns_what_no_client_told(tmp_path: Path):
    """The server is killed in its first round, a third client begins a round and dies."""
    make_checkpoint("llama", tmp_path / "parent")
    make_checkpoint("llama", tmp_path / "other", seed=1)
    for first, name in enumerate(("a", "b", "held")):
        write_counting(tmp_path / f"{name}.jsonl", first)
    port, told = free_port(), {}
    script = f"from tests.optimize.test_federated import *; serve(Path({str(tmp_path)!r}), {port})"
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = threading.Thread(target=take_part, args=(tmp_path, port, "a", told))
    first.start()
    try:
        until(lambda: any((tmp_path / "out.part" / "state").glob("0.*.update")))
        server.send_signal(signal.SIGKILL)
        server.communicate()
        server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        until(lambda: asked(port, "dead"))
        with pytest.raises(ConfigError, match="the server's model is another one than other"):
            take_part(tmp_path, port, "b", told, "other")
        for wrong, words in (("url", "cannot reach nowhere"), ("data", "nowhere: No such file")):
            with pytest.raises(ConfigError, match=words):
                join(replace(client(tmp_path, port, "b"), **{wrong: "nowhere"}), lambda *_: None)
        second = threading.Thread(target=take_part, args=(tmp_path, port, "b", told))
        second.start()
        _, errors = server.communicate()
        assert server.returncode == 0, errors.decode()
    finally:
        server.kill()
    first.join()
    second.join()
    fields = json.loads((tmp_path / "out" / "report.json").read_text())
    assert [each["clients"] for each in fields["federate"]["history"]] == [2, 2]
    assert fields["figures"]["perplexity_ratio"]["high"] < 0.9
    for name in "ab":
        assert told[name]["loss_after"] < told[name]["loss_before"]
        repeated = told[name].get("late_or_repeated", 0)  # where the server was killed before it could answer
        assert told[name]["accepted"] + repeated >= 2
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(np.abs(tensor.numpy()).max() > 0 for name, tensor in adapter.items() if "lora_B" in name)
    given = {name: str(tmp_path / f"{file}.jsonl") for name, file in (("data", "a"), ("held_out", "held"))}
    with pytest.raises(ConfigError, match="data stays with the clients"):
        run_tool(
            TOOL,
            ToolConfig(model=str(tmp_path / "parent"), out=str(tmp_path / "x"), **given),
            FederateConfig(),
            lambda *_: None,
        )


def asked(port: int, client: str) -> bool:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/federate/round", headers={"x-maitred-client": client})
    try:
        return urllib.request.urlopen(request).status == 200
    except urllib.error.URLError:
        return False


def until(is_true: object, seconds: float = 300.0) -> None:
    ends = time.monotonic() + seconds
    while not is_true():  # type: ignore[operator]
        assert time.monotonic() < ends
        time.sleep(0.05)

"""Rounds of a federation: what is averaged, what is refused, and what goes on after any end."""

from __future__ import annotations

import json
import math
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


@pytest.fixture
def port(tmp_path: Path) -> int:
    """A free one, beside a model, and documents of clients and to judge by."""
    make_checkpoint("llama", tmp_path / "parent")
    for first, name in enumerate(("a", "b", "held", "c")):
        write_counting(tmp_path / f"{name}.jsonl", first)
    return free_port()


def client(folder: Path, port: int, name: str) -> JoinConfig:
    url, data = f"http://127.0.0.1:{port}", str(folder / f"{name}.jsonl")
    return JoinConfig(url=url, data=data, local_steps=12, model=str(folder / "parent"), learning_rate=0.02, name=name)


def test_a_federation_learns_what_no_client_told(tmp_path: Path, port: int):
    """A third client begins a round and dies."""
    given = {"model": str(tmp_path / "parent"), "out": str(tmp_path / "out"), "held_out": str(tmp_path / "held.jsonl")}
    own = FederateConfig(rounds=2, port=port, round_s=0.5, clip=50.0)
    with pytest.raises(ConfigError, match="data stays with the clients"):
        run_tool(TOOL, ToolConfig(**given, data=str(tmp_path / "a.jsonl")), own, lambda *_: None)
    with ThreadPoolExecutor() as pool:
        server = pool.submit(run_tool, TOOL, ToolConfig(**given), own, lambda *_: None)
        until(lambda: asked(port, "dead"))
        make_checkpoint("llama", tmp_path / "other", seed=1)
        for field, wrong, words in (
            ("model", str(tmp_path / "other"), "the server's model is another one than other"),
            ("url", "nowhere", "cannot reach nowhere"),
            ("data", "nowhere", "nowhere: No such file"),
        ):
            with pytest.raises(ConfigError, match=words):
                join(replace(client(tmp_path, port, "b"), **{field: wrong}), lambda *_: None)
        joined = [pool.submit(join, client(tmp_path, port, name), lambda *_: None) for name in "ab"]
        fields = server.result().fields
    assert [each["clients"] for each in fields["federate"]["history"]] == [2, 2]
    assert fields["figures"]["perplexity_ratio"]["high"] < 0.9
    for told in (each.result() for each in joined):
        assert told["loss_after"] < told["loss_before"]
        assert told["accepted"] == 2
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(np.abs(tensor.numpy()).max() > 0 for name, tensor in adapter.items() if "lora_B" in name)


@pytest.mark.soak
def test_the_server_and_a_client_are_killed_and_go_on_by_the_same_commands(tmp_path: Path, port: int):
    def begin(name: str) -> subprocess.Popen[str]:
        model, url = tmp_path / "parent", f"http://127.0.0.1:{port}"
        serve = (
            f"serve {model} --out {tmp_path}/out --held-out {tmp_path}/held.jsonl --port {port} --rounds 3 --clip 50"
        )
        join = f"join {url} --model {model} --data {tmp_path}/{name}.jsonl --local-steps 60 --name {name} --json"
        words = (serve if name == "server" else join).split()
        command = [sys.executable, "-m", "maitred", "federate", *words]
        running[name] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return running[name]

    def trains(name: str) -> None:
        """Its round has begun."""
        told = running[name].stderr
        assert told is not None
        assert any("round " in line for line in told), name
        pool.submit(told.read)

    running: dict[str, subprocess.Popen[str]] = {}
    with ThreadPoolExecutor() as pool:
        try:
            for name in ("server", "a", "b", "c"):
                begin(name)
            trains("c")
            running["c"].kill()
            until(lambda: any((tmp_path / "out.part" / "state").glob("0.*.update")))
            running["server"].kill()
            server = begin("server")
            until((tmp_path / "out.part" / "state" / "federation.safetensors").exists)
            running["a"].send_signal(signal.SIGSTOP)  # so that no round is the last before c is there again
            begin("c")
            trains("c")
            running["a"].send_signal(signal.SIGCONT)
            _, errors = server.communicate()
            assert server.returncode == 0, errors
            told = {name: json.loads(running[name].communicate()[0]) for name in "abc"}
        finally:
            for process in running.values():
                process.kill()
    history = json.loads((tmp_path / "out" / "report.json").read_text())["federate"]["history"]
    assert [each["clients"] for each in history[:1]] == [2], "without c the first round came to its end"
    assert all(each["accepted"] >= 1 for each in told.values())


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

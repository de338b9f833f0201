"""`maitred serve --role --kv-listen` behind `maitred route`: servers that know nothing of each other hand KV over."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from maitred.api.http.fleet_headers import FleetToken
from maitred.api.route.messages import reached_by
from maitred.cli.serve import kv_share
from maitred.config import CacheConfig, ProcessConfig
from maitred.core.errors import ConfigError
from maitred.kv.leases import Refusal
from maitred.kv.puller import connect
from maitred.kv.wire import Identity
from tests.conftest import ServerProcess
from tests.fleet.test_end_to_end import RealFleet, real_fleet
from tests.kv.worlds import make_layout
from tests.reliability.test_workers import MODEL, STORY
from tests.waiting import HANGS_S, until

TOKEN = "0123456789abcdef0123456789abcdef"
COMPLETIONS = "/v1/completions"
GREEDY = {"prompt": STORY, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
LONG = GREEDY | {"max_tokens": 400}  # a shorter stream may end where its prompt was computed, before it is handed over
KINDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "four": GREEDY | {"n": 4, "temperature": 0.7, "seed": 1, "prompt": "Four. " + STORY},
    "seeded": GREEDY | {"temperature": 0.9, "seed": 5, "prompt": "Seeded. " + STORY},
    "four greedy": GREEDY | {"n": 4, "prompt": "Alike. " + STORY},
    "two prompts": GREEDY | {"prompt": ["One. " + STORY, "Two. " + STORY], "max_tokens": 12},
    "logprobs": GREEDY | {"prompt": "Logs. " + STORY, "max_tokens": 8, "logprobs": 3},
    "a stop string": GREEDY | {"prompt": "Stop. " + STORY, "stop": ["a"]},
}


@pytest.fixture(scope="module")
def alone(server: ServerProcess) -> ServerProcess:
    return server


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealFleet]:
    roles = ("prefill", "decode", "decode")
    flags = [("--role", role, "--kv-listen", "127.0.0.1:0", "--kv-transport", "tcp") for role in roles]
    with real_fleet(tmp_path_factory.mktemp("apart"), flags, "--handover", "always") as fleet:
        until(lambda: len(workers(fleet)) == 3)
        yield fleet


def workers(fleet: RealFleet) -> list[dict[str, Any]]:
    return fleet.client.get("/admin/roles").json()["workers"]


def names_of(fleet: RealFleet, role: str) -> set[str]:
    return {worker["worker"] for worker in workers(fleet) if worker["role"] == role}


def server_named(fleet: RealFleet, name: str) -> ServerProcess:
    return next(replica for replica in fleet.replicas if replica.url.endswith(name))


def handovers(server: ServerProcess) -> Counter[str]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    told = [line for line in lines if line.startswith("maitred_handovers_total{")]
    return Counter({line.split('"')[1]: int(float(line.split(" ")[1])) for line in told})


def all_handovers(fleet: RealFleet) -> Counter[str]:
    return sum((handovers(replica) for replica in fleet.replicas), Counter())


def text_of(answer: str) -> dict[int, str]:
    """Of each choice of a stream."""
    found: dict[int, str] = {}
    for line in answer.splitlines():
        if line.startswith("data: {"):
            told = json.loads(line[6:])
            assert "error" not in told, line
            for choice in told["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def ask(url: str, body: dict[str, Any], *, stream: bool, **headers: str) -> tuple[dict[int, str], httpx.Headers]:
    """The text of each choice, and the answer's headers."""
    asked = {"model": MODEL, "stream": stream, **body}
    answer = httpx.post(url + COMPLETIONS, json=asked, headers=headers, timeout=HANGS_S)
    assert answer.status_code == 200, answer.text
    if stream:
        return text_of(answer.text), answer.headers
    return {choice["index"]: choice["text"] for choice in answer.json()["choices"]}, answer.headers


@pytest.mark.parametrize(("kind", "stream"), [("greedy", False), *((kind, i % 2 == 0) for i, kind in enumerate(KINDS))])
def test_every_answer_is_that_of_a_lone_engine(apart: RealFleet, alone: ServerProcess, kind: str, stream: bool):
    told, headers = ask(apart.router.url, KINDS[kind], stream=stream)
    assert told == ask(alone.url, KINDS[kind], stream=stream)[0]
    begins = "prefill" if stream else "decode"  # of a whole answer it tells who gave it
    assert headers["x-maitred-replica"] in names_of(apart, begins)


@pytest.mark.parametrize("num_samples", [1, 4])
@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_was_computed_for_it_is_not_told_as_cached(apart: RealFleet, stream: bool, num_samples: int):
    def used(prompt: Any) -> dict[str, Any]:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 6, "n": num_samples, "ignore_eos": True, "seed": 3}
        if not stream:
            return httpx.post(apart.router.url + COMPLETIONS, json=body, timeout=HANGS_S).json()["usage"]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        lines = httpx.post(apart.router.url + COMPLETIONS, json=body, timeout=HANGS_S).text.splitlines()
        return next(json.loads(line[6:])["usage"] for line in lines if '"usage":{' in line)

    prompts = [f"{start} {stream} {num_samples}. {STORY}" for start in ("New", "Newer")]
    usage = used(prompts)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert usage["completion_tokens"] == 2 * 6 * num_samples
    assert used(prompts)["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


@pytest.mark.parametrize("stream", [True, False])
def test_kv_moves_between_servers_that_know_nothing_of_each_other(apart: RealFleet, stream: bool):
    before = all_handovers(apart)["moved"]
    ask(apart.router.url, LONG | {"prompt": f"A new one {stream}. {STORY}"}, stream=stream)
    until(lambda: all_handovers(apart)["moved"] == before + 1)


@pytest.mark.parametrize("shown", [{}, {"x-maitred-fleet-token": TOKEN}])
def test_where_kv_is_pulled_from_only_a_router_says(apart: RealFleet, shown: dict[str, str]):
    body = GREEDY | {"prompt": f"Pulled {len(shown)}. {STORY}", "max_tokens": 4}
    prefill, decode = (server_named(apart, sorted(names_of(apart, role))[0]) for role in ("prefill", "decode"))
    told = ask(prefill.url, body, stream=False)[0]
    (address,) = next(w["kv_addresses"] for w in workers(apart) if w["role"] == "prefill")
    before = handovers(decode)
    assert ask(decode.url, body, stream=False, **shown, **{"x-maitred-kv-from": address})[0] == told
    assert handovers(decode) - before == Counter(["moved"] if shown else [])
    many = {"x-maitred-kv-from": ",".join([address] * 99)}
    answer = httpx.post(decode.url + COMPLETIONS, json=body | {"model": MODEL}, headers={**shown, **many})
    assert answer.status_code == (400 if shown else 200)


def pulled_tokens(server: ServerProcess) -> float:
    tiers = httpx.get(f"{server.url}/admin/kv").json()["tiers"]
    return next(tier["hit_tokens"] for tier in tiers if tier["name"] == "peer")


def test_kv_that_is_expected_is_there_before_the_answer_is_asked_for(apart: RealFleet):
    body = GREEDY | {"prompt": f"Expected. {STORY}", "max_tokens": 4}
    prefill, decode = (server_named(apart, sorted(names_of(apart, role))[0]) for role in ("prefill", "decode"))
    told = ask(prefill.url, body, stream=False)[0]
    (address,) = next(w["kv_addresses"] for w in workers(apart) if w["role"] == "prefill")
    expected = {"x-maitred-fleet-token": TOKEN, "x-maitred-kv-from": address, "x-maitred-kv-expected": "1"}
    before, num_pulled = handovers(decode), pulled_tokens(decode)
    answer = httpx.post(decode.url + COMPLETIONS, json=body | {"model": MODEL}, headers=expected, timeout=HANGS_S)
    assert (answer.status_code, answer.json()) == (200, {})
    until(lambda: pulled_tokens(decode) > num_pulled)
    nowhere = {"x-maitred-fleet-token": TOKEN, "x-maitred-kv-from": "tcp:127.0.0.1:1"}
    assert ask(decode.url, body, stream=False, **nowhere)[0] == told
    assert handovers(decode) - before == Counter(["moved"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_router_says_what_to_expect_while_the_prompt_is_computed(apart: RealFleet, stream: bool):
    decode = [server_named(apart, name) for name in names_of(apart, "decode")]

    def num_asked() -> int:
        lines = "".join(httpx.get(f"{server.url}/metrics").text for server in decode).splitlines()
        told = [line for line in lines if line.startswith("maitred_http_requests_total{") and "200" in line]
        return sum(int(float(line.split()[-1])) for line in told if COMPLETIONS in line or "/fleet/resume" in line)

    before = num_asked()
    ask(apart.router.url, LONG | {"prompt": f"Told {stream}. {STORY}"}, stream=stream)
    until(lambda: num_asked() == before + 2)  # to expect it, and to answer


def test_a_stranger_is_refused_at_the_port(apart: RealFleet):
    (address,) = workers(apart)[0]["kv_addresses"]
    layout = make_layout()
    for token in (None, b"another token of another fleet"):
        with pytest.raises(Refusal, match="--fleet-token-file"):
            connect(address, Identity(layout, token), staging_bytes=2**20, timeout_s=HANGS_S)


@pytest.mark.parametrize("role", ["decode", pytest.param("prefill", marks=pytest.mark.soak)])
def test_a_server_that_is_killed_after_the_hand_over_costs_no_token(apart: RealFleet, alone: ServerProcess, role: str):
    body = GREEDY | {"prompt": f"Killed {role}. {STORY}", "max_tokens": 800, "n": 2, "temperature": 0.8, "seed": 3}
    expected = ask(alone.url, body, stream=False)[0]
    moved = all_handovers(apart)
    asked = {"model": MODEL, "stream": True, **body}
    with httpx.stream("POST", apart.router.url + COMPLETIONS, json=asked, timeout=HANGS_S) as answer:
        pieces = answer.iter_text()
        told = next(pieces)
        until(lambda: all_handovers(apart)["moved"] > moved["moved"])
        choices = apart.client.get(f"/admin/fleet/choices/{answer.headers['x-request-id']}").json()["choices"]
        prefill = answer.headers["x-maitred-replica"]
        victim = server_named(apart, prefill if role == "prefill" else choices[0]["replica"])
        os.kill(victim.process.pid, signal.SIGKILL)
        assert text_of(told + "".join(pieces)) == expected
    victim.process.wait(HANGS_S)
    apart.replicas.remove(victim)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"role": "prefill"}, "give kv_listen HOST:PORT too"),
        ({"role": "cook", "kv_listen": "127.0.0.1:0"}, "role"),
        ({"kv_listen": "9100"}, "write HOST:PORT"),
        ({"kv_listen": "127.0.0.1:70000"}, "write HOST:PORT"),
        ({"kv_listen": "127.0.0.1:0", "mixed_workers": 2}, "leave out either"),
    ],
)
def test_workers_of_hosts_that_cannot_be_are_refused_with_a_remedy(settings: dict[str, Any], remedy: str):
    with pytest.raises(ConfigError, match=remedy):
        ProcessConfig(**settings)


@pytest.mark.parametrize(
    ("listen", "cache", "token", "remedy"),
    [
        ("0.0.0.0:0", CacheConfig(), None, "the same --fleet-token-file"),
        ("127.0.0.1:0", CacheConfig(), None, "the same --fleet-token-file"),
        ("127.0.0.1:0", CacheConfig(kv_transport="shm"), TOKEN.encode(), "leave it at auto"),
        ("127.0.0.1:0", CacheConfig(enable_prefix_caching=False), TOKEN.encode(), "leave enable_prefix_caching on"),
        ("192.0.2.7:0", CacheConfig(), TOKEN.encode(), "cannot listen on 192.0.2.7:0"),
    ],
)
def test_a_port_that_nobody_could_use_is_refused_before_anything_loads(listen, cache, token, remedy):
    with pytest.raises(ConfigError, match=remedy):
        kv_share(listen, cache, FleetToken(token))


def test_an_address_of_every_interface_is_that_of_its_server():
    told = ("tcp:0.0.0.0:9100", "tcp::::9100", "tcp:10.0.0.5:9100", "shm:maitred-kv")
    assert reached_by(told, "worker-1") == ("tcp:worker-1:9100", "tcp:worker-1:9100", *told[2:])


SAME = ("--kv-listen", "127.0.0.1:0", "--kv-dtype", "float32", "--max-model-len", "2048")


@pytest.mark.soak
def test_blocks_of_another_size_give_the_answers_of_a_lone_engine(tmp_path: Path):
    flags = [("--role", role, "--block-size", size, *SAME) for role, size in (("prefill", "64"), ("decode", "16"))]
    with real_fleet(tmp_path, flags, "--handover", "always") as fleet:
        until(lambda: len(workers(fleet)) == 2)
        alone = [ask(replica.url, GREEDY, stream=False)[0] for replica in fleet.replicas]
        assert [ask(fleet.router.url, GREEDY, stream=stream)[0] for stream in (True, False)] == alone
        moved = LONG | {"prompt": "Moved. " + STORY}
        told = ask(fleet.router.url, moved, stream=True)[0]
        until(lambda: all_handovers(fleet)["moved"])
        assert told == ask(fleet.replicas[0].url, moved, stream=False)[0]

"""What balancers and dashboards of other systems find: load reports on answers, vLLM's names, the gateway's gauges."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from maitred.api.ops.metrics_page import VLLM_NAMES
from maitred.config import ServerConfig
from maitred.core.errors import ConfigError
from maitred.core.metrics import METRICS
from tests.fakes_api import FakeReplica, RunningServer, running_server
from tests.waiting import until

ASK = {"model": "tiny", "prompt": "hello"}


Page = dict[str, list[tuple[dict[str, str], float]]]


def page_at(url: str) -> Page:
    families = parse(httpx.get(f"{url}/metrics").text)
    return {family.name: [(s.labels, s.value) for s in family.samples] for family in families}


def page_of(**config: object) -> Page:
    with running_server(**config) as server:
        httpx.post(f"{server.url}/v1/completions", json=ASK).raise_for_status()
        return page_at(server.url)


@contextmanager
def in_flight(server: RunningServer, count: int) -> Iterator[None]:
    """So many samples of a client that leaves when the block ends."""
    body = json.dumps({**ASK, "n": count}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(head % len(body) + body)
        until(lambda: len(server.replica.live) == count)
        yield


@pytest.mark.parametrize("path", ["/v1/models", "/health"])
@pytest.mark.parametrize(("queued", "load"), [(False, (0.06, 0, 3)), (True, (0, 3, 0))], ids=["running", "waiting"])
def test_a_balancer_that_asks_is_told_the_load_as_text(path: str, queued: bool, load: tuple[float, int, int]):
    replica = FakeReplica(held=True, queued=queued)
    with running_server(replica) as server, in_flight(server, 3):
        told = httpx.get(server.url + path, headers={"endpoint-load-metrics-format": "TEXT"}).headers
    assert told["endpoint-load-metrics"] == (
        "TEXT named_metrics.kv_cache_usage_perc={}, named_metrics.num_requests_waiting={}, "
        "named_metrics.num_requests_running={}".format(*load)
    )


def test_and_as_json_with_the_answer_to_a_request():
    with running_server() as server:
        told = httpx.post(
            f"{server.url}/v1/completions", json=ASK, headers={"endpoint-load-metrics-format": "json"}
        ).headers["endpoint-load-metrics"]
    form, _, body = told.partition(" ")
    assert form == "JSON"
    assert set(json.loads(body)["named_metrics"]) == {
        "kv_cache_usage_perc",
        "num_requests_waiting",
        "num_requests_running",
    }


@pytest.mark.parametrize("form", ["", "BIN", "TEXT\tx"])
def test_a_form_nobody_knows_is_passed_over(form: str):
    with running_server() as server:
        answer = httpx.get(f"{server.url}/health", headers={"endpoint-load-metrics-format": form})
    assert answer.status_code == 200
    assert "endpoint-load-metrics" not in answer.headers


def test_those_who_do_not_ask_are_told_nothing():
    with running_server() as server:
        assert "endpoint-load-metrics" not in httpx.get(f"{server.url}/health").headers


def test_the_page_has_vllms_names_only_when_asked():
    assert not [name for name in page_of() if name.startswith("vllm")]
    page = page_of(metrics_compat="vllm")
    assert set(VLLM_NAMES.values()) <= set(page)
    assert {metric.name.removesuffix("_total") for metric in METRICS} <= set(page), "ours stay"


def test_aliases_say_the_same_with_vllms_labels():
    page = page_of(metrics_compat="vllm")
    assert ({"model_name": "tiny", "engine": "0", "finished_reason": "stop"}, 3.0) in page["vllm:request_success"]
    ours = {labels["le"]: value for labels, value in page["maitred_request_ttft_seconds"] if "le" in labels}
    theirs = {labels["le"]: value for labels, value in page["vllm:time_to_first_token_seconds"] if "le" in labels}
    assert theirs == ours
    assert max(theirs.values()) == 1


@pytest.mark.parametrize(("queued", "load"), [(False, (0.06, 0, 3)), (True, (0, 3, 0))], ids=["running", "waiting"])
def test_a_gateway_finds_queue_running_and_cache(queued: bool, load: tuple[float, int, int]):
    replica = FakeReplica(held=True, queued=queued)
    with running_server(replica) as server, in_flight(server, 3):
        page = page_at(server.url)
    names = ("maitred_kv_usage_ratio", "maitred_requests_waiting", "maitred_requests_running")
    assert [page[name] for name in names] == [[({}, value)] for value in load]
    assert page["maitred_cache_config_info"] == [({"block_size": "16", "num_blocks": "100"}, 1.0)]


def test_an_unknown_compatibility_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match="none, vllm, triton"):
        ServerConfig(metrics_compat="sglang")

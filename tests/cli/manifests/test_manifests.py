"""Manifests against the programs and schemas that will read them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from maitred.cli.main import COMMANDS, load, main
from maitred.cli.manifests.options import PRESTOP_S, TARGETS, ClusterOptions
from maitred.errors import ConfigError
from tests.cli.manifests import crds
from tests.conftest import free_port
from tests.fakes_api import running_server
from tests.waiting import HANGS_S, until

needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")
OURS = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")  # Kubernetes' own, here
WORDS: dict[str, list[str]] = {
    "plain": [],
    "full": ["--name", "chat", "--model", "llama", "--model-claim", "models", "--gpus", "1", "--replicas", "2:8"],
}


def written(folder: Path, target: str, *words: str) -> dict[str, list[dict[str, Any]]]:
    """Of each file, its documents."""
    assert main(["manifests", target, "--out", str(folder), *words]) == 0
    return {path.name: list(yaml.safe_load_all(path.read_text())) for path in sorted(folder.glob("*.yaml"))}


def everything(folder: Path, target: str, *words: str) -> list[dict[str, Any]]:
    return [manifest for manifests in written(folder, target, *words).values() for manifest in manifests]


def of_kind(manifests: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests if manifest["kind"] == kind]


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
@pytest.mark.parametrize("target", ["kubernetes", "gateway"])
def test_kubernetes_takes_every_field(target: str, words: list[str], tmp_path: Path):
    validate = pytest.importorskip("kubernetes_validate").validate
    own = [manifest for manifest in everything(tmp_path, target, *words) if manifest["apiVersion"] in OURS]
    assert own
    for manifest in own:
        validate(manifest, "1.37", strict=True)


CUSTOM = [
    ("kubernetes", "PodMonitor"),
    ("gateway", "PodMonitor"),
    ("gateway", "InferencePool"),
    ("gateway", "HTTPRoute"),
    ("kuberay", "RayService"),
]


@pytest.mark.parametrize(("target", "kind"), CUSTOM)
def test_custom_resources_take_every_field(target: str, kind: str, tmp_path: Path):
    for number, words in enumerate(WORDS.values()):
        found = of_kind(everything(tmp_path / str(number), target, *words), kind)
        assert found
        for manifest in found:
            crds.check(manifest)


@pytest.mark.parametrize("target", ["kubernetes", "gateway"])
def test_pods_run_commands_that_there_are_and_have_time_to_drain(target: str, tmp_path: Path):
    for deployment in of_kind(everything(tmp_path, target, "--drain-timeout", "45"), "Deployment"):
        pod = deployment["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        words = container["args"]
        if words[0] in COMMANDS:
            load(words[0]).parse(words[1:], {})
        assert container["lifecycle"]["preStop"]["sleep"]["seconds"] == PRESTOP_S
        assert words[words.index("--drain-timeout") + 1] == "45"
        assert pod["terminationGracePeriodSeconds"] > PRESTOP_S + 45
        assert (
            container["startupProbe"]["httpGet"]["path"] == container["readinessProbe"]["httpGet"]["path"] == "/ready"
        )
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"


def test_every_selector_finds_its_pods_and_the_routers_their_replicas(tmp_path: Path):
    manifests = everything(tmp_path, "kubernetes", "--name", "chat")
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(manifests, "Deployment")]
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector", manifest.get("spec", {}).get("podSelector"))
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, manifest["kind"]
    (replicas,) = [each for each in of_kind(manifests, "Service") if each["spec"].get("clusterIP") == "None"]
    (router,) = [each for each in of_kind(manifests, "Deployment") if each["metadata"]["name"] == "chat-router"]
    assert f"dns://{replicas['metadata']['name']}:8000" in router["spec"]["template"]["spec"]["containers"][0]["args"]


def test_an_autoscaled_deployment_says_no_number_of_its_own(tmp_path: Path):
    by_name = {
        each["metadata"]["name"]: each["spec"].get("replicas")
        for each in of_kind(everything(tmp_path, "kubernetes", "--replicas", "2:8", "--routers", "3"), "Deployment")
    }
    assert by_name == {"maitred-replica": None, "maitred-router": 3}
    fixed = of_kind(everything(tmp_path, "kubernetes", "--replicas", "3"), "Deployment")
    assert fixed[0]["spec"]["replicas"] == 3


def test_a_pool_finds_pods_that_show_vllms_names(tmp_path: Path):
    manifests = everything(tmp_path, "gateway", "--name", "chat")
    (pool,), (pods,) = of_kind(manifests, "InferencePool"), of_kind(manifests, "Deployment")
    template = pods["spec"]["template"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    assert template["metadata"]["labels"]["model.aibrix.ai/name"] == "chat"
    words = template["spec"]["containers"][0]["args"]
    assert words[words.index("--metrics-compat") + 1] == "vllm"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["kubernetes", "--replicas", "0:3"], "keeps at least one"),
        (["gateway", "--endpoint-picker", "here"], "must look like maitred-epp:9002"),
        (["haproxy", "--backend", "10.0.0.1"], "is no address"),
        (["haproxy", "--max-load-ratio", "1"], "must be above 1"),
        (["kubernets"], "did you mean kubernetes?"),
        (["kubernetes", "--name", "My Fleet"], "lower-case"),
    ],
)
def test_what_cannot_work_is_refused_before_it_is_written(words: list[str], cause: str, tmp_path: Path, capsys):
    assert main(["manifests", *words, "--out", str(tmp_path / "out")]) != 0
    assert cause in capsys.readouterr().err
    assert not list(tmp_path.glob("out/*"))


def test_options_know_their_bounds():
    assert ClusterOptions(replicas="2:8").bounds == (2, 8)
    with pytest.raises(ConfigError, match="routers must be at least 1"):
        ClusterOptions(routers=0)
    assert set(TARGETS) == {"haproxy", "kubernetes", "kuberay", "gateway"}


# -- HAProxy


@needs_haproxy
@pytest.mark.parametrize(
    "backends",
    [
        (),
        ("dns://localhost:8000",),
        ("https://127.0.0.1:443", "http://[::1]:8000"),
    ],
)
def test_haproxy_takes_its_configuration(backends: tuple[str, ...], tmp_path: Path):
    flags = [word for backend in backends for word in ("--backend", backend)]
    assert main(["manifests", "haproxy", "--out", str(tmp_path), *flags]) == 0
    check = ["haproxy", "-c", "-f", str(tmp_path / "haproxy.cfg")]
    checked = subprocess.run(check, capture_output=True, text=True, timeout=HANGS_S, check=False)
    assert checked.returncode == 0, checked.stderr


@contextmanager
def proxied(folder: Path, *backends: str) -> Iterator[str]:
    """HAProxy in front of them: its address."""
    port = free_port()
    flags = [word for backend in backends for word in ("--backend", backend)]
    assert main(["manifests", "haproxy", "--out", str(folder), "--listen", f"127.0.0.1:{port}", *flags]) == 0
    command = ["haproxy", "-db", "-f", str(folder / "haproxy.cfg")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: process.poll() is not None or _answers(url))
            assert process.poll() is None, "it ended"
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/v1/models").status_code == 200
    except httpx.TransportError:
        return False


@needs_haproxy
def test_a_session_stays_where_its_prefix_is_until_that_server_goes(tmp_path: Path):
    ready = [True, True]
    with (
        running_server(is_ready=lambda: ready[0]) as first,
        running_server(is_ready=lambda: ready[1]) as second,
        proxied(tmp_path, first.url, second.url) as url,
        httpx.Client(base_url=url) as client,
    ):
        servers = (first.replica, second.replica)

        def ask(**more: Any) -> tuple[int, int]:
            """How many of three each server got."""
            before = [len(server.submitted) for server in servers]
            headers = more.pop("headers", {})
            for _ in range(3):
                answer = client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, **more}, headers=headers)
                assert answer.status_code == 200, answer.text
            counts = [len(server.submitted) - had for server, had in zip(servers, before, strict=True)]
            return counts[0], counts[1]

        spread = {ask(prompt_cache_key=f"conversation {number}") for number in range(12)}
        assert spread == {(3, 0), (0, 3)}, "each conversation has one server, and both have some"
        assert {ask(headers={"x-session-id": f"s{number}"}) for number in range(12)} == spread
        ready[0] = False  # it drains: 503 to newcomers
        assert {ask(prompt_cache_key=f"conversation {number}") for number in range(12)} == {(0, 3)}

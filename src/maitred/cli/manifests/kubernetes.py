"""Values for the templates of what runs on Kubernetes: replicas behind routers, behind a gateway, or on KubeRay.

In a template `$word` is a value as JSON, which is YAML too, so whatever was asked for keeps its shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from string import Template
from typing import Any

from maitred.cli.manifests.options import PRESTOP_S, ClusterOptions

TEMPLATES = Path(__file__).parent / "templates"
PORT = 8000
METRIC = "maitred_fleet_queue_wait_seconds"  # that the autoscaler goes by
TOKEN_FOLDER = "/etc/maitred/fleet"
_TOKEN_WORDS = ("--fleet-token-file", f"{TOKEN_FOLDER}/token")
Manifest = dict[str, Any]


def files(target: str, options: ClusterOptions, name: str) -> dict[str, list[Manifest]]:
    """By file name."""
    values = _shared(options, name) | _VALUES[target](options, name)
    return {path.name: _manifests(path, values, name) for path in sorted((TEMPLATES / target).glob("*.yaml"))}


def _manifests(path: Path, values: Manifest, name: str) -> list[Manifest]:
    """`name`, of few letters, is put in as it is, and may be a part of a word."""
    import yaml

    told = {key: json.dumps(value) for key, value in values.items()}
    text = Template(path.read_text(encoding="utf-8")).substitute(told, name=name, metric=METRIC)
    return [_without_null(made) for made in yaml.safe_load_all(text)]


def _without_null(made: Any) -> Any:
    if isinstance(made, dict):
        return {key: _without_null(value) for key, value in made.items() if value is not None}
    return made


def _labels(name: str, component: str) -> dict[str, str]:
    """Those that select; equal for all of one component."""
    return {
        "app.kubernetes.io/name": "maitred",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
    }


def _shared(options: ClusterOptions, name: str) -> Manifest:
    low, high = options.bounds
    components = ("replica", "router", "autoscaler", "ray")
    return {"port": PORT, "low": low, "high": high} | {each: _labels(name, each) for each in components}


def _fleet(options: ClusterOptions, name: str) -> Manifest:
    """Replicas behind routers, with the secret that they share."""
    low, high = options.bounds
    words = ["route", f"dns://{name}-replicas:{PORT}", *_listening(options), *_TOKEN_WORDS]
    router = _pod(options, "route", words, _labels(name, "router"), {"cpu": "1", "memory": "512Mi"})
    replica = _replica(options, [*_serve(options), *_TOKEN_WORDS], name)
    for pod in (router, replica):
        secret = {"secretName": f"{name}-fleet-token", "defaultMode": 0o440}
        _mount(pod, "fleet-token", TOKEN_FOLDER, {"secret": secret})
    return {
        "fixed_replicas": low if low == high else None,
        "num_routers": options.routers,
        "queue_wait": f"{round(1000 * options.queue_wait_s)}m",
        "router_pod": router,
        "replica_pod": _with_models(replica, options),
    }


def _behind_gateway(options: ClusterOptions, name: str) -> Manifest:
    aibrix = {"name": name, "port": str(PORT), "metric-port": str(PORT), "engine": "vllm"}  # whose metrics are shown
    words = [*_serve(options), "--served-model-name", name, "--metrics-compat", "vllm"]
    picker, _, port = options.endpoint_picker.partition(":")
    return {
        "labels_of_model": _labels(name, "replica") | {f"model.aibrix.ai/{key}": aibrix[key] for key in aibrix},
        "replica_pod": _with_models(_replica(options, words, name), options),
        "picker": picker,
        "picker_port": int(port),
        "gateway": options.gateway,
    }


def _on_ray(options: ClusterOptions, name: str) -> Manifest:
    low, high = options.bounds
    head = {"container": "ray-head", "resources": {"cpu": "2", "memory": "4Gi"}}
    worker = {"container": "ray-worker", "resources": _resources(options)}
    nodes = [
        _with_models(_rendered("ray-pod", {"grace_s": options.grace_s, "image": options.image, **node}), options)
        for node in (head, worker)
    ]
    told = {"model": options.model, "ray_version": options.ray_version, "scales": low != high}
    return told | {"ray_head": nodes[0], "ray_worker": nodes[1]}


_VALUES = {"kubernetes": _fleet, "gateway": _behind_gateway, "kuberay": _on_ray}


# -- pods


def _rendered(template: str, values: Manifest) -> Manifest:
    [pod] = _manifests(TEMPLATES / f"{template}.yaml", values, "")
    return pod


def _pod(
    options: ClusterOptions, container: str, words: list[str], labels: dict[str, str], resources: Manifest
) -> Manifest:
    values = {"container": container, "words": words, "labels": labels, "resources": resources}
    given = {"image": options.image, "grace_s": options.grace_s, "prestop_s": PRESTOP_S, "port": PORT}
    return _rendered("pod", values | given)


def _replica(options: ClusterOptions, words: list[str], name: str) -> Manifest:
    return _pod(options, "serve", words, _labels(name, "replica"), _resources(options))


def _resources(options: ClusterOptions) -> Manifest:
    resources: Manifest = {"cpu": options.cpu, "memory": options.memory}
    return resources | {"nvidia.com/gpu": options.gpus} if options.gpus else resources


def _with_models(pod: Manifest, options: ClusterOptions) -> Manifest:
    if options.model_claim is not None:
        claim = {"claimName": options.model_claim, "readOnly": True}
        _mount(pod, "models", "/models", {"persistentVolumeClaim": claim})
    return pod


def _mount(pod: Manifest, name: str, path: str, source: Manifest) -> None:
    pod.setdefault("volumes", []).append({"name": name, **source})
    mounts = pod["containers"][0].setdefault("volumeMounts", [])
    mounts.append({"name": name, "mountPath": path, "readOnly": True})


def _serve(options: ClusterOptions) -> list[str]:
    """`maitred serve` in a replica's pod."""
    model = f"/models/{options.model or ''}".rstrip("/") if options.model_claim is not None else options.model
    sleep = ["--sleep-after-s", f"{options.sleep_after_s:g}"] if options.sleep_after_s is not None else []
    return ["serve", *([model] if model is not None else []), *_listening(options), *sleep]


def _listening(options: ClusterOptions) -> list[str]:
    where = ["--host", "0.0.0.0", "--port", str(PORT), "--log-format", "json"]
    return [*where, "--drain-timeout", str(options.drain_timeout_s)]

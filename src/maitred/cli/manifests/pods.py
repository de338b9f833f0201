"""Pods of maitred: labels, containers, probes, what happens at their end. Shared by all that runs on Kubernetes."""

from __future__ import annotations

from typing import Any

from maitred.cli.manifests.options import PRESTOP_S, ClusterOptions

PORT = 8000
HOME = "/home/maitred"
USER = 1000  # of deploy/Dockerfile
TOKEN_FOLDER = "/etc/maitred/fleet"
TOKEN_FILE = f"{TOKEN_FOLDER}/token"
Manifest = dict[str, Any]


def labels(name: str, component: str) -> dict[str, str]:
    """Those that select; equal for all of one component."""
    return {
        "app.kubernetes.io/name": "maitred",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
    }


def head(api: str, kind: str, name: str, of: dict[str, str]) -> Manifest:
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, "labels": of}}


def deployment(name: str, of: dict[str, str], replicas: int | None, pod: Manifest, **pod_labels: str) -> Manifest:
    """One whose next generation is ready before the last one goes. `replicas` None leaves them to an autoscaler."""
    return {
        **head("apps/v1", "Deployment", name, {**of, **pod_labels}),
        "spec": {
            **({} if replicas is None else {"replicas": replicas}),
            "selector": {"matchLabels": of},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": {**of, **pod_labels}}, "spec": pod},
        },
    }


def serve_words(options: ClusterOptions) -> list[str]:
    """`maitred serve` in a replica's pod."""
    model = f"/models/{options.model or ''}".rstrip("/") if options.model_claim is not None else options.model
    sleep = ["--sleep-after-s", f"{options.sleep_after_s:g}"] if options.sleep_after_s is not None else []
    return [
        "serve",
        *([model] if model is not None else []),
        *("--host", "0.0.0.0", "--port", str(PORT), "--log-format", "json"),
        *("--drain-timeout", str(options.drain_timeout_s)),
        *sleep,
    ]


def replica_pod(options: ClusterOptions, words: list[str], of: dict[str, str], token: str | None) -> Manifest:
    """`token` names the Secret with the fleet's, if there is one."""
    resources: dict[str, Any] = {"cpu": options.cpu, "memory": options.memory}
    if options.gpus:
        resources["nvidia.com/gpu"] = options.gpus
    pod = _pod(options, "serve", words, of, resources, token)
    if options.model_claim is not None:
        claim = {"claimName": options.model_claim, "readOnly": True}
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": claim})
        pod["containers"][0]["volumeMounts"].append({"name": "models", "mountPath": "/models", "readOnly": True})
    return pod


def router_pod(options: ClusterOptions, words: list[str], of: dict[str, str], token: str) -> Manifest:
    return _pod(options, "route", words, of, {"cpu": "1", "memory": "512Mi"}, token)


def _pod(
    options: ClusterOptions,
    container: str,
    words: list[str],
    of: dict[str, str],
    resources: dict[str, Any],
    token: str | None,
) -> Manifest:
    volumes: list[Manifest] = [{"name": name, "emptyDir": {}} for name in ("home", "tmp")]
    mounts: list[Manifest] = [{"name": "home", "mountPath": HOME}, {"name": "tmp", "mountPath": "/tmp"}]
    if token is not None:
        volumes.append({"name": "fleet-token", "secret": {"secretName": token, "defaultMode": 0o440}})
        mounts.append({"name": "fleet-token", "mountPath": TOKEN_FOLDER, "readOnly": True})
    return {
        "terminationGracePeriodSeconds": options.grace_s,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": of},
            }
        ],
        "containers": [
            {
                "name": container,
                "image": options.image,
                "args": words,
                "ports": [{"name": "http", "containerPort": PORT}],
                "resources": {"requests": resources, "limits": resources},
                # a large model may load for half an hour; whatever hinders it ends the process before
                "startupProbe": _probe("/ready", periodSeconds=2, failureThreshold=900),
                "readinessProbe": _probe("/ready", periodSeconds=2, failureThreshold=2),
                "livenessProbe": _probe("/health", periodSeconds=5, failureThreshold=6),
                # proxies hear of a pod's end as late as it does: until then it goes on as before
                "lifecycle": {"preStop": {"sleep": {"seconds": PRESTOP_S}}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _probe(path: str, **times: int) -> Manifest:
    return {"httpGet": {"path": path, "port": "http"}, "timeoutSeconds": 2, **times}


def service(name: str, of: dict[str, str], **spec: Any) -> Manifest:
    return {
        **head("v1", "Service", name, of),
        "spec": {**spec, "selector": of, "ports": [{"name": "http", "port": PORT, "targetPort": "http"}]},
    }


def disruption_budget(name: str, of: dict[str, str]) -> Manifest:
    """One at a time, when nodes are emptied."""
    return {
        **head("policy/v1", "PodDisruptionBudget", name, of),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": of}},
    }


def pod_monitor(name: str, of: dict[str, str]) -> Manifest:
    """Prometheus' operator scrapes each pod."""
    return {
        **head("monitoring.coreos.com/v1", "PodMonitor", name, of),
        "spec": {
            "selector": {"matchLabels": of},
            "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": "5s"}],
        },
    }

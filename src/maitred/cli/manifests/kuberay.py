"""A RayService whose application is maitred's engine: KubeRay makes the cluster, Ray Serve the replicas.

Sources: ray.io/v1 RayService; Ray Serve's config file, serveConfigV2 (`args` go to the application's builder).
"""

from __future__ import annotations

from typing import Any

import yaml

from maitred.cli.manifests.options import ClusterOptions
from maitred.cli.manifests.pods import Manifest, head, labels

APPLICATION = "maitred.cluster.ray_backend:app"
IDLE_S = 300  # a node without a replica is given back after so long


def files(options: ClusterOptions, name: str) -> dict[str, list[Manifest]]:
    """By file name."""
    low, high = options.bounds
    service = {
        **head("ray.io/v1", "RayService", name, labels(name, "ray")),
        "spec": {
            "serveConfigV2": yaml.safe_dump(_applications(options, name), sort_keys=False),
            "rayClusterConfig": {
                "rayVersion": options.ray_version,
                "enableInTreeAutoscaling": low != high,
                "autoscalerOptions": {"idleTimeoutSeconds": IDLE_S},
                "headGroupSpec": {
                    "rayStartParams": {"num-cpus": "0"},  # no replica beside what keeps the cluster
                    "template": {"spec": _pod(options, "ray-head", {"cpu": "2", "memory": "4Gi"})},
                },
                "workerGroupSpecs": [
                    {
                        "groupName": "replicas",
                        "replicas": low,
                        "minReplicas": low,
                        "maxReplicas": high,
                        "rayStartParams": {},
                        "template": {"spec": _pod(options, "ray-worker", _resources(options))},
                    }
                ],
            },
        },
    }
    return {"ray-service.yaml": [service]}


def _applications(options: ClusterOptions, name: str) -> Manifest:
    low, high = options.bounds
    args: dict[str, Any] = {"model": options.model, "min_replicas": low, "max_replicas": high}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "applications": [{"name": name, "route_prefix": "/", "import_path": APPLICATION, "args": args}],
    }


def _resources(options: ClusterOptions) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": options.cpu, "memory": options.memory}
    return {**resources, "nvidia.com/gpu": options.gpus} if options.gpus else resources


def _pod(options: ClusterOptions, container: str, resources: dict[str, Any]) -> Manifest:
    pod: Manifest = {
        "terminationGracePeriodSeconds": options.grace_s,
        "containers": [
            {
                "name": container,
                "image": options.image,
                "resources": {"requests": resources, "limits": resources},
            }
        ],
    }
    if options.model_claim is not None:
        claim = {"claimName": options.model_claim, "readOnly": True}
        pod["volumes"] = [{"name": "models", "persistentVolumeClaim": claim}]
        pod["containers"][0]["volumeMounts"] = [{"name": "models", "mountPath": "/models", "readOnly": True}]
    return pod

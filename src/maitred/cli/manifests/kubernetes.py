"""Replicas behind routers on Kubernetes: Deployments, Services, budgets, autoscaler, network policy, scraping."""

from __future__ import annotations

from typing import Any

from maitred.cli.manifests.options import ClusterOptions
from maitred.cli.manifests.pods import (
    PORT,
    TOKEN_FILE,
    Manifest,
    deployment,
    disruption_budget,
    head,
    labels,
    pod_monitor,
    replica_pod,
    router_pod,
    serve_words,
    service,
)

METRIC = "maitred_fleet_queue_wait_seconds"


def files(options: ClusterOptions, name: str) -> dict[str, list[Manifest]]:
    """By file name."""
    replicas, routers = labels(name, "replica"), labels(name, "router")
    token = f"{name}-fleet-token"
    return {
        "replicas.yaml": [
            _replicas(options, name, replicas, token),
            _addresses(name, replicas),
            disruption_budget(f"{name}-replica", replicas),
        ],
        "router.yaml": [
            deployment(
                f"{name}-router",
                routers,
                options.routers,
                router_pod(options, _route_words(options, name), routers, token),
            ),
            service(name, routers, type="ClusterIP"),
            disruption_budget(f"{name}-router", routers),
        ],
        "autoscaler.yaml": [_autoscaler(options, name, replicas), _metric_rules(name)],
        "network-policy.yaml": [_only_from_routers(name, replicas, routers)],
        "monitor.yaml": [pod_monitor(f"{name}-replica", replicas), pod_monitor(f"{name}-router", routers)],
    }


def _replicas(options: ClusterOptions, name: str, of: dict[str, str], token: str) -> Manifest:
    low, high = options.bounds
    words = [*serve_words(options), "--fleet-token-file", TOKEN_FILE]
    return deployment(f"{name}-replica", of, low if low == high else None, replica_pod(options, words, of, token))


def _addresses(name: str, of: dict[str, str]) -> Manifest:
    """A name with the address of each replica. Those that are not ready stay in it: one that drains still has requests
    of the router's, which asks each replica itself whether it is ready.
    """
    return service(f"{name}-replicas", of, clusterIP="None", publishNotReadyAddresses=True)


def _route_words(options: ClusterOptions, name: str) -> list[str]:
    return [
        *("route", f"dns://{name}-replicas:{PORT}"),
        *("--host", "0.0.0.0", "--port", str(PORT), "--log-format", "json"),
        *("--drain-timeout", str(options.drain_timeout_s), "--fleet-token-file", TOKEN_FILE),
    ]


def _autoscaler(options: ClusterOptions, name: str, of: dict[str, str]) -> Manifest:
    """More replicas while requests wait in the routers' queue."""
    low, high = options.bounds
    return {
        **head("autoscaling/v2", "HorizontalPodAutoscaler", f"{name}-replica", of),
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": f"{name}-replica"},
            "minReplicas": low,
            "maxReplicas": high,
            "metrics": [
                {
                    "type": "External",
                    "external": {
                        "metric": {"name": METRIC, "selector": {"matchLabels": {"instance_of": name}}},
                        "target": {"type": "Value", "value": f"{round(1000 * options.queue_wait_s)}m"},
                    },
                }
            ],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 0},
                "scaleDown": {
                    "stabilizationWindowSeconds": 300,
                    "policies": [{"type": "Pods", "value": 1, "periodSeconds": 60}],
                },
            },
        },
    }


def _metric_rules(name: str) -> Manifest:
    """prometheus-adapter's rule that makes the autoscaler's metric: the mean wait over a minute, 0 when nobody came.

    Source: prometheus-adapter, docs/externalmetrics.md.
    """
    chosen = f'{{pod=~"{name}-router-.*"}}'
    rule = f"""\
externalRules:
  - seriesQuery: '{METRIC}_count'
    resources: {{overrides: {{namespace: {{resource: namespace}}}}}}
    name: {{matches: '^(.*)_count$', as: '${{1}}'}}
    metricsQuery: >-
      label_replace(sum(rate({METRIC}_sum{chosen}[1m])) /
      clamp_min(sum(rate({METRIC}_count{chosen}[1m])), 1e-9), "instance_of", "{name}", "", "")
"""
    return {
        **head("v1", "ConfigMap", f"{name}-metric-rules", labels(name, "autoscaler")),
        "data": {"config.yaml": rule},
    }


def _only_from_routers(name: str, replicas: dict[str, str], routers: dict[str, str]) -> Manifest:
    """Replicas answer routers of the same namespace, and whoever scrapes metrics."""
    monitoring: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
    }
    return {
        **head("networking.k8s.io/v1", "NetworkPolicy", f"{name}-replica", replicas),
        "spec": {
            "podSelector": {"matchLabels": replicas},
            "policyTypes": ["Ingress"],
            "ingress": [
                {
                    "from": [{"podSelector": {"matchLabels": routers}}, monitoring],
                    "ports": [{"port": "http", "protocol": "TCP"}],
                }
            ],
        },
    }

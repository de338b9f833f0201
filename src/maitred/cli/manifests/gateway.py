"""Replicas behind somebody else's gateway: an InferencePool and an HTTPRoute, and the labels that AIBrix reads.

Sources: inference.networking.k8s.io/v1 InferencePool and its model server protocol (which metrics a picker reads:
vLLM's, so replicas show them too); Gateway API v1 HTTPRoute; AIBrix, pkg/constants/model.go.
"""

from __future__ import annotations

from maitred.cli.manifests.options import ClusterOptions
from maitred.cli.manifests.pods import (
    PORT,
    Manifest,
    deployment,
    disruption_budget,
    head,
    labels,
    pod_monitor,
    replica_pod,
    serve_words,
    service,
)


def files(options: ClusterOptions, name: str) -> dict[str, list[Manifest]]:
    """By file name. The model is served as `name`, for AIBrix finds Deployment and Service by the model's name."""
    of = labels(name, "replica")
    aibrix = {
        "model.aibrix.ai/name": name,
        "model.aibrix.ai/port": str(PORT),
        "model.aibrix.ai/metric-port": str(PORT),
        "model.aibrix.ai/engine": "vllm",  # whose metrics' names are shown
    }
    words = [*serve_words(options), "--served-model-name", name, "--metrics-compat", "vllm"]
    replicas = deployment(name, of, options.bounds.low, replica_pod(options, words, of, None), **aibrix)
    of_model = service(name, of, type="ClusterIP")
    of_model["metadata"]["labels"] = {**of, **aibrix}
    return {
        "replicas.yaml": [replicas, of_model, disruption_budget(name, of)],
        "inference-pool.yaml": [_pool(options, name, of), _route(options, name, of)],
        "monitor.yaml": [pod_monitor(name, of)],
    }


def _pool(options: ClusterOptions, name: str, of: dict[str, str]) -> Manifest:
    picker, _, port = options.endpoint_picker.partition(":")
    return {
        **head("inference.networking.k8s.io/v1", "InferencePool", name, of),
        "spec": {
            "selector": {"matchLabels": of},
            "targetPorts": [{"number": PORT}],
            "endpointPickerRef": {"name": picker, "port": {"number": int(port)}, "failureMode": "FailOpen"},
        },
    }


def _route(options: ClusterOptions, name: str, of: dict[str, str]) -> Manifest:
    """Without time-outs: a stream may take as long as it has tokens."""
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": name}
    return {
        **head("gateway.networking.k8s.io/v1", "HTTPRoute", name, of),
        "spec": {
            "parentRefs": [{"group": "gateway.networking.k8s.io", "kind": "Gateway", "name": options.gateway}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/"}}],
                    "backendRefs": [pool],
                    "timeouts": {"request": "0s"},
                }
            ],
        },
    }

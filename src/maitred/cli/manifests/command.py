"""`maitred manifests`: files that put a fleet behind HAProxy, on Kubernetes, on KubeRay or behind a gateway."""

from __future__ import annotations

from pathlib import Path

from maitred.cli.command import Command, Options
from maitred.cli.console import note
from maitred.cli.manifests.options import ClusterOptions, HaproxyOptions, ManifestOptions

_NEXT = {
    "haproxy": "haproxy -f {out}/haproxy.cfg",
    "kubernetes": "kubectl create secret generic {name}-fleet-token --from-literal=token=$(openssl rand -hex 32) && "
    "kubectl apply -f {out}",
    "kuberay": "kubectl apply -f {out}",
    "gateway": "kubectl apply -f {out}",
}


def _run(options: Options) -> int:
    asked = options[ManifestOptions]
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in contents(options).items():
        (out / name).write_text(content, encoding="utf-8")
        print(out / name)
    note(f"next: {_NEXT[asked.target].format(out=out, name=asked.name)}")
    return 0


def contents(options: Options) -> dict[str, str]:
    """The files, by name."""
    asked, cluster = options[ManifestOptions], options[ClusterOptions]
    if asked.target == "haproxy":
        from maitred.cli.manifests import haproxy

        return haproxy.files(options[HaproxyOptions])
    from maitred.cli.manifests import kubernetes

    made = kubernetes.files(asked.target, cluster, asked.name)
    return {name: _yaml(asked.target, manifests) for name, manifests in made.items()}


def _yaml(target: str, manifests: list[dict[str, object]]) -> str:
    import yaml

    class Plain(yaml.SafeDumper):
        """Repeats what is there twice: anchors are for machines."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    pages = yaml.dump_all(manifests, Dumper=Plain, sort_keys=False, width=120)
    return f"# Made by `maitred manifests {target}`.\n{pages}"


COMMAND = Command(
    path="manifests",
    summary="Write what puts a fleet behind HAProxy, on Kubernetes, on KubeRay, or behind a gateway.",
    run=_run,
    parts=(ManifestOptions, ClusterOptions, HaproxyOptions),
    positional="target",
    first=(
        "target",
        "out",
        "name",
        "image",
        "model",
        "replicas",
        "sleep_after_s",
        "drain_timeout_s",
        "backends",
        "listen",
    ),
    examples=(
        "maitred manifests haproxy --out proxy --backend http://10.0.0.1:8000 --backend http://10.0.0.2:8000",
        "maitred manifests kubernetes --out k8s --image registry.example/maitred:1 --replicas 2:8",
        "maitred manifests gateway --out pool --gateway inference-gateway",
    ),
)

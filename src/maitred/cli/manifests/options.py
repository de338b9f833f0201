"""What `maitred manifests` asks of its user: one class per question, checked before anything is written."""

from __future__ import annotations

import re
from dataclasses import dataclass

from maitred.bounds import Bounds
from maitred.cli.flags import option
from maitred.errors import ConfigError, did_you_mean

TARGETS = ("haproxy", "kubernetes", "kuberay", "gateway")
PRESTOP_S = 5  # until every proxy has heard that a pod goes
SPARE_S = 10  # for the last words of a server after its drain
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestOptions:
    """What to write, and where"""

    target: str = option(choices=TARGETS)
    """haproxy, kubernetes (replicas behind maitred route), kuberay (a RayService) or gateway (an InferencePool, and the
    labels that AIBrix reads)."""
    out: str = option(metavar="DIR")
    """Folder for the files; it is made. Files of the same names are replaced."""
    name: str = "maitred"
    """What everything is named after: lower-case letters, digits and dashes, at most 40."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            hint = did_you_mean(self.target, TARGETS)
            raise ConfigError(f"target is {self.target!r}{hint}; choose one of {', '.join(TARGETS)}")
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"name is {self.name!r}; it must be lower-case letters, digits and dashes, at most 40")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """Kubernetes"""

    image: str = "maitred:latest"
    """Image of maitred, as deploy/Dockerfile makes it; for kuberay one with Ray in it besides."""
    model: str | None = None
    """What replicas serve; None is what `maitred serve` takes without a model."""
    model_claim: str | None = option(None, metavar="NAME")
    """A PersistentVolumeClaim with models, mounted read-only at /models; `model` is then a folder there."""
    replicas: str = option("1:4", metavar="N|MIN:MAX")
    """Replicas, or between how many the autoscaler chooses; at least 1 (a replica that sleeps costs 150 MB:
    --sleep-after-s)."""
    sleep_after_s: float | None = None
    """Replicas without a request for so long (s) end their engine; None never."""
    routers: int = 2
    """Routers; of each other they know nothing, so any may die."""
    cpu: str = "4"
    """Processors of a replica."""
    memory: str = "8Gi"
    """Memory of a replica."""
    gpus: int = 0
    """GPUs of a replica (nvidia.com/gpu)."""
    drain_timeout_s: int = 30
    """What requests in flight may take (s) when a pod is told to end; the grace period follows from it."""
    queue_wait_s: float = 0.5
    """Mean wait in the router's queue (s) above which there are more replicas."""
    gateway: str = "inference-gateway"
    """gateway: the Gateway that the route belongs to."""
    endpoint_picker: str = option("maitred-epp:9002", metavar="SERVICE:PORT")
    """gateway: the Service of the endpoint picker."""
    ray_version: str = "2.60.0"
    """kuberay: Ray in the image."""

    def __post_init__(self) -> None:
        if Bounds.parse(self.replicas).low < 1:
            raise ConfigError(
                f"replicas is {self.replicas!r}, and Kubernetes' autoscaler keeps at least one; "
                "give 1:MAX and sleep_after_s, and an idle replica costs 150 MB"
            )
        if self.routers < 1 or self.gpus < 0 or self.drain_timeout_s < 0:
            raise ConfigError("routers must be at least 1, gpus and drain_timeout_s at least 0")
        if not re.fullmatch(r"[a-z][-a-z0-9]*:\d{1,5}", self.endpoint_picker):
            raise ConfigError(f"endpoint_picker is {self.endpoint_picker!r}; it must look like maitred-epp:9002")

    @property
    def bounds(self) -> Bounds:
        return Bounds.parse(self.replicas)

    @property
    def grace_s(self) -> int:
        """From the order to end until the kubelet kills: what precedes the drain, the drain, and what follows."""
        return PRESTOP_S + self.drain_timeout_s + SPARE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class HaproxyOptions:
    """HAProxy"""

    backends: tuple[str, ...] = option(
        ("http://127.0.0.1:8001", "http://127.0.0.1:8002"), name="--backend", metavar="URL"
    )
    """Servers behind it: http://HOST:PORT, https://HOST:PORT, or dns://NAME:PORT for all addresses of a name."""
    listen: str = option("*:8000", metavar="HOST:PORT")
    """Where it listens."""
    answer_timeout_s: int = 600
    """How long (s) an answer may be silent: one that is not streamed comes in one piece at its end."""
    max_load_ratio: float = 1.25
    """No server gets more than this times the mean of requests in flight, whatever the key says."""

    def __post_init__(self) -> None:
        if self.max_load_ratio <= 1:
            raise ConfigError(f"max_load_ratio is {self.max_load_ratio}; it must be above 1")
        if not re.fullmatch(r"[^\s:]*:\d{1,5}", self.listen):
            raise ConfigError(f"listen is {self.listen!r}; it must look like *:8000")

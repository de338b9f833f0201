"""Extensions that KServe v2's HTTP and gRPC share beside the models: one of each in a server."""

from __future__ import annotations

from dataclasses import dataclass, field

from maitred.api.tensor.classes import Labels
from maitred.api.tensor.regions import SystemRegions
from maitred.api.tensor.settings import ServerSettings

NAMES = (
    "classification",
    "sequence",
    "model_repository",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)  # as the metadata of the server has them


@dataclass(frozen=True, slots=True)
class Extensions:
    """Regions, settings and labels of a server that calls itself `server_id`."""

    server_id: str
    labels: Labels
    regions: SystemRegions = field(default_factory=SystemRegions)
    settings: ServerSettings = field(default_factory=ServerSettings)

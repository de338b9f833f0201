"""The gRPC server of a server: which services there are, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from maitred.api.grpc.inference import Extensions, InferenceService
from maitred.api.grpc.server import GrpcServer
from maitred.api.grpc.tfserving import ModelService, PredictionService
from maitred.api.http.app import App
from maitred.api.tensor.classes import classifier_of
from maitred.api.tensor.regions import SystemRegions
from maitred.api.tensor.settings import ServerSettings

EXTENSIONS = (
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
)


def grpc_server(repository: Path | None) -> Callable[[App], GrpcServer]:
    """`repository` has the files of labels."""

    def make(app: App) -> GrpcServer:
        extensions = Extensions(
            server_id=app.config.server_id,
            names=EXTENSIONS,
            regions=SystemRegions(),
            settings=ServerSettings(),
            classes=classifier_of(app, repository),
        )
        return GrpcServer(app, (InferenceService(app, extensions), PredictionService(app), ModelService(app)))

    return make

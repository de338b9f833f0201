"""The gRPC server of a server: which services there are."""

from __future__ import annotations

from maitred.api.grpc.inference import InferenceService
from maitred.api.grpc.server import GrpcServer
from maitred.api.grpc.tfserving import ModelService, PredictionService
from maitred.api.http.app import App
from maitred.api.tensor.extensions import Extensions


def grpc_server(extensions: Extensions, app: App) -> GrpcServer:
    return GrpcServer(app, (InferenceService(app, extensions), PredictionService(app), ModelService(app)))

"""Stages between a request and its lane, in order: the response cache, sequences, ensembles."""

from __future__ import annotations

from maitred.core.clock import Clock
from maitred.fleet.result_cache import ResultCache
from maitred.tensor.ensemble_flow import EnsembleFlow, OnStep
from maitred.tensor.result_cache import CacheFlow, OnLook
from maitred.tensor.runner import TensorRunner
from maitred.tensor.sequence_flow import SequenceFlow


def add_flows(runner: TensorRunner, clock: Clock, cache: ResultCache, on_look: OnLook, on_step: OnStep) -> None:
    runner.flows += [
        CacheFlow(cache, clock, on_look),
        SequenceFlow(runner.stand, clock),
        EnsembleFlow(runner.begin, runner.cancel, clock, on_step),
    ]

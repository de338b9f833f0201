"""Ensembles: `ensemble_scheduling` as a DAG of steps, checked against their models, and one request's way through it.

Pure. Tensors keep their whole shapes between steps, the batch included.
Source of the rules: `ValidateEnsembleConfig` of Triton's `core`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import msgspec

from maitred.core.errors import CheckpointError
from maitred.core.tensor_request import Tensor
from maitred.tensor.config import ANY_MESSAGE, WILDCARD, DeclaredTensor, inputs_of, outputs_of

ConfigOf = Callable[
    [str, int], ANY_MESSAGE | None
]  # of a model's version, 0 is its highest; None where it is not served


@dataclass(frozen=True, slots=True)
class EnsembleStep:
    """A model's place in an ensemble. The maps lead from the model's names to those of the ensemble's tensors."""

    model: str
    version: int  # 0 is the highest
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    ranks: Mapping[str, int]  # dimensions of each input, the batch included


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """An ensemble without faults."""

    steps: tuple[EnsembleStep, ...]
    outputs: tuple[str, ...]
    ranks: Mapping[str, int]  # dimensions of each output, the batch included


class _Side(NamedTuple):
    """A tensor as the ensemble or one of its models declares it."""

    owner: str
    data_type: str
    dims: tuple[int, ...]
    batched: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (WILDCARD, *self.dims) if self.batched else self.dims


def steps_of(config: ANY_MESSAGE) -> tuple[tuple[str, int], ...]:
    """Models and versions that an ensemble needs, each once."""
    return tuple(
        dict.fromkeys((step.model_name, max(0, step.model_version)) for step in config.ensemble_scheduling.step)
    )


def plan_of(config: ANY_MESSAGE, config_of: ConfigOf) -> EnsemblePlan:
    """Raises CheckpointError with every fault, each with what both sides say."""
    config_of = cache(config_of)  # of thousands of steps most name the same models
    faults = [*_nesting_faults(config, config_of)]
    if not faults:
        faults = [*_batch_faults(config, config_of), *_name_faults(config, config_of)]
    if not faults:
        faults = [*_order_faults(config), *_tensor_faults(config, config_of)]
    if faults:
        raise CheckpointError("; ".join(faults))
    steps = [
        EnsembleStep(
            each.model_name,
            max(0, each.model_version),
            dict(sorted(each.input_map.items())),
            dict(sorted(each.output_map.items())),
            {spec.name: len(_side("", spec.dims, spec, model).shape) for spec in inputs_of(model)},
        )
        for _, each, model in _steps(config, config_of)
    ]
    ranks = {spec.name: len(_side("", spec.model_dims, spec, config).shape) for spec in outputs_of(config)}
    return EnsemblePlan(tuple(steps), tuple(ranks), ranks)


def _steps(config: ANY_MESSAGE, config_of: ConfigOf) -> Iterator[tuple[str, ANY_MESSAGE, ANY_MESSAGE]]:
    """How a step is called, the step, and its model's config."""
    for at, step in enumerate(config.ensemble_scheduling.step):
        yield _called(at, step), step, config_of(step.model_name, max(0, step.model_version))


def _called(at: int, step: ANY_MESSAGE) -> str:
    return f"step[{at}] (model {step.model_name!r})"


def _side(owner: str, dims: tuple[int, ...], spec: DeclaredTensor, config: ANY_MESSAGE) -> _Side:
    return _Side(owner, spec.data_type, dims, config.max_batch_size > 0)


def _nesting_faults(config: ANY_MESSAGE, config_of: ConfigOf) -> Iterator[str]:
    leads_back = cache(lambda model, version: _leads_to(config.name, model, version, config_of))
    for at, step in enumerate(config.ensemble_scheduling.step):
        version = max(0, step.model_version)
        if step.model_name != config.name and config_of(step.model_name, version) is None:
            yield f"{_called(at, step)} needs a model that is not served{f', version {version}' if version else ''}"
        elif leads_back(step.model_name, version):
            yield f"{_called(at, step)} leads back to the ensemble {config.name!r} itself"


def _leads_to(name: str, model: str, version: int, config_of: ConfigOf) -> bool:
    """Through ensembles within ensembles, however deep."""
    left, seen = [(model, version)], {model}
    while left:
        model, version = left.pop()
        if model == name:
            return True
        config = config_of(model, version)
        inner = [] if config is None else [step for step in steps_of(config) if step[0] not in seen]
        seen.update(step for step, _ in inner)
        left += inner
    return False


def _batch_faults(config: ANY_MESSAGE, config_of: ConfigOf) -> Iterator[str]:
    for called, _, model in _steps(config, config_of):
        if 0 < model.max_batch_size < config.max_batch_size:
            yield f"max_batch_size is {config.max_batch_size}, and that of {called} is {model.max_batch_size}"


def _name_faults(config: ANY_MESSAGE, config_of: ConfigOf) -> Iterator[str]:
    """Tensors of models that there are not, and inputs that are left out."""
    for called, step, model in _steps(config, config_of):
        inputs = {spec.name: spec for spec in inputs_of(model)}
        outputs = [spec.name for spec in outputs_of(model)]
        for name in sorted({*step.input_map} - {*inputs}):
            yield f"{called} maps tensor {step.input_map[name]!r} to input {name!r}; inputs are {', '.join(inputs)}"
        for name in sorted({*step.output_map} - {*outputs}):
            yield f"{called} maps tensor {step.output_map[name]!r} to output {name!r}; outputs are {', '.join(outputs)}"
        for name, spec in inputs.items():
            if not spec.optional and name not in step.input_map:
                yield f"{called} has no tensor for input {name!r} of its model"


def _writers(config: ANY_MESSAGE) -> dict[str, list[int]]:
    """Return for each tensor the steps that write it; -1 is the ensemble's own input."""
    writers: dict[str, list[int]] = {each.name: [-1] for each in config.input}
    for at, step in enumerate(config.ensemble_scheduling.step):
        for name in sorted(step.output_map):
            writers.setdefault(step.output_map[name], []).append(at)
    return writers


def _order_faults(config: ANY_MESSAGE) -> Iterator[str]:
    """Each tensor that is read is written once, and no step waits for itself."""
    steps, writers = config.ensemble_scheduling.step, _writers(config)
    for tensor, written in writers.items():
        if len(written) > 1:
            both = (f"{_called(at, steps[at])}" if at >= 0 else "an input of the ensemble" for at in written)
            yield f"tensor {tensor!r} comes from {' and '.join(both)}"
    read = [(_called(at, step), tensor) for at, step in enumerate(steps) for tensor in step.input_map.values()]
    for reader, tensor in (*sorted(read), *(("the ensemble's output", each.name) for each in config.output)):
        if tensor not in writers:
            yield f"{reader} reads tensor {tensor!r}, which no step writes and which is no input"
    before = {
        at: {by for tensor in step.input_map.values() for by in writers.get(tensor, ()) if by >= 0}
        for at, step in enumerate(steps)
    }
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        yield f"the steps wait for each other: {' -> '.join(_called(at, steps[at]) for at in error.args[1])}"


def _tensor_faults(config: ANY_MESSAGE, config_of: ConfigOf) -> Iterator[str]:
    """Return faults of types and shapes, for each tensor between its writer and its readers."""
    wrote = {spec.name: _side("the ensemble", spec.model_dims, spec, config) for spec in inputs_of(config)}
    read: list[tuple[str, _Side]] = []
    for called, step, model in _steps(config, config_of):
        for spec in outputs_of(model):
            if spec.name in step.output_map:
                wrote[step.output_map[spec.name]] = _side(called, spec.dims, spec, model)
        for spec in inputs_of(model):
            if spec.name in step.input_map:
                read.append((step.input_map[spec.name], _side(called, spec.dims, spec, model)))
    read += [(spec.name, _side("the ensemble", spec.model_dims, spec, config)) for spec in outputs_of(config)]
    for tensor, reader in read:
        if tensor in wrote:
            yield from _differing(tensor, wrote[tensor], reader)


def _differing(tensor: str, writer: _Side, reader: _Side) -> Iterator[str]:
    if writer.data_type != reader.data_type:
        yield f"tensor {tensor!r} is {writer.data_type} from {writer.owner}, {reader.data_type} for {reader.owner}"
    elif not _agree(writer.dims, reader.dims) and not _agree(writer.shape, reader.shape):
        shapes = f"{list(writer.shape)} from {writer.owner}, {list(reader.shape)} for {reader.owner}"
        yield f"tensor {tensor!r} has shape {shapes}"


def _agree(one: Sequence[int], other: Sequence[int]) -> bool:
    """A dimension of any length is found out when it is there."""
    return len(one) == len(other) and all(a == b or WILDCARD in (a, b) for a, b in zip(one, other, strict=True))


# ---- one request


class StepInputs(NamedTuple):
    """A step that may go: what its model is asked."""

    number: int
    step: EnsembleStep
    inputs: tuple[Tensor, ...]


class EnsembleRun:
    """The way of one request: which steps may go, given what those before have answered."""

    def __init__(self, plan: EnsemblePlan, inputs: Collection[Tensor], wanted: Collection[str] = ()) -> None:
        """`inputs` by the ensemble's names; those that are left out are optional ones of the steps too."""
        self._plan, self._wanted = plan, tuple(wanted) or plan.outputs
        self._tensors = {tensor.name: tensor for tensor in inputs}
        self._coming = {name for step in plan.steps for name in step.outputs.values()}
        self._left = dict(enumerate(plan.steps))
        self._readers = Counter(name for step in plan.steps for name in step.inputs.values())
        self._readers.update(self._wanted)

    def ready(self) -> list[StepInputs]:
        """Return the steps that may go now, each once."""
        going = [number for number, step in self._left.items() if self._coming.isdisjoint(step.inputs.values())]
        return [self._started(number, self._left.pop(number)) for number in going]

    def _started(self, number: int, step: EnsembleStep) -> StepInputs:
        inputs = []
        for name, tensor in step.inputs.items():
            if tensor in self._tensors:
                inputs.append(_as(name, self._tensors[tensor], step.ranks[name]))
                self._let_go(tensor)
        return StepInputs(number, step, tuple(inputs))

    def _let_go(self, tensor: str) -> None:
        """Drop tensors without further readers."""
        self._readers[tensor] -= 1
        if not self._readers[tensor]:
            del self._tensors[tensor]

    def answered(self, step: EnsembleStep, outputs: Collection[Tensor]) -> None:
        """`outputs` by the model's names."""
        self._coming.difference_update(step.outputs.values())
        for tensor in outputs:
            name = step.outputs.get(tensor.name)
            if name is not None and self._readers[name]:
                self._tensors[name] = msgspec.structs.replace(tensor, name=name)

    @property
    def is_done(self) -> bool:
        return not self._left and not self._coming

    def outputs(self) -> tuple[Tensor, ...]:
        """Outputs, once every step has answered."""
        return tuple(_as(name, self._tensors[name], self._plan.ranks[name]) for name in self._wanted)


def _as(name: str, tensor: Tensor, rank: int) -> Tensor:
    """The tensor under another name; a batch of one is taken away or put before where only one side has a batch."""
    shape = tensor.shape
    if len(shape) + 1 == rank:
        shape = (1, *shape)
    elif len(shape) == rank + 1 and shape[0] == 1:
        shape = shape[1:]
    return Tensor(name, tensor.datatype, shape, tensor.data)

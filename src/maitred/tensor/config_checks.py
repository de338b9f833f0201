"""Faults of a ModelConfig alone: each rule of Triton's that a config breaks, in one line with the numbers.

A rule yields nothing for a config that it finds right. Rules see filled configs (`maitred.tensor.fill`).
Source: the checks of `model_config_utils.cc` in Triton Inference Server's repository `core`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, pairwise
from math import prod

from maitred.core.errors import CheckpointError
from maitred.model.pooling import KINDS
from maitred.tensor.config import ANY_MESSAGE, DATA_TYPES, SCHEMA, WILDCARD, parameters_of, refusals
from maitred.tensor.encoder_config import encoder_of, is_encoder

Rule = Callable[[ANY_MESSAGE], Iterator[str]]

BACKENDS = {"onnxruntime": "onnxruntime_onnx", "python": ""}  # and the platform that goes with it
PYTHON, ENTRY_POINT = "python", "entry_point"  # a backend, and the parameter that names an installed class
NO_CODE = "backend 'python' runs code of the repository; allow that with --allow-repository-code"
ENSEMBLE = "ensemble"  # a platform without a backend
MOST_INSTANCES = 1024
MOST_RUNS = 100_000  # of one warm-up
_CORRELATION_IDS = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_CONTROLS = SCHEMA.enums["ModelSequenceBatching.Control.Kind"]
_KINDS = SCHEMA.enums["ModelInstanceGroup.Kind"]
_DELAY = SCHEMA.enums["ModelQueuePolicy.TimeoutAction"]["DELAY"]
_WITH_GPUS = (_KINDS["KIND_AUTO"], _KINDS["KIND_GPU"])


def faults(config: ANY_MESSAGE) -> tuple[str, ...]:
    """Why a model with this config is not served; nothing when it may be."""
    return (*refusals(config), *chain.from_iterable(rule(config) for rule in RULES))


def is_ensemble(config: ANY_MESSAGE) -> bool:
    return bool(config.platform == ENSEMBLE or config.HasField("ensemble_scheduling"))


def runs_code(config: ANY_MESSAGE) -> bool:
    """Whether code that lies in the repository is run."""
    return bool(config.backend == PYTHON and ENTRY_POINT not in config.parameters)


def python_sequences_rule(config: ANY_MESSAGE) -> Iterator[str]:
    """A model may keep a sequence's state itself, so that it stays with one instance, and `direct` with one row."""
    if config.backend != PYTHON or not config.HasField("sequence_batching"):
        return
    count = sum(group.count * max(1, len(group.gpus)) for group in config.instance_group)
    if count > 1:
        yield f"sequence_batching of a Python model needs one instance, and instance_group has {count}"
    if config.max_batch_size > 1 and not config.sequence_batching.HasField("oldest"):
        yield (
            "sequence_batching direct of a Python model needs max_batch_size 1, for a sequence has no row of its own, "
            f"and it is {config.max_batch_size}; choose oldest"
        )


def backend_rule(config: ANY_MESSAGE) -> Iterator[str]:
    backend, platform = config.backend, config.platform
    if is_ensemble(config):
        if backend:
            yield f"an ensemble has no backend, and this one has {backend!r}"
        if platform != ENSEMBLE:
            yield f"ensemble_scheduling needs platform {ENSEMBLE!r}, not {platform!r}"
        if not config.HasField("ensemble_scheduling"):
            yield f"platform {ENSEMBLE!r} needs ensemble_scheduling"
    elif not backend and not platform:
        yield "neither platform nor backend is given, and no file of a version tells them"
    elif backend not in BACKENDS:
        given = f"backend {backend!r}" if backend else f"platform {platform!r}"
        yield f"{given} is not supported; choose one of {', '.join(sorted(BACKENDS))}, or platform {ENSEMBLE}"
    elif BACKENDS[backend] and platform != BACKENDS[backend]:
        yield f"backend {backend!r} goes with platform {BACKENDS[backend]!r}, not {platform!r}"


def batch_size_rule(config: ANY_MESSAGE) -> Iterator[str]:
    if config.max_batch_size < 0:
        yield f"max_batch_size is {config.max_batch_size}; it must be 0 (no batches) or more"


def tensors_rule(config: ANY_MESSAGE) -> Iterator[str]:
    for side in ("input", "output"):
        names = [each.name for each in getattr(config, side)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"{side} {name!r} stands {names.count(name)} times"
        for at, each in enumerate(getattr(config, side)):
            where = f"{side} {each.name!r}" if each.name else f"{side}[{at}]"
            yield from (f"{where}: {fault}" for fault in _tensor_faults(config, each))
    yield from _input_faults(config)


def _input_faults(config: ANY_MESSAGE) -> Iterator[str]:
    for each in config.input:
        if each.format and len(each.dims) != 3:
            yield f"input {each.name!r}: an image has 3 dims, and dims has {len(each.dims)}"
        if each.optional and config.max_batch_size > 0:
            yield f"input {each.name!r}: optional inputs need max_batch_size 0, and it is {config.max_batch_size}"


def _tensor_faults(config: ANY_MESSAGE, each: ANY_MESSAGE) -> Iterator[str]:
    if not each.name:
        yield "name is missing"
    if each.data_type not in DATA_TYPES.values():
        yield f"data_type has no value {each.data_type}"
    elif each.data_type == DATA_TYPES["TYPE_INVALID"]:
        yield "data_type is missing"
    if not each.dims:
        yield "dims is missing"
    elif not _are_dims(each.dims):
        yield f"dims {list(each.dims)} must be 1 or more each, or -1 for any length"
    elif each.HasField("reshape"):
        yield from _reshape_faults(config, list(each.dims), list(each.reshape.shape))


def _reshape_faults(config: ANY_MESSAGE, dims: list[int], shape: list[int]) -> Iterator[str]:
    if not _are_dims(shape):
        yield f"reshape {shape} must be 1 or more each, or -1 for any length"
    elif not shape and config.max_batch_size == 0:
        yield "an empty reshape needs max_batch_size 1 or more"
    elif _counts(dims) != _counts(shape):
        yield f"dims {dims} and reshape {shape} differ in their number of elements"


def _are_dims(dims: Sequence[int]) -> bool:
    return all(dim >= 1 or dim == WILDCARD for dim in dims)


def _counts(dims: list[int]) -> list[int]:
    """Elements between the dimensions of any length: [2, 4, -1, 6] and [8, -1, 6] both have 8 and 6."""
    at = [-1, *(i for i, dim in enumerate(dims) if dim == WILDCARD), len(dims)]
    return [prod(dims[start + 1 : end]) for start, end in pairwise(at)]


def version_rule(config: ANY_MESSAGE) -> Iterator[str]:
    policy = config.version_policy
    if policy.HasField("latest") and policy.latest.num_versions == 0:
        yield "version_policy latest has num_versions 0, so that no version would be served"
    if policy.HasField("specific") and not policy.specific.versions:
        yield "version_policy specific names no version"


def instances_rule(config: ANY_MESSAGE) -> Iterator[str]:
    for at, group in enumerate(config.instance_group):
        where = f"instance_group[{at}]"
        if not 0 <= group.count <= MOST_INSTANCES:
            yield f"{where}.count is {group.count}; it must be from 1 to {MOST_INSTANCES}"
        if group.kind not in _KINDS.values():
            yield f"{where}.kind has no value {group.kind}"
        elif group.gpus and group.kind not in _WITH_GPUS:
            yield f"{where}.gpus needs kind KIND_GPU"
        for resource in group.rate_limiter.resources:
            if not resource.name or resource.count == 0:
                given = f"{resource.name!r} and {resource.count}"
                yield f"{where}.rate_limiter: a resource has a name and a count of 1 or more, not {given}"


def batching_rule(config: ANY_MESSAGE) -> Iterator[str]:
    if config.HasField("dynamic_batching"):
        batching = config.dynamic_batching
        yield from _preferred(config, "dynamic_batching", batching.preferred_batch_size)
        yield from _priorities(batching)
        if batching.preserve_ordering:
            yield from _in_order(batching)


def _preferred(config: ANY_MESSAGE, where: str, sizes: Sequence[int]) -> Iterator[str]:
    for size in sizes:
        if not 1 <= size <= config.max_batch_size:
            yield f"{where}.preferred_batch_size {size} is not from 1 to max_batch_size ({config.max_batch_size})"


def _priorities(batching: ANY_MESSAGE) -> Iterator[str]:
    levels = batching.priority_levels
    if levels == 0:
        return
    if not 1 <= batching.default_priority_level <= levels:
        yield f"default_priority_level {batching.default_priority_level} is not from 1 to priority_levels ({levels})"
    for level in sorted(batching.priority_queue_policy):
        if not 1 <= level <= levels:
            yield f"priority_queue_policy has a level {level}, and priority_levels is {levels}"


def _in_order(batching: ANY_MESSAGE) -> Iterator[str]:
    if batching.priority_levels > 1:
        yield f"preserve_ordering needs priority_levels 1, and it is {batching.priority_levels}"
    policies = [batching.default_queue_policy, *batching.priority_queue_policy.values()]
    if any(policy.default_timeout_microseconds and policy.timeout_action == _DELAY for policy in policies):
        yield "preserve_ordering does not go with timeout_action DELAY, which serves a request after later ones"


def sequence_rule(config: ANY_MESSAGE) -> Iterator[str]:
    if not config.HasField("sequence_batching"):
        return
    batching = config.sequence_batching
    if config.response_cache.enable:
        yield "response_cache does not go with sequence_batching: an answer depends on what came before"
    slots = batching.direct.minimum_slot_utilization
    if not 0.0 <= slots <= 1.0:
        yield f"minimum_slot_utilization is {slots:g}; it must be from 0 to 1"
    yield from _preferred(config, "sequence_batching.oldest", batching.oldest.preferred_batch_size)
    yield from _control_faults(batching)


def _control_faults(batching: ANY_MESSAGE) -> Iterator[str]:
    seen: set[int] = set()
    for tensor in batching.control_input:
        if not tensor.name:
            yield "a control_input has no name"
        for control in tensor.control:
            name = next((name for name, kind in _CONTROLS.items() if kind == control.kind), str(control.kind))
            if control.kind in seen:
                yield f"{name} is given by two tensors"
            seen.add(control.kind)
            yield from (f"control_input {tensor.name!r}: {name} {fault}" for fault in _one_control(control))


def _one_control(control: ANY_MESSAGE) -> Iterator[str]:
    given = (control.int32_false_true, control.fp32_false_true, control.bool_false_true)
    pairs = [values for values in given if values]
    if control.kind == _CONTROLS["CONTROL_SEQUENCE_CORRID"]:
        allowed = [DATA_TYPES[name] for name in _CORRELATION_IDS]
        if pairs:
            yield "has no values for false and true"
        if control.data_type not in allowed:
            yield f"needs a data_type of {', '.join(_CORRELATION_IDS)}"
    elif len(pairs) != 1:
        yield f"needs exactly one of int32_false_true, fp32_false_true and bool_false_true, and has {len(pairs)}"
    elif len(pairs[0]) != 2:
        yield f"needs two values, for false and for true, and has {len(pairs[0])}"


def ensemble_rule(config: ANY_MESSAGE) -> Iterator[str]:
    """Faults that can be told without the models of its steps."""
    if not config.HasField("ensemble_scheduling"):
        return
    for field in ("instance_group", "model_warmup"):
        if getattr(config, field):
            yield f"an ensemble has no {field}; its steps' models have"
    if config.HasField("optimization"):
        yield "an ensemble has no optimization; its steps' models have"
    steps = config.ensemble_scheduling.step
    if not steps:
        yield "ensemble_scheduling has no step"
    for at, step in enumerate(steps):
        for field in ("model_name", "input_map", "output_map"):
            if not getattr(step, field):
                yield f"ensemble_scheduling.step[{at}] has no {field}"


def warmup_rule(config: ANY_MESSAGE) -> Iterator[str]:
    for at, warmup in enumerate(config.model_warmup):
        where = f"model_warmup[{at}]"
        if warmup.batch_size > config.max_batch_size:
            yield f"{where}.batch_size {warmup.batch_size} is over max_batch_size ({config.max_batch_size})"
        if warmup.count > MOST_RUNS:
            yield f"{where}.count is {warmup.count}; it must be at most {MOST_RUNS}, for the start waits for them"
        for name in sorted(warmup.inputs):
            given = warmup.inputs[name]
            if given.WhichOneof("input_data_type") is None:
                yield f"{where} input {name!r} needs one of zero_data, random_data and input_data_file"
            if not all(dim >= 1 for dim in given.dims):
                yield f"{where} input {name!r}: dims {list(given.dims)} must be 1 or more each"


def files_rule(config: ANY_MESSAGE) -> Iterator[str]:
    """Names of files stay in the model's folder."""
    named = [("default_model_filename", config.default_model_filename)]
    named += [(f"output {each.name!r} label_filename", each.label_filename) for each in config.output]
    named += [
        (f"model_warmup[{at}] input {name!r}", given.input_data_file)
        for at, warmup in enumerate(config.model_warmup)
        for name, given in warmup.inputs.items()
    ]
    named += [
        (f"state {state.input_name!r}", initial.data_file)
        for state in config.sequence_batching.state
        for initial in state.initial_state
    ]
    for where, name in named:
        if name.startswith("/") or ".." in name.split("/") or "\0" in name:
            yield f"{where}: {name!r} leads out of the model's folder"


def parameters_rule(config: ANY_MESSAGE) -> Iterator[str]:
    for key, value in parameters_of(config).items():
        form = next((form for known, form in PARAMETER_FORMS.items() if re.fullmatch(known, key)), ".*")
        if re.fullmatch(form, value, re.DOTALL) is None:
            yield f"parameters {key!r} is {value!r}, which is not of the form {form}"


def encoder_rule(config: ANY_MESSAGE) -> Iterator[str]:
    if is_encoder(config):
        try:
            encoder_of(config)
        except CheckpointError as error:
            yield str(error)


PARAMETER_FORMS = {  # keys and values, as regular expressions; a key that matches none is told to the model or ignored
    r"intra_op_thread_count|inter_op_thread_count": r"\d{1,4}",
    r"execution_mode": r"[01]",
    r"enable_mem_arena|enable_mem_pattern": r"[01]|true|false",
    r"label\..+": r"[1-9]\d{0,17}",
    r"queue_delay": r"auto",
    r"execution_timeout_ms": r"[1-9]\d{0,8}",
    r"length_buckets": r"[1-9]\d{0,8}(, *[1-9]\d{0,8})*",
    r"precision": r"float|int8-dynamic|int8-static",
    r"min_cosine": r"0(\.\d+)?|1(\.0+)?",
    r"task": r"embedding",
    r"pooling": "|".join(KINDS),
    r"normalize": r"true|false",
    r"max_length": r"[1-9]\d{0,6}",
}
RULES: tuple[Rule, ...] = (
    backend_rule,
    batch_size_rule,
    tensors_rule,
    version_rule,
    instances_rule,
    batching_rule,
    sequence_rule,
    ensemble_rule,
    warmup_rule,
    files_rule,
    parameters_rule,
    python_sequences_rule,
    encoder_rule,
)

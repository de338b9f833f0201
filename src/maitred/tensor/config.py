"""ModelConfig of Triton: read from `config.pbtxt` (protobuf text), told as JSON, and as the tensors it declares."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from maitred.core.errors import CheckpointError, did_you_mean
from maitred.tensor.schema import marked_fields, message_classes, read_schema

# Without this package maitred.tensor.schema has raised already.
from google.protobuf import json_format, text_format  # isort: skip

TABLE = """
enum DataType
  0 TYPE_INVALID
  1 TYPE_BOOL
  2 TYPE_UINT8
  3 TYPE_UINT16
  4 TYPE_UINT32
  5 TYPE_UINT64
  6 TYPE_INT8
  7 TYPE_INT16
  8 TYPE_INT32
  9 TYPE_INT64
  10 TYPE_FP16
  11 TYPE_FP32
  12 TYPE_FP64
  13 TYPE_STRING
  14 TYPE_BF16

message ModelConfig
  = 1 string name
  = 2 string platform
  = 17 string backend
  ~ 25 string runtime -- there is one build of each backend
  = 3 ModelVersionPolicy version_policy
  = 4 int32 max_batch_size
  = 5 ModelInput* input
  = 6 ModelOutput* output
  ! 20 BatchInput* batch_input -- inputs made of a ragged batch
  ! 21 BatchOutput* batch_output -- outputs cut by another tensor's shape
  = 12 ModelOptimizationPolicy optimization
  = 11 ModelDynamicBatching dynamic_batching @scheduling_choice
  = 13 ModelSequenceBatching sequence_batching @scheduling_choice
  = 15 ModelEnsembling ensemble_scheduling @scheduling_choice
  = 7 ModelInstanceGroup* instance_group
  = 8 string default_model_filename
  ! 9 {string:string} cc_model_filenames -- another file for each kind of GPU
  ~ 10 {string:string} metric_tags -- metrics are labelled by model and version
  = 14 {string:ModelParameter} parameters
  = 16 ModelWarmup* model_warmup
  ! 18 ModelOperations model_operations -- a library of operators would be loaded into the engine
  = 19 ModelTransactionPolicy model_transaction_policy
  ! 23 ModelRepositoryAgents model_repository_agents -- agents rewrite or check a folder before it is read
  = 24 ModelResponseCache response_cache
  ~ 26 ModelMetrics model_metrics -- histograms have buckets of their own

message ModelRateLimiter
  = 1 ModelRateLimiter.Resource* resources
  = 2 uint32 priority
message ModelRateLimiter.Resource
  = 1 string name
  = 2 bool global
  = 3 uint32 count

message ModelInstanceGroup
  = 1 string name
  = 4 ModelInstanceGroup.Kind kind
  = 2 int32 count
  = 6 ModelRateLimiter rate_limiter
  = 3 int32* gpus
  ~ 8 ModelInstanceGroup.SecondaryDevice* secondary_devices -- of TensorRT
  ~ 5 string* profile -- of TensorRT
  ! 7 bool passive -- an instance that is given no requests
  ~ 9 string host_policy -- threads are placed by the system
enum ModelInstanceGroup.Kind
  0 KIND_AUTO
  1 KIND_GPU
  2 KIND_CPU
  3 KIND_MODEL
message ModelInstanceGroup.SecondaryDevice
  ~ 1 ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind kind
  ~ 2 int64 device_id
enum ModelInstanceGroup.SecondaryDevice.SecondaryDeviceKind
  0 KIND_NVDLA

message ModelTensorReshape
  = 1 int64* shape
message ModelInput
  = 1 string name
  = 2 DataType data_type
  = 3 ModelInput.Format format
  = 4 int64* dims
  = 5 ModelTensorReshape reshape
  ! 6 bool is_shape_tensor -- of TensorRT
  ! 7 bool allow_ragged_batch -- batches are not ragged; length_buckets lets unlike lengths share one
  = 8 bool optional
  ! 9 bool is_non_linear_format_io -- of TensorRT
enum ModelInput.Format
  0 FORMAT_NONE
  1 FORMAT_NHWC
  2 FORMAT_NCHW
message ModelOutput
  = 1 string name
  = 2 DataType data_type
  = 3 int64* dims
  = 5 ModelTensorReshape reshape
  = 4 string label_filename
  ! 6 bool is_shape_tensor -- of TensorRT
  ! 7 bool is_non_linear_format_io -- of TensorRT

message BatchInput
  ! 1 BatchInput.Kind kind
  ! 2 string* target_name
  ! 3 DataType data_type
  ! 4 string* source_input
enum BatchInput.Kind
  0 BATCH_ELEMENT_COUNT
  1 BATCH_ACCUMULATED_ELEMENT_COUNT
  2 BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO
  3 BATCH_MAX_ELEMENT_COUNT_AS_SHAPE
  4 BATCH_ITEM_SHAPE
  5 BATCH_ITEM_SHAPE_FLATTEN
message BatchOutput
  ! 1 string* target_name
  ! 2 BatchOutput.Kind kind
  ! 3 string* source_input
enum BatchOutput.Kind
  0 BATCH_SCATTER_WITH_INPUT_SHAPE

message ModelVersionPolicy
  = 1 ModelVersionPolicy.Latest latest @policy_choice
  = 2 ModelVersionPolicy.All all @policy_choice
  = 3 ModelVersionPolicy.Specific specific @policy_choice
message ModelVersionPolicy.Latest
  = 1 uint32 num_versions
message ModelVersionPolicy.All
message ModelVersionPolicy.Specific
  = 1 int64* versions

message ModelOptimizationPolicy
  = 1 ModelOptimizationPolicy.Graph graph
  ~ 2 ModelOptimizationPolicy.ModelPriority priority -- of TensorRT
  ~ 3 ModelOptimizationPolicy.Cuda cuda -- CUDA graphs are not captured
  = 4 ModelOptimizationPolicy.ExecutionAccelerators execution_accelerators
  ~ 5 ModelOptimizationPolicy.PinnedMemoryBuffer input_pinned_memory -- copies to a GPU are the runtime's
  ~ 6 ModelOptimizationPolicy.PinnedMemoryBuffer output_pinned_memory -- copies to a GPU are the runtime's
  ~ 7 uint32 gather_kernel_buffer_threshold -- inputs are gathered on the host
  ~ 8 bool eager_batching -- a batch is gathered when it starts
message ModelOptimizationPolicy.Graph
  = 1 int32 level
enum ModelOptimizationPolicy.ModelPriority
  0 PRIORITY_DEFAULT
  1 PRIORITY_MAX
  2 PRIORITY_MIN
message ModelOptimizationPolicy.Cuda
  ~ 1 bool graphs
  ~ 2 bool busy_wait_events
  ~ 3 ModelOptimizationPolicy.Cuda.GraphSpec* graph_spec
  ~ 4 bool output_copy_stream
message ModelOptimizationPolicy.Cuda.GraphSpec
  ~ 1 int32 batch_size
  ~ 2 {string:ModelOptimizationPolicy.Cuda.GraphSpec.Shape} input
  ~ 3 ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound graph_lower_bound
message ModelOptimizationPolicy.Cuda.GraphSpec.Shape
  ~ 1 int64* dim
message ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound
  ~ 1 int32 batch_size
  ~ 2 {string:ModelOptimizationPolicy.Cuda.GraphSpec.Shape} input
message ModelOptimizationPolicy.ExecutionAccelerators
  = 1 ModelOptimizationPolicy.ExecutionAccelerators.Accelerator* gpu_execution_accelerator
  = 2 ModelOptimizationPolicy.ExecutionAccelerators.Accelerator* cpu_execution_accelerator
message ModelOptimizationPolicy.ExecutionAccelerators.Accelerator
  = 1 string name
  = 2 {string:string} parameters
message ModelOptimizationPolicy.PinnedMemoryBuffer
  ~ 1 bool enable

message ModelQueuePolicy
  = 1 ModelQueuePolicy.TimeoutAction timeout_action
  = 2 uint64 default_timeout_microseconds
  = 3 bool allow_timeout_override
  = 4 uint32 max_queue_size
enum ModelQueuePolicy.TimeoutAction
  0 REJECT
  1 DELAY
message ModelDynamicBatching
  = 1 int32* preferred_batch_size
  = 2 uint64 max_queue_delay_microseconds
  = 3 bool preserve_ordering
  = 4 uint64 priority_levels
  = 5 uint64 default_priority_level
  = 6 ModelQueuePolicy default_queue_policy
  = 7 {uint64:ModelQueuePolicy} priority_queue_policy

message ModelSequenceBatching
  = 3 ModelSequenceBatching.StrategyDirect direct @strategy_choice
  = 4 ModelSequenceBatching.StrategyOldest oldest @strategy_choice
  = 1 uint64 max_sequence_idle_microseconds
  = 2 ModelSequenceBatching.ControlInput* control_input
  = 5 ModelSequenceBatching.State* state
  ! 6 bool iterative_sequence -- a request that is put back until its model is done
message ModelSequenceBatching.Control
  = 1 ModelSequenceBatching.Control.Kind kind
  = 2 int32* int32_false_true
  = 3 float* fp32_false_true
  = 5 bool* bool_false_true
  = 4 DataType data_type
enum ModelSequenceBatching.Control.Kind
  0 CONTROL_SEQUENCE_START
  1 CONTROL_SEQUENCE_READY
  2 CONTROL_SEQUENCE_END
  3 CONTROL_SEQUENCE_CORRID
message ModelSequenceBatching.ControlInput
  = 1 string name
  = 2 ModelSequenceBatching.Control* control
message ModelSequenceBatching.InitialState
  = 1 DataType data_type
  = 2 int64* dims
  = 3 bool zero_data @state_data
  = 4 string data_file @state_data
  = 5 string name
message ModelSequenceBatching.State
  = 1 string input_name
  = 2 string output_name
  = 3 DataType data_type
  = 4 int64* dims
  = 5 ModelSequenceBatching.InitialState* initial_state
  ~ 6 bool use_same_buffer_for_input_output -- a state has a buffer for each side
  ~ 7 bool use_growable_memory -- a state has a buffer for each side
message ModelSequenceBatching.StrategyDirect
  = 1 uint64 max_queue_delay_microseconds
  = 2 float minimum_slot_utilization
message ModelSequenceBatching.StrategyOldest
  = 1 int32 max_candidate_sequences
  = 2 int32* preferred_batch_size
  = 3 uint64 max_queue_delay_microseconds
  = 4 bool preserve_ordering

message ModelEnsembling
  = 1 ModelEnsembling.Step* step
  ~ 2 uint32 max_inflight_requests -- the queue bounds them
message ModelEnsembling.Step
  = 1 string model_name
  = 2 int64 model_version
  = 3 {string:string} input_map
  = 4 {string:string} output_map
  ! 5 string model_namespace -- a repository is one namespace

message ModelParameter
  = 1 string string_value
message ModelWarmup
  = 1 string name
  = 2 uint32 batch_size
  = 3 {string:ModelWarmup.Input} inputs
  = 4 uint32 count
message ModelWarmup.Input
  = 1 DataType data_type
  = 2 int64* dims
  = 3 bool zero_data @input_data_type
  = 4 bool random_data @input_data_type
  = 5 string input_data_file @input_data_type
message ModelOperations
  ! 1 string* op_library_filename
message ModelTransactionPolicy
  ! 1 bool decoupled -- one request, one answer
message ModelRepositoryAgents
  ! 1 ModelRepositoryAgents.Agent* agents
message ModelRepositoryAgents.Agent
  ! 1 string name
  ! 2 {string:string} parameters
message ModelResponseCache
  = 1 bool enable
message ModelMetrics
  ~ 1 ModelMetrics.MetricControl* metric_control
message ModelMetrics.MetricControl
  ~ 1 ModelMetrics.MetricControl.MetricIdentifier metric_identifier
  ~ 2 ModelMetrics.MetricControl.HistogramOptions histogram_options @metric_options
message ModelMetrics.MetricControl.MetricIdentifier
  ~ 1 string family
message ModelMetrics.MetricControl.HistogramOptions
  ~ 1 double* buckets
"""

SCHEMA = read_schema("inference", TABLE)
MESSAGES = message_classes(SCHEMA)
ModelConfig = MESSAGES["ModelConfig"]
DATA_TYPES = SCHEMA.enums["DataType"]


# ---- configs read and asked


MOST_BYTES = 4 << 20  # of a config.pbtxt; the largest of Triton's own are under 100 kB
MOST_OF_REASON = 300  # characters; the parser quotes what it could not read
WILDCARD = -1  # a dimension of any length
ANY_MESSAGE = Any  # protobuf makes its classes at run time; this one is a ModelConfig

_TYPE_NAMES = {number: name for name, number in DATA_TYPES.items()}
_NO_FIELD = re.compile(r'Message type "inference\.(?P<message>[\w.]+)" has no field named "(?P<field>\w+)"')


@dataclass(frozen=True, slots=True)
class DeclaredTensor:
    """An input or output as the config declares it. `dims` are without the batch; -1 is any length."""

    name: str
    data_type: str  # TYPE_FP32
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None = None  # what the model itself takes or gives, where that differs
    optional: bool = False

    @property
    def model_dims(self) -> tuple[int, ...]:
        return self.dims if self.reshape is None else self.reshape


def parse_config(content: bytes, source: str) -> ANY_MESSAGE:
    """The ModelConfig of a `config.pbtxt`. Raises CheckpointError with file, line and column."""
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{source} has over {MOST_BYTES} bytes, which no config has")
    config = ModelConfig()
    try:
        text_format.Parse(_decoded(content, source), config)
    except text_format.ParseError as error:
        place = f":{error.GetLine()}:{error.GetColumn()}" if error.GetLine() else ""
        raise CheckpointError(f"{source}{place}: {_reason(str(error))}") from None
    except (ValueError, RecursionError) as error:  # a string that is no UTF-8, or far too many brackets
        raise CheckpointError(f"{source}: {error}") from None
    return config


def config_from_json(text: str, name: str) -> ANY_MESSAGE:
    """The ModelConfig of a request to load the model `name`. Raises CheckpointError."""
    try:
        return json_format.Parse(text, ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        reason = " ".join(str(error).split())[:MOST_OF_REASON]
        raise CheckpointError(f"the config given for {name!r} is no ModelConfig: {reason}") from None


def _decoded(content: bytes, source: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        before = content[: error.start]
        line, column = before.count(b"\n") + 1, error.start - before.rfind(b"\n")
        raise CheckpointError(f"{source}:{line}:{column}: byte 0x{content[error.start]:02x} is no UTF-8") from None


def _reason(error: str) -> str:
    """Return the reason without position and line, which are told before it; in our words for an unknown name."""
    text = re.sub(r"^\d+:\d+ : (?:'.*?': (?=[A-Z]))?", "", error, flags=re.DOTALL).rstrip(".")[:MOST_OF_REASON]
    unknown = _NO_FIELD.search(text)
    if unknown is None:
        return text
    message, name = unknown["message"], unknown["field"]
    names = [field.name for field in SCHEMA.messages[message]]
    return f"{message} has no field {name!r}{did_you_mean(name, names)}"


def hints(config: ANY_MESSAGE) -> tuple[str, ...]:
    """Fields that are set and ignored, each with why that changes no answer."""
    return tuple(f"{where}: {line.note}" for where, line in marked_fields(SCHEMA, config) if line.mark == "~")


def refusals(config: ANY_MESSAGE) -> tuple[str, ...]:
    """Fields that are set, would change answers, and are not built."""
    return tuple(
        f"{where} is not supported: {line.note}" for where, line in marked_fields(SCHEMA, config) if line.mark == "!"
    )


def inputs_of(config: ANY_MESSAGE) -> tuple[DeclaredTensor, ...]:
    return tuple(_spec(each, optional=each.optional) for each in config.input)


def outputs_of(config: ANY_MESSAGE) -> tuple[DeclaredTensor, ...]:
    return tuple(_spec(each, optional=False) for each in config.output)


def _spec(each: ANY_MESSAGE, *, optional: bool) -> DeclaredTensor:
    reshape = tuple(each.reshape.shape) if each.HasField("reshape") else None
    return DeclaredTensor(each.name, type_name(each.data_type), tuple(each.dims), reshape, optional)


def type_name(number: int) -> str:
    """`TYPE_FP32` of 11; a number that no type has is told as it is."""
    return _TYPE_NAMES.get(number, str(number))


def parameters_of(config: ANY_MESSAGE) -> dict[str, str]:
    """The model's `parameters`, in the order of their names."""
    return {key: config.parameters[key].string_value for key in sorted(config.parameters)}


# ---- as JSON

Fields = Callable[[ANY_MESSAGE], Iterable[tuple[Any, Any]]]


def written(config: ANY_MESSAGE) -> dict[str, Any]:
    """The fields that are set, as JSON has them: enums by name, numbers as numbers."""
    return _json(config, lambda message: message.ListFields())


def complete(config: ANY_MESSAGE) -> dict[str, Any]:
    """All fields, as Triton answers for a model's config: only messages that are not set are left out."""
    return _json(config, _all_fields)


def _all_fields(message: ANY_MESSAGE) -> Iterable[tuple[Any, Any]]:
    for field in message.DESCRIPTOR.fields:
        if not field.has_presence or message.HasField(field.name):
            yield field, getattr(message, field.name)


def _json(message: ANY_MESSAGE, fields: Fields) -> dict[str, Any]:
    return {field.name: _json_field(field, value, fields) for field, value in fields(message)}


def _json_field(field: Any, value: Any, fields: Fields) -> Any:
    if isinstance(value, Mapping):
        inner = field.message_type.fields_by_name["value"]
        return {str(key): _json_value(inner, value[key], fields) for key in value}
    if field.is_repeated:
        return [_json_value(field, each, fields) for each in value]
    return _json_value(field, value, fields)


def _json_value(field: Any, value: Any, fields: Fields) -> Any:
    if field.message_type is not None:
        return _json(value, fields)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value
